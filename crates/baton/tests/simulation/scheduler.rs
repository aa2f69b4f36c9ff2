//! Decides what happens next: one poll of one task at a time, chosen at random among all that are ready; faults in
//! between; then a calm in which everything must come to rest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use baton::relay::accept::intake::AcceptRequest;
use baton::relay::observe::status::Found;
use baton::relay::observe::webhook::receive_report;
use baton::relay::reconcile::sweeps::Sweep;
use baton::relay::relayer::wire::{self, Webhook};
use baton::relay::state::transaction::{ConsumerId, Status, Transaction};
use baton::relay::store::Due;
use baton::relay::update::guarded_store::Origin;
use baton::timestamp::Timestamp;
use futures::future::BoxFuture;
use pipeline::Handler;

use super::beginning::{Post, build, plan};
use super::process::{ApiProcess, ConsumerProcess};
use super::queue::Delivery;
use super::setup::{Mutation, Setup};
use super::store::is_due;
use super::world::{Counters, Sim, World, direct_request, forward, note, signer};

/// Steps after which a world that has not come to rest never will.
const CALM_STEPS_MAX: u64 = 100_000;
/// Messages that one process handles at once.
const CONCURRENCY: u32 = 3;
/// In the calm, unknown outcomes that have not changed for this long will not.
const SETTLED_AFTER: i64 = 400_000;
/// In the calm, rows that have not changed for this long are lost.
const LOST_AFTER: i64 = 2_500_000;

/// The sweeps of a process, in the order of [`Process::sweeping`].
const SWEEPS: [Sweep; 5] = [Sweep::Heartbeat, Sweep::Claims, Sweep::Submitted, Sweep::Waiting, Sweep::DeadLetters];

/// The end of a world.
pub struct Ended {
    pub violation: Option<String>,
    pub steps: u64,
    pub counters: Counters,
    pub trace: Vec<String>,
}

/// Who runs a task; its tasks die with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Process(usize),
    Api,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    Handle,
    Sweep(usize),
    Health,
    Webhook,
    Post,
    Read,
    Operate,
}

/// Set when a task can continue.
struct Ready(AtomicBool);

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub struct Task {
    ready: Arc<Ready>,
    waker: Waker,
    pub owner: Owner,
    pub job: Job,
    /// Of [`Job::Handle`].
    pub delivery: Option<(Delivery, Option<usize>)>,
    work: BoxFuture<'static, ()>,
}

pub struct Scheduler {
    pub sim: Sim,
    pub api: ApiProcess,
    consumers: Vec<ConsumerProcess>,
    pub tasks: Vec<Task>,
    /// What clients will still post, each not before its time.
    posts: Vec<(i64, Post)>,
    choices: Vec<Choice>,
    steps: u64,
}

#[derive(Clone, Copy)]
enum Choice {
    Receive(usize),
    Sweep(usize, usize),
    Health(usize),
    Post,
}

/// Runs one world to its end.
pub fn run(setup: &Setup) -> Ended {
    #[cfg(feature = "mutations")]
    baton::mutations::set(setup.mutation.of_pure_code());
    let mut world = World::new(setup);
    let (posts, faulty_steps) = plan(&mut world, setup);
    build(&mut world, setup.shape);
    let consumers = world.processes.len();
    let (faults, mode, preflight, chain) = (world.faults, world.mode, world.preflight, world.evm.is_some());
    note!(world, "faults {faults:#x}, {mode:?}, {consumers} consumers, pre-flight {preflight}, chain {chain}");
    let sim = Sim(Arc::new(Mutex::new(world)));
    let ids: Vec<ConsumerId> = sim.w().processes.iter().map(|process| process.id.clone()).collect();
    let consumers = ids.iter().map(|id| ConsumerProcess::start(&sim, id)).collect();
    let api = ApiProcess::start(&sim);
    let mut scheduler = Scheduler { sim, api, consumers, tasks: Vec::new(), posts, choices: Vec::new(), steps: 0 };
    while scheduler.steps < faulty_steps && scheduler.sim.w().violation.is_none() {
        let faulty = scheduler.sim.w().rng.one_in(24);
        if faulty {
            scheduler.fault();
        }
        scheduler.step();
    }
    scheduler.calm_down();
    let calm_from = scheduler.steps;
    while scheduler.sim.w().violation.is_none() && !scheduler.is_at_rest() {
        if scheduler.steps - calm_from > CALM_STEPS_MAX {
            scheduler.sim.w().fail("lost: it never comes to rest".to_owned());
            break;
        }
        scheduler.step();
    }
    // Tasks hold the world; they end before it is looked at.
    scheduler.tasks.clear();
    let mut world = scheduler.sim.w();
    if world.violation.is_none() {
        world.check_end();
    }
    world.counters.worlds = 1;
    world.counters.chain_worlds = u64::from(world.evm.is_some());
    world.counters.steps = scheduler.steps;
    world.counters.rows = world.rows.len() as u64;
    Ended {
        violation: world.violation.take(),
        steps: scheduler.steps,
        counters: world.counters,
        trace: world.trace.take().unwrap_or_default(),
    }
}

impl Scheduler {
    /// One poll of one task, or something new; if nothing can continue, on to the next time at which something can.
    fn step(&mut self) {
        self.steps += 1;
        let (webhooks, new_first, read) = {
            let mut world = self.sim.w();
            if world.forget_at.is_some_and(|at| at <= world.now) {
                world.forget_at = None;
                world.forget_as_shaped();
            }
            if world.calm {
                world.fill_gaps();
            }
            let webhooks = world.move_outside();
            world.fire_timers();
            let read = self.steps.is_multiple_of(8) && !world.rows.is_empty();
            (webhooks, world.rng.one_in(5), read)
        };
        for body in webhooks {
            self.receive_webhook(&body);
        }
        if read {
            self.read();
        }
        let done = new_first && self.start_new() || self.go_on() || !new_first && self.start_new();
        if !done {
            self.pass_time();
        }
    }

    fn go_on(&mut self) -> bool {
        let position = {
            let mut world = self.sim.w();
            let count = self.tasks.len();
            if count == 0 {
                return false;
            }
            let place = world.rng.below(count as u64) as usize;
            let now = world.now;
            let can = |position: &usize| {
                let task = &self.tasks[*position];
                task.ready.0.load(Ordering::Relaxed) && frozen_until(&world, task.owner) <= now
            };
            match (place..place + count).map(|position| position % count).find(can) {
                Some(position) => position,
                None => return false,
            }
        };
        let task = &mut self.tasks[position];
        task.ready.0.store(false, Ordering::Relaxed);
        if task.work.as_mut().poll(&mut Context::from_waker(&task.waker)).is_ready() {
            let task = self.tasks.swap_remove(position);
            self.finished(task.owner, task.job);
        }
        true
    }

    pub fn spawn(&mut self, owner: Owner, job: Job, work: impl Future<Output = ()> + Send + 'static) {
        let ready = Arc::new(Ready(AtomicBool::new(true)));
        let waker = Waker::from(Arc::clone(&ready));
        self.tasks.push(Task { ready, waker, owner, job, delivery: None, work: Box::pin(work) });
    }

    pub fn finished(&self, owner: Owner, job: Job) {
        let Owner::Process(index) = owner else { return };
        let mut world = self.sim.w();
        let now = world.now;
        let late = if world.calm { 8000 } else { world.rng.pick(&[0, 0, 500, 6000]) };
        let process = &mut world.processes[index];
        match job {
            Job::Handle => process.handling -= 1,
            Job::Sweep(kind) => {
                process.sweeping[kind] = false;
                // The pause of the sweep, and in the calm a longer one, to save steps.
                let pause = self.consumers[index].reconciler.pause(SWEEPS[kind]).as_millis() as i64;
                process.sweep_after[kind] = now + pause + if kind == 0 { 0 } else { late };
            }
            Job::Health => {
                process.checking_health = false;
                process.health_after = now + 10_000;
            }
            Job::Webhook | Job::Post | Job::Read | Job::Operate => {}
        }
    }

    /// A message is received, a sweep or a health check begins, or a client posts.
    fn start_new(&mut self) -> bool {
        self.choices.clear();
        let choice = {
            let mut world = self.sim.w();
            let now = world.now;
            let message = world.next_message_at().is_some_and(|at| at <= now);
            let due = due_sweeps(&world, now);
            let queued = !world.queue.is_empty();
            for (index, process) in world.processes.iter().enumerate() {
                if !process.alive || process.frozen_until > now {
                    continue;
                }
                if message && process.handling < CONCURRENCY {
                    self.choices.push(Choice::Receive(index));
                }
                for (kind, due) in due.iter().enumerate() {
                    // In the calm one reconciler is enough.
                    let one = index == 0 || kind == 0 || !world.calm;
                    if *due && !process.sweeping[kind] && process.sweep_after[kind] <= now && one {
                        self.choices.push(Choice::Sweep(index, kind));
                    }
                }
                if queued && !process.checking_health && process.health_after <= now {
                    self.choices.push(Choice::Health(index));
                }
            }
            if self.posts.iter().any(|(at, _)| *at <= now) {
                self.choices.push(Choice::Post);
            }
            if self.choices.is_empty() {
                return false;
            }
            self.choices[world.rng.below(self.choices.len() as u64) as usize]
        };
        match choice {
            Choice::Receive(process) => self.receive(process),
            Choice::Sweep(process, kind) => self.sweep(process, kind),
            Choice::Health(process) => {
                self.sim.w().processes[process].checking_health = true;
                let pool = Arc::clone(&self.consumers[process].pool);
                self.spawn(Owner::Process(process), Job::Health, async move {
                    pool.check().await;
                    pool.count_rows().await;
                });
            }
            Choice::Post => self.post(),
        }
        true
    }

    fn receive(&mut self, index: usize) {
        let (delivery, message, row) = {
            let mut world = self.sim.w();
            let run = world.processes[index].run;
            let Some((delivery, message)) = world.receive(run) else { return };
            world.processes[index].handling += 1;
            let row = world.row_of(&message.body);
            (delivery, message, row)
        };
        let (consumer, sim) = (Arc::clone(&self.consumers[index].consumer), self.sim.clone());
        self.spawn(Owner::Process(index), Job::Handle, async move {
            let outcome = consumer.handle(&message).await;
            sim.turn().await;
            sim.w().settle(delivery, &outcome);
        });
        if let Some(task) = self.tasks.last_mut() {
            task.delivery = Some((delivery, row));
        }
    }

    fn sweep(&mut self, index: usize, kind: usize) {
        {
            let mut world = self.sim.w();
            world.processes[index].sweeping[kind] = true;
            if kind > 0 {
                note!(world, "{}: sweeps {}", world.processes[index].id, SWEEPS[kind].name());
            }
        }
        let reconciler = Arc::clone(&self.consumers[index].reconciler);
        self.spawn(Owner::Process(index), Job::Sweep(kind), async move {
            // A sweep that the store fails is repeated.
            drop(reconciler.sweep(SWEEPS[kind]).await);
        });
    }

    fn post(&mut self) {
        let now = self.sim.w().now;
        let Some(position) = self.posts.iter().position(|(at, _)| *at <= now) else { return };
        let (_, post) = self.posts.swap_remove(position);
        let (intake, sim) = (Arc::clone(&self.api.intake), self.sim.clone());
        self.spawn(Owner::Api, Job::Post, async move {
            let deadline = intake.deadline();
            let accepted = match post {
                Post::Direct(content) => {
                    let request = direct_request(content);
                    intake.accept(AcceptRequest::Direct(&request), "client", None, deadline).await
                }
                Post::Gasless(by, seconds) => {
                    let forward = {
                        let world = sim.w();
                        let nonce = world.next_nonce(signer(by)).max(world.executed(by));
                        Arc::new(forward(by, nonce, world.now / 1000 + seconds))
                    };
                    intake.accept(AcceptRequest::Gasless(&forward), "client", None, deadline).await
                }
            };
            let mut world = sim.w();
            match accepted {
                Ok(receipt) => {
                    let Some(index) = world.index_of(receipt.id) else {
                        return world.fail("lost: a transaction was accepted with 202 and is not stored".to_owned());
                    };
                    note!(world, "client: 202 for t{index}");
                    world.truth[index].promised = Some(true);
                }
                Err(failure) => note!(world, "client: {failure}"),
            }
        });
    }

    fn receive_webhook(&mut self, body: &str) {
        let parsed = serde_json::from_str(body).unwrap();
        let Some(Webhook::Transaction(report)) = wire::read_webhook(&parsed) else { return };
        let guarded = Arc::clone(&self.api.guarded);
        let believed = self.sim.w().mutation == Mutation::ReroutesOnWebhook;
        self.spawn(Owner::Api, Job::Webhook, async move {
            if believed
                && let Ok(Some(row)) = guarded.store.find_bound(&report.tx_id).await
                && row.failed_unsigned(&report)
            {
                // Neither the relayer nor the chain is asked.
                return drop(guarded.apply(row.id, &report, Origin::Chain).await);
            }
            drop(receive_report(&guarded, &report).await);
        });
    }

    /// A client reads a status.
    fn read(&mut self) {
        if self.tasks.iter().any(|task| task.job == Job::Read) {
            return;
        }
        let (index, id, replays) = {
            let mut world = self.sim.w();
            let count = world.rows.len() as u64;
            let index = world.rng.below(count) as usize;
            (index, world.rows[index].id, world.rows[index].replays)
        };
        let (lookup, sim) = (Arc::clone(&self.api.lookup), self.sim.clone());
        self.spawn(Owner::Api, Job::Read, async move {
            if let Ok(Found::Known(shown)) = lookup.find(id).await {
                let status = shown["status"].as_str().and_then(Status::parse).unwrap();
                sim.w().check_read(index, replays, status);
            }
        });
    }

    /// To the next time at which something can happen.
    fn pass_time(&mut self) {
        let restarts = {
            let mut world = self.sim.w();
            let now = world.now;
            let mut next = i64::MAX;
            let mut consider = |at: i64| {
                if at > now {
                    next = next.min(at);
                }
            };
            world.next_timer().into_iter().chain(world.next_outside()).for_each(&mut consider);
            self.posts.iter().for_each(|(at, _)| consider(*at));
            world.forget_at.into_iter().for_each(&mut consider);
            for message in world.queue.iter().filter(|message| !world.is_kept(message)) {
                consider(message.visible_at);
            }
            let claimed = |row: &Transaction| row.claim.as_ref().is_some_and(|claim| claim.unknown.is_none());
            let heartbeats = world.rows.iter().any(claimed);
            for (index, process) in world.processes.iter().enumerate() {
                consider(if process.alive { process.frozen_until } else { process.restart_at });
                if !process.alive || (index > 0 && world.calm) {
                    continue;
                }
                for kind in usize::from(!heartbeats)..SWEEPS.len() {
                    consider(process.sweep_after[kind]);
                }
                if !world.queue.is_empty() {
                    consider(process.health_after);
                }
            }
            for row in &world.rows {
                if let Some(at) = row.check_at {
                    consider(at.0);
                }
            }
            world.now = if next == i64::MAX { now + 1000 } else { next };
            let now = world.now;
            let dead = |index: &usize| !world.processes[*index].alive && world.processes[*index].restart_at <= now;
            (0..world.processes.len()).filter(dead).collect::<Vec<_>>()
        };
        for index in restarts {
            self.restart(index);
        }
    }

    fn restart(&mut self, index: usize) {
        let id = {
            let mut world = self.sim.w();
            let run = world.new_id();
            let process = &mut world.processes[index];
            process.id = ConsumerId(format!("c{run}"));
            (process.run, process.alive, process.frozen_until) = (run, true, 0);
            (process.starved, process.handling, process.sweeping) = (false, 0, [false; 5]);
            (process.sweep_after, process.checking_health, process.health_after) = ([0; 5], false, 0);
            note!(world, "c{run}: started");
            world.processes[index].id.clone()
        };
        self.consumers[index] = ConsumerProcess::start(&self.sim, &id);
    }

    // ---- the calm ----

    fn calm_down(&mut self) {
        let dead = {
            let mut world = self.sim.w();
            note!(world, "no more faults");
            let now = world.now;
            world.calm = true;
            (world.store_away, world.queue_away, world.chain_away) = (false, false, false);
            world.learned_at = now;
            let stays_full = world.shape == Mutation::UsedIsSettled;
            if let Some(chain) = &mut world.evm {
                chain.away = [false; 2];
                chain.full_until = if stays_full { chain.full_until } else { now };
            }
            for node in &mut world.nodes {
                node.calm_down(now);
            }
            for process in &mut world.processes {
                (process.frozen_until, process.starved) = (0, false);
            }
            (0..world.processes.len()).filter(|index| !world.processes[*index].alive).collect::<Vec<_>>()
        };
        for index in dead {
            self.restart(index);
        }
    }

    /// Nothing is under way, and every row is final, or of unknown outcome and unchanged for long.
    fn is_at_rest(&self) -> bool {
        let mut world = self.sim.w();
        let unchanged = world.now - world.learned_at;
        if unchanged > LOST_AFTER {
            world.fail("lost: a row is not final, and nothing changes".to_owned());
            return true;
        }
        if self.tasks.iter().any(|task| task.job != Job::Health) || !self.posts.is_empty() || !world.queue.is_empty() {
            return false;
        }
        if world.next_outside().is_some() || due_sweeps(&world, world.now)[4] {
            return false;
        }
        (0..world.rows.len()).all(|index| {
            let row = &world.rows[index];
            let waits = || row.outcome_unknown() || world.waits_for_job(index);
            row.status.is_final() || unchanged > SETTLED_AFTER && waits()
        })
    }
}

fn frozen_until(world: &World, owner: Owner) -> i64 {
    match owner {
        Owner::Process(index) => world.processes[index].frozen_until,
        Owner::Api => 0,
    }
}

/// Which sweeps would find something.
fn due_sweeps(world: &World, now: i64) -> [bool; 5] {
    let at = Timestamp(now);
    let mut due = [true, false, false, false, false];
    for row in &world.rows {
        if row.check_at.is_some_and(|check_at| check_at <= at) {
            due[1] |= is_due(row, Due::Claimed, at) && world.mutation != Mutation::NoClaimSweep;
            due[2] |= is_due(row, Due::Bound, at) && world.mutation != Mutation::NoSubmittedSweep;
            due[3] |= is_due(row, Due::Waiting, at) && world.mutation != Mutation::NoWaitingSweep;
        }
    }
    due[4] = world
        .dead
        .iter()
        .any(|dead| world.row_of(&dead.body).is_some_and(|index| world.rows[index].status != Status::Failed));
    due
}
