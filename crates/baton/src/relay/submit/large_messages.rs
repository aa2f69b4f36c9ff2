//! Handles large messages a few at a time. While one is handled, its call data is in memory several times: in the message,
//! the row, the submission and the relayer's answer. Small messages never wait here.

use async_trait::async_trait;
use pipeline::{Handler, Message, Outcome};
use tokio::sync::Semaphore;

/// A longer message waits for its turn.
const SMALL_BYTES_MAX: usize = 16 * 1024;
/// Bytes of large messages that are handled at once.
const BYTES_MAX: usize = 512 * 1024;

/// A handler that gets large messages a few at a time.
pub struct LargeMessages<H> {
    inner: H,
    memory: Semaphore,
}

impl<H> LargeMessages<H> {
    /// In front of this handler.
    pub fn new(inner: H) -> Self {
        Self { inner, memory: Semaphore::new(BYTES_MAX) }
    }
}

#[async_trait]
impl<H: Handler> Handler for LargeMessages<H> {
    async fn handle(&self, message: &Message) -> Outcome {
        let size = message.body.len();
        let _turn = match u32::try_from(size.min(BYTES_MAX)) {
            Ok(bytes) if size > SMALL_BYTES_MAX => self.memory.acquire_many(bytes).await.ok(),
            _ => None,
        };
        self.inner.handle(message).await
    }

    async fn ready(&self) {
        self.inner.ready().await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::SystemTime;

    use futures::future::join_all;
    use pipeline::{Attributes, MessageId, Receipt};

    use super::*;

    /// Counts the bytes that are handled at once.
    #[derive(Default)]
    struct Counted {
        now: AtomicUsize,
        most: AtomicUsize,
    }

    #[async_trait]
    impl Handler for Counted {
        async fn handle(&self, message: &Message) -> Outcome {
            let size = message.body.len();
            self.most.fetch_max(self.now.fetch_add(size, Ordering::SeqCst) + size, Ordering::SeqCst);
            tokio::task::yield_now().await;
            self.now.fetch_sub(size, Ordering::SeqCst);
            Outcome::Done
        }
    }

    fn message(size: usize) -> Message {
        Message {
            id: MessageId("m".into()),
            body: vec![0; size],
            attributes: Attributes::default(),
            receives: 1,
            sent_at: SystemTime::UNIX_EPOCH,
            receipt: Receipt("r".into()),
        }
    }

    async fn most(size: usize) -> usize {
        let handler = LargeMessages::new(Counted::default());
        let messages = vec![message(size); 64];
        join_all(messages.iter().map(|message| handler.handle(message))).await;
        handler.inner.most.load(Ordering::SeqCst)
    }

    #[tokio::test]
    async fn large_messages_are_handled_within_their_memory_and_small_ones_all_at_once() {
        assert_eq!(most(SMALL_BYTES_MAX).await, 64 * SMALL_BYTES_MAX);
        let large = most(200_000).await;
        assert!((200_000..=BYTES_MAX).contains(&large), "{large}");
        assert_eq!(most(2 * BYTES_MAX).await, 2 * BYTES_MAX, "one that is larger than all memory has its turn too");
    }
}
