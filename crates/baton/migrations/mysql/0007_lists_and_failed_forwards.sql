-- Lists by type, by relayer and of unknown outcomes have their indexes since the first migration; SQLite gets them here.

-- Gasless requests that failed on the chain and whose nonce another request took. Posted again, they would only cost gas.
CREATE TABLE IF NOT EXISTS failed_forwards (
    digest BINARY(32)  NOT NULL,
    at     DATETIME(3) NOT NULL,
    CONSTRAINT failed_forwards_pkey PRIMARY KEY (digest)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
