//! Reading the dead-letter queue. SQS has no way to look without taking, nor any order: a reader takes every letter for
//! a short while, sorts them, does what it came for, and puts the rest back. Another reader sees less in the meantime, so
//! one waits for the other. A reader that dies hides the letters for [`HIDE`], no longer.
//!
//! A letter may be there more than once: a burial is a copy and then a deletion, and what comes between may be a crash.
//! Copies have the same id and are one letter.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use futures::future::join_all;
use tokio::time::Instant;

use super::requests::{BATCH_MAX, Calls, Fault};
use super::wire::{Content, Delivery};
use crate::message::{DeadLetter, MessageId};

/// How long a reader hides what it takes.
const HIDE: Duration = Duration::from_secs(45);
/// How long it goes on taking.
const TAKE_MAX: Duration = Duration::from_secs(20);
/// How long it waits for letters that somebody else has taken.
const OTHERS_MAX: Duration = Duration::from_secs(5);
/// How many letters it takes, and how much of them, before it makes do.
const LETTERS_MAX: usize = 10_000;
const BYTES_MAX: usize = 64 * 1024 * 1024;
/// How many requests take at once when there are many letters.
const LANES: usize = 4;
/// Only a receive that waits asks all of SQS's servers.
const WAIT_S: i32 = 1;

/// The dead letters that one reader holds.
pub(super) struct Letters {
    /// By when they were buried.
    sorted: BTreeMap<(SystemTime, MessageId), Letter>,
    /// Whether all were seen.
    pub(super) complete: bool,
}

/// A dead letter and its copies.
pub(super) struct Letter {
    pub(super) content: Content,
    pub(super) sent_at: SystemTime,
    pub(super) handles: Vec<String>,
    reason: String,
    by_queue: bool,
    receives: u32,
}

impl Letters {
    /// Takes all there are, or enough to have the `wanted` ones. When this fails nothing stays taken.
    pub(super) async fn take(
        calls: &Calls,
        queue_url: &str,
        receives_max: Option<u32>,
        wanted: Option<&[MessageId]>,
    ) -> Result<Letters, Fault> {
        let start = Instant::now();
        loop {
            let mut taken = HashMap::new();
            let outcome = fill(calls, queue_url, &mut taken, wanted, start).await;
            match outcome {
                Ok(End::Yield) => {
                    put_back(calls, queue_url, taken.into_values().map(|delivery| delivery.handle)).await;
                    tokio::time::sleep(Duration::from_millis(rand::random_range(500..1500))).await;
                }
                Ok(End::Complete) => return Ok(sort(taken.into_values(), receives_max, true)),
                Ok(End::Partial) => return Ok(sort(taken.into_values(), receives_max, false)),
                Err(fault) => {
                    put_back(calls, queue_url, taken.into_values().map(|delivery| delivery.handle)).await;
                    return Err(fault);
                }
            }
        }
    }

    /// Gives back what is left.
    pub(super) async fn put_back(self, calls: &Calls, queue_url: &str) {
        put_back(calls, queue_url, self.sorted.into_values().flat_map(|letter| letter.handles)).await;
    }

    /// A page after the letter `after`, which must be there unless `None`.
    pub(super) fn page(&self, after: Option<&MessageId>, max: usize) -> Option<Vec<DeadLetter>> {
        let mut rest = self.sorted.iter();
        if let Some(after) = after {
            rest.find(|((_, id), _)| id == after)?;
        }
        let show = |((buried_at, id), letter): (&(SystemTime, MessageId), &Letter)| DeadLetter {
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

    /// Hands over the letters asked for, each once; `None` for one that is not there.
    pub(super) fn pick(&mut self, ids: &[MessageId]) -> Vec<Option<Letter>> {
        let mut places: HashMap<MessageId, SystemTime> =
            self.sorted.keys().map(|(buried_at, id)| (id.clone(), *buried_at)).collect();
        let mut pick = |id: &MessageId| {
            let buried_at = places.remove(id)?;
            self.sorted.remove(&(buried_at, id.clone()))
        };
        ids.iter().map(&mut pick).collect()
    }
}

enum End {
    /// Nothing more comes and nobody else holds any, or all that were wanted are there.
    Complete,
    /// Too many, or somebody else holds some and does not give them back.
    Partial,
    /// Somebody else holds more: theirs goes first.
    Yield,
}

/// Takes until nothing comes; whatever happens, `taken` is what must be given back.
async fn fill(
    calls: &Calls,
    queue_url: &str,
    taken: &mut HashMap<String, Delivery>,
    wanted: Option<&[MessageId]>,
    start: Instant,
) -> Result<End, Fault> {
    let (mut lanes, mut bytes) = (1, 0);
    let mut missing: Option<HashSet<&MessageId>> = wanted.map(|wanted| wanted.iter().collect());
    let hide_s = super::wire::whole_seconds(HIDE);
    loop {
        let took = (0..lanes).map(|_| calls.receive(queue_url, BATCH_MAX, WAIT_S, hide_s));
        let (mut came, mut new, mut failed) = (0, 0, None);
        for answer in join_all(took).await {
            match answer {
                Ok(deliveries) => {
                    for delivery in deliveries {
                        came += 1;
                        bytes += delivery.content.body.len();
                        missing.as_mut().map(|missing| missing.remove(&delivery.content.id));
                        new += usize::from(taken.insert(delivery.sqs_id.clone(), delivery).is_none());
                    }
                }
                Err(fault) => failed = Some(fault),
            }
        }
        if let Some(fault) = failed {
            return Err(fault);
        }
        if missing.as_ref().is_some_and(HashSet::is_empty) {
            return Ok(End::Complete);
        }
        let elapsed = start.elapsed();
        if taken.len() >= LETTERS_MAX || bytes >= BYTES_MAX || elapsed >= TAKE_MAX || (came > 0 && new == 0) {
            return Ok(End::Partial);
        }
        lanes = if came >= lanes * BATCH_MAX { LANES } else { 1 };
        if came > 0 {
            continue;
        }
        let others = calls.counts(queue_url).await?.hidden.saturating_sub(taken.len() as u64);
        match others {
            0 => return Ok(End::Complete),
            _ if elapsed >= OTHERS_MAX => return Ok(End::Partial),
            _ if i_yield(taken.len() as u64, others, rand::random()) => return Ok(End::Yield),
            _ => {}
        }
    }
}

/// Of two readers that hold a part each, the one with less gives way; equals toss a coin.
fn i_yield(mine: u64, others: u64, coin: bool) -> bool {
    mine > 0 && (others > mine || (others == mine && coin))
}

/// What cannot be given back comes back by itself.
async fn put_back(calls: &Calls, queue_url: &str, handles: impl Iterator<Item = String>) {
    let entries: Vec<_> = handles.map(|handle| (handle, 0)).collect();
    let failed = calls.hide(queue_url, &entries).await.iter().filter(|answer| answer.is_err()).count();
    if failed > 0 {
        tracing::warn!(queue_url, failed, hidden_s = HIDE.as_secs(), "dead letters stay hidden for a while");
    }
}

/// Orders letters by burial and joins copies under the earliest.
fn sort(taken: impl Iterator<Item = Delivery>, receives_max: Option<u32>, complete: bool) -> Letters {
    let mut letters: HashMap<MessageId, (SystemTime, Letter)> = HashMap::new();
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
    Letters { sorted, complete }
}

/// A letter that SQS moved by itself says nothing of its burial. Its first delivery is the nearest time that is known
/// and stays the same; its receive count goes on with each reading, but it was moved after `receives_max`.
fn read(delivery: Delivery, receives_max: Option<u32>) -> (SystemTime, Letter) {
    let (buried_at, reason, by_queue, receives) = match delivery.burial {
        Some(burial) => (burial.at, burial.reason, false, burial.receives),
        None => {
            let receives = receives_max.map_or(delivery.receives, |max| delivery.receives.min(max));
            let reason = format!("moved by SQS after {receives} deliveries without a verdict");
            (delivery.first_received_at.unwrap_or(delivery.sent_at), reason, true, receives)
        }
    };
    let (content, sent_at) = (delivery.content, delivery.sent_at);
    (buried_at, Letter { content, sent_at, handles: Vec::new(), reason, by_queue, receives })
}

#[cfg(test)]
mod tests {
    use super::super::wire::Burial;
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn delivery(id: &str, handle: &str, burial: Option<(u64, &str)>) -> Delivery {
        Delivery {
            content: Content { id: MessageId(id.into()), body: id.into(), attributes: Default::default() },
            handle: handle.into(),
            sqs_id: handle.into(),
            receives: 9,
            sent_at: at(1),
            first_received_at: Some(at(50)),
            not_before: None,
            burial: burial.map(|(seconds, reason)| Burial { reason: reason.into(), at: at(seconds), receives: 4 }),
        }
    }

    fn listed(letters: &Letters, after: Option<&str>, max: usize) -> Vec<String> {
        let after = after.map(|id| MessageId(id.into()));
        letters.page(after.as_ref(), max).unwrap().into_iter().map(|letter| letter.id.0).collect()
    }

    #[test]
    fn letters_come_by_burial_in_pages() {
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
    fn copies_are_one_letter() {
        let taken = [delivery("a", "late", Some((20, "second"))), delivery("a", "early", Some((10, "first")))];
        let mut letters = sort(taken.into_iter(), None, true);
        let page = letters.page(None, 10).unwrap();
        assert_eq!((page.len(), page[0].reason.as_str(), page[0].buried_at), (1, "first", at(10)));
        let wanted = MessageId("a".into());
        let picked = letters.pick(&[wanted.clone(), wanted]);
        assert_eq!(picked[0].as_ref().unwrap().handles, ["late", "early"], "all copies go");
        assert!(picked[1].is_none(), "asked twice, there once");
        assert!(letters.page(None, 10).unwrap().is_empty());
    }

    #[test]
    fn what_sqs_moved_has_a_reason_and_a_steady_count() {
        let letters = sort([delivery("a", "1", None)].into_iter(), Some(3), true);
        let letter = letters.page(None, 1).unwrap().remove(0);
        assert_eq!((letter.by_queue, letter.receives, letter.buried_at), (true, 3, at(50)));
        assert_eq!(letter.reason, "moved by SQS after 3 deliveries without a verdict");
    }

    #[test]
    fn one_of_two_readers_gives_way() {
        assert!(!i_yield(0, 5, true), "it has nothing to give");
        assert!(i_yield(1, 5, false) && !i_yield(5, 1, true));
        assert!(i_yield(5, 5, true) && !i_yield(5, 5, false));
    }
}
