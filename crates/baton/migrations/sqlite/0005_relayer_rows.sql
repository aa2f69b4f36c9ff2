-- What each relayer holds: how many rows, their lowest and highest nonce, and the age of what it has not signed. `check_at` is
-- there so that the index alone answers.
CREATE INDEX IF NOT EXISTS transactions_open_at_relayer ON transactions (relayer_url, relayer_nonce, bound_at, check_at)
    WHERE relayer_url IS NOT NULL AND check_at IS NOT NULL;
-- What each relayer has ended lately.
CREATE INDEX IF NOT EXISTS transactions_ended_at_relayer ON transactions (relayer_url, updated_at, check_at)
    WHERE relayer_url IS NOT NULL AND check_at IS NULL;
