//! The relay lane's part of [`crate::dead_letters`]. A replay reopens the row first and moves the message after:
//! interrupted in between, the reconciler moves the message, and repeating the command does too.

use std::sync::Arc;

use async_trait::async_trait;
use pipeline::Queue;

use crate::dead_letters::{DeadLetterEntry, DeadLetterError, DeadLetterLane, Replayed};
use crate::relay::state::message::TransactionMessage;
use crate::relay::state::transaction::{MoveRefused, Status, TransactionId};
use crate::relay::update::guarded_store::{GuardedStore, Updated};

/// The dead letters of transactions.
pub struct RelayDeadLetters {
    /// The lane's store and queue.
    pub guarded: Arc<GuardedStore>,
}

fn transaction_id(body: &[u8]) -> Option<TransactionId> {
    TransactionMessage::parse(body).ok().map(|envelope| envelope.transaction_id())
}

#[async_trait]
impl DeadLetterLane for RelayDeadLetters {
    fn subject(&self) -> &'static str {
        "transaction"
    }

    fn subject_id(&self, body: &[u8]) -> Option<String> {
        transaction_id(body).map(|id| id.to_string())
    }

    fn queue(&self) -> &dyn Queue {
        &*self.guarded.queue
    }

    /// Moves the row back to pending, with all its attempts.
    async fn reopen(&self, entry: &DeadLetterEntry) -> Result<Replayed, DeadLetterError> {
        let Some(id) = transaction_id(&entry.body) else {
            return Ok(Replayed::Refused("its body is not a message about a transaction".to_owned()));
        };
        let now = self.guarded.clock.now();
        let updated = self.guarded.update(id, |row| row.replay(now, &self.guarded.timings)).await;
        Ok(match updated.map_err(DeadLetterError::store)? {
            Updated::Missing => Replayed::Refused("there is no such transaction".to_owned()),
            Updated::Moved(_) => Replayed::Queued,
            // An earlier replay was interrupted before it moved the message,
            Updated::Refused(_, row) if row.status == Status::Pending => Replayed::Queued,
            // or after: over two systems a copy of it stayed.
            Updated::Refused(_, row) if row.needs_no_message() => Replayed::Leftover,
            Updated::Refused(MoveRefused::NotPossible(why), _) => Replayed::Refused(why.to_owned()),
            Updated::Refused(refused, _) => Replayed::Refused(refused.to_string()),
        })
    }
}
