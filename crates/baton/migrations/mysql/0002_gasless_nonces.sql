-- Which transaction took which nonce of a signer at a forwarder. One that failed has not used it: the next to come takes
-- it over.
CREATE TABLE IF NOT EXISTS gasless_nonces (
    signer         VARCHAR(96) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    nonce          BIGINT UNSIGNED NOT NULL,
    transaction_id VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    CONSTRAINT gasless_nonces_pkey PRIMARY KEY (signer, nonce)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
