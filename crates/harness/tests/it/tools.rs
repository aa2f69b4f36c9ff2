//! Ports, waiting, and real processes.

use std::{collections::HashSet, time::Duration};

use harness::{
    ports::free_port,
    process::Program,
    sink::Sink,
    wait::{eventually, eventually_ok},
};

use crate::SOON;

#[test]
fn ports_are_below_the_ephemeral_range_and_given_out_once() {
    let ports: HashSet<u16> = (0..200).map(|_| free_port()).collect();
    assert_eq!(ports.len(), 200);
    assert!(ports.iter().all(|port| *port < 32_768));
}

#[tokio::test]
async fn a_failed_wait_names_the_condition_and_the_last_probe() {
    let waiting = tokio::spawn(async {
        eventually_ok(Duration::from_millis(60), "the moon", || async { Err::<(), _>("only clouds") }).await;
    });
    let panic = waiting.await.expect_err("must panic").into_panic();
    let message = panic.downcast_ref::<String>().expect("a text");
    assert!(message.contains("the moon") && message.contains("only clouds"), "{message}");
    assert!(message.contains("tools.rs"), "the caller is named: {message}");
    // The deadline also holds for a probe that never returns.
    let waiting = tokio::spawn(eventually(Duration::from_millis(60), "x", std::future::pending::<Option<()>>));
    assert!(waiting.await.is_err());
}

fn shell(script: &str) -> Program {
    Program::new("/bin/sh").arg("-c").arg(script)
}

#[tokio::test]
async fn a_program_sees_only_the_environment_it_was_given() {
    let mut process = shell("env; echo to stderr >&2").env("GIVEN", "yes").start().unwrap();
    assert!(process.wait_exit(SOON).await.unwrap().success());
    let output = process.output();
    assert!(output.contains("GIVEN=yes") && output.contains("PATH=") && output.contains("to stderr"), "{output}");
    assert!(!output.contains("CARGO_"), "{output}");
}

#[tokio::test]
async fn a_program_stops_on_sigterm_and_starts_again_with_the_same_settings() {
    let script = "trap 'echo bye; exit 7' TERM; echo life $GIVEN; while :; do sleep 0.02; done";
    let mut process = shell(script).env("GIVEN", "one").start().unwrap();
    let lives = |output: String, n: usize| (output.matches("life one").count() == n).then_some(());
    eventually(SOON, "the first life", || async { lives(process.output(), 1) }).await;
    process.sigterm().unwrap();
    assert_eq!(process.wait_exit(SOON).await.unwrap().code(), Some(7));
    process.restart().await.unwrap();
    eventually(SOON, "the second life", || async { lives(process.output(), 2) }).await;
    process.kill9().await.unwrap();
    assert!(!process.is_running());
    assert!(process.sigterm().is_err());
    assert!(process.log_excerpt().contains("bye"));
}

#[tokio::test]
async fn a_frozen_program_does_nothing_until_it_continues() {
    let mut process = shell("while :; do echo tick; sleep 0.01; done").start().unwrap();
    let ticks = |process: &harness::process::Process| process.output().lines().count();
    eventually(SOON, "ticks", || async { (ticks(&process) > 3).then_some(()) }).await;
    process.sigstop().unwrap();
    let stat = format!("/proc/{}/stat", process.id().unwrap());
    eventually(SOON, "the process to be stopped", || async {
        std::fs::read_to_string(&stat).unwrap().contains(") T ").then_some(())
    })
    .await;
    let frozen = ticks(&process);
    assert!(process.is_running());
    assert!(process.wait_exit(Duration::from_millis(100)).await.is_err());
    assert_eq!(ticks(&process), frozen);
    process.sigcont().unwrap();
    eventually(SOON, "more ticks", || async { (ticks(&process) > frozen).then_some(()) }).await;
}

#[tokio::test]
async fn waiting_for_readiness_reports_an_early_end_with_the_log() {
    let sink = Sink::start().await;
    let mut process = shell("sleep 600").start().unwrap();
    process.wait_ready(&sink.url(), SOON).await.unwrap();
    let mut process = shell("echo no database >&2; exit 3").start().unwrap();
    let error = process.wait_ready("http://127.0.0.1:1/", SOON).await.unwrap_err().to_string();
    assert!(error.contains("no database") && error.contains("exit status: 3"), "{error}");
}

#[tokio::test]
async fn a_dropped_process_is_killed() {
    let process = shell("exec sleep 600").start().unwrap();
    let folder = format!("/proc/{}/stat", process.id().unwrap());
    drop(process);
    eventually(SOON, "the process to be gone or a zombie", || async {
        std::fs::read_to_string(&folder).map_or(Some(()), |stat| stat.contains(") Z ").then_some(()))
    })
    .await;
}
