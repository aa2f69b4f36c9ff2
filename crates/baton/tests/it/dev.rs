//! `dev` keeps to itself: no engine of the environment, no request for another host, no shared data directory unnoticed.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

use harness::ports::{free_port, free_row};
use harness::process::Process;
use harness::wait::eventually;
use serde_json::{Value, json};

use crate::relay_fixture::{SOON, TO, baton};

/// The relayers of a `dev`, each on a port of its own.
pub const RELAYERS: u16 = 3;
/// The key that every `dev` gives its relayers.
const RELAYER_KEY: &str = "development-relayers-need-no-secret";

/// A running `dev`.
struct Dev {
    process: Process,
    base: String,
    relayer_port: u16,
}

/// A `dev` on this directory, ready.
async fn start(data: &str, more: &[&str], env: &BTreeMap<String, String>) -> Dev {
    let (port, relayer_port) = (free_port(), free_row(RELAYERS));
    let (port_text, relayer_text) = (port.to_string(), relayer_port.to_string());
    let args = ["dev", "--port", &port_text, "--data-dir", data, "--relayer-port", &relayer_text];
    let mut process = baton(args, env).args(more).start().unwrap();
    let base = format!("http://127.0.0.1:{port}");
    process.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    Dev { process, base, relayer_port }
}

#[tokio::test]
async fn dev_uses_no_engine_of_the_environment_unless_asked() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data").display().to_string();
    let closed = free_port();
    let env = BTreeMap::from([
        ("DATABASE_URL".to_owned(), format!("mysql://baton:secret@127.0.0.1:{closed}/production")),
        ("USERS_DATABASE_URL".to_owned(), format!("postgres://baton:secret@127.0.0.1:{closed}/production")),
        ("RELAY_QUEUE".to_owned(), "rabbitmq".to_owned()),
        ("RABBITMQ_URL".to_owned(), format!("amqp://baton:secret@127.0.0.1:{closed}")),
        ("RPC_URL".to_owned(), format!("http://127.0.0.1:{closed}")),
        ("REDIS_URL".to_owned(), format!("redis://:secret@127.0.0.1:{closed}")),
        ("SQS_ENDPOINT_URL".to_owned(), format!("http://127.0.0.1:{closed}")),
        ("SQS_QUEUE_URL".to_owned(), format!("http://127.0.0.1:{closed}/0/relay")),
        ("USERS_QUEUE".to_owned(), "sqs".to_owned()),
        ("USERS_SQS_QUEUE_URL".to_owned(), format!("http://127.0.0.1:{closed}/0/users")),
    ]);
    // It would not become ready on engines that are not there.
    let dev = start(&data, &[], &env).await;
    let output = dev.process.output();
    for name in env.keys() {
        assert!(output.contains(&format!("{name} is set and not used")), "{name} in {output}");
    }
    assert!(output.contains("embedded (SQLite)") && !output.contains("secret"), "{output}");

    for entry in std::fs::read_dir(&data).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
    }

    let other = directory.path().join("other").display().to_string();
    let (port, relayer_port) = (free_port().to_string(), free_row(RELAYERS).to_string());
    let args = ["dev", "--external", "--port", &port, "--data-dir", &other, "--relayer-port", &relayer_port];
    let database = BTreeMap::from([("DATABASE_URL".to_owned(), env["DATABASE_URL"].clone())]);
    let external = baton(args, &database).start().unwrap();
    eventually(SOON, "an error or a wait for the database", || async {
        external.output().contains("DATABASE_URL").then_some(())
    })
    .await;
}

#[tokio::test]
async fn dev_answers_requests_for_localhost_only() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().display().to_string();
    let dev = start(&data, &["--host", "Baton.Test"], &BTreeMap::new()).await;
    let http = harness::http_client();
    let mut urls = vec![format!("{}/api/v1/relay/transactions", dev.base)];
    // The API, the probes, and the relayers, whose key is known too: they sign if they have a chain.
    urls.extend(
        ["/live", "/ready", "/health", "/metrics"].map(|path| format!("{}{path}", harness::admin_url(&dev.base))),
    );
    let relayers = dev.relayer_port..dev.relayer_port + RELAYERS;
    urls.extend(relayers.map(|port| format!("http://127.0.0.1:{port}/api/v1/relayers")));
    for url in urls {
        let port = reqwest::Url::parse(&url).unwrap().port().unwrap();
        for (host, wanted) in [
            (format!("127.0.0.1:{port}"), 200),
            (format!("localhost:{port}"), 200),
            ("LOCALHOST".to_owned(), 200),
            (format!("[::1]:{port}"), 200),
            (format!("baton.test:{port}"), 200),
            (format!("attacker.example:{port}"), 421),
            ("127.0.0.1.attacker.example".to_owned(), 421),
            ("localhost:attacker.example".to_owned(), 421),
        ] {
            let request = http.get(&url).header("x-api-key", "dev-key").bearer_auth(RELAYER_KEY);
            let answer = request.header("host", &host).send().await.unwrap();
            assert_eq!(answer.status(), wanted, "{url} for {host}");
        }
    }
}

#[tokio::test]
async fn a_relayer_of_dev_takes_no_transaction_of_a_foreign_web_page() {
    let directory = tempfile::tempdir().unwrap();
    let dev = start(&directory.path().display().to_string(), &[], &BTreeMap::new()).await;
    let base = format!("http://127.0.0.1:{}/api/v1/relayers/dev-relayer-1/transactions", dev.relayer_port);
    let http = harness::http_client();
    let post = async |host: &str| {
        let body = json!({ "to": TO, "value": "1", "data": "0x", "gas_limit": 60000, "speed": "fast" });
        let request = http.post(&base).bearer_auth(RELAYER_KEY).header("host", host).json(&body);
        request.send().await.unwrap().status().as_u16()
    };
    let stored = async || {
        let list: Value = http.get(&base).bearer_auth(RELAYER_KEY).send().await.unwrap().json().await.unwrap();
        list["pagination"]["total_items"].clone()
    };
    assert_eq!((post("attacker.example").await, stored().await), (421, json!(0)));
    assert_eq!((post("localhost").await, stored().await), (200, json!(1)), "the request is a good one");
}

#[tokio::test]
async fn a_second_dev_on_one_data_directory_is_warned_about() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().display().to_string();
    let mut first = start(&data, &[], &BTreeMap::new()).await.process;
    let mut second = start(&data, &[], &BTreeMap::new()).await.process;
    assert!(!first.output().contains("another `baton dev`"), "{}", first.output());
    assert!(second.output().contains("another `baton dev` uses"), "{}", second.output());
    for dev in [&mut first, &mut second] {
        dev.sigterm().unwrap();
        assert_eq!(dev.wait_exit(SOON).await.unwrap().code(), Some(0));
    }
    let third = start(&data, &[], &BTreeMap::new()).await.process;
    assert!(!third.output().contains("another `baton dev`"), "{}", third.output());
}

#[tokio::test]
async fn three_ports_must_fit_above_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().display().to_string();
    for port in ["65535", "65534", "0"] {
        let mut dev = baton(["dev", "--data-dir", &data, "--relayer-port", port], &BTreeMap::new()).start().unwrap();
        assert_eq!(dev.wait_exit(SOON).await.unwrap().code(), Some(2), "{port}: {}", dev.output());
        assert!(dev.output().contains("1..=65533"), "{}", dev.output());
    }
}
