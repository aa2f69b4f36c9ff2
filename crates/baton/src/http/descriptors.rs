//! File descriptors: every connection takes one. Clients must not take those that databases, queues, relayers and probes
//! need.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

use crate::config::ConnectionLimits;

/// Descriptors that clients' connections leave to the rest of the process.
const RESERVED: usize = 256;

/// Raises the limit of this process as far as it may, and lowers the cap on connections to what is left.
pub fn fit(limits: ConnectionLimits) -> ConnectionLimits {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: before.maximum, maximum: before.maximum }).ok();
    let limit =
        getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let connections_max = limits.connections_max.min(left_for_clients(limit));
    if connections_max < limits.connections_max {
        let asked = limits.connections_max;
        warn!(
            action = "descriptors_short",
            "CONNECTIONS_MAX is {asked}, but the limit of {limit} open files (ulimit -n) allows {connections_max}"
        );
    }
    ConnectionLimits { connections_max, ..limits }
}

/// A small limit is shared: a quarter of it is left to clients.
fn left_for_clients(limit: usize) -> usize {
    limit.saturating_sub(RESERVED).max(limit / 4).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_descriptors_to_the_rest() {
        assert_eq!((left_for_clients(1024), left_for_clients(256), left_for_clients(64)), (768, 64, 16));
    }
}
