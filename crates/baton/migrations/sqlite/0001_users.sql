-- One row for each enrolled user.
CREATE TABLE users (
    id         BLOB    NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL CONSTRAINT users_name_length CHECK (length(name) BETWEEN 1 AND 255),
    email      TEXT    NOT NULL CONSTRAINT users_email_length CHECK (length(email) BETWEEN 1 AND 255),
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Dead letters that can never become a user, byte for byte, for an operator to read.
CREATE TABLE users_set_aside (
    message_id   TEXT    NOT NULL PRIMARY KEY,
    error        TEXT    NOT NULL,
    body         BLOB    NOT NULL,
    set_aside_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
