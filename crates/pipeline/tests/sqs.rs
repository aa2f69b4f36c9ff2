//! SQS on the real server: the contract that every queue keeps, and what is particular to SQS. Each test makes its own
//! queues, so all run at once.

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

/// Queues that nobody else uses, created when opened.
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

/// LocalStack brings back what is hidden or delayed on a tick of one second.
fn profile() -> Profile {
    Profile::whole_seconds()
}

pipeline::queue_conformance!(sqs, profile(), sqs_queue);

/// The SDK itself, to do what other readers and writers of the queue would.
async fn others() -> Client {
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
async fn bytes_that_are_no_text_pass() {
    let queue = SqsQueue::open(fresh(), QueueOptions::default()).await.unwrap();
    let largest: Vec<u8> = (0..queue.capabilities().body_bytes_max).map(|n| (n % 251) as u8).collect();
    for body in [vec![], vec![0, 159, 146, 150], "\u{ffff}".into(), largest] {
        let sent = Outgoing::new(body.clone()).attribute("\u{1}", "\u{fffe}").attribute("traceparent", "00-1-2-01");
        send_one(&queue, sent.clone()).await;
        let message = receive_one(&queue).await;
        assert!(message.body == body && message.attributes == sent.attributes, "changed on the way: {message:?}");
        // The largest must fit into the dead-letter queue as well, and come back from there.
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
async fn a_delay_beyond_sqs_goes_in_steps_and_uses_up_nothing() {
    let sqs = SqsOptions { delay_step: Duration::from_secs(1), ..fresh() };
    // One receive more would bury it.
    let options = QueueOptions { receives_max: Some(1), ..leased_for(Duration::from_secs(60)) };
    let queue = SqsQueue::open(sqs, options).await.unwrap();
    let start = Instant::now();
    let before = SystemTime::now() - Duration::from_secs(1);
    let id = send_one(&queue, Outgoing::new("much later").delayed(Duration::from_secs(5)).attribute("k", "v")).await;
    let sent_by = SystemTime::now() + Duration::from_secs(1);
    let message = receive_one(&queue).await;
    assert!(start.elapsed() >= Duration::from_secs(5), "came after {:?}", start.elapsed());
    assert_eq!((message.id, message.receives, message.body.as_slice()), (id, 1, b"much later".as_slice()));
    assert_eq!(message.attributes.get("k").map(String::as_str), Some("v"));
    assert!((before..sent_by).contains(&message.sent_at), "a copy keeps its age");
    let depth = queue.depth().await.unwrap();
    assert_eq!((depth.ready, depth.in_flight, depth.delayed, depth.dead), (0, 1, 0, 0), "no copy is left over");
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
            assert!(seen.insert(message.body), "twice");
            answers.extend(queue.ack(&[message.receipt]).await);
        }
    }
    assert_eq!(answers.len(), 45);
    all_ok(&answers);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sends_all_arrive_once() {
    let queue = SqsQueue::open(fresh(), QueueOptions::default()).await.unwrap();
    let mut senders = tokio::task::JoinSet::new();
    for number in 0..300 {
        let queue = queue.clone();
        // Some are so large that ten of them do not fit into one request.
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
            assert!(got.insert(message.id), "one came twice");
        }
    }
    assert_eq!(got, expected);
    let depth = queue.depth().await.unwrap();
    assert_eq!((depth.ready, depth.in_flight), (0, 300));
}

#[tokio::test]
async fn a_missing_queue_is_named_or_created_with_its_redrive() {
    let options = QueueOptions { receives_max: Some(3), ..QueueOptions::default() };
    let sqs = SqsOptions { auto_create: false, ..fresh() };
    match SqsQueue::open(sqs.clone(), options.clone()).await.err() {
        Some(SqsOpenError::Missing { queue }) => assert_eq!(queue, sqs.dead_letter_queue),
        other => panic!("{other:?}"),
    }
    SqsQueue::open(SqsOptions { auto_create: true, ..sqs.clone() }, options.clone()).await.unwrap();
    // Now they are there, by name and by URL.
    SqsQueue::open(sqs.clone(), options.clone()).await.unwrap();
    let client = others().await;
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
    let said = match SqsQueue::open(sqs.clone(), wrong).await.err() {
        Some(error @ SqsOpenError::Differs { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    for part in [
        sqs.queue.as_str(),
        "the visibility timeout is 60 s, configured is 90 s",
        "the redrive limit is 3 receives, configured is 5",
    ] {
        assert!(said.contains(part), "{said}");
    }
    // Another dead-letter queue than the one that the redrive goes to.
    let other = SqsOptions { dead_letter_queue: fresh().dead_letter_queue, ..sqs.clone() };
    let said = SqsQueue::open(other, options.clone()).await.err().unwrap().to_string();
    assert!(said.contains("the redrive goes to arn:aws:sqs:"), "{said}");
    let odd = QueueOptions { retention: Duration::from_secs(3600), ..options };
    let said = SqsQueue::open(sqs, odd).await.err().unwrap().to_string();
    assert!(said.contains("the retention is 345600 s, configured is 3600 s"), "{said}");
}

#[tokio::test]
async fn what_sqs_cannot_do_is_refused_at_once() {
    let odd =
        QueueOptions { lease: Duration::from_secs(13 * 3600), retention: Duration::from_secs(1), ..Default::default() };
    let said = SqsQueue::open(fresh(), odd).await.err().unwrap().to_string();
    assert!(said.contains("12 hours") && said.contains("14 days"), "{said}");
}

#[tokio::test]
async fn copies_of_a_dead_letter_are_one() {
    let sqs = fresh();
    let queue = SqsQueue::open(sqs.clone(), QueueOptions::default()).await.unwrap();
    let id = buried(&queue, "twice").await;
    let other = buried(&queue, "once").await;
    // As a crash between the two steps of a burial leaves it: the message is delivered and buried once more.
    let client = others().await;
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
    assert_eq!(queue.depth().await.unwrap().dead, 1, "all copies left");
    assert_eq!(receive_one(&queue).await.id, id);
    assert!(queue.receive(10, Duration::from_secs(1)).await.unwrap().is_empty(), "it came back twice");
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
    // Both have put back all they took.
    assert_eq!(show(&two.dead_letters(None, 100).await.unwrap()), show(&mine));
    let page = one.dead_letters(Some(&mine[9].id), 10).await.unwrap();
    assert_eq!(show(&page), show(&mine[10..20]));
}

#[tokio::test]
async fn a_message_of_somebody_elses_is_handled_like_ours() {
    let sqs = fresh();
    let options = QueueOptions { receives_max: Some(1), ..leased_for(Duration::from_secs(1)) };
    let queue = SqsQueue::open(sqs.clone(), options).await.unwrap();
    let client = others().await;
    let value = MessageAttributeValue::builder().data_type("String").string_value("v").build().unwrap();
    let send = client.send_message().queue_url(url_of(&client, &sqs.queue).await).message_body("{\"a\":1}");
    let sqs_id = send.message_attributes("k", value).send().await.unwrap().message_id.unwrap();
    let message = receive_one(&queue).await;
    assert_eq!((message.id.0.as_str(), message.body.as_slice()), (sqs_id.as_str(), b"{\"a\":1}".as_slice()));
    // Left alone, SQS moves it to the dead letters; from there it comes back under the same id.
    let deadline = Instant::now() + PATIENCE;
    let letter = loop {
        assert!(queue.receive(1, Duration::from_secs(1)).await.unwrap().is_empty());
        if let Some(letter) = queue.dead_letters(None, 1).await.unwrap().pop() {
            break letter;
        }
        assert!(Instant::now() < deadline, "never moved");
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

/// A queue behind a link that can be broken.
async fn behind_a_link(timeout: Duration) -> (SqsQueue, Proxy) {
    let proxy = Proxy::start(address()).await;
    let sqs = SqsOptions { access: access(&proxy.url()), timeout, connect_timeout: Duration::from_secs(1), ..fresh() };
    (SqsQueue::open(sqs, QueueOptions::default()).await.unwrap(), proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sends_that_come_while_others_are_under_way_share_requests() {
    let (queue, proxy) = behind_a_link(Duration::from_secs(20)).await;
    let before = proxy.connections();
    // Four seconds for a request. Alone, four at a time, no more than 20 would be through before the time is over.
    proxy.set(Mode::Delay(Duration::from_secs(2))).await;
    let mut senders = tokio::task::JoinSet::new();
    for number in 0..100 {
        let queue = queue.clone();
        senders.spawn(async move { queue.send(&[Outgoing::new(number.to_string())]).await.remove(0) });
    }
    while let Some(sent) = senders.join_next().await {
        sent.unwrap().unwrap();
    }
    assert!(proxy.connections() - before <= 16, "more requests at once than allowed");
}

#[tokio::test]
async fn a_server_that_does_not_answer_hangs_nobody() {
    let (queue, proxy) = behind_a_link(Duration::from_secs(2)).await;
    send_one(&queue, Outgoing::new("held")).await;
    let held = receive_one(&queue).await.receipt;
    proxy.set(Mode::BlackHole).await;
    let start = Instant::now();
    let messages: Vec<_> = (0..400).map(|number| Outgoing::new(number.to_string())).collect();
    let verdict = [(held.clone(), "no".into())];
    let (sent, received, acked, buried, extended, depth) = tokio::join!(
        queue.send(&messages),
        queue.receive(10, Duration::from_secs(1)),
        queue.ack(std::slice::from_ref(&held)),
        queue.bury(&verdict),
        queue.extend(std::slice::from_ref(&held), PATIENCE),
        queue.depth(),
    );
    assert!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    // What was asked may have happened; what never left the line has not.
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
    send_one(&queue, Outgoing::new("well again")).await;
}

#[tokio::test]
async fn a_refused_connection_had_no_effect() {
    let (queue, proxy) = behind_a_link(Duration::from_secs(2)).await;
    proxy.set(Mode::Refuse).await;
    proxy.cut().await;
    let sent = queue.send(&[Outgoing::new("a"), Outgoing::new("b")]).await;
    assert!(sent.iter().all(|answer| matches!(answer, Err(QueueError::Unavailable(_)))), "{sent:?}");
    assert!(matches!(queue.receive(1, Duration::ZERO).await, Err(QueueError::Unavailable(_))));
    proxy.set(Mode::Forward).await;
    send_one(&queue, Outgoing::new("c")).await;
    assert_eq!(receive_one(&queue).await.body, b"c");
    assert!(queue.receive(10, Duration::from_secs(1)).await.unwrap().is_empty(), "what was refused came after all");
}

#[tokio::test]
async fn a_burial_whose_answer_was_lost_is_repeated_without_harm() {
    let (queue, proxy) = behind_a_link(Duration::from_secs(2)).await;
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
    assert_eq!(queue.depth().await.unwrap().dead, 0, "a copy was left behind");
}

#[tokio::test]
async fn a_server_that_nobody_vouches_for_is_refused() {
    // LocalStack speaks TLS on the same port, with a certificate of its own making.
    let sqs = SqsOptions { access: access(&format!("https://{}", address())), ..fresh() };
    match SqsQueue::open(sqs, QueueOptions::default()).await.err() {
        Some(SqsOpenError::Unavailable(QueueError::Unavailable(cause))) => {
            assert!(cause.to_string().contains("certificate"), "{cause}");
        }
        other => panic!("{other:?}"),
    }
}

/// Runs the named test of this file again in a process with this environment alone.
fn again_with(test: &str, environment: &[(&str, &str)]) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env_clear()
        .envs(environment.iter().copied())
        .envs([("AGAIN", "1"), ("AWS_EC2_METADATA_DISABLED", "true"), ("BATON_TEST_SQS_URL", server().as_str())])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

fn is_again() -> bool {
    std::env::var_os("AGAIN").is_some()
}

#[test]
fn the_default_chain_signs_in() {
    if !is_again() {
        let environment =
            [("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_ENDPOINT_URL", &server())];
        return again_with("the_default_chain_signs_in", &environment);
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
    if !is_again() {
        return again_with("without_credentials_nothing_is_sent", &[("AWS_ENDPOINT_URL", &server())]);
    }
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let sqs = SqsOptions { access: SqsAccess::Role, ..fresh() };
        let refused = SqsQueue::open(sqs, QueueOptions::default()).await.err();
        assert!(matches!(refused, Some(SqsOpenError::Unavailable(QueueError::Unavailable(_)))), "{refused:?}");
    });
}

/// A server that was replaced by an empty one has no queues: sending, receiving and counting make them again, and nothing
/// is needed from outside.
#[tokio::test]
async fn queues_that_are_gone_are_made_again() {
    let options = fresh();
    let queue = SqsQueue::open(options.clone(), QueueOptions::default()).await.unwrap();
    let others = others().await;
    let gone = || async {
        for name in [&options.queue, &options.dead_letter_queue] {
            let url = others.get_queue_url().queue_name(name).send().await.unwrap().queue_url.unwrap();
            others.delete_queue().queue_url(url).send().await.unwrap();
        }
    };
    gone().await;
    assert!(queue.send(&[Outgoing::new("one"), Outgoing::new("two")]).await.iter().all(Result::is_ok));
    assert_eq!(queue.receive(10, Duration::from_secs(5)).await.unwrap().len(), 2);
    gone().await;
    assert!(queue.receive(10, Duration::ZERO).await.unwrap().is_empty());
    gone().await;
    assert_eq!(queue.depth().await.unwrap().ready, 0);
    // Made as they were: a queue without its redrive policy would not pass.
    let checked = SqsOptions { auto_create: false, ..options.clone() };
    SqsQueue::open(checked.clone(), QueueOptions::default()).await.unwrap();
    // What is not ours to make stays away, and that is said.
    let queue = SqsQueue::open(checked, QueueOptions::default()).await.unwrap();
    gone().await;
    assert!(matches!(queue.send(&[Outgoing::new("three")]).await[..], [Err(QueueError::Unavailable(_))]));
    assert!(queue.receive(1, Duration::ZERO).await.is_err());
}
