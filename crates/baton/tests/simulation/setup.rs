//! What can go wrong in a world, what can be broken in the product to prove that the simulation notices, and how a world
//! is set up for either.

use std::time::Duration;

use baton::config::Timings;

use super::world::TIMINGS;

/// What can go wrong in a world; each world has its own selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// A process is killed and restarted.
    Crash,
    /// A process stands still and continues.
    Freeze,
    /// A call takes up to 41 s.
    Slow,
    /// The heartbeat of a process is not stored although it works.
    Starve,
    /// The queue delivers a message twice.
    Duplicate,
    /// The queue loses a message, or a row's message is never sent.
    LoseMessage,
    /// A relayer is paused.
    Pause,
    /// A relayer refuses connections.
    Down,
    /// A relayer crashes and has kept its records in memory only.
    Forget,
    /// Webhooks are lost, repeated and late.
    Webhook,
    /// The store fails, before or after the commit.
    Store,
    /// The queue does not take messages, or does not say so.
    Queue,
    /// A handler panics.
    Panic,
    /// An operator replays and resolves.
    Operator,
    /// Relayers answer badly.
    BadAnswer,
    /// Relayers store late, and list late.
    Late,
    /// Items are refused, revert or are cancelled.
    Item,
    /// A relayer gives a transaction up before it signs it.
    Unsigned,
    /// A relayer replaces a transaction by a no-op.
    NoOp,
    /// All processes stand still for a long time.
    Outage,
    /// The relayers' clocks differ from ours.
    Skew,
    /// A relayer stands still.
    Stall,
    /// The network delivers bytes late: retransmitted after the caller has given up.
    Retransmit,
    /// The chain does not answer.
    Chain,
}

impl Fault {
    pub const COUNT: u32 = Self::Chain as u32 + 1;
}

/// What is switched off, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// The code as it is.
    None,
    /// The claim is not stored.
    NoClaim,
    /// Requests are written however old the claim is.
    NoFence,
    /// The fence is 20 s later than it should be.
    LateFence,
    /// The second look at a relayer's list follows the first at once.
    NoSecondLook,
    /// A relayer that has lost its memory seems to have kept it.
    NoMemoryProof,
    /// A relayer's record may belong to two rows.
    NoUniqueness,
    /// A save overwrites what another process saved.
    NoCompareAndSwap,
    /// A late report may move a row back.
    NoForwardOnly,
    /// A 500 arrives as a 400.
    ErrorIsRefusal,
    /// The second look does not wait for a relayer that may have been frozen.
    HastySecondLook,
    /// A row takes an equal row's record although its own may still come.
    TakesWhileOpen,
    /// A row takes an equal row's record although its own may exist and be forgotten.
    TakesUnproven,
    /// A row takes the record that another equal row needs.
    TakesOldest,
    /// A consumer acts on a claim that it has lost.
    NoToken,
    /// Claims are never looked at.
    NoClaimSweep,
    /// Waiting rows are never looked at.
    NoWaitingSweep,
    /// Submitted rows are never looked at.
    NoSubmittedSweep,
    /// Gasless transactions do not wait for their predecessor.
    NoNonceOrder,
    /// Gasless transactions are submitted after their deadline.
    NoDeadline,
    /// The network delivers bytes later than the product allows for.
    LateBytes,
}

impl Mutation {
    pub const ALL: [Self; 20] = [
        Self::NoClaim,
        Self::NoFence,
        Self::LateFence,
        Self::NoSecondLook,
        Self::NoMemoryProof,
        Self::NoUniqueness,
        Self::NoCompareAndSwap,
        Self::NoForwardOnly,
        Self::ErrorIsRefusal,
        Self::HastySecondLook,
        Self::TakesWhileOpen,
        Self::TakesUnproven,
        Self::TakesOldest,
        Self::NoToken,
        Self::NoClaimSweep,
        Self::NoWaitingSweep,
        Self::NoSubmittedSweep,
        Self::NoNonceOrder,
        Self::NoDeadline,
        Self::LateBytes,
    ];

    /// The timings that processes run with.
    pub fn timings(self) -> Timings {
        match self {
            Self::NoSecondLook => {
                Timings { absence_confirm: Duration::ZERO, relayer_timeout: Duration::ZERO, ..TIMINGS }
            }
            Self::HastySecondLook => Timings { relayer_timeout: Duration::ZERO, ..TIMINGS },
            _ => TIMINGS,
        }
    }

    /// The mutation of the product's pure code, which needs the feature `mutations`.
    pub fn of_pure_code(self) -> Option<baton::mutations::Mutation> {
        match self {
            Self::TakesWhileOpen => Some(baton::mutations::Mutation::TakesWhileOpen),
            Self::TakesUnproven => Some(baton::mutations::Mutation::TakesUnproven),
            Self::TakesOldest => Some(baton::mutations::Mutation::TakesOldest),
            Self::NoToken => Some(baton::mutations::Mutation::NoToken),
            Self::NoMemoryProof => Some(baton::mutations::Mutation::NoMemoryProof),
            _ => None,
        }
    }
}

/// How a world is set up.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub seed: u64,
    pub mutation: Mutation,
    /// The world is made so that this mutation is likely to show.
    pub shape: Mutation,
    /// Faults that this world has in any case, as bits.
    pub forced: u32,
    /// Maximum number of transactions.
    pub transactions_max: u64,
    /// Maximum number of steps with faults.
    pub faulty_steps_max: u64,
    /// Whether to record what happens.
    pub trace: bool,
}

impl Setup {
    /// The world of this seed, made so that the mutation is likely to show.
    pub fn new(seed: u64, mutation: Mutation) -> Self {
        // Some mistakes need a rare coincidence: those worlds are made to have it.
        let forced: &[Fault] = match mutation {
            Mutation::NoMemoryProof | Mutation::TakesUnproven => &[Fault::Forget, Fault::BadAnswer],
            Mutation::TakesOldest => &[Fault::BadAnswer],
            Mutation::TakesWhileOpen => &[Fault::Late, Fault::BadAnswer],
            Mutation::HastySecondLook | Mutation::NoSecondLook => &[Fault::Late],
            Mutation::NoFence | Mutation::LateFence => &[Fault::Freeze, Fault::Slow],
            Mutation::NoToken => &[Fault::Freeze, Fault::BadAnswer],
            Mutation::NoUniqueness => &[Fault::BadAnswer],
            Mutation::NoForwardOnly => &[Fault::Webhook],
            Mutation::ErrorIsRefusal => &[Fault::BadAnswer],
            Mutation::NoClaimSweep => &[Fault::BadAnswer],
            Mutation::NoWaitingSweep => &[Fault::LoseMessage],
            Mutation::NoSubmittedSweep => &[Fault::Webhook],
            Mutation::NoDeadline => &[Fault::Slow, Fault::Freeze],
            _ => &[],
        };
        let forced = forced.iter().fold(0, |bits, fault| bits | 1 << *fault as u32);
        // Small worlds are quick, and nearly every mistake shows in them.
        let transactions_max = if mutation == Mutation::None { u64::MAX } else { 4 };
        Self { seed, mutation, shape: mutation, forced, transactions_max, faulty_steps_max: u64::MAX, trace: false }
    }
}
