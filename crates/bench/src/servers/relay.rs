//! MySQL and a broker for the relay lane.

use anyhow::{Context, bail};
use baton::config::{Config, QueueEngine, Service, SqsConfig};
use clap::ValueEnum;
use lapin::options::QueueDeleteOptions;
use pipeline::queue::sqs::{SqsAccess, SqsOptions};
use reqwest::Url;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};

use super::{ScratchNames, UNSET_AMQP_URL, unset};
use crate::RelayEngineName;
use crate::process::Vars;
use crate::raw::RawBroker;
use crate::raw::mysql::RawInserts;
use crate::raw::rabbitmq::{self, RawRabbitMq};
use crate::raw::sqs::RawSqs;

/// Host of [`UNSET_QUEUE_URL`].
const UNSET_HOST: &str = "unset";
/// Stands in for the queue URLs of the configuration: the benchmark creates its own queues.
const UNSET_QUEUE_URL: &str = "http://unset/000000000000/unset";

pub struct RelayServers {
    names: ScratchNames,
    /// Without a database.
    server_url: String,
    database_url: String,
    broker: QueueEngine,
    /// All but the names of the queues.
    vars: Vars,
}

impl RelayServers {
    /// Reads the addresses from the environment and creates the database.
    pub async fn prepare(engine: RelayEngineName) -> anyhow::Result<Self> {
        let names = ScratchNames::new();
        let queue = if engine == RelayEngineName::MysqlSqs { "sqs" } else { "rabbitmq" };
        let engine_name = engine.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let missing = |variable: &str| unset(variable, &format!("`--engine {engine_name}`"));
        let found = Config::from_env_between(Service::Command, &[("RELAY_QUEUE", "embedded".to_owned())], &[])?.engine;
        let mut url = Url::parse(found.database_url.as_ref().ok_or_else(|| missing("DATABASE_URL"))?.expose())?;
        url.set_path("");
        let server_url = url.to_string();
        url.set_path(&names.run);
        let fixed = [("RELAY_QUEUE", queue.to_owned()), ("RELAY_QUEUE_NAME", names.run.clone())];
        let stand_ins =
            [("SQS_QUEUE_URL", UNSET_QUEUE_URL), ("SQS_DLQ_URL", UNSET_QUEUE_URL), ("RABBITMQ_URL", UNSET_AMQP_URL)];
        let broker = Config::from_env_between(Service::Command, &fixed, &stand_ins)?.engine.relay_queue;
        let mut vars = vec![
            ("DATABASE_URL", url.to_string()),
            ("DATABASE_CONNECTIONS", found.database_connections.to_string()),
            ("RELAY_QUEUE", queue.to_owned()),
            ("QUEUE_AUTO_CREATE", "true".to_owned()),
        ];
        vars.extend(found.redis_url.map(|redis| ("REDIS_URL", redis.expose().to_owned())));
        match &broker {
            QueueEngine::RabbitMq { url, .. } if url.expose().starts_with(UNSET_AMQP_URL) => {
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
            QueueEngine::Embedded => bail!("the embedded engine has no broker"),
        }
        let servers = Self { names, server_url, database_url: url.to_string(), broker, vars };
        servers.execute(&format!("CREATE DATABASE {}", servers.names.run)).await?;
        servers.names.announce();
        Ok(servers)
    }

    /// The variables of services on a queue that no process has used.
    pub fn new_queue_vars(&self) -> anyhow::Result<Vars> {
        let queue = self.queue(self.names.next_queue());
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

    pub fn raw_inserts(&self) -> RawInserts {
        RawInserts::new(&self.database_url)
    }

    pub async fn raw_broker(&self) -> anyhow::Result<RawBroker> {
        let run = &self.names.run;
        match &self.broker {
            QueueEngine::Sqs(sqs) => Ok(RawBroker::Sqs(RawSqs::new(sqs_options(sqs, run)?.client().await, run))),
            QueueEngine::RabbitMq { url, .. } => Ok(RawBroker::RabbitMq(RawRabbitMq::new(url.expose(), run))),
            QueueEngine::Embedded => bail!("the embedded engine has no broker"),
        }
    }

    /// Removes the database and the queues; prints what could not be removed.
    pub async fn remove(&self) {
        let drop_database = format!("DROP DATABASE IF EXISTS {}", self.names.run);
        self.names.remove(self.execute(&drop_database), self.remove_queues()).await;
    }

    async fn remove_queues(&self) -> anyhow::Result<()> {
        let run = &self.names.run;
        match &self.broker {
            QueueEngine::Sqs(sqs) => {
                let client = sqs_options(sqs, run)?.client().await;
                let listed = client.list_queues().queue_name_prefix(run).send().await?;
                for url in listed.queue_urls() {
                    client.delete_queue().queue_url(url).send().await?;
                }
            }
            QueueEngine::RabbitMq { url, .. } => {
                let queues = self.names.queue_numbers().map(|number| self.queue(number));
                let queues = queues.flat_map(|queue| [format!("{queue}-dlq"), queue]);
                let connection =
                    lapin::Connection::connect(url.expose(), lapin::ConnectionProperties::default()).await?;
                let channel = connection.create_channel().await?;
                // Deleting a queue that does not exist succeeds.
                for queue in queues.chain([rabbitmq::queue_name(run)]) {
                    channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
                }
                connection.close(200, "done".into()).await?;
            }
            QueueEngine::Embedded => {}
        }
        Ok(())
    }

    fn queue(&self, number: u32) -> String {
        format!("{}-{number}", self.names.run)
    }

    /// Runs one statement on the server, without a database.
    async fn execute(&self, sql: &str) -> anyhow::Result<()> {
        let connected = MySqlConnection::connect(&self.server_url).await;
        let mut connection = connected.context("DATABASE_URL: cannot connect to the server")?;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.with_context(|| sql.to_owned())?;
        Ok(connection.close().await?)
    }
}

/// The URL of a queue beside the configured one; without one, the URL that emulators give it.
fn queue_url(sqs: &SqsConfig, name: &str) -> anyhow::Result<String> {
    let mut url = match &sqs.endpoint {
        Some(endpoint) if sqs.queue_url.host_str() == Some(UNSET_HOST) => {
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
