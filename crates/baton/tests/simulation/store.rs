//! The simulated store: the contract of [`TransactionStore`] in memory, with saves that compare versions, and failures
//! before and after the commit. Each save is checked against what a row may do.

use std::time::Duration;

use async_trait::async_trait;
use baton::relay::request::forward::Signer;
use baton::relay::state::transaction::{
    Binding, ConsumerId, Moved, Progress, RelayerTxId, RelayerUrl, Status, Step, Transaction, TransactionId,
};
use baton::relay::store::{
    Accepted, BoundRecord, Due, Filter, ForgottenRecord, KeyOwner, NewTransaction, RELAYER_TX_ID_UNIQUE, RecentSince,
    RelayerRows, Saved, StoreError, TimelineEntry, TransactionCounts, TransactionStore,
};
use baton::timestamp::Timestamp;
use uuid::Uuid;

use super::setup::{Fault, Mutation};
use super::world::{BASE, Effect, Fate, SIGNERS, Sim, Truth, World, note, relayer_index, signer};

/// One process's connection to the store.
pub struct SimStore {
    pub sim: Sim,
    /// The consumer that uses it; `None` for the API and for operators.
    pub consumer: Option<ConsumerId>,
}

impl SimStore {
    /// A read: it has an answer or none.
    async fn read<T>(&self, answer: impl FnOnce(&mut World) -> T) -> Result<T, StoreError> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        match world.fate() {
            Fate::Done => Ok(answer(&mut world)),
            Fate::Away | Fate::Unanswered => Err(unavailable()),
        }
    }

    /// A write: it may be done without an answer.
    async fn write<T>(&self, effect: impl FnOnce(&mut World) -> Result<T, StoreError>) -> Result<T, StoreError> {
        self.sim.turn().await;
        let (done, fate, slow) = {
            let mut world = self.sim.w();
            let fate = world.fate();
            let done = if fate == Fate::Away { Err(unavailable()) } else { effect(&mut world) };
            (done, fate, world.has(Fault::Slow) && world.rng.one_in(4))
        };
        if slow {
            self.sim.turn().await;
        }
        match fate {
            Fate::Unanswered => Err(StoreError::OutcomeUnknown("simulated".into())),
            Fate::Done | Fate::Away => done,
        }
    }

    /// The row as this process sees it.
    fn seen(&self, world: &World, row: &Transaction) -> Transaction {
        let mut row = row.clone();
        match world.mutation {
            Mutation::NoForwardOnly if self.consumer.is_none() && row.status.is_final() && row.binding.is_some() => {
                row.status = Status::Submitted;
                if let Some(binding) = &mut row.binding {
                    binding.progress = Progress::Pending;
                }
            }
            Mutation::NoDeadline if self.consumer.is_some() => {
                if let Some(forward) = &row.forward {
                    let mut forward = (**forward).clone();
                    forward.gasless.request.deadline = alloy_primitives::aliases::U48::MAX;
                    row.forward = Some(forward.into());
                }
            }
            _ => {}
        }
        row
    }

    fn rows(&self, world: &World, fits: impl Fn(&Transaction) -> bool) -> Vec<Transaction> {
        world.rows.iter().filter(|row| fits(row)).map(|row| self.seen(world, row)).collect()
    }
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("simulated".into())
}

/// The condition of the store's query.
pub fn is_due(row: &Transaction, kind: Due, now: Timestamp) -> bool {
    let fits = match kind {
        Due::Claimed => row.claim.is_some(),
        Due::Bound => row.claim.is_none() && row.binding.is_some(),
        Due::Waiting => row.claim.is_none() && row.binding.is_none(),
    };
    fits && row.check_at.is_some_and(|at| at <= now)
}

#[async_trait]
impl TransactionStore for SimStore {
    async fn accept(&self, rows: &[NewTransaction]) -> Vec<Result<Accepted, StoreError>> {
        let mut answers = Vec::with_capacity(rows.len());
        for (row, _) in rows {
            answers.push(self.write(|world| Ok(world.accept(row))).await);
        }
        answers
    }

    async fn key_owner(&self, _api_key: &str, _key: &str) -> Result<Option<KeyOwner>, StoreError> {
        Ok(None)
    }

    async fn release_key(&self, _api_key: &str, _key: &str, _id: TransactionId) -> Result<(), StoreError> {
        Ok(())
    }

    async fn nonce_holder(&self, signer: Signer, nonce: u64) -> Result<Option<Transaction>, StoreError> {
        self.read(|world| {
            if world.mutation == Mutation::NoNonceOrder {
                return None;
            }
            let holder = world.nonces.iter().find(|(by, taken, _)| (*by, *taken) == (signer, nonce))?.2;
            world.index_of(holder).map(|index| self.seen(world, &world.rows[index]))
        })
        .await
    }

    async fn last_nonce(&self, signer: Signer) -> Result<Option<u64>, StoreError> {
        self.read(|world| world.next_nonce(signer).checked_sub(1)).await
    }

    async fn withdrawn_nonce(&self, _signer: Signer, _from: u64) -> Result<Option<u64>, StoreError> {
        // Only the HTTP call asks; the simulated clients take the next nonce.
        Ok(None)
    }

    async fn record_failed_forward(&self, _digest: [u8; 32], _now: Timestamp) -> Result<(), StoreError> {
        Ok(())
    }

    async fn is_failed_forward(&self, _digest: [u8; 32]) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn insert(&self, _rows: &[Transaction]) -> Result<(), StoreError> {
        Ok(())
    }

    async fn get(&self, id: TransactionId) -> Result<Option<Transaction>, StoreError> {
        self.read(|world| world.index_of(id).map(|index| self.seen(world, &world.rows[index]))).await
    }

    async fn find_bound(&self, tx_id: &RelayerTxId) -> Result<Option<Transaction>, StoreError> {
        self.read(|world| {
            if world.mutation == Mutation::NonceLostAlone && tx_id.0.starts_with("chain:") {
                return Some(made_up_row(world));
            }
            let owner = world.owners.iter().find(|(known, _)| known == tx_id)?.1;
            world.index_of(owner).map(|index| self.seen(world, &world.rows[index]))
        })
        .await
    }

    async fn bound_among(&self, tx_ids: &[RelayerTxId]) -> Result<Vec<RelayerTxId>, StoreError> {
        self.read(|world| {
            if world.mutation == Mutation::NoUniqueness {
                return Vec::new();
            }
            let bound = |tx_id: &&RelayerTxId| world.owners.iter().any(|(known, _)| known == *tx_id);
            tx_ids.iter().filter(bound).cloned().collect()
        })
        .await
    }

    async fn take_record(&self, tx_id: &RelayerTxId, id: TransactionId) -> Result<bool, StoreError> {
        self.write(|world| {
            if matches!(world.mutation, Mutation::IgnoresTaken | Mutation::NoUniqueness) {
                return Ok(true);
            }
            let owner = world.owners.iter().find(|(known, _)| known == tx_id).map(|(_, owner)| *owner);
            if owner.is_none() {
                world.owners.push((tx_id.clone(), id));
            }
            Ok(owner.is_none_or(|owner| owner == id))
        })
        .await
    }

    async fn save(&self, moved: &Moved) -> Result<Saved, StoreError> {
        let saved = self.write(|world| world.save(moved, self.consumer.as_ref())).await;
        if let (Err(StoreError::OutcomeUnknown(_)), Some(claim)) = (&saved, &moved.transaction.claim)
            && moved.steps.iter().any(|step| step.action == "claimed")
        {
            let mut world = self.sim.w();
            let now = world.now;
            world.unanswered_claims.push((claim.token, now));
        }
        saved
    }

    async fn note(&self, _id: TransactionId, _step: &Step, _now: Timestamp) -> Result<(), StoreError> {
        self.write(|_| Ok(())).await
    }

    async fn timeline(&self, _id: TransactionId) -> Result<Vec<TimelineEntry>, StoreError> {
        Ok(Vec::new())
    }

    async fn list(
        &self,
        _filter: &Filter,
        _before: Option<TransactionId>,
        _max: usize,
    ) -> Result<Vec<Transaction>, StoreError> {
        Ok(Vec::new())
    }

    async fn due(&self, kind: Due, now: Timestamp, max: usize) -> Result<Vec<Transaction>, StoreError> {
        self.read(|world| {
            let mut due = self.rows(world, |row| is_due(row, kind, now));
            due.sort_by_key(|row| row.check_at);
            due.truncate(max);
            due
        })
        .await
    }

    async fn lease_due(
        &self,
        kind: Due,
        now: Timestamp,
        until: Timestamp,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError> {
        self.write(|world| {
            let mut due = self.rows(world, |row| is_due(row, kind, now));
            due.sort_by_key(|row| row.check_at);
            due.truncate(max);
            for leased in &mut due {
                leased.check_at = Some(until);
                let index = world.index_of(leased.id);
                if let Some(row) = index.and_then(|index| world.rows.get_mut(index)) {
                    row.check_at = Some(until);
                }
            }
            Ok(due)
        })
        .await
    }

    async fn lease_sweep(
        &self,
        sweep: &'static str,
        held: Option<Timestamp>,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<bool, StoreError> {
        self.write(|world| {
            let lease = world.sweep_leases.entry(sweep).or_insert(Timestamp(i64::MIN));
            let free = *lease <= now || Some(*lease) == held;
            if free {
                *lease = until;
            }
            Ok(free)
        })
        .await
    }

    async fn claimed(&self, max: usize) -> Result<Vec<Transaction>, StoreError> {
        self.read(|world| {
            let mut claimed = self.rows(world, |row| row.claim.is_some());
            claimed.reverse();
            claimed.truncate(max);
            claimed
        })
        .await
    }

    async fn last_bound(
        &self,
        relayer: &RelayerUrl,
        before: Timestamp,
        max: usize,
    ) -> Result<Vec<BoundRecord>, StoreError> {
        self.read(|world| world.last_bound(relayer, before, max)).await
    }

    async fn open_at(&self, relayer: &RelayerUrl, max: usize) -> Result<Vec<Transaction>, StoreError> {
        let at = |row: &Transaction| row.binding.as_ref().is_some_and(|binding| binding.relayer == *relayer);
        self.read(|world| {
            let mut open = self.rows(world, |row| at(row) && !row.status.is_final());
            open.truncate(max);
            if world.mutation == Mutation::ResendsWhileOpen {
                open.extend(owners_of_open_nonces(world, relayer));
            }
            open
        })
        .await
    }

    async fn forgotten_at(
        &self,
        relayer: &RelayerUrl,
        since: Timestamp,
        kept: Duration,
        max: usize,
    ) -> Result<Vec<ForgottenRecord>, StoreError> {
        self.read(|world| {
            let forgotten = world.rows.iter().filter(|row| !row.status.is_final()).filter_map(|row| {
                let binding = row.binding.as_ref().filter(|binding| binding.relayer == *relayer)?;
                let lost = binding.forgotten_since.filter(|at| *at >= since && at.since(binding.at) < kept);
                let (tx_id, at) = (binding.tx_id.clone(), binding.at);
                lost.map(|_| ForgottenRecord { tx_id, at, only_silent: row.is_only_silent() })
            });
            forgotten.take(max).collect()
        })
        .await
    }

    async fn nonce_owners(
        &self,
        relayer: &RelayerUrl,
        nonces: &[u64],
    ) -> Result<Vec<(u64, TransactionId)>, StoreError> {
        self.read(|world| {
            let owned = |row: &Transaction| {
                let binding = row.binding.as_ref().filter(|binding| binding.relayer == *relayer)?;
                binding.nonce.filter(|nonce| nonces.contains(nonce)).map(|nonce| (nonce, row.id))
            };
            let used = |nonce: &u64| world.is_used(relayer_index(relayer), *nonce);
            let ignores = world.mutation == Mutation::IgnoresTaken;
            world.rows.iter().filter_map(owned).filter(|(nonce, _)| !ignores || !used(nonce)).collect()
        })
        .await
    }

    async fn keep_early_webhook(&self, tx_id: &RelayerTxId, record: &str, _now: Timestamp) -> Result<(), StoreError> {
        self.write(|world| {
            world.counters.early_webhooks += 1;
            world.early.push((tx_id.clone(), record.to_owned()));
            Ok(())
        })
        .await
    }

    async fn take_early_webhooks(&self, tx_id: &RelayerTxId) -> Result<Vec<String>, StoreError> {
        self.write(|world| {
            let (taken, left) = std::mem::take(&mut world.early).into_iter().partition(|(early, _)| early == tx_id);
            world.early = left;
            Ok(Vec::into_iter(taken).map(|(_, record): (RelayerTxId, String)| record).collect())
        })
        .await
    }

    async fn forget(&self, _before: Timestamp) -> Result<u64, StoreError> {
        Ok(0)
    }

    async fn heartbeat(&self, consumer: &ConsumerId, now: Timestamp) -> Result<(), StoreError> {
        self.write(|world| {
            if world.processes.iter().any(|process| process.id == *consumer && process.starved) {
                return Err(unavailable());
            }
            world.heartbeats.retain(|(known, _)| known != consumer);
            world.heartbeats.push((consumer.clone(), now));
            Ok(())
        })
        .await
    }

    async fn last_heartbeat(&self, consumer: &ConsumerId) -> Result<Option<Timestamp>, StoreError> {
        self.read(|world| world.heartbeats.iter().find(|(known, _)| known == consumer).map(|(_, at)| *at)).await
    }

    async fn counts(&self) -> Result<TransactionCounts, StoreError> {
        Ok(TransactionCounts::default())
    }

    async fn ping(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn relayer_rows(
        &self,
        relayers: &[RelayerUrl],
        recent_since: RecentSince,
    ) -> Result<Vec<RelayerRows>, StoreError> {
        self.read(|world| relayers.iter().map(|relayer| world.relayer_rows(relayer, recent_since)).collect()).await
    }
}

/// A row that nothing else knows.
fn made_up_row(world: &World) -> Transaction {
    Transaction { id: TransactionId(Uuid::nil()), ..world.rows[0].clone() }
}

/// Rows that seem to own every nonce of a relayer that is not used yet.
fn owners_of_open_nonces(world: &World, relayer: &RelayerUrl) -> impl Iterator<Item = Transaction> {
    (0..50).filter(|nonce| !world.is_used(relayer_index(relayer), *nonce)).map(|nonce| {
        let (relayer, tx_id, at) = (relayer.clone(), RelayerTxId(String::new()), Timestamp(world.now));
        let progress = Progress::Submitted;
        let binding = Some(Binding { relayer, tx_id, at, progress, nonce: Some(nonce), forgotten_since: None });
        Transaction { binding, ..made_up_row(world) }
    })
}

impl World {
    fn accept(&mut self, row: &Transaction) -> Accepted {
        let mut gasless = None;
        if let Some(forward) = &row.forward {
            let (by, nonce) = (forward.signer(), forward.nonce());
            if let Some((_, _, holder)) = self.nonces.iter().find(|(known, taken, _)| (*known, *taken) == (by, nonce)) {
                let holder = *holder;
                let failed = self.index_of(holder).is_some_and(|index| self.rows[index].status == Status::Failed);
                if !failed {
                    return Accepted::NonceTaken(holder);
                }
                self.nonces.retain(|(known, taken, _)| (*known, *taken) != (by, nonce));
            }
            self.nonces.push((by, nonce, row.id));
            self.counters.gasless += 1;
            let index = (0..SIGNERS).find(|index| signer(*index) == by).unwrap();
            gasless = Some((index, nonce, forward.gasless.request.deadline.to::<u64>() as i64));
        }
        note!(self, "store: t{} accepted, {}, {}", self.rows.len(), row.kind, row.call.to);
        self.rows.push(row.clone());
        self.truth.push(Truth {
            effect: Effect::of(&row.call),
            promised: None,
            seen: (0, 0),
            panics: 0,
            gasless,
            excusable: false,
            history: false,
        });
        Accepted::Stored
    }

    /// The nonce that a signer signs next.
    pub fn next_nonce(&self, signer: Signer) -> u64 {
        let failed = |id: &TransactionId| self.index_of(*id).is_none_or(|at| self.rows[at].status == Status::Failed);
        let taken = self.nonces.iter().filter(|(by, _, id)| *by == signer && !failed(id));
        taken.map(|(_, nonce, _)| nonce + 1).max().unwrap_or(0)
    }

    pub fn last_bound(&self, relayer: &RelayerUrl, before: Timestamp, max: usize) -> Vec<BoundRecord> {
        let bound = |row: &Transaction| {
            let binding = row.binding.as_ref()?;
            let counts = binding.relayer == *relayer && binding.at < before && !binding.tx_id.0.starts_with("chain:");
            counts.then(|| BoundRecord { tx_id: binding.tx_id.clone(), at: binding.at, account: row.from.clone() })
        };
        let mut bound: Vec<_> = self.rows.iter().filter(|row| !row.imported).filter_map(bound).collect();
        bound.sort_by_key(|record| std::cmp::Reverse(record.at));
        bound.truncate(max);
        bound
    }

    fn relayer_rows(&self, relayer: &RelayerUrl, recent_since: RecentSince) -> RelayerRows {
        let mut rows = RelayerRows::default();
        for row in &self.rows {
            if let Some(claim) = row.claim.as_ref().filter(|claim| claim.relayer == *relayer) {
                rows.claimed += 1;
                rows.recent += u64::from(claim.at >= recent_since.open_since);
                rows.recent_unsigned += u64::from(claim.at >= recent_since.open_since);
            }
            let Some(binding) = row.binding.as_ref().filter(|binding| binding.relayer == *relayer) else { continue };
            if row.status.is_final() {
                rows.ended =
                    (rows.ended + u64::from(row.updated_at >= recent_since.ended_since)).min(recent_since.ended_max);
                rows.last_ended = rows.last_ended.max(Some(row.updated_at));
                continue;
            }
            let recent = binding.at >= recent_since.open_since;
            rows.bound += 1;
            rows.recent += u64::from(recent);
            rows.recent_unsigned += u64::from(recent && binding.nonce.is_none());
            match binding.nonce {
                None => {
                    rows.unsigned += 1;
                    let oldest = rows.oldest_unsigned.map_or(binding.at, |oldest| oldest.min(binding.at));
                    rows.oldest_unsigned = if recent { Some(oldest) } else { rows.oldest_unsigned };
                }
                Some(nonce) => {
                    let oldest =
                        rows.oldest_signed.map_or((nonce, binding.at), |oldest| oldest.min((nonce, binding.at)));
                    rows.oldest_signed = Some(oldest);
                    rows.nonce_max = rows.nonce_max.max(Some(nonce));
                }
            }
        }
        rows
    }

    fn save(&mut self, moved: &Moved, by: Option<&ConsumerId>) -> Result<Saved, StoreError> {
        let next = &moved.transaction;
        let Some(index) = self.index_of(next.id) else { return Ok(Saved::Stale) };
        let before = self.rows[index].clone();
        if before.version + 1 != next.version && self.mutation != Mutation::NoCompareAndSwap {
            note!(self, "  t{index}: another process was quicker");
            return Ok(Saved::Stale);
        }
        if self.mutation == Mutation::NoClaim && before.claim.is_none() && next.claim.is_some() {
            return Ok(Saved::Yes { early: false });
        }
        let mut early = false;
        if let Some(binding) = &next.binding {
            let owner = self.owners.iter().find(|(tx_id, _)| *tx_id == binding.tx_id).map(|(_, owner)| *owner);
            match owner {
                None => {
                    self.owners.push((binding.tx_id.clone(), next.id));
                    early = self.early.iter().any(|(tx_id, _)| *tx_id == binding.tx_id);
                }
                Some(owner) if owner != next.id && self.mutation != Mutation::NoUniqueness => {
                    note!(self, "  t{index}: {} belongs to another row", binding.tx_id);
                    return Err(StoreError::Conflict { constraint: RELAYER_TX_ID_UNIQUE });
                }
                Some(_) => {}
            }
        }
        let actions: Vec<&str> = moved.steps.iter().map(|step| step.action).collect();
        self.count(&before, next, &actions);
        self.check_save(index, &before, next, by, actions.contains(&"resolved"));
        // Proof of absence leads to a resend, or to an equal transaction's record.
        if actions.contains(&"absent") || actions.contains(&"submitted") {
            self.excuse_known_gap(&before);
        }
        self.write_down_save(index, next, &actions);
        let shape = |row: &Transaction| {
            let unknown = row.claim.as_ref().and_then(|claim| claim.unknown.as_ref());
            (
                row.status,
                row.claim.is_some(),
                unknown.map(|unknown| unknown.absent_since.is_some()),
                row.binding.as_ref().map(|binding| (binding.progress, binding.forgotten_since.is_some())),
                row.attempts,
            )
        };
        if shape(&before) != shape(next) {
            self.learned_at = self.now;
        }
        self.rows[index] = next.clone();
        // The worst time for a chain to replace its newest blocks: right after a call counts as not made.
        let not_made = before.claim.is_some() && next.claim.is_none() && next.binding.is_none();
        if self.shape == Mutation::UsedIsSettled && not_made && !next.status.is_final() && !self.calm {
            self.replace_blocks();
        }
        Ok(Saved::Yes { early })
    }

    fn count(&mut self, before: &Transaction, next: &Transaction, actions: &[&str]) {
        let taken_over = before.claim.as_ref().zip(next.claim.as_ref()).is_some_and(|(a, b)| a.token != b.token);
        let counters = &mut self.counters;
        counters.take_overs += u64::from(taken_over);
        for action in actions {
            match *action {
                "outcome-unknown" => counters.unknown_outcomes += 1,
                "absent" => counters.resent += 1,
                "rerouted" => {
                    counters.reroutes += 1;
                    let signed = before.binding.as_ref().is_some_and(|binding| binding.nonce.is_some());
                    counters.nonces_lost += u64::from(signed);
                }
                "relayer-says" => counters.asked_chain += 1,
                "waiting" => counters.nonce_waits += 1,
                "submitted" if before.claim.as_ref().is_some_and(|claim| claim.unknown.is_some()) => {
                    counters.found += 1;
                    let on_chain = next.binding.as_ref().is_some_and(|binding| binding.tx_id.0.starts_with("chain:"));
                    counters.found_on_chain += u64::from(on_chain);
                }
                _ => {}
            }
        }
    }

    fn write_down_save(&mut self, index: usize, next: &Transaction, actions: &[&str]) {
        if self.trace.is_none() {
            return;
        }
        let claim = next.claim.as_ref().map(|claim| {
            let unknown =
                claim.unknown.as_ref().map(|unknown| (unknown.open_until.0 - BASE, unknown.absent_since.is_some()));
            format!(" claim {} of {} at {}, unknown {unknown:?}", claim.token.as_u128(), claim.consumer, claim.relayer)
        });
        let binding = next.binding.as_ref().map(|binding| format!(" bound to {}", binding.tx_id));
        let line = format!(
            "  t{index} v{} {}: {}{}{}",
            next.version,
            next.status,
            actions.join(", "),
            claim.unwrap_or_default(),
            binding.unwrap_or_default()
        );
        self.write_down(&line);
    }

    /// ADR 4: without a witness, a relayer that answered is believed, and may have lost its memory all the same.
    fn excuse_known_gap(&mut self, before: &Transaction) {
        let Some((claim, unknown)) =
            before.claim.as_ref().and_then(|claim| claim.unknown.as_ref().map(|unknown| (claim, unknown)))
        else {
            return;
        };
        let node = &self.nodes[relayer_index(&claim.relayer)];
        let forgot = node.epoch > 0 && node.forgot_at >= claim.at.0;
        let witness = self.last_bound(&claim.relayer, claim.at, 1).pop();
        let believed = witness.is_some_and(|binding| self.is_within_retention(binding.at));
        // A chain closes the gap.
        if self.evm.is_none()
            && forgot
            && !believed
            && !unknown.kind.is_silence()
            && self.mutation != Mutation::NoMemoryProof
        {
            self.counters.known_gap += 1;
            self.excused.push(Effect::of(&before.call));
        }
    }
}
