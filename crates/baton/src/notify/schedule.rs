//! What follows from an attempt (pure): when the delivery is tried again or given up, how long the endpoint is left alone,
//! and when it is disabled.

use std::time::Duration;

use crate::relay::store::notifications::{Delivery, DeliveryThen, Endpoint, EndpointThen};
use crate::timestamp::Timestamp;

/// Pauses between attempts, in seconds: 15 attempts over at least 75 hours and 42 minutes.
const PAUSES_S: [u64; 14] = [
    5,
    30,
    2 * 60,
    10 * 60,
    30 * 60,
    3600,
    2 * 3600,
    4 * 3600,
    8 * 3600,
    12 * 3600,
    12 * 3600,
    12 * 3600,
    12 * 3600,
    12 * 3600,
];
/// Part of a pause that is added at random, so that what failed together is not tried again together.
const JITTER: f64 = 0.1;
/// Consecutive failures of an endpoint from which its deliveries are tried one at a time, with pauses.
pub const FAILURES_BEFORE_PAUSE: u32 = 5;
/// The first of these pauses; they double.
const PAUSE_FIRST_S: u64 = 5;
const PAUSE_MAX_S: u64 = 60;
/// Pause after an overload answer (429, 502, 503, 504) without `Retry-After`.
const THROTTLED_S: u64 = 5;
/// An endpoint that has only failed for this long is disabled, if it had several attempts: two failures that are far apart
/// say little about the time between.
const DISABLED_AFTER_S: u64 = 5 * 24 * 3600;
const DISABLED_AFTER_FAILURES: u32 = 10;
/// After this long without an attempt, longer than any pause of the schedule, the next failure begins a new series: the
/// endpoint may have worked meanwhile.
const QUIET_S: u64 = 24 * 3600;

/// What one attempt showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptResult {
    /// The status of the answer, if there was one.
    pub status: Option<u16>,
    /// Whether the receiver has it.
    pub succeeded: bool,
    /// How long the receiver asked to be left alone.
    pub retry_after: Option<Duration>,
}

/// What becomes of the delivery and of its endpoint. `second` is the length of one second of the schedule; `fraction` is
/// random, at least 0 and less than 1; `failing_for` is the time that has certainly passed since the first of its failures.
pub fn after_attempt(
    endpoint: &Endpoint,
    delivery: &Delivery,
    result: &AttemptResult,
    now: Timestamp,
    failing_for: Duration,
    second: Duration,
    fraction: f64,
) -> (DeliveryThen, EndpointThen) {
    if result.succeeded {
        return (DeliveryThen::Delivered, EndpointThen::Works);
    }
    if result.status == Some(410) {
        let reason = "the endpoint answered 410 Gone".to_owned();
        return (DeliveryThen::GivenUp, EndpointThen::Disable { reason, failing_since: None });
    }
    let seconds = |count: u64| second * u32::try_from(count).unwrap_or(u32::MAX);
    let failures = endpoint.failures + 1;
    // An endpoint with several failures in a row has been paused by the last of them. An older pause is another series'.
    let paused_until = endpoint.paused_until.filter(|until| endpoint.failing_since.is_none_or(|since| since <= *until));
    let anew = paused_until.is_some_and(|until| now.since(until) >= seconds(QUIET_S));
    let long = endpoint.failing_since.is_some() && failing_for >= seconds(DISABLED_AFTER_S) && !anew;
    if long && failures >= DISABLED_AFTER_FAILURES {
        let reason = "every attempt failed for 5 days".to_owned();
        return (DeliveryThen::GivenUp, EndpointThen::Disable { reason, failing_since: endpoint.failing_since });
    }
    let pause = failures.checked_sub(FAILURES_BEFORE_PAUSE).map(|beyond| {
        let doubled = PAUSE_FIRST_S.checked_shl(beyond).unwrap_or(PAUSE_MAX_S);
        seconds(doubled.min(PAUSE_MAX_S))
    });
    // Other failures say nothing about the endpoint's load.
    let throttled = matches!(result.status, Some(429 | 502..=504));
    let asked = throttled.then(|| result.retry_after.unwrap_or(seconds(THROTTLED_S)));
    let paused_until = pause.max(asked).map(|pause| now + pause);
    let next = PAUSES_S.get(delivery.attempts as usize).map(|pause| seconds(*pause).mul_f64(1.0 + JITTER * fraction));
    let then = next.map_or(DeliveryThen::GivenUp, |pause| {
        DeliveryThen::RetryAt(now + pause.max(result.retry_after.unwrap_or_default()))
    });
    (then, EndpointThen::Fails { paused_until, anew })
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::config::Secret;
    use crate::relay::state::event::{EventId, EventType};
    use crate::relay::state::transaction::TransactionId;
    use crate::relay::store::notifications::EndpointId;

    const NOW: Timestamp = Timestamp(1_800_000_000_000);
    const SECOND: Duration = Duration::from_secs(1);

    fn endpoint(failures: u32, failing_for: Duration) -> Endpoint {
        Endpoint {
            id: EndpointId(Uuid::from_u128(7)),
            owner: "a".to_owned(),
            url: "https://example.com/".to_owned(),
            events: vec![EventType::Completed],
            description: None,
            secret: Secret::new("whsec_"),
            previous_secret: None,
            version: 1,
            created_at: NOW,
            updated_at: NOW,
            disabled: None,
            failing_since: (failures > 0).then(|| NOW - failing_for),
            failures,
            paused_until: None,
        }
    }

    fn delivery(attempts: u32) -> Delivery {
        Delivery {
            endpoint: EndpointId(Uuid::from_u128(7)),
            event: EventId("evt_1".to_owned()),
            kind: EventType::Completed,
            transaction: TransactionId(Uuid::from_u128(1)),
            position: 4,
            created_at: NOW,
            attempts,
            payload: Some("{}".to_owned()),
            lease: Uuid::from_u128(2),
        }
    }

    fn failed(status: Option<u16>, retry_after: Option<Duration>) -> AttemptResult {
        AttemptResult { status, succeeded: false, retry_after }
    }

    fn decide(endpoint: &Endpoint, attempts: u32, result: &AttemptResult) -> (DeliveryThen, EndpointThen) {
        let failing_for = endpoint.failing_since.map(|since| NOW.since(since)).unwrap_or_default();
        after_attempt(endpoint, &delivery(attempts), result, NOW, failing_for, SECOND, 0.0)
    }

    #[test]
    fn the_schedule_reaches_72_hours_and_then_gives_up() {
        let healthy = endpoint(0, Duration::ZERO);
        let mut all = Duration::ZERO;
        let mut attempts = 0;
        loop {
            match decide(&healthy, attempts, &failed(Some(500), None)).0 {
                DeliveryThen::RetryAt(at) => all += at.since(NOW),
                DeliveryThen::GivenUp => break,
                DeliveryThen::Delivered => panic!("it failed"),
            }
            attempts += 1;
        }
        assert!(all >= Duration::from_secs(72 * 3600), "{all:?}");
        assert_eq!(attempts, 14);
    }

    #[test]
    fn jitter_only_makes_a_pause_longer() {
        let healthy = endpoint(0, Duration::ZERO);
        let none = Duration::ZERO;
        let at = |fraction| after_attempt(&healthy, &delivery(0), &failed(None, None), NOW, none, SECOND, fraction).0;
        assert_eq!(at(0.0), DeliveryThen::RetryAt(NOW + SECOND * 5));
        assert_eq!(at(0.5), DeliveryThen::RetryAt(NOW + Duration::from_millis(5250)));
    }

    #[test]
    fn retry_after_makes_a_pause_longer_and_never_shorter() {
        let healthy = endpoint(0, Duration::ZERO);
        let (then, health) = decide(&healthy, 0, &failed(Some(429), Some(SECOND * 60)));
        assert_eq!(then, DeliveryThen::RetryAt(NOW + SECOND * 60));
        assert_eq!(
            health,
            EndpointThen::Fails { paused_until: Some(NOW + SECOND * 60), anew: false },
            "the endpoint is left alone"
        );
        let (then, health) = decide(&healthy, 3, &failed(Some(500), Some(SECOND)));
        assert_eq!(then, DeliveryThen::RetryAt(NOW + SECOND * 600));
        assert_eq!(health, EndpointThen::Fails { paused_until: None, anew: false });
    }

    #[test]
    fn an_overloaded_endpoint_is_left_alone_although_it_does_not_say_for_how_long() {
        let healthy = endpoint(0, Duration::ZERO);
        let paused = |status, asked| match decide(&healthy, 0, &failed(Some(status), asked)).1 {
            EndpointThen::Fails { paused_until, .. } => paused_until.map(|until| until.since(NOW)),
            other => panic!("{other:?}"),
        };
        for status in [429, 502, 503, 504] {
            assert_eq!(paused(status, None), Some(SECOND * 5), "{status}");
            assert_eq!(paused(status, Some(SECOND)), Some(SECOND), "{status}");
        }
        assert_eq!([400, 404, 500, 501].map(|status| paused(status, None)), [None; 4]);
    }

    #[test]
    fn an_endpoint_that_keeps_failing_is_paused_longer_and_longer() {
        let pause = |failures| match decide(&endpoint(failures, SECOND), 0, &failed(None, None)).1 {
            EndpointThen::Fails { paused_until, .. } => paused_until.map(|until| until.since(NOW).as_secs()),
            _ => panic!("it fails"),
        };
        assert_eq!(
            [3, 4, 5, 6, 7, 8, 9, 400].map(pause),
            [None, Some(5), Some(10), Some(20), Some(40), Some(60), Some(60), Some(60)]
        );
    }

    #[test]
    fn gone_and_five_days_of_failing_disable() {
        let (then, health) = decide(&endpoint(0, Duration::ZERO), 0, &failed(Some(410), None));
        assert_eq!(then, DeliveryThen::GivenUp);
        assert!(matches!(health, EndpointThen::Disable { .. }));
        let days =
            |days: u64| decide(&endpoint(9, SECOND * 86_400 * u32::try_from(days).unwrap()), 2, &failed(None, None)).1;
        assert!(matches!(days(4), EndpointThen::Fails { .. }));
        assert!(matches!(days(5), EndpointThen::Disable { .. }));
        let quiet = decide(&endpoint(1, SECOND * 86_400 * 9), 2, &failed(None, None)).1;
        assert!(matches!(quiet, EndpointThen::Fails { .. }), "two failures in nine days");
    }

    #[test]
    fn failures_before_a_quiet_week_do_not_disable() {
        let day = SECOND * 86_400;
        let mut quiet = endpoint(15, day * 10);
        quiet.paused_until = Some(NOW - day * 7);
        let (then, health) = decide(&quiet, 0, &failed(None, None));
        assert_eq!(then, DeliveryThen::RetryAt(NOW + SECOND * 5));
        assert!(matches!(health, EndpointThen::Fails { anew: true, .. }), "{health:?}");
        quiet.paused_until = Some(NOW - SECOND * 14 * 3600);
        let within_the_schedule = decide(&quiet, 0, &failed(None, None)).1;
        assert!(matches!(within_the_schedule, EndpointThen::Disable { .. }), "{within_the_schedule:?}");
    }

    #[test]
    fn a_clock_that_jumped_ahead_does_not_disable() {
        let failing = endpoint(12, SECOND * 86_400 * 9);
        let passed = |passed| after_attempt(&failing, &delivery(0), &failed(None, None), NOW, passed, SECOND, 0.0).1;
        assert!(matches!(passed(SECOND * 3600), EndpointThen::Fails { .. }));
        assert!(matches!(passed(SECOND * 86_400 * 5), EndpointThen::Disable { .. }));
    }

    #[test]
    fn a_success_ends_the_delivery_and_the_failures() {
        let ok = AttemptResult { status: Some(204), succeeded: true, retry_after: None };
        assert_eq!(decide(&endpoint(9, SECOND * 999_999), 3, &ok), (DeliveryThen::Delivered, EndpointThen::Works));
    }
}
