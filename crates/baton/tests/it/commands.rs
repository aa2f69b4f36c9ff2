//! Operators' commands on the data directory, beside running services.

use harness::ledger::Books;
use harness::relayer::{Faults, PostFault};
use serde_json::json;

use crate::relay_fixture::{LATER, Plan, TO};

#[tokio::test]
async fn a_refused_item_is_a_dead_letter_at_once_and_completes_after_a_replay() {
    let stand = Plan::relayers(2).start().await;
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::every(PostFault::Refused("gas_limit is too low".into())));
    }
    let id = stand.send_serial(1).await;
    let row = stand.until_status(&id, "failed").await;
    assert_eq!(row["error_message"], "gas_limit is too low");
    let posts: usize = stand.relayers.iter().map(|relayer| relayer.count_requests("POST", "/transactions")).sum();
    assert_eq!(posts, 1, "a refusal is not tried again");

    let (code, list) = stand.command(["dlq", "list"]).await;
    assert!(code == 0 && list.contains(&id) && list.contains("gas_limit is too low"), "{list}");
    let (_, shown) = stand.command(["dlq", "show", &id]).await;
    assert!(shown.contains("\"messageId\"") && shown.contains(&id), "{shown}");
    let (code, said) = stand.command(["dlq", "replay"]).await;
    assert_ne!(code, 0, "everything needs --all: {said}");
    let (_, said) = stand.command(["dlq", "replay", "--all", "--dry-run"]).await;
    assert!(said.contains("would replay"), "{said}");
    assert_eq!(stand.status(&id).await["status"], "failed");

    for relayer in &stand.relayers {
        relayer.set_faults(Faults::default());
    }
    let (code, said) = stand.command(["dlq", "replay", "--all"]).await;
    assert!(code == 0 && said.contains("1 replayed, 0 not"), "{said}");
    stand.until_status(&id, "confirmed").await;
    let (_, said) = stand.command(["dlq", "replay", "--all"]).await;
    assert!(said.contains("0 replayed"), "{said}");
    Books::compare([(id, "0x00000001".to_owned())], &stand.relayers, |accepted| accepted.field("data"))
        .assert_exactly_once();
}

#[tokio::test]
async fn a_passing_item_fault_gets_three_attempts_and_then_the_dead_letter_queue() {
    let stand = Plan::relayers(1).start().await;
    stand.relayers[0].set_faults(Faults::for_next(2, PostFault::Status(409)));
    let id = stand.send_serial(1).await;
    stand.until_status(&id, "confirmed").await;
    assert_eq!(stand.relayers[0].count_requests("POST", "/transactions"), 3);

    stand.relayers[0].set_faults(Faults::every(PostFault::Status(409)));
    let id = stand.send_serial(2).await;
    let row = stand.until_status(&id, "failed").await;
    assert!(row["error_message"].as_str().unwrap().contains("409"), "{row}");
    assert_eq!(stand.relayers[0].count_requests("POST", "/transactions"), 6);
    let (_, list) = stand.command(["dlq", "list"]).await;
    assert!(list.contains(&id) && list.contains("1 dead letter"), "{list}");
    let (code, said) = stand.command(["dlq", "drop", &id]).await;
    assert!(code == 0 && said.contains("1 dropped"), "{said}");
    assert_eq!(stand.status(&id).await["status"], "failed");
}

#[tokio::test]
async fn retry_on_failure_is_one_replay_by_itself() {
    let stand = Plan::relayers(1).start().await;
    stand.relayers[0].set_faults(Faults::for_next(1, PostFault::Refused("not now".into())));
    let id = stand.send(&json!({ "to": TO, "retryOnFailure": true })).await;
    stand.until_status(&id, "confirmed").await;
    stand.relayers[0].set_faults(Faults::every(PostFault::Refused("never".into())));
    let before = stand.relayers[0].count_requests("POST", "/transactions");
    let id = stand.send(&json!({ "to": TO, "retryOnFailure": true })).await;
    stand.until_status(&id, "failed").await;
    assert_eq!(stand.relayers[0].count_requests("POST", "/transactions") - before, 2);
}

#[tokio::test]
async fn tx_show_watch_and_resolve() {
    let stand = Plan::relayers(1).start().await;
    let id = stand.send_serial(1).await;
    let (code, watched) = stand.command(["tx", "watch", &id]).await;
    assert!(code == 0 && watched.contains("final: confirmed"), "{watched}");
    let (code, shown) = stand.command(["tx", "show", &id]).await;
    assert!(code == 0 && shown.contains("claimed") && shown.contains("confirmed"), "{shown}");
    let (_, shown) = stand.command(["tx", "show", &id, "--json"]).await;
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["status"], "confirmed");
    let (code, said) = stand.command(["tx", "resolve", &id, "--resend"]).await;
    assert!(code == 1 && said.contains("already confirmed"), "{said}");
    let (code, said) = stand.command(["tx", "resolve", &id]).await;
    assert!(code == 2 && said.contains("--resend"), "{said}");
    let (code, said) = stand.command(["tx", "show", "00000000-0000-7000-8000-000000000000"]).await;
    assert!(code == 1 && said.contains("no transaction"), "{said}");
}

#[tokio::test]
async fn a_message_buried_by_the_queue_is_put_back_while_its_row_has_attempts_left() {
    // Every POST hangs until the consumer gives up; the lease is short and each consumer is killed in the middle.
    let mut stand = Plan::relayers(1).env("QUEUE_LEASE_MS", "300").env("QUEUE_MAX_RECEIVES", "1").split().start().await;
    stand.relayers[0].stop_listening().await;
    stand.until_relayer(0, "unreachable").await;
    let sent = stand.send_many(0..20).await;
    stand.consumers[0].kill9().await.unwrap();
    stand.relayers[0].listen_again().await;
    stand.add_consumer().await;
    stand.until_all_final(LATER).await;
    assert_eq!(stand.count("confirmed").await, 20);
    Books::compare(sent, &stand.relayers, |accepted| accepted.field("data")).assert_exactly_once();
}
