//! PostgreSQL and RabbitMQ for the users lane.

use std::time::Duration;

use anyhow::{Context, bail};
use baton::config::{Config, QueueEngine, Service};
use baton::users::engine::topology;
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use pipeline::queue::rabbitmq::{Delays, Topology};
use reqwest::Url;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{ScratchNames, UNSET_AMQP_URL, unset};
use crate::process::Vars;

pub struct UsersServers {
    names: ScratchNames,
    /// With the database that `USERS_DATABASE_URL` names.
    server_url: String,
    /// With the database of this run.
    pub database_url: String,
    pub rabbitmq_url: String,
}

impl UsersServers {
    /// Reads the addresses from the environment and creates the database.
    pub async fn prepare() -> anyhow::Result<Self> {
        let names = ScratchNames::new();
        let missing = |variable: &str| unset(variable, "the users lane without `--engine embedded`");
        let fixed = [("RELAY_QUEUE", "embedded".to_owned()), ("USERS_QUEUE", "rabbitmq".to_owned())];
        let stand_ins = [("RABBITMQ_URL", UNSET_AMQP_URL)];
        let found = Config::from_env_between(Service::Command, &fixed, &stand_ins)?.users;
        let mut url = Url::parse(found.database_url.ok_or_else(|| missing("USERS_DATABASE_URL"))?.expose())?;
        let QueueEngine::RabbitMq { url: broker, .. } = found.queue else { bail!("USERS_QUEUE is not rabbitmq") };
        if broker.expose().starts_with(UNSET_AMQP_URL) {
            return Err(missing("RABBITMQ_URL"));
        }
        let server_url = url.to_string();
        url.set_path(&names.run);
        let (database_url, rabbitmq_url) = (url.to_string(), broker.expose().to_owned());
        let servers = Self { names, server_url, database_url, rabbitmq_url };
        servers.execute(&format!("CREATE DATABASE {}", servers.names.run)).await?;
        servers.names.announce();
        Ok(servers)
    }

    /// The name prefix of exchanges and queues that no process has used.
    pub fn new_queues(&self) -> String {
        self.queues(self.names.next_queue())
    }

    /// The variables of a service on queues with this prefix.
    pub fn vars(&self, queues: &str) -> Vars {
        vec![
            ("USERS_DATABASE_URL", self.database_url.clone()),
            ("RABBITMQ_URL", self.rabbitmq_url.clone()),
            ("USERS_QUEUE", "rabbitmq".to_owned()),
            ("USERS_QUEUE_NAME", queues.to_owned()),
            ("RELAY_QUEUE", "embedded".to_owned()),
        ]
    }

    /// Removes the database, the exchanges and the queues; prints what could not be removed.
    pub async fn remove(&self) {
        let drop_database = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.names.run);
        self.names.remove(self.execute(&drop_database), self.remove_queues()).await;
    }

    async fn remove_queues(&self) -> anyhow::Result<()> {
        let connection = lapin::Connection::connect(&self.rabbitmq_url, lapin::ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        for number in self.names.queue_numbers() {
            let Topology { exchange, queue, dead_exchange, dead_queue, delays, .. } =
                topology(&self.queues(number), Duration::ZERO);
            let (mut queues, mut exchanges) = (vec![queue, dead_queue], vec![exchange, dead_exchange]);
            if let Delays::Fixed { exchange, queue, .. } = delays {
                queues.push(queue);
                exchanges.push(exchange);
            }
            // Deleting what does not exist succeeds.
            for queue in queues {
                channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
            }
            for exchange in exchanges {
                channel.exchange_delete(exchange.into(), ExchangeDeleteOptions::default()).await?;
            }
        }
        Ok(connection.close(200, "done".into()).await?)
    }

    fn queues(&self, number: u32) -> String {
        format!("{}_{number}", self.names.run)
    }

    /// Runs one statement on the server, in the database that `USERS_DATABASE_URL` names.
    async fn execute(&self, sql: &str) -> anyhow::Result<()> {
        let connected = PgConnection::connect(&self.server_url).await;
        let mut connection = connected.context("USERS_DATABASE_URL: cannot connect to the server")?;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.with_context(|| sql.to_owned())?;
        Ok(connection.close().await?)
    }
}
