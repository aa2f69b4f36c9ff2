//! The official verifiers of Standard Webhooks, in Python and JavaScript, accept what the product signs and reject what was
//! changed on the way.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use baton::config::Secret;
use baton::notify::signature::{generate_secret, sign};
use serde_json::{Value, json};

const ID: &str = "evt_0199a7c2f0b87d3e9c4e5f6a7b8c9d0e";
/// Not ASCII only: the signature is of bytes, but the verifiers take text.
const BODY: &str = r#"{"type":"transaction.confirmed","data":{"note":"größer als 1 €","gasUsed":"21000"}}"#;
/// More than the five minutes that verifiers tolerate.
const TOO_LONG_S: i64 = 301;

#[test]
fn the_python_verifier_agrees_with_our_signatures() {
    let verifiers = verifiers();
    check(Command::new(verifiers.join("venv/bin/python")).arg(script("verify.py")));
}

#[test]
fn the_javascript_verifier_agrees_with_our_signatures() {
    let verifiers = verifiers();
    check(Command::new("node").arg(script("verify.js")).env("NODE_PATH", verifiers.join("node_modules")));
}

/// Lets one verifier judge all deliveries.
fn check(verifier: &mut Command) {
    let (current, previous, other) = (generate_secret(), generate_secret(), generate_secret());
    let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
    let one = sign(std::slice::from_ref(&current), ID, now, BODY.as_bytes()).unwrap();
    let both = sign(&[current.clone(), previous.clone()], ID, now, BODY.as_bytes()).unwrap();
    let old = sign(std::slice::from_ref(&current), ID, now - TOO_LONG_S, BODY.as_bytes()).unwrap();
    let changed = BODY.replace("21000", "21001");
    let cases = [
        ("one secret", delivery(&current, ID, now, &one, BODY), true),
        ("current secret of a rotation", delivery(&current, ID, now, &both, BODY), true),
        ("previous secret of a rotation", delivery(&previous, ID, now, &both, BODY), true),
        ("changed body", delivery(&current, ID, now, &one, &changed), false),
        ("changed id", delivery(&current, "evt_another", now, &one, BODY), false),
        ("changed timestamp", delivery(&current, ID, now - 1, &one, BODY), false),
        ("old timestamp", delivery(&current, ID, now - TOO_LONG_S, &old, BODY), false),
        ("another secret", delivery(&other, ID, now, &both, BODY), false),
    ];
    let verdicts = run(verifier, &cases.iter().map(|(_, delivery, _)| format!("{delivery}\n")).collect::<String>());
    assert_eq!(verdicts.len(), cases.len(), "{verdicts:?}");
    for ((name, _, is_accepted), verdict) in cases.iter().zip(&verdicts) {
        assert_eq!(verdict == "accepted", *is_accepted, "{name}: {verdict}");
    }
}

fn delivery(secret: &Secret, id: &str, timestamp_s: i64, signature: &str, body: &str) -> Value {
    let headers =
        json!({"webhook-id": id, "webhook-timestamp": timestamp_s.to_string(), "webhook-signature": signature});
    json!({"secret": secret.expose(), "headers": headers, "body": body})
}

/// The lines that a program prints for these lines.
pub fn run(program: &mut Command, input: &str) -> Vec<String> {
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A program that has failed at its start has closed it; its standard error is shown below.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// The directory of the installed verifiers.
pub fn verifiers() -> PathBuf {
    let directory = PathBuf::from(harness::engine::server("BATON_TEST_WEBHOOK_VERIFIERS"));
    let is_installed = directory.join("installed").exists();
    assert!(is_installed, "{} is not there: run `scripts/services install`", directory.display());
    directory
}

pub fn script(name: &str) -> String {
    format!("{}/tests/verifiers/{name}", env!("CARGO_MANIFEST_DIR"))
}
