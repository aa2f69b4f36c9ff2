//! The users lane on RabbitMQ and PostgreSQL: beside the existing service on one broker, and with links that are cut between
//! a request and its answer.

use std::time::Instant;

use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;
use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
    QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use serde_json::json;
use uuid::Uuid;

use crate::users_fixture::{SOON, Servers, UsersFixture, UsersSetup, user};

/// Does on the broker what the existing service does: declares, publishes and reads.
struct Elixir {
    channel: Channel,
    name: String,
    _connection: Connection,
}

impl Elixir {
    async fn connect(name: &str) -> Self {
        let connection = Connection::connect(&Servers::shared().amqp, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        Self { channel, name: name.to_owned(), _connection: connection }
    }

    fn named(&self, what: &str) -> String {
        format!("{}_{what}", self.name)
    }

    /// Declares its exchanges and queues, with its argument types: text as long strings, numbers as 64 bits (`:long`).
    async fn declare(&self, ttl_ms: i64) -> lapin::Result<()> {
        for exchange in ["exchange", "retry_exchange", "dlx"] {
            let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
            let name = self.named(exchange).into();
            self.channel.exchange_declare(name, ExchangeKind::Direct, options, FieldTable::default()).await?;
        }
        let text = |value: String| AMQPValue::LongString(value.into());
        let queues = [
            ("dlx", "dlq", vec![]),
            (
                "exchange",
                "queue",
                vec![
                    ("x-dead-letter-exchange", text(self.named("dlx"))),
                    ("x-dead-letter-routing-key", text(self.named("dlq"))),
                ],
            ),
            (
                "retry_exchange",
                "retry_10s",
                vec![
                    ("x-message-ttl", AMQPValue::LongLongInt(ttl_ms)),
                    ("x-dead-letter-exchange", text(self.named("exchange"))),
                    ("x-dead-letter-routing-key", text(self.named("queue"))),
                ],
            ),
        ];
        for (exchange, queue, arguments) in queues {
            let mut table = FieldTable::default();
            for (name, value) in arguments {
                table.insert(name.into(), value);
            }
            let options = QueueDeclareOptions { durable: true, ..Default::default() };
            let (queue, exchange) = (self.named(queue), self.named(exchange));
            self.channel.queue_declare(queue.as_str().into(), options, table).await?;
            let (options, none) = (QueueBindOptions::default(), FieldTable::default());
            self.channel.queue_bind(queue.as_str().into(), exchange.into(), queue.into(), options, none).await?;
        }
        Ok(())
    }

    /// Publishes as it does: persistent, without an id or our headers.
    async fn publish(&self, exchange: &str, queue: &str, body: &[u8], headers: FieldTable) {
        let properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
        let (exchange, key) = (self.named(exchange).into(), self.named(queue).into());
        let options = BasicPublishOptions::default();
        let confirm = self.channel.basic_publish(exchange, key, options, body, properties).await.unwrap();
        assert!(confirm.await.unwrap().is_ack());
    }

    /// Waits for a message in a queue and takes it.
    async fn take(&self, queue: &str) -> (Vec<u8>, FieldTable) {
        let queue = self.named(queue);
        let taken = eventually(SOON, format!("a message in {queue}"), || async {
            self.channel.basic_get(queue.as_str().into(), BasicGetOptions::default()).await.unwrap()
        })
        .await;
        taken.delivery.ack(BasicAckOptions::default()).await.unwrap();
        (taken.delivery.data, taken.delivery.properties.headers().clone().unwrap_or_default())
    }
}

fn name(fixture: &UsersFixture) -> String {
    fixture.env["USERS_QUEUE_NAME"].clone()
}

#[tokio::test]
async fn the_existing_service_and_baton_declare_the_same_queues() {
    let fixture = UsersSetup::on(Servers::shared()).start().await;
    let elixir = Elixir::connect(&name(&fixture)).await;
    elixir.declare(300).await.unwrap();

    let theirs = format!("baton_{}", Uuid::new_v4().simple());
    Elixir::connect(&theirs).await.declare(300).await.unwrap();
    let fixture = UsersSetup::on(Servers::shared()).env("USERS_QUEUE_NAME", &theirs).start().await;
    fixture.enrol(1).await;

    let other_time = Elixir::connect(&theirs).await;
    assert!(other_time.declare(301).await.is_err(), "the broker compares the arguments");
}

#[tokio::test]
async fn the_existing_service_and_baton_read_each_others_messages() {
    let mut fixture = UsersSetup::on(Servers::shared()).start().await;
    let elixir = Elixir::connect(&name(&fixture)).await;
    let id = fixture.enrol(1).await;
    let (body, headers) = elixir.take("queue").await;
    let read: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(read, json!({ "id": id, "name": "User 1", "email": "user-1@example.com" }));
    assert!(!headers.contains_key("x-retries"));

    fixture.add_consumer().await;
    let theirs = Uuid::new_v4();
    let body = json!({ "id": theirs, "name": "John Silva", "email": "john@email.com" }).to_string();
    elixir.publish("exchange", "queue", body.as_bytes(), FieldTable::default()).await;
    let found = fixture.until_enrolled(&theirs.to_string()).await;
    assert_eq!(found["name"], "John Silva");
    elixir.publish("exchange", "queue", b"{not json", FieldTable::default()).await;
    eventually(SOON, "it to be quarantined", || async { (fixture.count().await.2 == 1).then_some(()) }).await;
    fixture.until_quiet(SOON).await;
}

/// The id of such a message is a hash of its body: equal messages would be one row.
#[tokio::test]
async fn equal_malformed_messages_without_an_id_are_each_quarantined() {
    let mut fixture = UsersSetup::on(Servers::shared()).start().await;
    fixture.add_consumer().await;
    let elixir = Elixir::connect(&name(&fixture)).await;
    for body in ["{not json", "{not json", "{another"] {
        elixir.publish("exchange", "queue", body.as_bytes(), FieldTable::default()).await;
    }
    eventually(SOON, "each to be quarantined", || async { (fixture.count().await.2 == 3).then_some(()) }).await;
    fixture.until_quiet(SOON).await;
}

/// The headers of each retry, as the existing service reads them, and finally the dead-letter queue.
#[tokio::test]
async fn a_failing_database_retries_a_message_with_count_and_reason_and_then_buries_it() {
    let mut fixture = UsersSetup::on(Servers::shared())
        .env("USERS_DLQ_CONSUMER", "false")
        .env("RETRY_TTL_MS", "2000")
        .env("MAX_RETRIES", "2")
        .start()
        .await;
    fixture.add_consumer().await;
    let mut rows = fixture.rows().await;
    sqlx::raw_sql("ALTER TABLE users RENAME TO gone").execute(&mut rows).await.unwrap();
    let elixir = Elixir::connect(&name(&fixture)).await;
    let id = Uuid::new_v4();
    let body = json!({ "id": id, "name": "John Silva", "email": "john@email.com" }).to_string();
    elixir.publish("exchange", "queue", body.as_bytes(), FieldTable::default()).await;
    let (taken, headers) = elixir.take("retry_10s").await;
    assert_eq!(taken, body.as_bytes());
    assert_eq!(headers.inner().get("x-retries"), Some(&AMQPValue::LongLongInt(1)), "a number, not text");
    let Some(AMQPValue::LongString(reason)) = headers.inner().get("x-retry-reason") else { panic!("{headers:?}") };
    assert!(reason.to_string().starts_with("db_error: "), "{reason}");

    // The same message as it would return from its first retry; it is retried once more, then buried.
    let mut again = FieldTable::default();
    again.insert("x-retries".into(), AMQPValue::LongInt(1));
    elixir.publish("exchange", "queue", body.as_bytes(), again).await;
    let (taken, _) = elixir.take("dlq").await;
    assert_eq!(taken, body.as_bytes());
    let base = fixture.consumers[0].1.clone();
    assert_eq!(fixture.metric(&base, "baton_users_total", "retried").await, 2.0);
    assert_eq!(fixture.metric(&base, "baton_users_total", "exhausted").await, 1.0);
    assert!(fixture.metric(&base, "baton_users_database_errors_total", "other").await >= 3.0);
    fixture.until_quiet(SOON).await;
}

/// The API reaches the broker through a link that tests can cut; the consumer reaches it directly.
async fn behind_a_link() -> (UsersFixture, Proxy) {
    let servers = Servers::shared();
    let mut url = reqwest::Url::parse(&servers.amqp).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await;
    url.set_port(Some(link.port())).unwrap();
    let mut fixture = UsersSetup::on(servers).api_env("RABBITMQ_URL", url.as_str()).start().await;
    fixture.add_consumer().await;
    (fixture, link)
}

/// Waits until a user sent now is enrolled and the queue is empty: every earlier message has been handled.
async fn until_all_handled(fixture: &UsersFixture) {
    let id = eventually(SOON, "the API to accept again", || async {
        let (status, body) = fixture.post(&user(99), None).await;
        (status == 200).then(|| body["id"].as_str().unwrap().to_owned())
    })
    .await;
    fixture.until_enrolled(&id).await;
    fixture.until_quiet(SOON).await;
}

#[tokio::test]
async fn without_the_broker_requests_get_503_at_once_and_have_no_effect_later() {
    let (fixture, link) = behind_a_link().await;
    link.set(Mode::Refuse).await;
    let started = Instant::now();
    let answers = futures::future::join_all((0..20).map(|number| keyed(&fixture, number))).await;
    println!("20 answers without a broker took {:?}", started.elapsed());
    for (status, body) in &answers {
        // The first ones may have been in flight when the link was cut.
        assert!(*status == 503 || *status == 504, "{status}: {body}");
    }
    let (status, body) = fixture.post(&user(1), None).await;
    assert_eq!((status, body["code"].as_str(), body["status"].as_u64()), (503, Some("unavailable"), Some(503)));
    link.set(Mode::Forward).await;
    until_all_handled(&fixture).await;
    let mut rows = fixture.rows().await;
    let found: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM users").fetch_one(&mut rows).await.unwrap();
    let unknown = answers.iter().filter(|(status, _)| *status == 504).count() as i64;
    assert!(found <= 1 + unknown, "{found} rows, {unknown} outcomes unknown");
}

async fn keyed(fixture: &UsersFixture, number: usize) -> (u16, serde_json::Value) {
    fixture.post(&user(number), Some(&format!("key-{number}"))).await
}

#[tokio::test]
async fn a_lost_confirm_is_an_unknown_outcome_with_an_id_to_look_up() {
    let (fixture, link) = behind_a_link().await;
    link.set(Mode::SwallowAnswers).await;
    let (status, body) = fixture.post(&user(1), Some("one")).await;
    assert_eq!((status, body["code"].as_str()), (504, Some("outcome-unknown")), "{body}");
    let id = body["id"].as_str().unwrap().to_owned();
    let found = fixture.until_enrolled(&id).await;
    assert_eq!(found["name"], "User 1", "the broker had the message, and the user is enrolled");
    link.set(Mode::Cut).await;
    link.set(Mode::Forward).await;
    let again = eventually(SOON, "an answer", || async {
        let (status, body) = fixture.post(&user(1), Some("one")).await;
        (status == 200).then_some(body)
    })
    .await;
    assert_eq!(again["id"].as_str(), Some(id.as_str()));
    until_all_handled(&fixture).await;
    assert_eq!(fixture.count().await.0, 2);
}

#[tokio::test]
async fn every_row_is_inserted_after_an_outage_longer_than_all_retries() {
    let servers = Servers::shared();
    let mut url = reqwest::Url::parse(&servers.postgres).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await;
    let mut fixture = UsersSetup::on(servers).start().await;
    let database = reqwest::Url::parse(fixture.database.as_ref().unwrap()).unwrap();
    url.set_path(database.path());
    url.set_port(Some(link.port())).unwrap();
    let mut env = fixture.env.clone();
    env.insert("USERS_DATABASE_URL".into(), url.to_string());
    fixture.add_consumer_with(&env).await;
    link.set(Mode::Refuse).await;
    let mut ids = Vec::new();
    for number in 0..50 {
        ids.push(fixture.enrol(number).await);
    }
    let base = fixture.consumers[0].1.clone();
    eventually(SOON, "all to be dead letters", || async {
        (fixture.health(&base).await["queue"]["dead"] == 50).then_some(())
    })
    .await;
    link.set(Mode::Forward).await;
    for id in &ids {
        fixture.until_enrolled(id).await;
    }
    fixture.until_quiet(SOON).await;
    assert_eq!(fixture.count().await, (50, 50, 0));
}

/// Each lane runs on any queue; here the users lane on SQS, with the embedded store.
#[tokio::test]
async fn the_users_lane_runs_on_sqs() {
    let endpoint = harness::engine::server("BATON_TEST_SQS_URL");
    let name = format!("baton-{}", Uuid::new_v4().simple());
    let mut fixture = UsersSetup::embedded()
        .env("USERS_QUEUE", "sqs")
        .env("USERS_SQS_QUEUE_URL", format!("{endpoint}/000000000000/{name}"))
        .env("USERS_SQS_DLQ_URL", format!("{endpoint}/000000000000/{name}-dlq"))
        .env("SQS_ENDPOINT_URL", &endpoint)
        .env("AWS_ACCESS_KEY_ID", "test")
        .env("AWS_SECRET_ACCESS_KEY", "test")
        .env("QUEUE_AUTO_CREATE", "true")
        .start()
        .await;
    let ids = futures::future::join_all((0..25).map(|number| fixture.enrol(number))).await;
    // Two users under one key: the second is refused, becomes a dead letter and is quarantined.
    for number in [98, 99] {
        assert_eq!(fixture.post(&user(number), Some("one key")).await.0, 200);
    }
    fixture.add_consumer().await;
    for id in &ids {
        fixture.until_enrolled(id).await;
    }
    let base = fixture.consumers[0].1.clone();
    eventually(SOON, "it to be quarantined", || async {
        (fixture.health(&base).await["store"]["quarantined"] == 1).then_some(())
    })
    .await;
}
