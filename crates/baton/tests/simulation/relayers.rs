//! The relayers of a world: the crate `relayer-sim`, with what each of them will do wrong, and what its records amount to.

use std::collections::VecDeque;
use std::time::Duration;

use relayer_sim::{
    Audit, Faults, ListFault, Outcome, PostFault, Record, RelayerOptions, SimRelayer, Status, Ticket, Timing,
};

use super::chain::EvmChain;
use super::setup::{Fault, Mutation};
use super::world::{Effect, HISTORY, RETENTION, Rng, direct_request};

/// What relayers say of transactions that they signed, and the chain does not: the first two also where there is no chain;
/// the last one only where no nonce gap can hide the call from the nodes' pools.
pub const SIGNED_FAILURES: [Outcome; 6] = [
    Outcome::FailedButExecuted,
    Outcome::GivenUp,
    Outcome::GivenUpButSent,
    Outcome::GivenUpButSentAgain,
    Outcome::ConfirmedUnsent,
    Outcome::FailedUnsignedButSent,
];

/// How the relayers of a world are made.
pub struct Making {
    pub skewed: bool,
    pub faults: u32,
    pub chain: bool,
    pub shape: Mutation,
    /// How relayers err about what they have signed.
    pub signed: Outcome,
    pub now: i64,
}

/// A relayer.
pub struct Node {
    pub relayer: SimRelayer,
    pub down: bool,
    /// How often it has lost its memory, and when it last did.
    pub epoch: u32,
    pub forgot_at: i64,
    pub stalled_until: i64,
    /// A record from before the world began.
    pub history: Option<String>,
    /// The effect of each entry of the relayer's audit.
    pub effects_stored: Vec<Effect>,
    pub tickets: Vec<(Ticket, usize)>,
    /// How many of its nonces the chain has used for good, as far as it knows.
    pub settled: usize,
}

impl Node {
    pub fn new(index: usize, rng: &mut Rng, history: bool, made: &Making) -> Self {
        let Making { skewed, faults, chain, shape, ref signed, now } = *made;
        let has = |fault: Fault| faults & (1 << fault as u32) != 0;
        let dated = rng.one_in(2);
        // Without a date only the configured skew is allowed for.
        let clock_offset_ms = match (skewed, dated) {
            (false, _) => 0,
            (true, false) => rng.pick(&[-29_000, -10_000, 500, 29_000]),
            (true, true) => rng.pick(&[-120_000, -29_000, 31_000, 120_000]),
        };
        let step = |rng: &mut Rng| Duration::from_millis(rng.pick(&[3, 20, 1000, 5000]));
        // A relayer that is slow to sign, but gives nothing up yet.
        let slow = matches!(shape, Mutation::NoUnprovenWait | Mutation::TrustsAnyList);
        let sent = if slow { Duration::from_secs(90) } else { step(rng) };
        let submitted = sent + step(rng);
        let confirmed = submitted + step(rng);
        let timing = Timing {
            sent,
            submitted,
            mined: None,
            confirmed,
            given_up: confirmed,
            lost_given_up: confirmed,
            jitter_percent: if slow { 25 } else { 1000 },
        };
        let options = RelayerOptions {
            timing,
            retention: Some(RETENTION),
            date_header: dated,
            seed: rng.next(),
            api_key: "key".to_owned(),
            ..RelayerOptions::new(format!("r{index}"))
        }
        .webhook("http://baton", "key");
        let mut relayer = SimRelayer::new(options, rng.next());
        let likely = shape.likely_outcome();
        let next_outcomes: VecDeque<Outcome> = (0..24)
            .map(|_| match rng.below(16) {
                0..=8 if likely.is_some() => likely.clone().unwrap_or_default(),
                0..=5 if has(Fault::Unsigned) => {
                    Outcome::NeverSigned("Transaction in Pending state for over 2 minutes".to_owned())
                }
                6 if has(Fault::Item) => Outcome::NeverSigned("exceeds block gas limit".to_owned()),
                7 if has(Fault::Item) => Outcome::Reverted,
                8 if has(Fault::Item) => Outcome::Canceled,
                9..=10 if has(Fault::NoOp) => Outcome::NoOp,
                11..=13 if has(Fault::Signed) => signed.clone(),
                14..=15 if has(Fault::Stuck) && chain => rng.pick(&[Outcome::Stuck, Outcome::WithoutJob]),
                _ => Outcome::Confirmed,
            })
            .collect();
        let late_by = Duration::from_millis(if has(Fault::Late) { rng.pick(&[0, 900, 4000]) } else { 0 });
        let listing = ListFault { late_by, ..ListFault::default() };
        relayer.set_faults(now, Faults { clock_offset_ms, next_outcomes, listing, ..Faults::default() });
        let history = history.then(|| {
            let call = direct_request(HISTORY).call;
            let (to, value) = (format!("{:#x}", call.to), format!("{:#x}", call.value));
            relayer.add_old_record(now - 1_000_000, now - 999_000, &to, &value, &call.data)
        });
        Self {
            relayer,
            down: false,
            epoch: 0,
            forgot_at: 0,
            stalled_until: 0,
            history,
            effects_stored: Vec::new(),
            tickets: Vec::new(),
            settled: usize::MAX,
        }
    }

    /// A record, whether or not the relayer still knows it.
    pub fn find(&self, id: &str) -> Option<&Record> {
        self.relayer.records().chain(self.relayer.forgotten()).find(|record| record.id == id)
    }

    /// The records of this effect that have taken place or may still do so; a chain decides what it got.
    pub fn effects<'a>(&'a self, effect: &'a Effect, chain: Option<&'a EvmChain>) -> impl Iterator<Item = &'a str> {
        let audit = self.relayer.audit().iter().zip(&self.effects_stored);
        let takes_place = move |audit: &Audit| match chain {
            Some(chain) => self.may_send(audit) || chain.takes_place(effect, &audit.id),
            None => self.takes_place(&audit.id, audit.broadcasts),
        };
        audit.filter(move |(audit, of)| *of == effect && takes_place(audit)).map(|(audit, _)| audit.id.as_str())
    }

    fn takes_place(&self, id: &str, broadcasts: u32) -> bool {
        let Some(record) = self.find(id) else { return broadcasts > 0 };
        let replaced = record.is_no_op() && record.status.is_final();
        let lost = broadcasts == 0 && self.relayer.forgotten().iter().any(|record| record.id == id);
        !record.never_signed() && !replaced && !lost
    }

    /// Whether the relayer may still hand a record to the chain for the first time.
    fn may_send(&self, audit: &Audit) -> bool {
        let record = self.relayer.records().find(|record| record.id == audit.id);
        audit.broadcasts == 0 && record.is_some_and(|record| !record.status.is_final() && !record.is_no_op())
    }

    /// Whether a failed record was sent all the same, and not as a no-op or in vain.
    pub fn failed_but_sent(&self, record: &Record) -> bool {
        let sent = self.relayer.audit().iter().any(|audit| audit.id == record.id && audit.broadcasts > 0);
        let reverted = record.status_reason.as_deref().is_some_and(|reason| reason.contains("reverted"));
        sent && record.status == Status::Failed && !reverted && !record.is_no_op()
    }

    pub fn records_of<'a>(&'a self, effect: &'a Effect) -> impl Iterator<Item = &'a Record> {
        let audit = self.relayer.audit().iter().zip(&self.effects_stored);
        audit.filter(move |(_, of)| *of == effect).filter_map(|(audit, _)| self.find(&audit.id))
    }

    pub fn set_fault(&mut self, now: i64, fault: PostFault) {
        let mut faults = self.relayer.faults().clone();
        faults.next_posts.clear();
        faults.next_posts.push_back(Some(fault));
        self.relayer.set_faults(now, faults);
    }

    pub fn set_paused(&mut self, now: i64, paused: bool) {
        let faults = Faults { paused, ..self.relayer.faults().clone() };
        self.relayer.set_faults(now, faults);
    }

    /// No more faults, except that clocks stay as they are.
    pub fn calm_down(&mut self, now: i64) {
        let clock_offset_ms = self.relayer.faults().clock_offset_ms;
        self.relayer.set_faults(now, Faults { clock_offset_ms, ..Faults::default() });
        self.down = false;
    }
}
