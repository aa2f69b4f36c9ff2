//! Where the users lane is measured: on the servers, a database and queues of the benchmark's own under a random name,
//! which go again when it ends, fails or is interrupted; or a directory.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use pipeline::queue::rabbitmq::{Delays, Topology};
use reqwest::Url;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::progress;
use baton::config::{Config, QueueEngine, Service};
use baton::users::engine::topology;

/// How long clearing away may take.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(30);
/// Stands in for a broker that is not named.
const UNSET: &str = "amqp://unset";

/// A place on PostgreSQL and RabbitMQ.
pub struct Place {
    name: String,
    server_url: String,
    /// The database of ours.
    pub database_url: String,
    /// The broker.
    pub rabbitmq_url: String,
    /// The last queue's number.
    queues: AtomicU32,
}

impl Place {
    /// Reads where the servers are and makes a database.
    pub async fn prepare() -> anyhow::Result<Self> {
        let name = format!("baton_bench_{}", uuid::Uuid::new_v4().simple());
        let missing = |variable: &str| {
            anyhow::anyhow!(
                "{variable} is not set: the users lane is measured on servers of yours, or with `--engine embedded`; \
                 `scripts/services start` runs some, and docs/benchmarks.md says how to use them"
            )
        };
        let fixed = [("RELAY_QUEUE", "embedded".to_owned()), ("USERS_QUEUE", "rabbitmq".to_owned())];
        let found = Config::from_env_between(Service::Command, &fixed, &[("RABBITMQ_URL", UNSET)])?.users;
        let mut url = Url::parse(found.database_url.ok_or_else(|| missing("USERS_DATABASE_URL"))?.expose())?;
        let QueueEngine::RabbitMq { url: broker, .. } = found.queue else { bail!("there is no broker in this engine") };
        if broker.expose().starts_with(UNSET) {
            return Err(missing("RABBITMQ_URL"));
        }
        let server_url = url.to_string();
        url.set_path(&name);
        let (database_url, rabbitmq_url) = (url.to_string(), broker.expose().to_owned());
        let place = Self { name, server_url, database_url, rabbitmq_url, queues: AtomicU32::new(0) };
        place.on_the_server(&format!("CREATE DATABASE {}", place.name)).await?;
        progress(format_args!("on {}, which goes again", place.name));
        Ok(place)
    }

    /// What the names of queues that nobody has used begin with: nobody who was killed holds messages of theirs.
    pub fn new_queues(&self) -> String {
        self.queue(self.queues.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn queue(&self, number: u32) -> String {
        format!("{}_{number}", self.name)
    }

    /// The variables of a service on these queues.
    pub fn vars(&self, queues: &str) -> Vec<(&'static str, String)> {
        vec![
            ("USERS_DATABASE_URL", self.database_url.clone()),
            ("RABBITMQ_URL", self.rabbitmq_url.clone()),
            ("USERS_QUEUE", "rabbitmq".to_owned()),
            ("USERS_QUEUE_NAME", queues.to_owned()),
            ("RELAY_QUEUE", "embedded".to_owned()),
        ]
    }

    /// Removes the database and the queues; says what could not be removed.
    pub async fn remove(&self) {
        let drop_database = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        let removed = tokio::time::timeout(REMOVE_TIMEOUT, async {
            let (database, queues) = tokio::join!(self.on_the_server(&drop_database), self.remove_queues());
            database.and(queues)
        });
        match removed.await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => progress(format_args!("{} is left on the servers: {failure:#}", self.name)),
            Err(_) => progress(format_args!("{} is left on the servers: no answer in time", self.name)),
        }
    }

    async fn remove_queues(&self) -> anyhow::Result<()> {
        let connection = lapin::Connection::connect(&self.rabbitmq_url, lapin::ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        for number in 1..=self.queues.load(Ordering::Relaxed) {
            let Topology { exchange, queue, dead_exchange, dead_queue, delays, .. } =
                topology(&self.queue(number), Duration::ZERO);
            let (mut queues, mut exchanges) = (vec![queue, dead_queue], vec![exchange, dead_exchange]);
            if let Delays::Fixed { exchange, queue, .. } = delays {
                queues.push(queue);
                exchanges.push(exchange);
            }
            // One that does not exist is as good as deleted.
            for queue in queues {
                channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
            }
            for exchange in exchanges {
                channel.exchange_delete(exchange.into(), ExchangeDeleteOptions::default()).await?;
            }
        }
        Ok(connection.close(200, "done".into()).await?)
    }

    async fn on_the_server(&self, sql: &str) -> anyhow::Result<()> {
        let connected = PgConnection::connect(&self.server_url).await;
        let mut connection = connected.context("USERS_DATABASE_URL: cannot connect to the server")?;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.with_context(|| sql.to_owned())?;
        Ok(connection.close().await?)
    }
}
