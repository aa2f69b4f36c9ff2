//! Dead letters for operators: read them, start them over, drop them. Starting over reopens the row first and moves
//! the message after: interrupted in between, the reconciler moves it, and repeating the command does too.

use std::collections::HashSet;
use std::time::Duration;

use pipeline::{DeadLetter, MessageId, QueueError};

use crate::relay::state::message::TransactionMessage;
use crate::relay::state::transaction::{Refused, Status, TransactionId};
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::{GuardedStore, Updated};

/// Which dead letters.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// Only these: message ids or transaction ids.
    pub ids: Vec<String>,
    /// Only those whose reason contains this, in any case.
    pub reason: Option<String>,
    /// At most so many.
    pub max: Option<usize>,
}

/// What became of one dead letter.
#[derive(Debug)]
pub enum Replayed {
    /// It is in the queue again.
    Yes,
    /// It is not, because.
    No(String),
    /// Its transaction is with a relayer or has ended: it was only left over, and is gone now.
    Over,
}

/// What can go wrong with all of it.
#[derive(Debug, thiserror::Error)]
pub enum DeadLetterError {
    /// The queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The transaction a dead letter is about; none if its body cannot be read.
pub fn transaction_id(letter: &DeadLetter) -> Option<TransactionId> {
    TransactionMessage::parse(&letter.body).ok().map(|envelope| envelope.transaction_id())
}

impl Selection {
    fn takes(&self, letter: &DeadLetter) -> bool {
        let about = transaction_id(letter).map(|id| id.to_string());
        self.matches(&letter.id.0, about.as_deref(), &letter.reason)
    }

    /// Whether a letter of this message, about that transaction or user, with that reason, is selected.
    pub fn matches(&self, message_id: &str, about: Option<&str>, reason: &str) -> bool {
        let by_id = self.ids.is_empty() || self.ids.iter().any(|id| *id == message_id || Some(id.as_str()) == about);
        let by_reason =
            self.reason.as_ref().is_none_or(|wanted| reason.to_lowercase().contains(&wanted.to_lowercase()));
        by_id && by_reason
    }
}

/// The selected dead letters, oldest first.
pub async fn select(guarded: &GuardedStore, selection: &Selection) -> Result<Vec<DeadLetter>, DeadLetterError> {
    const PAGE: usize = 500;
    let mut selected = Vec::new();
    let mut seen = HashSet::new();
    let mut after: Option<MessageId> = None;
    loop {
        let page = match guarded.queue.dead_letters(after.as_ref(), PAGE).await {
            // The last one read was moved meanwhile: from the start again, passing over what is known.
            Err(QueueError::NotFound) => {
                after = None;
                continue;
            }
            page => page?,
        };
        let last = page.last().map(|letter| letter.id.clone());
        let full = page.len() == PAGE;
        for letter in page {
            if selection.max.is_some_and(|max| selected.len() >= max) {
                return Ok(selected);
            }
            if selection.takes(&letter) && seen.insert(letter.id.clone()) {
                selected.push(letter);
            }
        }
        if !full {
            return Ok(selected);
        }
        after = last;
    }
}

/// Starts dead letters over; one answer for each. Their messages are moved together, since a queue may have to read
/// through all of its dead letters for each move.
pub async fn replay(guarded: &GuardedStore, letters: &[DeadLetter]) -> Result<Vec<Replayed>, DeadLetterError> {
    let mut answers = Vec::with_capacity(letters.len());
    let (mut reopened, mut over) = (Vec::new(), Vec::new());
    for letter in letters {
        let answer = reopen(guarded, letter).await?;
        match &answer {
            Replayed::Yes => reopened.push(letter.id.clone()),
            Replayed::Over => over.push(letter.id.clone()),
            Replayed::No(_) => {}
        }
        answers.push(answer);
    }
    settled(guarded.queue.replay(&reopened, Duration::ZERO).await)?;
    settled(guarded.queue.discard(&over).await)?;
    Ok(answers)
}

/// Drops dead letters for good; their transactions stay failed.
pub async fn discard(guarded: &GuardedStore, letters: &[DeadLetter]) -> Result<(), DeadLetterError> {
    let ids: Vec<MessageId> = letters.iter().map(|letter| letter.id.clone()).collect();
    settled(guarded.queue.discard(&ids).await)
}

/// Lets the row of a dead letter begin again.
async fn reopen(guarded: &GuardedStore, letter: &DeadLetter) -> Result<Replayed, StoreError> {
    let Some(id) = transaction_id(letter) else {
        return Ok(Replayed::No("its body is not a message about a transaction".to_owned()));
    };
    let now = guarded.clock.now();
    Ok(match guarded.update(id, |row| row.replay(now, &guarded.timings)).await? {
        Updated::Missing => Replayed::No("there is no such transaction".to_owned()),
        Updated::Moved(_) => Replayed::Yes,
        // An earlier replay was interrupted before it moved the message,
        Updated::Refused(_, row) if row.status == Status::Pending => Replayed::Yes,
        // or after: over two systems a copy of it stayed.
        Updated::Refused(_, row) if row.needs_no_message() => Replayed::Over,
        Updated::Refused(Refused::NotPossible(why), _) => Replayed::No(why.to_owned()),
        Updated::Refused(refused, _) => Replayed::No(refused.to_string()),
    })
}

fn settled(moved: Vec<Result<(), QueueError>>) -> Result<(), DeadLetterError> {
    for moved in moved {
        match moved {
            // Somebody else moved it in the meantime, which is just as well.
            Ok(()) | Err(QueueError::NotFound) => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(())
}
