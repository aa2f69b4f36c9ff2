-- Which transaction took which nonce of a signer at a forwarder. One that failed has not used it: the next to come takes
-- it over.
CREATE TABLE gasless_nonces (
    signer         TEXT    NOT NULL,
    nonce          INTEGER NOT NULL,
    transaction_id BLOB    NOT NULL,
    PRIMARY KEY (signer, nonce)
) STRICT, WITHOUT ROWID;
