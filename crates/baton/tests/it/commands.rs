//! Operator commands on the data directory of running services.

use harness::ledger::EffectLedger;
use harness::relayer::{Faults, PostFault};
use serde_json::json;

use crate::relay_fixture::{LATER, RelaySetup, SOON, TO, baton};

#[tokio::test]
async fn a_refused_transaction_is_a_dead_letter_at_once_and_is_confirmed_after_a_replay() {
    let relay = RelaySetup::relayers(2).start().await;
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::every(PostFault::Refused("gas_limit is too low".into())));
    }
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "failed").await;
    assert_eq!(row["error_message"], "gas_limit is too low");
    let posts: usize = relay.relayers.iter().map(|relayer| relayer.count_requests("POST", "/transactions")).sum();
    assert_eq!(posts, 1, "a refusal is not retried");

    let (code, list) = relay.command(["dlq", "list"]).await;
    assert!(code == 0 && list.contains(&id) && list.contains("gas_limit is too low"), "{list}");
    let (_, shown) = relay.command(["dlq", "show", &id]).await;
    assert!(shown.contains("\"messageId\"") && shown.contains(&id), "{shown}");
    let (code, output) = relay.command(["dlq", "replay"]).await;
    assert_ne!(code, 0, "replaying everything needs --all: {output}");
    let (_, output) = relay.command(["dlq", "replay", "--all", "--dry-run"]).await;
    assert!(output.contains("would replay"), "{output}");
    assert_eq!(relay.status(&id).await["status"], "failed");

    for relayer in &relay.relayers {
        relayer.set_faults(Faults::default());
    }
    let (code, output) = relay.command(["dlq", "replay", "--all"]).await;
    assert!(code == 0 && output.contains("1 replayed, 0 refused"), "{output}");
    relay.until_status(&id, "confirmed").await;
    let (_, output) = relay.command(["dlq", "replay", "--all"]).await;
    assert!(output.contains("0 replayed"), "{output}");
    EffectLedger::compare([(id, "0x00000001".to_owned())], &relay.relayers, |accepted| accepted.field("data"))
        .assert_exactly_once();
}

#[tokio::test]
async fn a_transient_fault_gets_three_attempts_and_then_becomes_a_dead_letter() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::for_next(2, PostFault::Status(409)));
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(relay.relayers[0].count_requests("POST", "/transactions"), 3);

    relay.relayers[0].set_faults(Faults::every(PostFault::Status(409)));
    let id = relay.send_serial(2).await;
    let row = relay.until_status(&id, "failed").await;
    assert!(row["error_message"].as_str().unwrap().contains("409"), "{row}");
    assert_eq!(relay.relayers[0].count_requests("POST", "/transactions"), 6);
    let (_, list) = relay.command(["dlq", "list"]).await;
    assert!(list.contains(&id) && list.contains("1 dead letter"), "{list}");
    let (code, output) = relay.command(["dlq", "drop", &id]).await;
    assert!(code == 0 && output.contains("1 dropped"), "{output}");
    assert_eq!(relay.status(&id).await["status"], "failed");
}

#[tokio::test]
async fn retry_on_failure_replays_a_failed_transaction_once() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::for_next(1, PostFault::Refused("not now".into())));
    let id = relay.send(&json!({ "to": TO, "retryOnFailure": true })).await;
    relay.until_status(&id, "confirmed").await;
    relay.relayers[0].set_faults(Faults::every(PostFault::Refused("never".into())));
    let before = relay.relayers[0].count_requests("POST", "/transactions");
    let id = relay.send(&json!({ "to": TO, "retryOnFailure": true })).await;
    relay.until_status(&id, "failed").await;
    assert_eq!(relay.relayers[0].count_requests("POST", "/transactions") - before, 2);
}

#[tokio::test]
async fn tx_show_watch_and_resolve_work_beside_a_running_service() {
    let relay = RelaySetup::relayers(1).start().await;
    let id = relay.send_serial(1).await;
    let (code, watched) = relay.command(["tx", "watch", &id]).await;
    assert!(code == 0 && watched.contains("final: confirmed"), "{watched}");
    let (code, shown) = relay.command(["tx", "show", &id]).await;
    assert!(code == 0 && shown.contains("claimed") && shown.contains("confirmed"), "{shown}");
    let (_, shown) = relay.command(["tx", "show", &id, "--json"]).await;
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["status"], "confirmed");
    let (code, output) = relay.command(["tx", "resolve", &id, "--resend"]).await;
    assert!(code == 1 && output.contains("already confirmed"), "{output}");
    let (code, output) = relay.command(["tx", "resolve", &id]).await;
    assert!(code == 2 && output.contains("--resend"), "{output}");
    let (code, output) = relay.command(["tx", "show", "00000000-0000-7000-8000-000000000000"]).await;
    assert!(code == 1 && output.contains("no transaction"), "{output}");
}

/// A script must not take a transaction for failed that may still succeed.
#[tokio::test]
async fn a_watch_that_timed_out_has_another_exit_code_than_a_failed_transaction() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::every(PostFault::Refused("never".into())));
    let failed = relay.send_serial(1).await;
    let (code, watched) = relay.command(["tx", "watch", &failed]).await;
    assert!(code == 1 && watched.contains("final: failed"), "{code}: {watched}");
    relay.relayers[0].stop_listening().await;
    let waiting = relay.send_serial(2).await;
    let (code, watched) = relay.command(["tx", "watch", &waiting, "--timeout", "0"]).await;
    assert!(code == 124 && watched.contains("is still pending after 0 s"), "{code}: {watched}");
    let (_, help) = relay.command(["tx", "watch", "--help"]).await;
    assert!(help.contains("124: it was not final"), "{help}");
}

#[tokio::test]
async fn a_message_buried_by_the_queue_is_put_back_while_its_row_has_attempts_left() {
    // With one receive per message, the queue buries every message that the killed consumer had received.
    let mut relay =
        RelaySetup::relayers(1).env("QUEUE_LEASE_MS", "300").env("QUEUE_MAX_RECEIVES", "1").split().start().await;
    relay.relayers[0].stop_listening().await;
    relay.until_relayer(0, "unreachable").await;
    let sent = relay.send_many(0..20).await;
    relay.consumers[0].kill9().await.unwrap();
    relay.relayers[0].listen_again().await;
    relay.add_consumer().await;
    relay.until_all_final(LATER).await;
    assert_eq!(relay.count("confirmed").await, 20);
    EffectLedger::compare(sent, &relay.relayers, |accepted| accepted.field("data")).assert_exactly_once();
}

#[tokio::test]
async fn an_id_without_a_dead_letter_is_an_error() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::every(PostFault::Refused("never".into())));
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "failed").await;
    let unknown = "00000000-0000-7000-8000-000000000000";
    for command in ["replay", "drop"] {
        for args in [&["dlq", command, unknown][..], &["dlq", command, unknown, "--dry-run"]] {
            let mut process = baton([], &relay.env).args(args).start().unwrap();
            let code = process.wait_exit(SOON).await.unwrap().code();
            let output = process.output();
            assert!(code == Some(1) && output.contains(&format!("no dead letter {unknown}")), "{args:?}: {output}");
        }
    }
    // The others are dealt with.
    let (code, output) = relay.command(["dlq", "drop", unknown, &id]).await;
    assert!(code == 1 && output.contains("1 dropped") && output.contains(unknown), "{output}");
}

/// The shell's exit code of each part of a pipe, and what went to standard error.
fn shell(script: &str, env: &std::collections::BTreeMap<String, String>) -> (String, String) {
    let mut command = std::process::Command::new("bash");
    command.args(["-c", script, env!("CARGO_BIN_EXE_baton")]).envs(env);
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[tokio::test]
async fn output_without_a_reader_or_without_space_ends_a_command_without_a_panic() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::every(PostFault::Refused("never".into())));
    let ids: Vec<_> = relay.send_many(0..3).await.into_iter().map(|(id, _)| id).collect();
    for id in &ids {
        relay.until_status(id, "failed").await;
    }
    let pipes = tempfile::tempdir().unwrap();
    let mut env = relay.env.clone();
    let fifo = pipes.path().join("gone").display().to_string();
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    env.insert("FIFO".to_owned(), fifo);
    for command in ["dlq list", "tx unknown", "migrate"] {
        // The command starts when its reader is gone; its exit code goes to another descriptor.
        let reader_gone = format!(
            "exec 3>&1; {{ read -r gone <\"$FIFO\"; \"$0\" {command}; echo $? >&3; }} | {{ exec <&-; echo gone >\"$FIFO\"; }}"
        );
        let (code, errors) = shell(&reader_gone, &env);
        assert_eq!((code.as_str(), errors.as_str()), ("141", ""), "{command} | a reader that closed");
        let (code, errors) = shell(&format!("\"$0\" {command} > /dev/full; echo $?"), &relay.env);
        assert_eq!(code, "1", "{command} > /dev/full: {errors}");
        assert!(errors.contains("cannot write the output") && !errors.contains("panicked"), "{errors}");
        let (code, _) = shell(&format!("\"$0\" {command} > /dev/full 2>/dev/full; echo $?"), &relay.env);
        assert_eq!(code, "1", "{command} with no space for errors either");
    }
}
