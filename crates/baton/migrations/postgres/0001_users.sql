-- One row for each enrolled user.
CREATE TABLE users (
    id         uuid        NOT NULL CONSTRAINT users_pkey PRIMARY KEY,
    name       text        NOT NULL CONSTRAINT users_name_length CHECK (char_length(name) BETWEEN 1 AND 255),
    email      text        NOT NULL CONSTRAINT users_email_length CHECK (char_length(email) BETWEEN 1 AND 255),
    created_at timestamptz NOT NULL DEFAULT now()
);

-- Dead letters that can never become a user, byte for byte, for an operator to read.
CREATE TABLE users_set_aside (
    message_id   text COLLATE "C" NOT NULL CONSTRAINT users_set_aside_pkey PRIMARY KEY,
    error        text             NOT NULL,
    body         bytea            NOT NULL,
    set_aside_at timestamptz      NOT NULL DEFAULT now()
);
