//! The schema of the embedded queue and every statement that it runs.

pub(super) const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS queue_names (
    id         INTEGER PRIMARY KEY,
    name       TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE IF NOT EXISTS queue_messages (
    id         INTEGER PRIMARY KEY,  -- grows in the order sent
    queue      INTEGER NOT NULL,
    visible_at INTEGER NOT NULL,     -- milliseconds since 1970, like all times here
    token      INTEGER,              -- of the current lease; NULL without one
    receives   INTEGER NOT NULL,
    sent_at    INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    attributes TEXT,                 -- a JSON object; NULL when empty
    body       BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS queue_messages_due ON queue_messages (queue, visible_at, id, token);

CREATE TABLE IF NOT EXISTS queue_dead_messages (
    id         INTEGER PRIMARY KEY,  -- grows in the order buried
    queue      INTEGER NOT NULL,
    receives   INTEGER NOT NULL,
    sent_at    INTEGER NOT NULL,
    buried_at  INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    reason     TEXT NOT NULL,
    by_queue   INTEGER NOT NULL,     -- 1: buried by the queue itself
    attributes TEXT,
    body       BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS queue_dead_messages_order ON queue_dead_messages (queue, id);
CREATE UNIQUE INDEX IF NOT EXISTS queue_dead_messages_by_id ON queue_dead_messages (queue, message_id);
";

pub(super) const INSERT: &str = "
INSERT INTO queue_messages (queue, visible_at, token, receives, sent_at, expires_at, message_id, attributes, body)
VALUES (:queue, :visible_at, NULL, 0, :sent_at, :expires_at, :message_id, :attributes, :body)";

pub(super) const NEXT_VISIBLE: &str =
    "SELECT visible_at FROM queue_messages WHERE queue = ?1 ORDER BY visible_at, id LIMIT 1";

pub(super) const DUE: &str = "
SELECT id, message_id, body, attributes, receives, sent_at, expires_at FROM queue_messages
WHERE queue = :queue AND visible_at <= :now ORDER BY visible_at, id LIMIT :max";

pub(super) const LEASE: &str = "
UPDATE queue_messages SET visible_at = :visible_at, token = :token, receives = receives + 1 WHERE id = :id";

pub(super) const ACK: &str = "DELETE FROM queue_messages WHERE id = ?1 AND token = ?2";

pub(super) const RELEASE: &str = "UPDATE queue_messages SET visible_at = ?3, token = NULL WHERE id = ?1 AND token = ?2";

pub(super) const UNDO_LEASE: &str = "
UPDATE queue_messages SET visible_at = ?3, token = NULL, receives = receives - 1 WHERE id = ?1 AND token = ?2";

pub(super) const EXTEND: &str = "UPDATE queue_messages SET visible_at = ?3 WHERE id = ?1 AND token = ?2";

pub(super) const HELD: &str = "SELECT id FROM queue_messages WHERE id = ?1 AND token = ?2";

pub(super) const COPY_TO_DEAD: &str = "
INSERT INTO queue_dead_messages (queue, receives, sent_at, buried_at, message_id, reason, by_queue, attributes, body)
SELECT queue, receives, sent_at, ?2, message_id, ?3, ?4, attributes, body FROM queue_messages WHERE id = ?1";

pub(super) const DELETE: &str = "DELETE FROM queue_messages WHERE id = ?1";

pub(super) const EXPIRED: &str = "
SELECT id FROM queue_messages
WHERE queue = :queue AND visible_at <= :before AND expires_at <= :now ORDER BY visible_at, id LIMIT :max";

pub(super) const DEAD_EXPIRED: &str = "
SELECT id FROM queue_dead_messages WHERE queue = :queue AND buried_at <= :before ORDER BY id LIMIT :max";

pub(super) const DEAD_OLDEST: &str = "SELECT buried_at FROM queue_dead_messages WHERE queue = ?1 ORDER BY id LIMIT 1";

pub(super) const DEAD_DELETE: &str = "DELETE FROM queue_dead_messages WHERE id = ?1";

pub(super) const DEAD_ROW_ID: &str = "SELECT id FROM queue_dead_messages WHERE queue = ?1 AND message_id = ?2";

pub(super) const DEAD_LIST: &str = "
SELECT message_id, body, attributes, reason, receives, sent_at, buried_at, by_queue FROM queue_dead_messages
WHERE queue = :queue AND id > :after ORDER BY id LIMIT :max";

pub(super) const COPY_FROM_DEAD: &str = "
INSERT INTO queue_messages (queue, visible_at, token, receives, sent_at, expires_at, message_id, attributes, body)
SELECT queue, ?2, NULL, 0, sent_at, ?3, message_id, attributes, body FROM queue_dead_messages WHERE id = ?1";

pub(super) const DEPTH_DUE: &str = "SELECT COUNT(*), MIN(id) FROM queue_messages WHERE queue = ?1 AND visible_at <= ?2";

pub(super) const DEPTH_HIDDEN: &str = "
SELECT COUNT(token), COUNT(*) - COUNT(token) FROM queue_messages WHERE queue = ?1 AND visible_at > ?2";

pub(super) const DEPTH_DEAD: &str = "SELECT COUNT(*) FROM queue_dead_messages WHERE queue = ?1";

pub(super) const SENT_AT: &str = "SELECT sent_at FROM queue_messages WHERE id = ?1";
