//! The benchmark on the embedded engine, with sizes that say nothing about speed: it completes, reports, and leaves no
//! files behind.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod command;

use command::{assert_figure, bench, run};

const SMALL: [&str; 10] =
    ["--seconds", "1", "--rounds", "1", "--concurrency", "8", "--transactions", "50", "--depth", "2000"];

async fn completes(args: &[&str], figure: &str) {
    let data = tempfile::tempdir().unwrap();
    let output = run(bench(&data, args)).await;
    assert_figure(&output, figure);
    assert!(!data.path().join("bench").exists(), "files are left: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn accept_reports_durable_accepts() {
    completes(&[&["accept"], &SMALL[..]].concat(), "durable accept").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_reports_submissions() {
    completes(&[&["relay"], &SMALL[..]].concat(), "submissions of one consumer").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_reports_the_cost_at_the_deep_queue() {
    completes(&[&["queue"], &SMALL[..]].concat(), "receive and acknowledge at 2000").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_reports_committed_rows() {
    completes(&["users", "--engine", "embedded", "--rounds", "1", "--messages", "2500"], "queued to committed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_reports_the_cost_of_a_refused_row() {
    let args = ["users", "--engine", "embedded", "--rounds", "1", "--refused-row"];
    completes(&args, "batch, refused row: last").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_product_binary_is_named_with_the_command_that_builds_it() {
    let data = tempfile::tempdir().unwrap();
    let mut command = bench(&data, &["accept"]);
    command.env("BATON_BIN", data.path().join("dist/baton"));
    let output = run(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("dist/baton: build it with `cargo build --package baton --profile dist`"), "{stderr}");
}
