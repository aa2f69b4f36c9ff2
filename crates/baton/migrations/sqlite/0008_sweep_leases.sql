-- Until when one consumer does a sweep for all of them.
CREATE TABLE IF NOT EXISTS sweep_leases (
    sweep TEXT    NOT NULL PRIMARY KEY,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
