//! RabbitMQ on a real broker: the conformance suite, and what is specific to RabbitMQ: lost connections, unroutable
//! messages and crashed consumers.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use pipeline::queue::rabbitmq::{Delays, QueueType, RabbitMqOptions, RabbitMqQueue, SessionPart, Topology};
use pipeline::testing::{Profile, Subject};
use pipeline::{CancellationToken, Message, MessageId, Outgoing, Queue, QueueError, QueueOptions, Receipt};
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(30);
/// Frame header, class and method, delivery tag, `multiple`, frame end.
const ACK_FRAME_BYTES: u64 = 7 + 4 + 8 + 1 + 1;

/// The broker runs on this machine, but each delivery needs a round trip.
fn profile() -> Profile {
    Profile {
        short: Duration::from_millis(500),
        quiet: Duration::from_millis(250),
        tolerance: Duration::from_millis(2),
        ..Profile::fast()
    }
}

fn broker() -> String {
    std::env::var("BATON_TEST_AMQP_URL").expect(
        "BATON_TEST_AMQP_URL is not set: run `scripts/services start` and `eval \"$(scripts/services env)\"` first",
    )
}

/// Deletes the queues when the test ends, also after a panic.
struct Cleanup(RabbitMqQueue);

impl Drop for Cleanup {
    fn drop(&mut self) {
        let clean = async {
            let deadline = Instant::now() + Duration::from_secs(10);
            // The test may have broken the connection.
            while self.0.delete().await.is_err() && Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            self.0.close().await;
        };
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(clean));
    }
}

fn topology(queue_type: QueueType) -> Topology {
    Topology { queue_type, ..Topology::named(format!("test-{}", Uuid::now_v7())) }
}

async fn open(url: &str, topology: Topology, options: QueueOptions) -> (Arc<RabbitMqQueue>, Cleanup) {
    let options = RabbitMqOptions {
        timeout: Duration::from_secs(5),
        heartbeat: Duration::from_secs(2),
        ..RabbitMqOptions::new(url, topology, options)
    };
    let queue = RabbitMqQueue::connect(options).await.unwrap();
    (Arc::new(queue.clone()), Cleanup(queue))
}

async fn subject(queue_type: QueueType, options: QueueOptions) -> Subject {
    let (queue, cleanup) = open(&broker(), topology(queue_type), options).await;
    Subject { queue, keep: Box::new(cleanup) }
}

async fn quorum_queue(options: QueueOptions) -> Subject {
    subject(QueueType::Quorum, options).await
}

async fn classic_queue(options: QueueOptions) -> Subject {
    subject(QueueType::Classic, options).await
}

pipeline::queue_conformance!(quorum, super::profile(), super::quorum_queue);
pipeline::queue_conformance!(classic, super::profile(), super::classic_queue);

/// A queue behind a fault proxy.
async fn behind_a_proxy(options: QueueOptions) -> (Arc<RabbitMqQueue>, Cleanup, Proxy) {
    let url = broker();
    let (user, address_and_vhost) = url.strip_prefix("amqp://").unwrap().split_once('@').unwrap();
    let (address, vhost) = address_and_vhost.split_once('/').unwrap();
    let proxy = Proxy::start(address).await;
    let url = format!("amqp://{user}@{}/{vhost}", proxy.address());
    let (queue, cleanup) = open(&url, topology(QueueType::Quorum), options).await;
    (queue, cleanup, proxy)
}

fn leased_for(lease: Duration) -> QueueOptions {
    QueueOptions { lease, ..QueueOptions::default() }
}

async fn send(queue: &RabbitMqQueue, count: usize) {
    let messages: Vec<_> = (0..count).map(|number| Outgoing::new(format!("message {number}"))).collect();
    for answer in queue.send(&messages).await {
        answer.unwrap();
    }
}

/// Receives exactly `count` messages, in as many receives as needed and across reconnects.
async fn receive(queue: &RabbitMqQueue, count: usize) -> Vec<Message> {
    let deadline = Instant::now() + PATIENCE;
    let mut got = Vec::new();
    while got.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} messages arrived", got.len());
        got.extend(queue.receive(count - got.len(), Duration::from_secs(1)).await.unwrap_or_default());
    }
    got
}

/// Retries a send until the broker accepts the message.
async fn send_when_possible(queue: &RabbitMqQueue, body: &str) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = queue.send(&[Outgoing::new(body)]).await.remove(0) {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn assert_lost(queue: &RabbitMqQueue, receipt: &Receipt) {
    let one = std::slice::from_ref(receipt);
    let answers = [
        queue.ack(one).await.remove(0),
        queue.retry_after(&[(receipt.clone(), Duration::ZERO)]).await.remove(0),
        queue.bury(&[(receipt.clone(), "stale".into())]).await.remove(0),
        queue.extend(one, Duration::from_secs(60)).await.remove(0),
    ];
    assert!(answers.iter().all(|answer| matches!(answer, Err(QueueError::LeaseLost))), "{answers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_cut_unsettled_messages_are_redelivered_and_old_receipts_are_lost() {
    let (queue, _cleanup, proxy) = behind_a_proxy(leased_for(Duration::from_secs(120))).await;
    send(&queue, 5).await;
    let before = receive(&queue, 5).await;
    let passed_on = proxy.bytes_to_server();
    assert!(queue.ack(&[before[0].receipt.clone()]).await[0].is_ok());
    // Acknowledgements are not confirmed. Once this one is on its way, a later call on the same connection is answered
    // after it.
    eventually(PATIENCE, "the acknowledgement to leave", || async {
        (proxy.bytes_to_server() >= passed_on + ACK_FRAME_BYTES).then_some(())
    })
    .await;
    queue.depth().await.unwrap();

    proxy.cut().await;
    send_when_possible(&queue, "after the cut").await;
    let after = receive(&queue, 5).await;

    let bodies: HashSet<_> = after.iter().map(|message| String::from_utf8_lossy(&message.body).into_owned()).collect();
    assert!(bodies.contains("after the cut"), "{bodies:?}");
    assert!(!bodies.contains("message 0"), "acknowledged before the cut: {bodies:?}");
    for message in after.iter().filter(|message| message.body != b"after the cut") {
        assert_eq!(message.receives, 2, "{message:?}");
    }
    for message in &before {
        assert_lost(&queue, &message.receipt).await;
    }
    let receipts: Vec<_> = after.iter().map(|message| message.receipt.clone()).collect();
    assert!(queue.ack(&receipts).await.iter().all(Result::is_ok));
    assert!(queue.receive(10, Duration::from_millis(500)).await.unwrap().is_empty());
    assert_eq!(queue.depth().await.unwrap().ready, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cuts_during_traffic_lose_no_confirmed_message() {
    let (queue, _cleanup, proxy) = behind_a_proxy(leased_for(Duration::from_secs(120))).await;
    let done = CancellationToken::new();
    let sender = {
        let (queue, done) = (Arc::clone(&queue), done.clone());
        tokio::spawn(async move {
            let mut confirmed = HashSet::new();
            for round in 0.. {
                if done.is_cancelled() {
                    break;
                }
                let messages: Vec<_> = (0..20).map(|number| Outgoing::new(format!("{round}.{number}"))).collect();
                for answer in queue.send(&messages).await {
                    match answer {
                        Ok(id) => drop(confirmed.insert(id)),
                        Err(error) => assert!(error.is_transient(), "{error}"),
                    }
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            confirmed
        })
    };
    let mut seen = HashSet::new();
    let mut cuts = 0;
    while !sender.is_finished() {
        for message in queue.receive(10, Duration::from_millis(200)).await.unwrap_or_default() {
            // Only a settled message counts: an unsettled one is delivered again.
            if queue.ack(&[message.receipt]).await[0].is_ok() {
                seen.insert(message.id);
            }
        }
        if cuts < 5 && seen.len() > cuts * 100 {
            cuts += 1;
            proxy.cut().await;
        } else if seen.len() > 500 {
            done.cancel();
        }
    }
    let confirmed = sender.await.unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !confirmed.is_subset(&seen) {
        assert!(Instant::now() < deadline, "{} lost", confirmed.difference(&seen).count());
        for message in queue.receive(100, Duration::from_millis(500)).await.unwrap_or_default() {
            if queue.ack(&[message.receipt]).await[0].is_ok() {
                seen.insert(message.id);
            }
        }
    }
    assert_eq!(cuts, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_ends_within_its_time_limit_on_a_frozen_broker() {
    let (queue, _cleanup, proxy) = behind_a_proxy(leased_for(Duration::from_secs(120))).await;
    send(&queue, 2).await;
    let held = receive(&queue, 1).await.remove(0);

    proxy.set(Mode::BlackHole).await;
    let start = Instant::now();
    let message = [Outgoing::new("into the void")];
    let (sent, depth, letters, received) = tokio::join!(
        queue.send(&message),
        queue.depth(),
        queue.dead_letters(None, 1),
        queue.receive(5, Duration::from_secs(1)),
    );
    assert!(matches!(sent[..], [Err(QueueError::OutcomeUnknown(_))]), "{sent:?}");
    assert!(matches!(depth, Err(QueueError::Unavailable(_))), "{depth:?}");
    assert!(matches!(letters, Err(QueueError::Unavailable(_))), "{letters:?}");
    assert!(received.is_err() || received.as_ref().is_ok_and(Vec::is_empty), "{received:?}");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    // Missed heartbeats end the connection, and reconnecting fails.
    let deadline = Instant::now() + PATIENCE;
    while queue.receive(1, Duration::ZERO).await.is_ok() {
        assert!(Instant::now() < deadline);
    }
    let sent = queue.send(&[Outgoing::new("x")]).await;
    assert!(matches!(sent[..], [Err(QueueError::Unavailable(_))]), "{sent:?}");
    assert_lost(&queue, &held.receipt).await;

    proxy.set(Mode::Forward).await;
    send_when_possible(&queue, "back").await;
    let ids: HashSet<_> = receive(&queue, 3).await.into_iter().map(|message| message.id).collect();
    assert!(ids.contains(&held.id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_answer_unavailable_while_the_connection_is_refused() {
    let (queue, _cleanup, proxy) = behind_a_proxy(leased_for(Duration::from_secs(120))).await;
    send(&queue, 1).await;
    proxy.set(Mode::Refuse).await;
    let deadline = Instant::now() + PATIENCE;
    // The cut may hit a publish in flight once, whose outcome is unknown.
    while !matches!(queue.send(&[Outgoing::new("x")]).await.remove(0), Err(QueueError::Unavailable(_))) {
        assert!(Instant::now() < deadline);
    }
    assert!(matches!(queue.receive(1, Duration::ZERO).await, Err(QueueError::Unavailable(_))));
    assert!(matches!(queue.depth().await, Err(QueueError::Unavailable(_))));
    proxy.set(Mode::Forward).await;
    receive(&queue, 1).await;
}

/// Sends and buries this many messages.
async fn bury(queue: &RabbitMqQueue, count: usize) {
    send(queue, count).await;
    let held = receive(queue, count).await.into_iter();
    let entries: Vec<_> = held.map(|message| (message.receipt, "test".to_owned())).collect();
    assert!(queue.bury(&entries).await.iter().all(Result::is_ok));
}

async fn dead_ids(queue: &RabbitMqQueue) -> Vec<MessageId> {
    queue.dead_letters(None, usize::MAX).await.unwrap().into_iter().map(|letter| letter.id).collect()
}

/// The broker forgot most of 100 acknowledgements when their channel was closed before a busy queue had applied them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discarded_dead_letters_do_not_come_back() {
    const LETTERS: usize = 100;
    let (queue, _cleanup) = open(&broker(), topology(QueueType::Quorum), leased_for(Duration::from_secs(120))).await;
    let (other, _cleanup) = open(&broker(), topology(QueueType::Quorum), QueueOptions::default()).await;
    // All quorum queues share one log: large messages keep it busy.
    let done = CancellationToken::new();
    let load = {
        let (other, done) = (Arc::clone(&other), done.clone());
        tokio::spawn(async move {
            let large = vec![Outgoing::new("x".repeat(100_000)); 50];
            while !done.is_cancelled() {
                assert!(other.send(&large).await.iter().all(Result::is_ok));
            }
        })
    };
    for round in 0..10 {
        bury(&queue, LETTERS).await;
        let ids = dead_ids(&queue).await;
        assert_eq!(ids.len(), LETTERS, "round {round}: those of the round before are there again");
        assert!(queue.discard(&ids).await.iter().all(Result::is_ok));
    }
    done.cancel();
    load.await.unwrap();
}

/// Replaying one after the other, it ran into its own time limit: each waits for a confirm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_dead_letters_are_replayed_within_one_call() {
    const LETTERS: usize = 1000;
    let (queue, _cleanup, proxy) = behind_a_proxy(leased_for(Duration::from_secs(120))).await;
    bury(&queue, LETTERS).await;
    let mut ids = dead_ids(&queue).await;
    assert_eq!(ids.len(), LETTERS);
    let unknown = MessageId("unknown".into());
    ids.insert(LETTERS / 2, unknown.clone());
    // A confirm takes 20 ms, and the call has 5 s.
    proxy.set(Mode::Delay(Duration::from_millis(10))).await;
    for (id, answer) in ids.iter().zip(queue.replay(&ids, Duration::ZERO).await) {
        assert!(answer.is_ok() || *id == unknown && matches!(answer, Err(QueueError::NotFound)), "{id}: {answer:?}");
    }
    proxy.set(Mode::Forward).await;
    assert_eq!(queue.depth().await.unwrap().dead, 0);
    let back: HashSet<_> = receive(&queue, LETTERS).await.into_iter().map(|message| message.id).collect();
    assert_eq!(back.len(), LETTERS);
}

/// The queue took no message until its process was restarted, or its connection happened to break.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_panic_in_a_part_of_a_session_the_queue_reconnects() {
    let (queue, _cleanup) = open(&broker(), topology(QueueType::Quorum), leased_for(Duration::from_secs(120))).await;
    for part in [SessionPart::Publishing, SessionPart::Consuming] {
        send(&queue, 1).await;
        let held = receive(&queue, 1).await.remove(0);
        queue.panic_once(part);
        eventually(PATIENCE, format!("the session to end by a panic in {part:?}"), || async {
            let extended = queue.extend(std::slice::from_ref(&held.receipt), Duration::from_secs(120)).await;
            matches!(extended[..], [Err(QueueError::LeaseLost)]).then_some(())
        })
        .await;

        send_when_possible(&queue, "after the panic").await;
        let after = receive(&queue, 2).await;
        assert!(after.iter().any(|message| message.id == held.id), "the one in hand is redelivered: {after:?}");
        let receipts: Vec<_> = after.into_iter().map(|message| message.receipt).collect();
        assert!(queue.ack(&receipts).await.iter().all(Result::is_ok));
        assert_eq!(queue.depth().await.unwrap().ready, 0);
    }
}

async fn delete_queue(name: &str) {
    let connection = Connection::connect(&broker(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    // Deleting a missing queue is no error, so check first that it exists.
    let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(name.into(), look, FieldTable::default()).await.unwrap();
    channel.queue_delete(name.into(), QueueDeleteOptions::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_send_to_a_deleted_queue_fails_and_the_queue_is_created_again() {
    let (queue, _cleanup) = open(&broker(), topology(QueueType::Quorum), QueueOptions::default()).await;
    send(&queue, 1).await;
    delete_queue(queue.name()).await;
    let answers = queue.send(&vec![Outgoing::new("nowhere to go"); 10]).await;
    assert!(matches!(answers[0], Err(QueueError::Unavailable(_))), "{answers:?}");
    // The first answer makes the queue anew, so that the last ones may find it.
    let mut accepted = 0;
    for answer in &answers[..] {
        match answer {
            Ok(_) => accepted += 1,
            Err(failure) => assert!(matches!(failure, QueueError::Unavailable(_)), "{answers:?}"),
        }
    }
    send_when_possible(&queue, "found").await;
    let received = receive(&queue, accepted + 1).await;
    assert_eq!(received.len(), accepted + 1, "{answers:?}");
    assert_eq!(received.iter().filter(|message| message.body == b"found").count(), 1);
    let refused = queue.receive(10, Duration::from_millis(500)).await.unwrap();
    assert!(refused.is_empty(), "what was refused is not there: {answers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unroutable_message_is_never_confused_with_another() {
    let (queue, _cleanup) = open(&broker(), topology(QueueType::Quorum), QueueOptions::default()).await;
    // Delays that are not rounded, so that the test knows the names of their queues.
    let delays_ms: Vec<_> = (8..16).flat_map(|step| [step * 32_768, step * 65_536, step * 131_072]).collect();
    let delayed = |ms: &u64| Outgoing::new("nowhere to go").delayed(Duration::from_millis(*ms));
    for answer in queue.send(&delays_ms.iter().map(delayed).collect::<Vec<_>>()).await {
        answer.unwrap();
    }
    // Delete the delay queues without the queue's knowledge.
    let hour = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 3600;
    for ms in &delays_ms {
        delete_queue(&format!("{}.delay.{ms}ms.{hour}", queue.name())).await;
    }
    // Send routable messages concurrently, so that their confirms interleave.
    let done = CancellationToken::new();
    let others = {
        let (queue, done) = (Arc::clone(&queue), done.clone());
        tokio::spawn(async move {
            let mut stored = HashSet::new();
            while !done.is_cancelled() {
                for answer in queue.send(&vec![Outgoing::new("to the queue"); 7]).await {
                    stored.insert(answer.expect("it can be routed"));
                }
            }
            stored
        })
    };
    let refused = queue.send(&delays_ms[1..].iter().map(delayed).collect::<Vec<_>>()).await;
    let last = queue.send(&[delayed(&delays_ms[0])]).await;
    done.cancel();
    let stored = others.await.unwrap();
    for answer in refused.iter().chain(&last) {
        assert!(matches!(answer, Err(QueueError::Unavailable(_))), "{answer:?}");
    }
    let got: HashSet<_> = receive(&queue, stored.len()).await.into_iter().map(|message| message.id).collect();
    assert_eq!(got, stored);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deliveries_to_crashed_consumers_count_and_too_many_bury() {
    let topology = topology(QueueType::Quorum);
    let options = QueueOptions { receives_max: Some(2), ..QueueOptions::default() };
    let (queue, _cleanup) = open(&broker(), topology.clone(), options.clone()).await;
    send(&queue, 1).await;
    for receives in 1..=2 {
        let crashing = RabbitMqOptions::new(broker(), topology.clone(), options.clone());
        let crashing = RabbitMqQueue::connect(crashing).await.unwrap();
        assert_eq!(receive(&crashing, 1).await[0].receives, receives);
        crashing.close().await;
    }
    assert!(queue.receive(1, Duration::from_secs(1)).await.unwrap().is_empty());
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!((letters.len(), letters[0].receives, letters[0].by_queue), (1, 2, true), "{letters:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_without_a_waiting_receiver_go_to_other_processes() {
    let topology = topology(QueueType::Quorum);
    let (queue, _cleanup) = open(&broker(), topology.clone(), QueueOptions::default()).await;
    let other = RabbitMqOptions::new(broker(), topology, QueueOptions::default());
    let other = RabbitMqQueue::connect(other).await.unwrap();
    // Both have received and stopped waiting; deliveries that their consumers still get have no receiver.
    assert!(queue.receive(10, Duration::ZERO).await.unwrap().is_empty());
    assert!(other.receive(10, Duration::ZERO).await.unwrap().is_empty());
    send(&queue, 20).await;
    let got = receive(&other, 20).await;
    assert_eq!(got.iter().map(|message| &message.id).collect::<HashSet<_>>().len(), 20);
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_arrives_right_after_another_receive_wakes_a_receiver() {
    let (queue, _cleanup) = open(&broker(), topology(QueueType::Quorum), QueueOptions::default()).await;
    for round in 0..200 {
        // The receiver that gets the first message does not receive again: the second message goes to the other receiver
        // or arrives together with the first.
        let mut receivers = JoinSet::new();
        for _ in 0..2 {
            let queue = queue.clone();
            receivers.spawn(async move { queue.receive(10, Duration::from_secs(3600)).await.unwrap() });
        }
        tokio::join!(send(&queue, 1), send(&queue, 1));
        let mut got = Vec::new();
        while got.len() < 2 {
            let served = tokio::time::timeout(PATIENCE, receivers.join_next()).await;
            let served = served.unwrap_or_else(|_| panic!("round {round}: {} of 2 were received", got.len()));
            got.extend(served.expect("a receiver is left").unwrap());
        }
        let receipts: Vec<_> = got.into_iter().map(|message| message.receipt).collect();
        assert!(queue.ack(&receipts).await.iter().all(Result::is_ok));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_queue_keeps_the_order_of_messages_that_are_not_returned() {
    let (queue, _cleanup) = open(&broker(), topology(QueueType::Quorum), QueueOptions::default()).await;
    send(&queue, 200).await;
    let text = |message: Message| String::from_utf8_lossy(&message.body).into_owned();
    let bodies: Vec<_> = receive(&queue, 200).await.into_iter().map(text).collect();
    let sent: Vec<_> = (0..200).map(|number| format!("message {number}")).collect();
    assert_eq!(bodies, sent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_given_topology_with_one_delay_is_used_as_it_is() {
    let prefix = format!("test-{}", Uuid::now_v7());
    let topology = Topology {
        exchange: format!("{prefix}-exchange"),
        queue: format!("{prefix}-queue"),
        dead_exchange: format!("{prefix}-dlx"),
        dead_queue: format!("{prefix}-dlq"),
        delays: Delays::Fixed {
            exchange: format!("{prefix}-retry-exchange"),
            queue: format!("{prefix}-retry"),
            ttl: Duration::from_millis(300),
        },
        queue_type: QueueType::Classic,
        create: true,
    };
    let exchanges =
        [&topology.exchange, &topology.dead_exchange, &format!("{prefix}-retry-exchange")].map(Clone::clone);
    let (queue, cleanup) = open(&broker(), topology, QueueOptions::default()).await;
    send(&queue, 1).await;
    let first = receive(&queue, 1).await.remove(0);
    let start = Instant::now();
    // Longer than the queue's TTL, so the message passes the delay queue three times.
    queue.retry_after(&[(first.receipt, Duration::from_millis(700))]).await.remove(0).unwrap();
    assert_eq!(queue.depth().await.unwrap().delayed, 1);
    let second = receive(&queue, 1).await.remove(0);
    assert!(start.elapsed() >= Duration::from_millis(700), "{:?}", start.elapsed());
    assert_eq!((second.id, second.receives), (first.id, 2));
    queue.bury(&[(second.receipt, "enough".into())]).await.remove(0).unwrap();
    assert_eq!(queue.dead_letters(None, 10).await.unwrap()[0].reason, "enough");
    drop(cleanup);
    let connection = Connection::connect(&broker(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    for exchange in exchanges {
        channel.exchange_delete(exchange.into(), Default::default()).await.unwrap();
    }
}
