-- Where clients want to be notified. `api_key` owns the endpoint; '' gets the events of every key.
CREATE TABLE IF NOT EXISTS webhook_endpoints (
    id              BLOB    NOT NULL PRIMARY KEY,
    api_key         TEXT    NOT NULL,
    url             TEXT    NOT NULL,
    events          TEXT    NOT NULL,
    description     TEXT,
    secret          TEXT    NOT NULL,
    previous_secret TEXT,
    previous_until  INTEGER,
    version         INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    disabled_at     INTEGER,
    disabled_reason TEXT,
    failing_since   INTEGER,
    failures        INTEGER NOT NULL,
    paused_until    INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS webhook_endpoints_api_key ON webhook_endpoints (api_key);

-- What happened to transactions, written with the change itself. Only events that an endpoint asks for.
CREATE TABLE IF NOT EXISTS events (
    id             TEXT    NOT NULL PRIMARY KEY,
    api_key        TEXT    NOT NULL,
    transaction_id BLOB    NOT NULL,
    position       INTEGER NOT NULL,
    type           TEXT    NOT NULL,
    created_at     INTEGER NOT NULL,
    payload        TEXT    NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS events_api_key ON events (api_key, created_at);
CREATE INDEX IF NOT EXISTS events_created_at ON events (created_at);

-- One row for each event and endpoint. `due_at` is the next attempt, or the end of the current one's lease; NULL once the
-- event is delivered or given up. An event that waits for an earlier one of its transaction is due in the year 9999.
CREATE TABLE IF NOT EXISTS webhook_deliveries (
    endpoint_id    BLOB    NOT NULL,
    event_id       TEXT    NOT NULL,
    transaction_id BLOB    NOT NULL,
    position       INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    due_at         INTEGER,
    lease          BLOB,
    attempts       INTEGER NOT NULL,
    ended_at       INTEGER,
    ended          TEXT,
    PRIMARY KEY (endpoint_id, event_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS webhook_deliveries_due ON webhook_deliveries (endpoint_id, due_at, created_at) WHERE due_at IS NOT NULL;
-- Events of one transaction reach an endpoint in order.
CREATE INDEX IF NOT EXISTS webhook_deliveries_open ON webhook_deliveries (endpoint_id, transaction_id, position) WHERE due_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS webhook_deliveries_given_up ON webhook_deliveries (endpoint_id, created_at) WHERE ended = 'given-up';
CREATE INDEX IF NOT EXISTS webhook_deliveries_ended ON webhook_deliveries (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS webhook_deliveries_event ON webhook_deliveries (event_id);

CREATE TABLE IF NOT EXISTS webhook_attempts (
    endpoint_id BLOB    NOT NULL,
    id          BLOB    NOT NULL,
    event_id    TEXT    NOT NULL,
    number      INTEGER NOT NULL,
    at          INTEGER NOT NULL,
    duration_ms INTEGER NOT NULL,
    status      INTEGER,
    error       TEXT,
    answer      TEXT,
    PRIMARY KEY (endpoint_id, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS webhook_attempts_at ON webhook_attempts (at);
