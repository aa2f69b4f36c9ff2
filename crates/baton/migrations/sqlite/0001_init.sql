-- One row for each accepted transaction. Ids are UUIDv7: newest last (imported rows excepted).
CREATE TABLE transactions (
    id                  BLOB    NOT NULL PRIMARY KEY,
    kind                TEXT    NOT NULL,
    status              TEXT    NOT NULL,
    version             INTEGER NOT NULL,
    request             TEXT    NOT NULL,
    imported            INTEGER NOT NULL,
    api_key             TEXT    NOT NULL,
    created_at          INTEGER NOT NULL,
    updated_at          INTEGER NOT NULL,
    confirmed_at        INTEGER,
    hash                TEXT,
    sender              TEXT,
    claim_consumer      TEXT,
    claim_token         BLOB,
    claim_relayer       TEXT,
    claim_at            INTEGER,
    claim_doubt         TEXT,
    claim_open_until    INTEGER,
    claim_unknown       TEXT,
    claim_absent_since  INTEGER,
    relayer_url         TEXT,
    relayer_tx_id       TEXT,
    bound_at            INTEGER,
    relayer_progress    TEXT,
    relayer_nonce       INTEGER,
    forgotten_since     INTEGER,
    attempts            INTEGER NOT NULL,
    reroutes            INTEGER NOT NULL,
    replays             INTEGER NOT NULL,
    auto_replayed       INTEGER NOT NULL,
    avoid_relayer       TEXT,
    failed_by           TEXT,
    error_message       TEXT,
    result              TEXT,
    check_at            INTEGER
) STRICT, WITHOUT ROWID;

-- Lists by status, newest first.
CREATE INDEX transactions_status ON transactions (status, id);
-- What the reconciler should look at next: each open row stands in exactly one of these three.
CREATE INDEX transactions_due_claimed ON transactions (check_at) WHERE claim_consumer IS NOT NULL;
CREATE INDEX transactions_due_bound ON transactions (check_at)
    WHERE claim_consumer IS NULL AND relayer_tx_id IS NOT NULL AND check_at IS NOT NULL;
CREATE INDEX transactions_due_waiting ON transactions (check_at)
    WHERE claim_consumer IS NULL AND relayer_tx_id IS NULL AND check_at IS NOT NULL;
-- Few at any time, counted often.
CREATE INDEX transactions_forgotten ON transactions (status) WHERE forgotten_since IS NOT NULL;

-- Every relayer transaction that was ever bound, and to which row: one row at most, and for good, even when the row
-- has since gone to another relayer. The last guard against binding a record twice.
CREATE TABLE relayer_transactions (
    relayer_tx_id  TEXT NOT NULL PRIMARY KEY,
    transaction_id BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- What clients called their requests, so that a repeated one is the same transaction.
CREATE TABLE idempotency_keys (
    api_key        TEXT NOT NULL,
    key            TEXT NOT NULL,
    body_sha256    BLOB NOT NULL,
    transaction_id BLOB NOT NULL,
    PRIMARY KEY (api_key, key)
) STRICT, WITHOUT ROWID;

-- What happened to each transaction, in order.
CREATE TABLE timeline (
    transaction_id BLOB    NOT NULL,
    seq            INTEGER NOT NULL,
    at             INTEGER NOT NULL,
    action         TEXT    NOT NULL,
    detail         TEXT    NOT NULL,
    PRIMARY KEY (transaction_id, seq)
) STRICT, WITHOUT ROWID;

-- Webhooks that came before their transaction was bound.
CREATE TABLE early_webhooks (
    relayer_tx_id TEXT    NOT NULL,
    seq           INTEGER NOT NULL,
    received_at   INTEGER NOT NULL,
    record        TEXT    NOT NULL,
    PRIMARY KEY (relayer_tx_id, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX early_webhooks_received_at ON early_webhooks (received_at);

-- Which consumers are alive: a claim of one that is not can be taken over.
CREATE TABLE consumers (
    id      TEXT    NOT NULL PRIMARY KEY,
    seen_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
