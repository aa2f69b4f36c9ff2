//! Readers that never stop looking: whatever happens, no transaction may go back or vanish before their eyes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;

use crate::load_client::Client;

/// Between two looks; the readers are not the load.
const PAUSE: Duration = Duration::from_millis(40);
/// How many transactions are asked for one by one between two pages of the list.
const ASKED_PER_PAGE: usize = 5;

/// A reader at work.
pub struct Watch {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Seen>,
}

/// What a reader saw.
#[derive(Default)]
pub struct Seen {
    pub reads: usize,
    /// What must not be seen, in words.
    pub steps_back: Vec<String>,
    ranks: BTreeMap<String, u8>,
}

impl Watch {
    pub fn begin(client: Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(watch(client, Arc::clone(&stop)));
        Self { stop, task }
    }

    pub async fn end(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

async fn watch(client: Client, stop: Arc<AtomicBool>) -> Seen {
    let mut seen = Seen::default();
    let mut cursor = None;
    let mut next = String::new();
    while !stop.load(Ordering::Relaxed) {
        // While the API is down there is nothing to see.
        if let Some((rows, following)) = client.page(cursor.as_deref()).await {
            rows.iter().for_each(|row| seen.look(row));
            cursor = following;
        }
        let asked: Vec<String> =
            seen.ranks.range(next.clone()..).take(ASKED_PER_PAGE).map(|(id, _)| id.clone()).collect();
        next = if asked.len() < ASKED_PER_PAGE { String::new() } else { asked[asked.len() - 1].clone() };
        for id in asked {
            match client.get(&format!("/api/v1/relay/status/{id}")).await {
                Some((200, row)) => seen.look(&row),
                Some((404, _)) => seen.steps_back.push(format!("{id} was seen and then was not there")),
                _ => {}
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    seen
}

impl Seen {
    fn look(&mut self, row: &Value) {
        self.reads += 1;
        let rank = match row["status"].as_str() {
            Some("pending") => 0,
            Some("submitted") => 1,
            _ => 2,
        };
        let id = row["transactionId"].as_str().unwrap().to_owned();
        let before = self.ranks.insert(id, rank).unwrap_or(0);
        if rank < before {
            self.steps_back.push(format!("went back: {row}"));
        }
    }
}
