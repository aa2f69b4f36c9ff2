//! The table of all environment variables. It feeds the reader, `.env.example`, the help of each service and
//! `docs/operations/configuration.md` (see [`super::render`]); tests compare the files with it.
//!
//! A variable exists because an operator has a reason to set it. A value that only tests change is marked hidden; a
//! value that never changes is a named constant in the module of its section.

use super::definition::Kind::{
    Address, Choice, Count, Flag, IpAddress, List, Millis, Number, Path, Port, Text, Url, Wei,
};
use super::definition::Readers::{
    All, Apis, Consumers, Notifiers, Relay, RelayApi, RelayConsumer, RelayerCallers, Users, UsersConsumer,
};
use super::definition::{Kind, Variable, var};

/// A group of variables that belong together, in the order of the documentation.
pub struct Section {
    /// The heading.
    pub title: &'static str,
    /// The name of its block in the documentation page.
    pub key: &'static str,
    /// Its variables, the hidden ones included.
    pub variables: &'static [Variable],
}

/// All variables, in the order of the documentation.
pub fn variables() -> impl Iterator<Item = &'static Variable> {
    SECTIONS.iter().flat_map(|section| section.variables)
}

/// The variable of this name. Reading one that is not in the table is a mistake in this crate.
pub(super) fn variable(name: &str) -> &'static Variable {
    variables().find(|variable| variable.name == name).expect("every variable that is read is in the table")
}

/// Variables of earlier versions that are no longer read, each with what applies instead.
pub const REMOVED: &[(&str, &str)] = &[
    ("BODY_BYTES_MAX", "a request body has at most 262144 bytes"),
    ("RETRY_DELAY_MAX_MS", "the delay between two attempts doubles up to 60 s"),
    ("RELAYER_HEALTH_TIMEOUT_MS", "a health check of a relayer times out after 500 ms"),
    ("BREAKER_OPEN_MAX_MS", "a circuit breaker stays open for at most 60 s"),
    ("RECONCILE_SUBMITTED_MAX_MS", "lookups double from RECONCILE_SUBMITTED_MS up to 5 minutes"),
    ("RECONCILE_DEAD_LETTERS_MS", "dead letters are checked every 5 s"),
    ("USERS_DATABASE_CONNECTIONS", "a process opens up to USERS_BATCH_CONCURRENCY + 2 connections"),
    (
        "USERS_DLQ_PAUSE_MAX_MS",
        "while the database fails, the pause between two checks grows up to 12 times USERS_DLQ_INTERVAL_MS",
    ),
];

const HTTP: Kind = Url(&["http", "https"]);
const QUEUES: Kind = Choice(&["embedded", "sqs", "rabbitmq"]);

/// Every variable, grouped as in the documentation.
pub const SECTIONS: &[Section] = &[
    Section {
        title: "Service",
        key: "service",
        variables: &[
            var("BATON_DATA_DIR", Path, "./.baton", All, "Directory of the embedded engine's files; a local disk"),
            var("HOST", IpAddress, "127.0.0.1", All, "Address to listen on; 0.0.0.0 in a container"),
            var(
                "PORT",
                Port,
                "3000",
                All,
                "Port to listen on (queue-consumer: 3001, users-api: 3002, users-consumer: 3003, notifier: 3004)",
            ),
            var(
                "ADMIN_PORT",
                Port,
                "",
                All,
                "Port of `/live`, `/ready`, `/health` and `/metrics`, which no client of PORT can block; unset: PORT + 1000",
            ),
            var("RELAY_API_KEY", Text, "", Apis, "API key named `default`, at least 32 characters; optional if RELAY_API_KEYS is set")
                .required()
                .secret(),
            var("RELAY_API_KEYS", List, "", Apis, "Named API keys of at least 32 characters, as name:sha256hex pairs, separated by commas"),
            var("REQUEST_TIMEOUT_MS", Millis, "30000", All, "Maximum duration of one HTTP request"),
            var(
                "CONNECTIONS_MAX",
                Count,
                "2048",
                All,
                "Maximum open connections to PORT. At the limit, a new connection replaces the longest-idle one of the \
                 address with the most connections, never one with a request in progress, and of an address with as \
                 many only one idle for a second; if there is none, it gets 503",
            ),
            var(
                "CONNECTIONS_PER_ADDRESS_MAX",
                Count,
                "1024",
                All,
                "Maximum open connections to PORT from one address (IPv6: one /64). At the limit, a new connection \
                 replaces an idle one of that address or gets 503. Behind a proxy all clients share one address: set \
                 it to CONNECTIONS_MAX and limit clients in the proxy",
            ),
            var(
                "IDLE_TIMEOUT_MS",
                Millis,
                "30000",
                All,
                "Maximum wait for a complete request head, from connecting or from the last answer",
            ),
            var(
                "WRITE_TIMEOUT_MS",
                Millis,
                "15000",
                All,
                "A connection whose client reads none of its answer for this long is reset",
            ),
        ],
    },
    Section {
        title: "Databases, queues and cache",
        key: "engines",
        variables: &[
            var(
                "DATABASE_URL",
                Url(&["mysql", "mariadb"]),
                "",
                Relay,
                "Relay store, mysql://user:password@host:port/database; unset: embedded",
            )
            .secret(),
            var("DATABASE_CONNECTIONS", Count, "16", Relay, "Maximum connections of one process to DATABASE_URL"),
            var(
                "REDIS_URL",
                Url(&["redis", "rediss"]),
                "",
                Relay,
                "Shared cache of finished transactions, redis://host:port, or rediss:// over TLS; unset: one cache per process",
            )
            .secret(),
            var(
                "RELAY_QUEUE",
                QUEUES,
                "",
                Relay,
                "`embedded`, `sqs` or `rabbitmq`; unset: `sqs` if SQS_QUEUE_URL is set, else `embedded`",
            ),
            var(
                "RELAY_QUEUE_NAME",
                Text,
                "relay-transactions",
                Relay,
                "Name of the relay queue on RabbitMQ; its dead-letter queue is NAME-dlq",
            ),
            var(
                "QUEUE_AUTO_CREATE",
                Flag,
                "false",
                All,
                "Create missing queues, at start and later; otherwise a missing queue is an error at start",
            ),
            var("SQS_QUEUE_URL", HTTP, "", Relay, "URL of the relay queue on SQS"),
            var("SQS_DLQ_URL", HTTP, "", Relay, "URL of the relay dead-letter queue on SQS"),
            var("SQS_ENDPOINT_URL", HTTP, "", All, "SQS endpoint other than that of AWS; needs the two keys below"),
            var(
                "AWS_ACCESS_KEY_ID",
                Text,
                "",
                All,
                "Key id for SQS_ENDPOINT_URL; without an endpoint the default credential chain applies",
            ),
            var("AWS_SECRET_ACCESS_KEY", Text, "", All, "Secret key for SQS_ENDPOINT_URL").secret(),
            var("AWS_REGION", Text, "ap-northeast-2", All, "Region of the SQS queues"),
            var("RABBITMQ_URL", Url(&["amqp", "amqps"]), "", All, "Broker, amqp://user:password@host:port/vhost")
                .secret(),
        ],
    },
    Section {
        title: "Relayers",
        key: "relayers",
        variables: &[
            var(
                "OZ_RELAYER_URLS",
                List,
                "",
                RelayerCallers,
                "Relayers, separated by commas: base URLs, or …/api/v1/relayers/{id}",
            )
            .required(),
            var(
                "OZ_RELAYER_API_KEY",
                List,
                "",
                RelayerCallers,
                "API key of the relayers: one for all, or one per URL, separated by commas",
            )
            .required()
            .secret(),
            var(
                "WEBHOOK_SIGNING_KEY",
                List,
                "",
                RelayApi,
                "Keys with which relayers sign their webhooks, separated by commas: any of them is accepted; at least 32 \
                 characters each. URL=KEY, with a URL of OZ_RELAYER_URLS: accepted for that relayer's transactions only",
            )
            .required()
            .secret(),
            var(
                "RELAY_MODE",
                Choice(&["fire-and-forget", "confirm"]),
                "fire-and-forget",
                Relay,
                "`fire-and-forget`: webhooks report the final status; `confirm`: poll the relayer until it is final",
            ),
        ],
    },
    Section {
        title: "Chain and gasless transactions",
        key: "chain",
        variables: &[
            var(
                "RPC_URL",
                HTTP,
                "",
                Relay,
                "JSON-RPC endpoint of the chain; with it the chain, not a relayer, decides the outcome of a \
                 transaction. Several URLs, separated by commas: Baton switches to the next when one fails",
            )
            .secret(),
            var(
                "CHAIN_DECIDES",
                Flag,
                "true",
                Relay,
                "With RPC_URL: compare relayers' final reports with the chain; `false`: believe them",
            )
            .hidden(),
            var(
                "CHAIN_FINALITY_BLOCKS",
                Number,
                "12",
                RelayConsumer,
                "Confirmations after which a block counts as final",
            ),
            var(
                "RPC_RATE_PER_SECOND",
                Number,
                "200",
                RelayConsumer,
                "Maximum JSON-RPC calls per second of one consumer; 0: no limit. A confirmed transaction takes two",
            ),
            var("RPC_TIMEOUT_MS", Millis, "5000", Relay, "Timeout of one JSON-RPC call").hidden(),
            var(
                "CHAIN_ID",
                Count,
                "",
                Relay,
                "Expected id of the chain; relayers on another get no work. Unset: that of RPC_URL. Required for gasless \
                 transactions",
            ),
            var(
                "FORWARDER_ADDRESS",
                Address,
                "",
                Relay,
                "Address of the ERC2771Forwarder; unset: gasless transactions are off",
            ),
            var("FORWARDER_NAME", Text, "ERC2771Forwarder", Relay, "Name in the forwarder's EIP-712 domain"),
            var(
                "FORWARDER_GAS_OVERHEAD",
                Count,
                "100000",
                Relay,
                "Gas for the forwarder itself, added to the gas of the signed request",
            ),
            var(
                "GASLESS_ALLOW_VALUE",
                Flag,
                "false",
                Relay,
                "Accept gasless requests with a value above 0, which the relayer pays",
            ),
            var("GASLESS_GAS_MAX", Count, "2000000", Relay, "Maximum gas of a gasless request"),
            var(
                "GASLESS_PREFLIGHT",
                Flag,
                "true",
                RelayConsumer,
                "Try each gasless transaction with eth_call before it is submitted; a revert fails it without cost",
            ),
            var(
                "RELAY_PREFLIGHT",
                Flag,
                "false",
                RelayConsumer,
                "Try each transaction with eth_call before it is submitted; a revert fails it",
            ),
        ],
    },
    Section {
        title: "Relay consumer",
        key: "consumer",
        variables: &[
            var("CONSUMER_CONCURRENCY", Count, "64", RelayConsumer, "Maximum messages handled at once by one process"),
            var(
                "CONSUMER_DRAIN_TIMEOUT_MS",
                Millis,
                "120000",
                Consumers,
                "Maximum time for a stopping consumer to finish messages in progress",
            ),
            var(
                "CONSUMER_DEAD_AFTER_MS",
                Millis,
                "10000",
                RelayConsumer,
                "Claims of a consumer without a heartbeat for this long are taken over",
            )
            .hidden(),
            var(
                "MAX_ATTEMPTS",
                Count,
                "3",
                RelayConsumer,
                "Failed attempts of a transaction before it becomes a dead letter",
            ),
            var(
                "RETRY_FIRST_DELAY_MS",
                Millis,
                "2000",
                RelayConsumer,
                "Delay after the first failed attempt; doubles with each",
            )
            .hidden(),
            var(
                "AUTO_REPLAY_DELAY_MS",
                Millis,
                "60000",
                RelayConsumer,
                "Delay before the automatic replay that `retryOnFailure` requests",
            )
            .hidden(),
        ],
    },
    Section {
        title: "Relay queue",
        key: "queue",
        variables: &[
            var(
                "QUEUE_LEASE_MS",
                Millis,
                "20000",
                Relay,
                "Lease of a received message, extended while it is handled (SQS, RabbitMQ: 60000)",
            ),
            var(
                "QUEUE_RETENTION_MS",
                Millis,
                "345600000",
                Relay,
                "How long the queue keeps a message or dead letter (4 days)",
            ),
            var(
                "QUEUE_MAX_RECEIVES",
                Count,
                "3",
                Relay,
                "Deliveries after which the queue itself dead-letters a message, as a backstop",
            ),
        ],
    },
    Section {
        title: "Routing",
        key: "routing",
        variables: &[
            var(
                "RELAYER_MAX_IN_FLIGHT",
                Count,
                "",
                Relay,
                "Maximum transactions in flight at one relayer; unset: adapts to the relayer's completion rate, up to \
                 5000",
            ),
            var(
                "RELAYER_RATE_PER_SECOND",
                Number,
                "100",
                Relay,
                "Maximum submissions per second to one relayer; 0: no limit",
            ),
            var(
                "RELAYER_MIN_BALANCE_WEI",
                Wei,
                "1",
                Relay,
                "A relayer with a smaller balance is skipped as out of funds",
            ),
            var(
                "RELAYER_JAM_AFTER_MS",
                Millis,
                "120000",
                Relay,
                "A relayer that makes no progress for this long is skipped as jammed; a nonce gap counts after half of it",
            ),
            var("RELAYER_SUBMIT_TIMEOUT_MS", Millis, "30000", Relay, "Timeout of one submission to a relayer").hidden(),
            var(
                "RELAYER_HANDLER_TIMEOUT_MS",
                Millis,
                "30000",
                Relay,
                "How long a relayer may keep processing a request after Baton stops waiting; at least the relayer's \
                 REQUEST_TIMEOUT_SECONDS",
            ),
            var(
                "RELAYER_RETENTION_MS",
                Millis,
                "14400000",
                RelayConsumer,
                "How long relayers keep finished transactions (4 hours); at most their TRANSACTION_EXPIRATION_HOURS",
            ),
            var(
                "RELAYER_HEALTH_INTERVAL_MS",
                Millis,
                "10000",
                Relay,
                "Interval between two health checks of a relayer",
            )
            .hidden(),
            var(
                "RELAYER_CLOCK_SKEW_MS",
                Millis,
                "30000",
                RelayConsumer,
                "Allowed difference between our clock and a relayer's",
            )
            .hidden(),
            var("BREAKER_FAILURES", Count, "5", Relay, "Consecutive failures that open a relayer's circuit breaker")
                .hidden(),
            var("BREAKER_OPEN_MS", Millis, "5000", Relay, "How long a breaker stays open the first time; doubles")
                .hidden(),
        ],
    },
    Section {
        title: "Reconciler",
        key: "reconciler",
        variables: &[
            var(
                "RECONCILE_PENDING_MS",
                Millis,
                "600000",
                Relay,
                "Age at which a pending transaction that no consumer claimed is queued again",
            ),
            var(
                "RECONCILE_SUBMITTED_MS",
                Millis,
                "30000",
                Relay,
                "Age at which a submitted transaction without a webhook is looked up at its relayer; doubles up to 5 minutes",
            ),
            var("RECONCILE_INTERVAL_MS", Millis, "1000", RelayConsumer, "Interval between two sweeps").hidden(),
            var(
                "RECONCILE_UNKNOWN_MS",
                Millis,
                "1000",
                RelayConsumer,
                "Unknown outcome: delay before, and between, questions to the relayer",
            )
            .hidden(),
            var(
                "RECONCILE_UNPROVEN_MS",
                Millis,
                "300000",
                RelayConsumer,
                "Minimum age of a claim before an absence not proven by the relayer's list counts, given that the \
                 chain shows nothing",
            )
            .hidden(),
            var(
                "RECONCILE_OPERATOR_MS",
                Millis,
                "600000",
                Relay,
                "Age of an unknown outcome from which clients are notified that it waits for an operator",
            )
            .hidden(),
            var(
                "RECONCILE_ABSENT_MS",
                Millis,
                "5000",
                RelayConsumer,
                "How long a relayer's list must not show a submission before it is sent again",
            )
            .hidden(),
        ],
    },
    Section {
        title: "Client notifications",
        key: "notifications",
        variables: &[
            var(
                "CLIENT_WEBHOOK_URL",
                HTTP,
                "",
                Notifiers,
                "URL that gets every event of every API key, without registration",
            )
            .secret(),
            var(
                "CLIENT_WEBHOOK_SECRET",
                Text,
                "",
                Notifiers,
                "Signing secret of CLIENT_WEBHOOK_URL: whsec_ followed by the base64 of 24 to 64 bytes",
            )
            .secret(),
            var(
                "WEBHOOK_ALLOW_HTTP",
                Flag,
                "false",
                Relay,
                "Accept and call endpoints over plain http",
            ),
            var(
                "WEBHOOK_ALLOW_PRIVATE",
                Flag,
                "false",
                Relay,
                "Accept and call endpoints at private and loopback addresses, and over plain http; for development",
            ),
            var("WEBHOOK_PORTS", List, "", Relay, "Ports that endpoints may have, separated by commas; unset: any"),
            var("WEBHOOK_ENDPOINTS_MAX", Count, "100", Relay, "Maximum endpoints of one API key"),
            var("WEBHOOK_RETENTION_DAYS", Count, "30", Relay, "Days that delivered and given-up events are kept"),
            var("WEBHOOK_CONCURRENCY", Count, "64", Notifiers, "Deliveries in flight of one process"),
            var(
                "NOTIFIER_IN_CONSUMER",
                Flag,
                "true",
                RelayConsumer,
                "Deliver from `serve` and `queue-consumer`; false: only from `notifier`",
            ),
            var("WEBHOOK_TIMEOUT_MS", Millis, "15000", Notifiers, "Timeout of one attempt").hidden(),
            var(
                "WEBHOOK_SCHEDULE_SECOND_US",
                Count,
                "1000000",
                Notifiers,
                "Microseconds of a second of the retry schedule, of pauses and of the time until an endpoint is disabled",
            )
            .hidden(),
        ],
    },
    Section {
        title: "Users lane",
        key: "users",
        variables: &[
            var(
                "USERS_DATABASE_URL",
                Url(&["postgres", "postgresql"]),
                "",
                Users,
                "Users store, postgres://user:password@host:port/database; unset: embedded",
            )
            .secret(),
            var("USERS_DATABASE_TIMEOUT_MS", Millis, "10000", Users, "Timeout of one call to USERS_DATABASE_URL")
                .hidden(),
            var(
                "USERS_QUEUE",
                QUEUES,
                "",
                Users,
                "`embedded`, `sqs` or `rabbitmq`; unset: `rabbitmq` if RABBITMQ_URL is set, else `embedded`",
            ),
            var(
                "USERS_QUEUE_NAME",
                Text,
                "raffle",
                Users,
                "Prefix of the names on RabbitMQ: NAME_exchange, NAME_queue, NAME_dlq",
            ),
            var("USERS_SQS_QUEUE_URL", HTTP, "", Users, "URL of the users queue, if USERS_QUEUE is `sqs`"),
            var("USERS_SQS_DLQ_URL", HTTP, "", Users, "URL of the users dead-letter queue, if USERS_QUEUE is `sqs`"),
            var("RETRY_TTL_MS", Millis, "10000", Users, "Delay before a message is retried after a database error"),
            var(
                "MAX_RETRIES",
                Number,
                "3",
                UsersConsumer,
                "Retries of a message before the dead-letter queue; 0: none",
            ),
            var("USERS_BATCH_SIZE", Count, "1000", UsersConsumer, "Maximum rows in one insert"),
            var("USERS_BATCH_TIMEOUT_MS", Millis, "1000", UsersConsumer, "Longest wait for a batch to fill"),
            var("USERS_PROC_CONCURRENCY", Count, "8", UsersConsumer, "Messages validated concurrently"),
            var("USERS_BATCH_CONCURRENCY", Count, "2", UsersConsumer, "Batches inserted concurrently"),
            var(
                "USERS_DLQ_CONSUMER",
                Flag,
                "true",
                UsersConsumer,
                "Insert dead letters again automatically, and quarantine those that can never become a user",
            ),
            var(
                "USERS_DLQ_INTERVAL_MS",
                Millis,
                "5000",
                UsersConsumer,
                "Interval between two checks of the dead letters",
            )
            .hidden(),
        ],
    },
    Section {
        title: "Logs",
        key: "logs",
        variables: &[
            var("LOG_FORMAT", Choice(&["json", "text"]), "json", All, "`json` or `text` (`dev`: text)"),
            var("LOG_LEVEL", Text, "info", All, "error, warn, info, debug or trace, or directives per module"),
        ],
    },
];
