//! Changes of one endpoint beside other writers: read it, alter it, save it if nothing was saved meanwhile, else again.
//! The API and the operators' commands share it.

use crate::relay::store::StoreError;
use crate::relay::store::notifications::{Disabled, Endpoint, EndpointId, NotificationStore};
use crate::timestamp::Timestamp;

/// Tries before a change is refused. Owners change their endpoints rarely, so that a second try nearly always succeeds.
const TRIES_MAX: u32 = 5;

/// The result of a change.
#[derive(Debug)]
pub enum Changed {
    /// Saved; the endpoint as it is now.
    Saved(Box<Endpoint>),
    /// There is no such endpoint, or it is another owner's.
    Missing,
    /// Other changes came first each time; nothing was saved.
    Outrun,
}

/// Alters an endpoint and saves it. With an `owner`, only if it is that owner's.
pub async fn change_endpoint(
    store: &dyn NotificationStore,
    id: EndpointId,
    owner: Option<&str>,
    now: Timestamp,
    alter: impl Fn(&mut Endpoint) + Send,
) -> Result<Changed, StoreError> {
    for _ in 0..TRIES_MAX {
        let found = store.endpoint(id).await?;
        let Some(mut endpoint) = found.filter(|found| owner.is_none_or(|owner| found.owner == owner)) else {
            return Ok(Changed::Missing);
        };
        alter(&mut endpoint);
        endpoint.updated_at = now;
        if store.change_endpoint(&endpoint).await? {
            endpoint.version += 1;
            return Ok(Changed::Saved(Box::new(endpoint)));
        }
    }
    Ok(Changed::Outrun)
}

/// Resumes deliveries to a disabled endpoint and resets its count of failures, as the store does.
pub fn enable(endpoint: &mut Endpoint) {
    if endpoint.disabled.take().is_some() {
        endpoint.failing_since = None;
        endpoint.failures = 0;
        endpoint.paused_until = None;
    }
}

/// Sends deliveries to this URL. Failures and pauses were those of another one, as the store sees it.
pub fn move_to(endpoint: &mut Endpoint, url: &str) {
    if endpoint.url != url {
        url.clone_into(&mut endpoint.url);
        endpoint.failing_since = None;
        endpoint.failures = 0;
        endpoint.paused_until = None;
    }
}

/// Stops deliveries to an endpoint. One that is disabled already keeps its first reason.
pub fn disable(endpoint: &mut Endpoint, reason: &str, now: Timestamp) {
    endpoint.disabled.get_or_insert_with(|| Disabled { at: now, reason: reason.to_owned() });
}
