//! The users lane's part of `/ready` and `/health`: store and queue, under the name `users`.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, json};

use super::store::UserStore;
use crate::http::health::{HealthCheck, LaneHealth, PART_TIMEOUT, QueueCheck, in_time};

/// What the lane is asked about.
pub struct UsersHealth {
    /// The users' store.
    pub store: Arc<dyn UserStore>,
    /// The lane's queue.
    pub queue: QueueCheck,
    /// Whether the service is ready only with the store: it inserts rows, or the store is a file of this machine.
    pub needs_store: bool,
}

#[async_trait]
impl HealthCheck for UsersHealth {
    async fn is_ready(&self) -> bool {
        let (queue, store) = tokio::join!(self.queue.is_healthy(), in_time(self.store.ping()));
        queue && (store.is_some() || !self.needs_store)
    }

    async fn check(&self) -> LaneHealth {
        let asked = async { tokio::join!(self.store.ping(), self.store.count_quarantined()) };
        let (asked, (queue_healthy, queue)) =
            tokio::join!(tokio::time::timeout(PART_TIMEOUT, asked), self.queue.check());
        let (store_healthy, store) = match asked {
            Ok((Ok(()), Ok(count))) => (true, json!({ "status": "ok", "quarantined": count })),
            Ok((Err(failure), _) | (_, Err(failure))) => {
                (false, json!({ "status": "unavailable", "error": failure.kind.name() }))
            }
            Err(_) => (false, json!({ "status": "unavailable" })),
        };
        let healthy = store_healthy && queue_healthy;
        let status = if healthy { "ok" } else { "unavailable" };
        let part = json!({ "status": status, "store": store, "queue": queue });
        LaneHealth { healthy, parts: Map::from_iter([("users".to_owned(), part)]) }
    }
}
