//! Selection, breakers, jams, rates and reports, each with time as a value.

use alloy_primitives::{Address, U256};

use super::*;
use crate::relay::relayer::routing::{ChainId, ListReport, StatusReport};
use crate::relay::relayer::wire::ListedState;
use crate::relay::store::RelayerRows;
use crate::timestamp::Timestamp;

fn settings() -> RoutingSettings {
    RoutingSettings {
        in_flight_max: Some(1000),
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

fn report(pending: u64) -> StatusReport {
    let balance = Some(U256::from(1000));
    let state = ListedState::Active;
    StatusReport { state, pending: Some(pending), balance, last_confirmed: None, nonce_next: None }
}

fn listed(state: ListedState) -> ListReport {
    ListReport { state, network: Some("testnet".into()), identity: "r".into(), account: None }
}

/// The relayer lists itself as able, and reports its status.
fn heard(router: &mut Router, index: usize, status: &StatusReport, now: Instant) {
    router.listed(index, &listed(ListedState::Active), now);
    router.reported(index, router.asking(index), status, now);
}

fn all_up(router: &mut Router, pending: &[u64], now: Instant) {
    for (index, pending) in pending.iter().enumerate() {
        heard(router, index, &report(*pending), now);
    }
}

fn rows(bound: u64, claimed: u64) -> RelayerRows {
    RelayerRows { bound, claimed, recent: bound + claimed, ..RelayerRows::default() }
}

const AT: Timestamp = Timestamp(1_000_000);

/// The store counts these bound rows for each relayer.
fn count_rows(router: &mut Router, bound: &[u64], now: Instant) {
    for (index, bound) in bound.iter().enumerate() {
        router.counted(index, router.counting(index), rows(*bound, 0), AT, now);
    }
}

fn counts(router: &mut Router, sends: usize, now: Instant) -> Vec<usize> {
    let mut counts = vec![0; router.relayers.len()];
    for _ in 0..sends {
        let index = router.select(&[], now).unwrap().index;
        router.claimed(index);
        router.answered(index, Sent::Taken, now);
        counts[index] += 1;
    }
    counts
}

#[test]
fn equal_relayers_share_equally_between_two_reports() {
    let (mut router, now) = router(3, RoutingSettings { in_flight_max: Some(10_000), ..settings() });
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
    heard(&mut router, 1, &report(900), now);
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
    router.listed(1, &listed(ListedState::Paused), now);
    router.listed(2, &listed(ListedState::Disabled), now);
    heard(&mut router, 3, &StatusReport { balance: Some(U256::ZERO), ..report(0) }, now);
    assert_eq!(counts(&mut router, 10, now), [10, 0, 0, 0]);
    router.reported(0, 0, &StatusReport { state: ListedState::Paused, ..report(0) }, now);
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
    let (mut router, now) = router(1, RoutingSettings { in_flight_max: Some(2), ..settings() });
    all_up(&mut router, &[0], now);
    counts(&mut router, 2, now);
    assert_eq!(router.select(&[], now), Err(NoChoice::Wait(BRIEF_WAIT)));
    assert!(router.availability(now).is_ok());
    all_up(&mut router, &[0], now);
    assert!(router.select(&[], now).is_ok());
}

#[test]
fn a_relayer_whose_status_is_slow_does_not_fill_up_for_good() {
    let (mut router, now) = router(1, RoutingSettings { in_flight_max: Some(2), ..settings() });
    for _ in 0..10 {
        counts(&mut router, 2, now);
        assert!(router.select(&[], now).is_err());
        router.not_listed(0, true, "no answer in time");
    }
    let uncounted = StatusReport { pending: None, ..report(0) };
    for _ in 0..10 {
        heard(&mut router, 0, &uncounted, now);
        counts(&mut router, 2, now);
    }
}

#[test]
fn lookups_leave_most_of_the_rate_to_submissions() {
    let (mut router, now) = router(2, RoutingSettings { rate_per_second: Some(100), ..settings() });
    all_up(&mut router, &[0, 0], now);
    let asked = |router: &mut Router, now| (0..20_000).filter(|_| router.look_up(now)).count();
    assert_eq!(asked(&mut router, now), 20, "two seconds' worth at a tenth of the rate");
    assert_eq!(counts(&mut router, 360, now), [180, 180]);
    assert_eq!(asked(&mut router, now + Duration::from_secs(1)), 10);
}

#[test]
fn the_debt_of_questions_has_a_floor() {
    let (mut router, now) = router(1, RoutingSettings { rate_per_second: Some(100), ..settings() });
    for _ in 0..20_000 {
        router.asked(0, now);
    }
    assert_eq!(router.select(&[], now), Err(NoChoice::Wait(BRIEF_WAIT)));
    assert!(router.select(&[], now + Duration::from_millis(2020)).is_ok(), "the debt is paid back in two seconds");
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
        heard(&mut router, 0, &report(pending), at(seconds));
        heard(&mut router, 1, &report(900), at(seconds));
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
        heard(&mut router, 0, &news, start + Duration::from_secs(60 * minute));
    }
    assert_eq!(router.view(start + Duration::from_secs(601))[0].skipped, None);
}

#[test]
fn a_relayer_that_is_only_listed_is_known_and_one_that_lists_itself_paused_gets_nothing() {
    let (mut router, now) = router(2, settings());
    router.listed(0, &listed(ListedState::Active), now);
    assert!(router.view(now)[0].known, "its status has not answered yet");
    router.not_reported(0, true);
    assert!(router.view(now)[0].known, "its status is only slow");
    assert_eq!(counts(&mut router, 3, now), [3, 0]);
    router.listed(0, &listed(ListedState::Paused), now);
    assert_eq!(router.view(now)[0].skipped, Some(Reason::Paused));
}

#[test]
fn a_relayer_whose_status_fails_comes_after_the_others() {
    let (mut router, now) = router(2, settings());
    all_up(&mut router, &[0, 50], now);
    assert!(router.not_reported(0, false));
    assert!(!router.not_reported(0, false), "said once");
    assert_eq!(counts(&mut router, 3, now), [0, 3]);
    router.reported(0, 0, &report(0), now);
    assert_eq!(counts(&mut router, 3, now), [3, 0]);
}

#[test]
fn rows_in_the_store_are_the_load_while_the_status_does_not_answer() {
    let (mut router, now) = router(3, settings());
    count_rows(&mut router, &[184, 0, 2], now);
    assert_eq!(router.view(now)[0].load, 184);
    assert_eq!(counts(&mut router, 4, now), [0, 3, 1], "no health is known; the loads decide");
    all_up(&mut router, &[0, 0, 0], now);
    assert_eq!(router.view(now)[0].load, 184, "a relayer that counts less is not believed");
    all_up(&mut router, &[200, 0, 0], now);
    assert_eq!(router.view(now)[0].load, 200);
}

#[test]
fn a_send_is_counted_before_its_claim_is_stored_and_not_twice_after() {
    let (mut router, now) = router(1, settings());
    count_rows(&mut router, &[0], now);
    router.select(&[], now).unwrap();
    // The reading begins before the claim is stored, and does not show it.
    let mark = router.counting(0);
    router.counted(0, mark, rows(0, 0), AT, now);
    assert_eq!(router.view(now)[0].load, 1);
    router.claimed(0);
    let mark = router.counting(0);
    router.counted(0, mark, rows(0, 1), AT, now);
    assert_eq!(router.view(now)[0].load, 1, "the store shows it");
    router.answered(0, Sent::Failed, now);
    router.counted(0, router.counting(0), rows(0, 0), AT, now);
    assert_eq!(router.view(now)[0].load, 0);
}

#[test]
fn old_counts_are_dropped() {
    let (mut router, now) = router(1, settings());
    count_rows(&mut router, &[500], now);
    router.age(now + Duration::from_secs(31));
    assert_eq!(router.view(now)[0].load, 0);
}

#[test]
fn without_a_fixed_cap_it_follows_what_the_relayer_ends() {
    let (mut router, now) = router(1, RoutingSettings { in_flight_max: None, ..settings() });
    all_up(&mut router, &[0], now);
    assert_eq!(counts(&mut router, 64, now), [64]);
    assert_eq!(router.view(now)[0].skipped, Some(Reason::Full));
    router.counted(0, router.counting(0), RelayerRows { ended: 64, ..rows(0, 0) }, AT, now);
    all_up(&mut router, &[0], now);
    assert_eq!((router.view(now)[0].cap, counts(&mut router, 128, now)), (128, vec![128]));
    let behind =
        RelayerRows { oldest_unsigned: Some(AT - Duration::from_secs(31)), recent_unsigned: 17, ..rows(17, 0) };
    router.counted(0, router.counting(0), behind.clone(), AT, now);
    assert_eq!((router.view(now)[0].cap, router.view(now)[0].skipped), (16, Some(Reason::Full)));
    router.counted(0, router.counting(0), RelayerRows { recent_unsigned: 3, ..behind }, AT, now);
    assert_eq!(router.view(now)[0].skipped, None, "what it has signed, or has had for long, does not fill it");
}

#[test]
fn a_relayer_whose_signed_rows_do_not_end_is_jammed() {
    let (mut router, now) = router(2, settings());
    all_up(&mut router, &[0, 0], now);
    let stuck =
        RelayerRows { oldest_signed: Some((7, AT - Duration::from_secs(120))), nonce_max: Some(9), ..rows(3, 0) };
    router.counted(0, 0, stuck.clone(), AT, now);
    assert_eq!(router.view(now)[0].skipped, Some(Reason::Jammed));
    assert_eq!(router.view(now)[0].jam, Some(JamCause::NothingEnds { nonce: 7 }));
    assert_eq!(counts(&mut router, 3, now), [0, 3]);
    router.counted(0, 0, RelayerRows { last_ended: Some(AT), ..stuck.clone() }, AT, now);
    assert_eq!(router.view(now)[0].skipped, None);
    router.use_chain();
    router.counted(0, 0, stuck, AT, now);
    assert_eq!(router.view(now)[0].skipped, None, "with a chain, the chain decides");
}

#[test]
fn a_relayer_on_another_network_gets_nothing_and_one_whose_network_is_unchecked_waits() {
    let (mut router, now) = router(3, settings());
    all_up(&mut router, &[0, 0, 0], now);
    router.expect_chain_id(1);
    assert!(router.select(&[], now).is_err());
    assert_eq!(router.view(now)[0].skipped, Some(Reason::NetworkUnchecked));
    router.learn_chain_id(0, ChainId::Known(5));
    router.learn_chain_id(1, ChainId::Known(1));
    router.learn_chain_id(2, ChainId::NotTold);
    assert_eq!(router.view(now)[0].skipped, Some(Reason::WrongNetwork));
    assert_eq!(counts(&mut router, 4, now), [0, 2, 2]);
    let other = ListReport { identity: "another".into(), ..listed(ListedState::Active) };
    router.listed(1, &other, now);
    assert_eq!(router.view(now)[1].skipped, Some(Reason::NetworkUnchecked), "it is another relayer now");
}

#[test]
fn with_a_chain_the_second_relayer_of_one_key_gets_nothing() {
    let (mut router, now) = router(3, settings());
    all_up(&mut router, &[0, 0, 0], now);
    let key = |byte| ListReport { account: Some(Address::repeat_byte(byte)), ..listed(ListedState::Active) };
    for (index, byte) in [1, 2, 1].into_iter().enumerate() {
        router.listed(index, &key(byte), now);
    }
    assert_eq!(router.view(now)[2].skipped, None, "without a chain no nonce is compared");
    router.use_chain();
    let view = router.view(now);
    assert_eq!(view[2].skipped, Some(Reason::SharedKey));
    assert_eq!(view[2].shares_key_with, Some(RelayerUrl("http://r0".into())));
    assert_eq!(counts(&mut router, 4, now), [2, 2, 0]);
    router.listed(0, &key(3), now);
    assert_eq!(router.view(now)[2].skipped, None, "each has a key of its own");
    router.listed(2, &ListReport { account: None, ..key(1) }, now);
    router.listed(0, &ListReport { account: None, ..key(1) }, now);
    assert_eq!(router.view(now)[2].skipped, None, "none is listed");
}
