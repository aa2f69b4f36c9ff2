//! Lists, replays and discards dead letters: takes a snapshot of them ([`Letters`]), acts on it, and puts the rest back.

use std::time::{Duration, SystemTime};

use super::dead_letters::{Letter, Letters};
use super::requests::Fault;
use super::{Shared, unanswered, wire};
use crate::message::MessageId;
use crate::queue::QueueError;

/// How long a reader of the dead letters waits for those before it.
const READING_TURN_MAX: Duration = Duration::from_secs(30);

/// What becomes of dead letters.
#[derive(Clone, Copy)]
pub(super) enum Change {
    /// Back into the queue after this delay.
    Replay(Duration),
    Discard,
}

impl Shared {
    pub(super) async fn turn_to_read(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, Fault> {
        tokio::time::timeout(READING_TURN_MAX, self.reading.lock()).await.map_err(|_| Fault::not_started())
    }

    pub(super) async fn take_letters(&self, wanted: Option<&[MessageId]>) -> Result<Letters, Fault> {
        Letters::take(&self.calls, &self.dead_url, self.options.receives_max, wanted).await
    }

    /// Sends letters back into the queue, as they were sent first.
    async fn send_back(&self, letters: &[&Letter], delay: Duration) -> Vec<Result<(), QueueError>> {
        let now = SystemTime::now();
        let live = |letter: &&Letter| wire::live(&letter.content, Some(letter.sent_at), delay, self.delay_step, now);
        self.outbox.send(letters.iter().map(live).collect()).await
    }

    /// Applies `change` to the letters asked for, deletes those it worked for, and puts the rest back.
    pub(super) async fn change_letters(&self, ids: &[MessageId], change: Change) -> Vec<Result<(), QueueError>> {
        let all_fail = |fault: Fault| ids.iter().map(|_| Err(fault.clone().into())).collect();
        let _turn = match self.turn_to_read().await {
            Ok(turn) => turn,
            Err(fault) => return all_fail(fault),
        };
        // A copy that a replay leaves behind does no harm; one that is to be dropped must not come up again.
        let enough = match change {
            Change::Replay(_) => Some(ids),
            Change::Discard => None,
        };
        let mut letters = match self.take_letters(enough).await {
            Ok(letters) => letters,
            Err(fault) => return all_fail(fault),
        };
        let picked = letters.pick(ids);
        let found: Vec<&Letter> = picked.iter().flatten().collect();
        let changed = match change {
            Change::Replay(delay) => self.send_back(&found, delay).await,
            Change::Discard => found.iter().map(|_| Ok(())).collect(),
        };
        let gone = found.iter().zip(&changed).filter(|(_, changed)| changed.is_ok());
        let handles: Vec<(usize, String)> = gone
            .enumerate()
            .flat_map(|(place, (letter, _))| letter.handles.iter().map(move |handle| (place, handle.clone())))
            .collect();
        let flat: Vec<String> = handles.iter().map(|(_, handle)| handle.clone()).collect();
        let deleted = self.calls.delete(&self.dead_url, &flat).await;
        let complete = letters.complete;
        let kept = found.iter().zip(&changed).filter(|(_, changed)| changed.is_err());
        let kept: Vec<String> = kept.flat_map(|(letter, _)| letter.handles.clone()).collect();
        let kept: Vec<(String, i32)> = kept.into_iter().map(|handle| (handle, 0)).collect();
        tokio::join!(letters.put_back(&self.calls, &self.dead_url), self.calls.hide(&self.dead_url, &kept));
        answer_letters(&picked, complete, changed, handles.iter().map(|(place, _)| *place).zip(deleted))
    }
}

/// One answer for each id: not there, not changed, not deleted (in any of its copies), or done.
fn answer_letters(
    picked: &[Option<Letter>],
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
    let answer = |letter: &Option<Letter>| match letter {
        None => Err(missing(complete)),
        Some(_) => {
            changed.next().unwrap_or_else(unanswered)?;
            failures.next().flatten().map_or(Ok(()), Err)
        }
    };
    picked.iter().map(answer).collect()
}

/// Only who has seen all letters can say that one is not there.
pub(super) fn missing(complete: bool) -> QueueError {
    if complete { QueueError::NotFound } else { QueueError::Unavailable("not all dead letters could be read".into()) }
}
