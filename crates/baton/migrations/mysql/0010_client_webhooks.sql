-- Where clients want to be notified. `api_key` owns the endpoint; '' gets the events of every key.
CREATE TABLE IF NOT EXISTS webhook_endpoints (
    id              VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    api_key         VARBINARY(1020)   NOT NULL,
    url             TEXT              NOT NULL,
    events          VARCHAR(512)      NOT NULL,
    description     TEXT,
    secret          VARCHAR(255)      NOT NULL,
    previous_secret VARCHAR(255),
    previous_until  DATETIME(3),
    version         BIGINT UNSIGNED   NOT NULL,
    created_at      DATETIME(3)       NOT NULL,
    updated_at      DATETIME(3)       NOT NULL,
    disabled_at     DATETIME(3),
    disabled_reason TEXT,
    failing_since   DATETIME(3),
    failures        INT UNSIGNED      NOT NULL,
    paused_until    DATETIME(3),
    CONSTRAINT webhook_endpoints_pkey PRIMARY KEY (id),
    KEY webhook_endpoints_api_key (api_key)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What happened to transactions, written with the change itself. Only events that an endpoint asks for.
CREATE TABLE IF NOT EXISTS events (
    id             VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    api_key        VARBINARY(1020)   NOT NULL,
    transaction_id VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    position       BIGINT UNSIGNED   NOT NULL,
    type           VARCHAR(64)       NOT NULL,
    created_at     DATETIME(3)       NOT NULL,
    payload        MEDIUMTEXT        NOT NULL,
    CONSTRAINT events_pkey PRIMARY KEY (id),
    KEY events_api_key (api_key, created_at),
    KEY events_created_at (created_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row for each event and endpoint. `due_at` is the next attempt, or the end of the current one's lease; NULL once the
-- event is delivered or given up. An event that waits for an earlier one of its transaction is due in the year 9999.
CREATE TABLE IF NOT EXISTS webhook_deliveries (
    endpoint_id    VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    event_id       VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    transaction_id VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    position       BIGINT UNSIGNED   NOT NULL,
    created_at     DATETIME(3)       NOT NULL,
    due_at         DATETIME(3),
    lease          BINARY(16),
    attempts       INT UNSIGNED      NOT NULL,
    ended_at       DATETIME(3),
    ended          VARCHAR(20),
    -- There are no partial indexes here: this stands in for one of the deliveries that wait.
    open           TINYINT(1) GENERATED ALWAYS AS (CASE WHEN due_at IS NOT NULL THEN 1 END) STORED,
    CONSTRAINT webhook_deliveries_pkey PRIMARY KEY (endpoint_id, event_id),
    KEY webhook_deliveries_due (endpoint_id, open, due_at, created_at),
    -- Events of one transaction reach an endpoint in order.
    KEY webhook_deliveries_open (endpoint_id, transaction_id, position),
    KEY webhook_deliveries_given_up (endpoint_id, ended, created_at),
    KEY webhook_deliveries_ended (ended_at),
    KEY webhook_deliveries_event (event_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS webhook_attempts (
    endpoint_id VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    id          VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    event_id    VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number      INT UNSIGNED      NOT NULL,
    at          DATETIME(3)       NOT NULL,
    duration_ms BIGINT UNSIGNED   NOT NULL,
    status      SMALLINT UNSIGNED,
    error       TEXT,
    answer      TEXT,
    CONSTRAINT webhook_attempts_pkey PRIMARY KEY (endpoint_id, id),
    KEY webhook_attempts_at (at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
