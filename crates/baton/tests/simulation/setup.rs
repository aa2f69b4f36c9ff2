//! What can go wrong in a world, what can be broken in the product to prove that the simulation notices, and how a world
//! is set up for either.

use std::sync::LazyLock;
use std::time::Duration;

use baton::config::Timings;
use relayer_sim::Outcome;

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
    /// One of the chain's nodes does not answer; the second may be behind.
    Node,
    /// The chain's newest blocks are replaced, or its blocks have no room for a while.
    Blocks,
    /// A relayer is wrong about transactions that it has signed.
    Signed,
    /// A relayer stops working on a record.
    Stuck,
    /// A relayer fills nonce gaps.
    GapFiller,
    /// A relayer crashes and has lost its last seconds.
    LoseLast,
    /// A relayer's list lies.
    Lists,
    /// A proxy answers 409 although the relayer has stored the transaction, or with another transaction.
    Proxy,
}

impl Fault {
    /// All of them, by their place.
    pub const ALL: [Self; Self::COUNT as usize] = [
        Self::Crash,
        Self::Freeze,
        Self::Slow,
        Self::Starve,
        Self::Duplicate,
        Self::LoseMessage,
        Self::Pause,
        Self::Down,
        Self::Forget,
        Self::Webhook,
        Self::Store,
        Self::Queue,
        Self::Panic,
        Self::Operator,
        Self::BadAnswer,
        Self::Late,
        Self::Item,
        Self::Unsigned,
        Self::NoOp,
        Self::Outage,
        Self::Skew,
        Self::Stall,
        Self::Retransmit,
        Self::Chain,
        Self::Node,
        Self::Blocks,
        Self::Signed,
        Self::Stuck,
        Self::GapFiller,
        Self::LoseLast,
        Self::Lists,
        Self::Proxy,
    ];

    /// Its bit among the faults of a world.
    pub fn bit(self) -> u32 {
        1 << self as u32
    }

    /// The bits of faults that the environment leaves out.
    pub fn left_out() -> u32 {
        static LEFT_OUT: LazyLock<u32> = LazyLock::new(|| {
            let named = std::env::var("SIM_WITHOUT").unwrap_or_default();
            let is_named = |fault: &Fault| named.split(',').any(|name| name == format!("{fault:?}"));
            Fault::ALL.into_iter().filter(is_named).fold(0, |bits, fault| bits | fault.bit())
        });
        *LEFT_OUT
    }

    pub const COUNT: u32 = Self::Proxy as u32 + 1;

    /// Faults under which the product promises something only with a chain.
    const WITH_CHAIN: [Self; 5] = [Self::Node, Self::Blocks, Self::Stuck, Self::LoseLast, Self::Lists];

    /// The faults of a world, of which `forced` are wanted in any case.
    pub fn in_world(bits: u32, forced: u32, chain: bool, shape: Mutation) -> u32 {
        let of = |faults: &[Self]| faults.iter().fold(0, |bits, fault| bits | fault.bit());
        let mut bits = bits;
        if !chain {
            bits &= !of(&Self::WITH_CHAIN);
        }
        // What is looked for without a chain is found sooner without these.
        if shape != Mutation::None && !shape.has_chain() {
            bits &= !of(&[Self::Signed, Self::GapFiller, Self::Proxy]);
        }
        // Behind a nonce gap a call that its relayer lost cannot be noticed.
        if shape.likely_outcome() == Some(Outcome::FailedUnsignedButSent) {
            bits &= !of(&[Self::LoseLast, Self::Forget]);
        }
        (bits | forced) & !Self::left_out()
    }
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
    /// A relayer's `failed` about a signed transaction is believed.
    BelievesFailed,
    /// A relayer's `confirmed` is believed.
    BelievesConfirmed,
    /// A call whose nonce another one used counts as not made, whatever the account's other transactions are.
    NonceLostAlone,
    /// A block counts as final at once.
    NoFinality,
    /// A call is sent again although a nonce without an owner is open.
    ResendsWhileOpen,
    /// An absence that the relayer's list does not prove counts at once.
    NoUnprovenWait,
    /// A row takes the chain's transaction of an equal row.
    IgnoresTaken,
    /// A webhook that says failed, unsigned, re-routes by itself.
    ReroutesOnWebhook,
    /// A 4xx that the real relayer never answers with counts as a refusal.
    UnlistedIsRefusal,
    /// An answer about another call is accepted.
    AcceptsOtherCall,
    /// Gap fillers are told apart by their name alone.
    FillerByName,
    /// A list that contradicts itself proves absence.
    TrustsAnyList,
    /// A relayer's `failed`, unsigned, is believed although the chain may have the call.
    BelievesUnsigned,
    /// A call that failed unsigned is re-routed although it may be in a node's pool.
    IgnoresPool,
    /// A revert ends a row although its block may be replaced.
    RevertsAtOnce,
    /// A nonce counts as used for good although its block may be replaced.
    UsedIsSettled,
}

impl Mutation {
    pub const ALL: [Self; 36] = [
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
        Self::BelievesFailed,
        Self::BelievesConfirmed,
        Self::NonceLostAlone,
        Self::NoFinality,
        Self::ResendsWhileOpen,
        Self::NoUnprovenWait,
        Self::IgnoresTaken,
        Self::ReroutesOnWebhook,
        Self::UnlistedIsRefusal,
        Self::AcceptsOtherCall,
        Self::FillerByName,
        Self::TrustsAnyList,
        Self::BelievesUnsigned,
        Self::IgnoresPool,
        Self::RevertsAtOnce,
        Self::UsedIsSettled,
    ];

    /// The timings that processes run with.
    pub fn timings(self) -> Timings {
        match self {
            Self::NoSecondLook => {
                Timings { absence_confirm: Duration::ZERO, relayer_timeout: Duration::ZERO, ..TIMINGS }
            }
            Self::HastySecondLook => Timings { relayer_timeout: Duration::ZERO, ..TIMINGS },
            Self::NoUnprovenWait => Timings { unproven_wait: Duration::ZERO, ..TIMINGS },
            _ => TIMINGS,
        }
    }

    /// Whether the mutation is looked for in worlds with a chain.
    fn has_chain(self) -> bool {
        matches!(
            self,
            Self::BelievesFailed
                | Self::BelievesConfirmed
                | Self::NonceLostAlone
                | Self::NoFinality
                | Self::ResendsWhileOpen
                | Self::NoUnprovenWait
                | Self::IgnoresTaken
                | Self::ReroutesOnWebhook
                | Self::BelievesUnsigned
                | Self::IgnoresPool
                | Self::RevertsAtOnce
                | Self::UsedIsSettled
        )
    }

    /// How relayers mostly treat what they accept.
    pub fn likely_outcome(self) -> Option<Outcome> {
        match self {
            Self::BelievesFailed => Some(Outcome::FailedButExecuted),
            Self::BelievesConfirmed => Some(Outcome::ConfirmedUnsent),
            Self::NonceLostAlone => Some(Outcome::GivenUpButSentAgain),
            Self::NoFinality | Self::UsedIsSettled => Some(Outcome::GivenUpButSent),
            Self::BelievesUnsigned | Self::IgnoresPool => Some(Outcome::FailedUnsignedButSent),
            Self::RevertsAtOnce => Some(Outcome::Reverted),
            _ => None,
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
            Self::BelievesFailed => Some(baton::mutations::Mutation::BelievesFailed),
            Self::BelievesConfirmed => Some(baton::mutations::Mutation::BelievesConfirmed),
            Self::AcceptsOtherCall => Some(baton::mutations::Mutation::AcceptsOtherCall),
            Self::TrustsAnyList => Some(baton::mutations::Mutation::TrustsAnyList),
            Self::BelievesUnsigned => Some(baton::mutations::Mutation::BelievesUnsigned),
            Self::IgnoresPool => Some(baton::mutations::Mutation::IgnoresPool),
            Self::RevertsAtOnce => Some(baton::mutations::Mutation::RevertsAtOnce),
            Self::UsedIsSettled => Some(baton::mutations::Mutation::UsedIsSettled),
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
    /// Whether the processes have a chain; chance decides if absent.
    pub chain: Option<bool>,
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
            Mutation::BelievesFailed | Mutation::BelievesConfirmed => &[Fault::Signed],
            Mutation::NonceLostAlone => &[Fault::Signed, Fault::GapFiller],
            Mutation::NoFinality => &[Fault::Signed, Fault::GapFiller, Fault::Blocks],
            Mutation::ResendsWhileOpen => &[Fault::LoseLast, Fault::Blocks],
            Mutation::NoUnprovenWait | Mutation::TrustsAnyList => &[Fault::Lists],
            Mutation::BelievesUnsigned => &[Fault::Signed],
            Mutation::IgnoresPool => &[Fault::Signed, Fault::Blocks],
            Mutation::RevertsAtOnce => &[Fault::Item, Fault::Blocks],
            Mutation::UsedIsSettled => &[Fault::Signed, Fault::BadAnswer],
            Mutation::ReroutesOnWebhook => &[Fault::Webhook],
            Mutation::UnlistedIsRefusal => &[Fault::Proxy],
            Mutation::AcceptsOtherCall => &[Fault::Proxy, Fault::BadAnswer],
            Mutation::FillerByName => &[Fault::GapFiller, Fault::Down],
            _ => &[],
        };
        let forced = forced.iter().fold(0, |bits, fault| bits | 1 << *fault as u32);
        // Small worlds are quick, and nearly every mistake shows in them.
        let transactions_max = if mutation == Mutation::None { u64::MAX } else { 4 };
        let chain = (mutation != Mutation::None).then(|| mutation.has_chain());
        let faulty_steps_max = u64::MAX;
        Self { seed, mutation, shape: mutation, forced, chain, transactions_max, faulty_steps_max, trace: false }
    }
}
