//! Raw multi-row inserts: into a table like ours, of rows like ours, each statement its own durable commit.

use std::time::{Duration, Instant};

use anyhow::Context;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use time::{OffsetDateTime, PrimitiveDateTime};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::probe_span;
use baton::relay::call::DirectRequest;

/// Rows in one statement, and connections, that are tried.
const ROWS: [usize; 3] = [100, 250, 1000];
const CONNECTIONS: [usize; 3] = [1, 2, 4];

/// See the top of this file.
pub struct RawInserts {
    url: String,
    best: Option<(usize, usize)>,
}

impl RawInserts {
    /// Into this database, which has our schema.
    pub fn new(url: &str) -> Self {
        Self { url: url.to_owned(), best: None }
    }

    /// Rows a second in the best way.
    pub async fn rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        let (rows, connections) = match self.best {
            Some(best) => best,
            None => self.look(probe_span(span)).await?,
        };
        self.measure(rows, connections, span).await
    }

    /// Which way it was.
    pub fn how(&self) -> String {
        let (rows, connections) = self.best.unwrap_or_default();
        format!("{rows} rows in a statement, {connections} connections")
    }

    async fn look(&mut self, span: Duration) -> anyhow::Result<(usize, usize)> {
        let mut best = (0.0, (ROWS[0], CONNECTIONS[0]));
        for rows in ROWS {
            for connections in CONNECTIONS {
                let rate = self.measure(rows, connections, span).await?;
                if rate > best.0 {
                    best = (rate, (rows, connections));
                }
            }
        }
        self.best = Some(best.1);
        Ok(best.1)
    }

    async fn measure(&self, rows: usize, connections: usize, span: Duration) -> anyhow::Result<f64> {
        let mut first = MySqlConnection::connect(&self.url).await?;
        let empty = "DROP TABLE IF EXISTS raw_transactions; CREATE TABLE raw_transactions LIKE transactions";
        sqlx::raw_sql(empty).execute(&mut first).await.context("cannot make a table like ours")?;
        let request = DirectRequest::parse(&serde_json::from_str(crate::process::BODY)?);
        let request = request.map_err(|_| anyhow::anyhow!("the benchmark's body is not valid"))?.to_json();
        let mut ready = vec![first];
        while ready.len() < connections {
            ready.push(MySqlConnection::connect(&self.url).await?);
        }
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for connection in ready {
            tasks.spawn(insert(connection, request.clone(), rows, started + span));
        }
        let mut total = 0;
        while let Some(done) = tasks.join_next().await {
            total += done??;
        }
        Ok(total as f64 / started.elapsed().as_secs_f64())
    }
}

async fn insert(mut connection: MySqlConnection, request: String, rows: usize, until: Instant) -> anyhow::Result<u64> {
    let values = vec!["(?, 'direct', 'pending', 1, ?, 0, 'bench', ?, ?, 0, 0, 0, 0, ?)"; rows].join(", ");
    let sql = format!(
        "INSERT INTO raw_transactions (id, type, status, version, request, imported, api_key, createdAt, updatedAt, \
         attempts, reroutes, replays, auto_replayed, check_at) VALUES {values}"
    );
    let mut total = 0;
    while Instant::now() < until {
        let now = OffsetDateTime::now_utc();
        let now = PrimitiveDateTime::new(now.date(), now.time());
        let mut statement = sqlx::query(AssertSqlSafe(sql.as_str()));
        for _ in 0..rows {
            statement = statement.bind(Uuid::now_v7().to_string()).bind(&request).bind(now).bind(now).bind(now);
        }
        statement.execute(&mut connection).await?;
        total += rows as u64;
    }
    connection.close().await?;
    Ok(total)
}
