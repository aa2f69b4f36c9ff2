-- The account that the relayer listed when the claim was made. Processes of an earlier version do not write it.
ALTER TABLE transactions ADD COLUMN claim_account TEXT;
