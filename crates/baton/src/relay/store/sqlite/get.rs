//! Reads the rows that concurrent callers want in one run of a reader thread, because changing threads costs more than
//! reading a row.

use std::sync::{Arc, LazyLock};

use pipeline::sqlite::{Database, DatabaseError};
use rusqlite::{Connection, OptionalExtension, params};

use super::columns::{COLUMNS, raw_row};
use super::store_error;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::StoreError;
use crate::relay::store::coalescer::same_failure;
use crate::relay::store::row::RawRow;

type Found = Result<Option<RawRow>, StoreError>;

/// Reads each row; `None` if there is none. A row that cannot be read fails alone.
pub(super) async fn get_many(database: Database, ids: Vec<TransactionId>) -> Vec<Found> {
    let count = ids.len();
    let rows = database.read(move |connection| {
        let mut rows: Vec<_> = ids.iter().map(|id| read(connection, *id)).collect();
        // A connection on which nothing can be read is replaced, as after any read that failed.
        if rows.iter().all(Result::is_err)
            && let Some(Err(failure)) = rows.pop()
        {
            Err(failure)
        } else {
            Ok(rows)
        }
    });
    match rows.await {
        Ok(rows) => rows.into_iter().map(|row| row.map_err(|error| store_error(DatabaseError::from(error)))).collect(),
        Err(failure) => {
            let failure = Arc::new(store_error(failure));
            (0..count).map(|_| Err(same_failure(&failure))).collect()
        }
    }
}

fn read(connection: &Connection, id: TransactionId) -> Result<Option<RawRow>, rusqlite::Error> {
    static SQL: LazyLock<String> = LazyLock::new(|| format!("SELECT {COLUMNS} FROM transactions WHERE id = ?1"));
    connection.prepare_cached(&SQL)?.query_row(params![id.0.as_bytes()], raw_row).optional()
}
