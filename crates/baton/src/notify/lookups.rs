//! DNS lookups of host names that clients have chosen, bounded so that slow name servers of one API key do not hold up
//! the others.
//!
//! A lookup of the system occupies a thread until it ends, up to 40 s with name servers that do not answer, although its
//! caller waits 5 s. Each API key (owner) therefore has its own number of places, and a lookup keeps its place until it
//! ends, not until its caller gives up. Lookups of the same name by the same owner share one place.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

/// Limit of one lookup for its caller, including the wait for a place.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Lookups in progress of one owner. Registrations and deliveries count apart.
pub const LOOKUPS_PER_OWNER_MAX: usize = 16;
/// Lookups in progress of all owners: half of the 512 threads that this process has for blocking calls.
const LOOKUPS_MAX: usize = 256;

/// The threads are the process's, so all lookups of the system share these places.
static PROCESS_PLACES: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(LOOKUPS_MAX)));

/// Looks up a host name and port. A value, so that tests can play a DNS server that changes its answer.
pub type Resolver = Arc<dyn Fn(String, u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// Why a lookup has no result.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// All places of this owner were in use.
    #[error("too many lookups of this API key's host names are in progress")]
    OwnerBusy,
    /// All places of the process were in use.
    #[error("too many lookups of host names are in progress")]
    Busy,
    /// DNS has not answered yet.
    #[error("the host name did not resolve within {} s", LOOKUP_TIMEOUT.as_secs())]
    Late,
    /// The name has no address, or DNS failed.
    #[error("the host name does not resolve")]
    Failed(#[source] Arc<io::Error>),
}

/// Lookups by one resolver.
pub struct Lookups {
    resolver: Resolver,
    places: Arc<Semaphore>,
    /// [`LOOKUP_TIMEOUT`]; shorter in tests.
    timeout: Duration,
    /// One for each owner; the operator's configuration bounds their number.
    owners: Mutex<HashMap<String, Arc<Owner>>>,
}

/// The lookups of one owner.
struct Owner {
    places: Arc<Semaphore>,
    in_progress: Mutex<HashMap<Name, Lookup>>,
}

/// A host and a port.
type Name = (String, u16);

/// A lookup in progress, for any number of callers.
type Lookup = Shared<BoxFuture<'static, Result<Vec<SocketAddr>, Arc<io::Error>>>>;

impl Lookups {
    /// Lookups by the system's resolver.
    pub fn of_system() -> Self {
        let resolver: Resolver = Arc::new(|host, port| {
            let resolving = move || (host, port).to_socket_addrs().map(Iterator::collect);
            Box::pin(async move { tokio::task::spawn_blocking(resolving).await.map_err(io::Error::other)? })
        });
        Self { places: Arc::clone(&PROCESS_PLACES), ..Self::new(resolver) }
    }

    /// Lookups by another resolver.
    pub fn new(resolver: Resolver) -> Self {
        Self::with_timeout(resolver, LOOKUP_TIMEOUT)
    }

    pub(super) fn with_timeout(resolver: Resolver, timeout: Duration) -> Self {
        let places = Arc::new(Semaphore::new(LOOKUPS_MAX));
        Self { resolver, places, timeout, owners: Mutex::default() }
    }

    /// The addresses of a host; joins the lookup of this name if the owner has one in progress.
    pub async fn look_up(&self, owner: &str, host: &str, port: u16) -> Result<Vec<SocketAddr>, LookupError> {
        let (began, name) = (Instant::now(), (host.to_owned(), port));
        let owner = self.owner(owner);
        let joined = locked(&owner.in_progress).get(&name).cloned();
        let lookup = match joined {
            Some(lookup) => lookup,
            None => {
                // Below the limit of a connection, so that the attempt shows this reason.
                let places = self.wait_for_places(&owner, began + self.timeout * 4 / 5).await?;
                self.join_or_start(&owner, name, places)
            }
        };
        let found = timeout_at(began + self.timeout, lookup).await.map_err(|_| LookupError::Late)?;
        found.map_err(LookupError::Failed)
    }

    fn owner(&self, owner: &str) -> Arc<Owner> {
        let mut owners = locked(&self.owners);
        if let Some(known) = owners.get(owner) {
            return Arc::clone(known);
        }
        let places = Arc::new(Semaphore::new(LOOKUPS_PER_OWNER_MAX));
        let new = Arc::new(Owner { places, in_progress: Mutex::default() });
        owners.insert(owner.to_owned(), Arc::clone(&new));
        new
    }

    /// The owner's place comes first: waiting for the process's, an owner is in the queue at most as often as it has places.
    async fn wait_for_places(&self, owner: &Owner, until: Instant) -> Result<[OwnedSemaphorePermit; 2], LookupError> {
        let place = async |of: &Arc<Semaphore>| timeout_at(until, Arc::clone(of).acquire_owned()).await.ok()?.ok();
        let of_owner = place(&owner.places).await.ok_or(LookupError::OwnerBusy)?;
        let of_process = place(&self.places).await.ok_or(LookupError::Busy)?;
        Ok([of_owner, of_process])
    }

    fn join_or_start(&self, owner: &Arc<Owner>, name: Name, places: [OwnedSemaphorePermit; 2]) -> Lookup {
        let (done, result) = oneshot::channel();
        let lookup = {
            let mut in_progress = locked(&owner.in_progress);
            if let Some(lookup) = in_progress.get(&name) {
                return lookup.clone();
            }
            let result = result.map(|found| found.unwrap_or_else(|died| Err(io::Error::other(died))));
            let lookup = result.map(|found| found.map_err(Arc::new)).boxed().shared();
            in_progress.insert(name.clone(), lookup.clone());
            lookup
        };
        let resolver = Arc::clone(&self.resolver);
        let entry = Entry { owner: Arc::clone(owner), name, _places: places };
        // A task of its own goes on when every caller has given up, and keeps the places. Without the lock: a runtime that
        // is shutting down drops the task here.
        tokio::spawn(async move {
            let (host, port) = entry.name.clone();
            let found = resolver(host, port).await;
            // Before the result, so that a caller who has it starts a new lookup.
            drop(entry);
            let _ = done.send(found);
        });
        lookup
    }
}

/// What a lookup occupies until it ends.
struct Entry {
    owner: Arc<Owner>,
    name: Name,
    _places: [OwnedSemaphorePermit; 2],
}

impl Drop for Entry {
    fn drop(&mut self) {
        locked(&self.owner.in_progress).remove(&self.name);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
