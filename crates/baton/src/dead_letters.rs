//! Dead letters for operators: select them, replay them, drop them. One implementation for both lanes; a lane says what
//! differs in its [`DeadLetterLane`] (`relay/reconcile/dead_letters.rs`, `users/dead_letters.rs`).
//!
//! Dead letters are in the lane's queue and, in a lane that has one, in a quarantine: a table of messages that the lane's
//! consumer found impossible to process.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use pipeline::{Attributes, BoxError, DeadLetter, MessageId, Outgoing, Queue, QueueError};

/// What differs between the lanes.
#[async_trait]
pub trait DeadLetterLane: Send + Sync {
    /// What a message of this lane is about, for operators: `transaction` or `user`.
    fn subject(&self) -> &'static str;

    /// The id of the transaction or user that a message is about; `None` if the body cannot be read.
    fn subject_id(&self, body: &[u8]) -> Option<String>;

    /// The lane's queue.
    fn queue(&self) -> &dyn Queue;

    /// Where the lane keeps dead letters, in the order of a list.
    fn places(&self) -> &'static [DeadLetterPlace] {
        &[DeadLetterPlace::Queue]
    }

    /// Prepares one dead letter for another attempt, before its message moves. Called again if the command is repeated
    /// after an interruption, so it must be safe to repeat.
    async fn reopen(&self, _entry: &DeadLetterEntry) -> Result<Replayed, DeadLetterError> {
        Ok(Replayed::Queued)
    }

    /// One page of the quarantine, ordered by message id, after this id.
    async fn quarantined(
        &self,
        _after: Option<&MessageId>,
        _max: usize,
    ) -> Result<Vec<DeadLetterEntry>, DeadLetterError> {
        Ok(Vec::new())
    }

    /// Removes one message from the quarantine, if it is still there.
    async fn remove_quarantined(&self, _id: &MessageId) -> Result<(), DeadLetterError> {
        Ok(())
    }
}

/// Where a dead letter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadLetterPlace {
    /// In the lane's dead-letter queue.
    Queue,
    /// In the lane's quarantine.
    Quarantine,
}

/// One dead letter of a lane.
#[derive(Debug, Clone)]
pub struct DeadLetterEntry {
    /// Where it is.
    pub place: DeadLetterPlace,
    /// The id of its message.
    pub message_id: MessageId,
    /// Why it is a dead letter.
    pub reason: String,
    /// The message, byte for byte.
    pub body: Vec<u8>,
    /// When it came to this place.
    pub since: SystemTime,
    /// What only the queue knows; `None` in the quarantine.
    pub delivery: Option<DeliveryHistory>,
}

/// The history of a message in its queue.
#[derive(Debug, Clone)]
pub struct DeliveryHistory {
    /// When it was sent.
    pub sent_at: SystemTime,
    /// How many times it was received.
    pub receives: u32,
    /// Its attributes, as sent.
    pub attributes: Attributes,
}

impl From<DeadLetter> for DeadLetterEntry {
    fn from(letter: DeadLetter) -> Self {
        let DeadLetter { id, body, attributes, reason, receives, sent_at, buried_at, .. } = letter;
        let delivery = Some(DeliveryHistory { sent_at, receives, attributes });
        Self { place: DeadLetterPlace::Queue, message_id: id, reason, body, since: buried_at, delivery }
    }
}

/// Which dead letters. The default selects all.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// Only these message ids or subject ids; empty means any.
    pub ids: Vec<String>,
    /// Only those whose reason contains this text, ignoring case.
    pub reason: Option<String>,
    /// Maximum number of dead letters.
    pub max: Option<usize>,
}

/// The result of replaying one dead letter.
#[derive(Debug, PartialEq, Eq)]
pub enum Replayed {
    /// It is in the queue again.
    Queued,
    /// It stays a dead letter, for this reason.
    Refused(String),
    /// Its work is done or under way: it was the copy that an interrupted replay left behind, and is dropped.
    Leftover,
}

/// Why dead letters could not be read or moved.
#[derive(Debug, thiserror::Error)]
pub enum DeadLetterError {
    /// The queue failed.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The lane's store failed.
    #[error(transparent)]
    Store(BoxError),
}

impl DeadLetterError {
    /// For a lane's `map_err`.
    pub fn store(error: impl Into<BoxError>) -> Self {
        Self::Store(error.into())
    }
}

impl Selection {
    fn includes(&self, lane: &dyn DeadLetterLane, entry: &DeadLetterEntry) -> bool {
        let by_id = self.ids.is_empty() || {
            let subject = lane.subject_id(&entry.body);
            self.ids.iter().any(|id| *id == entry.message_id.0 || Some(id) == subject.as_ref())
        };
        let by_reason =
            self.reason.as_ref().is_none_or(|wanted| entry.reason.to_lowercase().contains(&wanted.to_lowercase()));
        by_id && by_reason
    }
}

/// Dead letters read at once, where a page costs what it returns.
const PAGE: usize = 500;

/// The size of a page of a queue's dead letters: all that one reading gives anyway, so that reading all of them is linear.
pub(crate) fn page_size(queue: &dyn Queue) -> usize {
    PAGE.max(queue.capabilities().dead_letters_per_read)
}

/// The selected dead letters: those in the queue, oldest first, then those in the quarantine.
pub async fn select(lane: &dyn DeadLetterLane, selection: &Selection) -> Result<Vec<DeadLetterEntry>, DeadLetterError> {
    let mut selected = Vec::new();
    for place in lane.places() {
        let size = match place {
            DeadLetterPlace::Queue => page_size(lane.queue()),
            DeadLetterPlace::Quarantine => PAGE,
        };
        let mut seen = HashSet::new();
        let mut after: Option<MessageId> = None;
        loop {
            let page = match read_page(lane, *place, after.as_ref(), size).await {
                // The last dead letter of the page before was moved meanwhile: start over, skipping the known ones.
                Err(DeadLetterError::Queue(QueueError::NotFound)) => {
                    after = None;
                    continue;
                }
                page => page?,
            };
            after = page.last().map(|entry| entry.message_id.clone());
            let is_last = page.len() < size;
            for entry in page {
                if selection.max.is_some_and(|max| selected.len() >= max) {
                    return Ok(selected);
                }
                if selection.includes(lane, &entry) && seen.insert(entry.message_id.clone()) {
                    selected.push(entry);
                }
            }
            if is_last {
                break;
            }
        }
    }
    Ok(selected)
}

async fn read_page(
    lane: &dyn DeadLetterLane,
    place: DeadLetterPlace,
    after: Option<&MessageId>,
    size: usize,
) -> Result<Vec<DeadLetterEntry>, DeadLetterError> {
    match place {
        DeadLetterPlace::Queue => {
            Ok(lane.queue().dead_letters(after, size).await?.into_iter().map(DeadLetterEntry::from).collect())
        }
        DeadLetterPlace::Quarantine => lane.quarantined(after, size).await,
    }
}

/// Replays dead letters; one answer for each, in order. Messages are moved together, since a queue may have to read
/// through all of its dead letters for each move.
pub async fn replay(lane: &dyn DeadLetterLane, entries: &[DeadLetterEntry]) -> Result<Vec<Replayed>, DeadLetterError> {
    let mut answers = Vec::with_capacity(entries.len());
    let (mut queued, mut leftover) = (Vec::new(), Vec::new());
    for entry in entries {
        let answer = lane.reopen(entry).await?;
        match &answer {
            Replayed::Queued => queued.push(entry),
            Replayed::Leftover => leftover.push(entry),
            Replayed::Refused(_) => {}
        }
        answers.push(answer);
    }
    let (in_queue, quarantined) = by_place(&queued);
    require_moved(lane.queue().replay(&in_queue, Duration::ZERO).await)?;
    resend(lane, &quarantined).await?;
    discard_all(lane, &leftover).await?;
    Ok(answers)
}

/// Drops dead letters for good, without another attempt.
pub async fn discard(lane: &dyn DeadLetterLane, entries: &[DeadLetterEntry]) -> Result<(), DeadLetterError> {
    discard_all(lane, &entries.iter().collect::<Vec<_>>()).await
}

async fn discard_all(lane: &dyn DeadLetterLane, entries: &[&DeadLetterEntry]) -> Result<(), DeadLetterError> {
    let (in_queue, quarantined) = by_place(entries);
    require_moved(lane.queue().discard(&in_queue).await)?;
    for entry in quarantined {
        lane.remove_quarantined(&entry.message_id).await?;
    }
    Ok(())
}

/// The ids of those in the queue, and those in the quarantine.
fn by_place<'e>(entries: &[&'e DeadLetterEntry]) -> (Vec<MessageId>, Vec<&'e DeadLetterEntry>) {
    let (in_queue, quarantined): (Vec<&DeadLetterEntry>, Vec<&DeadLetterEntry>) =
        entries.iter().partition(|entry| entry.place == DeadLetterPlace::Queue);
    (in_queue.into_iter().map(|entry| entry.message_id.clone()).collect(), quarantined)
}

/// Sends quarantined messages again. Each leaves the quarantine only after the queue has it: interrupted in between, the
/// message exists twice, which the consumers tolerate.
async fn resend(lane: &dyn DeadLetterLane, entries: &[&DeadLetterEntry]) -> Result<(), DeadLetterError> {
    let messages: Vec<_> = entries.iter().map(|entry| Outgoing::new(entry.body.clone())).collect();
    if messages.is_empty() {
        return Ok(());
    }
    let mut failure = None;
    for (entry, sent) in entries.iter().zip(lane.queue().send(&messages).await) {
        match sent {
            Ok(_) => lane.remove_quarantined(&entry.message_id).await?,
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(()), |error| Err(error.into()))
}

/// Fails on the first error. `NotFound` is none: another process moved that dead letter meanwhile.
pub(crate) fn require_moved(answers: Vec<Result<(), QueueError>>) -> Result<(), DeadLetterError> {
    for answer in answers {
        match answer {
            Ok(()) | Err(QueueError::NotFound) => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use pipeline::QueueOptions;
    use pipeline::queue::memory::MemoryQueue;

    use super::*;

    /// A lane whose subject is the body itself, with a quarantine in memory.
    struct TestLane {
        queue: MemoryQueue,
        quarantine: Mutex<Vec<DeadLetterEntry>>,
    }

    #[async_trait]
    impl DeadLetterLane for TestLane {
        fn subject(&self) -> &'static str {
            "test"
        }
        fn subject_id(&self, body: &[u8]) -> Option<String> {
            String::from_utf8(body.to_vec()).ok()
        }
        fn queue(&self) -> &dyn Queue {
            &self.queue
        }
        fn places(&self) -> &'static [DeadLetterPlace] {
            &[DeadLetterPlace::Queue, DeadLetterPlace::Quarantine]
        }
        async fn reopen(&self, entry: &DeadLetterEntry) -> Result<Replayed, DeadLetterError> {
            Ok(match entry.body.as_slice() {
                b"refused" => Replayed::Refused("no".to_owned()),
                b"leftover" => Replayed::Leftover,
                _ => Replayed::Queued,
            })
        }
        async fn quarantined(
            &self,
            after: Option<&MessageId>,
            max: usize,
        ) -> Result<Vec<DeadLetterEntry>, DeadLetterError> {
            let all = self.quarantine.lock().unwrap();
            let later = all.iter().filter(|entry| after.is_none_or(|after| entry.message_id.0 > after.0));
            Ok(later.take(max).cloned().collect())
        }
        async fn remove_quarantined(&self, id: &MessageId) -> Result<(), DeadLetterError> {
            self.quarantine.lock().unwrap().retain(|entry| entry.message_id != *id);
            Ok(())
        }
    }

    async fn lane(buried: &[&str], quarantined: &[&str]) -> TestLane {
        let queue = MemoryQueue::new("test", QueueOptions::default());
        let messages: Vec<_> = buried.iter().map(|body| Outgoing::new(*body)).collect();
        queue.send(&messages).await;
        for message in queue.receive(buried.len(), Duration::ZERO).await.unwrap() {
            queue.bury(&[(message.receipt, "Broken Pipe".to_owned())]).await;
        }
        let entry = |(place, body): (usize, &&str)| DeadLetterEntry {
            place: DeadLetterPlace::Quarantine,
            message_id: MessageId(format!("q{place:05}")),
            reason: "never a user".to_owned(),
            body: body.as_bytes().to_vec(),
            since: SystemTime::UNIX_EPOCH,
            delivery: None,
        };
        TestLane { queue, quarantine: Mutex::new(quarantined.iter().enumerate().map(entry).collect()) }
    }

    async fn selected(lane: &TestLane, selection: &Selection) -> Vec<String> {
        let entries = select(lane, selection).await.unwrap();
        entries.into_iter().map(|entry| String::from_utf8(entry.body).unwrap()).collect()
    }

    #[tokio::test]
    async fn every_page_of_the_queue_and_of_the_quarantine_is_read() {
        let bodies: Vec<String> = (0..2 * PAGE + 3).map(|number| number.to_string()).collect();
        let bodies: Vec<&str> = bodies.iter().map(String::as_str).collect();
        let lane = lane(&bodies, &bodies).await;
        assert_eq!(selected(&lane, &Selection::default()).await, [&bodies[..], &bodies[..]].concat());
        let most = Selection { max: Some(3 * PAGE), ..Selection::default() };
        assert_eq!(selected(&lane, &most).await.len(), 3 * PAGE);
    }

    #[tokio::test]
    async fn a_selection_is_by_message_id_subject_id_and_reason() {
        let lane = lane(&["a", "b"], &["c", "d"]).await;
        let by = |ids: &[&str], reason: Option<&str>| Selection {
            ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            reason: reason.map(str::to_owned),
            max: None,
        };
        assert_eq!(selected(&lane, &by(&["b", "q00001"], None)).await, ["b", "d"]);
        assert_eq!(selected(&lane, &by(&[], Some("broken pipe"))).await, ["a", "b"]);
        assert_eq!(selected(&lane, &by(&["a"], Some("never"))).await, [""; 0]);
    }

    #[tokio::test]
    async fn a_replay_moves_what_the_lane_allows_and_drops_leftovers() {
        let lane = lane(&["a", "refused", "leftover"], &["b", "refused"]).await;
        let entries = select(&lane, &Selection::default()).await.unwrap();
        let no = || Replayed::Refused("no".to_owned());
        let expected = [Replayed::Queued, no(), Replayed::Leftover, Replayed::Queued, no()];
        assert_eq!(replay(&lane, &entries).await.unwrap(), expected);
        assert_eq!(selected(&lane, &Selection::default()).await, ["refused", "refused"]);
        let mut queued: Vec<_> = lane.queue.receive(9, Duration::ZERO).await.unwrap();
        queued.sort_by(|one, other| one.body.cmp(&other.body));
        assert_eq!(queued.iter().map(|message| message.body.as_slice()).collect::<Vec<_>>(), [b"a", b"b"]);
    }

    #[tokio::test]
    async fn dropped_dead_letters_are_gone_and_a_repeat_is_no_error() {
        let lane = lane(&["a", "b"], &["c"]).await;
        let entries = select(&lane, &Selection::default()).await.unwrap();
        discard(&lane, &entries[1..]).await.unwrap();
        discard(&lane, &entries[1..]).await.unwrap();
        assert_eq!(selected(&lane, &Selection::default()).await, ["a"]);
        assert_eq!(lane.queue.depth().await.unwrap().ready, 0);
    }
}
