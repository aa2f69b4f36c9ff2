//! Routing: submissions are spread evenly, never sent to a relayer that cannot take them, and never sent twice.

use futures::StreamExt;
use harness::ledger::EffectLedger;
use harness::relayer::{Faults, PostFault};
use harness::wait::eventually;

use crate::relay_fixture::{LATER, RelaySetup, SOON};

#[tokio::test]
async fn three_equal_relayers_share_three_thousand_transactions_evenly() {
    let relay = RelaySetup::relayers(3).start().await;
    for index in 0..3 {
        relay.until_relayer(index, "ok").await;
    }
    let sent = relay.send_many(0..3000).await;
    relay.until_all_final(LATER).await;
    let books = relay.books(sent);
    books.assert_exactly_once();
    for (relayer, count) in &books.per_relayer {
        assert!((950..=1050).contains(count), "{relayer} got {count}:\n{books}");
    }
    assert_eq!(relay.count("confirmed").await, 3000);
}

#[tokio::test]
async fn a_paused_relayer_gets_nothing_and_nothing_fails() {
    let relay = RelaySetup::relayers(3).start().await;
    relay.relayers[1].change_faults(|faults| faults.paused = true);
    relay.until_relayer(1, "paused").await;
    let sent = relay.send_many(0..300).await;
    relay.until_all_final(LATER).await;
    let books = relay.books(sent);
    books.assert_exactly_once();
    assert_eq!(relay.relayers[1].accepted().len(), 0);
    assert_eq!((relay.count("confirmed").await, relay.count("failed").await), (300, 0));
}

#[tokio::test]
async fn a_relayer_paused_between_two_health_checks_fails_no_transaction() {
    let relay = RelaySetup::relayers(3).env("RELAYER_HEALTH_INTERVAL_MS", "60000").start().await;
    for index in 0..3 {
        relay.until_relayer(index, "ok").await;
    }
    relay.relayers[0].set_faults(Faults::every(PostFault::Paused));
    let sent = relay.send_many(0..90).await;
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
    assert_eq!(relay.count("failed").await, 0);
}

#[tokio::test]
async fn a_relayer_that_answers_500_is_avoided_and_its_unknown_outcomes_are_settled_when_it_recovers() {
    let relay = RelaySetup::relayers(3).env("RELAYER_HEALTH_INTERVAL_MS", "2000").start().await;
    for index in 0..3 {
        relay.until_relayer(index, "ok").await;
    }
    let failing = &relay.relayers[2];
    // Its health checks succeed until it has got a transaction.
    failing.set_faults(Faults::every(PostFault::ErrorBeforeStoring));
    let sent = relay.send_many(0..600).await;
    eventually(SOON, "a transaction to be sent to it", || async {
        (failing.count_requests("POST", "/transactions") > 0).then_some(())
    })
    .await;
    failing.set_faults(Faults { every_request: Some(500), ..Faults::default() });
    relay.until_relayer(2, "unreachable").await;

    // All are confirmed except those sent to it before its breaker opened; they are listed as unknown outcomes.
    eventually(LATER, "everything but the unknown outcomes to be confirmed", || async {
        let (_, health) = relay.get("/health").await;
        let store = &health["parts"]["store"];
        // Absent while the store is still counting.
        let unknown = store["outcomeUnknown"].as_u64()?;
        (store["open"]["submitted"] == 0 && store["open"]["pending"] == unknown).then_some(())
    })
    .await;
    let (_, page) = relay.get("/api/v1/relay/transactions?outcomeUnknown=true&limit=200").await;
    let unknown = page["transactions"].as_array().unwrap().clone();
    assert!(!unknown.is_empty() && unknown.len() < 100, "{} unknown", unknown.len());
    for row in &unknown {
        assert_eq!(row["outcomeUnknown"], true);
        assert_eq!(row["ozRelayerUrl"], failing.url().as_str());
    }
    assert_eq!(relay.count("failed").await, 0);
    let (_, listed) = relay.command(["tx", "unknown"]).await;
    assert!(listed.contains(&format!("{} transactions with unknown outcome", unknown.len())), "{listed}");

    // An operator resolves one while the relayer is still failing …
    let id = unknown[0]["transactionId"].as_str().unwrap();
    relay.resolve(id, "--resend").await;
    relay.until_status(id, "confirmed").await;

    // … and the relayer's list settles the rest when it recovers.
    failing.set_faults(Faults::default());
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
    assert_eq!((relay.count("confirmed").await, relay.count("failed").await), (600, 0));
}

#[tokio::test]
async fn unknown_outcomes_are_found_or_resent_exactly_once() {
    let relay = RelaySetup::relayers(2).start().await;
    relay.warm_up().await;
    let warm: usize = relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum();
    for (index, faults) in [
        [
            PostFault::ErrorAfterStoring,
            PostFault::CutAfterStoring,
            PostFault::GarbledAnswer,
            PostFault::ErrorBeforeStoring,
        ],
        [
            PostFault::CutBeforeStoring,
            PostFault::TimeoutAfterStoring,
            PostFault::QueueUnavailable,
            PostFault::HangAfterStoring,
        ],
    ]
    .into_iter()
    .enumerate()
    {
        let next = Faults { next_posts: faults.into_iter().map(Some).collect(), ..Faults::default() };
        relay.relayers[index].set_faults(next);
    }
    let sent = relay.send_many(0..20).await;
    relay.until_all_final(LATER).await;
    // A record that failed unsigned is no effect; every other record is.
    let effects = |accepted: &harness::relayer::Accepted| {
        if accepted.broadcasts == 0 { "unsigned".to_owned() } else { accepted.field("data") }
    };
    let mut books = EffectLedger::compare(sent, &relay.relayers, effects);
    books.extras.retain(|(key, _)| key != "unsigned" && !key.starts_with("0xffff"));
    books.assert_exactly_once();
    assert_eq!(relay.count("confirmed").await, 20 + warm);
    let struck: usize = relay.relayers.iter().map(|relayer| relayer.faults_struck().values().sum::<usize>()).sum();
    assert_eq!(struck, 8, "every fault was injected");
}

#[tokio::test]
async fn equal_transactions_with_unknown_outcomes_are_matched_by_count() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.warm_up().await;
    let faults = [PostFault::ErrorAfterStoring, PostFault::ErrorBeforeStoring, PostFault::CutAfterStoring];
    relay.relayers[0].set_faults(Faults { next_posts: faults.into_iter().map(Some).collect(), ..Faults::default() });
    for _ in 0..10 {
        relay.send_serial(7).await;
    }
    relay.until_all_final(LATER).await;
    assert_eq!(relay.relayers[0].accepted().len(), 1 + 10, "ten equal requests have ten effects");
    assert_eq!(relay.count("confirmed").await, 1 + 10);
}

#[tokio::test]
async fn while_no_relayer_is_available_messages_wait_and_none_is_buried() {
    let relay = RelaySetup::relayers(2).env("QUEUE_LEASE_MS", "1000").start().await;
    for relayer in &relay.relayers {
        relayer.stop_listening().await;
    }
    for index in 0..2 {
        relay.until_relayer(index, "unreachable").await;
    }
    let sent = relay.send_many(0..50).await;
    assert_eq!(relay.get("/health").await.0, 503, "/health reports it");
    eventually(SOON, "the consumer to stop receiving", || async {
        (relay.metric("baton_consumer_receiving", "").await == 0.0).then_some(())
    })
    .await;
    for relayer in &relay.relayers {
        relayer.listen_again().await;
    }
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
    assert_eq!((relay.count("confirmed").await, relay.count("failed").await), (50, 0));
}

#[tokio::test]
async fn the_relayers_rate_limit_is_never_exceeded() {
    let relay = RelaySetup::relayers(1)
        .env("RELAYER_RATE_PER_SECOND", "100")
        .relayer(0, |options| options.rate_limit = Some((100.0, 300.0)))
        .start()
        .await;
    let sent = relay.send_many(0..400).await;
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
    assert_eq!(relay.metric("baton_submissions_total", "not-taken").await, 0.0, "no relayer answered 429");
}

#[tokio::test]
async fn lookups_of_unknown_ids_do_not_stop_submissions() {
    // At this rate the relayer would pay for 1,000 questions with 100 seconds without a submission.
    let relay = RelaySetup::relayers(1).env("RELAYER_RATE_PER_SECOND", "10").start().await;
    let lookups = (0..1000).map(|_| async {
        let id = uuid::Uuid::new_v4();
        relay.get(&format!("/api/v1/relay/status/{id}")).await.0
    });
    let answers: Vec<u16> = futures::stream::iter(lookups).buffer_unordered(32).collect().await;
    assert!(answers.iter().all(|status| [404, 429].contains(status)), "{answers:?}");
    assert!(answers.contains(&429), "the relayer was asked about every id");
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    // The budget is for ids that only a relayer may know.
    assert_eq!(relay.get(&format!("/api/v1/relay/status/{id}")).await.0, 200);
}

#[tokio::test]
async fn an_unknown_id_is_looked_up_once() {
    let relay = RelaySetup::relayers(1).env("RELAYER_RATE_PER_SECOND", "1").start().await;
    let id = uuid::Uuid::new_v4();
    for _ in 0..50 {
        let (status, answer) = relay.get(&format!("/api/v1/relay/status/{id}")).await;
        assert_eq!(status, 404, "{answer}");
    }
}

#[tokio::test]
async fn a_list_of_large_records_is_read_in_small_pages() {
    let relay = RelaySetup::relayers(1).start().await;
    // 12 MB on one page of 500, and 10 MB on one of 50.
    for index in 0..60 {
        relay.post_at_relayer(0, &format!("0x{}{index:04x}", "ab".repeat(100_000))).await;
    }
    relay.relayers[0].set_faults(Faults {
        next_posts: [Some(PostFault::CutAfterStoring)].into_iter().collect(),
        ..Faults::default()
    });
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(relay.relayers[0].accepted().len(), 61, "found, not sent again");
}

#[tokio::test]
async fn an_empty_list_without_an_older_record_does_not_prove_absence() {
    // The relayer's first POST is cut off before it stores anything. A relayer that restarted with an empty memory also
    // shows an empty list, so Baton does not resend until an operator decides.
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::for_next(1, PostFault::CutBeforeStoring));
    let id = relay.send_serial(1).await;
    eventually(SOON, "the absence to be reported as unproven", || async {
        (relay.metric("baton_reconciler_total", "absence-unproven").await >= 3.0).then_some(())
    })
    .await;
    assert_eq!(relay.relayers[0].accepted().len(), 0);
    let row = relay.status(&id).await;
    assert_eq!((&row["status"], &row["outcomeUnknown"]), (&serde_json::json!("pending"), &serde_json::json!(true)));
    relay.resolve(&id, "--resend").await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(relay.relayers[0].accepted().len(), 1);
}

#[tokio::test]
async fn nothing_is_resent_to_a_relayer_that_lost_its_memory_before_it_answered() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.warm_up().await;
    relay.relayers[0].set_faults(Faults::for_next(1, PostFault::HangAfterStoring));
    let id = relay.send_serial(1).await;
    eventually(SOON, "the relayer to store it", || async { (relay.relayers[0].accepted().len() == 2).then_some(()) })
        .await;
    relay.relayers[0].restart(harness::relayer::Memory::Forget).await;
    relay.relayers[0].set_faults(Faults::default());
    eventually(SOON, "the absence to be reported as unproven", || async {
        (relay.metric("baton_reconciler_total", "absence-unproven").await >= 3.0).then_some(())
    })
    .await;
    assert_eq!(relay.relayers[0].accepted().len(), 2, "nothing was resent");
    assert_eq!(relay.status(&id).await["outcomeUnknown"], true);
}

#[tokio::test]
async fn a_submission_stored_after_its_timeout_is_found() {
    let relay = RelaySetup::relayers(1).env("RELAYER_SUBMIT_TIMEOUT_MS", "500").start().await;
    relay.warm_up().await;
    let late = std::time::Duration::from_millis(1500);
    relay.relayers[0].set_faults(Faults::for_next(1, PostFault::HangThenStore(late)));
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(relay.relayers[0].accepted().len(), 2, "the warm-up and this one, each once");
}

#[tokio::test]
async fn a_url_with_several_relayers_and_no_id_is_not_used() {
    let relay = RelaySetup::relayers(2).relayer(1, |options| options.decoys = 2).start().await;
    relay.until_relayer(1, "unreachable").await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(relay.relayers[1].accepted().len(), 0);
}
