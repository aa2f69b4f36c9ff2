-- The block that a transaction's hash is in, once anybody has said so. MySQL cannot add a column only if it is not there,
-- and this may be run again. As the last column it is added without copying the table.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND column_name = 'block_number') = 0,
    'ALTER TABLE transactions ADD COLUMN block_number BIGINT UNSIGNED',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
