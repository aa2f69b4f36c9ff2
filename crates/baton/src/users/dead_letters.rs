//! The users lane's part of [`crate::dead_letters`]: dead letters in the queue and in the quarantine, as one list. A
//! replay needs no preparation: a message that is handled twice makes one row.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use pipeline::{MessageId, Queue};

use super::quarantined_message::Quarantined;
use super::store::UserStore;
use super::user::User;
use crate::dead_letters::{DeadLetterEntry, DeadLetterError, DeadLetterLane, DeadLetterPlace};

/// The dead letters of users.
pub struct UsersDeadLetters {
    /// The store that keeps the quarantine.
    pub store: Arc<dyn UserStore>,
    /// The lane's queue.
    pub queue: Arc<dyn Queue>,
}

#[async_trait]
impl DeadLetterLane for UsersDeadLetters {
    fn subject(&self) -> &'static str {
        "user"
    }

    fn subject_id(&self, body: &[u8]) -> Option<String> {
        User::from_message(body).ok().map(|user| user.id.to_string())
    }

    fn queue(&self) -> &dyn Queue {
        &*self.queue
    }

    fn places(&self) -> &'static [DeadLetterPlace] {
        &[DeadLetterPlace::Queue, DeadLetterPlace::Quarantine]
    }

    async fn quarantined(
        &self,
        after: Option<&MessageId>,
        max: usize,
    ) -> Result<Vec<DeadLetterEntry>, DeadLetterError> {
        let page = self.store.list_quarantined(after.map(|id| id.0.as_str()), max).await;
        Ok(page.map_err(DeadLetterError::store)?.into_iter().map(entry).collect())
    }

    async fn remove_quarantined(&self, id: &MessageId) -> Result<(), DeadLetterError> {
        self.store.remove_quarantined(&id.0).await.map(drop).map_err(DeadLetterError::store)
    }
}

fn entry(Quarantined { message_id, error, body, at }: Quarantined) -> DeadLetterEntry {
    let since = SystemTime::UNIX_EPOCH + Duration::from_millis(at.0.unsigned_abs());
    let message_id = MessageId(message_id);
    DeadLetterEntry { place: DeadLetterPlace::Quarantine, message_id, reason: error, body, since, delivery: None }
}
