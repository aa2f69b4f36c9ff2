-- One row for each accepted transaction. Ids are UUIDv7: newest last, so the list needs no index on time.
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
    claim_absent_since  INTEGER,
    relayer_url         TEXT,
    relayer_tx_id       TEXT,
    bound_at            INTEGER,
    relayer_progress    TEXT,
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

-- One relayer transaction belongs to one row at most: the last guard against binding it twice.
CREATE UNIQUE INDEX transactions_relayer_tx_id ON transactions (relayer_tx_id) WHERE relayer_tx_id IS NOT NULL;
-- Lists by status, newest first.
CREATE INDEX transactions_status ON transactions (status, id);
-- What the reconciler should look at next. Final rows are not in it.
CREATE INDEX transactions_check_at ON transactions (check_at) WHERE check_at IS NOT NULL;
-- Claims, few at any time: those in doubt are counted and shown.
CREATE INDEX transactions_claims ON transactions (claim_relayer) WHERE claim_consumer IS NOT NULL;

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
