//! Raw PostgreSQL: rows like ours into a table like ours, by binary COPY and by multi-row insert, each batch its own
//! durable commit. Neither tolerates a row that is there already.

use std::sync::Arc;
use std::time::Instant;

use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;
use uuid::Uuid;

use baton::users::user::User;

/// Rows in a batch, and connections, that are tried.
const ROWS: [usize; 2] = [1000, 10_000];
const CONNECTIONS: [usize; 2] = [1, 2];
/// Rows of a look at one way before the best is measured.
const LOOKED_AT_MAX: usize = 20_000;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS raw_users (LIKE users INCLUDING ALL); TRUNCATE raw_users";
const COPY: &str = "COPY raw_users (id, name, email) FROM STDIN (FORMAT binary)";
const INSERT: &str = "INSERT INTO raw_users (id, name, email) SELECT id, name, email \
     FROM UNNEST($1::uuid[], $2::text[], $3::text[]) AS new (id, name, email)";

/// How a batch is written.
#[derive(Clone, Copy)]
pub enum How {
    Copy,
    Insert,
}

/// See the top of this file.
pub struct RawWrites {
    url: String,
    how: How,
    best: Option<(usize, usize)>,
}

impl RawWrites {
    /// Into this database, which has our schema.
    pub fn new(url: &str, how: How) -> Self {
        Self { url: url.to_owned(), how, best: None }
    }

    /// Which way was best.
    pub fn how(&self) -> String {
        let (rows, connections) = self.best.unwrap_or_default();
        format!("{rows} rows in a commit, {connections} connections")
    }

    /// Rows a second in the best way.
    pub async fn rate(&mut self, users: &Arc<[User]>) -> anyhow::Result<f64> {
        let (rows, connections) = match self.best {
            Some(best) => best,
            None => {
                let few: Arc<[User]> = users.iter().take(LOOKED_AT_MAX).cloned().collect();
                let mut best = (0.0, (ROWS[0], CONNECTIONS[0]));
                for way in ROWS.into_iter().flat_map(|rows| CONNECTIONS.map(|connections| (rows, connections))) {
                    let rate = self.measure(&few, way.0, way.1).await?;
                    if rate > best.0 {
                        best = (rate, way);
                    }
                }
                *self.best.insert(best.1)
            }
        };
        self.measure(users, rows, connections).await
    }

    async fn measure(&self, users: &Arc<[User]>, rows: usize, connections: usize) -> anyhow::Result<f64> {
        let mut ready = Vec::new();
        for _ in 0..connections {
            ready.push(PgConnection::connect(&self.url).await?);
        }
        sqlx::raw_sql(TABLE).execute(&mut ready[0]).await?;
        let share = users.len().div_ceil(connections).max(1);
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for (number, connection) in ready.into_iter().enumerate() {
            let part = (share * number).min(users.len())..(share * (number + 1)).min(users.len());
            tasks.spawn(write(connection, Arc::clone(users), part, rows, self.how));
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(users.len() as f64 / started.elapsed().as_secs_f64())
    }
}

async fn write(
    mut connection: PgConnection,
    users: Arc<[User]>,
    part: std::ops::Range<usize>,
    rows: usize,
    how: How,
) -> anyhow::Result<()> {
    for batch in users[part].chunks(rows) {
        match how {
            How::Copy => {
                let mut copy = connection.copy_in_raw(COPY).await?;
                copy.send(binary(batch)).await?;
                copy.finish().await?;
            }
            How::Insert => {
                let ids: Vec<Uuid> = batch.iter().map(|user| user.id.0).collect();
                let names: Vec<&str> = batch.iter().map(|user| user.name.as_str()).collect();
                let emails: Vec<&str> = batch.iter().map(|user| user.email.as_str()).collect();
                sqlx::query(INSERT).bind(ids).bind(names).bind(emails).execute(&mut connection).await?;
            }
        }
    }
    Ok(connection.close().await?)
}

/// The rows as COPY wants them: a head, for each row its fields with their lengths, and an end.
fn binary(batch: &[User]) -> Vec<u8> {
    const COLUMNS: i16 = 3;
    const END: i16 = -1;
    let mut bytes = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0".to_vec();
    for User { id, name, email } in batch {
        bytes.extend_from_slice(&COLUMNS.to_be_bytes());
        for field in [id.0.as_bytes().as_slice(), name.as_bytes(), email.as_bytes()] {
            bytes.extend_from_slice(&i32::try_from(field.len()).unwrap_or(i32::MAX).to_be_bytes());
            bytes.extend_from_slice(field);
        }
    }
    bytes.extend_from_slice(&END.to_be_bytes());
    bytes
}
