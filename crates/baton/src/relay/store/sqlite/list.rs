//! The statement of a list, put together from its filters.

use rusqlite::{OptionalExtension, ToSql, params_from_iter};

use super::SqliteStore;
use super::columns::COLUMNS;
use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::relay::store::{Filter, ListPlace, StoreError};
use crate::timestamp::Timestamp;

type Values = Vec<Box<dyn ToSql + Send>>;

/// The statement and its values. The index is named: a planner without statistics may prefer to go through the table. Lists
/// merge the rows of each status and kind, in the order of their index: an index for each combination of filters
/// would cost every accepted row. Rows whose outcome is unknown are few.
pub(super) fn statement(filter: &Filter, before: Option<ListPlace>, max: usize) -> (String, Values) {
    let mut values = Values::new();
    let (index, parts) = match filter {
        Filter { outcome_unknown: true, .. } => ("transactions_in_doubt", vec![filter.clone()]),
        Filter { relayer: Some(_), .. } => ("transactions_relayer", filter.by_status_and_kind()),
        _ => ("transactions_status", filter.by_status_and_kind()),
    };
    let rows: Vec<_> = parts.iter().map(|part| select(part, index, before, &mut values)).collect();
    values.push(Box::new(i64::try_from(max).unwrap_or(i64::MAX)));
    (format!("{} ORDER BY created_at DESC, id DESC LIMIT ?", rows.join(" UNION ALL ")), values)
}

fn select(filter: &Filter, index: &str, before: Option<ListPlace>, values: &mut Values) -> String {
    let mut conditions = vec!["1 = 1"];
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
    if let Some(from) = filter.from {
        add("created_at >= ?", Box::new(from.0));
    }
    // A place before that time is the closer bound, and SQLite looks up only one.
    if let Some(until) = filter.until.filter(|until| before.is_none_or(|before| before.created_at >= *until)) {
        add("created_at < ?", Box::new(until.0));
    }
    if let Some(before) = before {
        add("(created_at, id) < (?, ?)", Box::new(before.created_at.0));
        values.push(Box::new(before.id.0.into_bytes()));
    }
    if filter.outcome_unknown {
        conditions.push("check_at IS NOT NULL AND (claim_doubt IS NOT NULL OR forgotten_since IS NOT NULL)");
    }
    let conditions = conditions.join(" AND ");
    format!("SELECT {COLUMNS} FROM transactions INDEXED BY {index} WHERE {conditions}")
}

impl SqliteStore {
    pub(super) async fn list_page(
        &self,
        filter: &Filter,
        before: Option<TransactionId>,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError> {
        let place = match before {
            None => None,
            Some(id) => match self.created_at(id).await? {
                None => return Ok(Vec::new()),
                Some(created_at) => Some(ListPlace { created_at, id }),
            },
        };
        let (sql, values) = statement(filter, place, max);
        self.page(sql, values).await
    }

    async fn created_at(&self, id: TransactionId) -> Result<Option<Timestamp>, StoreError> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT created_at FROM transactions WHERE id = ?1")?
                .query_row([id.0.as_bytes()], |row| Ok(Timestamp(row.get(0)?)))
                .optional()
        })
        .await
    }

    /// How the database reads a page of this list: one line for each step.
    pub async fn list_plan(&self, filter: &Filter, before: Option<ListPlace>) -> Result<Vec<String>, StoreError> {
        let (sql, values) = statement(filter, before, 50);
        self.read(move |connection| {
            let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
            let steps = statement.query_map(params_from_iter(values.iter()), |row| row.get("detail"))?;
            steps.collect()
        })
        .await
    }
}
