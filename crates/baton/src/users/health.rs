//! The users lane's part of `/ready` and `/health`: store and queue, under the name `users`.

use std::sync::Arc;

use async_trait::async_trait;
use pipeline::Queue;
use serde_json::{Map, json};

use super::store::UserStore;
use crate::http::health::{HealthCheck, LaneHealth, PART_TIMEOUT, in_time, queue_part};

/// What the lane is asked about.
pub struct UsersHealth {
    /// The users' store.
    pub store: Arc<dyn UserStore>,
    /// The lane's queue.
    pub queue: Arc<dyn Queue>,
    /// Whether this service inserts rows; one that does not is ready without the store.
    pub consumes: bool,
}

#[async_trait]
impl HealthCheck for UsersHealth {
    async fn is_ready(&self) -> bool {
        let (queue, store) = tokio::join!(in_time(self.queue.depth()), in_time(self.store.ping()));
        queue.is_some() && (store.is_some() || !self.consumes)
    }

    async fn check(&self) -> LaneHealth {
        let asked = async { tokio::join!(self.store.ping(), self.store.count_quarantined()) };
        let (asked, depth) = tokio::join!(tokio::time::timeout(PART_TIMEOUT, asked), in_time(self.queue.depth()));
        let (store_healthy, store) = match asked {
            Ok((Ok(()), Ok(count))) => (true, json!({ "status": "ok", "quarantined": count })),
            Ok((Err(failure), _) | (_, Err(failure))) => {
                (false, json!({ "status": "unavailable", "error": failure.kind.name() }))
            }
            Err(_) => (false, json!({ "status": "unavailable" })),
        };
        let healthy = store_healthy && depth.is_some();
        let status = if healthy { "ok" } else { "unavailable" };
        let part = json!({ "status": status, "store": store, "queue": queue_part(depth.as_ref()) });
        LaneHealth { healthy, parts: Map::from_iter([("users".to_owned(), part)]) }
    }
}
