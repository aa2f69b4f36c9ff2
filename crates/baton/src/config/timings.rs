//! The ages at which the reconciler looks at a transaction, and the limits of one submission.

use std::time::Duration;

/// Durations that decide when a transaction is checked next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    /// Age at which a pending transaction without a claim is published again.
    pub pending_check: Duration,
    /// How often the heartbeat of a claim's owner is checked.
    pub claim_check: Duration,
    /// Maximum duration of one submission, from connecting to the end of the answer.
    pub submit_timeout: Duration,
    /// Time after the claim within which a submission may begin; later it is not sent at all.
    pub send_window: Duration,
    /// How long a relayer may keep working on a request that it has not answered.
    pub relayer_timeout: Duration,
    /// Unknown outcome: delay before the relayer is asked, and between questions while it does not answer.
    pub unknown_check: Duration,
    /// How long a relayer's list must not show a submission before it counts as absent.
    pub absence_confirm: Duration,
    /// Age at which a submitted transaction without news is looked up; doubles up to `submitted_check_max`.
    pub submitted_check: Duration,
    /// The longest pause between two lookups of a submitted transaction.
    pub submitted_check_max: Duration,
    /// Age of a claim from which an absence that the relayer's list does not prove counts, if the chain shows nothing.
    pub unproven_wait: Duration,
    /// Age of an unknown outcome from which it waits for an operator: the chain and the relayer's list have had several
    /// looks by then.
    pub operator_after: Duration,
}

/// A connection whose bytes are not acknowledged for this long is dead.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(10);

impl Timings {
    /// The timings of a configuration that sets none of them.
    pub const DEFAULT: Self = Self {
        pending_check: Duration::from_secs(600),
        claim_check: Duration::from_secs(10),
        submit_timeout: Duration::from_secs(30),
        send_window: Duration::from_secs(5),
        relayer_timeout: Duration::from_secs(30),
        unknown_check: Duration::from_secs(1),
        absence_confirm: Duration::from_secs(5),
        submitted_check: Duration::from_secs(30),
        submitted_check_max: Duration::from_secs(300),
        unproven_wait: Duration::from_secs(300),
        operator_after: Duration::from_secs(600),
    };

    /// Age at which a row saved without its message is published again: the process may have died between the two
    /// writes. A duplicate message does no harm.
    pub fn message_check(&self) -> Duration {
        self.claim_check
    }

    /// Time after a cancellation was asked for at which a relayer's record shows whether it was signed meanwhile.
    pub fn cancel_settles(&self) -> Duration {
        self.unproven_wait / 5
    }

    /// How long the kernel goes on with a connection whose bytes are not acknowledged.
    ///
    /// A running process closes a connection after [`Timings::submit_timeout`], which drops what was not delivered. A frozen
    /// process cannot; then the kernel does it, this long after its first retransmission. Half of the submission timeout
    /// leaves the other half for the time until that retransmission.
    pub fn unacknowledged_max(&self) -> Duration {
        (self.submit_timeout / 2).min(UNACKNOWLEDGED_MAX)
    }

    /// Time from a claim until its submission can no longer take effect. It begins to be written within the send window; its
    /// last byte leaves before its connection is closed, at the latest after the submission timeout; then the relayer works
    /// on it.
    pub fn longest_submission(&self) -> Duration {
        self.send_window + self.submit_timeout + self.relayer_timeout
    }
}
