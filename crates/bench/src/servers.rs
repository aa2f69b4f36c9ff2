//! The servers of the engines beyond one machine: a database and queues of the benchmark's own on them, under a random
//! name, which go again when it ends, fails or is interrupted. Only `kill -9` leaves them behind, and their names begin
//! with `baton_bench_`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use lapin::options::QueueDeleteOptions;
use pipeline::queue::sqs::{SqsAccess, SqsOptions};
use reqwest::Url;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};

use super::EngineName;
use super::raw::Broker;
use super::raw::mysql::RawInserts;
use super::raw::rabbitmq::RawRabbitMq;
use super::raw::sqs::RawSqs;
use baton::config::{Config, QueueEngine, Service, SqsConfig};

/// How long clearing away may take.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(30);

/// A place on the servers.
pub struct Servers {
    name: String,
    /// Without a database, and with ours.
    server_url: String,
    database_url: String,
    broker: QueueEngine,
    /// All but the names of the queues.
    vars: Vec<(&'static str, String)>,
    /// The last queue's number.
    queues: AtomicU32,
}

impl Servers {
    /// Reads where the servers are and makes a database.
    pub async fn prepare(engine: EngineName) -> anyhow::Result<Self> {
        let name = format!("baton_bench_{}", uuid::Uuid::new_v4().simple());
        let queue = if engine == EngineName::MysqlSqs { "sqs" } else { "rabbitmq" };
        let missing = |variable: &str| {
            anyhow::anyhow!(
                "{variable} is not set: `--engine {queue_engine}` measures on servers of yours; `scripts/services start` \
                 runs some, and docs/benchmarks.md says how to use them",
                queue_engine = engine.name()
            )
        };
        let found = Config::from_env_between(Service::Command, &[("RELAY_QUEUE", "embedded".to_owned())], &[])?;
        let mut url = Url::parse(found.engine.database_url.as_ref().ok_or_else(|| missing("DATABASE_URL"))?.expose())?;
        url.set_path("");
        let server_url = url.to_string();
        url.set_path(&name);
        let fixed = [("RELAY_QUEUE", queue.to_owned()), ("RELAY_QUEUE_NAME", name.clone())];
        let stand_ins = [("SQS_QUEUE_URL", UNSET_URL), ("SQS_DLQ_URL", UNSET_URL), ("RABBITMQ_URL", "amqp://unset")];
        let broker = Config::from_env_between(Service::Command, &fixed, &stand_ins)?.engine.relay_queue;
        let mut vars = vec![
            ("DATABASE_URL", url.to_string()),
            ("DATABASE_CONNECTIONS", found.engine.database_connections.to_string()),
            ("RELAY_QUEUE", queue.to_owned()),
            ("QUEUE_AUTO_CREATE", "true".to_owned()),
        ];
        vars.extend(found.engine.redis_url.map(|redis| ("REDIS_URL", redis.expose().to_owned())));
        match &broker {
            QueueEngine::RabbitMq { url, .. } if url.expose().starts_with("amqp://unset") => {
                return Err(missing("RABBITMQ_URL"));
            }
            QueueEngine::RabbitMq { url, .. } => vars.push(("RABBITMQ_URL", url.expose().to_owned())),
            QueueEngine::Sqs(sqs) => {
                let endpoint = sqs.endpoint.as_ref().ok_or_else(|| missing("SQS_ENDPOINT_URL"))?;
                vars.push(("SQS_ENDPOINT_URL", endpoint.url.to_string()));
                vars.push(("AWS_ACCESS_KEY_ID", endpoint.access_key_id.expose().to_owned()));
                vars.push(("AWS_SECRET_ACCESS_KEY", endpoint.secret_access_key.expose().to_owned()));
                vars.push(("AWS_REGION", sqs.region.clone()));
            }
            QueueEngine::Embedded => bail!("there is no broker in this engine"),
        }
        let servers = Self { name, server_url, database_url: url.to_string(), broker, vars, queues: AtomicU32::new(0) };
        servers.on_the_server(&format!("CREATE DATABASE {}", servers.name)).await?;
        super::progress(format_args!("on {}, which goes again", servers.name));
        Ok(servers)
    }

    /// The variables of services on a queue that nobody has used: what was killed before, with a receive that still waits
    /// at the broker, takes nothing from it.
    pub fn vars_of_a_new_queue(&self) -> anyhow::Result<Vec<(&'static str, String)>> {
        let queue = self.queue(self.queues.fetch_add(1, Ordering::Relaxed) + 1);
        let mut vars = self.vars.clone();
        match &self.broker {
            QueueEngine::Sqs(sqs) => {
                vars.push(("SQS_QUEUE_URL", queue_url(sqs, &queue)?));
                vars.push(("SQS_DLQ_URL", queue_url(sqs, &format!("{queue}-dlq"))?));
            }
            QueueEngine::RabbitMq { .. } | QueueEngine::Embedded => vars.push(("RELAY_QUEUE_NAME", queue)),
        }
        Ok(vars)
    }

    fn queue(&self, number: u32) -> String {
        format!("{}-{number}", self.name)
    }

    /// The database without us.
    pub fn raw_inserts(&self) -> RawInserts {
        RawInserts::new(&self.database_url)
    }

    /// The broker without us.
    pub async fn raw_broker(&self) -> anyhow::Result<Broker> {
        match &self.broker {
            QueueEngine::Sqs(sqs) => {
                Ok(Broker::Sqs(RawSqs::new(sqs_options(sqs, &self.name)?.client().await, &self.name)))
            }
            QueueEngine::RabbitMq { url, .. } => Ok(Broker::RabbitMq(RawRabbitMq::new(url.expose(), &self.name))),
            QueueEngine::Embedded => bail!("there is no broker in this engine"),
        }
    }

    /// Removes the database and the queues; says what could not be removed.
    pub async fn remove(&self) {
        let drop_database = format!("DROP DATABASE IF EXISTS {}", self.name);
        let removed = tokio::time::timeout(REMOVE_TIMEOUT, async {
            let (database, queues) = tokio::join!(self.on_the_server(&drop_database), self.remove_queues());
            database.and(queues)
        });
        match removed.await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => super::progress(format_args!("{} is left on the servers: {failure:#}", self.name)),
            Err(_) => super::progress(format_args!("{} is left on the servers: no answer in time", self.name)),
        }
    }

    async fn remove_queues(&self) -> anyhow::Result<()> {
        match &self.broker {
            QueueEngine::Sqs(sqs) => {
                let client = sqs_options(sqs, &self.name)?.client().await;
                let listed = client.list_queues().queue_name_prefix(&self.name).send().await?;
                for url in listed.queue_urls() {
                    client.delete_queue().queue_url(url).send().await?;
                }
            }
            QueueEngine::RabbitMq { url, .. } => {
                let connection =
                    lapin::Connection::connect(url.expose(), lapin::ConnectionProperties::default()).await?;
                let channel = connection.create_channel().await?;
                // One that does not exist is as good as deleted.
                let queues = (1..=self.queues.load(Ordering::Relaxed)).map(|number| self.queue(number));
                let queues = queues.flat_map(|queue| [format!("{queue}-dlq"), queue]);
                for queue in queues.chain([super::raw::rabbitmq::queue(&self.name)]) {
                    channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
                }
                connection.close(200, "done".into()).await?;
            }
            QueueEngine::Embedded => {}
        }
        Ok(())
    }

    async fn on_the_server(&self, sql: &str) -> anyhow::Result<()> {
        let mut connection =
            MySqlConnection::connect(&self.server_url).await.context("DATABASE_URL: cannot connect to the server")?;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.with_context(|| sql.to_owned())?;
        Ok(connection.close().await?)
    }
}

/// Stands in for a queue that is not named: the benchmark makes its own.
const UNSET_URL: &str = "http://unset/000000000000/unset";

/// Where a queue of that name is: beside the one that is configured, or else where emulators put them.
fn queue_url(sqs: &SqsConfig, name: &str) -> anyhow::Result<String> {
    let mut url = match &sqs.endpoint {
        Some(endpoint) if sqs.queue_url.host_str() == Some("unset") => {
            endpoint.url.join("/000000000000/unset").context("SQS_ENDPOINT_URL")?
        }
        _ => sqs.queue_url.clone(),
    };
    match url.path_segments_mut() {
        Ok(mut path) => drop(path.pop().push(name)),
        Err(()) => bail!("SQS_QUEUE_URL has no path"),
    }
    Ok(url.to_string())
}

fn sqs_options(sqs: &SqsConfig, name: &str) -> anyhow::Result<SqsOptions> {
    let endpoint = sqs.endpoint.as_ref().context("SQS_ENDPOINT_URL is not set")?;
    let access = SqsAccess::Endpoint {
        url: endpoint.url.to_string(),
        access_key: endpoint.access_key_id.expose().to_owned(),
        secret_key: endpoint.secret_access_key.expose().to_owned(),
    };
    Ok(SqsOptions::new(access, &sqs.region, name, format!("{name}-dlq")))
}
