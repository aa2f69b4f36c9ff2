//! What the product delivers, judged by others: the receivers of docs/webhooks.md, as a reader copies them, and the official
//! verifiers of Standard Webhooks.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

use baton::notify::signature::generate_secret;
use harness::ports::free_port;
use harness::process::{Process, Program};
use harness::sink::Sink;
use harness::wait::{eventually, eventually_ok};
use reqwest::Method;
use serde_json::{Value, json};

use crate::relay_fixture::{RelayFixture, RelaySetup, SOON, answer, serial_body};
use crate::webhook_verifiers::{run, script, verifiers};

const PAGE: &str = include_str!("../../../../docs/webhooks.md");

async fn start() -> RelayFixture {
    RelaySetup::relayers(2).env("WEBHOOK_ALLOW_PRIVATE", "true").start().await
}

/// The id and the secret of a new endpoint.
async fn register(relay: &RelayFixture, url: &str) -> (String, String) {
    let body = json!({ "url": url, "events": ["transaction.completed"] });
    let (status, made) = answer(relay.request(Method::POST, "/api/v1/webhooks/register").json(&body)).await;
    assert_eq!(status, 201, "{made}");
    let text = |name: &str| made[name].as_str().unwrap().to_owned();
    (text("id"), text("secret"))
}

/// The program of the page in this language, on another port.
fn program_of_the_page(language: &str, port: u16) -> String {
    let (_, rest) = PAGE.split_once(&format!("\n```{language}\n")).unwrap();
    let (program, _) = rest.split_once("\n```\n").unwrap();
    assert_eq!(program.matches("8080").count(), 1, "{program}");
    program.replace("8080", &port.to_string())
}

#[tokio::test]
async fn the_javascript_receiver_of_the_page_takes_a_real_delivery() {
    let directory = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(verifiers().join("node_modules"), directory.path().join("node_modules")).unwrap();
    check_receiver("js", directory.path(), "receiver.mjs", Program::new("node")).await;
}

#[tokio::test]
async fn the_python_receiver_of_the_page_takes_a_real_delivery() {
    let directory = tempfile::tempdir().unwrap();
    let python = Program::new(verifiers().join("venv/bin/python")).env("PYTHONUNBUFFERED", "1");
    check_receiver("python", directory.path(), "receiver.py", python).await;
}

async fn check_receiver(language: &str, directory: &Path, file: &str, interpreter: Program) {
    let relay = start().await;
    let port = free_port();
    let (id, secret) = register(&relay, &format!("http://127.0.0.1:{port}/hooks/baton")).await;
    std::fs::write(directory.join(file), program_of_the_page(language, port)).unwrap();
    let interpreter = interpreter.arg(directory.join(file));
    let receiver = listening(&interpreter.clone().env("WEBHOOK_SECRET", &secret), port).await;
    let transaction = relay.send(&serial_body(1)).await;
    eventually_ok(SOON, "the receiver to print the event", || async {
        let output = receiver.output();
        let wanted = format!("transaction.completed {transaction} confirmed");
        if output.contains(&wanted) { Ok(()) } else { Err(output) }
    })
    .await;
    until_attempted(&relay, &id, 204).await;
    drop(receiver);
    let _receiver = listening(&interpreter.env("WEBHOOK_SECRET", generate_secret().expose()), port).await;
    relay.send(&serial_body(2)).await;
    until_attempted(&relay, &id, 400).await;
}

/// Starts a receiver and waits until it takes connections.
async fn listening(program: &Program, port: u16) -> Process {
    let receiver = program.start().unwrap();
    eventually(SOON, "the receiver to listen", || async {
        tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.ok().map(drop)
    })
    .await;
    receiver
}

/// Waits until an attempt was answered with this status.
async fn until_attempted(relay: &RelayFixture, id: &str, status: u16) {
    eventually_ok(SOON, format!("an attempt that is answered {status}"), || async {
        let (_, page) = relay.get(&format!("/api/v1/webhooks/endpoints/{id}/attempts")).await;
        let attempts = page["attempts"].as_array().cloned().unwrap_or_default();
        if attempts.iter().any(|attempt| attempt["status"] == status) { Ok(()) } else { Err(page.to_string()) }
    })
    .await;
}

#[tokio::test]
async fn the_official_verifiers_accept_what_was_delivered_and_nothing_else() {
    let relay = start().await;
    let sink = Sink::start().await;
    let (_, secret) = register(&relay, &sink.url()).await;
    relay.send(&serial_body(1)).await;
    let delivered = sink.wait_for(1, SOON).await.remove(0);
    let body = String::from_utf8(delivered.body.to_vec()).unwrap();
    let names = ["webhook-id", "webhook-timestamp", "webhook-signature"];
    let headers: Value = names.iter().map(|name| ((*name).to_owned(), json!(delivered.header(name)))).collect();
    let line = |secret: &str, body: &str| json!({ "secret": secret, "headers": headers, "body": body }).to_string();
    let changed = body.replace("confirmed", "failed");
    let lines =
        [line(&secret, &body), line(&secret, &changed), line(generate_secret().expose(), &body)].join("\n") + "\n";
    let installed = verifiers();
    let mut python = Command::new(installed.join("venv/bin/python"));
    let mut node = Command::new("node");
    for verifier in [
        python.arg(script("verify.py")),
        node.arg(script("verify.js")).env("NODE_PATH", installed.join("node_modules")),
    ] {
        let verdicts = run(verifier, &lines);
        let accepted: Vec<_> = verdicts.iter().map(|verdict| verdict == "accepted").collect();
        assert_eq!(accepted, [true, false, false], "{verifier:?}: {verdicts:?}");
    }
}
