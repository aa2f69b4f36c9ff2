//! The world that the lane runs in: rows, messages, relayers, processes and the network between them, all of which can
//! fail, and the truth about them, against which every step is checked.
//!
//! The lane's own futures run in this world. Whatever they wait for (a sleep, the store, the network) is a [`Wait`] or a
//! slot in here; [`super::scheduler`] decides which of them continues next. All randomness is one seeded stream.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use alloy_primitives::{Address, Bytes, U256, aliases::U48};
use baton::clock::TimeSource;
use baton::config::{RelayMode, Timings};
use baton::randomness::RandomSource;
use baton::relay::request::call::{Call, DirectRequest};
use baton::relay::request::forward::{Forward, ForwardRequest, GaslessRequest, Signer};
use baton::relay::state::transaction::{ConsumerId, RelayerTxId, RelayerUrl, Transaction, TransactionId};
use baton::timestamp::Timestamp;
use futures::future::BoxFuture;
use serde_json::json;
use uuid::Uuid;

use super::chain::EvmChain;
use super::network::{Answer, Packet, Slot};
use super::queue::{Buried, Queued};
use super::relayers::Node;
use super::setup::{Fault, Mutation, Setup};

/// Start of each world, in milliseconds since 1970.
pub const BASE: i64 = 1_700_000_000_000;
/// The defaults of the configuration.
pub const TIMINGS: Timings = Timings {
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
pub const CONSUMER_DEAD_AFTER: Duration = Duration::from_secs(10);
pub const CLOCK_SKEW: Duration = Duration::from_secs(30);
/// Shorter than the default, so that a world can outlive it.
pub const RETENTION: Duration = Duration::from_secs(3600);
/// Longest time that a request's bytes are on their way, whatever its sender does: what the product allows for. Bytes that
/// arrive later break it (see [`Mutation::LateBytes`]).
pub const BYTES_LATE: i64 = 30_000;
/// Longest time that a relayer works on a request that it has read.
pub const RELAYER_WORKS: i64 = 30_000;
/// Different direct calls in a world; one more is the relayers' history.
pub const CONTENTS: usize = 5;
pub const HISTORY: usize = CONTENTS;
/// Gasless transactions are signed by one of these.
pub const SIGNERS: usize = 2;

/// The last two contents differ only in that one names a gas limit: their effect is the same.
fn family(content: usize) -> usize {
    if content == CONTENTS - 1 { CONTENTS - 2 } else { content }
}

pub fn direct_request(content: usize) -> DirectRequest {
    let retry = content.is_multiple_of(3);
    let gas = if content.is_multiple_of(2) { json!(60_000) } else { json!(null) };
    let family = family(content);
    let to = format!("0x{:040x}", 0xabc0 + family);
    let body = json!({ "to": to, "value": family.to_string(), "data": "0xab", "gas": gas, "retryOnFailure": retry });
    DirectRequest::parse(&body).unwrap()
}

pub const FORWARDER: Address = Address::repeat_byte(0xf0);

pub fn signer(index: usize) -> Signer {
    Signer { forwarder: FORWARDER, address: Address::with_last_byte(index as u8 + 1) }
}

/// What a user signs; the signature is not checked here.
pub fn forward(signer_index: usize, nonce: u64, deadline: i64) -> Forward {
    let request = ForwardRequest {
        from: signer(signer_index).address,
        to: Address::repeat_byte(0xcc),
        value: U256::ZERO,
        gas: U256::from(50_000),
        nonce: U256::from(nonce),
        deadline: U48::from(deadline as u64),
        // The nonce is part of what is signed; here it makes the call data differ as a real signature would.
        data: Bytes::from(vec![nonce as u8 + 1]),
    };
    let gasless = GaslessRequest { request, signature: Bytes::from(vec![0x1b; 65]), retry_on_failure: false };
    Forward { gasless, forwarder: FORWARDER, gas_limit: 200_000 }
}

/// What makes two submissions the same effect: target, value and data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effect {
    pub to: String,
    pub value: String,
    pub data: String,
}

impl Effect {
    pub fn of(call: &Call) -> Self {
        Self { to: format!("{:#x}", call.to), value: call.value.to_string(), data: call.data.to_ascii_lowercase() }
    }

    /// Of the body of a POST to a relayer.
    pub fn of_body(body: &[u8]) -> Self {
        let body: serde_json::Value = serde_json::from_slice(body).unwrap();
        let text = |name: &str| body[name].as_str().map_or_else(|| body[name].to_string(), str::to_owned);
        Self {
            to: text("to").to_ascii_lowercase(),
            value: text("value"),
            data: body["data"].as_str().unwrap_or("0x").to_ascii_lowercase(),
        }
    }
}

/// A small, fast, seeded stream.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Less than `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        ((self.next() >> 32) * n) >> 32
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize].clone()
    }
}

/// A consumer process, as far as the world knows it.
pub struct Process {
    pub id: ConsumerId,
    /// Which run of which process: a restarted one has another.
    pub run: u32,
    pub alive: bool,
    /// When a dead one comes back.
    pub restart_at: i64,
    pub frozen_until: i64,
    /// Its heartbeat does not get through.
    pub starved: bool,
    pub handling: u32,
    /// Per sweep: whether it runs, and when it may run next.
    pub sweeping: [bool; 5],
    pub sweep_after: [i64; 5],
    pub checking_health: bool,
    pub health_after: i64,
}

/// What is known of a row beside the row.
pub struct Truth {
    pub effect: Effect,
    /// The client's answer: 202, a definite no, or none yet.
    pub promised: Option<bool>,
    /// Replays and rank, as last observed by a reader.
    pub seen: (u32, u8),
    pub panics: u32,
    /// Of a gasless transaction: signer, nonce and deadline in seconds.
    pub gasless: Option<(usize, u64, i64)>,
    /// It failed although the item is not to blame, and rightly so: its deadline had passed, or its predecessor had failed.
    pub excusable: bool,
    /// It is from before the world began.
    pub history: bool,
}

/// Whether the store does what it is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Done,
    /// Not done.
    Away,
    /// Done, without an answer.
    Unanswered,
}

pub struct World {
    pub mutation: Mutation,
    pub shape: Mutation,
    pub mode: RelayMode,
    pub preflight: bool,
    pub faults: u32,
    /// Faults that come more often than others.
    pub forced: u32,
    pub now: i64,
    base: Instant,
    pub rng: Rng,
    // The store.
    pub rows: Vec<Transaction>,
    pub truth: Vec<Truth>,
    /// Which record belongs to which row.
    pub owners: Vec<(RelayerTxId, TransactionId)>,
    /// The same, kept for the checks.
    pub bound_ever: Vec<(RelayerTxId, TransactionId)>,
    pub early: Vec<(RelayerTxId, String)>,
    pub heartbeats: Vec<(ConsumerId, Timestamp)>,
    /// Until when a consumer has each shared sweep.
    pub sweep_leases: BTreeMap<&'static str, Timestamp>,
    pub nonces: Vec<(Signer, u64, TransactionId)>,
    // The queue.
    pub queue: Vec<Queued>,
    pub dead: Vec<Buried>,
    /// The chain, if the processes have one.
    pub evm: Option<EvmChain>,
    // The network.
    pub nodes: Vec<Node>,
    pub packets: Vec<Packet>,
    pub slots: Vec<Slot>,
    pub answers: Vec<(i64, usize, Answer)>,
    pub webhooks: Vec<(i64, Arc<str>)>,
    /// Effects that a relayer has refused because of the item, or whose pre-flight reverted.
    pub item_failures: Vec<Effect>,
    pub processes: Vec<Process>,
    /// When a relayer is sure to lose its memory.
    pub forget_at: Option<i64>,
    pub store_away: bool,
    /// The tokens of claims whose save had no answer, and when that was.
    pub unanswered_claims: Vec<(Uuid, i64)>,
    pub queue_away: bool,
    pub chain_away: bool,
    /// No more faults.
    pub calm: bool,
    /// When something was last learned about any row.
    pub learned_at: i64,
    /// Effects for which ADR 4 admits a gap.
    pub excused: Vec<Effect>,
    pub counters: Counters,
    pub violation: Option<String>,
    pub trace: Option<Vec<String>>,
    timers: BTreeMap<(i64, u64), Waker>,
    serial: u64,
}

/// What happened, to see that the worlds are worth something.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    pub worlds: u64,
    pub steps: u64,
    pub rows: u64,
    pub gasless: u64,
    pub confirmed: u64,
    pub failed: u64,
    pub left_unknown: u64,
    pub unknown_outcomes: u64,
    pub take_overs: u64,
    pub found: u64,
    pub resent: u64,
    pub fenced: u64,
    pub late_bytes: u64,
    pub reroutes: u64,
    pub early_webhooks: u64,
    pub nonce_waits: u64,
    pub put_back: u64,
    pub known_gap: u64,
    pub untestable: u64,
    pub witness_expired: u64,
    pub chain_worlds: u64,
    pub rpc_calls: u64,
    pub executed: u64,
    pub replaced_blocks: u64,
    pub gap_fillers: u64,
    pub found_on_chain: u64,
    pub nonces_lost: u64,
    pub asked_chain: u64,
    pub unverified: u64,
    pub waits_for_job: u64,
    pub never_on_chain: u64,
    pub contested: u64,
}

impl Counters {
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.worlds, other.worlds),
            (&mut self.steps, other.steps),
            (&mut self.rows, other.rows),
            (&mut self.gasless, other.gasless),
            (&mut self.confirmed, other.confirmed),
            (&mut self.failed, other.failed),
            (&mut self.left_unknown, other.left_unknown),
            (&mut self.unknown_outcomes, other.unknown_outcomes),
            (&mut self.take_overs, other.take_overs),
            (&mut self.found, other.found),
            (&mut self.resent, other.resent),
            (&mut self.fenced, other.fenced),
            (&mut self.late_bytes, other.late_bytes),
            (&mut self.reroutes, other.reroutes),
            (&mut self.early_webhooks, other.early_webhooks),
            (&mut self.nonce_waits, other.nonce_waits),
            (&mut self.put_back, other.put_back),
            (&mut self.known_gap, other.known_gap),
            (&mut self.untestable, other.untestable),
            (&mut self.witness_expired, other.witness_expired),
            (&mut self.chain_worlds, other.chain_worlds),
            (&mut self.rpc_calls, other.rpc_calls),
            (&mut self.executed, other.executed),
            (&mut self.replaced_blocks, other.replaced_blocks),
            (&mut self.gap_fillers, other.gap_fillers),
            (&mut self.found_on_chain, other.found_on_chain),
            (&mut self.nonces_lost, other.nonces_lost),
            (&mut self.asked_chain, other.asked_chain),
            (&mut self.unverified, other.unverified),
            (&mut self.waits_for_job, other.waits_for_job),
            (&mut self.never_on_chain, other.never_on_chain),
            (&mut self.contested, other.contested),
        ];
        for (sum, more) in pairs {
            *sum += more;
        }
    }
}

/// Adds a line to the trace, if there is one.
macro_rules! note {
    ($world:expr, $($words:tt)+) => {
        if $world.trace.is_some() {
            let line = format!($($words)+);
            $world.write_down(&line);
        }
    };
}
pub(crate) use note;

impl World {
    pub fn new(setup: &Setup) -> Self {
        let mut rng = Rng::new(setup.seed);
        // Each world has some kinds of faults and not others: everything at once hides more than it shows.
        let faults = (rng.next() & rng.next()) as u32 | (rng.next() & rng.next() & rng.next()) as u32;
        let mode = if rng.one_in(8) { RelayMode::Confirm } else { RelayMode::FireAndForget };
        let preflight = rng.one_in(4);
        let evm = setup.chain.unwrap_or_else(|| rng.one_in(2)).then(|| EvmChain::new(&mut rng, setup.shape));
        let faults = Fault::in_world(faults, setup.forced, evm.is_some(), setup.shape);
        Self {
            mutation: setup.mutation,
            shape: setup.shape,
            mode,
            preflight,
            faults,
            forced: setup.forced,
            now: BASE,
            base: Instant::now(),
            rng,
            rows: Vec::new(),
            truth: Vec::new(),
            owners: Vec::new(),
            bound_ever: Vec::new(),
            early: Vec::new(),
            heartbeats: Vec::new(),
            sweep_leases: BTreeMap::new(),
            nonces: Vec::new(),
            queue: Vec::new(),
            dead: Vec::new(),
            evm,
            nodes: Vec::new(),
            packets: Vec::new(),
            slots: Vec::new(),
            answers: Vec::new(),
            webhooks: Vec::new(),
            item_failures: Vec::new(),
            processes: Vec::new(),
            forget_at: None,
            store_away: false,
            unanswered_claims: Vec::new(),
            queue_away: false,
            chain_away: false,
            calm: false,
            learned_at: BASE,
            excused: Vec::new(),
            counters: Counters::default(),
            violation: None,
            trace: setup.trace.then(Vec::new),
            timers: BTreeMap::new(),
            serial: 0,
        }
    }

    pub fn has(&self, fault: Fault) -> bool {
        !self.calm && self.faults & (1 << fault as u32) != 0
    }

    /// Whether it had the fault before the calm.
    pub fn was_made_with(&self, fault: Fault) -> bool {
        self.faults & (1 << fault as u32) != 0
    }

    pub fn new_id(&mut self) -> u32 {
        self.serial += 1;
        self.serial as u32
    }

    pub fn write_down(&mut self, line: &str) {
        let at = self.now - BASE;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>6}.{:03} s  {line}", at / 1000, at.rem_euclid(1000)));
        }
    }

    pub fn fail(&mut self, what: String) {
        note!(self, "VIOLATION: {what}");
        if self.violation.is_none() {
            self.violation = Some(what);
        }
    }

    /// How long the next call takes on its way.
    pub fn latency(&mut self) -> i64 {
        if self.has(Fault::Slow) && self.rng.one_in(24) {
            return self.rng.pick(&[900, 1100, 4990, 5000, 6000, 11_000, 29_000, 31_000, 36_000, 41_000]);
        }
        (self.rng.next() & 3) as i64
    }

    pub fn fate(&mut self) -> Fate {
        if !self.store_away || self.calm {
            return Fate::Done;
        }
        match self.rng.below(4) {
            0 => Fate::Unanswered,
            1 => Fate::Away,
            _ => Fate::Done,
        }
    }

    pub fn instant(&self) -> Instant {
        self.base + Duration::from_millis((self.now - BASE) as u64)
    }

    /// Wakes everything whose time has come.
    pub fn fire_timers(&mut self) {
        while let Some(entry) = self.timers.first_entry() {
            if entry.key().0 > self.now {
                return;
            }
            entry.remove().wake();
        }
    }

    pub fn next_timer(&self) -> Option<i64> {
        self.timers.first_key_value().map(|((at, _), _)| *at)
    }

    /// The name of a row in the trace.
    pub fn index_of(&self, id: TransactionId) -> Option<usize> {
        self.rows.iter().position(|row| row.id == id)
    }
}

pub fn relayer_index(url: &RelayerUrl) -> usize {
    usize::from(url.0.ends_with('1'))
}

/// A handle on the world.
#[derive(Clone)]
pub struct Sim(pub Arc<Mutex<World>>);

impl Sim {
    pub fn w(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for as long as the next call takes.
    pub fn turn(&self) -> Wait {
        let mut world = self.w();
        let until = world.now + world.latency();
        drop(world);
        self.wait_until(until)
    }

    pub fn wait_until(&self, until: i64) -> Wait {
        Wait { sim: self.clone(), until, timer: None, waited: false }
    }
}

/// An await point: other tasks run before it continues.
pub struct Wait {
    sim: Sim,
    until: i64,
    timer: Option<(i64, u64)>,
    waited: bool,
}

impl Future for Wait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let sim = self.sim.clone();
        let mut world = sim.w();
        if let Some(timer) = self.timer.take() {
            world.timers.remove(&timer);
        }
        if self.waited && world.now >= self.until {
            return Poll::Ready(());
        }
        self.waited = true;
        world.serial += 1;
        let timer = (self.until, world.serial);
        world.timers.insert(timer, context.waker().clone());
        self.timer = Some(timer);
        Poll::Pending
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            self.sim.w().timers.remove(&timer);
        }
    }
}

impl TimeSource for Sim {
    fn now(&self) -> Timestamp {
        Timestamp(self.w().now)
    }

    fn slip(&self, _at: Timestamp) -> Duration {
        Duration::ZERO
    }

    fn instant(&self) -> Instant {
        self.w().instant()
    }

    fn since_boot(&self) -> Duration {
        Duration::from_millis((self.w().now - BASE) as u64)
    }

    fn wall(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.w().now as u64)
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        // Every sleep takes some time: a caller that waits for the clock would go round for ever.
        let span = i64::try_from(span.as_millis()).unwrap_or(i64::MAX / 4).max(1);
        let until = self.w().now + span;
        Box::pin(self.wait_until(until))
    }
}

impl RandomSource for Sim {
    fn uuid_v4(&self) -> Uuid {
        Uuid::from_u128(u128::from(self.w().new_id()))
    }

    fn uuid_v7(&self) -> Uuid {
        let mut world = self.w();
        let serial = world.new_id();
        Uuid::from_u128((world.now as u128) << 80 | u128::from(serial))
    }

    fn fraction(&self) -> f64 {
        self.w().rng.below(1000) as f64 / 1000.0
    }
}
