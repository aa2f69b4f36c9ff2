//! The store's contract for shared sweeps and for lists that must not go through the whole table.

use std::collections::BTreeSet;
use std::time::Duration;

use baton::relay::state::transaction::{Kind, RelayerUrl, Status};
use baton::relay::store::{Due, Filter};

use super::fixture::{StoreFixture, now};

on_every_database! {
    a_due_row_is_leased_to_one_consumer_until_its_lease_ends
    a_lease_does_not_stop_a_concurrent_save
    a_sweep_is_leased_to_one_consumer_until_its_lease_ends
    every_filter_of_the_list_has_an_index
}

async fn a_due_row_is_leased_to_one_consumer_until_its_lease_ends(fixture: &StoreFixture) {
    const ROWS: usize = 60;
    for index in 0..ROWS {
        fixture.bound(&format!("oz-{index}")).await.unwrap();
    }
    let store = &fixture.store;
    let at = now() + Duration::from_secs(3600);
    let until = at + Duration::from_secs(15);
    // Four consumers, each until nothing is left.
    let consumer = || async {
        let mut taken = Vec::new();
        loop {
            let rows = store.lease_due(Due::Bound, at, until, 7).await.unwrap();
            if rows.is_empty() {
                return taken;
            }
            assert!(rows.len() <= 7);
            taken.extend(rows.into_iter().map(|row| row.id));
            assert!(taken.len() <= ROWS, "rows are leased again before their leases end");
        }
    };
    let taken: Vec<_> = futures::future::join_all((0..4).map(|_| consumer())).await.concat();
    let distinct: BTreeSet<_> = taken.iter().collect();
    assert_eq!((taken.len(), distinct.len()), (ROWS, ROWS), "each row is leased once");
    assert!(store.lease_due(Due::Bound, until - Duration::from_millis(1), until, 100).await.unwrap().is_empty());
    // Their consumers died: the rows are due again, all of them.
    assert_eq!(store.due(Due::Bound, until, 100).await.unwrap().len(), ROWS);
}

async fn a_lease_does_not_stop_a_concurrent_save(fixture: &StoreFixture) {
    let row = fixture.bound("oz-1").await.unwrap();
    let at = now() + Duration::from_secs(3600);
    let leased = fixture.store.lease_due(Due::Bound, at, at + Duration::from_secs(15), 10).await.unwrap();
    assert_eq!((leased.len(), leased[0].version), (1, row.version));
    let later = row.check_later(at + Duration::from_secs(600), now()).unwrap();
    assert!(matches!(fixture.store.save(&later).await.unwrap(), baton::relay::store::Saved::Yes { .. }));
    assert!(fixture.store.due(Due::Bound, at + Duration::from_secs(15), 10).await.unwrap().is_empty());
}

async fn a_sweep_is_leased_to_one_consumer_until_its_lease_ends(fixture: &StoreFixture) {
    let store = &fixture.store;
    let (at, until) = (now(), now() + Duration::from_secs(30));
    let lease = |held, at, until| store.lease_sweep("one", held, at, until);
    // Eight consumers at once, also for the first lease of all.
    let taken = futures::future::join_all((0..8).map(|_| lease(None, at, until))).await;
    assert_eq!(taken.into_iter().filter(|taken| *taken.as_ref().unwrap()).count(), 1);
    let just_before = until - Duration::from_millis(1);
    assert!(!lease(None, just_before, until + Duration::from_secs(30)).await.unwrap(), "it is held");
    assert!(store.lease_sweep("another", None, at, until).await.unwrap(), "each sweep has its own");
    // Its holder renews it, and only its holder.
    let later = until + Duration::from_secs(10);
    assert!(!lease(Some(just_before), at, later).await.unwrap());
    assert!(lease(Some(until), at, later).await.unwrap());
    assert!(!lease(None, until, later + Duration::from_secs(30)).await.unwrap());
    // Its holder died.
    let last = later + Duration::from_secs(30);
    assert!(lease(None, later, last).await.unwrap());
    assert!(!lease(Some(later), later, last + Duration::from_secs(1)).await.unwrap(), "the earlier holder lost it");
}

async fn every_filter_of_the_list_has_an_index(fixture: &StoreFixture) {
    for index in 0..50 {
        fixture.bound(&format!("oz-{index}")).await.unwrap();
    }
    let relayer = Some(RelayerUrl("http://r1".into()));
    let filters = [
        (Filter { status: Some(Status::Failed), ..Filter::default() }, "transactions_status"),
        (Filter { kind: Some(Kind::Gasless), ..Filter::default() }, "transactions_type"),
        (Filter { relayer, ..Filter::default() }, "transactions_relayer"),
        (Filter { outcome_unknown: true, ..Filter::default() }, "transactions_in_doubt"),
    ];
    for (filter, index) in filters {
        let plan = fixture.list_plan(&filter).await;
        assert_eq!(plan.len(), 1, "one step, without a sort: {plan:?}");
        assert!(plan[0].contains(index) && !plan[0].contains("filesort"), "{filter:?}: {plan:?}");
        // Within a time, and combined, the same index is used.
        let hour = Duration::from_secs(3600);
        let combined = Filter { from: Some(now() - hour), until: Some(now() + hour), ..filter };
        let plan = fixture.list_plan(&combined).await;
        assert!(plan.len() == 1 && plan[0].contains(index), "{plan:?}");
    }
}
