-- Writes a batch and says which rows were refused, by their places from 1, and why. In parts: what a bad row undoes is its
-- part alone, whose rows are then written one by one. So no row is written more than twice, wherever the bad ones are.
-- What is no fault of a row (see `is_row_fault`) goes to the caller, and nothing is kept.
CREATE FUNCTION users_insert(
    ids uuid[], names text[], emails text[], OUT added bigint, OUT places integer[], OUT reasons text[]
) LANGUAGE plpgsql AS $$
DECLARE
    -- A part costs a subtransaction: with 8 to a full batch that is hardly seen, with 32 it is.
    part_size CONSTANT integer := 125;
    part_first integer := 1;
    part_last integer;
    written bigint;
BEGIN
    added := 0;
    places := '{}';
    reasons := '{}';
    WHILE part_first <= cardinality(ids) LOOP
        part_last := LEAST(part_first + part_size - 1, cardinality(ids));
        BEGIN
            -- A message may come twice, and the row is there already; any other conflict is a fault of the row.
            INSERT INTO users (id, name, email) SELECT new.id, new.name, new.email
            FROM UNNEST(
                ids[part_first:part_last], names[part_first:part_last], emails[part_first:part_last]
            ) AS new (id, name, email)
            ON CONFLICT (id) DO NOTHING;
            GET DIAGNOSTICS written = ROW_COUNT;
            added := added + written;
        EXCEPTION
            -- 54000 stands for its whole class; of these the row is not to blame.
            WHEN statement_too_complex OR too_many_columns OR too_many_arguments THEN RAISE;
            WHEN data_exception OR integrity_constraint_violation OR with_check_option_violation
                OR SQLSTATE '54000' OR raise_exception THEN
            FOR place IN part_first..part_last LOOP
                BEGIN
                    INSERT INTO users (id, name, email) VALUES (ids[place], names[place], emails[place])
                    ON CONFLICT (id) DO NOTHING;
                    GET DIAGNOSTICS written = ROW_COUNT;
                    added := added + written;
                EXCEPTION
                    WHEN statement_too_complex OR too_many_columns OR too_many_arguments THEN RAISE;
                    WHEN data_exception OR integrity_constraint_violation OR with_check_option_violation
                        OR SQLSTATE '54000' OR raise_exception THEN
                    places := places || place;
                    reasons := reasons || SQLERRM;
                END;
            END LOOP;
        END;
        part_first := part_last + 1;
    END LOOP;
END $$;
