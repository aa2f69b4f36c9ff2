//! The data directory of the embedded engine, under an operator's hands.

use std::path::Path;

use harness::engine::TestEngine;
use serde_json::Value;

use crate::relay_fixture::{RelaySetup, serial_body};

/// The embedded engine, whatever the other tests run on: only it has a data directory.
fn embedded() -> RelaySetup {
    RelaySetup::relayers(1).engine(TestEngine::Embedded)
}

#[tokio::test]
async fn nothing_is_accepted_into_a_deleted_data_directory() {
    let relay = embedded().start().await;
    let directory = relay.env["BATON_DATA_DIR"].clone();
    relay.send_serial(1).await;
    for entry in std::fs::read_dir(&directory).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    for serial in 2..30 {
        let (status, body) = relay.post(&serial_body(serial)).await;
        assert_eq!(status, 503, "the next process would not find it: {body}");
    }
    let health = assert_not_ready(&relay).await;
    assert_eq!(health["parts"]["store"]["reason"], "the database file was deleted or replaced", "{health}");
    assert_eq!(health["parts"]["queue"]["status"], "unavailable", "{health}");
    assert!(!Path::new(&directory).join("baton.db").exists(), "no empty file stands in for the deleted one");

    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(relay.post(&serial_body(30)).await.0, 503);
    assert_not_ready(&relay).await;
}

async fn assert_not_ready(relay: &crate::relay_fixture::RelayFixture) -> Value {
    assert_eq!(relay.get("/ready").await.0, 503);
    let (status, health) = relay.get("/health").await;
    assert_eq!((status, &health["status"]), (503, &Value::from("degraded")), "{health}");
    health
}
