-- A list by status and type, or by relayer with either, skips no row: it merges the rows of each status and type. So does a
-- list by type alone, which no longer has an index of its own. A waiting row has no relayer and is in one index less.
DROP INDEX IF EXISTS transactions_status;
DROP INDEX IF EXISTS transactions_type;
DROP INDEX IF EXISTS transactions_relayer;
CREATE INDEX transactions_status ON transactions (status, kind, created_at, id);
CREATE INDEX transactions_relayer ON transactions (COALESCE(relayer_url, claim_relayer), status, kind, created_at, id)
    WHERE COALESCE(relayer_url, claim_relayer) IS NOT NULL;
