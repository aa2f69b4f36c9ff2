//! How the relayer misbehaves: plain values that a test sets at run time. The default is a relayer that behaves.

use std::{collections::VecDeque, time::Duration};

use super::record::Status;

/// Everything that can be wrong at one time.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// For the next POSTs, one each, before anything below is asked. `None` is a POST that behaves.
    pub next_posts: VecDeque<Option<PostFault>>,
    /// For every POST.
    pub every_post: Option<PostFault>,
    /// For POSTs by chance.
    pub plan: Option<FaultPlan>,
    /// This status to every request, reads and health included.
    pub every_request: Option<u16>,
    /// For GET of relayers and their status.
    pub relayer_reads: ReadFault,
    /// For GET of transactions, one or a list.
    pub transaction_reads: ReadFault,
    /// For what it tells about its records.
    pub webhooks: WebhookFaults,
    /// For the next accepted records, one each, before `outcome` is asked.
    pub next_outcomes: VecDeque<Outcome>,
    /// What becomes of accepted records.
    pub outcome: Outcome,
    /// Records get as far as `submitted` and stay there until this is false again.
    pub jammed: bool,
    /// POST answers 403 `Relayer paused`; reads say so.
    pub paused: bool,
    /// POST answers 403 `Relayer disabled`; reads say so.
    pub system_disabled: bool,
}

impl Faults {
    /// The same fault for the next `n` POSTs.
    #[must_use]
    pub fn for_next(n: usize, fault: PostFault) -> Self {
        Self { next_posts: std::iter::repeat_n(Some(fault), n).collect(), ..Self::default() }
    }

    /// The same fault for every POST.
    #[must_use]
    pub fn every(fault: PostFault) -> Self {
        Self { every_post: Some(fault), ..Self::default() }
    }

    /// POST faults by chance.
    #[must_use]
    pub fn planned(plan: FaultPlan) -> Self {
        Self { plan: Some(plan), ..Self::default() }
    }

    /// This end for every record.
    #[must_use]
    pub fn with_outcome(outcome: Outcome) -> Self {
        Self { outcome, ..Self::default() }
    }
}

/// What goes wrong with one POST of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PostFault {
    /// 401, nothing stored.
    Unauthorized,
    /// 403 `Relayer paused`, nothing stored.
    Paused,
    /// 403 `Relayer disabled`, nothing stored.
    Disabled,
    /// 429 with `retry-after: 0`, nothing stored.
    RateLimited,
    /// 400 with this message, nothing stored.
    Refused(String),
    /// Any other status (409, 503 …) in the usual envelope, nothing stored.
    Status(u16),
    /// 500, nothing stored.
    ErrorBeforeStoring,
    /// 500, but the record is stored and goes on to its end.
    ErrorAfterStoring,
    /// 500, and the record is stored as `failed`, `Queue unavailable`, never signed.
    QueueUnavailable,
    /// 504 in text, but the record is stored and goes on to its end.
    TimeoutAfterStoring,
    /// Stored, and then never answered.
    HangAfterStoring,
    /// Never stored and never answered.
    HangBeforeStoring,
    /// Not answered, and stored only after this long: the caller may have given up and looked for it in vain.
    HangThenStore(Duration),
    /// Stored, and then the connection ends without an answer.
    CutAfterStoring,
    /// The connection ends without an answer, nothing stored.
    CutBeforeStoring,
    /// Stored at once and answered well, but only after this long.
    Slow(Duration),
    /// 200, stored, but the body is not what it should be (a proxy's page, for instance).
    GarbledAnswer,
}

impl PostFault {
    /// A short name, for counts.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Paused => "paused",
            Self::Disabled => "disabled",
            Self::RateLimited => "rate limited",
            Self::Refused(_) => "refused",
            Self::Status(_) => "status",
            Self::ErrorBeforeStoring => "error before storing",
            Self::ErrorAfterStoring => "error after storing",
            Self::QueueUnavailable => "queue unavailable",
            Self::TimeoutAfterStoring => "timeout after storing",
            Self::HangAfterStoring => "hang after storing",
            Self::HangBeforeStoring => "hang before storing",
            Self::HangThenStore(_) => "hang then store",
            Self::CutAfterStoring => "cut after storing",
            Self::CutBeforeStoring => "cut before storing",
            Self::Slow(_) => "slow",
            Self::GarbledAnswer => "garbled answer",
        }
    }

    /// Whether a record exists afterwards (sooner or later).
    pub fn stores(&self) -> bool {
        matches!(
            self,
            Self::ErrorAfterStoring
                | Self::QueueUnavailable
                | Self::TimeoutAfterStoring
                | Self::HangAfterStoring
                | Self::HangThenStore(_)
                | Self::CutAfterStoring
                | Self::Slow(_)
                | Self::GarbledAnswer
        )
    }
}

/// POST faults by chance: each POST suffers at most one of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultPlan {
    /// Where the dice start; the same seed and the same order of requests give the same faults.
    pub seed: u64,
    /// Each fault with its probability. The sum must not pass 1; what is left is good behaviour.
    pub chances: Vec<(PostFault, f64)>,
}

impl FaultPlan {
    /// A plan without faults.
    pub fn new(seed: u64) -> Self {
        Self { seed, chances: Vec::new() }
    }

    /// Adds one fault.
    ///
    /// # Panics
    /// When the probabilities add up to more than 1.
    #[must_use]
    pub fn with(mut self, fault: PostFault, probability: f64) -> Self {
        self.chances.push((fault, probability));
        let sum: f64 = self.chances.iter().map(|(_, probability)| probability).sum();
        assert!(sum <= 1.0 + f64::EPSILON, "the probabilities add up to {sum}");
        self
    }

    /// A bit of everything that can happen to a POST: half of them go wrong.
    pub fn storm(seed: u64) -> Self {
        Self::new(seed)
            .with(PostFault::RateLimited, 0.05)
            .with(PostFault::Paused, 0.03)
            .with(PostFault::ErrorBeforeStoring, 0.08)
            .with(PostFault::ErrorAfterStoring, 0.08)
            .with(PostFault::CutBeforeStoring, 0.08)
            .with(PostFault::CutAfterStoring, 0.08)
            .with(PostFault::TimeoutAfterStoring, 0.05)
            .with(PostFault::Slow(Duration::from_millis(50)), 0.05)
    }

    /// The fault for a throw of the dice in `0.0..1.0`.
    pub(super) fn pick(&self, throw: f64) -> Option<&PostFault> {
        let mut upper = 0.0;
        self.chances.iter().find_map(|(fault, probability)| {
            upper += probability;
            (throw < upper).then_some(fault)
        })
    }
}

/// What goes wrong with a GET.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadFault {
    /// Answers only after this long.
    pub delay: Option<Duration>,
    /// Answers with this status instead.
    pub status: Option<u16>,
    /// Never answers.
    pub hang: bool,
}

/// What goes wrong with webhooks. Probabilities are from 0 to 1 and drawn from the relayer's seed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WebhookFaults {
    /// Chance that one is never sent.
    pub lose: f64,
    /// Chance that one is sent a second time after it was delivered, with the same id, body and signature.
    pub repeat: f64,
    /// Chance that one is held back for up to `reorder_within`, so that later ones overtake it.
    pub reorder: f64,
    /// See `reorder`; 300 ms when zero.
    pub reorder_within: Duration,
    /// Each is sent this much later.
    pub delay: Duration,
    /// The record runs up to this status, and its webhooks are tried once, before the POST is answered.
    pub before_answer: Option<Status>,
    /// Everything but the final webhook is held back until that one was tried, and comes after it.
    pub late: bool,
    /// Signed with another key.
    pub forged: bool,
}

/// What becomes of an accepted record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// `sent`, `submitted`, `confirmed`.
    #[default]
    Confirmed,
    /// Reported `confirmed`, but replaced by a no-op: `to` = `from`, `value` 0x0, `data` 0x.
    NoOp,
    /// `failed` with this reason and neither nonce nor hash: it never left the relayer.
    NeverSigned(String),
    /// `failed` on the chain, with nonce and hash.
    Reverted,
    /// `canceled`, after it was submitted.
    Canceled,
    /// `confirmed`, and then `sent` and `submitted` again with another nonce and hash: a double send.
    SentTwice,
    /// Stays `submitted` for good.
    Stuck,
}
