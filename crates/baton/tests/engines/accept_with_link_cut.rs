//! The API loses its link to the store or the queue while it accepts a request. Each answer (202, 503, 504) must stay true.

use harness::engine::{TestEngine, address};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::relay_fixture::{RelayFixture, RelaySetup, SOON, serial_body, serial_data};

/// A relay whose API reaches store and queue through proxies; the consumer reaches them directly.
struct ProxiedApi {
    relay: RelayFixture,
    store: Proxy,
    queue: Proxy,
}

async fn start(engine: TestEngine) -> ProxiedApi {
    let (store_variable, queue_variable, queue_server) = match engine {
        TestEngine::MySqlSqs => ("DATABASE_URL", "SQS_ENDPOINT_URL", "BATON_TEST_SQS_URL"),
        TestEngine::MySqlRabbitMq => ("DATABASE_URL", "RABBITMQ_URL", "BATON_TEST_AMQP_URL"),
        TestEngine::Embedded => panic!("the embedded engine has no links"),
    };
    let store = Proxy::start(address("BATON_TEST_MYSQL_URL")).await;
    let queue = Proxy::start(address(queue_server)).await;
    let relay = RelaySetup::relayers(2)
        .engine(engine)
        .api_behind(store_variable, &store)
        .api_behind(queue_variable, &queue)
        .env("REQUEST_TIMEOUT_MS", "6000")
        .env("RECONCILE_PENDING_MS", "3000")
        .env("QUEUE_LEASE_MS", "2000")
        .split()
        .start()
        .await;
    relay.warm_up().await;
    ProxiedApi { relay, store, queue }
}

impl ProxiedApi {
    /// Sends one more transaction and waits until all are final: by then every earlier request has had its effect.
    async fn until_settled(&self, serial: usize) {
        eventually(SOON, "the API to accept again", || async {
            let (status, _) = self.relay.post(&serial_body(serial)).await;
            (status == 202).then_some(())
        })
        .await;
        self.relay.until_all_final(SOON).await;
    }

    /// Waits until a row is stored: the API's next step is to queue it.
    async fn until_stored(&self) {
        eventually(SOON, "the stored row", || async {
            let (_, page) = self.relay.get("/api/v1/relay/transactions?status=pending").await;
            page["transactions"].as_array().is_some_and(|rows| !rows.is_empty()).then_some(())
        })
        .await;
    }

    /// The number of effects at the relayers.
    fn effects(&self, serial: usize) -> usize {
        let data = serial_data(serial);
        self.relay.relayers.iter().flat_map(|relayer| relayer.effects()).filter(|at| at.field("data") == data).count()
    }
}

async fn a_request_with_503_while_the_queue_is_down_has_no_effect(engine: TestEngine) {
    let api = start(engine).await;
    api.queue.set(Mode::Refuse).await;
    let (status, body) = api.relay.post(&serial_body(1)).await;
    assert_eq!(status, 503, "{body}");
    api.queue.set(Mode::Forward).await;
    api.until_settled(2).await;
    assert_eq!((api.effects(1), api.effects(2)), (0, 1), "503 promises no effect");
}

async fn a_request_with_503_while_the_store_is_down_has_no_effect(engine: TestEngine) {
    let api = start(engine).await;
    api.store.set(Mode::Refuse).await;
    let (status, body) = api.relay.post(&serial_body(1)).await;
    assert_eq!(status, 503, "{body}");
    api.store.set(Mode::Forward).await;
    api.until_settled(2).await;
    assert_eq!((api.effects(1), api.effects(2)), (0, 1));
}

/// The queue has the message and its answer is lost. If a consumer has claimed the row meanwhile, the API answers 202.
async fn a_lost_answer_of_the_queue_still_gives_a_true_answer_to_the_client(engine: TestEngine) {
    let api = start(engine).await;
    api.queue.set(Mode::SwallowAnswers).await;
    let (status, body) = api.relay.post(&serial_body(1)).await;
    api.queue.set(Mode::Cut).await;
    api.queue.set(Mode::Forward).await;
    api.until_settled(2).await;
    match status {
        202 => assert_eq!(api.effects(1), 1),
        503 => assert_eq!(api.effects(1), 0),
        other => panic!("{other}: {body}"),
    }
}

/// Two equal requests under one key while the queue is silent: the second gets 202 for the first one's row, so the API
/// cannot withdraw that row any more.
async fn a_duplicate_request_is_answered_with_the_accepted_transaction(engine: TestEngine) {
    let api = start(engine).await;
    api.queue.set(Mode::BlackHole).await;
    let body = serial_body(1);
    let post = || async {
        let request = api.relay.request(reqwest::Method::POST, "/api/v1/relay/direct");
        let answer = request.header("idempotency-key", "one").json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let second = async {
        api.until_stored().await;
        post().await
    };
    let (first, second) = tokio::join!(post(), second);
    api.queue.set(Mode::Cut).await;
    api.queue.set(Mode::Forward).await;
    assert_eq!((first.0, second.0), (202, 202), "{first:?} {second:?}");
    api.until_settled(2).await;
    assert_eq!((api.effects(1), api.effects(2)), (1, 1));
}

/// A client that gets 503 and repeats the request under the same key is accepted, once.
async fn after_503_the_same_key_is_accepted(engine: TestEngine) {
    let api = start(engine).await;
    let post = || async {
        let request = api.relay.request(reqwest::Method::POST, "/api/v1/relay/direct");
        request.header("idempotency-key", "one").json(&serial_body(1)).send().await.unwrap().status().as_u16()
    };
    api.queue.set(Mode::Refuse).await;
    assert_eq!((post().await, post().await), (503, 503));
    api.queue.set(Mode::Forward).await;
    eventually(SOON, "the request to be accepted", || async { (post().await == 202).then_some(()) }).await;
    assert_eq!(post().await, 202);
    api.relay.until_all_final(SOON).await;
    assert_eq!(api.effects(1), 1);
}

/// The row is stored, the queue is silent, and then the store is unavailable too: the API cannot know the outcome, and gives
/// the client the transaction's id to ask for it later.
async fn an_unknown_outcome_gets_504_and_the_transaction_id(engine: TestEngine) {
    let api = start(engine).await;
    api.queue.set(Mode::BlackHole).await;
    let body = serial_body(1);
    let post = api.relay.post(&body);
    let cut = async {
        api.until_stored().await;
        api.store.set(Mode::Refuse).await;
    };
    let ((status, body), ()) = tokio::join!(post, cut);
    assert_eq!(status, 504, "{body}");
    let id = body["transactionId"].as_str().unwrap().to_owned();
    api.store.set(Mode::Forward).await;
    api.queue.set(Mode::Cut).await;
    api.queue.set(Mode::Forward).await;
    eventually(SOON, "the status to be readable", || async {
        let (status, _) = api.relay.get(&format!("/api/v1/relay/status/{id}")).await;
        (status == 200).then_some(())
    })
    .await;
    api.relay.until_all_final(SOON).await;
    let row = api.relay.status(&id).await;
    assert_eq!(row["status"] == "confirmed", api.effects(1) == 1, "{row}");
    assert!(api.effects(1) <= 1);
}

macro_rules! on_each_engine {
    ($($test:ident),* $(,)?) => {
        mod sqs {
            $(#[tokio::test]
            async fn $test() {
                super::$test(harness::engine::TestEngine::MySqlSqs).await;
            })*
        }
        mod rabbitmq {
            $(#[tokio::test]
            async fn $test() {
                super::$test(harness::engine::TestEngine::MySqlRabbitMq).await;
            })*
        }
    };
}

on_each_engine!(
    a_request_with_503_while_the_queue_is_down_has_no_effect,
    a_request_with_503_while_the_store_is_down_has_no_effect,
    a_lost_answer_of_the_queue_still_gives_a_true_answer_to_the_client,
    a_duplicate_request_is_answered_with_the_accepted_transaction,
    after_503_the_same_key_is_accepted,
    an_unknown_outcome_gets_504_and_the_transaction_id
);
