//! Who goes on next: one step of one task at a time, chosen at random among all that could; faults in between; then a
//! calm in which everything must come to rest.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Waker};

use baton::relay::state::transaction::{ConsumerId, FailedBy, Status};
use baton::relay::store::Due;

use super::lane::{Lane, SWEEPS, is_due};
use super::world::{
    CONTENTS, Counters, Fault, Fixtures, Job, Mutation, Outcome, Owner, Receipt, Setup, Sim, Spawn, Work, World, note,
};

/// Steps after which a world that has not come to rest never will.
const CALM_STEPS_MAX: u64 = 6000;
/// Messages that one process handles at once.
const CONCURRENCY: u32 = 3;

/// What became of a world.
pub struct Ended {
    pub violation: Option<String>,
    pub steps: u64,
    pub counters: Counters,
    pub trace: Vec<String>,
}

struct Task {
    id: u32,
    owner: Owner,
    job: Job,
    wake: i64,
    work: Work,
}

struct Scheduler {
    sim: Sim,
    tasks: Vec<Task>,
    /// What clients will still post.
    posts: Vec<usize>,
    choices: Vec<Choice>,
    steps: u64,
}

#[derive(Clone, Copy)]
enum Choice {
    Receive(usize),
    Sweep(usize, usize),
    Post,
}

/// Runs one world to its end.
pub fn run(setup: &Setup, fixtures: &Rc<Fixtures>) -> Ended {
    let mut world = World::new(setup, fixtures);
    // Most worlds are small: nearly every mistake needs few transactions, and small worlds are quick.
    let small = !world.rng.one_in(3);
    let transactions = if small { 1 + world.rng.below(3) } else { 3 + world.rng.below(4) };
    let transactions = transactions.min(setup.transactions_max);
    // Few contents among many transactions, so that equal ones meet.
    let (first, contents) = (world.rng.below(CONTENTS as u64), 1 + world.rng.below(CONTENTS as u64));
    let content = |world: &mut World| ((first + world.rng.below(contents)) % CONTENTS as u64) as usize;
    let posts = (0..transactions).map(|_| content(&mut world)).collect();
    let faulty_steps = if small { 15 + world.rng.below(80) } else { 60 + world.rng.below(150) };
    let faulty_steps = faulty_steps.min(setup.faulty_steps_max);
    if world.trace.is_some() {
        let line = format!("faults {:#x}, {:?}, consumers {}", world.faults, world.mode, world.processes.len());
        world.write_down(line);
    }
    let sim = Sim(Rc::new(RefCell::new(world)));
    let mut scheduler = Scheduler { sim, tasks: Vec::new(), posts, choices: Vec::new(), steps: 0 };
    while scheduler.steps < faulty_steps && scheduler.sim.w().violation.is_none() {
        let faulty = scheduler.sim.w().rng.one_in(16);
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
    let mut world = scheduler.sim.w();
    if world.violation.is_none() {
        world.check_end();
    }
    world.counters.worlds = 1;
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
    /// One step of one task, or something new; if nothing can go on, on to when something can.
    fn step(&mut self) {
        self.steps += 1;
        let (new_first, place) = {
            let mut world = self.sim.w();
            if self.steps.is_multiple_of(8) && !world.rows.is_empty() {
                let index = pick_place(&mut world, |world| world.rows.len());
                world.read(index);
            }
            let tasks = self.tasks.len();
            (world.rng.one_in(5), pick_place(&mut world, |_| tasks))
        };
        let done = new_first && self.start_new() || self.go_on(place) || !new_first && self.start_new();
        if done {
            self.take_spawned();
        } else {
            self.pass_time();
        }
    }

    /// The first task from that place on that is not waiting for anything.
    fn go_on(&mut self, place: usize) -> bool {
        let position = {
            let world = self.sim.w();
            let now = world.now;
            let count = self.tasks.len();
            let mut position = place;
            loop {
                if position >= place + count {
                    return false;
                }
                let task = &self.tasks[if position < count { position } else { position - count }];
                if task.wake <= now && frozen_until(&world, task.owner) <= now {
                    break;
                }
                position += 1;
            }
            position % count
        };
        self.poll(position);
        true
    }

    /// A message is received, a sweep begins, or a client posts.
    fn start_new(&mut self) -> bool {
        self.choices.clear();
        let choice = {
            let mut world = self.sim.w();
            let now = world.now;
            let message = world.next_message_at().is_some_and(|at| at <= now);
            let due = due_sweeps(&world, now);
            if message || due != [false; 4] {
                for (index, process) in world.processes.iter().enumerate() {
                    if !process.alive || process.frozen_until > now {
                        continue;
                    }
                    if message && process.handling < CONCURRENCY {
                        self.choices.push(Choice::Receive(index));
                    }
                    for (kind, due) in due.iter().enumerate() {
                        // In the calm one reconciler is enough.
                        if *due && !process.sweeping[kind] && (index == 0 || !world.calm) {
                            self.choices.push(Choice::Sweep(index, kind));
                        }
                    }
                }
            }
            if !self.posts.is_empty() {
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
            Choice::Post => {
                let content = self.posts.pop().unwrap_or(0);
                self.sim.w().accept(content);
            }
        }
        true
    }

    /// To the next moment in which something can happen.
    fn pass_time(&mut self) {
        let mut world = self.sim.w();
        let now = world.now;
        // Sweeps may be late; in the calm, much later, to save steps.
        let late = if world.calm { 8000 } else { world.rng.pick(&[0, 0, 500, 6000]) };
        let mut next = i64::MAX;
        let mut consider = |at: i64| {
            if at > now {
                next = next.min(at);
            }
        };
        for task in &self.tasks {
            consider(task.wake.max(frozen_until(&world, task.owner)));
        }
        for message in &world.queue {
            consider(message.visible_at);
        }
        for process in &world.processes {
            consider(if process.alive { process.frozen_until } else { process.restart_at });
        }
        for row in &world.rows {
            if let Some(at) = row.check_at {
                consider(at.0.max(now) + late);
            }
        }
        if next == i64::MAX {
            next = now + 1000;
        }
        world.now = next;
        for index in 0..world.processes.len() {
            if !world.processes[index].alive && world.processes[index].restart_at <= next {
                restart(&mut world, index);
            }
        }
    }

    fn poll(&mut self, position: usize) {
        let task = &mut self.tasks[position];
        {
            let mut world = self.sim.w();
            world.wake = i64::MAX;
            world.task = task.id;
        }
        let done = task.work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        let mut world = self.sim.w();
        self.tasks[position].wake = world.wake;
        while let Some(id) = world.woken.pop() {
            let now = world.now;
            if let Some(task) = self.tasks.iter_mut().find(|task| task.id == id) {
                task.wake = task.wake.min(now);
            }
        }
        drop(world);
        if done {
            let task = self.tasks.swap_remove(position);
            self.finished(task.owner, task.job);
        }
    }

    fn finished(&self, owner: Owner, job: Job) {
        let Owner::Process(index) = owner else { return };
        let process = &mut self.sim.w().processes[index];
        match job {
            Job::Handle(_) => process.handling -= 1,
            Job::Sweep(kind) => process.sweeping[kind] = false,
            Job::Webhook | Job::Other => {}
        }
    }

    fn take_spawned(&mut self) {
        let mut world = self.sim.w();
        while let Some(Spawn { owner, job, work }) = world.spawns.pop() {
            let id = world.new_id();
            let wake = world.now;
            self.tasks.push(Task { id, owner, job, wake, work });
        }
    }

    fn receive(&mut self, index: usize) {
        let mut world = self.sim.w();
        let run = world.processes[index].run;
        let Some(receipt) = world.receive(run) else { return };
        let me = world.processes[index].id.clone();
        note!(world, "{me}: receives m{} about t{} (time {})", receipt.message, receipt.row, receipt.receives);
        world.processes[index].handling += 1;
        let lane = Lane { sim: self.sim.clone(), me };
        world.spawn(Owner::Process(index), Job::Handle(receipt), lane.handle(receipt));
    }

    fn sweep(&mut self, index: usize, kind: usize) {
        let mut world = self.sim.w();
        world.processes[index].sweeping[kind] = true;
        let me = world.processes[index].id.clone();
        note!(world, "{me}: sweeps {}", SWEEPS[kind]);
        let lane = Lane { sim: self.sim.clone(), me };
        world.spawn(Owner::Process(index), Job::Sweep(kind), lane.sweep(kind));
    }

    // ---- faults ----

    fn fault(&mut self) {
        let (fault, target, relayer) = {
            let mut world = self.sim.w();
            let mut kind = world.rng.below(u64::from(Fault::COUNT)) as u32;
            for _ in 0..4 {
                if world.faults & (1 << kind) == 0 {
                    kind = world.rng.below(u64::from(Fault::COUNT)) as u32;
                }
            }
            if world.faults & (1 << kind) == 0 {
                return;
            }
            let target = pick_place(&mut world, |world| world.processes.len());
            (kind, target, world.rng.below(2) as usize)
        };
        const CRASH: u32 = Fault::Crash as u32;
        const FREEZE: u32 = Fault::Freeze as u32;
        const STARVE: u32 = Fault::Starve as u32;
        const DUPLICATE: u32 = Fault::Duplicate as u32;
        const LOSE_MESSAGE: u32 = Fault::LoseMessage as u32;
        const PAUSE: u32 = Fault::Pause as u32;
        const DOWN: u32 = Fault::Down as u32;
        const FORGET: u32 = Fault::Forget as u32;
        const WEBHOOK: u32 = Fault::Webhook as u32;
        const STORE: u32 = Fault::Store as u32;
        const PANIC: u32 = Fault::Panic as u32;
        const OPERATOR: u32 = Fault::Operator as u32;
        const OUTAGE: u32 = Fault::Outage as u32;
        const STALL: u32 = Fault::Stall as u32;
        match fault {
            STALL => {
                let mut world = self.sim.w();
                let until = world.now + world.rng.pick(&[900, 4000, 12_000, 36_000, 41_000, 70_000]);
                let until = until.max(world.relayers[relayer].stalled_until);
                note!(world, "r{relayer}: stands still until {until}");
                world.relayers[relayer].stalled_until = until;
            }
            CRASH => self.crash(target),
            FREEZE => {
                let mut world = self.sim.w();
                let span = world.rng.pick(&[900, 4900, 5100, 12_000, 36_000, 41_000, 50_000, 130_000]);
                freeze(&mut world, target, span);
            }
            STARVE => {
                let mut world = self.sim.w();
                let now = world.now;
                let starved = &mut world.processes[target].starved_since;
                *starved = if starved.is_some() { None } else { Some(now - 11_000) };
            }
            DUPLICATE => {
                let mut world = self.sim.w();
                if !world.rows.is_empty() {
                    let index = pick_place(&mut world, |world| world.rows.len());
                    note!(world, "queue: one more message about t{index}");
                    world.publish(index, 0);
                }
            }
            LOSE_MESSAGE => {
                let mut world = self.sim.w();
                if !world.queue.is_empty() {
                    let position = pick_place(&mut world, |world| world.queue.len());
                    let lost = world.queue.swap_remove(position);
                    note!(world, "queue: loses m{} about t{}", lost.id, lost.row);
                }
            }
            PAUSE => {
                let relayer = &mut self.sim.w().relayers[relayer];
                relayer.paused = !relayer.paused;
            }
            DOWN => {
                let relayer = &mut self.sim.w().relayers[relayer];
                relayer.down = !relayer.down;
            }
            FORGET => self.sim.w().forget_all(relayer),
            WEBHOOK => {
                if let Some(position) = self.tasks.iter().position(|task| matches!(task.job, Job::Webhook)) {
                    note!(self.sim.w(), "api: a webhook is cut short");
                    drop(self.tasks.swap_remove(position));
                }
            }
            STORE => {
                let mut world = self.sim.w();
                world.store_away = !world.store_away;
            }
            PANIC => self.panic(),
            OPERATOR => self.operate(),
            OUTAGE => {
                let mut world = self.sim.w();
                let span = if world.rng.one_in(3) { 4_000_000 } else { 700_000 };
                for index in 0..world.processes.len() {
                    freeze(&mut world, index, span);
                }
            }
            _ => {}
        }
        self.take_spawned();
    }

    /// kill -9.
    fn crash(&mut self, index: usize) {
        let mut world = self.sim.w();
        if !world.processes[index].alive {
            return;
        }
        let now = world.now;
        let frozen = world.processes[index].frozen_until > now;
        let process = &mut world.processes[index];
        (process.alive, process.frozen_until) = (false, 0);
        let id = process.id.clone();
        let seen = if frozen { process.frozen_since } else { process.starved_since.unwrap_or(now) };
        note!(world, "{id}: killed");
        world.ended.push((id, seen));
        let pause = world.rng.pick(&[1, 1000, 20_000]);
        world.processes[index].restart_at = now + pause;
        drop(world);
        self.tasks.retain(|task| task.owner != Owner::Process(index));
    }

    /// A handler panics: the pipeline settles its message.
    fn panic(&mut self) {
        let handling = |task: &&mut Task| matches!(task.job, Job::Handle(_));
        let Some(id) = self.tasks.iter_mut().find(handling).map(|task| task.id) else { return };
        let Some(position) = self.tasks.iter().position(|task| task.id == id) else { return };
        let task = self.tasks.swap_remove(position);
        let Job::Handle(receipt) = task.job else { return };
        let Receipt { row, receives, .. } = receipt;
        let mut world = self.sim.w();
        note!(world, "a handler of t{row} panics");
        world.truth[row].panics += 1;
        let outcome = if receives < 3 { Outcome::Retry(2000) } else { Outcome::Dead };
        world.settle(receipt, &outcome);
        drop(world);
        self.finished(task.owner, task.job);
    }

    fn operate(&mut self) {
        let mut world = self.sim.w();
        let lane = Lane { sim: self.sim.clone(), me: ConsumerId(String::new()) };
        let replayable = world.dead.iter().find(|letter| {
            let row = &world.rows[letter.row];
            row.status == Status::Failed && row.failed_by == Some(FailedBy::Consumer)
        });
        if let Some((id, row)) = replayable.map(|letter| (letter.id, letter.row)) {
            note!(world, "operator: replays m{id} about t{row}");
            world.spawn(Owner::Api, Job::Other, lane.operator_replays(id, row));
        } else if let Some(index) = (0..world.rows.len()).find(|index| world.rows[*index].outcome_unknown()) {
            world.spawn(Owner::Api, Job::Other, lane.operator_resolves(index));
        }
    }

    // ---- the calm ----

    fn calm_down(&mut self) {
        let mut world = self.sim.w();
        note!(world, "no more faults");
        world.calm = true;
        world.store_away = false;
        for relayer in &mut world.relayers {
            (relayer.paused, relayer.down) = (false, false);
        }
        let now = world.now;
        for index in 0..world.processes.len() {
            if world.processes[index].alive {
                let process = &mut world.processes[index];
                (process.frozen_until, process.starved_since) = (now, None);
            } else {
                restart(&mut world, index);
            }
        }
        for truth in &mut world.truth {
            truth.stuck = None;
        }
    }

    /// Nothing is under way, and every row is final, or was looked at since anything was learned.
    fn is_at_rest(&self) -> bool {
        if !self.tasks.is_empty() || !self.posts.is_empty() {
            return false;
        }
        let world = self.sim.w();
        if !world.queue.is_empty() || due_sweeps(&world, world.now)[3] {
            return false;
        }
        let rests = |(index, truth): (usize, &super::world::Truth)| {
            let row = &world.rows[index];
            row.status.is_final() || truth.stuck == Some(world.changes) && row.outcome_unknown()
        };
        world.truth.iter().enumerate().all(rests)
    }
}

fn frozen_until(world: &World, owner: Owner) -> i64 {
    match owner {
        Owner::Process(index) => world.processes[index].frozen_until,
        Owner::Api | Owner::Outside => 0,
    }
}

/// Stops a process for a while; it does not notice.
fn freeze(world: &mut World, index: usize, span: i64) {
    if !world.processes[index].alive {
        return;
    }
    note!(world, "{}: stands still for {span} ms", world.processes[index].id);
    let now = world.now;
    let process = &mut world.processes[index];
    if process.frozen_until <= now {
        process.frozen_since = now;
    }
    process.frozen_until = process.frozen_until.max(now + span);
}

fn restart(world: &mut World, index: usize) {
    let run = world.new_id();
    let process = &mut world.processes[index];
    process.id = ConsumerId(format!("c{run}"));
    (process.run, process.alive, process.frozen_until) = (run, true, 0);
    (process.starved_since, process.handling, process.sweeping) = (None, 0, [false; 4]);
    note!(world, "c{run}: started");
}

/// Which sweeps would find something.
fn due_sweeps(world: &World, now: i64) -> [bool; 4] {
    let now = baton::timestamp::Timestamp(now);
    let mut due = [false; 4];
    for row in &world.rows {
        if row.check_at.is_some_and(|at| at <= now) {
            due[0] |= is_due(row, Due::Claimed, now) && world.mutation != Mutation::NoClaimSweep;
            due[1] |= is_due(row, Due::Bound, now) && world.mutation != Mutation::NoSubmittedSweep;
            due[2] |= is_due(row, Due::Waiting, now) && world.mutation != Mutation::NoWaitingSweep;
        }
    }
    due[3] = world.dead.iter().any(|letter| world.rows[letter.row].status != Status::Failed);
    due
}

fn pick_place(world: &mut World, count: impl Fn(&World) -> usize) -> usize {
    let count = count(world) as u64;
    world.rng.below(count) as usize
}
