//! Raw PostgreSQL: rows into a copy of the `users` table, by binary COPY and by multi-row insert; each batch is a durable
//! commit. Neither tolerates a row that exists.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use baton::users::user::User;
use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{fastest, join_sum, pairs};

/// Candidates: rows in a batch, and connections.
const ROWS: [usize; 2] = [1000, 10_000];
const CONNECTIONS: [usize; 2] = [1, 2];
/// Rows for the measurement of one candidate.
const CANDIDATE_ROWS_MAX: usize = 20_000;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS raw_users (LIKE users INCLUDING ALL); TRUNCATE raw_users";
const COPY: &str = "COPY raw_users (id, name, email) FROM STDIN (FORMAT binary)";
const INSERT: &str = "INSERT INTO raw_users (id, name, email) SELECT id, name, email \
     FROM UNNEST($1::uuid[], $2::text[], $3::text[]) AS new (id, name, email)";

/// How a batch is written.
#[derive(Clone, Copy)]
pub enum WriteMethod {
    Copy,
    Insert,
}

pub struct RawWrites {
    url: String,
    method: WriteMethod,
    /// Rows in a batch and connections, after the first measurement.
    fastest: Option<(usize, usize)>,
}

impl RawWrites {
    /// The database needs the product's schema.
    pub fn new(url: &str, method: WriteMethod) -> Self {
        Self { url: url.to_owned(), method, fastest: None }
    }

    /// The fastest candidate, for a note.
    pub fn fastest(&self) -> String {
        let (rows, connections) = self.fastest.unwrap_or_default();
        format!("{rows} rows in a commit, {connections} connections")
    }

    /// Rows per second with the fastest candidate.
    pub async fn rate(&mut self, users: &Arc<[User]>) -> anyhow::Result<f64> {
        let candidate = match self.fastest {
            Some(known) => known,
            None => {
                let sample: Arc<[User]> = users.iter().take(CANDIDATE_ROWS_MAX).cloned().collect();
                let rate = async |pair| self.measure(&sample, pair).await;
                let measured = fastest(pairs(ROWS, CONNECTIONS), rate).await?;
                *self.fastest.insert(measured.0)
            }
        };
        self.measure(users, candidate).await
    }

    async fn measure(&self, users: &Arc<[User]>, (rows, connections): (usize, usize)) -> anyhow::Result<f64> {
        let mut open = Vec::new();
        for _ in 0..connections {
            open.push(PgConnection::connect(&self.url).await?);
        }
        sqlx::raw_sql(TABLE).execute(&mut open[0]).await?;
        let share = users.len().div_ceil(connections).max(1);
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for (number, connection) in open.into_iter().enumerate() {
            let part = (share * number).min(users.len())..(share * (number + 1)).min(users.len());
            tasks.spawn(write(connection, Arc::clone(users), part, rows, self.method));
        }
        Ok(join_sum(tasks).await? as f64 / started.elapsed().as_secs_f64())
    }
}

async fn write(
    mut connection: PgConnection,
    users: Arc<[User]>,
    part: Range<usize>,
    rows: usize,
    method: WriteMethod,
) -> anyhow::Result<u64> {
    let total = part.len() as u64;
    for batch in users[part].chunks(rows) {
        match method {
            WriteMethod::Copy => {
                let mut copy = connection.copy_in_raw(COPY).await?;
                copy.send(binary(batch)).await?;
                copy.finish().await?;
            }
            WriteMethod::Insert => {
                let ids: Vec<Uuid> = batch.iter().map(|user| user.id.0).collect();
                let names: Vec<&str> = batch.iter().map(|user| user.name.as_str()).collect();
                let emails: Vec<&str> = batch.iter().map(|user| user.email.as_str()).collect();
                sqlx::query(INSERT).bind(ids).bind(names).bind(emails).execute(&mut connection).await?;
            }
        }
    }
    connection.close().await?;
    Ok(total)
}

/// The rows in COPY's binary format: header, for each row its fields with their lengths, trailer.
fn binary(batch: &[User]) -> Vec<u8> {
    const COLUMNS: i16 = 3;
    const TRAILER: i16 = -1;
    let mut bytes = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0".to_vec();
    for User { id, name, email } in batch {
        bytes.extend_from_slice(&COLUMNS.to_be_bytes());
        for field in [id.0.as_bytes().as_slice(), name.as_bytes(), email.as_bytes()] {
            bytes.extend_from_slice(&i32::try_from(field.len()).unwrap_or(i32::MAX).to_be_bytes());
            bytes.extend_from_slice(field);
        }
    }
    bytes.extend_from_slice(&TRAILER.to_be_bytes());
    bytes
}
