-- The token of the claim and the account that the relayer listed then. Processes of an earlier version do not write it.
ALTER TABLE transactions ADD COLUMN claim_account TEXT;
