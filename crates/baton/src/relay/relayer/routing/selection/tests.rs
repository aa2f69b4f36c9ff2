//! Selection, breakers, jams, rates and reports, each with time as a value.

use super::*;

fn settings() -> RoutingSettings {
    RoutingSettings {
        in_flight_max: 1000,
        rate_per_second: None,
        balance_min: U256::from(1),
        breaker_failures: 3,
        breaker_open: Duration::from_secs(5),
        breaker_open_max: Duration::from_secs(60),
        jam_after: Duration::from_secs(120),
        report_lifetime: Duration::from_secs(30),
    }
}

fn router(count: usize, settings: RoutingSettings) -> (Router, Instant) {
    let now = Instant::now();
    let urls = (0..count).map(|index| RelayerUrl(format!("http://r{index}"))).collect();
    (Router::new(urls, settings, now), now)
}

fn report(pending: u64) -> HealthReport {
    let balance = Some(U256::from(1000));
    HealthReport { state: ListedState::Active, pending: Some(pending), balance, last_confirmed: None }
}

fn all_up(router: &mut Router, pending: &[u64], now: Instant) {
    for (index, pending) in pending.iter().enumerate() {
        router.reported(index, router.asking(index), &report(*pending), now);
    }
}

fn counts(router: &mut Router, sends: usize, now: Instant) -> Vec<usize> {
    let mut counts = vec![0; router.relayers.len()];
    for _ in 0..sends {
        let index = router.select(&[], now).unwrap().index;
        router.answered(index, Sent::Taken, now);
        counts[index] += 1;
    }
    counts
}

#[test]
fn equal_relayers_share_equally_between_two_reports() {
    let (mut router, now) = router(3, RoutingSettings { in_flight_max: 10_000, ..settings() });
    all_up(&mut router, &[0, 0, 0], now);
    assert_eq!(counts(&mut router, 3000, now), [1000, 1000, 1000]);
}

#[test]
fn the_least_busy_is_filled_up_first() {
    let (mut router, now) = router(3, settings());
    all_up(&mut router, &[10, 5, 10], now);
    assert_eq!(counts(&mut router, 5, now), [0, 5, 0]);
    assert_eq!(counts(&mut router, 3, now), [1, 1, 1]);
}

#[test]
fn without_any_health_it_goes_round() {
    let (mut router, now) = router(3, settings());
    assert_eq!(counts(&mut router, 9, now), [3, 3, 3]);
}

#[test]
fn known_health_comes_before_unknown() {
    let (mut router, now) = router(3, settings());
    router.reported(1, 0, &report(900), now);
    assert_eq!(counts(&mut router, 5, now), [0, 5, 0]);
    router.age(now + Duration::from_secs(31));
    let now = now + Duration::from_secs(31);
    assert_eq!(counts(&mut router, 3, now), [1, 1, 1]);
}

#[test]
fn sends_during_a_report_are_not_lost_from_the_count() {
    let (mut router, now) = router(1, settings());
    let mark = router.asking(0);
    counts(&mut router, 4, now);
    router.reported(0, mark, &report(2), now);
    assert_eq!(router.view(now)[0].load, 6);
}

#[test]
fn paused_disabled_and_poor_relayers_get_nothing() {
    let (mut router, now) = router(4, settings());
    all_up(&mut router, &[500, 0, 0, 0], now);
    router.reported(1, 0, &HealthReport { state: ListedState::Paused, ..report(0) }, now);
    router.reported(2, 0, &HealthReport { state: ListedState::Disabled, ..report(0) }, now);
    router.reported(3, 0, &HealthReport { balance: Some(U256::ZERO), ..report(0) }, now);
    assert_eq!(counts(&mut router, 10, now), [10, 0, 0, 0]);
    router.reported(0, 0, &HealthReport { state: ListedState::Paused, ..report(0) }, now);
    let Err(NoChoice::Unavailable(reasons)) = router.select(&[], now) else { panic!() };
    assert_eq!(reasons.len(), 4);
    assert!(router.availability(now).is_err());
    all_up(&mut router, &[0, 0, 0, 0], now);
    assert_eq!(counts(&mut router, 4, now), [1, 1, 1, 1]);
}

#[test]
fn an_answer_that_it_is_paused_counts_at_once() {
    let (mut router, now) = router(2, settings());
    all_up(&mut router, &[0, 5], now);
    let index = router.select(&[], now).unwrap().index;
    router.answered(index, Sent::Closed, now);
    assert_eq!(counts(&mut router, 4, now), [0, 4]);
}

#[test]
fn what_was_tried_is_not_tried_again() {
    let (mut router, now) = router(2, settings());
    all_up(&mut router, &[0, 0], now);
    let first = RelayerUrl("http://r0".into());
    assert_eq!(router.select(std::slice::from_ref(&first), now).unwrap().index, 1);
    let both = [first, RelayerUrl("http://r1".into())];
    assert!(matches!(router.select(&both, now), Err(NoChoice::Unavailable(_))));
}

#[test]
fn the_breaker_opens_probes_and_closes() {
    let (mut router, now) = router(1, settings());
    all_up(&mut router, &[0], now);
    for _ in 0..3 {
        router.select(&[], now).unwrap();
        router.answered(0, Sent::Unknown, now);
    }
    assert_eq!(router.view(now)[0].breaker, "open");
    assert!(matches!(router.select(&[], now), Err(NoChoice::Unavailable(_))));
    let later = now + Duration::from_secs(5);
    router.select(&[], later).unwrap();
    assert!(router.select(&[], later).is_err(), "one probe at a time");
    router.answered(0, Sent::Failed, later);
    assert!(router.select(&[], later + Duration::from_secs(9)).is_err(), "twice as long after a failed probe");
    let probe = later + Duration::from_secs(10);
    router.select(&[], probe).unwrap();
    router.answered(0, Sent::Taken, probe);
    assert_eq!(router.view(probe)[0].breaker, "closed");
}

#[test]
fn a_success_in_between_keeps_the_breaker_closed() {
    let (mut router, now) = router(1, settings());
    for _ in 0..10 {
        for sent in [Sent::Failed, Sent::Failed, Sent::Taken] {
            router.select(&[], now).unwrap();
            router.answered(0, sent, now);
        }
    }
    assert_eq!(router.view(now)[0].breaker, "closed");
}

#[test]
fn a_full_relayer_is_waited_for() {
    let (mut router, now) = router(1, RoutingSettings { in_flight_max: 2, ..settings() });
    all_up(&mut router, &[0], now);
    counts(&mut router, 2, now);
    assert_eq!(router.select(&[], now), Err(NoChoice::Wait(BRIEF_WAIT)));
    assert!(router.availability(now).is_ok());
    all_up(&mut router, &[0], now);
    assert!(router.select(&[], now).is_ok());
}

#[test]
fn a_relayer_whose_status_is_slow_does_not_fill_up_for_good() {
    let (mut router, now) = router(1, RoutingSettings { in_flight_max: 2, ..settings() });
    for _ in 0..10 {
        counts(&mut router, 2, now);
        assert!(router.select(&[], now).is_err());
        router.not_reported(0, true);
    }
    let uncounted = HealthReport { pending: None, ..report(0) };
    for _ in 0..10 {
        router.reported(0, router.asking(0), &uncounted, now);
        counts(&mut router, 2, now);
    }
}

#[test]
fn no_more_than_the_rate_goes_out() {
    let (mut router, now) = router(1, RoutingSettings { rate_per_second: Some(100), ..settings() });
    all_up(&mut router, &[0], now);
    assert_eq!(counts(&mut router, 200, now), [200]);
    assert!(matches!(router.select(&[], now), Err(NoChoice::Wait(_))));
    assert_eq!(counts(&mut router, 50, now + Duration::from_millis(505)), [50]);
    assert!(router.select(&[], now + Duration::from_millis(505)).is_err());
}

#[test]
fn a_429_pauses_one_relayer_and_is_no_failure() {
    let (mut router, now) = router(2, settings());
    all_up(&mut router, &[0, 1], now);
    assert_eq!(router.select(&[], now).unwrap().index, 0);
    router.answered(0, Sent::Busy(Duration::from_secs(1)), now);
    assert_eq!(counts(&mut router, 2, now), [0, 2]);
    assert_eq!(router.view(now)[0].breaker, "closed");
    assert_eq!(router.select(&[], now + Duration::from_secs(1)).unwrap().index, 0);
}

#[test]
fn a_jammed_relayer_is_ejected_and_readmitted() {
    let (mut router, start) = router(2, settings());
    let at = |seconds| start + Duration::from_secs(seconds);
    for (seconds, pending) in [(0, 5), (60, 20), (130, 40)] {
        router.reported(0, router.asking(0), &report(pending), at(seconds));
        router.reported(1, router.asking(1), &report(900), at(seconds));
    }
    assert_eq!(router.view(at(130))[0].skipped, Some(Reason::Jammed));
    assert_eq!(counts(&mut router, 3, at(130)), [0, 3]);
    router.reported(0, router.asking(0), &report(40), at(140));
    assert_eq!(router.view(at(140))[0].skipped, Some(Reason::Jammed), "still nothing confirmed");
    router.reported(0, router.asking(0), &report(39), at(150));
    assert_eq!(router.view(at(150))[0].skipped, None);
}

#[test]
fn a_busy_relayer_that_confirms_is_not_jammed() {
    let (mut router, start) = router(1, settings());
    for minute in 0..10u64 {
        let mut news = report(10 + minute);
        news.last_confirmed = Some(format!("t{minute}"));
        router.reported(0, router.asking(0), &news, start + Duration::from_secs(60 * minute));
    }
    assert_eq!(router.view(start + Duration::from_secs(601))[0].skipped, None);
}
