//! The HTTP calls that read: one transaction's status, the list, and one transaction's timeline.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::{Json, Router, routing};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::http::problem::{FieldProblem, PROBLEMS_MAX, Problem};
use crate::relay::observe::status::{Found, StatusLookup};
use crate::relay::state::transaction::{Kind, RelayerUrl, Status, TransactionId};
use crate::relay::store::{Filter, StoreError};
use crate::relay::update::guarded_store::GuardedStore;
use crate::relay::update::view::show;
use crate::timestamp::Timestamp;

/// State of the reading calls.
pub struct ReadApi {
    /// Cache, database and relayers, in that order.
    pub lookup: StatusLookup,
    /// The transactions.
    pub guarded: Arc<GuardedStore>,
    /// Lists that are being read. The others wait here and not in front of the store, where probes and accepts would wait
    /// behind them.
    pub lists: Semaphore,
}

/// Lists that are read at once: fewer than the embedded store has readers.
pub const LISTS_MAX: usize = 3;

/// The routes; they need an API key in front.
pub fn routes(state: ReadApi) -> Router {
    Router::new()
        .route("/api/v1/relay/status/{id}", routing::get(status))
        .route("/api/v1/relay/transactions", routing::get(list))
        .route("/api/v1/relay/transactions/{id}/timeline", routing::get(timeline))
        .with_state(Arc::new(state))
}

async fn status(State(state): State<Arc<ReadApi>>, id: PathId) -> Result<Json<Value>, Problem> {
    let id = read_id(id)?;
    match state.lookup.find(id).await.map_err(store_problem)? {
        Found::Known(shown) => Ok(Json(shown)),
        Found::Unknown => Err(Problem::not_found(format!("there is no transaction {id}"))),
        // Not a 404: a relayer may know it.
        Found::NotAsked => Err(Problem::too_many_lookups()),
    }
}

async fn timeline(State(state): State<Arc<ReadApi>>, id: PathId) -> Result<Json<Value>, Problem> {
    let id = read_id(id)?;
    let Some(row) = state.guarded.store.get(id).await.map_err(store_problem)? else {
        return Err(Problem::not_found(format!("there is no transaction {id}")));
    };
    let mut steps =
        vec![json!({ "seq": 0, "at": row.created_at, "action": "accepted", "detail": "stored and queued" })];
    for entry in state.guarded.store.timeline(id).await.map_err(store_problem)? {
        steps.push(json!(entry));
    }
    Ok(Json(json!({ "transactionId": id.to_string(), "status": row.status.name(), "steps": steps })))
}

const LIST_MAX: usize = 200;
const LIST_DEFAULT: usize = 50;

async fn list(State(state): State<Arc<ReadApi>>, RawQuery(query): RawQuery) -> Result<Json<Value>, Problem> {
    let ListQuery { filter, before, limit } = ListQuery::parse(query.as_deref().unwrap_or_default())?;
    let _turn = state.lists.acquire().await;
    let mut rows = state.guarded.store.list(&filter, before, limit + 1).await.map_err(store_problem)?;
    let mut more = rows.len() > limit;
    rows.truncate(limit);
    let last = rows.last().map(|row| row.id);
    let shown: Vec<_> = rows.iter().map(show).collect();
    drop(rows);
    if let (false, Some(last)) = (more, last) {
        // It may have ended early, with large rows.
        more = !state.guarded.store.list(&filter, Some(last), 1).await.map_err(store_problem)?.is_empty();
    }
    let next = last.filter(|_| more).map(|last| last.to_string());
    Ok(Json(json!({ "transactions": shown, "nextCursor": next })))
}

#[derive(Debug)]
struct ListQuery {
    filter: Filter,
    before: Option<TransactionId>,
    limit: usize,
}

impl ListQuery {
    /// Reads the query; an unknown or malformed parameter is named.
    fn parse(query: &str) -> Result<Self, Problem> {
        let (read, problems) = Self::read(query);
        if problems.is_empty() { Ok(read) } else { Err(Problem::invalid(problems)) }
    }

    fn read(query: &str) -> (Self, Vec<FieldProblem>) {
        let mut read = Self { filter: Filter::default(), before: None, limit: LIST_DEFAULT };
        let mut problems = Vec::new();
        let url = reqwest::Url::parse(&format!("http://query/?{query}"));
        for (name, value) in url.iter().flat_map(reqwest::Url::query_pairs) {
            let Err(message) = read.set(&name, &value) else { continue };
            let problem = FieldProblem { field: name.into_owned(), message };
            if !problems.contains(&problem) {
                problems.push(problem);
            }
            // More would not be shown.
            if problems.len() > PROBLEMS_MAX {
                break;
            }
        }
        (read, problems)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let time = || Timestamp::parse(value).ok_or_else(|| "must be an RFC 3339 time".to_owned());
        match name {
            "status" => {
                let names: Vec<_> = Status::ALL.iter().map(|status| status.name()).collect();
                let status = Status::parse(value).ok_or_else(|| format!("must be one of {}", names.join(", ")))?;
                self.filter.status = Some(status);
            }
            "type" => {
                self.filter.kind = Some(Kind::parse(value).ok_or_else(|| "must be direct or gasless".to_owned())?);
            }
            "relayer" => self.filter.relayer = Some(RelayerUrl(value.trim_end_matches('/').to_owned())),
            "from" => self.filter.from = Some(time()?),
            "until" => self.filter.until = Some(time()?),
            "outcomeUnknown" => {
                self.filter.outcome_unknown = value.parse().map_err(|_| "must be true or false".to_owned())?;
            }
            "cursor" => {
                let id = Uuid::parse_str(value).map_err(|_| "must be a nextCursor of this list".to_owned())?;
                self.before = Some(TransactionId(id));
            }
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=LIST_MAX).contains(limit));
                self.limit = limit.ok_or_else(|| format!("must be a number from 1 to {LIST_MAX}"))?;
            }
            _ => {
                return Err(
                    "is not known; known are status, type, relayer, from, until, outcomeUnknown, cursor, limit"
                        .to_owned(),
                );
            }
        }
        Ok(())
    }
}

/// An id in the path; invalid UTF-8 is refused like any other text that is no UUID.
type PathId = Result<Path<String>, PathRejection>;

fn read_id(id: PathId) -> Result<TransactionId, Problem> {
    let parsed = id.ok().and_then(|Path(text)| Uuid::parse_str(&text).ok());
    parsed.map(TransactionId).ok_or_else(|| {
        Problem::invalid(vec![FieldProblem {
            field: "transactionId".to_owned(),
            message: "must be a UUID, as it was given in the 202".to_owned(),
        }])
    })
}

fn store_problem(failure: StoreError) -> Problem {
    Problem::unavailable("the store is unavailable; ask again", &failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_query_is_read_or_named() {
        let read = ListQuery::parse("status=failed&limit=10&from=2026-01-01T00:00:00Z&outcomeUnknown=true").unwrap();
        assert_eq!((read.filter.status, read.limit, read.filter.outcome_unknown), (Some(Status::Failed), 10, true));
        let problem = ListQuery::parse("status=done&limit=0&colour=red&cursor=x&from=now").unwrap_err();
        let fields: Vec<_> = problem.errors.iter().map(|found| found.field.as_str()).collect();
        assert_eq!(fields, ["status", "limit", "colour", "cursor", "from"]);
    }

    /// 64 KB of `a&` were answered with 9.7 MB.
    #[test]
    fn a_parameter_named_many_times_is_one_problem() {
        assert_eq!(ListQuery::parse(&"a&".repeat(32_000)).unwrap_err().errors.len(), 1);
        let many: String = (0..10_000).map(|number| format!("p{number}&")).collect();
        assert_eq!(ListQuery::read(&many).1.len(), PROBLEMS_MAX + 1, "the rest of the query is not read");
        let problem = ListQuery::parse(&many).unwrap_err();
        assert_eq!(problem.errors.len(), PROBLEMS_MAX);
        assert!(problem.to_json(None).to_string().len() < 8 * 1024);
    }
}
