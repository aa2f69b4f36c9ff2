//! The databases, queues and cache that the lanes run on.

use reqwest::Url;

use super::Secret;
use super::vars::Vars;

/// What the lanes run on; what is not set is embedded.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// `DATABASE_URL`: the relay store on MySQL or MariaDB.
    pub database_url: Option<Secret>,
    /// `DATABASE_CONNECTIONS`: how many connections to it at most.
    pub database_connections: usize,
    /// `REDIS_URL`: the cache on Redis.
    pub redis_url: Option<Secret>,
    /// `RELAY_QUEUE`, or what the URLs suggest: where the relay lane's messages go.
    pub relay_queue: QueueEngine,
    /// `QUEUE_AUTO_CREATE`: whether a queue that is missing is created.
    pub queue_auto_create: bool,
}

/// Where messages go.
#[derive(Debug, Clone)]
pub enum QueueEngine {
    /// The data directory.
    Embedded,
    /// AWS SQS.
    Sqs(Box<SqsConfig>),
    /// RabbitMQ.
    RabbitMq {
        /// `RABBITMQ_URL`.
        url: Secret,
        /// `RELAY_QUEUE_NAME` or `USERS_QUEUE_NAME`.
        queue: String,
    },
}

/// AWS SQS.
#[derive(Debug, Clone)]
pub struct SqsConfig {
    /// `SQS_QUEUE_URL` or `USERS_SQS_QUEUE_URL`.
    pub queue_url: Url,
    /// `SQS_DLQ_URL` or `USERS_SQS_DLQ_URL`.
    pub dlq_url: Url,
    /// `SQS_ENDPOINT_URL` with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`; without it the default credential chain.
    pub endpoint: Option<SqsEndpoint>,
    /// `AWS_REGION`.
    pub region: String,
}

/// An endpoint other than AWS's own.
#[derive(Debug, Clone)]
pub struct SqsEndpoint {
    /// Where.
    pub url: Url,
    /// The key's id.
    pub access_key_id: Secret,
    /// The key.
    pub secret_access_key: Secret,
}

impl Vars<'_> {
    pub(super) fn engine(&mut self) -> EngineConfig {
        EngineConfig {
            database_url: self.url("DATABASE_URL", &["mysql", "mariadb"]).map(|url| Secret::new(url.to_string())),
            database_connections: self.count("DATABASE_CONNECTIONS"),
            redis_url: self.url("REDIS_URL", &["redis"]).map(|url| Secret::new(url.to_string())),
            relay_queue: self.relay_queue(),
            queue_auto_create: self.parsed("QUEUE_AUTO_CREATE", false, "true or false"),
        }
    }

    fn relay_queue(&mut self) -> QueueEngine {
        let asked = self.text("RELAY_QUEUE");
        let inferred = if self.text("SQS_QUEUE_URL").is_some() { "sqs" } else { "embedded" };
        match asked.as_deref().unwrap_or(inferred) {
            "embedded" => QueueEngine::Embedded,
            "sqs" => {
                let sqs = self.sqs("SQS_QUEUE_URL", "SQS_DLQ_URL", "the relay lane's queue is SQS");
                sqs.map_or(QueueEngine::Embedded, |sqs| QueueEngine::Sqs(Box::new(sqs)))
            }
            "rabbitmq" => match self.required_url("RABBITMQ_URL", &["amqp", "amqps"], "RELAY_QUEUE is rabbitmq") {
                Some(url) => QueueEngine::RabbitMq {
                    url: Secret::new(url.to_string()),
                    queue: self.text("RELAY_QUEUE_NAME").unwrap_or_else(|| "relay-transactions".to_owned()),
                },
                None => QueueEngine::Embedded,
            },
            _ => {
                self.problem("RELAY_QUEUE", "must be embedded, sqs or rabbitmq");
                QueueEngine::Embedded
            }
        }
    }

    pub(super) fn sqs(&mut self, queue: &str, dlq: &str, why: &str) -> Option<SqsConfig> {
        let queue_url = self.required_url(queue, &["http", "https"], why);
        let dlq_url = self.required_url(dlq, &["http", "https"], why);
        let endpoint = self.url("SQS_ENDPOINT_URL", &["http", "https"]).and_then(|url| {
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
        let region = self.text("AWS_REGION").unwrap_or_else(|| "ap-northeast-2".to_owned());
        Some(SqsConfig { queue_url: queue_url?, dlq_url: dlq_url?, endpoint, region })
    }
}
