-- A relayer's final report that waits for the chain, and when Baton asked the relayer to cancel its record.
ALTER TABLE transactions ADD COLUMN relayer_says TEXT;
ALTER TABLE transactions ADD COLUMN cancel_requested_at INTEGER;
-- 1 while nothing has been sent under the claim. Processes of an earlier version leave it empty: they may have sent.
ALTER TABLE transactions ADD COLUMN claim_unsent INTEGER;
-- The records that a relayer's list must show: the ones that Baton bound there last.
CREATE INDEX IF NOT EXISTS transactions_bound_at ON transactions (relayer_url, bound_at) WHERE relayer_tx_id IS NOT NULL;
