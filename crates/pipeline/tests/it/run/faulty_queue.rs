//! A memory queue with injected faults.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use pipeline::queue::memory::MemoryQueue;
use pipeline::{
    CancellationToken, Capabilities, DeadLetter, Depth, Message, MessageId, Outgoing, Queue, QueueError, Receipt,
};
use tokio::sync::Semaphore;

/// The fault of one call.
#[derive(Clone, Copy)]
pub enum Fault {
    /// The call fails without effect.
    Refuse,
    /// The call takes effect, but its answer is lost.
    DropAnswer,
}

/// What a dead-letter queue does instead of taking messages.
#[derive(Clone, Copy)]
pub enum BuryFault {
    /// It refuses, and may take them later.
    Refuse,
    /// It refuses the first request.
    RefuseOnce,
    /// It refuses for good.
    TooLarge,
    /// It does not answer.
    Hang,
}

/// Wraps a memory queue and applies the configured faults and pauses.
pub struct FaultyQueue {
    pub inner: MemoryQueue,
    pub messages_per_request: usize,
    pub receive_faults: Mutex<VecDeque<Fault>>,
    pub ack_faults: Mutex<VecDeque<Fault>>,
    /// How the dead-letter queue answers burials, while it is set.
    pub bury_fault: Mutex<Option<BuryFault>>,
    pub ack_gate: Option<Arc<Semaphore>>,
    pub ack_calls: Arc<AtomicUsize>,
    pub cancel_in_receive: Option<CancellationToken>,
    pub receive_pause: Duration,
    pub receives_now: AtomicUsize,
    pub receives_most: Arc<AtomicUsize>,
}

impl FaultyQueue {
    pub fn new(inner: MemoryQueue) -> Self {
        Self {
            inner,
            messages_per_request: 1,
            receive_faults: Mutex::default(),
            ack_faults: Mutex::default(),
            bury_fault: Mutex::default(),
            ack_gate: None,
            ack_calls: Arc::default(),
            cancel_in_receive: None,
            receive_pause: Duration::ZERO,
            receives_now: AtomicUsize::new(0),
            receives_most: Arc::default(),
        }
    }

    pub fn fail_receive(&self, fault: Fault) {
        self.receive_faults.lock().unwrap().push_back(fault);
    }

    pub fn fail_ack(&self, fault: Fault) {
        self.ack_faults.lock().unwrap().push_back(fault);
    }
}

#[async_trait::async_trait]
impl Queue for FaultyQueue {
    fn name(&self) -> &str {
        "faulty"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { messages_per_request: self.messages_per_request, ..self.inner.capabilities() }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        self.inner.send(messages).await
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        let fault = self.receive_faults.lock().unwrap().pop_front();
        if fault.is_some() {
            return Err(QueueError::Unavailable("on purpose".into()));
        }
        let now = self.receives_now.fetch_add(1, Ordering::SeqCst) + 1;
        self.receives_most.fetch_max(now, Ordering::SeqCst);
        let got = self.inner.receive(max, wait).await;
        tokio::time::sleep(self.receive_pause).await;
        self.receives_now.fetch_sub(1, Ordering::SeqCst);
        if let Some(shutdown) = &self.cancel_in_receive {
            // The shutdown and the answer of this receive become ready together.
            shutdown.cancel();
            let mut woken = false;
            let once = std::future::poll_fn(move |context| {
                context.waker().wake_by_ref();
                if std::mem::replace(&mut woken, true) { Poll::Ready(()) } else { Poll::Pending }
            });
            once.await;
        }
        got
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        self.ack_calls.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.ack_gate {
            gate.acquire().await.unwrap().forget();
        }
        let fault = self.ack_faults.lock().unwrap().pop_front();
        match fault {
            None => self.inner.ack(receipts).await,
            Some(Fault::Refuse) => receipts.iter().map(|_| Err(QueueError::Unavailable("on purpose".into()))).collect(),
            Some(Fault::DropAnswer) => {
                let answers = self.inner.ack(receipts).await;
                answers.into_iter().map(|_| Err(QueueError::OutcomeUnknown("on purpose".into()))).collect()
            }
        }
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        self.inner.retry_after(entries).await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let fault = {
            let mut fault = self.bury_fault.lock().unwrap();
            let now = *fault;
            if matches!(now, Some(BuryFault::RefuseOnce)) {
                *fault = None;
            }
            now
        };
        let answers = |error: fn() -> QueueError| entries.iter().map(|_| Err(error())).collect();
        match fault {
            None => self.inner.bury(entries).await,
            Some(BuryFault::Refuse | BuryFault::RefuseOnce) => answers(|| QueueError::Unavailable("on purpose".into())),
            Some(BuryFault::TooLarge) => answers(|| QueueError::TooLarge { size: 2, max: 1 }),
            Some(BuryFault::Hang) => std::future::pending().await,
        }
    }

    async fn extend(&self, receipts: &[Receipt], duration: Duration) -> Vec<Result<(), QueueError>> {
        self.inner.extend(receipts, duration).await
    }

    fn lease(&self) -> Duration {
        self.inner.lease()
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        self.inner.depth().await
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.inner.dead_letters(after, max).await
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        self.inner.replay(ids, delay).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.inner.discard(ids).await
    }
}
