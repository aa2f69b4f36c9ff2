//! The store's contract for what each relayer holds: its load, its nonces and what it has ended.

use baton::config::RelayMode;
use baton::relay::state::apply_report::{Report, ReportedStatus, Source, Verdict};
use baton::relay::state::transaction::{ConsumerId, Progress, RelayerTxId, RelayerUrl, Transaction, UnknownCause};
use baton::relay::store::{RecentSince, RelayerRows};
use baton::timestamp::Timestamp;
use uuid::Uuid;

use super::fixture::{StoreFixture, now};
use super::report;

on_every_database! {
    open_rows_are_counted_for_each_relayer
    ended_rows_are_counted_since_a_time_and_up_to_a_maximum
}

const ALL: RecentSince = RecentSince { open_since: Timestamp(0), ended_since: Timestamp(0), ended_max: 1000 };

async fn rows(fixture: &StoreFixture, relayer: &str, recent_since: RecentSince) -> RelayerRows {
    let other = RelayerUrl("http://unknown".into());
    let asked = [other, RelayerUrl(relayer.into())];
    let mut found = fixture.store.relayer_rows(&asked, recent_since).await.unwrap();
    assert_eq!((found.len(), &found[0]), (2, &RelayerRows::default()));
    found.remove(1)
}

async fn claimed(fixture: &StoreFixture, relayer: &str) -> (Transaction, Uuid) {
    let (row, token) = (fixture.inserted().await, Uuid::new_v4());
    let relayer = RelayerUrl(relayer.into());
    let moved = row.claim(&ConsumerId::generate(), token, &relayer, "test", now(), &fixture.timings).unwrap();
    fixture.store.save(&moved).await.unwrap();
    (moved.transaction, token)
}

async fn bound(fixture: &StoreFixture, relayer: &str, tx_id: &str, at: i64) -> Transaction {
    let (row, token) = claimed(fixture, relayer).await;
    let moved = row.bind(token, &RelayerTxId(tx_id.into()), None, "test", Timestamp(at), &fixture.timings).unwrap();
    fixture.store.save(&moved).await.unwrap();
    moved.transaction
}

async fn reported(fixture: &StoreFixture, row: &Transaction, said: Report, at: i64) -> Transaction {
    let verdict = row.report(&said, Source::Asked, RelayMode::FireAndForget, Timestamp(at), &fixture.timings);
    let moved = match verdict {
        Verdict::Move(moved) | Verdict::Reroute(moved, _) => moved,
        verdict => panic!("{verdict:?}"),
    };
    fixture.store.save(&moved).await.unwrap();
    moved.transaction
}

async fn signed(fixture: &StoreFixture, row: &Transaction, tx_id: &str, nonce: u64) -> Transaction {
    let said = Report { nonce: Some(nonce), ..report(tx_id, ReportedStatus::Open(Progress::Sent)) };
    reported(fixture, row, said, now().0).await
}

async fn open_rows_are_counted_for_each_relayer(fixture: &StoreFixture) {
    fixture.inserted().await;
    assert_eq!(rows(fixture, "http://r1", ALL).await, RelayerRows::default(), "waiting rows are no relayer's");
    let (unknown, token) = claimed(fixture, "http://r1").await;
    let unsure = unknown.mark_unknown(token, "500", UnknownCause::Answered, now(), &fixture.timings).unwrap();
    fixture.store.save(&unsure).await.unwrap();
    claimed(fixture, "http://r1").await;
    claimed(fixture, "http://r2").await;
    let one = rows(fixture, "http://r1", ALL).await;
    assert_eq!(one, RelayerRows { claimed: 2, recent: 2, recent_unsigned: 2, ..RelayerRows::default() });
    assert_eq!(one.open(), 2);

    let first = bound(fixture, "http://r1", "oz-1", 5_000).await;
    let second = bound(fixture, "http://r1", "oz-2", 4_000).await;
    bound(fixture, "http://r1", "oz-3", 7_000).await;
    bound(fixture, "http://r1", "oz-4", 6_000).await;
    let unsigned = rows(fixture, "http://r1", ALL).await;
    assert_eq!((unsigned.bound, unsigned.unsigned, unsigned.open()), (4, 4, 6));
    assert_eq!(unsigned.oldest_unsigned, Some(Timestamp(4_000)));
    assert_eq!((unsigned.oldest_signed, unsigned.nonce_max), (None, None));
    let recent = rows(fixture, "http://r1", RecentSince { open_since: Timestamp(6_000), ..ALL }).await;
    assert_eq!((recent.recent, recent.open()), (2 + 2, 6), "two bound and two claimed lately");
    assert_eq!((recent.unsigned, recent.oldest_unsigned), (4, Some(Timestamp(6_000))));
    let recent = rows(fixture, "http://r1", RecentSince { open_since: Timestamp(i64::MAX), ..ALL }).await;
    assert_eq!((recent.recent, recent.oldest_unsigned), (0, None));

    signed(fixture, &second, "oz-2", 0).await;
    let first = signed(fixture, &first, "oz-1", 17).await;
    let two_signed = rows(fixture, "http://r1", ALL).await;
    assert_eq!((two_signed.bound, two_signed.unsigned), (4, 2));
    assert_eq!((two_signed.recent, two_signed.recent_unsigned), (4 + 2, 2 + 2));
    assert_eq!(two_signed.oldest_unsigned, Some(Timestamp(6_000)));
    assert_eq!(two_signed.oldest_signed, Some((0, Timestamp(4_000))));
    assert_eq!((two_signed.nonce_max, two_signed.ended), (Some(17), 0));

    let said = Report { hash: Some("0x1".into()), ..report("oz-1", ReportedStatus::Confirmed) };
    let ended_at = now().0 + 60_000;
    reported(fixture, &first, said, ended_at).await;
    let one_ended = rows(fixture, "http://r1", ALL).await;
    assert_eq!((one_ended.bound, one_ended.nonce_max, one_ended.open()), (3, Some(0), 5));
    assert_eq!((one_ended.ended, one_ended.last_ended), (1, Some(Timestamp(ended_at))));
    assert_eq!(
        rows(fixture, "http://r2", ALL).await,
        RelayerRows { claimed: 1, recent: 1, recent_unsigned: 1, ..RelayerRows::default() }
    );

    // A row that the relayer gave up unsigned is no longer there, and has not ended there either.
    let third = fixture.store.find_bound(&RelayerTxId("oz-3".into())).await.unwrap().unwrap();
    let said = Report { reason: Some("Insufficient balance".into()), ..report("oz-3", ReportedStatus::Failed) };
    reported(fixture, &third, said, now().0).await;
    let rerouted = rows(fixture, "http://r1", ALL).await;
    assert_eq!((rerouted.bound, rerouted.unsigned, rerouted.ended), (2, 1, 1));
}

async fn ended_rows_are_counted_since_a_time_and_up_to_a_maximum(fixture: &StoreFixture) {
    // A row's times do not run back.
    let base = now().0 + 60_000;
    for (number, at) in [(1, base + 1), (2, base + 2), (3, base + 3)] {
        let tx_id = format!("oz-{number}");
        let row = bound(fixture, "http://r1", &tx_id, 500).await;
        let said = Report { hash: Some("0x1".into()), ..report(&tx_id, ReportedStatus::Confirmed) };
        reported(fixture, &row, said, at).await;
    }
    for (since, max, expected) in
        [(0, 1000, 3), (base + 2, 1000, 2), (base + 3, 1000, 1), (base + 4, 1000, 0), (0, 2, 2)]
    {
        let found =
            rows(fixture, "http://r1", RecentSince { ended_since: Timestamp(since), ended_max: max, ..ALL }).await;
        assert_eq!(
            (found.ended, found.last_ended),
            (expected, Some(Timestamp(base + 3))),
            "since {since}, up to {max}"
        );
        assert_eq!(found.open(), 0);
    }
}
