//! A reader that polls the list and single transactions during a scenario: no status may move back, and no transaction
//! may vanish.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;

use crate::load_client::LoadClient;

/// Pause between two rounds of reads; the reader is not meant to be load.
const PAUSE: Duration = Duration::from_millis(150);
/// Transactions read one by one between two pages of the list.
const STATUSES_PER_PAGE: usize = 5;

/// A running reader.
pub struct StatusWatcher {
    stop: Arc<AtomicBool>,
    task: JoinHandle<WatchReport>,
}

/// The result of a reader.
#[derive(Default)]
pub struct WatchReport {
    pub reads: usize,
    /// Each status that moved back and each transaction that vanished, described.
    pub regressions: Vec<String>,
    ranks: BTreeMap<String, u8>,
}

impl StatusWatcher {
    pub fn start(client: LoadClient) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(watch(client, Arc::clone(&stop)));
        Self { stop, task }
    }

    pub async fn stop(self) -> WatchReport {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

async fn watch(client: LoadClient, stop: Arc<AtomicBool>) -> WatchReport {
    let mut report = WatchReport::default();
    let mut cursor = None;
    let mut next = String::new();
    while !stop.load(Ordering::Relaxed) {
        // No page while the API is down.
        if let Some((rows, following)) = client.page(cursor.as_deref()).await {
            rows.iter().for_each(|row| report.check(row));
            cursor = following;
        }
        let ids: Vec<String> =
            report.ranks.range(next.clone()..).take(STATUSES_PER_PAGE).map(|(id, _)| id.clone()).collect();
        next = if ids.len() < STATUSES_PER_PAGE { String::new() } else { ids[ids.len() - 1].clone() };
        for id in ids {
            match client.get(&format!("/api/v1/relay/status/{id}")).await {
                Some((200, row)) => report.check(&row),
                Some((404, _)) => report.regressions.push(format!("{id} was shown earlier and is now missing")),
                _ => {}
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    report
}

impl WatchReport {
    fn check(&mut self, row: &Value) {
        self.reads += 1;
        let rank = match row["status"].as_str() {
            Some("pending") => 0,
            Some("submitted") => 1,
            _ => 2,
        };
        let id = row["transactionId"].as_str().unwrap().to_owned();
        let before = self.ranks.insert(id, rank).unwrap_or(0);
        if rank < before {
            self.regressions.push(format!("the status moved back: {row}"));
        }
    }
}
