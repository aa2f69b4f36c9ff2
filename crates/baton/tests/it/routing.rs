//! Who gets the work: evenly, never to one that cannot take it, and never twice to anybody.

use harness::ledger::Books;
use harness::relayer::{Faults, PostFault};
use harness::wait::eventually;

use crate::relay_fixture::{LATER, Plan, SOON};

#[tokio::test]
async fn three_equal_relayers_share_three_thousand_evenly() {
    let stand = Plan::relayers(3).start().await;
    for index in 0..3 {
        stand.until_relayer(index, "ok").await;
    }
    let sent = stand.send_many(0..3000).await;
    stand.until_all_final(LATER).await;
    let books = stand.books(sent);
    books.assert_exactly_once();
    for (relayer, count) in &books.per_relayer {
        assert!((950..=1050).contains(count), "{relayer} got {count}:\n{books}");
    }
    assert_eq!(stand.count("confirmed").await, 3000);
}

#[tokio::test]
async fn a_paused_relayer_gets_nothing_and_nothing_fails() {
    let stand = Plan::relayers(3).start().await;
    stand.relayers[1].change_faults(|faults| faults.paused = true);
    stand.until_relayer(1, "paused").await;
    let sent = stand.send_many(0..300).await;
    stand.until_all_final(LATER).await;
    let books = stand.books(sent);
    books.assert_exactly_once();
    assert_eq!(stand.relayers[1].accepted().len(), 0);
    assert_eq!((stand.count("confirmed").await, stand.count("failed").await), (300, 0));
}

#[tokio::test]
async fn a_relayer_paused_between_two_health_checks_costs_nothing() {
    let stand = Plan::relayers(3).env("RELAYER_HEALTH_INTERVAL_MS", "60000").start().await;
    for index in 0..3 {
        stand.until_relayer(index, "ok").await;
    }
    stand.relayers[0].set_faults(Faults::every(PostFault::Paused));
    let sent = stand.send_many(0..90).await;
    stand.until_all_final(LATER).await;
    stand.books(sent).assert_exactly_once();
    assert_eq!(stand.count("failed").await, 0);
}

#[tokio::test]
async fn a_relayer_that_answers_500_to_everything_is_left_and_its_few_unknowns_finish_when_it_is_back() {
    let stand = Plan::relayers(3).start().await;
    for index in 0..3 {
        stand.until_relayer(index, "ok").await;
    }
    let sick = &stand.relayers[2];
    sick.change_faults(|faults| faults.every_request = Some(500));
    let sent = stand.send_many(0..600).await;
    stand.until_relayer(2, "unreachable").await;

    // All but the few that went there in the first moments are done; those are shown as what they are.
    eventually(LATER, "everything but the unknown outcomes to be confirmed", || async {
        let (_, health) = stand.get("/health").await;
        let store = &health["parts"]["store"];
        // Missing while the store takes its time to count.
        let unknown = store["outcomeUnknown"].as_u64()?;
        (store["open"]["submitted"] == 0 && store["open"]["pending"] == unknown).then_some(())
    })
    .await;
    let (_, page) = stand.get("/api/v1/relay/transactions?outcomeUnknown=true&limit=200").await;
    let unknown = page["transactions"].as_array().unwrap().clone();
    assert!(!unknown.is_empty() && unknown.len() < 100, "{} unknown", unknown.len());
    for row in &unknown {
        assert_eq!(row["outcomeUnknown"], true);
        assert_eq!(row["ozRelayerUrl"], sick.url().as_str());
    }
    assert_eq!(stand.count("failed").await, 0);
    let (_, listed) = stand.command(["tx", "unknown"]).await;
    assert!(listed.contains(&format!("{} with unknown outcome", unknown.len())), "{listed}");

    // Settled by an operator who knows better, while the relayer is still away …
    let id = unknown[0]["transactionId"].as_str().unwrap();
    stand.resolve(id, "--resend").await;
    stand.until_status(id, "confirmed").await;

    // … and by the relayer's own list once it is back.
    sick.set_faults(Faults::default());
    stand.until_all_final(LATER).await;
    stand.books(sent).assert_exactly_once();
    assert_eq!((stand.count("confirmed").await, stand.count("failed").await), (600, 0));
}

#[tokio::test]
async fn unknown_outcomes_are_found_or_sent_again_exactly_once() {
    let stand = Plan::relayers(2).start().await;
    stand.warm_up().await;
    let warm: usize = stand.relayers.iter().map(|relayer| relayer.accepted().len()).sum();
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
        stand.relayers[index].set_faults(next);
    }
    let sent = stand.send_many(0..20).await;
    stand.until_all_final(LATER).await;
    // A record that failed unsigned at the relayer was never an effect; everything else counts.
    let effects = |accepted: &harness::relayer::Accepted| {
        if accepted.broadcasts == 0 { "unsigned".to_owned() } else { accepted.field("data") }
    };
    let mut books = Books::compare(sent, &stand.relayers, effects);
    books.extras.retain(|(key, _)| key != "unsigned" && !key.starts_with("0xffff"));
    books.assert_exactly_once();
    assert_eq!(stand.count("confirmed").await, 20 + warm);
    let struck: usize = stand.relayers.iter().map(|relayer| relayer.faults_struck().values().sum::<usize>()).sum();
    assert_eq!(struck, 8, "every fault was met");
}

#[tokio::test]
async fn equal_transactions_are_told_apart_by_number() {
    let stand = Plan::relayers(1).start().await;
    stand.warm_up().await;
    let faults = [PostFault::ErrorAfterStoring, PostFault::ErrorBeforeStoring, PostFault::CutAfterStoring];
    stand.relayers[0].set_faults(Faults { next_posts: faults.into_iter().map(Some).collect(), ..Faults::default() });
    for _ in 0..10 {
        stand.send_serial(7).await;
    }
    stand.until_all_final(LATER).await;
    assert_eq!(stand.relayers[0].accepted().len(), 1 + 10, "ten equal requests are ten effects");
    assert_eq!(stand.count("confirmed").await, 1 + 10);
}

#[tokio::test]
async fn while_no_relayer_is_able_items_wait_and_none_is_used_up() {
    let stand = Plan::relayers(2).env("QUEUE_LEASE_MS", "1000").start().await;
    for relayer in &stand.relayers {
        relayer.stop_listening().await;
    }
    for index in 0..2 {
        stand.until_relayer(index, "unreachable").await;
    }
    let sent = stand.send_many(0..50).await;
    assert_eq!(stand.get("/health").await.0, 503, "the health page says so");
    eventually(SOON, "the consumer to stop receiving", || async {
        (stand.metric("baton_consumer_receiving", "").await == 0.0).then_some(())
    })
    .await;
    for relayer in &stand.relayers {
        relayer.listen_again().await;
    }
    stand.until_all_final(LATER).await;
    stand.books(sent).assert_exactly_once();
    assert_eq!((stand.count("confirmed").await, stand.count("failed").await), (50, 0));
}

#[tokio::test]
async fn the_relayers_own_rate_limit_is_respected() {
    let stand = Plan::relayers(1)
        .env("RELAYER_RATE_PER_SECOND", "100")
        .relayer(0, |options| options.rate_limit = Some((100.0, 300.0)))
        .start()
        .await;
    let sent = stand.send_many(0..400).await;
    stand.until_all_final(LATER).await;
    stand.books(sent).assert_exactly_once();
    assert_eq!(stand.metric("baton_submissions_total", "not-taken").await, 0.0, "no 429 was met");
}

#[tokio::test]
async fn a_silent_relayer_that_shows_nothing_from_before_is_not_believed() {
    // Its first POST ever is cut off and nothing was stored. An empty list is also what a relayer shows that was
    // restarted with an empty memory, so nothing is sent again until somebody has looked.
    let stand = Plan::relayers(1).start().await;
    stand.relayers[0].set_faults(Faults::for_next(1, PostFault::CutBeforeStoring));
    let id = stand.send_serial(1).await;
    eventually(SOON, "the absence to be called unproven", || async {
        (stand.metric("baton_reconciler_total", "absence-unproven").await >= 3.0).then_some(())
    })
    .await;
    assert_eq!(stand.relayers[0].accepted().len(), 0);
    let row = stand.status(&id).await;
    assert_eq!((&row["status"], &row["outcomeUnknown"]), (&serde_json::json!("pending"), &serde_json::json!(true)));
    stand.resolve(&id, "--resend").await;
    stand.until_status(&id, "confirmed").await;
    assert_eq!(stand.relayers[0].accepted().len(), 1);
}

#[tokio::test]
async fn a_relayer_that_lost_its_memory_with_the_answer_is_not_sent_it_again() {
    let stand = Plan::relayers(1).start().await;
    stand.warm_up().await;
    stand.relayers[0].set_faults(Faults::for_next(1, PostFault::HangAfterStoring));
    let id = stand.send_serial(1).await;
    eventually(SOON, "it to be stored at the relayer", || async {
        (stand.relayers[0].accepted().len() == 2).then_some(())
    })
    .await;
    stand.relayers[0].restart(harness::relayer::Memory::Forget).await;
    stand.relayers[0].set_faults(Faults::default());
    eventually(SOON, "the absence to be called unproven", || async {
        (stand.metric("baton_reconciler_total", "absence-unproven").await >= 3.0).then_some(())
    })
    .await;
    assert_eq!(stand.relayers[0].accepted().len(), 2, "nothing was sent again");
    assert_eq!(stand.status(&id).await["outcomeUnknown"], true);
}

#[tokio::test]
async fn a_submission_that_lands_after_everybody_gave_up_on_it_is_still_found() {
    let stand = Plan::relayers(1).env("RELAYER_SUBMIT_TIMEOUT_MS", "500").start().await;
    stand.warm_up().await;
    let late = std::time::Duration::from_millis(1500);
    stand.relayers[0].set_faults(Faults::for_next(1, PostFault::HangThenStore(late)));
    let id = stand.send_serial(1).await;
    stand.until_status(&id, "confirmed").await;
    assert_eq!(stand.relayers[0].accepted().len(), 2, "the warm-up and this one, once");
}

#[tokio::test]
async fn several_relayers_behind_one_address_must_be_named() {
    let stand = Plan::relayers(2).relayer(1, |options| options.decoys = 2).start().await;
    stand.until_relayer(1, "unreachable").await;
    let id = stand.send_serial(1).await;
    stand.until_status(&id, "confirmed").await;
    assert_eq!(stand.relayers[1].accepted().len(), 0);
}
