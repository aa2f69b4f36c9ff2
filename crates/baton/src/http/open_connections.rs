//! The open connections of a listener: how many there are, from which addresses, and which one has been silent for
//! longest. A new connection over a cap takes the place of a silent one, so that clients that hold connections without
//! using them do not keep others out, also from behind one address. Over the cap of all connections the address with the most
//! connections gives one up, even if that is not silent: a client with few keeps its own.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::{counter, gauge};
use tokio_util::sync::CancellationToken;

use crate::config::ConnectionLimits;

/// A connection without a byte in either direction for this long, and without a request in a handler, may be closed for
/// another one.
const SILENT_MIN: Duration = Duration::from_secs(1);

/// The open connections of one listener.
pub struct OpenConnections {
    limits: ConnectionLimits,
    started: Instant,
    open: Mutex<HashMap<IpAddr, Vec<Arc<Activity>>>>,
}

/// When a connection last did something.
pub struct Activity {
    started: Instant,
    /// Milliseconds from `started` to the last byte.
    last_ms: AtomicU64,
    /// Requests in a handler.
    handling: AtomicU32,
    /// Cancelled when another connection takes its place.
    pub replaced: CancellationToken,
    /// Ended for that without an answer in the making.
    reset: AtomicBool,
}

/// One open connection; dropped when it ends.
pub struct Place {
    connections: Arc<OpenConnections>,
    address: IpAddr,
    /// What the connection does.
    pub activity: Arc<Activity>,
}

/// A request in a handler; dropped when its answer begins.
pub struct Handling(Arc<Activity>);

impl OpenConnections {
    /// No connection yet.
    pub fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self { limits, started: Instant::now(), open: Mutex::default() })
    }

    /// A place for a new connection; `None` if a cap is reached and every connection that counts for it is in use.
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let address = counted(address);
        let mut open = self.lock();
        let of_address = open.get(&address).map_or(0, Vec::len);
        let total: usize = open.values().map(Vec::len).sum();
        if of_address >= self.limits.per_address_max {
            replace(&mut open, address, SILENT_MIN)?;
        } else if total >= self.limits.connections_max {
            let (largest, count) =
                open.iter().map(|(address, all)| (*address, all.len())).max_by_key(|(_, count)| *count)?;
            // Between equals silence decides.
            let silence = if count > of_address + 1 { Duration::ZERO } else { SILENT_MIN };
            replace(&mut open, largest, silence)?;
        }
        let activity = Arc::new(Activity {
            started: self.started,
            last_ms: AtomicU64::new(0),
            handling: AtomicU32::new(0),
            replaced: CancellationToken::new(),
            reset: AtomicBool::new(false),
        });
        activity.touch();
        open.entry(address).or_default().push(Arc::clone(&activity));
        gauge!("baton_connections").increment(1.0);
        Some(Place { connections: Arc::clone(self), address, activity })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, Vec<Arc<Activity>>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the connection of this address that has been silent for longest, at least for this long. `None` if there is none; a
/// connection with a request in a handler is never ended.
fn replace(open: &mut HashMap<IpAddr, Vec<Arc<Activity>>>, of: IpAddr, silence: Duration) -> Option<()> {
    let idle = open.get(&of)?.iter().filter(|one| !one.is_handling() && one.silence() >= silence);
    let activity = Arc::clone(idle.max_by_key(|one| one.silence())?);
    activity.replaced.cancel();
    remove(open, of, &activity);
    counter!("baton_connections_reset_total", "reason" => "replaced").increment(1);
    Some(())
}

fn remove(open: &mut HashMap<IpAddr, Vec<Arc<Activity>>>, address: IpAddr, activity: &Arc<Activity>) {
    if let Some(connections) = open.get_mut(&address) {
        connections.retain(|one| !Arc::ptr_eq(one, activity));
        if connections.is_empty() {
            open.remove(&address);
        }
    }
}

impl Activity {
    /// Records that bytes moved.
    pub fn touch(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now, Ordering::Relaxed);
    }

    /// Records that a handler works on a request, until the result is dropped.
    pub fn handle(self: &Arc<Self>) -> Handling {
        self.handling.fetch_add(1, Ordering::Relaxed);
        Handling(Arc::clone(self))
    }

    /// Whether a handler works on a request.
    pub fn is_handling(&self) -> bool {
        self.handling.load(Ordering::Relaxed) > 0
    }

    /// Records that the connection ends without an answer in the making: what its client has not read may be dropped.
    pub fn reset(&self) {
        self.reset.store(true, Ordering::Relaxed);
    }

    /// Whether it ends so.
    pub fn is_reset(&self) -> bool {
        self.reset.load(Ordering::Relaxed)
    }

    /// Time since the last byte; zero while a handler works.
    fn silence(&self) -> Duration {
        if self.is_handling() {
            return Duration::ZERO;
        }
        self.started.elapsed().saturating_sub(Duration::from_millis(self.last_ms.load(Ordering::Relaxed)))
    }
}

impl Drop for Handling {
    fn drop(&mut self) {
        self.0.touch();
        self.0.handling.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        gauge!("baton_connections").decrement(1.0);
        remove(&mut self.connections.lock(), self.address, &self.activity);
    }
}

/// The address that the cap counts. An IPv6 host chooses freely among the addresses of its /64 network.
fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mut segments = address.segments();
            segments[4..].fill(0);
            IpAddr::from(segments)
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(connections_max: usize, per_address_max: usize) -> Arc<OpenConnections> {
        let (idle_timeout, write_timeout) = (Duration::from_secs(1), Duration::from_secs(1));
        OpenConnections::new(ConnectionLimits { connections_max, per_address_max, idle_timeout, write_timeout })
    }

    /// Makes it seem silent since the start of a listener that is a minute old.
    fn silent(connections: &mut Arc<OpenConnections>) {
        Arc::get_mut(connections).unwrap().started -= Duration::from_secs(60);
    }

    #[test]
    fn an_address_has_its_own_count_and_gets_it_back() {
        let connections = connections(10, 2);
        let enter = |text: &str| connections.enter(text.parse().unwrap());
        let first = (enter("10.0.0.1").unwrap(), enter("::ffff:10.0.0.1").unwrap());
        assert!(enter("10.0.0.1").is_none() && enter("10.0.0.2").is_some());
        drop(first);
        assert!(enter("10.0.0.1").is_some());
        assert!(connections.lock().is_empty(), "an address without connections takes no memory");
    }

    /// Two addresses that drip bytes held every connection, and idle connections of others were closed for theirs.
    #[test]
    fn the_address_with_the_most_connections_makes_room_although_it_is_not_silent() {
        let mut connections = connections(10, 8);
        silent(&mut connections);
        let enter = |text: &str| connections.enter(text.parse().unwrap());
        let idle = enter("10.0.0.9").unwrap();
        idle.activity.last_ms.store(0, Ordering::Relaxed);
        let dripping: Vec<_> = (0..9).map(|place| enter(if place < 5 { "10.0.0.1" } else { "10.0.0.2" })).collect();
        assert!(dripping.iter().all(Option::is_some));
        let _late = enter("10.0.0.3").expect("an address with many gives one up");
        assert!(!idle.activity.replaced.is_cancelled(), "not the one of a client with few");
        let ended = dripping.iter().flatten().filter(|one| one.activity.replaced.is_cancelled()).count();
        assert_eq!(ended, 1);
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_count_together() {
        let connections = connections(10, 1);
        let enter = |text: &str| connections.enter(text.parse().unwrap());
        let _first = enter("2001:db8:1:2::1").unwrap();
        assert!(enter("2001:db8:1:2:ffff::9").is_none() && enter("2001:db8:1:3::1").is_some());
    }

    #[test]
    fn a_silent_connection_makes_room_and_one_in_a_handler_does_not() {
        let mut connections = connections(2, 2);
        silent(&mut connections);
        let enter = |text: &str| connections.enter(text.parse().unwrap());
        let (first, second) = (enter("10.0.0.1").unwrap(), enter("10.0.0.1").unwrap());
        first.activity.last_ms.store(0, Ordering::Relaxed);
        second.activity.last_ms.store(1, Ordering::Relaxed);
        let handled = first.activity.handle();
        let third = enter("10.0.0.1").expect("the second one is silent");
        assert!(second.activity.replaced.is_cancelled() && !first.activity.replaced.is_cancelled());
        drop(second);
        let busy = third.activity.handle();
        assert!(enter("10.0.0.2").is_none(), "all are in use");
        drop((handled, busy));
        first.activity.last_ms.store(0, Ordering::Relaxed);
        assert!(enter("10.0.0.2").is_some(), "the cap of all takes a silent one of any address");
        assert!(first.activity.replaced.is_cancelled() && !third.activity.replaced.is_cancelled());
    }
}
