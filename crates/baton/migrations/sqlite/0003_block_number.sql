-- The block that a transaction's hash is in, once anybody has said so.
ALTER TABLE transactions ADD COLUMN block_number INTEGER;
