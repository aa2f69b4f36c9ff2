-- A relayer's final report that waits for the chain, when Baton asked the relayer to cancel its record, and the records
-- that a relayer's list must show: the ones that Baton bound there last. MySQL cannot add a column or an index only if it
-- is not there, and this may be run again.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND column_name = 'relayer_says') = 0,
    'ALTER TABLE transactions ADD COLUMN relayer_says MEDIUMTEXT',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND column_name = 'cancel_requested_at') = 0,
    'ALTER TABLE transactions ADD COLUMN cancel_requested_at DATETIME(3)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
-- The token of the claim under which nothing has been sent. Processes of an earlier version do not write it: they may have
-- sent.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND column_name = 'claim_unsent') = 0,
    'ALTER TABLE transactions ADD COLUMN claim_unsent BINARY(16)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.statistics
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND index_name = 'transactions_bound_at') = 0,
    'ALTER TABLE transactions ADD KEY transactions_bound_at (oz_relayer_url, bound_at)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
