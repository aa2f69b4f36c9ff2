-- Lists by type, by relayer and of unknown outcomes, newest first.
CREATE INDEX IF NOT EXISTS transactions_type ON transactions (kind, id);
CREATE INDEX IF NOT EXISTS transactions_relayer ON transactions (COALESCE(relayer_url, claim_relayer), id);
CREATE INDEX IF NOT EXISTS transactions_in_doubt ON transactions (id)
    WHERE check_at IS NOT NULL AND (claim_doubt IS NOT NULL OR forgotten_since IS NOT NULL);

-- Gasless requests that failed on the chain and whose nonce another request took. Posted again, they would only cost gas.
CREATE TABLE IF NOT EXISTS failed_forwards (
    digest BLOB    NOT NULL PRIMARY KEY,
    at     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
