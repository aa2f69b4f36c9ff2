//! The statement of a list, put together from its filters.

use sqlx::{AssertSqlSafe, Row};

use super::columns::{columns, id};
use super::outcome::work;
use super::values::{Value, bind_all};
use super::{MySqlStore, moment};
use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::relay::store::{Filter, ListPlace, StoreError};
use crate::timestamp::Timestamp;

/// The statement and its values. The index is named: a planner without statistics may prefer to go through the table. A list
/// of several statuses and kinds takes a page of each from the index alone, and then reads the rows of its own page.
pub(super) fn statement(filter: &Filter, before: Option<ListPlace>, max: usize) -> (String, Vec<Value>) {
    let mut values = Vec::new();
    let (index, parts) = match filter {
        Filter { outcome_unknown: true, .. } => ("transactions_in_doubt", vec![filter.clone()]),
        Filter { relayer: Some(_), .. } => ("transactions_relayer", filter.by_status_and_kind()),
        Filter { status: Some(_), .. } => ("transactions_status", filter.by_status_and_kind()),
        Filter { kind: Some(_), .. } => ("transactions_type", vec![filter.clone()]),
        _ => ("transactions_created_at", vec![filter.clone()]),
    };
    let columns = columns!();
    let sql = if let [part] = parts.as_slice() {
        select(columns, part, index, before, max, &mut values)
    } else {
        let page = "id AS page_id, createdAt AS page_at";
        let each = parts.iter().map(|part| format!("({})", select(page, part, index, before, max, &mut values)));
        let each = each.collect::<Vec<_>>().join(" UNION ALL ");
        values.push(Value::from(max));
        format!(
            "SELECT {columns} FROM ({each} ORDER BY page_at DESC, page_id DESC LIMIT ?) AS page \
             STRAIGHT_JOIN transactions ON id = page_id ORDER BY createdAt DESC, id DESC"
        )
    };
    (sql, values)
}

fn select(
    columns: &str,
    filter: &Filter,
    index: &str,
    before: Option<ListPlace>,
    max: usize,
    values: &mut Vec<Value>,
) -> String {
    let mut conditions = vec!["1 = 1"];
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
        add("createdAt >= ?", Value::from(from));
    }
    if let Some(until) = filter.until {
        add("createdAt < ?", Value::from(until));
    }
    if let Some(before) = before {
        // A comparison of pairs would not be looked up in the index.
        add("createdAt <= ?", Value::from(before.created_at));
        add("(createdAt < ? OR id < ?)", Value::from(before.created_at));
        values.push(Value::from(before.id));
    }
    if filter.outcome_unknown {
        conditions.push("in_doubt = 1 AND check_at IS NOT NULL");
    }
    values.push(Value::from(max));
    let conditions = conditions.join(" AND ");
    format!(
        "SELECT {columns} FROM transactions FORCE INDEX ({index}) WHERE {conditions} \
         ORDER BY createdAt DESC, id DESC LIMIT ?"
    )
}

impl MySqlStore {
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
        self.page(&sql, &values).await
    }

    async fn created_at(&self, transaction: TransactionId) -> Result<Option<Timestamp>, StoreError> {
        let read = self.pool.read(work!(connection => {
            let row = sqlx::query("SELECT createdAt FROM transactions WHERE id = ?")
                .bind(id(transaction))
                .fetch_optional(connection)
                .await?;
            row.as_ref().map(|row| moment(row, 0)).transpose()
        }));
        read.await
    }

    /// How the database reads a page of this list: the index, how it looks rows up in it, and what it does beside that.
    pub async fn list_plan(&self, filter: &Filter, before: Option<ListPlace>) -> Result<Vec<String>, StoreError> {
        let (sql, values) = statement(filter, before, 50);
        let (sql, values) = (&format!("EXPLAIN {sql}"), &values);
        let read = self.pool.read(work!(connection => {
            let steps = bind_all(sqlx::query(AssertSqlSafe(sql.as_str())), values).fetch_all(connection).await?;
            let step = |row: &sqlx::mysql::MySqlRow| {
                let column = |name: &str| row.try_get::<Option<String>, _>(name).map(Option::unwrap_or_default);
                Ok(format!("{} by {}({}): {}", column("key")?, column("type")?, column("ref")?, column("Extra")?))
            };
            steps.iter().map(step).collect::<Result<Vec<_>, sqlx::Error>>()
        }));
        read.await
    }
}
