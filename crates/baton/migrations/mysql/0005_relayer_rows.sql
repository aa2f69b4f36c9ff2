-- What each relayer holds (open rows, their nonces, the age of what it has not signed), and what it has ended lately: final
-- rows have no `waits_for`, and are in the order of their end. Waiting rows have no relayer. MySQL cannot add an index only
-- if it is not there, and this may be run again.
SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.statistics
     WHERE table_schema = DATABASE() AND table_name = 'transactions' AND index_name = 'transactions_at_relayer') = 0,
    'ALTER TABLE transactions ADD KEY transactions_at_relayer (relayer, waits_for, updatedAt, relayer_nonce, bound_at)',
    'DO 0');
PREPARE change_table FROM @change;
EXECUTE change_table;
DEALLOCATE PREPARE change_table;
