//! How the relayer misbehaves: plain values that a test sets at run time. The default is a relayer that behaves.

use std::{collections::VecDeque, time::Duration};

use crate::record::Status;

/// All faults of a relayer at one time.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// For the next POSTs, one each, before the other POST faults. `None` is a POST that behaves.
    pub next_posts: VecDeque<Option<PostFault>>,
    /// For every POST.
    pub every_post: Option<PostFault>,
    /// For POSTs by chance.
    pub plan: Option<FaultPlan>,
    /// Answers every request with this status, reads and health included.
    pub every_request: Option<u16>,
    /// For GET of relayers, their status and balance.
    pub relayer_reads: ReadFault,
    /// For what makes the relayer ask its chain: status, balance and `/rpc`. If set, in place of `relayer_reads`.
    pub chain_reads: ReadFault,
    /// For GET of transactions, one or a list.
    pub transaction_reads: ReadFault,
    /// For lists of transactions that are answered.
    pub listing: ListFault,
    /// DELETE of a transaction is never answered, and cancels nothing.
    pub cancels_hang: bool,
    /// For webhooks.
    pub webhooks: WebhookFaults,
    /// For the next accepted records, one each, before `outcome`.
    pub next_outcomes: VecDeque<Outcome>,
    /// How accepted records end.
    pub outcome: Outcome,
    /// Records get as far as `submitted` and stay there until this is false again.
    pub jammed: bool,
    /// A nonce that was taken and never broadcast holds every later nonce at `submitted`, until a gap filler takes it.
    pub gaps_jam: bool,
    /// POST answers 403 `Relayer paused`, and reads show it.
    pub paused: bool,
    /// POST answers 403 `Relayer disabled`, and reads show it.
    pub system_disabled: bool,
    /// New records fail before they are signed, for lack of balance; `/status` shows a balance of 0.
    pub out_of_funds: bool,
    /// Difference of the relayer's clock to the caller's, in the `Date` header and in all of its records' times.
    pub clock_offset_ms: i64,
    /// Who writes the `Date` header.
    pub date: DateHeader,
    /// One relayer id is served by two memories: every other answer about transactions is from the second one.
    pub second_memory: Option<SecondMemory>,
    /// A no-op fills a nonce gap this long after it arose; never when absent.
    pub gap_filled_after: Option<Duration>,
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

    /// The same end for every record.
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
    /// 429 of the concurrency limit, nothing stored.
    TooManyConcurrent,
    /// 400 with this message, nothing stored.
    Refused(String),
    /// Another status (409, 503 …) in the usual envelope, nothing stored.
    Status(u16),
    /// 500, nothing stored.
    ErrorBeforeStoring,
    /// 500, but the record is stored and runs to its end.
    ErrorAfterStoring,
    /// 500, and the record is stored as `failed`, `Queue unavailable`, never signed.
    QueueUnavailable,
    /// 504 in plain text, but the record is stored and runs to its end.
    TimeoutAfterStoring,
    /// Stored, and then never answered.
    HangAfterStoring,
    /// Never stored and never answered.
    HangBeforeStoring,
    /// Never answered, and stored only after this long: the caller may have given up and searched in vain.
    HangThenStore(Duration),
    /// Answered with 504 at once, and stored only after this long: a proxy gives up, the relayer goes on.
    TimeoutThenStore(Duration),
    /// The connection ends without an answer at once, and the record is stored only after this long.
    CutThenStore(Duration),
    /// Stored only after this long, and answered well right then.
    StoreLate(Duration),
    /// Stored, and then the connection ends without an answer.
    CutAfterStoring,
    /// The connection ends without an answer, nothing stored.
    CutBeforeStoring,
    /// Stored, and the connection ends in the middle of the answer's body.
    BreakOffAfterStoring,
    /// Stored at once and answered well, but only after this long.
    Slow(Duration),
    /// 200 and stored, but the body is no answer of a relayer (a proxy's page, for instance).
    GarbledAnswer,
    /// This status, but the record is stored and runs to its end: 409, for instance.
    StatusAfterStoring(u16),
    /// Stored and answered with 200, but a proxy exchanges the answer with that of the next POST of this kind. Without
    /// one within 300 ms the answer is right.
    ExchangedAnswer,
    /// Stored and answered with 200, but under an id that no record has.
    WrongId,
    /// Stored and answered with 200, but under the id of the record before.
    IdOfAnother,
}

impl PostFault {
    /// A short name for counts.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Paused => "paused",
            Self::Disabled => "disabled",
            Self::RateLimited => "rate limited",
            Self::TooManyConcurrent => "too many concurrent",
            Self::Refused(_) => "refused",
            Self::Status(_) => "status",
            Self::ErrorBeforeStoring => "error before storing",
            Self::ErrorAfterStoring => "error after storing",
            Self::QueueUnavailable => "queue unavailable",
            Self::TimeoutAfterStoring => "timeout after storing",
            Self::HangAfterStoring => "hang after storing",
            Self::HangBeforeStoring => "hang before storing",
            Self::HangThenStore(_) => "hang then store",
            Self::TimeoutThenStore(_) => "timeout then store",
            Self::CutThenStore(_) => "cut then store",
            Self::StoreLate(_) => "store late",
            Self::CutAfterStoring => "cut after storing",
            Self::CutBeforeStoring => "cut before storing",
            Self::BreakOffAfterStoring => "break off after storing",
            Self::Slow(_) => "slow",
            Self::GarbledAnswer => "garbled answer",
            Self::StatusAfterStoring(_) => "status after storing",
            Self::ExchangedAnswer => "exchanged answer",
            Self::WrongId => "wrong id",
            Self::IdOfAnother => "id of another",
        }
    }

    /// Whether a record exists afterwards, at once or later.
    pub fn stores(&self) -> bool {
        !matches!(
            self,
            Self::Unauthorized
                | Self::Paused
                | Self::Disabled
                | Self::RateLimited
                | Self::TooManyConcurrent
                | Self::Refused(_)
                | Self::Status(_)
                | Self::ErrorBeforeStoring
                | Self::HangBeforeStoring
                | Self::CutBeforeStoring
        )
    }

    /// How long the record is not yet stored.
    pub(crate) fn store_delay(&self) -> Option<Duration> {
        match self {
            Self::HangThenStore(delay)
            | Self::TimeoutThenStore(delay)
            | Self::CutThenStore(delay)
            | Self::StoreLate(delay) => Some(*delay),
            _ => None,
        }
    }
}

/// POST faults by chance. Each POST gets at most one of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultPlan {
    /// Start of the random sequence. The same seed and the same order of requests give the same faults.
    pub seed: u64,
    /// Each fault with its probability. The sum must not exceed 1; the rest of the POSTs behave.
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

    /// A mixture of the common faults: half of the POSTs go wrong.
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

    /// The fault for a random number in `0.0..1.0`.
    pub(crate) fn pick(&self, random: f64) -> Option<&PostFault> {
        let mut upper = 0.0;
        self.chances.iter().find_map(|(fault, probability)| {
            upper += probability;
            (random < upper).then_some(fault)
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

/// What goes wrong with lists of transactions. A GET of one record by its id is not affected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListFault {
    /// Records younger than this are not listed yet.
    pub late_by: Duration,
    /// The oldest record comes first.
    pub oldest_first: bool,
    /// Ids of records that are never listed.
    pub omitted: Vec<String>,
    /// Nothing is listed, and the total is 0.
    pub empty: bool,
    /// The records come in no order.
    pub unsorted: bool,
    /// A page has at most this many records, although it says that it has as many as were asked for. The next page goes
    /// on where a full one would: the records between are on no page.
    pub page_max: Option<usize>,
}

/// Who writes the `Date` header of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DateHeader {
    /// The relayer, by its own clock, unless its options leave the header out.
    #[default]
    Own,
    /// A proxy whose clock is right, whatever the relayer's own clock shows.
    Proxy,
    /// There is none.
    Absent,
}

/// The second of two memories behind one relayer id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondMemory {
    /// It is this far behind: younger records are neither listed nor known.
    Behind(Duration),
    /// Each of the two has every other record, and never gets the rest.
    Split,
}

/// What goes wrong with webhooks. Probabilities are from 0 to 1 and drawn from the relayer's seed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WebhookFaults {
    /// Probability that a webhook is never sent.
    pub lose: f64,
    /// Probability that a webhook is sent once more after its delivery, with the same id, body and signature.
    pub repeat: f64,
    /// Probability that a webhook is held back for up to `reorder_within`, so that later ones overtake it.
    pub reorder: f64,
    /// Longest time for `reorder`; 300 ms when zero.
    pub reorder_within: Duration,
    /// Added before each webhook.
    pub delay: Duration,
    /// The record runs up to this status, and its webhooks are tried once, before the POST is answered.
    pub before_answer: Option<Status>,
    /// Webhooks of earlier statuses are held back until the final one was tried.
    pub late: bool,
    /// Signs with another key.
    pub forged: bool,
    /// Probability that a webhook is followed by one of another relayer, rightly signed, about the same id: `failed`,
    /// never signed, for lack of balance.
    pub foreign: f64,
}

/// How an accepted record ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// `sent`, `submitted`, `confirmed`.
    #[default]
    Confirmed,
    /// Reported `confirmed`, but replaced by a no-op: `to` = `from`, `value` 0x0, `data` 0x.
    NoOp,
    /// `failed` with this reason and neither nonce nor hash: the relayer never signed it.
    NeverSigned(String),
    /// `failed` on the chain, with nonce and hash.
    Reverted,
    /// `canceled`, after it was submitted.
    Canceled,
    /// `confirmed`, and then `sent` and `submitted` again with another nonce and hash: a double send.
    SentTwice,
    /// Stays `submitted` for good, although the chain has it.
    Stuck,
    /// Reported `failed` with nonce and hash, "consumed externally", although the call was executed under another hash.
    FailedButExecuted,
    /// Takes a nonce, is never broadcast, and is `failed` after [`Timing::given_up`](crate::Timing::given_up).
    GivenUp,
    /// Takes a nonce, is handed to the chain, and is `failed` as if it had never been sent; the chain decides later.
    GivenUpButSent,
    /// Takes a nonce, is handed to the chain under another one, and is `failed` with the first, which stays a gap.
    GivenUpButSentAgain,
    /// Handed to the chain under a nonce that the relayer loses together with the signature (its last seconds), and then
    /// `failed` with neither nonce nor hash, as if it had never been signed.
    FailedUnsignedButSent,
    /// Takes a nonce and is reported `confirmed`, although the chain never got it; its nonce stays a gap.
    ConfirmedUnsent,
    /// Stored, but no job moves it: `pending` for good.
    WithoutJob,
    /// Signed again for a higher price before it is mined, and then `confirmed`: the hash changes, and no webhook tells.
    GasBumped,
}
