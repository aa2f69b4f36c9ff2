//! Transactions for the relay benchmarks, stored and queued by the product's own code; the only file that uses the relay
//! lane's modules.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use baton::config::{Config, Service};
use baton::relay::engine::{QUEUE, RelayEngine};
use baton::relay::request::call::DirectRequest;
use baton::relay::state::message::TransactionMessage;
use baton::relay::state::transaction::{Status, Transaction, TransactionId};
use baton::relay::store::TransactionStore;
use baton::relay::store::sqlite::SqliteStore;
use baton::timestamp::Timestamp;
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;

use crate::process::{Vars, config};

/// The request of every relay benchmark: an ERC-20 transfer.
pub const BODY: &str = r#"{"to":"0x5FbDB2315678afecb367f032d93F642f64180aa3","value":"0","data":"0xa9059cbb000000000000000000000000f39fd6e51aad88f6f4ce6ab8827279cfffb922660000000000000000000000000000000000000000000000000de0b6b3a7640000","gas":"60000","speed":"fast"}"#;

/// The request as the `transactions` table holds it.
pub fn request_column() -> anyhow::Result<String> {
    Ok(request()?.to_json())
}

/// The body of a queue message.
pub fn message_body() -> anyhow::Result<Vec<u8>> {
    let config = Config::from_vars(Service::Command, |_| None)?;
    Ok(message(&new_transaction(&config)?).body)
}

fn request() -> anyhow::Result<DirectRequest> {
    DirectRequest::parse(&serde_json::from_str(BODY)?)
        .map_err(|_| anyhow::anyhow!("the benchmark's request is invalid"))
}

fn message(row: &Transaction) -> pipeline::Outgoing {
    TransactionMessage::of(row, uuid::Uuid::now_v7(), row.created_at).outgoing()
}

fn new_transaction(config: &Config) -> anyhow::Result<Transaction> {
    let (id, now) = (TransactionId::generate(), Timestamp::from(SystemTime::now()));
    Ok(Transaction::accepted(id, &request()?, "bench".to_owned(), now, &config.relay.timings))
}

/// The statements of an accept on the embedded engine, without HTTP.
pub struct EmbeddedAccepts {
    store: SqliteStore,
    queue: SqliteQueue,
    config: Config,
}

impl EmbeddedAccepts {
    pub async fn open(database: &Database) -> anyhow::Result<Self> {
        let config = Config::from_vars(Service::Command, |_| None)?;
        let store = SqliteStore::open(database).await?;
        let queue = SqliteQueue::open(database, QUEUE, pipeline::QueueOptions::default()).await?;
        Ok(Self { store, queue, config })
    }

    /// Rows per second from concurrent tasks.
    pub async fn rate(&self, concurrency: usize, span: Duration) -> anyhow::Result<f64> {
        let deadline = Instant::now() + span;
        let rows = futures::future::try_join_all((0..concurrency).map(|_| async {
            let mut rows = 0_u64;
            while Instant::now() < deadline {
                self.accept_one().await?;
                rows += 1;
            }
            anyhow::Ok(rows)
        }));
        Ok(rows.await?.iter().sum::<u64>() as f64 / span.as_secs_f64())
    }

    /// Stores and queues `count` transactions.
    pub async fn fill(&self, count: u64) -> anyhow::Result<()> {
        const CONCURRENCY: u64 = 1000;
        for start in (0..count).step_by(CONCURRENCY as usize) {
            let accepts = (start..count.min(start + CONCURRENCY)).map(|_| self.accept_one());
            futures::future::try_join_all(accepts).await?;
        }
        Ok(())
    }

    /// Fails if a transaction is pending.
    pub async fn ensure_none_pending(&self) -> anyhow::Result<()> {
        ensure_none_pending(&self.store).await
    }

    async fn accept_one(&self) -> anyhow::Result<()> {
        let row = Box::new(new_transaction(&self.config)?);
        let message = message(&row);
        self.store.accept_queued(row, None, message, &self.queue).await?;
        Ok(())
    }
}

/// Stores and queues `count` transactions through the engine of a service with these variables; returns its store.
pub async fn fill(vars: &Vars, count: u64) -> anyhow::Result<Arc<dyn TransactionStore>> {
    const BATCH: u64 = 500;
    let config = config(vars)?;
    let engine = RelayEngine::open(&config).await?;
    let (store, queue) = (engine.store(), engine.queue());
    for start in (0..count).step_by(BATCH as usize) {
        let rows = (start..count.min(start + BATCH))
            .map(|_| Ok((new_transaction(&config)?, None)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let messages: Vec<_> = rows.iter().map(|(row, _)| message(row)).collect();
        for stored in store.accept(&rows).await {
            stored?;
        }
        for sent in queue.send(&messages).await {
            sent?;
        }
    }
    Ok(store)
}

/// Fails if a transaction is pending, which contradicts the consumers' counters.
pub async fn ensure_none_pending(store: &dyn TransactionStore) -> anyhow::Result<()> {
    let counts = store.counts().await?;
    let pending = counts.open.iter().find(|(status, _)| *status == Status::Pending).map_or(0, |(_, count)| *count);
    anyhow::ensure!(
        pending == 0,
        "{pending} transactions are pending, although the consumers counted all as submitted"
    );
    Ok(())
}
