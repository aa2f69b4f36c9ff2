//! An empty store of each kind for one test, and rows to put into it.

use std::sync::Arc;
use std::time::Duration;

use baton::config::{Config, ForwarderConfig, Service, Timings};
use baton::relay::request::call::DirectRequest;
use baton::relay::request::forward::GaslessRequest;
use baton::relay::state::transaction::{ConsumerId, Moved, RelayerTxId, RelayerUrl, Transaction, TransactionId};
use baton::relay::store::mysql::{MySqlOptions, MySqlStore};
use baton::relay::store::notifications::NotificationStore;
use baton::relay::store::sqlite::SqliteStore;
use baton::relay::store::{Filter, ListPlace, Saved, StoreError, TransactionStore};
use baton::timestamp::Timestamp;
use pipeline::sqlite::Database;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use uuid::Uuid;

use crate::relay_fixture::TO;

pub struct StoreFixture {
    pub store: Arc<dyn TransactionStore>,
    /// The same store, as it keeps endpoints and deliveries.
    pub notifications: Arc<dyn NotificationStore>,
    pub timings: Timings,
    database: TestDatabase,
}

enum TestDatabase {
    Sqlite { database: Database, store: SqliteStore, _directory: tempfile::TempDir },
    MySql(Schema),
}

impl StoreFixture {
    pub async fn sqlite() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let database = Database::open(&directory.path().join("baton.db")).unwrap();
        let store = SqliteStore::open(&database).await.unwrap();
        let database = TestDatabase::Sqlite { database, store: store.clone(), _directory: directory };
        Self { store: Arc::new(store.clone()), notifications: Arc::new(store), timings: timings(), database }
    }

    pub async fn mysql() -> Self {
        let schema = Schema::migrated().await;
        let store = MySqlStore::open(&schema.options()).await.unwrap();
        let (store, notifications) = (Arc::new(store.clone()), Arc::new(store));
        Self { store, notifications, timings: timings(), database: TestDatabase::MySql(schema) }
    }

    /// Executes SQL on the tables, bypassing the store.
    pub async fn execute(&self, sql: &'static str) {
        match &self.database {
            TestDatabase::Sqlite { database, .. } => {
                database.write(move |connection| connection.execute(sql, [])).await.unwrap();
            }
            TestDatabase::MySql(schema) => {
                sqlx::query(sql).execute(&mut schema.connect().await).await.unwrap();
            }
        }
    }

    /// Writes 12,100 events, each of a transaction of its own and one hour after its endpoint was registered, and has them
    /// due for every endpoint.
    pub async fn write_backlog(&self) {
        const DELIVERIES: &str = "INSERT INTO webhook_deliveries \
             (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
             SELECT endpoint.id, events.id, transaction_id, position, events.created_at, events.created_at, 0 \
             FROM events, webhook_endpoints AS endpoint WHERE events.id LIKE 'backlog%'";
        self.execute(match &self.database {
            TestDatabase::Sqlite { .. } => {
                "INSERT INTO events (id, api_key, transaction_id, position, type, created_at, payload) \
                 WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 110) \
                 SELECT 'backlog' || a.n || '-' || b.n, api_key, randomblob(16), 1, 'transaction.submitted', \
                 created_at + 3600000, '{}' FROM number AS a, number AS b, webhook_endpoints"
            }
            TestDatabase::MySql(_) => {
                "INSERT INTO events (id, api_key, transaction_id, position, type, created_at, payload) \
                 WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 110) \
                 SELECT CONCAT('backlog', a.n, '-', b.n), api_key, UUID(), 1, 'transaction.submitted', \
                 created_at + INTERVAL 1 HOUR, '{}' FROM number AS a, number AS b, webhook_endpoints"
            }
        })
        .await;
        self.execute(DELIVERIES).await;
    }

    /// Writes 108,900 events without deliveries. An endpoint for submitted transactions has missed the last one only.
    pub async fn write_events_before_a_missed_one(&self) {
        self.execute(match &self.database {
            TestDatabase::Sqlite { .. } => {
                "INSERT INTO events (id, api_key, transaction_id, position, type, created_at, payload) \
                 WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 330) \
                 SELECT 'event' || a.n || '-' || b.n, api_key, randomblob(16), 1, \
                 CASE WHEN a.n = 330 AND b.n = 330 THEN 'transaction.submitted' ELSE 'transaction.failed' END, \
                 created_at + a.n * 1000 + b.n, '{}' FROM number AS a, number AS b, webhook_endpoints"
            }
            TestDatabase::MySql(_) => {
                "INSERT INTO events (id, api_key, transaction_id, position, type, created_at, payload) \
                 WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 330) \
                 SELECT CONCAT('event', a.n, '-', b.n), api_key, UUID(), 1, \
                 CASE WHEN a.n = 330 AND b.n = 330 THEN 'transaction.submitted' ELSE 'transaction.failed' END, \
                 created_at + INTERVAL a.n * 1000 + b.n SECOND, '{}' FROM number AS a, number AS b, webhook_endpoints"
            }
        })
        .await;
    }

    /// A connection to the MySQL database that bypasses the store.
    pub async fn mysql_connection(&self) -> (&Schema, MySqlConnection) {
        let TestDatabase::MySql(schema) = &self.database else { panic!("this is SQLite") };
        (schema, schema.connect().await)
    }

    /// How the database reads this list.
    pub async fn list_plan(&self, filter: &Filter, before: Option<ListPlace>) -> Vec<String> {
        match &self.database {
            TestDatabase::Sqlite { store, .. } => store.list_plan(filter, before).await.unwrap(),
            TestDatabase::MySql(schema) => {
                let store = MySqlStore::open(&schema.options()).await.unwrap();
                store.list_plan(filter, before).await.unwrap()
            }
        }
    }

    /// Rows of a table that statements have read so far, as MariaDB counts them.
    pub async fn mysql_rows_read(&self, table: &str) -> u64 {
        const READ: &str = "SELECT CAST(COALESCE(SUM(ROWS_READ), 0) AS UNSIGNED) FROM information_schema.TABLE_STATISTICS \
             WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ?";
        let TestDatabase::MySql(schema) = &self.database else { panic!("this is SQLite") };
        let mut connection = schema.connect().await;
        sqlx::query("SET GLOBAL userstat = 1").execute(&mut connection).await.unwrap();
        sqlx::query_scalar(READ).bind(table).fetch_one(&mut connection).await.unwrap()
    }

    /// Migrates the schema; returns the number of applied steps.
    pub async fn migrate(&self) -> usize {
        match &self.database {
            TestDatabase::Sqlite { store, .. } => store.migrate().await.unwrap(),
            TestDatabase::MySql(schema) => MySqlStore::migrate(&schema.options()).await.unwrap(),
        }
    }

    pub async fn inserted(&self) -> Transaction {
        let row = row(now().0);
        self.store.insert(std::slice::from_ref(&row)).await.unwrap();
        row
    }

    pub async fn claimed(&self) -> (Transaction, Uuid) {
        let (moved, token) = claim(&self.inserted().await);
        assert_eq!(self.store.save(&moved).await.unwrap(), Saved::Yes { early: false });
        (moved.transaction, token)
    }

    pub async fn bound(&self, tx_id: &str) -> Result<Transaction, StoreError> {
        let (claimed, token) = self.claimed().await;
        let bound = bind(&claimed, token, tx_id);
        assert_eq!(self.store.save(&bound).await?, Saved::Yes { early: false });
        Ok(bound.transaction)
    }
}

pub fn now() -> Timestamp {
    Timestamp::from(std::time::SystemTime::now())
}

pub fn timings() -> Timings {
    Config::from_vars(Service::Command, |_| None).unwrap().relay.timings
}

pub fn row(at: i64) -> Transaction {
    let body = json!({ "to": TO, "value": "115792089237316195423570985008687907853269984665640564039457584007913129639935",
        "data": "0xab", "gas": 21000, "retryOnFailure": true });
    let request = DirectRequest::parse(&body).unwrap();
    Transaction::accepted(TransactionId::generate(), &request, "key".into(), Timestamp(at), &timings())
}

pub fn gasless_row(nonce: u64) -> Transaction {
    let forwarder =
        ForwarderConfig { address: TO.parse().unwrap(), name: "Test".into(), chain_id: 1, gas_overhead: 120_000 };
    let body = json!({
        "request": { "from": TO, "to": TO, "value": "7", "gas": "50000", "nonce": nonce, "deadline": "1800000000",
            "data": "0xab" },
        "signature": format!("0x{}", "1b".repeat(65)), "retryOnFailure": true,
    });
    let forward = Arc::new(GaslessRequest::parse(&body).unwrap().forward(&forwarder).unwrap());
    Transaction::accepted_gasless(TransactionId::generate(), &forward, "key".into(), now(), &timings())
}

pub fn claim(row: &Transaction) -> (Moved, Uuid) {
    let (me, token, relayer) = (ConsumerId::generate(), Uuid::new_v4(), RelayerUrl("http://r1".into()));
    (row.claim(&me, token, &relayer, "test", now(), &timings()).unwrap(), token)
}

pub fn bind(claimed: &Transaction, token: Uuid, tx_id: &str) -> Moved {
    claimed.bind(token, &RelayerTxId(tx_id.into()), Some("0xf"), "test", now(), &timings()).unwrap()
}

/// A database on the real server, dropped with this value.
pub struct Schema {
    server: String,
    name: String,
}

impl Schema {
    /// Without tables.
    pub async fn create() -> Self {
        let server = std::env::var("BATON_TEST_MYSQL_URL").expect(
            "BATON_TEST_MYSQL_URL is not set: run `scripts/services start` and `eval \"$(scripts/services env)\"`",
        );
        let server = server.trim_end_matches('/').to_owned();
        let name = format!("baton_test_{}", Uuid::new_v4().simple());
        let mut connection = MySqlConnection::connect(&server).await.expect("the test server answers");
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut connection).await.unwrap();
        Self { server, name }
    }

    pub async fn migrated() -> Self {
        let schema = Self::create().await;
        MySqlStore::migrate(&schema.options()).await.unwrap();
        schema
    }

    /// A timeout long enough for a busy machine; no passing test waits for it.
    pub fn options(&self) -> MySqlOptions {
        MySqlOptions { timeout: Duration::from_secs(20), ..MySqlOptions::new(self.url()) }
    }

    /// One connection, through another address.
    pub fn options_through(&self, address: &str, timeout: Duration) -> MySqlOptions {
        let url = self.url().replace(&self.address(), address);
        MySqlOptions { url, timeout, connections_max: 1 }
    }

    /// `host:port` of the server.
    pub fn address(&self) -> String {
        self.server.rsplit(['@', '/']).next().unwrap().to_owned()
    }

    /// A connection that bypasses the store.
    pub async fn connect(&self) -> MySqlConnection {
        MySqlConnection::connect(&self.url()).await.unwrap()
    }

    fn url(&self) -> String {
        format!("{}/{}", self.server, self.name)
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        // In another thread, because `drop` cannot wait on this thread's runtime.
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(remove(&server, &name))
        });
        let dropped = dropped.join().unwrap();
        assert!(dropped.is_ok() || std::thread::panicking(), "{dropped:?}");
    }
}

async fn remove(server: &str, name: &str) -> Result<(), sqlx::Error> {
    const OPEN: &str = "SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE db = ?";
    let mut connection = MySqlConnection::connect(server).await?;
    // A failed test may have left a transaction open, whose locks would block the drop for up to a day.
    let open: Vec<i64> = sqlx::query_scalar(OPEN).bind(name).fetch_all(&mut connection).await?;
    for id in open {
        // Fails if the connection has closed meanwhile.
        sqlx::query(AssertSqlSafe(format!("KILL {id}"))).execute(&mut connection).await.ok();
    }
    sqlx::query(AssertSqlSafe(format!("DROP DATABASE {name}"))).execute(&mut connection).await?;
    Ok(())
}
