//! A development relayer as a whole: its records in memory, time passing for them, and its start and end.
//!
//! One task follows the clock over a queue ordered by due time and hands webhooks to a fixed set of workers; a failed
//! one goes back into the queue. Another marks in the journal whose end has been told. With a chain a third one signs and
//! sends (`signer`), and records move when the chain does. `api` is the way in.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{self, AtomicU64},
    },
    time::Duration,
};

use alloy_primitives::Address;
use anyhow::Context;
use axum::serve::ListenerExt;
use pipeline::sqlite::{Database, DatabaseError};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use super::{
    api,
    journal::Journal,
    record::{Identity, Record, Status, now},
    request::Request,
    signer::{ChainOptions, Signer},
    webhook::{Notice, PAUSES, Sender, WORKERS},
};

/// Final records that are kept; older ones are 404, as they are at the real one after some hours.
const FINAL_RECORDS_MAX: usize = 100_000;
/// Webhooks that wait for a worker. With more the receiver is hopelessly behind, and they are dropped.
const NOTICES_WAITING_MAX: usize = 200_000;
/// How often the journal learns whose end has been told.
const MARK_INTERVAL: Duration = Duration::from_millis(250);
/// How long open connections may take to end at a shutdown.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// How a development relayer is set up.
pub struct DevRelayerOptions {
    /// Which one it is, from 1. Gives its id, its name and its address.
    pub index: usize,
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The key that callers must present as a bearer token.
    pub api_key: String,
    /// Where its webhooks go.
    pub webhook_url: String,
    /// The key that signs them.
    pub webhook_key: String,
    /// Where its records are remembered (one table of its own, shared by all development relayers).
    pub database: Database,
    /// Where its made-up hashes come from.
    pub seed: u64,
    /// About the time between two statuses; 300 ms is a good one.
    pub step: Duration,
    /// Where it signs and sends, instead of making things up.
    pub chain: Option<ChainOptions>,
}

/// A running development relayer.
pub struct DevRelayer {
    url: String,
    id: String,
    address: Option<Address>,
    tasks: TaskTracker,
}

impl DevRelayer {
    /// Remembers, listens, and goes on with what was under way at the last stop. It ends with `shutdown`.
    ///
    /// # Errors
    /// When the journal cannot be read or the address is taken.
    pub async fn start(options: DevRelayerOptions, shutdown: CancellationToken) -> anyhow::Result<Self> {
        let DevRelayerOptions { index, listen, api_key, webhook_url, webhook_key, database, seed, step, chain } =
            options;
        let signer = chain.map(Signer::new).transpose().context("build the chain's client")?;
        let identity = match &signer {
            Some(signer) => Identity::on_chain(index, signer.address),
            None => Identity::new(index, seed),
        };
        let sender = Sender::new(webhook_url, webhook_key).context("build the webhook client")?;
        let journal = Journal::open(database, index).await.context("open the development relayer's journal")?;
        let remembered = journal.load(FINAL_RECORDS_MAX).await.context("read the development relayer's journal")?;
        let listener = TcpListener::bind(listen).await.with_context(|| format!("listen on {listen}"))?;
        let address = listener.local_addr().context("read the address listened on")?;
        let (ready, waiting) = mpsc::channel(NOTICES_WAITING_MAX);
        let mut book = Book::default();
        for (record, told) in remembered.records {
            book.resume(record, told, now());
        }
        tracing::info!(
            relayer = identity.id, address = %address, records = book.records.len(), under_way = book.queue.len(),
            on_chain = signer.is_some(), "development relayer listening: it speaks the OpenZeppelin Relayer's API"
        );
        let tasks = TaskTracker::new();
        let relayer = Arc::new(Relayer {
            identity,
            api_key,
            step,
            journal,
            sender,
            ready,
            wake: Notify::new(),
            book: Mutex::new(book),
            next_number: AtomicU64::new(remembered.next_number),
            signer,
            tasks: tasks.clone(),
        });

        let waiting = Arc::new(tokio::sync::Mutex::new(waiting));
        for _ in 0..WORKERS {
            let (relayer, waiting, shutdown) = (Arc::clone(&relayer), Arc::clone(&waiting), shutdown.clone());
            tasks.spawn(async move { shutdown.run_until_cancelled(relayer.deliver(&waiting)).await });
        }
        tasks.spawn({
            let (relayer, shutdown) = (Arc::clone(&relayer), shutdown.clone());
            async move { shutdown.run_until_cancelled(relayer.follow_the_clock()).await }
        });
        if relayer.signer.is_some() {
            let (relayer, shutdown) = (Arc::clone(&relayer), shutdown.clone());
            tasks.spawn(async move {
                let Some(signer) = &relayer.signer else { return };
                let _ = shutdown.run_until_cancelled(relayer.follow_the_chain(signer)).await;
            });
        }
        tasks.spawn(Arc::clone(&relayer).mark_told(shutdown.clone()));
        tasks.spawn(serve(listener, relayer.clone(), shutdown));
        tasks.close();
        // Whoever listens on all interfaces is reached on this one.
        let url = format!("http://127.0.0.1:{}", address.port());
        let address = relayer.signer.as_ref().map(|signer| signer.address);
        Ok(Self { url, id: relayer.identity.id.clone(), address, tasks })
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Its id in paths and records, `dev-relayer-N`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Who signs, if it is on a chain.
    pub fn address(&self) -> Option<Address> {
        self.address
    }

    /// Ends after the shutdown, when all its tasks have ended.
    pub async fn stopped(self) {
        self.tasks.wait().await;
    }
}

async fn serve(listener: TcpListener, relayer: Arc<Relayer>, shutdown: CancellationToken) {
    let listener = listener.tap_io(|stream| {
        // Answers are small: they must not wait for an acknowledgement. Without it they are slower, nothing more.
        let _ = stream.set_nodelay(true);
    });
    let server = axum::serve(listener, api::router(relayer)).with_graceful_shutdown(shutdown.clone().cancelled_owned());
    tokio::select! {
        result = server => {
            if let Err(error) = result {
                tracing::error!(%error, "a development relayer's server ended");
            }
        }
        () = async { shutdown.cancelled().await; tokio::time::sleep(DRAIN_MAX).await } => {}
    }
}

pub(super) struct Relayer {
    pub(super) identity: Identity,
    pub(super) api_key: String,
    step: Duration,
    pub(super) journal: Journal,
    sender: Sender,
    ready: mpsc::Sender<Notice>,
    pub(super) wake: Notify,
    book: Mutex<Book>,
    /// Counts records. Without a chain it counts nonces, too.
    pub(super) next_number: AtomicU64,
    /// With a chain.
    pub(super) signer: Option<Signer>,
    tasks: TaskTracker,
}

/// What it knows. Told or not, a record is found here until it is pruned.
#[derive(Default)]
pub(super) struct Book {
    /// By number, which is the order of acceptance.
    pub(super) records: BTreeMap<u64, Arc<Record>>,
    by_id: HashMap<Uuid, u64>,
    /// Those for a chain that have no nonce yet.
    pub(super) unsigned: BTreeSet<u64>,
    /// Webhooks that are due some time.
    queue: BinaryHeap<Reverse<Due>>,
    /// Records in `pending`, `sent` or `submitted`.
    pub(super) pending: usize,
    pub(super) last_confirmed: Option<i64>,
    /// Ends that were told (or given up) since the journal was last written.
    told: Vec<u64>,
}

/// A webhook at its time.
struct Due {
    at: i64,
    notice: Notice,
    /// Whether the record stops counting as pending with it.
    settles: bool,
}

impl Relayer {
    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request; it is on disk when this returns.
    ///
    /// In a task of its own, because a caller that hangs up must not leave a record that only the journal knows: it
    /// would be looked for in vain, and come to life at the next start.
    pub(super) async fn accept(self: &Arc<Self>, request: Request) -> anyhow::Result<Arc<Record>> {
        let relayer = Arc::clone(self);
        let storing = self.tasks.spawn(async move { relayer.store(request).await });
        Ok(storing.await??)
    }

    async fn store(&self, request: Request) -> Result<Arc<Record>, DatabaseError> {
        let number = self.next_number.fetch_add(1, atomic::Ordering::Relaxed);
        let record = Arc::new(match &self.signer {
            Some(_) => Record::on_chain(number, request, now()),
            None => Record::new(&self.identity, number, request, now(), self.step),
        });
        self.journal.store(&record).await?;
        let is_next = {
            let mut book = self.book();
            book.pending += 1;
            book.insert(Arc::clone(&record));
            book.plan(&record, Status::Pending)
        };
        if let Some(signer) = &self.signer {
            self.book().unsigned.insert(number);
            signer.wake.notify_one();
        }
        // The clock need only be told when it would sleep too long.
        if is_next {
            self.wake.notify_one();
        }
        Ok(record)
    }

    async fn follow_the_clock(&self) {
        loop {
            let due = {
                let mut book = self.book();
                self.hand_out(&mut book, now());
                book.queue.peek().map(|Reverse(due)| due.at)
            };
            let sleep = async {
                match due {
                    Some(at) => {
                        let nanos = u64::try_from(at.saturating_sub(now())).unwrap_or_default();
                        tokio::time::sleep(Duration::from_nanos(nanos)).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.wake.notified() => {}
                () = sleep => {}
            }
        }
    }

    /// Gives everything that is due to the workers.
    fn hand_out(&self, book: &mut Book, now: i64) {
        let mut dropped = 0_usize;
        while book.queue.peek().is_some_and(|Reverse(due)| due.at <= now) {
            let Some(Reverse(Due { notice, settles, .. })) = book.queue.pop() else { break };
            if settles {
                book.pending = book.pending.saturating_sub(1);
            }
            if notice.attempts == 0 {
                book.plan(&notice.record, notice.status);
                if notice.status == Status::Confirmed {
                    book.last_confirmed = book.last_confirmed.max(Some(notice.at));
                }
            }
            dropped += usize::from(self.ready.try_send(notice).is_err());
        }
        if dropped > 0 {
            tracing::warn!(
                relayer = self.identity.id,
                dropped,
                "a development relayer dropped webhooks: the receiver is {NOTICES_WAITING_MAX} behind"
            );
        }
    }

    /// One worker: one webhook at a time.
    async fn deliver(&self, waiting: &tokio::sync::Mutex<mpsc::Receiver<Notice>>) {
        loop {
            let next = waiting.lock().await.recv().await;
            let Some(mut notice) = next else { return };
            let taken = self.sender.attempt(&self.identity, &notice).await;
            notice.attempts += 1;
            let again = if taken { None } else { PAUSES.get(notice.attempts - 1) };
            match again {
                Some(pause) => {
                    let at = now().saturating_add(i64::try_from(pause.as_nanos()).unwrap_or(i64::MAX));
                    self.book().queue.push(Reverse(Due { at, notice, settles: false }));
                    self.wake.notify_one();
                }
                None => {
                    if !taken {
                        tracing::debug!(relayer = self.identity.id, record = %notice.record.id, "webhook given up");
                    }
                    if notice.status.is_final() {
                        self.book().told.push(notice.record.number);
                    }
                }
            }
        }
    }

    /// Writes now and then, and once more at the end.
    async fn mark_told(self: Arc<Self>, shutdown: CancellationToken) {
        loop {
            let ends = shutdown.run_until_cancelled(tokio::time::sleep(MARK_INTERVAL)).await.is_none();
            let (told, oldest_kept) = {
                let mut book = self.book();
                book.prune(now());
                let oldest = book.records.keys().next().copied().unwrap_or_default();
                (std::mem::take(&mut book.told), oldest)
            };
            if !told.is_empty()
                && let Err(error) = self.journal.mark_told(told.clone(), oldest_kept).await
            {
                tracing::warn!(relayer = self.identity.id, %error, "the journal could not be written; trying again");
                self.book().told.extend(told);
            }
            if ends {
                return;
            }
        }
    }
}

impl Book {
    pub(super) fn get(&self, id: &Uuid) -> Option<Arc<Record>> {
        self.by_id.get(id).and_then(|number| self.records.get(number)).cloned()
    }

    fn insert(&mut self, record: Arc<Record>) {
        self.by_id.insert(record.id, record.number);
        self.records.insert(record.number, record);
    }

    /// A record on a chain has come further: the new one takes its place, and its status is told.
    pub(super) fn advance(&mut self, record: Record, now: i64) {
        let was_pending = self.records.get(&record.number).is_some_and(|before| before.status_at(now).is_pending());
        let record = Arc::new(record);
        let status = record.status_at(now);
        if was_pending && !status.is_pending() {
            self.pending = self.pending.saturating_sub(1);
        }
        self.records.insert(record.number, Arc::clone(&record));
        let notice = Notice { record, status, id: Uuid::new_v4(), at: now, attempts: 0 };
        self.queue.push(Reverse(Due { at: now, notice, settles: false }));
    }

    /// Takes up a record from the journal where the clock, or the chain, says it stands.
    fn resume(&mut self, record: Record, told: bool, now: i64) {
        let record = Arc::new(record);
        self.insert(Arc::clone(&record));
        let status = record.status_at(now);
        self.pending += usize::from(status.is_pending());
        if !status.is_final() && record.chain.as_ref().is_some_and(|chain| chain.signed.is_none()) {
            self.unsigned.insert(record.number);
        }
        if told {
            return;
        }
        if status > Status::Pending {
            // It may have been told before; a repeated webhook does no harm, a missing one does.
            let notice = Notice { record: Arc::clone(&record), status, id: Uuid::new_v4(), at: now, attempts: 0 };
            self.queue.push(Reverse(Due { at: now, notice, settles: false }));
        } else {
            self.plan(&record, status);
        }
    }

    /// Queues the webhook for the status after `status`. Returns whether it is now the first in the queue.
    fn plan(&mut self, record: &Arc<Record>, status: Status) -> bool {
        let Some((next, at)) = record.next(status) else { return false };
        let notice = Notice { record: Arc::clone(record), status: next, id: Uuid::new_v4(), at, attempts: 0 };
        let is_first = self.queue.peek().is_none_or(|Reverse(first)| at < first.at);
        self.queue.push(Reverse(Due { at, notice, settles: status.is_pending() && !next.is_pending() }));
        is_first
    }

    /// Forgets the oldest final records beyond the limit.
    fn prune(&mut self, now: i64) {
        while self.records.len() > FINAL_RECORDS_MAX + self.pending {
            let Some(oldest) = self.records.first_entry() else { return };
            if !oldest.get().status_at(now).is_final() {
                return;
            }
            let record = oldest.remove();
            self.by_id.remove(&record.id);
        }
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.notice.record.number, self.notice.status).cmp(&(
            other.at,
            other.notice.record.number,
            other.notice.status,
        ))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

#[cfg(test)]
mod tests;
