//! The contract of a transaction store, on the embedded one. Each later database adds a constructor, not tests.

use baton::config::{Config, Service};
use baton::relay::call::DirectRequest;
use baton::relay::report::{Mode, Report, ReportedStatus, Source, Verdict};
use baton::relay::store::sqlite::SqliteStore;
use baton::relay::store::{Due, Filter, Saved, StoreError, TransactionStore};
use baton::relay::transaction::{
    Clocks, ConsumerId, RelayerTxId, RelayerUrl, Status, Step, Transaction, TransactionId, Unknown,
};
use baton::timestamp::Timestamp;
use pipeline::sqlite::Database;
use serde_json::json;
use uuid::Uuid;

use crate::stand::TO;

struct Fixture {
    _directory: tempfile::TempDir,
    store: SqliteStore,
    clocks: Clocks,
}

async fn fixture() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let database = Database::open(&directory.path().join("baton.db")).unwrap();
    let clocks = Config::from_vars(Service::Command, |_| None).unwrap().relay.clocks;
    Fixture { store: SqliteStore::open(&database).await.unwrap(), _directory: directory, clocks }
}

impl Fixture {
    fn row(&self, at: i64) -> Transaction {
        let body = json!({ "to": TO, "value": "115792089237316195423570985008687907853269984665640564039457584007913129639935",
            "data": "0xab", "gas": 21000, "retryOnFailure": true });
        let request = DirectRequest::parse(&body).unwrap();
        Transaction::accepted(TransactionId::generate(), &request, "key".into(), Timestamp(at), &self.clocks)
    }

    async fn inserted(&self) -> Transaction {
        let row = self.row(Timestamp::now().0);
        self.store.insert(std::slice::from_ref(&row)).await.unwrap();
        row
    }

    async fn bound(&self, tx_id: &str) -> Result<Transaction, StoreError> {
        let row = self.inserted().await;
        let (me, token, now) = (ConsumerId::generate(), Uuid::new_v4(), Timestamp::now());
        let claimed = row.claim(&me, token, &RelayerUrl("http://r1".into()), "test", now, &self.clocks).unwrap();
        assert_eq!(self.store.save(&claimed).await?, Saved::Yes { early: false });
        let bound = claimed
            .transaction
            .bind(token, &RelayerTxId(tx_id.into()), Some("0xf"), "test", now, &self.clocks)
            .unwrap();
        assert_eq!(self.store.save(&bound).await?, Saved::Yes { early: false });
        Ok(bound.transaction)
    }
}

#[tokio::test]
async fn a_row_is_read_back_as_it_was_written_in_every_state() {
    let fixture = fixture().await;
    let row = fixture.inserted().await;
    assert_eq!(fixture.store.get(row.id).await.unwrap(), Some(row.clone()));
    let (me, token, now) = (ConsumerId::generate(), Uuid::new_v4(), Timestamp::now());
    let relayer = RelayerUrl("http://r1".into());
    let mut moves = vec![row.claim(&me, token, &relayer, "test", now, &fixture.clocks).unwrap()];
    moves.push(moves[0].transaction.doubt(token, "500", Unknown::Answered, now, &fixture.clocks).unwrap());
    moves.push(moves[1].transaction.absent(token, now, now, &fixture.clocks).unwrap());
    moves.push(
        moves[2].transaction.bind(token, &RelayerTxId("oz".into()), Some("0xf"), "t", now, &fixture.clocks).unwrap(),
    );
    moves.push(moves[3].transaction.forgotten(now, now).unwrap());
    moves.push(moves[4].transaction.resolve_fail(now).unwrap());
    for moved in moves {
        assert_eq!(fixture.store.save(&moved).await.unwrap(), Saved::Yes { early: false });
        assert_eq!(fixture.store.get(row.id).await.unwrap(), Some(moved.transaction));
    }
    assert_eq!(fixture.store.get(TransactionId::generate()).await.unwrap(), None);
}

#[tokio::test]
async fn of_two_moves_from_one_version_one_is_stale() {
    let fixture = fixture().await;
    let row = fixture.inserted().await;
    let relayer = RelayerUrl("http://r1".into());
    let claim = |name: &str| {
        let me = ConsumerId(name.into());
        row.claim(&me, Uuid::new_v4(), &relayer, "test", Timestamp::now(), &fixture.clocks).unwrap()
    };
    let claims: Vec<_> = ["a", "b", "c", "d"].iter().map(|name| claim(name)).collect();
    let saves = claims.iter().map(|moved| fixture.store.save(moved));
    let saved: Vec<_> = futures::future::join_all(saves).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(saved.iter().filter(|saved| **saved == (Saved::Yes { early: false })).count(), 1, "{saved:?}");
    assert_eq!(fixture.store.timeline(row.id).await.unwrap().len(), 1, "a stale move leaves no step");
}

#[tokio::test]
async fn a_relayer_transaction_belongs_to_one_row() {
    let fixture = fixture().await;
    let first = fixture.bound("oz-1").await.unwrap();
    let second = fixture.bound("oz-1").await;
    assert!(matches!(second, Err(StoreError::Conflict { .. })), "{second:?}");
    let tx_id = RelayerTxId("oz-1".into());
    assert_eq!(fixture.store.find_bound(&tx_id).await.unwrap().unwrap().id, first.id);
    // Gone to another relayer since: the record still belongs to this row, for good.
    let report = Report {
        tx_id: tx_id.clone(),
        status: ReportedStatus::Failed,
        reason: Some("Insufficient balance".into()),
        hash: None,
        nonce: None,
        from: None,
        to: None,
        value: None,
        data: None,
        gas_limit: None,
        created_at: None,
        confirmed_at: None,
        raw: json!({ "nonce": null }),
    };
    let now = Timestamp::now();
    let verdict = first.report(&report, Source::Webhook, Mode::FireAndForget, now, &fixture.clocks);
    let Verdict::Reroute(moved, _) = verdict else { panic!("{verdict:?}") };
    fixture.store.save(&moved).await.unwrap();
    assert_eq!(fixture.store.find_bound(&tx_id).await.unwrap().unwrap().id, first.id);
    assert!(matches!(fixture.bound("oz-1").await, Err(StoreError::Conflict { .. })));
    let among = [tx_id.clone(), RelayerTxId("oz-2".into())];
    assert_eq!(fixture.store.bound_among(&among).await.unwrap(), [tx_id]);
}

#[tokio::test]
async fn due_rows_come_oldest_first_and_final_ones_never() {
    let fixture = fixture().await;
    let (late, early, done) = (fixture.row(2000), fixture.row(1000), fixture.row(500));
    fixture.store.insert(&[late.clone(), early.clone(), done.clone()]).await.unwrap();
    fixture.store.save(&done.resolve_fail(Timestamp(3000)).unwrap()).await.unwrap();
    let at = |row: &Transaction| row.check_at.unwrap();
    assert!(fixture.store.due(Due::Waiting, Timestamp(at(&early).0 - 1), 10).await.unwrap().is_empty());
    let due: Vec<_> =
        fixture.store.due(Due::Waiting, at(&late), 10).await.unwrap().into_iter().map(|row| row.id).collect();
    assert_eq!(due, [early.id, late.id]);
    assert_eq!(fixture.store.due(Due::Waiting, at(&late), 1).await.unwrap().len(), 1);
    let forever = Timestamp(i64::MAX);
    assert!(fixture.store.due(Due::Claimed, forever, 10).await.unwrap().is_empty());
    let claimed = early
        .claim(
            &ConsumerId::generate(),
            Uuid::new_v4(),
            &RelayerUrl("http://r".into()),
            "t",
            Timestamp(4000),
            &fixture.clocks,
        )
        .unwrap();
    fixture.store.save(&claimed).await.unwrap();
    let bound = fixture.bound("oz-1").await.unwrap();
    for (kind, expected) in [(Due::Claimed, early.id), (Due::Bound, bound.id), (Due::Waiting, late.id)] {
        let due: Vec<_> = fixture.store.due(kind, forever, 10).await.unwrap().into_iter().map(|row| row.id).collect();
        assert_eq!(due, [expected], "{kind:?}");
    }
}

#[tokio::test]
async fn early_webhooks_are_kept_in_order_and_taken_once() {
    let fixture = fixture().await;
    let tx_id = RelayerTxId("oz-1".into());
    for record in ["one", "two"] {
        fixture.store.keep_early(&tx_id, record, Timestamp(1000)).await.unwrap();
    }
    assert_eq!(fixture.store.take_early(&tx_id).await.unwrap(), ["one", "two"]);
    assert!(fixture.store.take_early(&tx_id).await.unwrap().is_empty());
    fixture.store.keep_early(&tx_id, "old", Timestamp(1000)).await.unwrap();
    assert_eq!(fixture.store.forget(Timestamp(2000)).await.unwrap(), 1);
    assert!(fixture.store.take_early(&tx_id).await.unwrap().is_empty());
}

#[tokio::test]
async fn the_census_counts_what_is_open() {
    let fixture = fixture().await;
    fixture.inserted().await;
    fixture.bound("oz-1").await.unwrap();
    let row = fixture.inserted().await;
    let (me, token, now) = (ConsumerId::generate(), Uuid::new_v4(), Timestamp::now());
    let claimed = row.claim(&me, token, &RelayerUrl("http://r1".into()), "test", now, &fixture.clocks).unwrap();
    fixture.store.save(&claimed).await.unwrap();
    fixture
        .store
        .save(&claimed.transaction.doubt(token, "500", Unknown::Answered, now, &fixture.clocks).unwrap())
        .await
        .unwrap();
    let census = fixture.store.census().await.unwrap();
    assert_eq!(census.open, [(Status::Pending, 2), (Status::Submitted, 1)]);
    assert_eq!((census.claims, census.claims_in_doubt), (1, 1));
    let doubtful = fixture.store.list(&Filter { in_doubt: true, ..Filter::default() }, None, 10).await.unwrap();
    assert_eq!(doubtful.iter().map(|row| row.id).collect::<Vec<_>>(), [row.id]);
    fixture.store.pulse(&me, Timestamp(5)).await.unwrap();
    fixture.store.pulse(&me, Timestamp(9)).await.unwrap();
    assert_eq!(fixture.store.last_pulse(&me).await.unwrap(), Some(Timestamp(9)));
    assert_eq!(fixture.store.last_pulse(&ConsumerId::generate()).await.unwrap(), None);
}

#[tokio::test]
async fn a_row_that_cannot_be_read_names_its_column() {
    let directory = tempfile::tempdir().unwrap();
    let database = Database::open(&directory.path().join("baton.db")).unwrap();
    let store = SqliteStore::open(&database).await.unwrap();
    let clocks = Config::from_vars(Service::Command, |_| None).unwrap().relay.clocks;
    let request = DirectRequest::parse(&json!({ "to": TO })).unwrap();
    let row = Transaction::accepted(TransactionId::generate(), &request, "k".into(), Timestamp(1), &clocks);
    store.insert(std::slice::from_ref(&row)).await.unwrap();
    database.write(|connection| connection.execute("UPDATE transactions SET status = 'perhaps'", [])).await.unwrap();
    let read = store.get(row.id).await;
    assert!(matches!(read, Err(StoreError::Corrupt { column: "status", .. })), "{read:?}");
    store.note(row.id, &Step::new("looked", "at"), Timestamp(2)).await.unwrap();
    assert_eq!(store.timeline(row.id).await.unwrap()[0].action, "looked");
}
