//! The store's contract for early webhooks, which arrive before the submission's answer binds their record to a row.

use baton::relay::state::transaction::RelayerTxId;
use baton::relay::store::Saved;
use baton::timestamp::Timestamp;

use super::fixture::{StoreFixture, bind, now};

on_every_database! {
    early_webhooks_are_kept_in_order_and_taken_once
    at_most_twenty_early_webhooks_of_a_record_are_kept
    a_concurrent_bind_or_its_webhook_sees_the_other
}

async fn early_webhooks_are_kept_in_order_and_taken_once(fixture: &StoreFixture) {
    let tx_id = RelayerTxId("oz-1".into());
    for record in ["one", "two"] {
        fixture.store.keep_early_webhook(&tx_id, record, Timestamp(1000)).await.unwrap();
    }
    let (claimed, token) = fixture.claimed().await;
    assert_eq!(fixture.store.save(&bind(&claimed, token, "oz-1")).await.unwrap(), Saved::Yes { early: true });
    let takers = (0..4).map(|_| fixture.store.take_early_webhooks(&tx_id));
    let taken: Vec<_> = futures::future::join_all(takers).await.into_iter().flat_map(Result::unwrap).collect();
    assert_eq!(taken, ["one", "two"]);
    assert!(fixture.store.take_early_webhooks(&tx_id).await.unwrap().is_empty());
    fixture.store.keep_early_webhook(&tx_id, "old", Timestamp(1000)).await.unwrap();
    assert_eq!(fixture.store.forget(Timestamp(2000)).await.unwrap(), 1);
    assert!(fixture.store.take_early_webhooks(&tx_id).await.unwrap().is_empty());
}

async fn at_most_twenty_early_webhooks_of_a_record_are_kept(fixture: &StoreFixture) {
    let tx_id = RelayerTxId("oz-1".into());
    let keeps = (0..8).map(|_| fixture.store.keep_early_webhook(&tx_id, "concurrent", Timestamp(1000)));
    futures::future::join_all(keeps).await.into_iter().for_each(Result::unwrap);
    for _ in 0..17 {
        fixture.store.keep_early_webhook(&tx_id, "one more", Timestamp(1000)).await.unwrap();
    }
    assert_eq!(fixture.store.take_early_webhooks(&tx_id).await.unwrap().len(), 20);
}

async fn a_concurrent_bind_or_its_webhook_sees_the_other(fixture: &StoreFixture) {
    for round in 0..50 {
        let tx_id = RelayerTxId(format!("oz-{round}"));
        let (claimed, token) = fixture.claimed().await;
        let moved = bind(&claimed, token, &tx_id.0);
        let webhook = async {
            fixture.store.keep_early_webhook(&tx_id, "{}", now()).await.unwrap();
            fixture.store.find_bound(&tx_id).await.unwrap()
        };
        let (saved, found) = tokio::join!(fixture.store.save(&moved), webhook);
        let seen_by_bind = saved.unwrap() == Saved::Yes { early: true };
        assert!(seen_by_bind || found.is_some(), "round {round}: the webhook is lost");
    }
}
