//! One message in a hundred is not a valid user, in five different ways. Each of them is quarantined with its error, and
//! every other message becomes a row.

use std::collections::BTreeMap;

use futures::StreamExt;
use harness::wait::eventually;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use rand::RngExt;
use serde_json::json;
use uuid::Uuid;

use crate::fixture::{LATER, Servers, UsersSetup};
use crate::scenario::{Scenario, users};

const WINDOW: usize = 500;

#[tokio::test]
async fn one_in_a_hundred_is_malformed() {
    let mut scenario = Scenario::begin("one_in_a_hundred_is_malformed");
    let mut fixture = UsersSetup::on(Servers::shared()).env("LOG_LEVEL", "warn").start().await;
    let bad = |number: usize| match number % 5 {
        0 => format!("{{not json {number}").into_bytes(),
        1 => json!({ "id": Uuid::new_v4(), "name": format!("only a name {number}") }).to_string().into_bytes(),
        2 => json!({ "id": Uuid::new_v4(), "name": "n".repeat(300), "email": "e@x" }).to_string().into_bytes(),
        3 => json!({ "id": Uuid::new_v4(), "name": "nul\0", "email": "e@x" }).to_string().into_bytes(),
        _ => [&b"\xff\xfe\0"[..], number.to_string().as_bytes()].concat(),
    };
    let mut malformed = 0;
    let bodies: Vec<Vec<u8>> = (0..users())
        .map(|number| {
            if scenario.rng.random_range(0..100) == 0 {
                malformed += 1;
                bad(number)
            } else {
                let email = format!("user-{number}@example.com");
                json!({ "id": Uuid::new_v4(), "name": "Good", "email": email }).to_string().into_bytes()
            }
        })
        .collect();
    let connection = Connection::connect(&fixture.env["RABBITMQ_URL"], ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let name = fixture.env["USERS_QUEUE_NAME"].clone();
    let publish = |body: Vec<u8>| {
        let (channel, name) = (channel.clone(), name.clone());
        async move {
            let (exchange, key) = (format!("{name}_exchange"), format!("{name}_queue"));
            let properties = BasicProperties::default().with_delivery_mode(2);
            let options = BasicPublishOptions::default();
            let sent = channel.basic_publish(exchange.into(), key.into(), options, &body, properties).await;
            assert!(sent.unwrap().await.unwrap().is_ack());
        }
    };
    fixture.add_consumer().await;
    futures::stream::iter(bodies).map(publish).buffered(WINDOW).collect::<Vec<_>>().await;
    eventually(LATER, "each to be a row or quarantined", || async {
        let (rows, _, quarantined) = fixture.count().await;
        (rows + quarantined == users() as i64).then_some(())
    })
    .await;
    fixture.until_quiet(LATER).await;
    let (rows, distinct, quarantined) = fixture.count().await;
    println!(
        "SUMMARY scenario=one_in_a_hundred_is_malformed seed={} published={} rows={rows} quarantined={quarantined} duplicates={}",
        scenario.seed,
        users(),
        rows - distinct
    );
    assert_eq!((rows, quarantined), (users() as i64 - malformed, malformed));
    assert_eq!(rows, distinct);
    let errors: Vec<(String, i64)> =
        sqlx::query_as("SELECT split_part(error, '(', 1), COUNT(*) FROM users_set_aside GROUP BY 1")
            .fetch_all(&mut fixture.rows().await)
            .await
            .unwrap();
    let errors: BTreeMap<_, _> = errors.into_iter().collect();
    println!("{errors:?}");
    assert!(errors.keys().all(|error| error.starts_with("invalid user: ")), "{errors:?}");
    assert_eq!(errors.len(), 4, "each kind of fault has its own error: {errors:?}");
}
