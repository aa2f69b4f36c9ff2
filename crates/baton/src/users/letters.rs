//! Dead letters for operators: those in the queue and those in quarantine, read, started over or dropped alike.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use pipeline::{MessageId, Outgoing, Queue, QueueError};

use super::dead_letters::LookError;
use super::store::UserStore;
use super::user::{User, UserId};
use crate::dead_letters::Selection;

/// How many are read at once.
const PAGE: usize = 500;

/// The lane's dead letters.
pub struct Letters {
    /// Where the quarantined ones are.
    pub store: Arc<dyn UserStore>,
    /// Where the others are.
    pub queue: Arc<dyn Queue>,
}

/// One of them.
pub struct Letter {
    /// The message's id.
    pub message_id: String,
    /// Why it is here.
    pub reason: String,
    /// The message, byte for byte.
    pub body: Vec<u8>,
    /// Since when.
    pub at: SystemTime,
    /// In the table, not in the queue.
    pub quarantined: bool,
}

impl Letter {
    /// The user it is about; none if its body cannot be read.
    pub fn user_id(&self) -> Option<UserId> {
        User::from_message(&self.body).ok().map(|user| user.id)
    }
}

impl Letters {
    /// The selected ones: those in the queue first.
    pub async fn select(&self, selection: &Selection) -> Result<Vec<Letter>, LookError> {
        let mut letters = self.in_queue().await?;
        let mut after: Option<String> = None;
        loop {
            let page = self.store.list_quarantined(after.as_deref(), PAGE).await?;
            after = page.last().map(|letter| letter.message_id.clone());
            let last = page.len() < PAGE;
            letters.extend(page.into_iter().map(|letter| Letter {
                message_id: letter.message_id,
                reason: letter.error,
                body: letter.body,
                at: SystemTime::UNIX_EPOCH + Duration::from_millis(letter.at.0.unsigned_abs()),
                quarantined: true,
            }));
            if last {
                break;
            }
        }
        letters.retain(|letter| {
            let about = letter.user_id().map(|id| id.to_string());
            selection.matches(&letter.message_id, about.as_deref(), &letter.reason)
        });
        letters.truncate(selection.max.unwrap_or(usize::MAX));
        Ok(letters)
    }

    async fn in_queue(&self) -> Result<Vec<Letter>, QueueError> {
        let mut letters: Vec<Letter> = Vec::new();
        loop {
            let after = letters.last().map(|letter| MessageId(letter.message_id.clone()));
            let page = match self.queue.dead_letters(after.as_ref(), PAGE).await {
                // The last one read was moved meanwhile: from the start again.
                Err(QueueError::NotFound) => {
                    letters.clear();
                    continue;
                }
                page => page?,
            };
            let last = page.len() < PAGE;
            letters.extend(page.into_iter().map(|letter| Letter {
                message_id: letter.id.0,
                reason: letter.reason,
                body: letter.body,
                at: letter.buried_at,
                quarantined: false,
            }));
            if last {
                return Ok(letters);
            }
        }
    }

    /// Puts one into the queue again. Interrupted half-way it is there twice, which does no harm.
    pub async fn replay(&self, letter: &Letter) -> Result<(), LookError> {
        if !letter.quarantined {
            let id = MessageId(letter.message_id.clone());
            return first(self.queue.replay(&[id], Duration::ZERO).await);
        }
        for sent in self.queue.send(&[Outgoing::new(letter.body.clone())]).await {
            sent?;
        }
        self.store.remove_quarantined(&letter.message_id).await?;
        Ok(())
    }

    /// Drops one for good.
    pub async fn drop_one(&self, letter: &Letter) -> Result<(), LookError> {
        if letter.quarantined {
            self.store.remove_quarantined(&letter.message_id).await?;
            return Ok(());
        }
        first(self.queue.discard(&[MessageId(letter.message_id.clone())]).await)
    }
}

/// One that is gone was moved by somebody else, which is just as well.
fn first(answers: Vec<Result<(), QueueError>>) -> Result<(), LookError> {
    match answers.into_iter().next() {
        Some(Err(failure)) if !matches!(failure, QueueError::NotFound) => Err(failure.into()),
        _ => Ok(()),
    }
}
