//! A full disk under the data directory: requests are refused whole, and the process recovers by itself.

use std::path::PathBuf;

use harness::ports::free_port;
use harness::process::Program;
use harness::wait::eventually;
use serde_json::Value;

use crate::relay_fixture::{API_KEY, LATER, RelaySetup, SOON, serial_body};

/// Runs the binary on its own file system, small enough to fill. Needs user namespaces, not root.
#[tokio::test]
async fn a_full_disk_refuses_whole_requests_and_recovers_by_itself() {
    let relay = RelaySetup::relayers(1).start().await;
    let mount = tempfile::tempdir().unwrap();
    let port = free_port();
    let script = "mount -t tmpfs -o size=24m tmpfs \"$BATON_DATA_DIR\" && exec \"$0\" relay-api";
    let program = Program::new(PathBuf::from("unshare"))
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_baton")])
        .envs(relay.env.clone())
        .env("BATON_DATA_DIR", mount.path().display().to_string())
        .env("PORT", port.to_string());
    let mut api = program.start().unwrap();
    let base = format!("http://127.0.0.1:{port}");
    api.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    let inside = PathBuf::from(format!("/proc/{}/root{}", api.id().unwrap(), mount.path().display()));
    let http = harness::http_client();
    let post = async |serial| {
        let request = http.post(format!("{base}/api/v1/relay/direct")).header("x-api-key", API_KEY);
        let response = request.json(&serial_body(serial)).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    assert_eq!(post(0).await.0, 202);

    let ballast = inside.join("ballast");
    let fill = || {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&ballast).unwrap();
        while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
    };
    fill();
    let mut refused = Vec::new();
    let mut accepted = vec![0];
    for serial in 1..2000 {
        let (status, body) = post(serial).await;
        match status {
            202 => accepted.push(serial),
            503 => refused.push(serial),
            other => panic!("{other}: {body}"),
        }
        if refused.len() >= 20 {
            break;
        }
    }
    assert!(refused.len() >= 20, "the disk was never full: {} accepted", accepted.len());
    let get = async |path: &str| http.get(format!("{base}{path}")).send().await.unwrap();
    assert_eq!(get("/ready").await.status(), 503, "reading works, but nothing can be stored");
    let health: Value = get("/health").await.json().await.unwrap();
    assert_eq!(health["parts"]["store"]["reason"], "the disk is full", "{health}");
    std::fs::remove_file(&ballast).unwrap();
    let after = eventually(LATER, "the API to accept again without a restart", || async {
        let (status, _) = post(100_000).await;
        (status == 202).then_some(100_000)
    })
    .await;
    accepted.push(after);
    assert_eq!(get("/ready").await.status(), 200);

    let mut listed = 0;
    let mut cursor = String::new();
    loop {
        let url = format!("{base}/api/v1/relay/transactions?limit=200{cursor}");
        let page: Value = http.get(url).header("x-api-key", API_KEY).send().await.unwrap().json().await.unwrap();
        listed += page["transactions"].as_array().unwrap().len();
        match page["nextCursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    let health: Value = http.get(format!("{base}/health")).send().await.unwrap().json().await.unwrap();
    assert_eq!(health["parts"]["queue"]["ready"], listed, "every row has a message and every message a row");
    assert!(listed == accepted.len() || listed == accepted.len() + 1, "{listed} rows, {} accepted", accepted.len());
}
