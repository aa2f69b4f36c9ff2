//! What a run creates on databases and brokers: a database and queues under a random name, removed when the run ends,
//! fails or is interrupted. Only `kill -9` leaves them behind; their names start with `baton_bench_`.

pub mod relay;
pub mod users;

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::scratch::progress;

/// Time to remove everything at the end.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(30);
/// Stands in for `RABBITMQ_URL` while the configuration is read, so that its absence gets our message.
const UNSET_AMQP_URL: &str = "amqp://unset";

/// The names of what one run creates.
struct ScratchNames {
    /// The name of the database and the prefix of all others.
    run: String,
    /// Queues named so far.
    queues: AtomicU32,
}

impl ScratchNames {
    fn new() -> Self {
        Self { run: format!("baton_bench_{}", uuid::Uuid::new_v4().simple()), queues: AtomicU32::new(0) }
    }

    /// The number of a queue that no process has used: a killed consumer may still hold messages of an older one.
    fn next_queue(&self) -> u32 {
        self.queues.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn queue_numbers(&self) -> RangeInclusive<u32> {
        1..=self.queues.load(Ordering::Relaxed)
    }

    fn announce(&self) {
        progress(format_args!("created {}, which is removed at the end", self.run));
    }

    /// Runs both removals and prints what could not be removed.
    async fn remove(
        &self,
        database: impl Future<Output = anyhow::Result<()>>,
        queues: impl Future<Output = anyhow::Result<()>>,
    ) {
        let removal = tokio::time::timeout(REMOVE_TIMEOUT, async {
            let (database, queues) = tokio::join!(database, queues);
            database.and(queues)
        });
        let reason = match removal.await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => format!("no response within {} s", REMOVE_TIMEOUT.as_secs()),
        };
        progress(format_args!("{} is left on the servers: {reason}", self.run));
    }
}

/// The error for a variable without which the servers are unknown.
fn unset(variable: &str, engine: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "{variable} is not set: {engine} needs your servers; `scripts/services start` runs some, and docs/benchmarks.md \
         says how to use them"
    )
}
