//! What a development relayer remembers over a restart: each record, and whether its end has been told.
//!
//! A record is on disk before its POST is answered. The database commits in groups, so many POSTs share one commit.

use pipeline::sqlite::{Database, DatabaseError};
use rusqlite::{Connection, params};

use super::record::Record;

/// Rows of one relayer lie together: its index above, the record's number in the lower bits.
const NUMBER_BITS: u32 = 44;

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS dev_relayer_records (
    key INTEGER PRIMARY KEY,
    told INTEGER NOT NULL,
    record TEXT NOT NULL
) STRICT";

#[derive(Clone)]
pub(super) struct Journal {
    database: Database,
    /// The key of number 0.
    base: i64,
}

/// What was there at the start.
#[derive(Default)]
pub(super) struct Remembered {
    /// Oldest first, with whether its end has been told.
    pub(super) records: Vec<(Record, bool)>,
    pub(super) next_number: u64,
}

impl Journal {
    pub(super) async fn open(database: Database, index: usize) -> Result<Self, DatabaseError> {
        database.write(|connection| connection.execute_batch(SCHEMA)).await?;
        let index = i64::try_from(index).unwrap_or(i64::MAX >> NUMBER_BITS).min(i64::MAX >> NUMBER_BITS);
        Ok(Self { database, base: index << NUMBER_BITS })
    }

    /// Everything untold, and the newest `told_max` of the others.
    pub(super) async fn load(&self, told_max: usize) -> Result<Remembered, DatabaseError> {
        let base = self.base;
        self.database.read(move |connection| load(connection, base, told_max)).await
    }

    /// Returns when the record is on disk.
    pub(super) async fn store(&self, record: &Record) -> Result<(), DatabaseError> {
        let key = self.key(record.number);
        let text = serde_json::to_string(record).unwrap_or_default();
        self.database
            .write(move |connection| {
                connection
                    .prepare_cached("INSERT INTO dev_relayer_records (key, told, record) VALUES (?1, 0, ?2)")?
                    .execute(params![key, text])
            })
            .await?;
        Ok(())
    }

    /// What has come of a record on the chain since; it is on disk when this returns.
    pub(super) async fn update(&self, record: &Record) -> Result<(), DatabaseError> {
        let key = self.key(record.number);
        let text = serde_json::to_string(record).unwrap_or_default();
        self.database
            .write(move |connection| {
                connection
                    .prepare_cached("UPDATE dev_relayer_records SET record = ?2 WHERE key = ?1")?
                    .execute(params![key, text])
            })
            .await?;
        Ok(())
    }

    /// Marks the ends of these as told, and forgets told ones below `oldest_kept`.
    pub(super) async fn mark_told(&self, numbers: Vec<u64>, oldest_kept: u64) -> Result<(), DatabaseError> {
        let keys: Vec<i64> = numbers.into_iter().map(|number| self.key(number)).collect();
        let (base, oldest) = (self.base, self.key(oldest_kept));
        self.database
            .write(move |connection| {
                let mut told = connection.prepare_cached("UPDATE dev_relayer_records SET told = 1 WHERE key = ?1")?;
                for key in keys {
                    told.execute([key])?;
                }
                connection
                    .prepare_cached("DELETE FROM dev_relayer_records WHERE key >= ?1 AND key < ?2 AND told = 1")?
                    .execute([base, oldest])
            })
            .await?;
        Ok(())
    }

    fn key(&self, number: u64) -> i64 {
        self.base | i64::try_from(number).unwrap_or_default()
    }
}

fn load(connection: &Connection, base: i64, told_max: usize) -> Result<Remembered, rusqlite::Error> {
    let mut statement = connection
        .prepare("SELECT key, told, record FROM dev_relayer_records WHERE key >= ?1 AND key < ?2 ORDER BY key DESC")?;
    let mut rows = statement.query([base, base + (1 << NUMBER_BITS)])?;
    let mut found = Remembered::default();
    let mut told_seen = 0;
    while let Some(row) = rows.next()? {
        let number = u64::try_from(row.get::<_, i64>(0)? - base).unwrap_or_default();
        found.next_number = found.next_number.max(number + 1);
        let told: bool = row.get(1)?;
        told_seen += usize::from(told);
        if told && told_seen > told_max {
            continue;
        }
        match serde_json::from_str::<Record>(row.get_ref(2)?.as_str()?) {
            Ok(mut record) => {
                record.number = number;
                found.records.push((record, told));
            }
            // Written by another version. It is nobody's money: say so and go on without it.
            Err(error) => {
                tracing::warn!(number, %error, "a development relayer's record could not be read and is left out")
            }
        }
    }
    found.records.reverse();
    Ok(found)
}
