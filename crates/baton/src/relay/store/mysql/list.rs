//! The statement of a list, put together from its filters.

use sqlx::{AssertSqlSafe, Row};

use super::MySqlStore;
use super::columns::{columns, first_stored_id_at};
use super::outcome::work;
use super::values::{Value, bind_all};
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::{Filter, StoreError};

/// The statement and its values.
pub(super) fn statement(filter: &Filter, before: Option<TransactionId>, max: usize) -> (String, Vec<Value>) {
    let mut conditions = vec!["1 = 1"];
    let mut values = Vec::new();
    let mut add = |condition: &'static str, value: Value| {
        conditions.push(condition);
        values.push(value);
    };
    if let Some(status) = filter.status {
        add("status = ?", Value::Text(status.name().to_owned()));
    }
    if let Some(kind) = filter.kind {
        add("type = ?", Value::Text(kind.name().to_owned()));
    }
    if let Some(relayer) = &filter.relayer {
        add("relayer = ?", Value::Text(relayer.0.clone()));
    }
    if let Some(from) = filter.from {
        add("id >= ?", Value::Text(first_stored_id_at(from)));
    }
    if let Some(until) = filter.until {
        add("id < ?", Value::Text(first_stored_id_at(until)));
    }
    if let Some(before) = before {
        add("id < ?", Value::from(before));
    }
    if filter.outcome_unknown {
        conditions.push("in_doubt = 1 AND check_at IS NOT NULL");
    }
    values.push(Value::from(max));
    let conditions = conditions.join(" AND ");
    let columns = columns!();
    let index = filter.index().map(|name| format!(" FORCE INDEX ({name})")).unwrap_or_default();
    (format!("SELECT {columns} FROM transactions{index} WHERE {conditions} ORDER BY id DESC LIMIT ?"), values)
}

impl MySqlStore {
    /// How the database reads the first page of this list: the index, and what it does beside reading it.
    pub async fn list_plan(&self, filter: &Filter) -> Result<Vec<String>, StoreError> {
        let (sql, values) = statement(filter, None, 50);
        let (sql, values) = (&format!("EXPLAIN {sql}"), &values);
        let read = self.pool.read(work!(connection => {
            let steps = bind_all(sqlx::query(AssertSqlSafe(sql.as_str())), values).fetch_all(connection).await?;
            let step = |row: &sqlx::mysql::MySqlRow| {
                let (key, extra) = (row.try_get::<Option<String>, _>("key")?, row.try_get::<Option<String>, _>("Extra")?);
                Ok(format!("{}: {}", key.unwrap_or_default(), extra.unwrap_or_default()))
            };
            steps.iter().map(step).collect::<Result<Vec<_>, sqlx::Error>>()
        }));
        read.await
    }
}
