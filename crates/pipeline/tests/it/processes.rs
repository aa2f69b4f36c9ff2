//! Two operating-system processes on one file: the test binary starts itself again as the second process.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{Outgoing, Queue, QueueOptions};

use crate::database::PATIENCE;

const FILE: &str = "PIPELINE_TEST_CHILD_FILE";
const COUNT: &str = "PIPELINE_TEST_CHILD_COUNT";

/// The second process: sends `COUNT` messages and prints the id of each once it is stored. Without the environment
/// variable `FILE` it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Ok(file) = std::env::var(FILE) else { return };
    let count: u64 = std::env::var(COUNT).unwrap().parse().unwrap();
    let queue = open(Path::new(&file)).await;
    for number in 0..count {
        let id = queue.send(&[Outgoing::new(format!("message {number}"))]).await.remove(0).unwrap();
        println!("\nsent {id}");
    }
}

fn start_child(file: &Path, count: u64) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::child", "--nocapture"])
        .env(FILE, file)
        .env(COUNT, count.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines.map_while(Result::ok).filter_map(|line| line.strip_prefix("sent ").map(str::to_owned)))
}

async fn open(file: &Path) -> SqliteQueue {
    let db = Database::open(file).unwrap();
    SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_from_another_process_wakes_a_waiting_receiver() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("test.db");
    let queue = open(&file).await;
    // Without the wake-up it would find the message only at the end of its wait.
    let receiver = tokio::spawn(async move { queue.receive(1, PATIENCE * 10).await.unwrap() });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (mut child, sent) = start_child(&file, 1);
    let sent: Vec<String> = tokio::task::spawn_blocking(move || sent.collect()).await.unwrap();
    let got = tokio::time::timeout(PATIENCE, receiver).await.expect("not woken").unwrap();
    assert_eq!(got.iter().map(|message| message.id.0.clone()).collect::<Vec<_>>(), sent);
    assert!(child.wait().unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_confirmed_message_survives_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("test.db");
    let (mut child, mut sent) = start_child(&file, u64::MAX);
    let (child, mut answered) = tokio::task::spawn_blocking(move || {
        let mut answered: HashSet<String> = sent.by_ref().take(50).collect();
        child.kill().unwrap();
        // Ids printed before the kill were confirmed too.
        answered.extend(sent);
        (child.wait().unwrap(), answered)
    })
    .await
    .unwrap();
    assert!(!child.success(), "the process was not killed");
    assert!(answered.len() >= 50);
    let queue = open(&file).await;
    loop {
        let messages = queue.receive(1000, Duration::ZERO).await.unwrap();
        if messages.is_empty() {
            break;
        }
        for message in messages {
            answered.remove(&message.id.0);
        }
    }
    assert!(answered.is_empty(), "lost: {answered:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_busy_processes_both_make_progress() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("test.db");
    let queue = open(&file).await;
    let (mut child, sent) = start_child(&file, 300);
    let counting = tokio::task::spawn_blocking(move || sent.count());
    // This process keeps writing while the other one works.
    let mut here = 0;
    while !counting.is_finished() {
        queue.send(&[Outgoing::new("here")]).await.remove(0).unwrap();
        here += 1;
    }
    assert_eq!(counting.await.unwrap(), 300);
    assert!(child.wait().unwrap().success());
    assert_eq!(queue.depth().await.unwrap().ready, 300 + here);
}
