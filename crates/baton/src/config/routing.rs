//! The limits of routing, from `RELAYER_*` and `BREAKER_*`.

use std::time::Duration;

use alloy_primitives::U256;

/// The limits that choose, pause and skip relayers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingSettings {
    /// Maximum transactions in flight at one relayer; `None`: adapts to the relayer's completion rate.
    pub in_flight_max: Option<u64>,
    /// Maximum submissions per second to one relayer; `None` means no limit.
    pub rate_per_second: Option<u32>,
    /// Minimum balance in wei; a relayer below it is out of funds and skipped.
    pub balance_min: U256,
    /// Consecutive failures that open a relayer's circuit breaker.
    pub breaker_failures: u32,
    /// How long a breaker stays open the first time; doubles up to `breaker_open_max`.
    pub breaker_open: Duration,
    /// The longest a breaker stays open.
    pub breaker_open_max: Duration,
    /// A relayer that makes no progress for this long counts as jammed: a nonce gap counts after half as long, a
    /// transaction that the chain does not mine after two and a half times as long.
    pub jam_after: Duration,
    /// Age after which a health report no longer counts.
    pub report_lifetime: Duration,
}
