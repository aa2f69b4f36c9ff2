-- The store's clock, one row: it goes on from here when the server's clock is set.
CREATE TABLE IF NOT EXISTS store_clock (
    id              TINYINT UNSIGNED NOT NULL,
    time_ms         BIGINT           NOT NULL,
    server_ms       BIGINT           NOT NULL,
    wall_ms         BIGINT           NOT NULL,
    steady_since_ms BIGINT           NOT NULL,
    slip_ms         BIGINT           NOT NULL,
    CONSTRAINT store_clock_pkey PRIMARY KEY (id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
