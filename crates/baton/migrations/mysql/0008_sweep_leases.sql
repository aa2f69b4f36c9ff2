-- Until when one consumer does a sweep for all of them.
CREATE TABLE IF NOT EXISTS sweep_leases (
    sweep VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    until DATETIME(3) NOT NULL,
    CONSTRAINT sweep_leases_pkey PRIMARY KEY (sweep)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
