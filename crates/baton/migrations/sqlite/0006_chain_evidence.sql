-- A relayer's final report that waits for the chain, and when Baton asked the relayer to cancel its record.
ALTER TABLE transactions ADD COLUMN relayer_says TEXT;
ALTER TABLE transactions ADD COLUMN cancel_requested_at INTEGER;
-- The token of the claim under which nothing has been sent. Processes of an earlier version do not write it: they may have
-- sent.
ALTER TABLE transactions ADD COLUMN claim_unsent BLOB;
-- The records that a relayer's list must show: the ones that Baton bound there last.
CREATE INDEX IF NOT EXISTS transactions_bound_at ON transactions (relayer_url, bound_at) WHERE relayer_tx_id IS NOT NULL;
