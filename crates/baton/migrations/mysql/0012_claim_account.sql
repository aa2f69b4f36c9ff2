-- The token of the claim and the account that the relayer listed then. Processes of an earlier version do not write it. MySQL cannot
-- add a column only if it is not there, and this may be run again.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND column_name = 'claim_account') = 0,
    'ALTER TABLE transactions ADD COLUMN claim_account VARCHAR(128)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
