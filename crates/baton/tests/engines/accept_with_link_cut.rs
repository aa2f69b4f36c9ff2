//! A link is cut at the very moment that matters, and each of the three answers (202, 503, 504) must stay true for ever.

use harness::engine::{Engine, address};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::relay_fixture::{Plan, SOON, Stand, serial_body, serial_data};

/// The API behind links to its servers; the consumer reaches them directly.
struct Links {
    stand: Stand,
    store: Proxy,
    queue: Proxy,
}

async fn links(engine: Engine) -> Links {
    let (store_variable, queue_variable, queue_server) = match engine {
        Engine::MySqlSqs => ("DATABASE_URL", "SQS_ENDPOINT_URL", "BATON_TEST_SQS_URL"),
        Engine::MySqlRabbitMq => ("DATABASE_URL", "RABBITMQ_URL", "BATON_TEST_AMQP_URL"),
        Engine::Embedded => panic!("one commit: there are no links"),
    };
    let store = Proxy::start(address("BATON_TEST_MYSQL_URL")).await;
    let queue = Proxy::start(address(queue_server)).await;
    let stand = Plan::relayers(2)
        .engine(engine)
        .api_behind(store_variable, &store)
        .api_behind(queue_variable, &queue)
        .env("REQUEST_TIMEOUT_MS", "6000")
        .env("RECONCILE_PENDING_MS", "3000")
        .env("QUEUE_LEASE_MS", "2000")
        .split()
        .start()
        .await;
    stand.warm_up().await;
    Links { stand, store, queue }
}

impl Links {
    /// Waits until a transaction that is sent now is confirmed: everything that was to come has had its turn.
    async fn pass(&self, serial: usize) {
        eventually(SOON, "the API to accept again", || async {
            let (status, _) = self.stand.post(&serial_body(serial)).await;
            (status == 202).then_some(())
        })
        .await;
        self.stand.until_all_final(SOON).await;
    }

    /// Waits until a row is stored: the next thing is the queue.
    async fn row(&self) {
        eventually(SOON, "the row", || async {
            let (_, page) = self.stand.get("/api/v1/relay/transactions?status=pending").await;
            page["transactions"].as_array().is_some_and(|rows| !rows.is_empty()).then_some(())
        })
        .await;
    }

    fn times(&self, serial: usize) -> usize {
        let data = serial_data(serial);
        self.stand.relayers.iter().flat_map(|relayer| relayer.effects()).filter(|at| at.field("data") == data).count()
    }
}

async fn the_queue_is_down(engine: Engine) {
    let links = links(engine).await;
    links.queue.set(Mode::Refuse).await;
    let (status, body) = links.stand.post(&serial_body(1)).await;
    assert_eq!(status, 503, "{body}");
    links.queue.set(Mode::Forward).await;
    links.pass(2).await;
    assert_eq!((links.times(1), links.times(2)), (0, 1), "503 means that it will never happen");
}

async fn the_store_is_down(engine: Engine) {
    let links = links(engine).await;
    links.store.set(Mode::Refuse).await;
    let (status, body) = links.stand.post(&serial_body(1)).await;
    assert_eq!(status, 503, "{body}");
    links.store.set(Mode::Forward).await;
    links.pass(2).await;
    assert_eq!((links.times(1), links.times(2)), (0, 1));
}

/// The queue has the message, and the API does not hear of it. A consumer is quick: it is under way, and that is what
/// the client is told.
async fn the_queues_answer_is_lost_and_a_consumer_has_it(engine: Engine) {
    let links = links(engine).await;
    links.queue.set(Mode::SwallowAnswers).await;
    let (status, body) = links.stand.post(&serial_body(1)).await;
    links.queue.set(Mode::Cut).await;
    links.queue.set(Mode::Forward).await;
    links.pass(2).await;
    match status {
        202 => assert_eq!(links.times(1), 1),
        503 => assert_eq!(links.times(1), 0),
        other => panic!("{other}: {body}"),
    }
}

/// The same request twice under one key, while the queue is silent: the second is told 202 for the row of the first,
/// so the first cannot take it back any more.
async fn a_twin_was_promised_it(engine: Engine) {
    let links = links(engine).await;
    links.queue.set(Mode::BlackHole).await;
    let body = serial_body(1);
    let post = || async {
        let request = links.stand.request(reqwest::Method::POST, "/api/v1/relay/direct");
        let answer = request.header("idempotency-key", "one").json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let second = async {
        links.row().await;
        post().await
    };
    let (first, second) = tokio::join!(post(), second);
    links.queue.set(Mode::Cut).await;
    links.queue.set(Mode::Forward).await;
    assert_eq!((first.0, second.0), (202, 202), "{first:?} {second:?}");
    links.pass(2).await;
    assert_eq!((links.times(1), links.times(2)), (1, 1));
}

/// A client that was told 503 and sends the same request again under the same key is served, once.
async fn a_key_is_free_again_after_503(engine: Engine) {
    let links = links(engine).await;
    let post = || async {
        let request = links.stand.request(reqwest::Method::POST, "/api/v1/relay/direct");
        request.header("idempotency-key", "one").json(&serial_body(1)).send().await.unwrap().status().as_u16()
    };
    links.queue.set(Mode::Refuse).await;
    assert_eq!((post().await, post().await), (503, 503));
    links.queue.set(Mode::Forward).await;
    eventually(SOON, "the request to be accepted", || async { (post().await == 202).then_some(()) }).await;
    assert_eq!(post().await, 202);
    links.stand.until_all_final(SOON).await;
    assert_eq!(links.times(1), 1);
}

/// The row is stored, the queue is silent, and then the store is away too: nobody can tell, and the client is given the
/// id under which it can ask.
async fn nobody_can_tell(engine: Engine) {
    let links = links(engine).await;
    links.queue.set(Mode::BlackHole).await;
    let body = serial_body(1);
    let post = links.stand.post(&body);
    let cut = async {
        links.row().await;
        links.store.set(Mode::Refuse).await;
    };
    let ((status, body), ()) = tokio::join!(post, cut);
    assert_eq!(status, 504, "{body}");
    let id = body["transactionId"].as_str().unwrap().to_owned();
    links.store.set(Mode::Forward).await;
    links.queue.set(Mode::Cut).await;
    links.queue.set(Mode::Forward).await;
    eventually(SOON, "the status to be readable", || async {
        let (status, _) = links.stand.get(&format!("/api/v1/relay/status/{id}")).await;
        (status == 200).then_some(())
    })
    .await;
    links.stand.until_all_final(SOON).await;
    let row = links.stand.status(&id).await;
    assert_eq!(row["status"] == "confirmed", links.times(1) == 1, "{row}");
    assert!(links.times(1) <= 1);
}

macro_rules! on_each_engine {
    ($($story:ident),* $(,)?) => {
        mod sqs {
            $(#[tokio::test]
            async fn $story() {
                super::$story(harness::engine::Engine::MySqlSqs).await;
            })*
        }
        mod rabbitmq {
            $(#[tokio::test]
            async fn $story() {
                super::$story(harness::engine::Engine::MySqlRabbitMq).await;
            })*
        }
    };
}

on_each_engine!(
    the_queue_is_down,
    the_store_is_down,
    the_queues_answer_is_lost_and_a_consumer_has_it,
    a_twin_was_promised_it,
    a_key_is_free_again_after_503,
    nobody_can_tell
);
