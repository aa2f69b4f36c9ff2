//! The databases, queues and cache that the lanes run on. Each is chosen by its URL; without one it is embedded.

use reqwest::Url;

use super::Secret;
use super::reader::Vars;

/// The relay lane's database, queue and cache, and what both lanes' queues share.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// `DATABASE_URL`: the relay store on MySQL or MariaDB; `None`: embedded.
    pub database_url: Option<Secret>,
    /// `DATABASE_CONNECTIONS`: maximum connections of this process to it.
    pub database_connections: usize,
    /// `REDIS_URL`: the shared cache of finished transactions; `None`: a cache of this process.
    pub redis_url: Option<Secret>,
    /// `RELAY_QUEUE`, or `sqs` if `SQS_QUEUE_URL` is set.
    pub relay_queue: QueueEngine,
    /// `QUEUE_AUTO_CREATE`: create missing queues instead of refusing to start.
    pub queue_auto_create: bool,
}

/// The queue of one lane.
#[derive(Debug, Clone)]
pub enum QueueEngine {
    /// SQLite, in the data directory.
    Embedded,
    /// AWS SQS, or a server that speaks its protocol.
    Sqs(Box<SqsConfig>),
    /// RabbitMQ, or another AMQP 0-9-1 broker.
    RabbitMq {
        /// `RABBITMQ_URL`, with its password.
        url: Secret,
        /// `RELAY_QUEUE_NAME`, or the prefix in `USERS_QUEUE_NAME`.
        queue: String,
    },
}

impl QueueEngine {
    /// Its name and place for the log, without credentials.
    pub fn describe(&self) -> String {
        match self {
            Self::Embedded => "embedded (SQLite)".to_owned(),
            Self::Sqs(sqs) => format!("SQS, {}", Secret::from(sqs.queue_url.clone()).address()),
            Self::RabbitMq { url, queue } => format!("RabbitMQ, {} {queue}", url.address()),
        }
    }
}

/// The SQS queues of one lane.
#[derive(Debug, Clone)]
pub struct SqsConfig {
    /// `SQS_QUEUE_URL` or `USERS_SQS_QUEUE_URL`.
    pub queue_url: Url,
    /// `SQS_DLQ_URL` or `USERS_SQS_DLQ_URL`.
    pub dlq_url: Url,
    /// `SQS_ENDPOINT_URL` and its keys; `None`: AWS with the default credential chain.
    pub endpoint: Option<SqsEndpoint>,
    /// `AWS_REGION`, which requests are signed for.
    pub region: String,
}

/// An SQS endpoint other than that of AWS, such as LocalStack.
#[derive(Debug, Clone)]
pub struct SqsEndpoint {
    /// `SQS_ENDPOINT_URL`.
    pub url: Url,
    /// `AWS_ACCESS_KEY_ID`.
    pub access_key_id: Secret,
    /// `AWS_SECRET_ACCESS_KEY`.
    pub secret_access_key: Secret,
}

/// The variables of one lane's queue.
pub(super) struct QueueVariables {
    /// Chooses the queue.
    pub choice: &'static str,
    /// The variable that, if set, makes a choice unnecessary, and that choice.
    pub implied_by: (&'static str, &'static str),
    pub sqs_url: &'static str,
    pub sqs_dlq_url: &'static str,
    pub name: &'static str,
}

impl Vars<'_> {
    pub(super) fn engine(&mut self) -> EngineConfig {
        EngineConfig {
            database_url: self.url("DATABASE_URL").map(Secret::from),
            database_connections: self.count("DATABASE_CONNECTIONS"),
            redis_url: self.url("REDIS_URL").map(Secret::from),
            relay_queue: self.queue(&QueueVariables {
                choice: "RELAY_QUEUE",
                implied_by: ("SQS_QUEUE_URL", "sqs"),
                sqs_url: "SQS_QUEUE_URL",
                sqs_dlq_url: "SQS_DLQ_URL",
                name: "RELAY_QUEUE_NAME",
            }),
            queue_auto_create: self.parsed("QUEUE_AUTO_CREATE"),
        }
    }

    pub(super) fn queue(&mut self, names: &QueueVariables) -> QueueEngine {
        let (implied_by, implied) = names.implied_by;
        let (choice, why) = match self.choice(names.choice) {
            Some(choice) => (choice, format!("{} is {choice}", names.choice)),
            None if self.text(implied_by).is_some() => (implied, format!("{implied_by} is set")),
            None => ("embedded", String::new()),
        };
        let found = match choice {
            "sqs" => self.sqs(names, &why).map(|sqs| QueueEngine::Sqs(Box::new(sqs))),
            "rabbitmq" => self
                .required_url("RABBITMQ_URL", &why)
                .map(|url| QueueEngine::RabbitMq { url: url.into(), queue: self.text_or_default(names.name) }),
            _ => None,
        };
        // A queue that is chosen but incomplete has been reported; the embedded one only stands in for it.
        found.unwrap_or(QueueEngine::Embedded)
    }

    fn sqs(&mut self, names: &QueueVariables, why: &str) -> Option<SqsConfig> {
        let queue_url = self.required_url(names.sqs_url, why);
        let dlq_url = self.required_url(names.sqs_dlq_url, why);
        let endpoint = self.url("SQS_ENDPOINT_URL").and_then(|url| {
            let mut key = |name: &str| {
                let value = self.text(name);
                if value.is_none() {
                    self.problem(name, "is not set: SQS_ENDPOINT_URL needs it");
                }
                value.map(Secret::new)
            };
            let (id, secret) = (key("AWS_ACCESS_KEY_ID"), key("AWS_SECRET_ACCESS_KEY"));
            Some(SqsEndpoint { url, access_key_id: id?, secret_access_key: secret? })
        });
        let region = self.text_or_default("AWS_REGION");
        Some(SqsConfig { queue_url: queue_url?, dlq_url: dlq_url?, endpoint, region })
    }
}
