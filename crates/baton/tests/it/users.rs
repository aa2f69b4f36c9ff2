//! The users lane on the embedded engine, over HTTP and the command line.

use std::collections::BTreeMap;

use harness::wait::eventually;
use serde_json::{Value, json};

use crate::users_fixture::{SOON, UsersSetup, answer, baton, user};

#[tokio::test]
async fn a_user_is_enrolled_and_can_be_read() {
    let mut fixture = UsersSetup::embedded().start().await;
    let id = fixture.enrol(1).await;
    assert_eq!(fixture.get(&id).await.0, 404, "accepted, and not enrolled yet");
    fixture.add_consumer().await;
    let found = fixture.until_enrolled(&id).await;
    assert_eq!((&found["name"], &found["email"]), (&json!("User 1"), &json!("user-1@example.com")));
    assert!(found["createdAt"].as_str().unwrap().ends_with('Z'), "{found}");
    assert_eq!(fixture.get("not-a-uuid").await.0, 400);
    let (status, problem) = fixture.post(&json!({ "name": "", "mail": "x" }), None).await;
    assert_eq!((status, problem["code"].as_str()), (400, Some("invalid-request")), "{problem}");
    assert_eq!(problem["errors"].as_array().unwrap().len(), 3, "{problem}");
    let without_key = fixture.http.post(format!("{}/api/v1/users", fixture.base)).json(&user(1));
    assert_eq!(answer(without_key).await.0, 401);
    let base = fixture.consumers[0].1.clone();
    assert_eq!(fixture.metric(&base, "baton_users_total", "inserted").await, 1.0);
}

#[tokio::test]
async fn an_idempotency_key_enrols_one_user_however_often_it_is_sent() {
    let mut fixture = UsersSetup::embedded().start().await;
    let same = json!({ "name": "A", "email": "a@x" });
    let repeats = futures::future::join_all((0..8).map(|_| fixture.post(&same, Some("k"))));
    let answers = repeats.await;
    assert!(answers.iter().all(|(status, body)| *status == 200 && body == &answers[0].1), "{answers:?}");
    fixture.add_consumer().await;
    let id = answers[0].1["id"].as_str().unwrap().to_owned();
    fixture.until_enrolled(&id).await;
    fixture.until_quiet(SOON).await;
    let base = fixture.consumers[0].1.clone();
    assert_eq!(fixture.metric(&base, "baton_users_total", "inserted").await, 1.0);
    assert_eq!(fixture.metric(&base, "baton_users_total", "repeated").await, 7.0);
    let (status, again) = fixture.post(&json!({ "name": "A", "email": "a@x" }), Some("k")).await;
    assert_eq!((status, &again), (200, &answers[0].1));
    let (status, other) = fixture.post(&json!({ "name": "B", "email": "a@x" }), Some("k")).await;
    assert_eq!((status, other["code"].as_str()), (422, Some("idempotency-key-reused")));
}

#[tokio::test]
async fn a_bulk_upload_is_answered_line_by_line_and_can_be_repeated_as_a_whole() {
    let mut fixture = UsersSetup::embedded().start().await;
    let mut lines: Vec<String> = (0..1200).map(|number| user(number).to_string()).collect();
    lines[7] = "{not json".into();
    lines[1100] = json!({ "name": "n", "email": "nowhere" }).to_string();
    let upload = || async {
        let request = fixture.request(reqwest::Method::POST, "/api/v1/users/bulk");
        let request = request.header("content-type", "application/x-ndjson").header("idempotency-key", "upload-1");
        let answer = request.body(lines.join("\n")).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        let text = answer.text().await.unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let first = upload().await;
    assert_eq!(first.len(), 1200);
    for (place, answer) in first.iter().enumerate() {
        assert_eq!(answer["line"], place + 1);
        let bad = place == 7 || place == 1100;
        assert_eq!(answer["status"], if bad { 400 } else { 200 }, "{answer}");
        assert_eq!(answer["error"].is_object(), bad, "{answer}");
    }
    assert_eq!(upload().await, first);
    let wrong = fixture.request(reqwest::Method::POST, "/api/v1/users/bulk").json(&user(1));
    assert_eq!(answer(wrong).await.0, 415);
    fixture.add_consumer().await;
    fixture.until_quiet(SOON).await;
    let base = fixture.consumers[0].1.clone();
    assert_eq!(fixture.metric(&base, "baton_users_total", "inserted").await, 1198.0);
    assert_eq!(fixture.metric(&base, "baton_users_total", "repeated").await, 1198.0);
}

/// While the dead-letter consumer is off, dead letters stay in the queue for an operator. Once it is on, the same message is
/// quarantined with its error.
#[tokio::test]
async fn an_invalid_message_is_a_dead_letter_and_then_quarantined() {
    let mut fixture = UsersSetup::embedded().env("USERS_DLQ_CONSUMER", "false").start().await;
    fixture.enrol(1).await;
    // Two users under one key, before either is enrolled: the consumer refuses the second.
    assert_eq!(fixture.post(&user(2), Some("k")).await.0, 200);
    assert_eq!(fixture.post(&user(3), Some("k")).await.0, 200);
    fixture.add_consumer().await;
    let base = fixture.consumers[0].1.clone();
    eventually(SOON, "the dead letter", || async { (fixture.health(&base).await["queue"]["dead"] == 1).then_some(()) })
        .await;
    let (code, list) = fixture.command(&["dlq", "list", "--lane", "users"]).await;
    assert!(code == 0 && list.contains("another user has this id") && list.contains("in the queue"), "{list}");
    fixture.consumers.clear();
    let mut env = fixture.env.clone();
    env.insert("USERS_DLQ_CONSUMER".into(), "true".into());
    fixture.add_consumer_with(&env).await;
    let base = fixture.consumers[0].1.clone();
    eventually(SOON, "it to be quarantined", || async {
        (fixture.health(&base).await["store"]["quarantined"] == 1).then_some(())
    })
    .await;
    let (_, list) = fixture.command(&["dlq", "list", "--lane", "users", "--reason", "ANOTHER"]).await;
    assert!(list.contains("in quarantine") && list.contains("1 dead letter"), "{list}");
    let (_, shown) = fixture.command(&["dlq", "list", "--lane", "users", "--max", "0"]).await;
    assert!(shown.contains("0 dead letters"), "{shown}");
    // Replayed, it is handled again: still refused, it returns to the quarantine.
    let (code, said) = fixture.command(&["dlq", "replay", "--lane", "users", "--all", "--rate", "10"]).await;
    assert!(code == 0 && said.contains("1 replayed, 0 refused"), "{said}");
    eventually(SOON, "it to be refused again", || async {
        (fixture.metric(&base, "baton_users_dead_letters_total", "quarantined").await == 2.0).then_some(())
    })
    .await;
    fixture.until_quiet(SOON).await;
    let (code, said) = fixture.command(&["dlq", "drop", "--lane", "users", "--all"]).await;
    assert!(code == 0 && said.contains("1 dropped"), "{said}");
    fixture.until_quiet(SOON).await;
}

#[tokio::test]
async fn a_service_names_every_missing_or_invalid_variable() {
    let directory = tempfile::tempdir().unwrap();
    let env = BTreeMap::from([
        ("BATON_DATA_DIR".to_owned(), directory.path().join("data").display().to_string()),
        ("USERS_DATABASE_URL".to_owned(), "mysql://here".to_owned()),
        ("USERS_QUEUE".to_owned(), "rabbitmq".to_owned()),
        ("USERS_BATCH_SIZE".to_owned(), "0".to_owned()),
    ]);
    let mut api = baton("users-api", &env).start().unwrap();
    assert_eq!(api.wait_exit(SOON).await.unwrap().code(), Some(2));
    for name in ["RELAY_API_KEY", "USERS_DATABASE_URL", "RABBITMQ_URL", "USERS_BATCH_SIZE"] {
        assert!(api.output().contains(name), "{name} in\n{}", api.output());
    }
    assert!(!api.output().contains("OZ_RELAYER_URLS") && !api.output().contains("WEBHOOK_SIGNING_KEY"));
}
