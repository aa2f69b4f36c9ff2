-- Which transaction a relayer signed with a nonce: tells equal calls on the chain apart.
CREATE INDEX IF NOT EXISTS transactions_relayer_nonce ON transactions (relayer_url, relayer_nonce) WHERE relayer_nonce IS NOT NULL;
