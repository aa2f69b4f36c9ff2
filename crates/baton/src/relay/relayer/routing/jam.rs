//! Whether a relayer makes progress (pure; time is an argument). A jammed relayer gets no new work.
//!
//! With a chain, `NonceWatch` compares the relayer's open nonces with the chain's counts of its account: a nonce that
//! the node's pool does not have holds up every later one. Without a chain, nothing of the relayer may have ended while
//! its oldest signed transaction grew old. `PendingWatch` goes by the relayer's own report in both cases.

use std::time::{Duration, Instant};

use crate::relay::store::RelayerRows;
use crate::timestamp::Timestamp;

/// Why a relayer counts as jammed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JamCause {
    /// Its pending count rises and nothing confirms.
    PendingRises,
    /// The chain waits for a nonce that the relayer has passed over.
    NonceGap {
        /// The first nonce that the node's pool does not have.
        missing: u64,
        /// The highest nonce that the relayer has used.
        highest: u64,
    },
    /// The chain does not mine its oldest transaction.
    NotMined {
        /// The nonce of that transaction.
        nonce: u64,
    },
    /// None of its transactions ends.
    NothingEnds {
        /// The nonce of its oldest signed transaction.
        nonce: u64,
    },
}

impl JamCause {
    /// The nonce that the chain waits for, if that is the cause.
    pub fn missing_nonce(self) -> Option<u64> {
        match self {
            Self::NonceGap { missing, .. } => Some(missing),
            _ => None,
        }
    }
}

impl std::fmt::Display for JamCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PendingRises => f.write_str("its pending count rises and nothing confirms"),
            Self::NonceGap { missing, highest } => write!(
                f,
                "nonce {missing} is missing on the chain and holds up the nonces up to {highest}: \
                 send a transaction with nonce {missing} from the relayer's account"
            ),
            Self::NotMined { nonce } => {
                write!(
                    f,
                    "the chain has not mined nonce {nonce}, its oldest transaction: look at its fees and at the node"
                )
            }
            Self::NothingEnds { nonce } => write!(
                f,
                "none of its transactions ends, the oldest has nonce {nonce}: look for a nonce gap, or set RPC_URL"
            ),
        }
    }
}

/// The chain's transaction counts of a relayer's account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainCounts {
    /// Mined: every nonce below is used.
    pub latest: u64,
    /// Mined, or next in the node's pool: the first nonce that the node does not have.
    pub pending: u64,
}

/// Compares a relayer's open nonces with what becomes of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct NonceWatch {
    /// The missing nonce, and since when it has been missing.
    gap: Option<(u64, Instant)>,
    /// The chain's count of mined transactions, and since when it has stood there.
    latest: Option<(u64, Instant)>,
    pub(super) cause: Option<JamCause>,
}

impl NonceWatch {
    /// Whether the chain has shown how far the relayer's open transactions are.
    pub(super) fn knows_chain(&self) -> bool {
        self.latest.is_some()
    }

    /// Learns the chain's counts. `counter` is the nonce that the relayer says it takes next. A gap counts after half of
    /// `jam_after`, a transaction that is not mined after two and a half times as long.
    pub(super) fn with_chain(
        &mut self,
        rows: &RelayerRows,
        counter: Option<u64>,
        counts: ChainCounts,
        jam_after: Duration,
        (at, now): (Timestamp, Instant),
    ) {
        let (Some((oldest, since)), Some(highest)) = (rows.oldest_signed, rows.nonce_max) else {
            *self = Self::default();
            return;
        };
        let highest = counter.and_then(|counter| counter.checked_sub(1)).map_or(highest, |taken| taken.max(highest));
        let missing = counts.pending.max(counts.latest);
        self.gap = match self.gap {
            // The relayer signs that nonce next by its own account: work fills it.
            _ if missing > highest || counter == Some(missing) => None,
            Some((known, since)) if known == missing => Some((known, since)),
            _ => Some((missing, now)),
        };
        self.latest = match self.latest {
            Some((known, since)) if known == counts.latest => Some((known, since)),
            _ => Some((counts.latest, now)),
        };
        let lasts = |since: Instant, limit: Duration| now.saturating_duration_since(since) >= limit;
        let not_mined_after = jam_after * 5 / 2;
        self.cause = if let Some((missing, _)) = self.gap.filter(|(_, since)| lasts(*since, jam_after / 2)) {
            Some(JamCause::NonceGap { missing, highest })
        } else if counts.latest <= oldest
            && at.since(since) >= not_mined_after
            && self.latest.is_some_and(|(_, since)| lasts(since, not_mined_after))
        {
            Some(JamCause::NotMined { nonce: oldest })
        } else {
            None
        };
    }

    /// Without a chain: jammed if its oldest signed transaction is older than `jam_after` and nothing has ended for as long.
    pub(super) fn without_chain(&mut self, rows: &RelayerRows, jam_after: Duration, now: Timestamp) {
        let old = |since: Timestamp| now.since(since) >= jam_after;
        // Only while it has got work since: an idle relayer with one stuck transaction must be able to show that it works.
        let busy = rows.recent > 0;
        let jammed = rows.oldest_signed.filter(|(_, since)| busy && old(*since) && rows.last_ended.is_none_or(old));
        self.cause = jammed.map(|(nonce, _)| JamCause::NothingEnds { nonce });
    }
}

/// Watches the pending count that a relayer reports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct PendingWatch {
    /// Since when nothing has moved, and the count then.
    still: Option<(Instant, u64)>,
    last_pending: u64,
    last_confirmed: Option<String>,
    pub(super) jammed: bool,
}

impl PendingWatch {
    /// Learns a pending count: jammed if it rises for `jam_after` while nothing confirms.
    pub(super) fn learn(&mut self, pending: u64, confirmed: Option<&str>, jam_after: Duration, now: Instant) {
        let moves = pending == 0 || pending < self.last_pending || confirmed != self.last_confirmed.as_deref();
        self.last_pending = pending;
        self.last_confirmed = confirmed.map(str::to_owned);
        if moves {
            self.still = (pending > 0).then_some((now, pending));
            self.jammed = false;
            return;
        }
        let (since, before) = *self.still.get_or_insert((now, pending));
        if pending > before && now.saturating_duration_since(since) >= jam_after {
            self.jammed = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JAM_AFTER: Duration = Duration::from_secs(120);
    const BASE: Timestamp = Timestamp(10_000_000);

    /// Rows with nonces from `oldest` to `highest`, the oldest bound at `BASE`.
    fn open(oldest: u64, highest: u64) -> RelayerRows {
        RelayerRows { oldest_signed: Some((oldest, BASE)), nonce_max: Some(highest), ..RelayerRows::default() }
    }

    /// The cause after looks at these seconds, each with rows and the counts (latest, pending).
    fn cause(looks: &[(u64, RelayerRows, (u64, u64))], counter: Option<u64>) -> Option<JamCause> {
        let start = Instant::now();
        let mut watch = NonceWatch::default();
        for (second, rows, (latest, pending)) in looks {
            let passed = Duration::from_secs(*second);
            let counts = ChainCounts { latest: *latest, pending: *pending };
            watch.with_chain(rows, counter, counts, JAM_AFTER, (BASE + passed, start + passed));
        }
        watch.cause
    }

    #[test]
    fn a_missing_nonce_jams_after_a_minute_without_movement() {
        let rows = || open(17, 40);
        let missing = JamCause::NonceGap { missing: 18, highest: 40 };
        let gap = Some(missing);
        assert_eq!(cause(&[(0, rows(), (17, 18)), (59, rows(), (17, 18))], None), None);
        assert_eq!(cause(&[(0, rows(), (17, 18)), (60, rows(), (17, 18))], None), gap);
        let moved = [(0, rows(), (17, 18)), (50, rows(), (18, 19)), (60, rows(), (18, 19))];
        assert_eq!(cause(&moved, None), None, "the missing nonce is another one");
        let mined_only = [(0, rows(), (17, 18)), (30, rows(), (18, 18)), (60, rows(), (18, 18))];
        assert_eq!(cause(&mined_only, None), gap, "what lay before the gap is mined; the gap is the same");
        assert_eq!(missing.missing_nonce(), Some(18));
        assert!(missing.to_string().contains("nonce 18"), "{missing}");
    }

    #[test]
    fn a_filled_gap_ends_the_jam() {
        let looks = [(0, open(18, 40), (18, 18)), (60, open(18, 40), (18, 18)), (70, open(18, 40), (18, 41))];
        assert_eq!(cause(&looks, None), None);
        let none_open =
            [(0, open(18, 40), (18, 18)), (60, open(18, 40), (18, 18)), (70, RelayerRows::default(), (18, 18))];
        assert_eq!(cause(&none_open, None), None);
    }

    #[test]
    fn an_idle_relayer_that_signs_again_is_not_jammed_at_once() {
        let looks = [(0, open(5, 5), (5, 6)), (3600, open(6, 6), (6, 6))];
        assert_eq!(cause(&looks, None), None, "its nonce has just been taken, and is not broadcast yet");
    }

    #[test]
    fn a_nonce_that_the_relayer_took_and_never_sent_is_a_gap() {
        let looks = [(0, open(5, 5), (5, 6)), (60, open(5, 5), (5, 6))];
        assert_eq!(cause(&looks, Some(6)), None, "the counter is the next nonce");
        assert_eq!(cause(&looks, Some(8)), Some(JamCause::NonceGap { missing: 6, highest: 7 }));
    }

    #[test]
    fn a_transaction_that_is_not_mined_for_five_minutes_jams() {
        let looks = |seconds| [(0, open(5, 9), (5, 10)), (seconds, open(5, 9), (5, 10))];
        assert_eq!(cause(&looks(299), None), None);
        assert_eq!(cause(&looks(300), None), Some(JamCause::NotMined { nonce: 5 }));
        let moves = [(0, open(5, 9), (4, 10)), (200, open(5, 9), (5, 10)), (400, open(5, 9), (5, 10))];
        assert_eq!(cause(&moves, None), None, "the chain's count moved 200 s ago");
        let passed = [(0, open(5, 9), (6, 10)), (400, open(5, 9), (6, 10))];
        assert_eq!(cause(&passed, None), None, "it is mined, and only its report is late");
    }

    #[test]
    fn without_a_chain_nothing_may_have_ended_for_as_long() {
        let cause_with = |recent: u64, last_ended: Option<u64>, age: u64| {
            let mut watch = NonceWatch::default();
            let last_ended = last_ended.map(|second| BASE + Duration::from_secs(second));
            let rows = RelayerRows { last_ended, recent, ..open(5, 9) };
            watch.without_chain(&rows, JAM_AFTER, BASE + Duration::from_secs(age));
            watch.cause
        };
        let cause = |last_ended, age| cause_with(3, last_ended, age);
        assert_eq!(cause(None, 119), None);
        assert_eq!(cause_with(0, None, 5000), None, "one stuck transaction of an idle relayer");
        assert_eq!(cause(None, 120), Some(JamCause::NothingEnds { nonce: 5 }));
        assert_eq!(cause(Some(50), 120), None, "another one ended meanwhile");
        assert_eq!(cause(Some(50), 170), Some(JamCause::NothingEnds { nonce: 5 }));
    }
}
