//! The statement of a list, put together from its filters.

use rusqlite::{ToSql, params_from_iter};

use super::SqliteStore;
use super::columns::COLUMNS;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::row::first_id_at;
use crate::relay::store::{Filter, StoreError};

/// The statement and its values.
pub(super) fn statement(
    filter: &Filter,
    before: Option<TransactionId>,
    max: usize,
) -> (String, Vec<Box<dyn ToSql + Send>>) {
    let mut conditions = vec!["1 = 1"];
    let mut values: Vec<Box<dyn ToSql + Send>> = Vec::new();
    let mut add = |condition: &'static str, value: Box<dyn ToSql + Send>| {
        conditions.push(condition);
        values.push(value);
    };
    if let Some(status) = filter.status {
        add("status = ?", Box::new(status.name()));
    }
    if let Some(kind) = filter.kind {
        add("kind = ?", Box::new(kind.name()));
    }
    if let Some(relayer) = &filter.relayer {
        add("COALESCE(relayer_url, claim_relayer) = ?", Box::new(relayer.0.clone()));
    }
    // Ids begin with the time, so a bound on the time is a bound on the id.
    if let Some(from) = filter.from {
        add("id >= ?", Box::new(first_id_at(from)));
    }
    if let Some(until) = filter.until {
        add("id < ?", Box::new(first_id_at(until)));
    }
    if let Some(before) = before {
        add("id < ?", Box::new(before.0.into_bytes()));
    }
    if filter.outcome_unknown {
        conditions.push("check_at IS NOT NULL AND (claim_doubt IS NOT NULL OR forgotten_since IS NOT NULL)");
    }
    values.push(Box::new(i64::try_from(max).unwrap_or(i64::MAX)));
    let conditions = conditions.join(" AND ");
    let index = filter.index().map(|name| format!(" INDEXED BY {name}")).unwrap_or_default();
    let sql =
        format!("SELECT {COLUMNS} FROM transactions{index} WHERE {conditions} ORDER BY transactions.id DESC LIMIT ?");
    (sql, values)
}

impl SqliteStore {
    /// How the database reads the first page of this list: one line for each step.
    pub async fn list_plan(&self, filter: &Filter) -> Result<Vec<String>, StoreError> {
        let (sql, values) = statement(filter, None, 50);
        self.read(move |connection| {
            let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
            let steps = statement.query_map(params_from_iter(values.iter()), |row| row.get("detail"))?;
            steps.collect()
        })
        .await
    }
}
