-- Which transaction a relayer signed with a nonce: tells equal calls on the chain apart. MySQL cannot add an index only if
-- it is not there, and this may be run again.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.statistics
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND index_name = 'transactions_relayer_nonce') = 0,
    'ALTER TABLE transactions ADD KEY transactions_relayer_nonce (oz_relayer_url, relayer_nonce)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
