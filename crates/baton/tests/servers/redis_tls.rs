//! Redis behind TLS, with a certificate of an own authority: used if that authority is trusted, and not otherwise.

use std::path::Path;
use std::process::Command;

use harness::engine::TestEngine;
use harness::ports::free_port;
use harness::process::Program;
use harness::wait::eventually;

use crate::relay_fixture::{RelayFixture, RelaySetup, SOON};

/// Runs openssl in `directory`.
fn openssl(directory: &Path, args: &str) {
    let output = Command::new("openssl").args(args.split(' ')).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "openssl {args}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An authority `{name}.pem` and a server certificate of it, `{name}-server.pem`.
fn authority(directory: &Path, name: &str) {
    let new = "-newkey rsa:2048 -nodes -days 2";
    openssl(directory, &format!("req -x509 {new} -subj /CN={name} -keyout {name}.key -out {name}.pem"));
    openssl(directory, &format!("req {new} -subj /CN=redis -keyout {name}-server.key -out {name}.csr"));
    std::fs::write(directory.join("extensions"), "subjectAltName=IP:127.0.0.1").unwrap();
    openssl(
        directory,
        &format!(
            "x509 -req -in {name}.csr -CA {name}.pem -CAkey {name}.key -CAcreateserial -days 2 -extfile extensions -out {name}-server.pem"
        ),
    );
}

async fn relay_trusting(authority: &Path, port: u16) -> RelayFixture {
    let setup = RelaySetup::relayers(1).engine(TestEngine::Embedded);
    let setup = setup.env("REDIS_URL", format!("rediss://127.0.0.1:{port}"));
    setup.env("SSL_CERT_FILE", authority.display().to_string()).start().await
}

async fn cache(relay: &RelayFixture) -> String {
    relay.get("/health").await.1["parts"]["cache"]["status"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn redis_behind_tls_is_used_if_its_authority_is_trusted() {
    let directory = tempfile::tempdir().unwrap();
    let files = directory.path();
    authority(files, "ours");
    authority(files, "theirs");
    let port = free_port();
    let file = |name: &str| files.join(name).display().to_string();
    let redis = Program::new("redis-server").args([
        "--port".to_owned(),
        "0".to_owned(),
        "--tls-port".to_owned(),
        port.to_string(),
        "--bind".to_owned(),
        "127.0.0.1".to_owned(),
        "--dir".to_owned(),
        files.display().to_string(),
        "--tls-cert-file".to_owned(),
        file("ours-server.pem"),
        "--tls-key-file".to_owned(),
        file("ours-server.key"),
        "--tls-auth-clients".to_owned(),
        "no".to_owned(),
    ]);
    let redis = redis.start().unwrap();
    eventually(SOON, "Redis to listen", || async { redis.output().contains("Ready to accept").then_some(()) }).await;

    let relay = relay_trusting(&files.join("ours.pem"), port).await;
    eventually(SOON, "the cache to answer", || async { (cache(&relay).await == "ok").then_some(()) }).await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;

    let relay = relay_trusting(&files.join("theirs.pem"), port).await;
    eventually(SOON, "the outage in the log", || async { relay.api.output().contains("redis_away").then_some(()) })
        .await;
    assert_eq!(cache(&relay).await, "unavailable", "{}", redis.output());
}
