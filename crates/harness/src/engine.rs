//! The engine on which a test runs the product: `BATON_TEST_ENGINE`, embedded by default.
//!
//! The servers are those of `scripts/services`, shared or private. Each test gets its own database and queues; the
//! database is dropped at the end.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use crate::servers::Servers;

/// The database and queue that the product runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestEngine {
    /// SQLite, in the product's own process.
    Embedded,
    /// MySQL (MariaDB), SQS (LocalStack) and Redis.
    MySqlSqs,
    /// MySQL (MariaDB), RabbitMQ and Redis.
    MySqlRabbitMq,
}

/// The environment variables of an engine. Dropping it removes the test's database.
pub struct EngineSetup {
    /// Environment of the product's processes.
    pub vars: BTreeMap<String, String>,
    /// Dropped from the server at the end.
    database: Option<Database>,
}

/// A database on a server.
struct Database {
    port: String,
    name: String,
}

impl TestEngine {
    /// The engine that `BATON_TEST_ENGINE` names.
    ///
    /// # Panics
    /// For an unknown name.
    pub fn from_env() -> Self {
        match std::env::var("BATON_TEST_ENGINE").as_deref() {
            Err(_) | Ok("" | "embedded") => Self::Embedded,
            Ok("mysql-sqs") => Self::MySqlSqs,
            Ok("mysql-rabbitmq") => Self::MySqlRabbitMq,
            Ok(other) => panic!("BATON_TEST_ENGINE is {other:?}; known are embedded, mysql-sqs and mysql-rabbitmq"),
        }
    }

    /// The size of a scenario on this engine: half on servers, which spend most of it on their own work. The embedded engine
    /// runs it in full.
    #[must_use]
    pub fn scaled(self, count: usize) -> usize {
        if self == Self::Embedded { count } else { count.div_ceil(2) }
    }

    /// A fresh database and the names of fresh queues.
    ///
    /// # Panics
    /// If a server is missing.
    pub fn set_up(self) -> EngineSetup {
        if self == Self::Embedded {
            return EngineSetup { vars: BTreeMap::new(), database: None };
        }
        let database = Database::create(&server("BATON_TEST_MYSQL_URL"));
        let vars = self.vars(&database, "root", server);
        EngineSetup { vars, database: Some(database) }
    }

    /// The same on private servers. There the product is not the database's administrator, whom some limits do not
    /// bind. The database stays, because its server goes too.
    ///
    /// # Panics
    /// If a server is missing.
    pub fn set_up_on(servers: &Servers) -> EngineSetup {
        let database = Database::create(&servers.address("BATON_TEST_MYSQL_URL"));
        database.run("CREATE USER IF NOT EXISTS baton@'%'");
        database.run(&format!("GRANT ALL ON {}.* TO baton@'%'", database.name));
        let vars = servers.engine().vars(&database, "baton", |name| servers.address(name));
        EngineSetup { vars, database: None }
    }

    fn vars(self, database: &Database, user: &str, server: impl Fn(&str) -> String) -> BTreeMap<String, String> {
        let Database { port, name } = database;
        let mut vars = BTreeMap::new();
        let mut set = |name: &str, value: String| drop(vars.insert(name.to_owned(), value));
        set("DATABASE_URL", format!("mysql://{user}@127.0.0.1:{port}/{name}"));
        set("REDIS_URL", server("BATON_TEST_REDIS_URL"));
        set("QUEUE_AUTO_CREATE", "true".to_owned());
        match self {
            Self::Embedded => {}
            Self::MySqlSqs => {
                let endpoint = server("BATON_TEST_SQS_URL");
                set("SQS_QUEUE_URL", format!("{endpoint}/000000000000/{name}"));
                set("SQS_DLQ_URL", format!("{endpoint}/000000000000/{name}-dlq"));
                set("SQS_ENDPOINT_URL", endpoint);
                set("AWS_ACCESS_KEY_ID", "test".to_owned());
                set("AWS_SECRET_ACCESS_KEY", "test".to_owned());
            }
            Self::MySqlRabbitMq => {
                set("RELAY_QUEUE", "rabbitmq".to_owned());
                set("RELAY_QUEUE_NAME", name.clone());
                set("RABBITMQ_URL", server("BATON_TEST_AMQP_URL"));
                // The names of the users queues are fixed, and other tests share the broker.
                set("USERS_QUEUE", "embedded".to_owned());
            }
        }
        vars
    }
}

impl Database {
    fn create(mysql: &str) -> Self {
        let port = mysql.rsplit(':').next().unwrap_or_default().trim_end_matches('/').to_owned();
        let database = Self { port, name: format!("baton_{}", uuid::Uuid::new_v4().simple()) };
        database.run(&format!("CREATE DATABASE {}", database.name));
        database
    }

    fn run(&self, sql: &str) {
        let mut command = Command::new("mariadb");
        command.args(["--no-defaults", "-h127.0.0.1", "-uroot", "-P", &self.port, "-e", sql]).stdin(Stdio::null());
        let output = command.output().expect("there is a mariadb client: run scripts/services install");
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for EngineSetup {
    fn drop(&mut self) {
        if let Some(database) = self.database.take().filter(|_| !std::thread::panicking()) {
            database.run(&format!("DROP DATABASE {}", database.name));
        }
    }
}

/// The address of a server, from this variable.
///
/// # Panics
/// If the variable is not set.
pub fn server(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!(r#"{name} is not set: run `scripts/services start`, then `eval "$(scripts/services env)"`"#)
    })
}

/// `127.0.0.1:PORT` of a server, for a [`Proxy`](crate::proxy::Proxy) to it.
///
/// # Panics
/// If the variable is not set.
pub fn address(name: &str) -> String {
    let url = reqwest::Url::parse(&server(name)).expect("it is a URL");
    format!("127.0.0.1:{}", url.port().expect("it has a port"))
}
