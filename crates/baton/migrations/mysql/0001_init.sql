-- MySQL 8 and MariaDB 10.6 or later. Each statement can be run again: DDL is not transactional here, and a migration that
-- was cut off is simply repeated.
--
-- Text is utf8mb4 and compared byte by byte. Keys that must tell apart whatever differs are VARBINARY, because every
-- collation that both servers know ignores spaces at the end. Times are UTC.

-- One row for each accepted transaction. Ids are UUIDv7: newest last (imported rows excepted).
CREATE TABLE IF NOT EXISTS transactions (
    id                  VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    type                VARCHAR(20)       NOT NULL,
    status              VARCHAR(20)       NOT NULL,
    version             BIGINT UNSIGNED   NOT NULL,
    request             JSON              NOT NULL,
    imported            TINYINT(1)        NOT NULL,
    api_key             VARCHAR(255)      NOT NULL,
    createdAt           DATETIME(3)       NOT NULL,
    updatedAt           DATETIME(3)       NOT NULL,
    confirmedAt         DATETIME(3),
    -- 66 characters, if the relayer is to be believed.
    hash                VARCHAR(255),
    sender              VARCHAR(255),
    claim_consumer      VARCHAR(255),
    claim_token         BINARY(16),
    claim_relayer       VARCHAR(512),
    claim_at            DATETIME(3),
    claim_doubt         MEDIUMTEXT,
    claim_open_until    DATETIME(3),
    claim_unknown       VARCHAR(20),
    claim_absent_since  DATETIME(3),
    oz_relayer_url      VARCHAR(512),
    ozRelayerTxId       VARCHAR(512),
    bound_at            DATETIME(3),
    relayer_progress    VARCHAR(20),
    relayer_nonce       BIGINT UNSIGNED,
    forgotten_since     DATETIME(3),
    attempts            INT UNSIGNED      NOT NULL,
    reroutes            INT UNSIGNED      NOT NULL,
    replays             INT UNSIGNED      NOT NULL,
    auto_replayed       TINYINT(1)        NOT NULL,
    avoid_relayer       VARCHAR(512),
    failed_by           VARCHAR(20),
    error_message       MEDIUMTEXT,
    result              JSON,
    check_at            DATETIME(3),
    -- There are no partial indexes here; these three stand in for them. What an open row waits for: one thing at a time.
    waits_for           VARCHAR(8) CHARACTER SET ascii COLLATE ascii_bin GENERATED ALWAYS AS (
        CASE WHEN claim_consumer IS NOT NULL THEN 'claimed'
             WHEN check_at IS NULL THEN NULL
             WHEN ozRelayerTxId IS NOT NULL THEN 'bound'
             ELSE 'waiting' END) STORED,
    -- Who has it, or may have it.
    relayer             VARCHAR(512) GENERATED ALWAYS AS (COALESCE(oz_relayer_url, claim_relayer)) STORED,
    -- Few at any time, looked for often.
    in_doubt            TINYINT(1) GENERATED ALWAYS AS (
        CASE WHEN claim_doubt IS NOT NULL OR forgotten_since IS NOT NULL THEN 1 END) STORED,
    CONSTRAINT transactions_pkey PRIMARY KEY (id),
    KEY transactions_status (status, id),
    KEY transactions_type (type, id),
    KEY transactions_created_at (createdAt),
    KEY transactions_due (waits_for, check_at),
    KEY transactions_relayer (relayer, id),
    KEY transactions_in_doubt (in_doubt, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Every relayer transaction that was ever bound, and to which row: one row at most, and for good, even when the row
-- has since gone to another relayer. The last guard against binding a record twice.
CREATE TABLE IF NOT EXISTS relayer_transactions (
    relayer_tx_id  VARBINARY(2048) NOT NULL,
    transaction_id VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    CONSTRAINT relayer_transactions_pkey PRIMARY KEY (relayer_tx_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What clients called their requests, so that a repeated one is the same transaction.
CREATE TABLE IF NOT EXISTS idempotency_keys (
    api_key         VARBINARY(1020) NOT NULL,
    idempotency_key VARBINARY(1020) NOT NULL,
    body_sha256     BINARY(32)      NOT NULL,
    transaction_id  VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (api_key, idempotency_key)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What happened to each transaction, in order.
CREATE TABLE IF NOT EXISTS timeline (
    transaction_id VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    seq            INT UNSIGNED NOT NULL,
    at             DATETIME(3)  NOT NULL,
    action         VARCHAR(64)  NOT NULL,
    detail         MEDIUMTEXT   NOT NULL,
    CONSTRAINT timeline_pkey PRIMARY KEY (transaction_id, seq)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Webhooks that came before their transaction was bound.
CREATE TABLE IF NOT EXISTS early_webhooks (
    relayer_tx_id VARBINARY(2048) NOT NULL,
    seq           INT UNSIGNED    NOT NULL,
    received_at   DATETIME(3)     NOT NULL,
    record        MEDIUMTEXT      NOT NULL,
    CONSTRAINT early_webhooks_pkey PRIMARY KEY (relayer_tx_id, seq),
    KEY early_webhooks_received_at (received_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Which consumers are alive: a claim of one that is not can be taken over.
CREATE TABLE IF NOT EXISTS consumers (
    id      VARCHAR(255) NOT NULL,
    seen_at DATETIME(3)  NOT NULL,
    CONSTRAINT consumers_pkey PRIMARY KEY (id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
