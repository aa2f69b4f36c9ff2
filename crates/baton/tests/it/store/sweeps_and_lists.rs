//! The store's contract for shared sweeps and for lists that must not go through the whole table.

use std::collections::BTreeSet;
use std::time::Duration;

use baton::relay::request::call::DirectRequest;
use baton::relay::state::transaction::{Kind, RelayerUrl, Status, Transaction, TransactionId};
use baton::relay::store::{Due, Filter, ListPlace};
use baton::timestamp::Timestamp;
use uuid::Uuid;

use super::fixture::{StoreFixture, now, row};
use crate::relay_fixture::TO;

on_every_database! {
    a_due_row_is_leased_to_one_consumer_until_its_lease_ends
    a_lease_does_not_stop_a_concurrent_save
    a_sweep_is_leased_to_one_consumer_until_its_lease_ends
    every_filter_of_the_list_has_an_index
    imported_rows_are_listed_by_their_creation
    pages_of_large_rows_are_short
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
    let mut filters = Vec::new();
    for status in [None, Some(Status::Failed)] {
        for kind in [None, Some(Kind::Gasless)] {
            for relayer in [None, relayer.clone()] {
                let index = match (&relayer, status) {
                    (Some(_), _) => "transactions_relayer",
                    (None, Some(_)) => "transactions_status",
                    // By the type or the time on MySQL, and by the time within each status and type on SQLite.
                    (None, None) => "transactions_",
                };
                let filter = Filter { status, kind, relayer, ..Filter::default() };
                filters.push((Filter { outcome_unknown: true, ..filter.clone() }, "transactions_in_doubt"));
                filters.push((filter, index));
            }
        }
    }
    let place = Some(ListPlace { created_at: now(), id: TransactionId::generate() });
    for (filter, index) in filters {
        let hour = Duration::from_secs(3600);
        let within = Filter { from: Some(now() - hour), until: Some(now() + hour), ..filter.clone() };
        for (filter, before) in [(&filter, None), (&filter, place), (&within, None), (&within, place)] {
            let plan = fixture.list_plan(filter, before).await;
            let reads: Vec<_> = plan.iter().filter(|step| step.contains("transactions")).collect();
            assert!(!reads.is_empty() && reads.iter().all(|step| step.contains(index)), "{filter:?}: {plan:?}");
            // MySQL sorts the places of a merged page, and no more.
            let sorts = plan.iter().any(|step| step.contains("TEMP B-TREE"))
                || reads.iter().any(|step| step.contains("filesort"));
            assert!(!sorts, "without a sort: {filter:?}: {plan:?}");
            // A page begins where the one before ended, instead of counting up to there.
            let is_looked_up = |step: &&String| step.contains(")<(?,?)") || step.contains("by range");
            assert!(before.is_none() || reads.iter().all(is_looked_up), "{filter:?}: {plan:?}");
            // Every filter is looked up: a list of rare rows among many would go through those. MySQL names what it looks up
            // only where it looks for no range. Rows whose outcome is unknown are few, and the other filters are applied
            // to them.
            let filters = [filter.status.is_some(), filter.kind.is_some(), filter.relayer.is_some()];
            let expected = filters.into_iter().filter(|is_set| *is_set && !filter.outcome_unknown).count();
            let looked_up = |step: &&String| step.matches("=?").count() + step.matches("const").count() >= expected;
            let is_range = |step: &&String| step.contains("by range");
            assert!(reads.iter().all(|step| is_range(step) || looked_up(step)), "{filter:?}: {plan:?}");
        }
    }
}

/// 200 rows of 240 KB were in memory several times, for each list and for each sweep of rows that wait.
async fn pages_of_large_rows_are_short(fixture: &StoreFixture) {
    let store = &fixture.store;
    for _ in 0..12 {
        let mut row = row(now().0);
        let body = serde_json::json!({ "to": TO, "value": "1", "data": format!("0x{}", "ab".repeat(100_000)) });
        let request = DirectRequest::parse(&body).unwrap();
        row = Transaction::accepted(row.id, &request, "key".into(), row.created_at, &fixture.timings);
        store.insert(&[row]).await.unwrap();
    }
    let (mut listed, mut before) = (BTreeSet::new(), None);
    loop {
        let page = store.list(&Filter::default(), before, 200).await.unwrap();
        assert!(page.len() < 6, "{} rows of 200 KB", page.len());
        let Some(last) = page.last() else { break };
        before = Some(last.id);
        listed.extend(page.iter().map(|row| row.id));
    }
    assert_eq!(listed.len(), 12, "and none is left out");
    let due = store.due(Due::Waiting, now() + Duration::from_secs(86_400), 500).await.unwrap();
    assert!((1..6).contains(&due.len()), "{} rows of 200 KB", due.len());
}

/// A row as a status lookup imports it: with its relayer's id, which is random.
fn imported(id: Uuid, created_at: Timestamp) -> Transaction {
    let mut row = row(created_at.0);
    (row.id, row.imported) = (TransactionId(id), true);
    row
}

/// They sorted as newest.
async fn imported_rows_are_listed_by_their_creation(fixture: &StoreFixture) {
    let store = &fixture.store;
    let day = Duration::from_secs(86_400);
    let base = now();
    let at = |days: u32| base - day * days;
    let mut rows: Vec<Transaction> = (1..=6).map(|days| row(at(2 * days).0)).collect();
    // Between them, of one millisecond, and with ids that sort before and after all of Baton's.
    for (id, days) in [(u128::MAX, 3), (1, 3), (u128::MAX / 2, 7), (u128::MAX - 1, 30)] {
        let created_at = if days == 3 { rows[0].created_at - day } else { at(days) };
        rows.push(imported(Uuid::from_u128(id), created_at));
    }
    store.insert(&rows).await.unwrap();
    rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id)));
    let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
    let (status, kind) = (Some(Status::Pending), Some(Kind::Direct));
    let filters = [
        Filter::default(),
        Filter { status, ..Filter::default() },
        Filter { kind, ..Filter::default() },
        Filter { status, kind, ..Filter::default() },
    ];
    for filter in filters {
        for size in [1, 3, 100] {
            let (mut listed, mut before) = (Vec::new(), None);
            loop {
                let page = store.list(&filter, before, size).await.unwrap();
                listed.extend(page.iter().map(|row| row.id));
                match page.last() {
                    Some(last) => before = Some(last.id),
                    None => break,
                }
            }
            assert_eq!(listed, ids, "{filter:?}, {size} a page");
        }
    }
    let between = Filter { from: Some(at(8)), until: Some(at(5)), ..Filter::default() };
    // Paged, and from a place outside of that time.
    for (before, expected) in [(rows[0].id, 3), (ids[ids.len() - 1], 0)] {
        assert_eq!(store.list(&between, Some(before), 10).await.unwrap().len(), expected);
    }
    let first = store.list(&between, None, 1).await.unwrap();
    assert_eq!(store.list(&between, Some(first[0].id), 10).await.unwrap().len(), 2);
    let listed: Vec<_> = store.list(&between, None, 10).await.unwrap().iter().map(|row| row.created_at).collect();
    let expected: Vec<_> =
        rows.iter().map(|row| row.created_at).filter(|created| (at(8)..at(5)).contains(created)).collect();
    assert_eq!(listed, expected);
    assert_eq!(listed.len(), 3, "days 6, 7 and 8");
}
