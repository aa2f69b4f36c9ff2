-- Lists go by the time of creation: imported rows have their relayer's id, which does not begin with the time.
DROP INDEX IF EXISTS transactions_status;
DROP INDEX IF EXISTS transactions_type;
DROP INDEX IF EXISTS transactions_relayer;
DROP INDEX IF EXISTS transactions_in_doubt;
CREATE INDEX transactions_status ON transactions (status, created_at, id);
CREATE INDEX transactions_type ON transactions (kind, created_at, id);
CREATE INDEX transactions_relayer ON transactions (COALESCE(relayer_url, claim_relayer), created_at, id);
CREATE INDEX transactions_in_doubt ON transactions (created_at, id)
    WHERE check_at IS NOT NULL AND (claim_doubt IS NOT NULL OR forgotten_since IS NOT NULL);
