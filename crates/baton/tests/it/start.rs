//! Start and stop: the process names every invalid setting before it opens a socket, and reports an unusable data directory.

use std::collections::BTreeMap;

use harness::ports::{free_port, free_row};
use harness::wait::eventually;
use serde_json::Value;

use crate::dev::RELAYERS;
use crate::relay_fixture::{RelaySetup, SOON, baton};

async fn run<const N: usize>(args: [&str; N], env: &BTreeMap<String, String>) -> (i32, String) {
    let mut process = baton(args, env).start().unwrap();
    let status = process.wait_exit(SOON).await.unwrap();
    (status.code().unwrap_or(-1), process.output())
}

#[tokio::test]
async fn all_missing_and_contradictory_settings_are_named_and_nothing_is_created() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let env = BTreeMap::from([
        ("BATON_DATA_DIR".to_owned(), data.display().to_string()),
        ("PORT".to_owned(), "99999".to_owned()),
        ("OZ_RELAYER_URLS".to_owned(), "http://a:1,http://b:2".to_owned()),
        ("OZ_RELAYER_API_KEY".to_owned(), "x,y,z".to_owned()),
        ("RELAY_MODE".to_owned(), "perhaps".to_owned()),
        ("DATABASE_URL".to_owned(), "sqlite://here".to_owned()),
    ]);
    let (code, output) = run(["serve"], &env).await;
    assert_eq!(code, 2, "{output}");
    for name in ["PORT", "OZ_RELAYER_API_KEY", "RELAY_MODE", "DATABASE_URL", "RELAY_API_KEY", "WEBHOOK_SIGNING_KEY"] {
        assert!(output.contains(name), "{name} in\n{output}");
    }
    assert!(!data.exists(), "no file was created");
}

#[tokio::test]
async fn a_port_in_use_and_an_unusable_data_directory_are_clear_errors() {
    let relay = RelaySetup::relayers(1).start().await;
    let port = relay.base.rsplit(':').next().unwrap().to_owned();
    let mut env = relay.env.clone();
    env.insert("PORT".to_owned(), port.clone());
    let (code, output) = run(["serve"], &env).await;
    assert!(code == 1 && output.contains(&port) && output.contains("PORT"), "{output}");

    // A file in place of the parent directory: not even root can write there.
    let file = tempfile::NamedTempFile::new().unwrap();
    env.insert("BATON_DATA_DIR".to_owned(), file.path().join("data").display().to_string());
    env.insert("PORT".to_owned(), free_port().to_string());
    let (code, output) = run(["serve"], &env).await;
    assert!(code == 1 && output.contains("BATON_DATA_DIR"), "{output}");
}

#[tokio::test]
async fn help_and_migrate_work_without_any_setting() {
    let directory = tempfile::tempdir().unwrap();
    let env = BTreeMap::from([("BATON_DATA_DIR".to_owned(), directory.path().display().to_string())]);
    let (code, output) = run(["--help"], &env).await;
    assert!(code == 0 && output.contains("queue-consumer") && output.contains("dlq"), "{output}");
    let (code, output) = run(["relay-api", "--help"], &env).await;
    assert!(code == 0 && output.contains("WEBHOOK_SIGNING_KEY (required)") && !output.contains("USERS_"), "{output}");
    let (code, output) = run(["notifier", "--help"], &env).await;
    assert!(code == 0 && !output.contains("(required)") && !output.contains("OZ_RELAYER"), "{output}");
    for _ in 0..2 {
        let (code, output) = run(["migrate"], &env).await;
        assert!(code == 0 && output.contains("up to date"), "{output}");
    }
}

#[tokio::test]
async fn dev_prints_a_curl_that_works_and_stops_cleanly() {
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let relayer_port = free_row(RELAYERS);
    let data = directory.path().join("data").display().to_string();
    let env = BTreeMap::new();
    let (port_text, relayer_text) = (port.to_string(), relayer_port.to_string());
    let args = ["dev", "--port", &port_text, "--data-dir", &data, "--relayer-port", &relayer_text];
    let mut dev = baton(args, &env).start().unwrap();
    let base = format!("http://127.0.0.1:{port}");
    dev.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    let printed = dev.output();
    let command: String =
        printed.lines().skip_while(|line| !line.contains("curl -s")).take(3).collect::<Vec<_>>().join("\n");
    assert!(command.contains("/api/v1/relay/direct") && printed.contains("touches no chain"), "{printed}");
    let mut commands = printed.lines().filter(|line| line.contains("curl "));
    assert!(commands.all(|line| line.contains(r"curl -s -w '\n' ")), "answers would run together: {printed}");
    let listen = format!("  {} webhooks listen\n", env!("CARGO_BIN_EXE_baton"));
    assert!(printed.contains(&listen), "{printed}");
    let out = std::process::Command::new("sh").arg("-c").arg(command).output().unwrap();
    let answer: Value = serde_json::from_slice(&out.stdout).unwrap();
    let id = answer["transactionId"].as_str().unwrap().to_owned();
    let http = harness::http_client();
    let status = || async {
        let request = http.get(format!("{base}/api/v1/relay/status/{id}")).header("x-api-key", "dev-key");
        request.send().await.unwrap().json::<Value>().await.unwrap()
    };
    eventually(SOON, "the transaction to be confirmed", || async {
        (status().await["status"] == "confirmed").then_some(())
    })
    .await;
    let end = status().await;
    assert!(end["hash"].is_string() && end["value"] == "1000000000000000001", "{end}");

    dev.sigterm().unwrap();
    assert_eq!(dev.wait_exit(SOON).await.unwrap().code(), Some(0), "{}", dev.output());
    dev.restart().await.unwrap();
    dev.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    assert_eq!(status().await, end, "the transaction survives a restart");
}

#[tokio::test]
async fn a_consumer_without_a_chain_recommends_one() {
    let relay = RelaySetup::relayers(1).start().await;
    eventually(SOON, "the log to name the variable", || async {
        relay.api.output().contains("Set RPC_URL (`baton dev`: --rpc)").then_some(())
    })
    .await;
}
