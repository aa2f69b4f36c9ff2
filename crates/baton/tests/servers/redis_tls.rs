//! Redis behind TLS, with a certificate of an own authority: used if that authority is trusted, and not otherwise.

use std::path::Path;

use harness::engine::TestEngine;
use harness::ports::free_port;
use harness::process::Program;
use harness::wait::eventually;

use crate::own_authority::OwnAuthority;
use crate::relay_fixture::{RelayFixture, RelaySetup, SOON};

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
    let (ours, theirs) = (OwnAuthority::new("IP:127.0.0.1"), OwnAuthority::new("IP:127.0.0.1"));
    let port = free_port();
    let file = |name: &str| ours.files().join(name).display().to_string();
    let redis = Program::new("redis-server").args([
        "--port".to_owned(),
        "0".to_owned(),
        "--tls-port".to_owned(),
        port.to_string(),
        "--bind".to_owned(),
        "127.0.0.1".to_owned(),
        "--dir".to_owned(),
        ours.files().display().to_string(),
        "--tls-cert-file".to_owned(),
        file("server.pem"),
        "--tls-key-file".to_owned(),
        file("server.key"),
        "--tls-auth-clients".to_owned(),
        "no".to_owned(),
    ]);
    let redis = redis.start().unwrap();
    eventually(SOON, "Redis to listen", || async { redis.output().contains("Ready to accept").then_some(()) }).await;

    let relay = relay_trusting(&ours.certificate(), port).await;
    eventually(SOON, "the cache to answer", || async { (cache(&relay).await == "ok").then_some(()) }).await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;

    let relay = relay_trusting(&theirs.certificate(), port).await;
    eventually(SOON, "the outage in the log", || async {
        relay.api.output().contains("redis_unavailable").then_some(())
    })
    .await;
    assert_eq!(cache(&relay).await, "unavailable", "{}", redis.output());
}
