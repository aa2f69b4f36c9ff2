-- A list by status and type, or by relayer with either, skips no row. One statement, because processes of an earlier version
-- name these indexes. MySQL cannot change an index only if that is still to be done, and this may be run again.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.statistics
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND index_name = 'transactions_status'
     AND column_name = 'type') = 0,
    'ALTER TABLE transactions
        DROP KEY transactions_status, ADD KEY transactions_status (status, type, createdAt, id),
        DROP KEY transactions_relayer, ADD KEY transactions_relayer (relayer, status, type, createdAt, id)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
