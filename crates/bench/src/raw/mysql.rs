//! Raw multi-row inserts into a copy of the `transactions` table; each statement is a durable commit.

use std::time::{Duration, Instant};

use anyhow::Context;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use time::{OffsetDateTime, PrimitiveDateTime};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{candidate_span, fastest, join_sum, pairs};
use crate::transactions::request_column;

/// Candidates: rows in a statement, and connections.
const ROWS: [usize; 3] = [100, 250, 1000];
const CONNECTIONS: [usize; 3] = [1, 2, 4];

pub struct RawInserts {
    url: String,
    /// Rows in a statement and connections, after the first measurement.
    fastest: Option<(usize, usize)>,
}

impl RawInserts {
    /// The database needs the product's schema.
    pub fn new(url: &str) -> Self {
        Self { url: url.to_owned(), fastest: None }
    }

    /// Rows per second with the fastest candidate.
    pub async fn rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        let candidate = match self.fastest {
            Some(known) => known,
            None => {
                let span = candidate_span(span);
                let measured = fastest(pairs(ROWS, CONNECTIONS), async |pair| self.measure(pair, span).await).await?;
                *self.fastest.insert(measured.0)
            }
        };
        self.measure(candidate, span).await
    }

    /// The fastest candidate, for a note.
    pub fn fastest(&self) -> String {
        let (rows, connections) = self.fastest.unwrap_or_default();
        format!("{rows} rows in a statement, {connections} connections")
    }

    async fn measure(&self, (rows, connections): (usize, usize), span: Duration) -> anyhow::Result<f64> {
        let mut first = MySqlConnection::connect(&self.url).await?;
        let create = "DROP TABLE IF EXISTS raw_transactions; CREATE TABLE raw_transactions LIKE transactions";
        sqlx::raw_sql(create).execute(&mut first).await.context("cannot copy the table `transactions`")?;
        let request = request_column()?;
        let mut open = vec![first];
        while open.len() < connections {
            open.push(MySqlConnection::connect(&self.url).await?);
        }
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for connection in open {
            tasks.spawn(insert(connection, request.clone(), rows, started + span));
        }
        Ok(join_sum(tasks).await? as f64 / started.elapsed().as_secs_f64())
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
