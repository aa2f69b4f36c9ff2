//! The store's contract for gasless rows: each signer's nonce belongs to one row that has not failed.

use baton::relay::state::transaction::{Kind, Status, Transaction};
use baton::relay::store::{Accepted, Filter, IdempotencyKey, KeyOwner, Saved};

use super::fixture::{StoreFixture, bind, claim, gasless_row, now};

on_every_database! {
    a_gasless_row_is_read_back_unchanged
    a_nonce_belongs_to_one_row_until_that_row_fails
    the_last_nonce_ignores_failed_rows
    a_nonce_whose_request_was_never_accepted_is_found
    a_request_that_failed_on_the_chain_is_remembered
    a_request_whose_nonce_is_taken_leaves_its_key_free
}

async fn accept(fixture: &StoreFixture, row: &Transaction, key: Option<&str>) -> Accepted {
    let key = key.map(|key| IdempotencyKey { key: key.to_owned(), body_sha256: [7; 32] });
    fixture.store.accept(&[(row.clone(), key)]).await.remove(0).unwrap()
}

async fn fail(fixture: &StoreFixture, row: &Transaction) {
    let failed = row.abandon("test", now()).unwrap();
    assert_eq!(fixture.store.save(&failed).await.unwrap(), Saved::Yes { early: false });
}

async fn a_gasless_row_is_read_back_unchanged(fixture: &StoreFixture) {
    let row = gasless_row(3);
    assert_eq!(accept(fixture, &row, None).await, Accepted::Stored);
    assert_eq!(fixture.store.get(row.id).await.unwrap().as_ref(), Some(&row));
    let (claimed, token) = claim(&row);
    fixture.store.save(&claimed).await.unwrap();
    let bound = bind(&claimed.transaction, token, "oz-1");
    fixture.store.save(&bound).await.unwrap();
    assert_eq!(fixture.store.get(row.id).await.unwrap().as_ref(), Some(&bound.transaction));
    let gasless = Filter { kind: Some(Kind::Gasless), ..Filter::default() };
    assert_eq!(fixture.store.list(&gasless, None, 10).await.unwrap(), [bound.transaction]);
}

async fn a_nonce_belongs_to_one_row_until_that_row_fails(fixture: &StoreFixture) {
    let rows: Vec<_> = (0..20).map(|_| gasless_row(5)).collect();
    let accepts = rows.iter().map(|row| accept(fixture, row, None));
    let answers = futures::future::join_all(accepts).await;
    let first = rows.iter().zip(&answers).find(|(_, answer)| **answer == Accepted::Stored).unwrap().0;
    let others = answers.iter().filter(|answer| **answer == Accepted::NonceTaken(first.id)).count();
    assert_eq!(others, 19, "{answers:?}");
    let signer = first.forward.as_ref().unwrap().signer();
    assert_eq!(fixture.store.nonce_holder(signer, 5).await.unwrap().as_ref(), Some(first));
    assert_eq!(fixture.store.nonce_holder(signer, 4).await.unwrap(), None);
    assert_eq!(accept(fixture, &gasless_row(6), None).await, Accepted::Stored, "another nonce");
    fail(fixture, first).await;
    let holder = fixture.store.nonce_holder(signer, 5).await.unwrap().unwrap();
    assert_eq!(
        (holder.id, holder.status),
        (first.id, Status::Failed),
        "successors can read why their predecessor failed"
    );
    let (second, third) = (gasless_row(5), gasless_row(5));
    assert_eq!(accept(fixture, &second, None).await, Accepted::Stored);
    assert_eq!(accept(fixture, &third, None).await, Accepted::NonceTaken(second.id));
    assert_eq!(fixture.store.nonce_holder(signer, 5).await.unwrap(), Some(second));
}

async fn the_last_nonce_ignores_failed_rows(fixture: &StoreFixture) {
    let (one, two) = (gasless_row(9), gasless_row(10));
    let signer = one.forward.as_ref().unwrap().signer();
    assert_eq!(fixture.store.last_nonce(signer).await.unwrap(), None);
    for row in [&one, &two] {
        assert_eq!(accept(fixture, row, None).await, Accepted::Stored);
    }
    assert_eq!(fixture.store.last_nonce(signer).await.unwrap(), Some(10));
    fail(fixture, &two).await;
    assert_eq!(fixture.store.last_nonce(signer).await.unwrap(), Some(9));
    fail(fixture, &one).await;
    assert_eq!(fixture.store.last_nonce(signer).await.unwrap(), None);
    let stranger = baton::relay::request::forward::Signer { address: signer.forwarder, forwarder: Default::default() };
    assert_eq!(fixture.store.last_nonce(stranger).await.unwrap(), None, "nonces are counted per forwarder");
}

async fn a_nonce_whose_request_was_never_accepted_is_found(fixture: &StoreFixture) {
    let rows = [gasless_row(3), gasless_row(4), gasless_row(5), gasless_row(6)];
    let signer = rows[0].forward.as_ref().unwrap().signer();
    for row in &rows {
        assert_eq!(accept(fixture, row, None).await, Accepted::Stored);
    }
    fail(fixture, &rows[1]).await;
    assert_eq!(fixture.store.withdrawn_nonce(signer, 0).await.unwrap(), None, "it was accepted, and failed later");
    let withdrawn = rows[2].not_queued(now()).unwrap();
    assert_eq!(fixture.store.save(&withdrawn).await.unwrap(), Saved::Yes { early: false });
    assert_eq!(fixture.store.withdrawn_nonce(signer, 0).await.unwrap(), Some(5));
    assert_eq!(fixture.store.withdrawn_nonce(signer, 6).await.unwrap(), None);
    assert_eq!(accept(fixture, &gasless_row(5), None).await, Accepted::Stored);
    assert_eq!(fixture.store.withdrawn_nonce(signer, 0).await.unwrap(), None, "another has it");
}

async fn a_request_that_failed_on_the_chain_is_remembered(fixture: &StoreFixture) {
    let (one, other) = (gasless_row(1).forward.unwrap().digest(), gasless_row(2).forward.unwrap().digest());
    assert_eq!(one, gasless_row(1).forward.unwrap().digest());
    assert!(!fixture.store.is_failed_forward(one).await.unwrap());
    for _ in 0..2 {
        fixture.store.record_failed_forward(one, now()).await.unwrap();
    }
    assert!(fixture.store.is_failed_forward(one).await.unwrap());
    assert!(!fixture.store.is_failed_forward(other).await.unwrap());
}

async fn a_request_whose_nonce_is_taken_leaves_its_key_free(fixture: &StoreFixture) {
    let (first, second) = (gasless_row(1), gasless_row(1));
    assert_eq!(accept(fixture, &first, Some("one")).await, Accepted::Stored);
    assert_eq!(accept(fixture, &second, Some("one")).await, Accepted::Duplicate(first.id), "the key is checked first");
    assert_eq!(accept(fixture, &second, Some("two")).await, Accepted::NonceTaken(first.id));
    assert_eq!(fixture.store.get(second.id).await.unwrap(), None);
    let owner = |key: &'static str| fixture.store.key_owner("key", key);
    assert_eq!(owner("one").await.unwrap(), Some(KeyOwner { id: first.id, body_sha256: [7; 32] }));
    assert_eq!(owner("two").await.unwrap(), None);
    // Duplicate requests in one batch whose nonce is taken both get that answer.
    let key = || Some(IdempotencyKey { key: "three".into(), body_sha256: [7; 32] });
    let batch = [(gasless_row(1), key()), (gasless_row(1), key()), (gasless_row(2), None)];
    let answers: Vec<_> = fixture.store.accept(&batch).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(answers, [Accepted::NonceTaken(first.id), Accepted::NonceTaken(first.id), Accepted::Stored]);
}
