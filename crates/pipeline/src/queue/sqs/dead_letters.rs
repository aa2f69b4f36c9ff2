//! Takes a snapshot of the dead-letter queue. SQS can neither list messages without receiving them nor order them: a
//! reader receives every letter, hides it for [`HIDE`], sorts the letters, does its work, and puts the rest back. Other
//! readers see fewer letters meanwhile, so readers give way to each other. If a reader dies, its letters are visible again
//! after [`HIDE`].
//!
//! A letter may be stored more than once, because a crash may separate the copy and the deletion of a burial. Copies have
//! the same id and count as one letter.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use futures::future::join_all;
use tokio::time::Instant;

use super::client::{BATCH_MAX, RequestError, SqsClient};
use super::wire::{MessageContent, SqsDelivery};
use crate::message::{DeadLetter, MessageId};

/// How long a reader hides the letters that it takes.
const HIDE: Duration = Duration::from_secs(45);
/// How long a reader continues to take letters.
const TAKE_TIME_MAX: Duration = Duration::from_secs(20);
/// How long a reader waits for letters that other readers hold.
const OTHER_READERS_WAIT_MAX: Duration = Duration::from_secs(5);
/// Letters that a snapshot holds at most.
pub(super) const LETTERS_MAX: usize = 10_000;
/// Bytes of their bodies that a snapshot holds at most.
const BYTES_MAX: usize = 64 * 1024 * 1024;
/// Concurrent receives while they come back full.
const PARALLEL_RECEIVES: usize = 4;
/// Long poll, because a receive without a wait asks only some of SQS's servers.
const WAIT_S: i32 = 1;

/// The dead letters that one reader has taken.
pub(super) struct DeadLetterSnapshot {
    /// Ordered by burial time.
    sorted: BTreeMap<(SystemTime, MessageId), HeldDeadLetter>,
    /// Whether these are all letters of the queue (or all wanted ones).
    pub(super) complete: bool,
}

/// A dead letter with the receipt handles of all its copies.
pub(super) struct HeldDeadLetter {
    pub(super) content: MessageContent,
    pub(super) sent_at: SystemTime,
    pub(super) handles: Vec<String>,
    reason: String,
    by_queue: bool,
    receives: u32,
}

impl DeadLetterSnapshot {
    /// Takes all letters, or stops once it has the `wanted` ones. On failure it puts back what it has taken.
    pub(super) async fn take(
        client: &SqsClient,
        queue_url: &str,
        receives_max: Option<u32>,
        wanted: Option<&[MessageId]>,
    ) -> Result<DeadLetterSnapshot, RequestError> {
        let start = Instant::now();
        loop {
            let mut taken = HashMap::new();
            let outcome = fill(client, queue_url, &mut taken, wanted, start).await;
            match outcome {
                Ok(ReadEnd::Yield) => {
                    put_back(client, queue_url, taken.into_values().map(|delivery| delivery.handle)).await;
                    tokio::time::sleep(Duration::from_millis(rand::random_range(500..1500))).await;
                }
                Ok(ReadEnd::Complete) => return Ok(sort(taken.into_values(), receives_max, true)),
                Ok(ReadEnd::Partial) => return Ok(sort(taken.into_values(), receives_max, false)),
                Err(error) => {
                    put_back(client, queue_url, taken.into_values().map(|delivery| delivery.handle)).await;
                    return Err(error);
                }
            }
        }
    }

    /// Makes the letters that are left visible again.
    pub(super) async fn put_back(self, client: &SqsClient, queue_url: &str) {
        put_back(client, queue_url, self.sorted.into_values().flat_map(|letter| letter.handles)).await;
    }

    /// A page of letters after the letter `after`; `None` if that letter is not in the snapshot.
    pub(super) fn page(&self, after: Option<&MessageId>, max: usize) -> Option<Vec<DeadLetter>> {
        let mut rest = self.sorted.iter();
        if let Some(after) = after {
            rest.find(|((_, id), _)| id == after)?;
        }
        let show = |((buried_at, id), letter): (&(SystemTime, MessageId), &HeldDeadLetter)| DeadLetter {
            id: id.clone(),
            body: letter.content.body.clone(),
            attributes: letter.content.attributes.clone(),
            reason: letter.reason.clone(),
            by_queue: letter.by_queue,
            receives: letter.receives,
            sent_at: letter.sent_at,
            buried_at: *buried_at,
        };
        Some(rest.take(max).map(show).collect())
    }

    /// Removes the letters with these ids from the snapshot, each once; `None` for an id that is not in it.
    pub(super) fn pick(&mut self, ids: &[MessageId]) -> Vec<Option<HeldDeadLetter>> {
        let mut places: HashMap<MessageId, SystemTime> =
            self.sorted.keys().map(|(buried_at, id)| (id.clone(), *buried_at)).collect();
        let mut pick = |id: &MessageId| {
            let buried_at = places.remove(id)?;
            self.sorted.remove(&(buried_at, id.clone()))
        };
        ids.iter().map(&mut pick).collect()
    }
}

enum ReadEnd {
    /// All letters of the queue, or all wanted ones, are taken.
    Complete,
    /// A limit was reached, or another reader holds letters for too long.
    Partial,
    /// Another reader holds more letters: this reader gives way.
    Yield,
}

/// Receives into `taken` until a [`ReadEnd`]. The caller puts `taken` back, also after an error.
async fn fill(
    client: &SqsClient,
    queue_url: &str,
    taken: &mut HashMap<String, SqsDelivery>,
    wanted: Option<&[MessageId]>,
    start: Instant,
) -> Result<ReadEnd, RequestError> {
    let (mut parallel, mut bytes) = (1, 0);
    let mut missing: Option<HashSet<&MessageId>> = wanted.map(|wanted| wanted.iter().collect());
    let hide_s = super::wire::whole_seconds(HIDE);
    loop {
        let receives = (0..parallel).map(|_| client.receive(queue_url, BATCH_MAX, WAIT_S, hide_s));
        let (mut received, mut new, mut failed) = (0, 0, None);
        for answer in join_all(receives).await {
            match answer {
                Ok(deliveries) => {
                    for delivery in deliveries {
                        received += 1;
                        bytes += delivery.content.body.len();
                        missing.as_mut().map(|missing| missing.remove(&delivery.content.id));
                        new += usize::from(taken.insert(delivery.sqs_id.clone(), delivery).is_none());
                    }
                }
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if missing.as_ref().is_some_and(HashSet::is_empty) {
            return Ok(ReadEnd::Complete);
        }
        let elapsed = start.elapsed();
        if taken.len() >= LETTERS_MAX || bytes >= BYTES_MAX || elapsed >= TAKE_TIME_MAX || (received > 0 && new == 0) {
            return Ok(ReadEnd::Partial);
        }
        parallel = if received >= parallel * BATCH_MAX { PARALLEL_RECEIVES } else { 1 };
        if received > 0 {
            continue;
        }
        let others = client.counts(queue_url).await?.hidden.saturating_sub(taken.len() as u64);
        match others {
            0 => return Ok(ReadEnd::Complete),
            _ if elapsed >= OTHER_READERS_WAIT_MAX => return Ok(ReadEnd::Partial),
            _ if must_yield(taken.len() as u64, others, rand::random()) => return Ok(ReadEnd::Yield),
            _ => {}
        }
    }
}

/// Of two readers that each hold a part, the one with fewer letters gives way; equals decide by `coin`.
fn must_yield(mine: u64, others: u64, coin: bool) -> bool {
    mine > 0 && (others > mine || (others == mine && coin))
}

/// Makes letters visible again. A letter for which this fails is visible after [`HIDE`].
async fn put_back(client: &SqsClient, queue_url: &str, handles: impl Iterator<Item = String>) {
    let entries: Vec<_> = handles.map(|handle| (handle, 0)).collect();
    let failed = client.hide(queue_url, &entries).await.iter().filter(|answer| answer.is_err()).count();
    if failed > 0 {
        tracing::warn!(
            queue_url,
            failed,
            hidden_s = HIDE.as_secs(),
            "cannot put back dead letters; they stay hidden for up to `hidden_s` seconds"
        );
    }
}

/// Orders letters by burial and merges copies into the earliest.
fn sort(taken: impl Iterator<Item = SqsDelivery>, receives_max: Option<u32>, complete: bool) -> DeadLetterSnapshot {
    let mut letters: HashMap<MessageId, (SystemTime, HeldDeadLetter)> = HashMap::new();
    for delivery in taken {
        let handle = delivery.handle.clone();
        let (buried_at, mut letter) = read(delivery, receives_max);
        match letters.entry(letter.content.id.clone()) {
            std::collections::hash_map::Entry::Vacant(place) => {
                letter.handles.push(handle);
                place.insert((buried_at, letter));
            }
            std::collections::hash_map::Entry::Occupied(mut place) => {
                let (known_at, known) = place.get_mut();
                let mut handles = std::mem::take(&mut known.handles);
                handles.push(handle);
                if buried_at < *known_at {
                    (*known_at, *known) = (buried_at, letter);
                }
                known.handles = handles;
            }
        }
    }
    let sorted = letters.into_iter().map(|(id, (buried_at, letter))| ((buried_at, id), letter)).collect();
    DeadLetterSnapshot { sorted, complete }
}

/// Reads a letter. One that SQS moved itself has no burial attributes: its first delivery stands for the burial time,
/// because it is the closest known time that stays constant. Reading raises its receive count, so the count is capped at
/// `receives_max`, after which SQS moved it.
fn read(delivery: SqsDelivery, receives_max: Option<u32>) -> (SystemTime, HeldDeadLetter) {
    let (buried_at, reason, by_queue, receives) = match delivery.burial {
        Some(burial) => (burial.at, burial.reason, false, burial.receives),
        None => {
            let receives = receives_max.map_or(delivery.receives, |max| delivery.receives.min(max));
            let reason = format!("moved by SQS after {receives} deliveries without an outcome");
            (delivery.first_received_at.unwrap_or(delivery.sent_at), reason, true, receives)
        }
    };
    let (content, sent_at) = (delivery.content, delivery.sent_at);
    (buried_at, HeldDeadLetter { content, sent_at, handles: Vec::new(), reason, by_queue, receives })
}

#[cfg(test)]
mod tests {
    use super::super::wire::Burial;
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn delivery(id: &str, handle: &str, burial: Option<(u64, &str)>) -> SqsDelivery {
        SqsDelivery {
            content: MessageContent { id: MessageId(id.into()), body: id.into(), attributes: Default::default() },
            handle: handle.into(),
            sqs_id: handle.into(),
            receives: 9,
            sent_at: at(1),
            first_received_at: Some(at(50)),
            not_before: None,
            burial: burial.map(|(seconds, reason)| Burial { reason: reason.into(), at: at(seconds), receives: 4 }),
        }
    }

    fn listed(letters: &DeadLetterSnapshot, after: Option<&str>, max: usize) -> Vec<String> {
        let after = after.map(|id| MessageId(id.into()));
        letters.page(after.as_ref(), max).unwrap().into_iter().map(|letter| letter.id.0).collect()
    }

    #[test]
    fn letters_are_listed_by_burial_in_pages() {
        let taken = [
            delivery("b", "1", Some((20, "r"))),
            delivery("c", "2", Some((30, "r"))),
            delivery("a", "3", Some((10, "r"))),
        ];
        let letters = sort(taken.into_iter(), None, true);
        assert_eq!(listed(&letters, None, 2), ["a", "b"]);
        assert_eq!(listed(&letters, Some("b"), 2), ["c"]);
        assert!(listed(&letters, Some("c"), 2).is_empty());
        assert!(letters.page(Some(&MessageId("gone".into())), 2).is_none());
    }

    #[test]
    fn copies_count_as_one_letter() {
        let taken = [delivery("a", "late", Some((20, "second"))), delivery("a", "early", Some((10, "first")))];
        let mut letters = sort(taken.into_iter(), None, true);
        let page = letters.page(None, 10).unwrap();
        assert_eq!((page.len(), page[0].reason.as_str(), page[0].buried_at), (1, "first", at(10)));
        let wanted = MessageId("a".into());
        let picked = letters.pick(&[wanted.clone(), wanted]);
        assert_eq!(picked[0].as_ref().unwrap().handles, ["late", "early"], "all copies are removed");
        assert!(picked[1].is_none(), "requested twice, stored once");
        assert!(letters.page(None, 10).unwrap().is_empty());
    }

    #[test]
    fn a_letter_that_sqs_moved_has_a_reason_and_a_constant_count() {
        let letters = sort([delivery("a", "1", None)].into_iter(), Some(3), true);
        let letter = letters.page(None, 1).unwrap().remove(0);
        assert_eq!((letter.by_queue, letter.receives, letter.buried_at), (true, 3, at(50)));
        assert_eq!(letter.reason, "moved by SQS after 3 deliveries without an outcome");
    }

    #[test]
    fn the_reader_with_fewer_dead_letters_yields() {
        assert!(!must_yield(0, 5, true), "it holds no letters");
        assert!(must_yield(1, 5, false) && !must_yield(5, 1, true));
        assert!(must_yield(5, 5, true) && !must_yield(5, 5, false));
    }
}
