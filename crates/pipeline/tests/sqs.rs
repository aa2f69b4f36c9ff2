//! SQS on a real server: the conformance suite, and what is specific to SQS. Each test creates its own queues, so all run
//! in parallel.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

use std::collections::HashSet;
use std::time::{Duration, Instant, SystemTime};

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName};
use harness::proxy::{Mode, Proxy};
use pipeline::queue::sqs::{SqsAccess, SqsOpenError, SqsOptions, SqsQueue};
use pipeline::testing::{Profile, Subject};
use pipeline::{DeadLetter, Message, Outgoing, Queue, QueueError, QueueOptions};
use uuid::Uuid;

const REGION: &str = "ap-northeast-2";
const PATIENCE: Duration = Duration::from_secs(60);

fn server() -> String {
    std::env::var("BATON_TEST_SQS_URL").unwrap_or_else(|_| {
        panic!(
            "BATON_TEST_SQS_URL is not set: these tests need the real server; \
             run `scripts/services start` and `eval \"$(scripts/services env)\"`"
        )
    })
}

fn access(url: &str) -> SqsAccess {
    SqsAccess::Endpoint { url: url.into(), access_key: "test".into(), secret_key: "test".into() }
}

/// Options for new queues with random names, created when opened.
fn fresh() -> SqsOptions {
    let name = format!("pipeline-{}", Uuid::new_v4());
    SqsOptions { auto_create: true, ..SqsOptions::new(access(&server()), REGION, &name, format!("{name}-dlq")) }
}

fn leased_for(lease: Duration) -> QueueOptions {
    QueueOptions { lease, ..QueueOptions::default() }
}

async fn sqs_queue(options: QueueOptions) -> Subject {
    Subject::new(SqsQueue::open(fresh(), options).await.unwrap())
}

/// LocalStack makes hidden and delayed messages due on a tick of one second.
fn profile() -> Profile {
    Profile::whole_seconds()
}

pipeline::queue_conformance!(sqs, profile(), sqs_queue);

/// The SDK's own client, to act as another program on the queue.
async fn other_program() -> Client {
    let config = aws_sdk_sqs::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new(REGION))
        .endpoint_url(server())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .credentials_provider(Credentials::new("test", "test", None, None, "test"));
    Client::from_conf(config.build())
}

async fn url_of(client: &Client, name: &str) -> String {
    client.get_queue_url().queue_name(name).send().await.unwrap().queue_url.unwrap()
}

async fn receive_one(queue: &SqsQueue) -> Message {
    queue.receive(1, PATIENCE).await.unwrap().remove(0)
}

async fn send_one(queue: &SqsQueue, message: Outgoing) -> pipeline::MessageId {
    queue.send(&[message]).await.remove(0).unwrap()
}

fn all_ok<T: std::fmt::Debug>(answers: &[Result<T, QueueError>]) {
    assert!(!answers.is_empty() && answers.iter().all(Result::is_ok), "{answers:?}");
}

async fn buried(queue: &SqsQueue, body: &str) -> pipeline::MessageId {
    let id = send_one(queue, Outgoing::new(body)).await;
    let message = receive_one(queue).await;
    all_ok(&queue.bury(&[(message.receipt, format!("because of {body}"))]).await);
    id
}

#[tokio::test]
async fn capabilities_are_what_sqs_can_do() {
    let queue = SqsQueue::open(fresh(), QueueOptions::default()).await.unwrap();
    let can = queue.capabilities();
    println!("{can:?}");
    assert!(can.durable && can.shared && !can.ordered && !can.fenced);
    assert_eq!(can.body_bytes_max, 248 * 1024);
    let small = QueueOptions { body_bytes_max: 100, ..QueueOptions::default() };
    assert_eq!(SqsQueue::open(fresh(), small).await.unwrap().capabilities().body_bytes_max, 100);
}

#[tokio::test]
async fn a_binary_body_is_received_unchanged() {
    let queue = SqsQueue::open(fresh(), QueueOptions::default()).await.unwrap();
    let largest: Vec<u8> = (0..queue.capabilities().body_bytes_max).map(|n| (n % 251) as u8).collect();
    for body in [vec![], vec![0, 159, 146, 150], "\u{ffff}".into(), largest] {
        let sent = Outgoing::new(body.clone()).attribute("\u{1}", "\u{fffe}").attribute("traceparent", "00-1-2-01");
        send_one(&queue, sent.clone()).await;
        let message = receive_one(&queue).await;
        assert!(message.body == body && message.attributes == sent.attributes, "changed in transit: {message:?}");
        // The largest body must also survive a burial and a replay.
        let id = message.id.clone();
        all_ok(&queue.bury(&[(message.receipt, "r\u{0}".repeat(9000))]).await);
        let letter = queue.dead_letters(None, 1).await.unwrap().remove(0);
        assert!(letter.body == body && letter.attributes == sent.attributes && letter.reason.starts_with("r\u{fffd}"));
        all_ok(&queue.replay(&[id], Duration::ZERO).await);
        let message = receive_one(&queue).await;
        assert!(message.body == body && message.attributes == sent.attributes);
        all_ok(&queue.ack(&[message.receipt]).await);
    }
}

#[tokio::test]
async fn a_delay_beyond_the_limit_of_sqs_takes_steps_and_uses_no_attempt() {
    let sqs = SqsOptions { delay_step: Duration::from_secs(1), ..fresh() };
    // A second receive would bury the message.
    let options = QueueOptions { receives_max: Some(1), ..leased_for(Duration::from_secs(60)) };
    let queue = SqsQueue::open(sqs, options).await.unwrap();
    let start = Instant::now();
    let before = SystemTime::now() - Duration::from_secs(1);
    let id = send_one(&queue, Outgoing::new("much later").delayed(Duration::from_secs(5)).attribute("k", "v")).await;
    let sent_by = SystemTime::now() + Duration::from_secs(1);
    let message = receive_one(&queue).await;
    assert!(start.elapsed() >= Duration::from_secs(5), "arrived after {:?}", start.elapsed());
    assert_eq!((message.id, message.receives, message.body.as_slice()), (id, 1, b"much later".as_slice()));
    assert_eq!(message.attributes.get("k").map(String::as_str), Some("v"));
    assert!((before..sent_by).contains(&message.sent_at), "a copy keeps its send time");
    let depth = queue.depth().await.unwrap();
    assert_eq!((depth.ready, depth.in_flight, depth.delayed, depth.dead), (0, 1, 0, 0), "a copy is left over");
}

#[tokio::test]
async fn a_large_receive_takes_more_than_ten() {
    let queue = SqsQueue::open(fresh(), QueueOptions::default()).await.unwrap();
    let messages: Vec<_> = (0..45).map(|number| Outgoing::new(number.to_string())).collect();
    all_ok(&queue.send(&messages).await);
    let first = queue.receive(35, PATIENCE).await.unwrap();
    assert!(first.len() > 10 && first.len() <= 35, "{}", first.len());
    let receipts: Vec<_> = first.iter().map(|message| message.receipt.clone()).collect();
    let mut answers = queue.ack(&receipts).await;
    all_ok(&answers);
    let mut seen: HashSet<_> = first.into_iter().map(|message| message.body).collect();
    while seen.len() < 45 {
        for message in queue.receive(100, PATIENCE).await.unwrap() {
            assert!(seen.insert(message.body), "received twice");
            answers.extend(queue.ack(&[message.receipt]).await);
        }
    }
    assert_eq!(answers.len(), 45);
    all_ok(&answers);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_concurrent_sends_arrives_once() {
    let queue = SqsQueue::open(fresh(), QueueOptions::default()).await.unwrap();
    let mut senders = tokio::task::JoinSet::new();
    for number in 0..300 {
        let queue = queue.clone();
        // Ten of the large ones do not fit into one request.
        let size = if number % 50 == 0 { 200_000 } else { 10 };
        senders.spawn(async move { send_one(&queue, Outgoing::new(vec![b'x'; size])).await });
    }
    let mut expected = HashSet::new();
    while let Some(id) = senders.join_next().await {
        assert!(expected.insert(id.unwrap()));
    }
    let mut got = HashSet::new();
    while got.len() < 300 {
        for message in queue.receive(100, PATIENCE).await.unwrap() {
            assert!(got.insert(message.id), "received twice");
        }
    }
    assert_eq!(got, expected);
    let depth = queue.depth().await.unwrap();
    assert_eq!((depth.ready, depth.in_flight), (0, 300));
}

#[tokio::test]
async fn a_missing_queue_is_an_error_or_created_with_its_redrive_policy() {
    let options = QueueOptions { receives_max: Some(3), ..QueueOptions::default() };
    let sqs = SqsOptions { auto_create: false, ..fresh() };
    match SqsQueue::open(sqs.clone(), options.clone()).await.err() {
        Some(SqsOpenError::Missing { queue }) => assert_eq!(queue, sqs.dead_letter_queue),
        other => panic!("{other:?}"),
    }
    SqsQueue::open(SqsOptions { auto_create: true, ..sqs.clone() }, options.clone()).await.unwrap();
    // Now they exist and can be opened by name and by URL.
    SqsQueue::open(sqs.clone(), options.clone()).await.unwrap();
    let client = other_program().await;
    let url = url_of(&client, &sqs.queue).await;
    let by_url =
        SqsOptions { queue: url.clone(), dead_letter_queue: url_of(&client, &sqs.dead_letter_queue).await, ..sqs };
    let queue = SqsQueue::open(by_url.clone(), options).await.unwrap();
    assert_eq!(queue.name(), by_url.queue.rsplit('/').next().unwrap());
    let all =
        client.get_queue_attributes().queue_url(url).attribute_names(QueueAttributeName::All).send().await.unwrap();
    let attributes = all.attributes.unwrap();
    assert_eq!(attributes[&QueueAttributeName::VisibilityTimeout], "60");
    assert_eq!(attributes[&QueueAttributeName::MessageRetentionPeriod], "345600");
    let redrive = &attributes[&QueueAttributeName::RedrivePolicy];
    assert!(redrive.contains("\"maxReceiveCount\":3") && redrive.contains("-dlq\""), "{redrive}");
}

#[tokio::test]
async fn an_existing_queue_must_be_as_configured() {
    let sqs = fresh();
    let options = QueueOptions { receives_max: Some(3), ..QueueOptions::default() };
    SqsQueue::open(sqs.clone(), options.clone()).await.unwrap();
    let wrong = QueueOptions { lease: Duration::from_secs(90), receives_max: Some(5), ..options.clone() };
    let text = match SqsQueue::open(sqs.clone(), wrong).await.err() {
        Some(error @ SqsOpenError::Differs { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    for part in [
        sqs.queue.as_str(),
        "the visibility timeout is 60 s, configured is 90 s",
        "the redrive limit is 3 receives, configured is 5",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // A dead-letter queue that is not the target of the redrive policy.
    let other = SqsOptions { dead_letter_queue: fresh().dead_letter_queue, ..sqs.clone() };
    let text = SqsQueue::open(other, options.clone()).await.err().unwrap().to_string();
    assert!(text.contains("the redrive goes to arn:aws:sqs:"), "{text}");
    let odd = QueueOptions { retention: Duration::from_secs(3600), ..options };
    let text = SqsQueue::open(sqs, odd).await.err().unwrap().to_string();
    assert!(text.contains("the retention is 345600 s, configured is 3600 s"), "{text}");
}

#[tokio::test]
async fn options_beyond_the_limits_of_sqs_are_rejected() {
    let odd =
        QueueOptions { lease: Duration::from_secs(13 * 3600), retention: Duration::from_secs(1), ..Default::default() };
    let text = SqsQueue::open(fresh(), odd).await.err().unwrap().to_string();
    assert!(text.contains("12 hours") && text.contains("14 days"), "{text}");
}

#[tokio::test]
async fn copies_of_a_dead_letter_count_as_one() {
    let sqs = fresh();
    let queue = SqsQueue::open(sqs.clone(), QueueOptions::default()).await.unwrap();
    let id = buried(&queue, "twice").await;
    let other = buried(&queue, "once").await;
    // Simulate a crash between the copy and the deletion of a burial: the message is buried a second time.
    let client = other_program().await;
    let url = url_of(&client, &sqs.dead_letter_queue).await;
    let mut copied = false;
    while !copied {
        let taken = client.receive_message().queue_url(&url).message_attribute_names("All").visibility_timeout(0);
        for message in taken.send().await.unwrap().messages.unwrap_or_default() {
            if message.body() == Some("twice") {
                let copy = client.send_message().queue_url(&url).message_body("twice");
                copy.set_message_attributes(message.message_attributes).send().await.unwrap();
                copied = true;
            }
        }
    }
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!(letters.iter().map(|letter| &letter.id).collect::<Vec<_>>(), [&id, &other]);
    assert_eq!(queue.depth().await.unwrap().dead, 3, "SQS counts copies");
    all_ok(&queue.replay(std::slice::from_ref(&id), Duration::ZERO).await);
    assert_eq!(queue.depth().await.unwrap().dead, 1, "a copy is left over");
    assert_eq!(receive_one(&queue).await.id, id);
    assert!(queue.receive(10, Duration::from_secs(1)).await.unwrap().is_empty(), "it was replayed twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_readers_both_see_all_dead_letters() {
    let sqs = fresh();
    let one = SqsQueue::open(sqs.clone(), QueueOptions::default()).await.unwrap();
    let two = SqsQueue::open(sqs, QueueOptions::default()).await.unwrap();
    for number in 0..25 {
        buried(&one, &number.to_string()).await;
    }
    let show = |letters: &[DeadLetter]| letters.iter().map(|letter| format!("{letter:?}")).collect::<Vec<_>>();
    let (mine, theirs) = tokio::join!(one.dead_letters(None, 100), two.dead_letters(None, 100));
    let (mine, theirs) = (mine.unwrap(), theirs.unwrap());
    assert_eq!((mine.len(), theirs.len()), (25, 25));
    assert_eq!(show(&mine), show(&theirs));
    // Both have put back the letters that they took.
    assert_eq!(show(&two.dead_letters(None, 100).await.unwrap()), show(&mine));
    let page = one.dead_letters(Some(&mine[9].id), 10).await.unwrap();
    assert_eq!(show(&page), show(&mine[10..20]));
}

#[tokio::test]
async fn a_message_of_another_program_is_received_buried_and_replayed() {
    let sqs = fresh();
    let options = QueueOptions { receives_max: Some(1), ..leased_for(Duration::from_secs(1)) };
    let queue = SqsQueue::open(sqs.clone(), options).await.unwrap();
    let client = other_program().await;
    let value = MessageAttributeValue::builder().data_type("String").string_value("v").build().unwrap();
    let send = client.send_message().queue_url(url_of(&client, &sqs.queue).await).message_body("{\"a\":1}");
    let sqs_id = send.message_attributes("k", value).send().await.unwrap().message_id.unwrap();
    let message = receive_one(&queue).await;
    assert_eq!((message.id.0.as_str(), message.body.as_slice()), (sqs_id.as_str(), b"{\"a\":1}".as_slice()));
    // Unsettled, SQS moves it to the dead-letter queue; a replay keeps its id.
    let deadline = Instant::now() + PATIENCE;
    let letter = loop {
        assert!(queue.receive(1, Duration::from_secs(1)).await.unwrap().is_empty());
        if let Some(letter) = queue.dead_letters(None, 1).await.unwrap().pop() {
            break letter;
        }
        assert!(Instant::now() < deadline, "SQS did not move the message");
    };
    assert!(letter.by_queue && letter.reason.contains("moved by SQS after 1 deliveries"), "{letter:?}");
    all_ok(&queue.replay(std::slice::from_ref(&letter.id), Duration::ZERO).await);
    let again = receive_one(&queue).await;
    assert_eq!((again.id.0.as_str(), again.receives), (sqs_id.as_str(), 1));
    assert_eq!(again.attributes.get("k").map(String::as_str), Some("v"));
}

/// `host:port` of the server.
fn address() -> String {
    server().strip_prefix("http://").expect("a plain http server").trim_end_matches('/').to_owned()
}

/// A queue behind a fault proxy.
async fn behind_a_proxy(timeout: Duration) -> (SqsQueue, Proxy) {
    let proxy = Proxy::start(address()).await;
    let sqs = SqsOptions { access: access(&proxy.url()), timeout, connect_timeout: Duration::from_secs(1), ..fresh() };
    (SqsQueue::open(sqs, QueueOptions::default()).await.unwrap(), proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sends_during_a_request_share_the_next_request() {
    let (queue, proxy) = behind_a_proxy(Duration::from_secs(20)).await;
    let before = proxy.connections();
    // A request takes four seconds, so the time limit allows five rounds: without sharing, not all sends would finish.
    proxy.set(Mode::Delay(Duration::from_secs(2))).await;
    let mut senders = tokio::task::JoinSet::new();
    for number in 0..100 {
        let queue = queue.clone();
        senders.spawn(async move { queue.send(&[Outgoing::new(number.to_string())]).await.remove(0) });
    }
    while let Some(sent) = senders.join_next().await {
        sent.unwrap().unwrap();
    }
    assert!(proxy.connections() - before <= 16, "too many concurrent requests");
}

#[tokio::test]
async fn every_call_ends_when_the_server_does_not_answer() {
    let (queue, proxy) = behind_a_proxy(Duration::from_secs(2)).await;
    send_one(&queue, Outgoing::new("held")).await;
    let held = receive_one(&queue).await.receipt;
    proxy.set(Mode::BlackHole).await;
    let start = Instant::now();
    let messages: Vec<_> = (0..400).map(|number| Outgoing::new(number.to_string())).collect();
    let burial = [(held.clone(), "no".into())];
    let (sent, received, acked, buried, extended, depth) = tokio::join!(
        queue.send(&messages),
        queue.receive(10, Duration::from_secs(1)),
        queue.ack(std::slice::from_ref(&held)),
        queue.bury(&burial),
        queue.extend(std::slice::from_ref(&held), PATIENCE),
        queue.depth(),
    );
    assert!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    // The outcome of a sent request is unknown; an entry that was never sent had no effect.
    assert!(matches!(sent[0], Err(QueueError::OutcomeUnknown(_))), "{:?}", sent[0]);
    assert!(matches!(sent[399], Err(QueueError::Unavailable(_))), "{:?}", sent[399]);
    assert!(received.is_err() && depth.is_err());
    for answer in [&acked[0], &buried[0], &extended[0]] {
        assert!(matches!(answer, Err(QueueError::OutcomeUnknown(_))), "{answer:?}");
    }
    let start = Instant::now();
    assert!(queue.dead_letters(None, 1).await.is_err());
    assert!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    proxy.set(Mode::Forward).await;
    proxy.cut().await;
    send_one(&queue, Outgoing::new("recovered")).await;
}

#[tokio::test]
async fn a_send_over_a_refused_connection_has_no_effect() {
    let (queue, proxy) = behind_a_proxy(Duration::from_secs(2)).await;
    proxy.set(Mode::Refuse).await;
    proxy.cut().await;
    let sent = queue.send(&[Outgoing::new("a"), Outgoing::new("b")]).await;
    assert!(sent.iter().all(|answer| matches!(answer, Err(QueueError::Unavailable(_)))), "{sent:?}");
    assert!(matches!(queue.receive(1, Duration::ZERO).await, Err(QueueError::Unavailable(_))));
    proxy.set(Mode::Forward).await;
    send_one(&queue, Outgoing::new("c")).await;
    assert_eq!(receive_one(&queue).await.body, b"c");
    assert!(queue.receive(10, Duration::from_secs(1)).await.unwrap().is_empty(), "a refused message was delivered");
}

#[tokio::test]
async fn a_repeated_burial_after_a_lost_answer_stores_one_letter() {
    let (queue, proxy) = behind_a_proxy(Duration::from_secs(2)).await;
    let id = send_one(&queue, Outgoing::new("bad")).await;
    let receipt = receive_one(&queue).await.receipt;
    proxy.set(Mode::SwallowAnswers).await;
    let answers = queue.bury(&[(receipt.clone(), "no".into())]).await;
    assert!(matches!(answers[..], [Err(QueueError::OutcomeUnknown(_))]), "{answers:?}");
    proxy.set(Mode::Forward).await;
    proxy.cut().await;
    all_ok(&queue.bury(&[(receipt, "no".into())]).await);
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!(letters.iter().map(|letter| (&letter.id, letter.reason.as_str())).collect::<Vec<_>>(), [(&id, "no")]);
    let depth = queue.depth().await.unwrap();
    assert_eq!((depth.ready, depth.in_flight, depth.delayed), (0, 0, 0));
    all_ok(&queue.discard(&[id]).await);
    assert_eq!(queue.depth().await.unwrap().dead, 0, "a copy is left over");
}

#[tokio::test]
async fn a_server_with_an_untrusted_certificate_is_rejected() {
    // LocalStack speaks TLS on the same port, with a self-signed certificate.
    let sqs = SqsOptions { access: access(&format!("https://{}", address())), ..fresh() };
    match SqsQueue::open(sqs, QueueOptions::default()).await.err() {
        Some(SqsOpenError::Unavailable(QueueError::Unavailable(cause))) => {
            assert!(cause.to_string().contains("certificate"), "{cause}");
        }
        other => panic!("{other:?}"),
    }
}

/// Runs a test of this file again in a process with only this environment.
fn rerun_with(test: &str, environment: &[(&str, &str)]) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env_clear()
        .envs(environment.iter().copied())
        .envs([("RERUN", "1"), ("AWS_EC2_METADATA_DISABLED", "true"), ("BATON_TEST_SQS_URL", server().as_str())])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

fn is_rerun() -> bool {
    std::env::var_os("RERUN").is_some()
}

#[test]
fn the_default_credential_chain_is_used() {
    if !is_rerun() {
        let environment =
            [("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_ENDPOINT_URL", &server())];
        return rerun_with("the_default_credential_chain_is_used", &environment);
    }
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let sqs = SqsOptions { access: SqsAccess::Role, ..fresh() };
        let queue = SqsQueue::open(sqs, QueueOptions::default()).await.unwrap();
        send_one(&queue, Outgoing::new("signed")).await;
        assert_eq!(receive_one(&queue).await.body, b"signed");
        queue.settled().await;
    });
}

#[test]
fn without_credentials_nothing_is_sent() {
    if !is_rerun() {
        return rerun_with("without_credentials_nothing_is_sent", &[("AWS_ENDPOINT_URL", &server())]);
    }
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let sqs = SqsOptions { access: SqsAccess::Role, ..fresh() };
        let refused = SqsQueue::open(sqs, QueueOptions::default()).await.err();
        assert!(matches!(refused, Some(SqsOpenError::Unavailable(QueueError::Unavailable(_)))), "{refused:?}");
    });
}

/// After the server was replaced by an empty one, sending, receiving and counting create the queues again.
#[tokio::test]
async fn missing_queues_are_created_again() {
    let options = fresh();
    let queue = SqsQueue::open(options.clone(), QueueOptions::default()).await.unwrap();
    let client = other_program().await;
    let delete_queues = || async {
        for name in [&options.queue, &options.dead_letter_queue] {
            let url = client.get_queue_url().queue_name(name).send().await.unwrap().queue_url.unwrap();
            client.delete_queue().queue_url(url).send().await.unwrap();
        }
    };
    delete_queues().await;
    assert!(queue.send(&[Outgoing::new("one"), Outgoing::new("two")]).await.iter().all(Result::is_ok));
    assert_eq!(queue.receive(10, Duration::from_secs(5)).await.unwrap().len(), 2);
    delete_queues().await;
    assert!(queue.receive(10, Duration::ZERO).await.unwrap().is_empty());
    delete_queues().await;
    assert_eq!(queue.depth().await.unwrap().ready, 0);
    // Opening checks the attributes: a queue without its redrive policy would not pass.
    let checked = SqsOptions { auto_create: false, ..options.clone() };
    SqsQueue::open(checked.clone(), QueueOptions::default()).await.unwrap();
    // Without `auto_create` they stay missing, and calls fail.
    let queue = SqsQueue::open(checked, QueueOptions::default()).await.unwrap();
    delete_queues().await;
    assert!(matches!(queue.send(&[Outgoing::new("three")]).await[..], [Err(QueueError::Unavailable(_))]));
    assert!(queue.receive(1, Duration::ZERO).await.is_err());
}
