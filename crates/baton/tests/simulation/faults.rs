//! The faults of a world: processes die, stand still and starve, relayers and servers fail, operators interfere.

use std::sync::Arc;
use std::time::Duration;

use baton::dead_letters::{self, Selection};
use baton::relay::reconcile::dead_letters::RelayDeadLetters;
use baton::relay::state::transaction::{FailedBy, MoveRefused, Status, Transaction, TransactionId};
use baton::relay::update::guarded_store::Updated;
use pipeline::Outcome;
use relayer_sim::Memory;

use super::process::ApiProcess;
use super::scheduler::{Job, Owner, Scheduler};
use super::setup::{Fault, Mutation};
use super::world::{World, note};

impl Scheduler {
    /// Makes one of the world's faults happen.
    pub fn fault(&mut self) {
        let (fault, process, node) = {
            let mut world = self.sim.w();
            let mut kind = world.rng.below(u64::from(Fault::COUNT)) as u32;
            let favoured = world.forced != 0 && world.rng.one_in(2);
            for _ in 0..if favoured { 40 } else { 4 } {
                let wanted = if favoured { world.forced } else { world.faults };
                if wanted & (1 << kind) == 0 {
                    kind = world.rng.below(u64::from(Fault::COUNT)) as u32;
                }
            }
            if world.faults & (1 << kind) == 0 {
                return;
            }
            let processes = world.processes.len() as u64;
            (kind, world.rng.below(processes) as usize, world.rng.below(2) as usize)
        };
        let is = |wanted: Fault| wanted as u32 == fault;
        if is(Fault::Crash) {
            return self.crash(process);
        }
        if is(Fault::Webhook) {
            return self.cut_short();
        }
        if is(Fault::Panic) {
            return self.panic();
        }
        if is(Fault::Operator) {
            return self.operate();
        }
        let mut world = self.sim.w();
        let now = world.now;
        if is(Fault::Stall) {
            let until = now + world.rng.pick(&[900, 4000, 12_000, 36_000, 41_000, 70_000]);
            world.stall(node, until);
        } else if is(Fault::Freeze) {
            let span = world.rng.pick(&[900, 4900, 5100, 12_000, 36_000, 41_000, 50_000, 130_000]);
            freeze(&mut world, process, span);
        } else if is(Fault::Starve) {
            world.processes[process].starved = !world.processes[process].starved;
        } else if is(Fault::Duplicate) {
            let count = world.queue.len() as u64;
            if count > 0 {
                let place = world.rng.below(count) as usize;
                let body = world.queue[place].body.clone();
                world.publish(&body, 0);
            }
        } else if is(Fault::LoseMessage) {
            let count = world.queue.len() as u64;
            if count > 0 {
                let place = world.rng.below(count) as usize;
                let lost = world.queue.swap_remove(place);
                note!(world, "queue: loses m{}", lost.id);
            }
        } else if is(Fault::Pause) {
            let paused = !world.nodes[node].relayer.faults().paused;
            note!(world, "r{node}: paused {paused}");
            world.nodes[node].set_paused(now, paused);
        } else if is(Fault::Down) {
            world.nodes[node].down = !world.nodes[node].down;
        } else if is(Fault::Forget) {
            world.forget(node);
        } else if is(Fault::Store) {
            world.store_away = !world.store_away;
        } else if is(Fault::Queue) {
            world.queue_away = !world.queue_away;
        } else if is(Fault::Chain) {
            world.chain_away = !world.chain_away;
        } else if is(Fault::Node) {
            if let Some(chain) = &mut world.evm {
                chain.away[node] = !chain.away[node];
            }
        } else if is(Fault::Blocks) {
            let full_until = now + world.rng.pick(&[10_000, 60_000, 100_000]);
            let replaced = world.rng.one_in(2);
            if replaced {
                world.replace_blocks();
            } else if let Some(chain) = &mut world.evm {
                chain.full_until = full_until;
            }
        } else if is(Fault::GapFiller) {
            world.fill_gap(node);
        } else if is(Fault::LoseLast) {
            let last = Duration::from_millis(world.rng.pick(&[1000, 3000, 10_000]));
            world.crash_relayer(node, Memory::ForgetLast(last));
        } else if is(Fault::Stuck) {
            world.crash_relayer(node, Memory::LoseJobs(Duration::from_secs(3)));
        } else if is(Fault::Outage) {
            let span = if world.rng.one_in(3) { 4_000_000 } else { 700_000 };
            for index in 0..world.processes.len() {
                freeze(&mut world, index, span);
            }
        }
    }

    /// kill -9 of a consumer, or now and then of the API.
    fn crash(&mut self, index: usize) {
        let api = {
            let mut world = self.sim.w();
            let api = world.rng.one_in(4);
            if api {
                note!(world, "the API is killed");
            } else if world.processes[index].alive {
                note!(world, "{}: killed", world.processes[index].id);
                let pause = world.rng.pick(&[1, 1000, 20_000]);
                let now = world.now;
                let process = &mut world.processes[index];
                (process.alive, process.frozen_until, process.restart_at) = (false, 0, now + pause);
            } else {
                return;
            }
            api
        };
        let owner = if api { Owner::Api } else { Owner::Process(index) };
        self.tasks.retain(|task| task.owner != owner);
        if api {
            self.api = ApiProcess::start(&self.sim);
        }
    }

    /// A webhook is cut short.
    fn cut_short(&mut self) {
        if let Some(position) = self.tasks.iter().position(|task| task.job == Job::Webhook) {
            drop(self.tasks.swap_remove(position));
        }
    }

    /// A handler panics: the pipeline settles its message.
    fn panic(&mut self) {
        let Some(position) = self.tasks.iter().position(|task| task.job == Job::Handle) else { return };
        let task = self.tasks.swap_remove(position);
        let (owner, delivery) = (task.owner, task.delivery);
        drop(task);
        let Some((delivery, row)) = delivery else { return };
        {
            let mut world = self.sim.w();
            note!(world, "a handler panics");
            if let Some(row) = row {
                world.truth[row].panics += 1;
            }
            let reason = "panicked".to_owned();
            let outcome = if delivery.receives < 3 {
                Outcome::Retry { after: Duration::from_secs(2), reason }
            } else {
                Outcome::Dead { reason }
            };
            world.settle(delivery, &outcome);
        }
        self.finished(owner, Job::Handle);
    }

    /// An operator replays a dead letter, or settles an unknown outcome.
    fn operate(&mut self) {
        let (replayable, unknown) = {
            let world = self.sim.w();
            let replayable = world.dead.iter().position(|dead| {
                world.row_of(&dead.body).is_some_and(|index| {
                    let row = &world.rows[index];
                    row.status == Status::Failed && row.failed_by == Some(FailedBy::Consumer)
                })
            });
            (replayable, world.rows.iter().position(Transaction::outcome_unknown))
        };
        let guarded = Arc::clone(&self.api.guarded);
        if let Some(place) = replayable {
            self.spawn(Owner::Api, Job::Operate, async move {
                let lane = RelayDeadLetters { guarded };
                let Ok(entries) = dead_letters::select(&lane, &Selection::default()).await else { return };
                if let Some(entry) = entries.get(place) {
                    drop(dead_letters::replay(&lane, std::slice::from_ref(entry)).await);
                }
            });
        } else if let Some(index) = unknown {
            let (resend, version, id) = self.sim.w().operator_decides(index);
            self.spawn(Owner::Api, Job::Operate, async move {
                let now = guarded.clock.now();
                let decide = |row: &Transaction| match (row.version == version, resend) {
                    (false, _) => Err(MoveRefused::NotPossible("it has moved meanwhile")),
                    (true, true) => row.resolve_resend(now, &guarded.timings),
                    (true, false) => row.resolve_fail(now),
                };
                if let Ok(Updated::Moved(row)) = guarded.update(id, decide).await
                    && resend
                {
                    guarded.publish_again(&row, Duration::ZERO).await;
                }
            });
        }
    }
}

impl World {
    /// The loss of memory that this world was made for.
    pub fn forget_as_shaped(&mut self) {
        if self.shape != Mutation::UsedIsSettled {
            return self.forget(0);
        }
        // Neither the call nor what fills its nonce is listed afterwards.
        for node in 0..self.nodes.len() {
            self.crash_relayer(node, Memory::ForgetLast(Duration::from_secs(60)));
            self.fill_gap(node);
            self.crash_relayer(node, Memory::ForgetLast(Duration::from_secs(60)));
        }
    }

    /// A relayer fills a gap of nonces, or without one makes a no-op all the same; it may lose its name later.
    pub fn fill_gap(&mut self, node: usize) {
        let (now, loses_name) = (self.now, self.rng.one_in(2));
        let id = self.nodes[node].relayer.add_gap_filler(now, loses_name);
        self.counters.gap_fillers += 1;
        note!(self, "r{node}: fills a gap with {id}");
    }

    /// What an operator who has looked would do: send it again only if no relayer has it or may yet have it, and no equal
    /// transaction looks for a record.
    fn operator_decides(&mut self, index: usize) -> (bool, u64, TransactionId) {
        let row = &self.rows[index];
        let effect = &self.truth[index].effect;
        let owner = |id: &str| self.bound_ever.iter().find(|(tx_id, _)| tx_id.0 == id).map(|(_, owner)| *owner);
        let stored = self.nodes.iter().flat_map(|node| node.records_of(effect)).any(|record| {
            owner(&record.id).is_none_or(|owner| owner == row.id)
                && !(record.never_signed() && owner(&record.id).is_some())
        });
        let waiting = self.evm.as_ref().is_some_and(|chain| chain.transactions().any(|known| known.effect == *effect));
        let coming = waiting || !self.packets.is_empty();
        let coming = coming || self.nodes.iter().any(|node| node.relayer.next_due_ms().is_some());
        let alone = (0..self.rows.len())
            .all(|other| other == index || self.truth[other].effect != *effect || self.rows[other].claim.is_none());
        let decided = (!stored && !coming && alone, row.version, row.id);
        note!(self, "operator: t{index} is to be {}", if decided.0 { "sent again" } else { "given up" });
        decided
    }
}

/// Stops a process for a while; it does not notice.
fn freeze(world: &mut World, index: usize, span: i64) {
    if world.processes[index].alive {
        note!(world, "{}: stands still for {span} ms", world.processes[index].id);
        let until = world.now + span;
        let process = &mut world.processes[index];
        process.frozen_until = process.frozen_until.max(until);
    }
}
