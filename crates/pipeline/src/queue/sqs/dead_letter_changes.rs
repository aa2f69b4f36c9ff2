//! Lists, replays and discards dead letters: takes a [`DeadLetterSnapshot`], acts on it, and puts the rest back.

use std::time::{Duration, SystemTime};

use super::client::RequestError;
use super::dead_letters::{DeadLetterSnapshot, HeldDeadLetter};
use super::{SqsQueueState, no_answer, wire};
use crate::message::MessageId;
use crate::queue::QueueError;

/// How long a reader of the dead letters waits for other readers of this process.
const READING_LOCK_WAIT_MAX: Duration = Duration::from_secs(30);

/// What to do with dead letters.
#[derive(Clone, Copy)]
pub(super) enum DeadLetterChange {
    /// Move them back into the queue, due after this delay.
    Replay(Duration),
    Discard,
}

impl SqsQueueState {
    pub(super) async fn lock_reading(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, RequestError> {
        tokio::time::timeout(READING_LOCK_WAIT_MAX, self.reading.lock()).await.map_err(|_| RequestError::not_started())
    }

    pub(super) async fn snapshot_dead_letters(
        &self,
        wanted: Option<&[MessageId]>,
    ) -> Result<DeadLetterSnapshot, RequestError> {
        DeadLetterSnapshot::take(&self.client, &self.dead_url, self.options.receives_max, wanted).await
    }

    /// Sends letters back into the queue with their original content and age.
    async fn replay_dead_letters(&self, letters: &[&HeldDeadLetter], delay: Duration) -> Vec<Result<(), QueueError>> {
        let now = SystemTime::now();
        let live =
            |letter: &&HeldDeadLetter| wire::live(&letter.content, Some(letter.sent_at), delay, self.delay_step, now);
        self.sender.send(letters.iter().map(live).collect()).await
    }

    /// Applies `change` to the letters with these ids, deletes each letter that it succeeded for, and puts the rest back.
    pub(super) async fn change_dead_letters(
        &self,
        ids: &[MessageId],
        change: DeadLetterChange,
    ) -> Vec<Result<(), QueueError>> {
        let all_fail = |error: RequestError| ids.iter().map(|_| Err(error.clone().into())).collect();
        let _reading = match self.lock_reading().await {
            Ok(turn) => turn,
            Err(error) => return all_fail(error),
        };
        // A replay may stop once it has the wanted letters: a copy left behind is harmless. A discard must find every copy.
        let enough = match change {
            DeadLetterChange::Replay(_) => Some(ids),
            DeadLetterChange::Discard => None,
        };
        let mut letters = match self.snapshot_dead_letters(enough).await {
            Ok(letters) => letters,
            Err(error) => return all_fail(error),
        };
        let picked = letters.pick(ids);
        let found: Vec<&HeldDeadLetter> = picked.iter().flatten().collect();
        let changed = match change {
            DeadLetterChange::Replay(delay) => self.replay_dead_letters(&found, delay).await,
            DeadLetterChange::Discard => found.iter().map(|_| Ok(())).collect(),
        };
        let gone = found.iter().zip(&changed).filter(|(_, changed)| changed.is_ok());
        let handles: Vec<(usize, String)> = gone
            .enumerate()
            .flat_map(|(place, (letter, _))| letter.handles.iter().map(move |handle| (place, handle.clone())))
            .collect();
        let flat: Vec<String> = handles.iter().map(|(_, handle)| handle.clone()).collect();
        let deleted = self.client.delete(&self.dead_url, &flat).await;
        let complete = letters.complete;
        let kept = found.iter().zip(&changed).filter(|(_, changed)| changed.is_err());
        let kept: Vec<String> = kept.flat_map(|(letter, _)| letter.handles.clone()).collect();
        let kept: Vec<(String, i32)> = kept.into_iter().map(|handle| (handle, 0)).collect();
        tokio::join!(letters.put_back(&self.client, &self.dead_url), self.client.hide(&self.dead_url, &kept));
        answers_by_id(&picked, complete, changed, handles.iter().map(|(place, _)| *place).zip(deleted))
    }
}

/// One answer for each id: not found, not changed, not deleted (any of its copies), or done.
fn answers_by_id(
    picked: &[Option<HeldDeadLetter>],
    complete: bool,
    changed: Vec<Result<(), QueueError>>,
    deleted: impl Iterator<Item = (usize, Result<(), QueueError>)>,
) -> Vec<Result<(), QueueError>> {
    let mut failures: Vec<Option<QueueError>> =
        changed.iter().filter(|changed| changed.is_ok()).map(|_| None).collect();
    for (place, deleted) in deleted {
        if let Err(error) = deleted {
            failures[place] = Some(error);
        }
    }
    let (mut changed, mut failures) = (changed.into_iter(), failures.into_iter());
    let answer = |letter: &Option<HeldDeadLetter>| match letter {
        None => Err(not_found(complete)),
        Some(_) => {
            changed.next().unwrap_or_else(no_answer)?;
            failures.next().flatten().map_or(Ok(()), Err)
        }
    };
    picked.iter().map(answer).collect()
}

/// The answer for an id that was not seen: `NotFound` only if all letters were read.
pub(super) fn not_found(complete: bool) -> QueueError {
    if complete { QueueError::NotFound } else { QueueError::Unavailable("not all dead letters could be read".into()) }
}
