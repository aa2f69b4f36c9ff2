use super::*;

const HOUR: i64 = 3_600_000;
const MIDNIGHT: i64 = 1_700_000_000_000;

/// A database server whose clock can be set, and the machines around it, whose wall clocks are right.
struct World {
    /// True time since midnight.
    passed_ms: i64,
    /// How far the server's clock is off.
    off_ms: i64,
    record: Option<ClockRecord>,
}

impl World {
    fn new() -> Self {
        Self { passed_ms: 0, off_ms: 0, record: None }
    }

    fn since_boot(&self) -> Duration {
        Duration::from_millis(7_000_000 + self.passed_ms as u64)
    }

    fn reading(&self) -> ServerReading {
        let right = MIDNIGHT + self.passed_ms;
        ServerReading {
            server: Timestamp(right + self.off_ms),
            record: self.record,
            since_boot: self.since_boot(),
            wall: Timestamp(right),
        }
    }

    fn start(&mut self) -> Arc<ServerClock> {
        let plan = ServerClock::first_plan(&self.reading());
        self.write(&plan);
        ServerClock::new(&plan)
    }

    fn sync(&mut self, clock: &ServerClock) -> ClockEvent {
        let plan = clock.plan(&self.reading());
        self.write(&plan);
        clock.follow(&plan);
        plan.event
    }

    fn write(&mut self, plan: &Plan) {
        if plan.write {
            self.record = Some(plan.record);
        }
    }

    /// Time passes while these processes read the server every second.
    fn pass(&mut self, seconds: i64, clocks: &[&Arc<ServerClock>]) {
        for _ in 0..seconds {
            self.passed_ms += 1000;
            for clock in clocks {
                assert_eq!(self.sync(clock), ClockEvent::Steady);
            }
        }
    }

    fn now(&self, clock: &ServerClock) -> i64 {
        clock.at(self.since_boot()).0 - MIDNIGHT
    }
}

#[test]
fn it_follows_a_server_whose_clock_is_left_alone() {
    let mut world = World::new();
    let clock = world.start();
    let since = clock.steady_since();
    world.pass(100, &[&clock]);
    assert_eq!(world.now(&clock), 100_000);
    assert_eq!(clock.steady_since(), since);
}

#[test]
fn setting_the_server_back_neither_moves_nor_stops_the_stores_clock() {
    let mut world = World::new();
    let (first, second) = (world.start(), world.start());
    world.pass(10, &[&first, &second]);
    let since = first.steady_since();
    world.off_ms = -HOUR;
    world.passed_ms += 1000;
    assert!(matches!(world.sync(&first), ClockEvent::SetBack(_)));
    // The second finds a record that is right again.
    assert_eq!(world.sync(&second), ClockEvent::Steady);
    world.pass(20, &[&first, &second]);
    for clock in [&first, &second] {
        assert_eq!(world.now(clock), 31_000);
        assert_eq!(clock.steady_since(), since, "a wait goes on");
        assert_eq!(clock.slip(Timestamp(0)), Duration::ZERO);
    }
    // So does one that starts now.
    let third = world.start();
    assert_eq!((world.now(&third), third.steady_since()), (31_000, since));
}

#[test]
fn a_jump_ahead_makes_every_earlier_time_unsteady_for_all() {
    let mut world = World::new();
    let (first, second) = (world.start(), world.start());
    world.pass(10, &[&first, &second]);
    let claimed_at = Timestamp(MIDNIGHT + world.now(&first));
    world.off_ms = HOUR;
    world.passed_ms += 500;
    assert_eq!(world.now(&second), 10_500, "until it is known, each goes by its own steady clock");
    assert!(matches!(world.sync(&first), ClockEvent::JumpedAhead(_)));
    assert!(matches!(world.sync(&second), ClockEvent::JumpedAhead(_)));
    let third = world.start();
    for clock in [&first, &second, &third] {
        assert_eq!(world.now(clock), HOUR + 10_500);
        assert_eq!(clock.steady_since(), Timestamp(MIDNIGHT + HOUR + 10_500), "they agree");
        assert_eq!(clock.slip(claimed_at), Duration::from_millis(HOUR as u64));
        assert_eq!(clock.slip(clock.steady_since()), Duration::ZERO);
    }
}

#[test]
fn a_jump_that_is_taken_back_leaves_the_stores_clock_ahead() {
    let mut world = World::new();
    let clock = world.start();
    world.off_ms = HOUR;
    world.passed_ms += 1000;
    assert!(matches!(world.sync(&clock), ClockEvent::JumpedAhead(_)));
    world.off_ms = 0;
    world.passed_ms += 1000;
    assert!(matches!(world.sync(&clock), ClockEvent::SetBack(_)));
    world.pass(5, &[&clock]);
    assert_eq!(world.now(&clock), HOUR + 7000);
}

#[test]
fn a_process_that_starts_soon_after_the_last_one_ended_takes_its_clock_over() {
    let mut world = World::new();
    let clock = world.start();
    world.pass(10, &[&clock]);
    let since = clock.steady_since();
    world.passed_ms += 2000;
    let next = world.start();
    assert_eq!((world.now(&next), next.steady_since()), (12_000, since));
}

#[test]
fn after_a_time_without_processes_earlier_times_are_unsteady() {
    let mut world = World::new();
    let clock = world.start();
    world.pass(10, &[&clock]);
    world.passed_ms += 60_000;
    // It was a minute, or the clock was set: no process can tell.
    let next = world.start();
    assert_eq!(next.steady_since(), Timestamp(MIDNIGHT + 70_000));
    assert_eq!(next.slip(Timestamp(MIDNIGHT)), Duration::ZERO, "the machine's wall clock agrees");
}

#[test]
fn a_server_set_back_while_no_process_runs_does_not_move_the_stores_clock_back() {
    let mut world = World::new();
    world.off_ms = HOUR;
    let clock = world.start();
    world.pass(10, &[&clock]);
    let claimed_at = Timestamp(MIDNIGHT + world.now(&clock));
    world.off_ms = 0;
    world.passed_ms += 600_000;
    let next = world.start();
    let now = Timestamp(MIDNIGHT + world.now(&next));
    assert!(now > claimed_at && next.steady_since() > claimed_at);
    // What the store's clock shows too much now, and what the claim's time may be off beyond that, cover the hour.
    let ahead = now.since(Timestamp(MIDNIGHT + world.passed_ms));
    assert!(ahead + next.slip(claimed_at) >= Duration::from_millis(HOUR as u64));
}

#[test]
fn a_server_set_ahead_while_no_process_runs_is_seen_by_the_machines_own_clock() {
    let mut world = World::new();
    let clock = world.start();
    world.pass(10, &[&clock]);
    let claimed_at = Timestamp(MIDNIGHT + world.now(&clock));
    world.off_ms = HOUR;
    world.passed_ms += 5000;
    let next = world.start();
    assert!(next.steady_since() > claimed_at);
    assert!(next.slip(claimed_at) >= Duration::from_millis(HOUR as u64));
}

#[test]
fn small_corrections_are_followed_but_time_never_goes_back() {
    let mut world = World::new();
    let clock = world.start();
    world.pass(10, &[&clock]);
    let before = world.now(&clock);
    world.off_ms = -400;
    assert_eq!(world.sync(&clock), ClockEvent::Steady);
    assert_eq!(world.now(&clock), before);
    world.passed_ms += 1000;
    assert_eq!(world.sync(&clock), ClockEvent::Steady);
    assert_eq!(world.now(&clock), before + 600);
}
