//! The HTTP calls of the users lane: enrol one user, look one up; [`super::bulk`] enrols many.
//!
//! Next: [`super::intake`] queues the user.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::{Extension, Json, Router, routing};
use serde_json::{Value, json};
use uuid::Uuid;

use super::bulk;
use super::intake::UserIntake;
use super::user::{User, UserId};
use crate::http::auth::Caller;
use crate::http::body::JsonBody;
use crate::http::idempotency_header::read_idempotency_key;
use crate::http::problem::{FieldProblem, Problem};

/// The routes; the caller puts them behind an API key.
pub fn routes(intake: UserIntake) -> Router {
    Router::new()
        .route("/api/v1/users", routing::post(enrol))
        .route("/api/v1/users/bulk", routing::post(bulk::enrol_many))
        .route("/api/v1/users/{id}", routing::get(show))
        .with_state(Arc::new(intake))
}

async fn enrol(
    State(intake): State<Arc<UserIntake>>,
    Extension(Caller(caller)): Extension<Caller>,
    headers: HeaderMap,
    JsonBody(body, _memory): JsonBody,
) -> Result<Json<Value>, Problem> {
    let key = read_idempotency_key(&headers)?;
    let id = key.map_or_else(UserId::generate, |key| UserId::of_key(&caller, key));
    let user = User::from_request(&body, id).map_err(Problem::invalid)?;
    let id = intake.accept_one(user, key.is_some()).await?;
    Ok(Json(json!({ "id": id })))
}

async fn show(
    State(intake): State<Arc<UserIntake>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, Problem> {
    let parsed = id.ok().and_then(|Path(text)| Uuid::parse_str(&text).ok());
    let id = parsed.map(UserId).ok_or_else(|| {
        let message = "must be a UUID: the id in the answer to the enrolment".to_owned();
        Problem::invalid(vec![FieldProblem { field: "id".to_owned(), message }])
    })?;
    let found = intake.store.get(id).await;
    let found =
        found.map_err(|failure| Problem::unavailable("the users' database is unavailable; try again", &failure))?;
    let enrolled = found.ok_or_else(|| Problem::not_found(format!("user {id} is not enrolled, or not yet")))?;
    let User { id, name, email } = enrolled.user;
    Ok(Json(json!({ "id": id, "name": name, "email": email, "createdAt": enrolled.created_at })))
}
