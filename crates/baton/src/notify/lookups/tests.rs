use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use tokio::sync::Notify;

use super::*;

/// For lookups that never come to an end.
const SHORT: Duration = Duration::from_millis(500);

/// DNS that never answers for names under `slow.test`; counts those lookups.
fn partly_silent() -> (Lookups, Arc<AtomicUsize>) {
    let silent = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&silent);
    let resolver: Resolver = Arc::new(move |host, port| {
        if host.ends_with("slow.test") {
            counted.fetch_add(1, Ordering::Relaxed);
            return Box::pin(std::future::pending());
        }
        Box::pin(async move { Ok(vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port))]) })
    });
    (Lookups::with_timeout(resolver, SHORT), silent)
}

/// Looks up different names that never resolve, all at once, until every caller has given up.
async fn look_up_slow_names(lookups: &Lookups, owner: &str, number: usize) -> Vec<LookupError> {
    let slow = async |number: usize| lookups.look_up(owner, &format!("{number}.slow.test"), 443).await.unwrap_err();
    join_all((0..number).map(slow)).await
}

#[tokio::test]
async fn slow_names_of_one_owner_leave_places_to_the_others() {
    let (lookups, silent) = partly_silent();
    let errors = look_up_slow_names(&lookups, "a", 200).await;
    let late = errors.iter().filter(|error| matches!(error, LookupError::Late)).count();
    let busy = errors.iter().filter(|error| matches!(error, LookupError::OwnerBusy)).count();
    assert_eq!((late, busy), (LOOKUPS_PER_OWNER_MAX, 200 - LOOKUPS_PER_OWNER_MAX));
    assert_eq!(silent.load(Ordering::Relaxed), LOOKUPS_PER_OWNER_MAX);
    // The lookups go on, so their owner has no place, although no caller waits.
    let refused = lookups.look_up("a", "fast.test", 443).await.unwrap_err();
    assert_eq!(refused.to_string(), "too many lookups of this API key's host names are in progress");
    assert_eq!(lookups.look_up("b", "fast.test", 443).await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_lookups_of_all_owners_are_bounded() {
    let (lookups, silent) = partly_silent();
    for owner in 0..LOOKUPS_MAX / LOOKUPS_PER_OWNER_MAX {
        look_up_slow_names(&lookups, &format!("owner {owner}"), LOOKUPS_PER_OWNER_MAX).await;
    }
    assert_eq!(silent.load(Ordering::Relaxed), LOOKUPS_MAX);
    let refused = lookups.look_up("b", "fast.test", 443).await.unwrap_err();
    assert_eq!(refused.to_string(), "too many lookups of host names are in progress");
}

#[tokio::test]
async fn callers_of_one_name_share_its_lookup_while_it_is_in_progress() {
    let (lookups, silent) = partly_silent();
    let slow = async |owner| lookups.look_up(owner, "one.slow.test", 443).await.unwrap_err();
    for _ in 0..2 {
        let errors = join_all((0..100).map(|_| slow("a"))).await;
        assert!(errors.iter().all(|error| matches!(error, LookupError::Late)), "{errors:?}");
        assert_eq!(silent.load(Ordering::Relaxed), 1);
    }
    assert_eq!(lookups.look_up("a", "fast.test", 443).await.unwrap().len(), 1);
    slow("b").await;
    assert_eq!(silent.load(Ordering::Relaxed), 2, "owners share nothing");
}

#[tokio::test]
async fn a_lookup_that_ends_returns_its_places_and_is_not_kept() {
    let (answer, calls) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
    let (answered, counted) = (Arc::clone(&answer), Arc::clone(&calls));
    let resolver: Resolver = Arc::new(move |host, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        let answered = Arc::clone(&answered);
        Box::pin(async move {
            assert_ne!(host, "0.slow.test", "a resolver that panics");
            answered.notified().await;
            Err(io::ErrorKind::NotFound.into())
        })
    });
    let lookups = Lookups::with_timeout(resolver, SHORT);
    look_up_slow_names(&lookups, "a", LOOKUPS_PER_OWNER_MAX).await;
    answer.notify_waiters();
    while !locked(&lookups.owner("a").in_progress).is_empty() {
        tokio::task::yield_now().await;
    }
    let errors = look_up_slow_names(&lookups, "a", LOOKUPS_PER_OWNER_MAX).await;
    assert!(matches!(errors[0], LookupError::Failed(_)), "{errors:?}");
    assert!(errors[1..].iter().all(|error| matches!(error, LookupError::Late)), "{errors:?}");
    assert_eq!(calls.load(Ordering::Relaxed), 2 * LOOKUPS_PER_OWNER_MAX);
}
