//! Reads the rows that concurrent callers want with one statement: a consumer that has just received ten messages asks
//! for ten rows.

use std::collections::HashMap;
use std::sync::Arc;

use sqlx::Row;
use sqlx::mysql::MySqlRow;

use super::columns::{columns, id, read_row};
use super::outcome::work;
use super::pool::Pool;
use super::save::{bind_padded, places};
use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::relay::store::StoreError;
use crate::relay::store::coalescer::same_failure;

/// Maximum number of rows in one query; a row may have hundreds of kilobytes.
const ROWS_MAX: usize = 64;

type Found = Result<Option<Transaction>, StoreError>;

/// Reads each row; `None` if there is none.
pub(super) async fn get_many(pool: &Pool, ids: &[TransactionId]) -> Vec<Found> {
    let mut found = Vec::with_capacity(ids.len());
    for some in ids.chunks(ROWS_MAX) {
        match read(pool, some).await {
            Ok(rows) => found.extend(rows),
            Err(failure) => {
                let failure = Arc::new(failure);
                found.extend(some.iter().map(|_| Err(same_failure(&failure))));
            }
        }
    }
    found
}

async fn read(pool: &Pool, ids: &[TransactionId]) -> Result<Vec<Found>, StoreError> {
    let names: Vec<String> = ids.iter().map(|name| id(*name)).collect();
    let sql = format!(concat!("SELECT ", columns!(), " FROM transactions WHERE id IN ({})"), places(names.len()));
    let (sql, names) = (sql.as_str(), names.as_slice());
    let read = pool.read(work!(connection => {
        let rows = bind_padded(sql, names).fetch_all(connection).await?;
        let by_id = rows.iter().map(|row| Ok((row.try_get("id")?, row)));
        let by_id = by_id.collect::<Result<HashMap<String, &MySqlRow>, sqlx::Error>>()?;
        // Two callers may want the same row: each gets a copy.
        let one = |name: &String| by_id.get(name).map(|row| read_row(row)).transpose();
        names.iter().map(one).map(|row| Ok(row?.transpose())).collect()
    }));
    read.await
}
