-- Lists go by the time of creation: imported rows have their relayer's id, which does not begin with the time. One statement,
-- because processes of an earlier version name these indexes. MySQL cannot change an index only if that is still to be done,
-- and this may be run again.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.statistics
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND index_name = 'transactions_status'
     AND column_name = 'createdAt') = 0,
    'ALTER TABLE transactions
        DROP KEY transactions_created_at, ADD KEY transactions_created_at (createdAt, id),
        DROP KEY transactions_status, ADD KEY transactions_status (status, createdAt, id),
        DROP KEY transactions_type, ADD KEY transactions_type (type, createdAt, id),
        DROP KEY transactions_relayer, ADD KEY transactions_relayer (relayer, createdAt, id),
        DROP KEY transactions_in_doubt, ADD KEY transactions_in_doubt (in_doubt, createdAt, id)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
