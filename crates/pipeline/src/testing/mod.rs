//! The conformance suite: each sentence of the [`Queue`] contract is a test, and every backend passes it unchanged.
//!
//! A backend brings a constructor and a [`Profile`], and calls [`queue_conformance!`](crate::queue_conformance):
//!
//! ```
//! use pipeline::QueueOptions;
//! use pipeline::queue::memory::MemoryQueue;
//! use pipeline::testing::{Profile, Subject};
//!
//! async fn fresh(options: QueueOptions) -> Subject {
//!     Subject::new(MemoryQueue::new("test", options))
//! }
//!
//! pipeline::queue_conformance!(memory, Profile::fast(), fresh);
//! # fn main() {}
//! ```
//!
//! No test asserts that something happens soon, only that it does happen before [`Profile::patience`] ends, and that
//! nothing happens early. What a backend does not promise ([`Capabilities`](crate::Capabilities)) is not asked of it.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

use std::any::Any;
use std::collections::HashSet;
use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{DeadLetter, Message, MessageId, Outgoing, Queue, QueueError, QueueOptions, Receipt};

/// The durations that fit a backend.
#[derive(Debug, Clone)]
pub struct Profile {
    /// A lease or delay that a test waits out. At least the backend's granularity.
    pub short: Duration,
    /// A lease or delay that does not end during a test.
    pub long: Duration,
    /// How long to watch before concluding that nothing comes. Several times the backend's usual delivery time.
    pub quiet: Duration,
    /// How long to wait for what must come.
    pub patience: Duration,
    /// How much earlier than asked a backend may act, because it rounds.
    pub tolerance: Duration,
}

impl Profile {
    /// For backends in this process or on this machine.
    pub fn fast() -> Self {
        Self {
            short: Duration::from_millis(300),
            long: Duration::from_secs(120),
            quiet: Duration::from_millis(100),
            patience: Duration::from_secs(30),
            tolerance: Duration::from_millis(2),
        }
    }

    /// For backends that count in whole seconds.
    pub fn whole_seconds() -> Self {
        Self {
            short: Duration::from_secs(2),
            long: Duration::from_secs(300),
            quiet: Duration::from_secs(1),
            patience: Duration::from_secs(60),
            tolerance: Duration::from_secs(1),
        }
    }
}

/// A fresh, empty queue, and whatever must live as long as it does (a directory, a server).
pub struct Subject {
    /// The queue.
    pub queue: Arc<dyn Queue>,
    /// Dropped after the test.
    pub keep: Box<dyn Any + Send>,
}

impl Subject {
    /// A queue that needs nothing beside it.
    pub fn new(queue: impl Queue) -> Self {
        Self { queue: Arc::new(queue), keep: Box::new(()) }
    }

    /// The same, keeping `thing` alive.
    #[must_use]
    pub fn keeping(mut self, thing: impl Any + Send) -> Self {
        self.keep = Box::new(thing);
        self
    }
}

/// Makes a module of that name with one `#[tokio::test]` for each sentence of the contract.
///
/// Takes the module's name, a [`Profile`] and an async function from [`QueueOptions`](crate::QueueOptions) to a
/// [`Subject`] with a fresh queue.
#[macro_export]
macro_rules! queue_conformance {
    ($module:ident, $profile:expr, $make:path) => {
        $crate::queue_conformance!(@sentences tests [$module, $profile, $make]);
    };
    (@sentences $then:ident $args:tt) => {
        $crate::queue_conformance!(@$then $args
            sent_is_received_as_sent
            send_answers_each_entry_in_order
            a_body_of_the_largest_size_passes
            a_delayed_message_is_not_delivered_early
            empty_slices_answer_nothing
            receive_takes_up_to_max
            receive_of_none_takes_none
            receive_waits_for_a_message
            receive_with_nothing_due_returns_empty_after_its_wait
            every_waiting_receiver_is_served
            a_waiting_receiver_sees_a_delay_end
            a_waiting_receiver_sees_a_lease_end
            equal_age_comes_in_the_order_sent
            a_leased_message_is_hidden
            an_ended_lease_makes_the_message_due_again
            concurrent_receivers_never_share_a_message
            cancelling_a_receive_loses_nothing
            ack_removes_for_good
            a_lost_lease_settles_nothing
            a_settled_receipt_is_used_up
            a_batch_may_succeed_in_part
            retry_after_zero_is_due_at_once_and_counts
            retry_after_hides_for_its_delay
            bury_moves_to_the_dead_letters_with_its_reason
            extend_keeps_a_lease
            extend_ends_a_lease_sooner
            lease_is_as_configured
            depth_counts_each_kind
            dead_letters_come_oldest_burial_first_in_pages
            reading_dead_letters_changes_nothing
            replay_brings_a_dead_letter_back
            replay_waits_for_its_delay
            replay_twice_is_harmless
            discard_removes_a_dead_letter
            unknown_dead_letters_are_not_found
            too_many_receives_bury_with_a_reason
        );
    };
    (@tests [$module:ident, $profile:expr, $make:path] $($name:ident)*) => {
        mod $module {
            #[allow(unused_imports, reason = "the caller's profile may be written with names of its own")]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    $crate::testing::$name(&$profile, $make).await;
                }
            )*
        }
    };
    (@calls [$profile:expr, $make:expr] $($name:ident)*) => {
        $($name($profile, $make).await;)*
    };
}

/// Runs the whole suite in order, for a backend that cannot be tested in parallel.
pub async fn conformance<F, R>(profile: &Profile, make: F)
where
    F: Fn(QueueOptions) -> R,
    R: Future<Output = Subject>,
{
    queue_conformance!(@sentences calls [profile, &make]);
}

/// Declares one test: what it is, the options it wants, and its body over `queue` and `profile`.
macro_rules! sentence {
    ($(#[doc = $doc:literal])* $name:ident, |$p:ident| $options:expr, |$queue:ident, $profile:ident| $body:block) => {
        $(#[doc = $doc])*
        pub async fn $name<F, R>($profile: &Profile, make: F)
        where
            F: Fn(QueueOptions) -> R,
            R: Future<Output = Subject>,
        {
            let $p = $profile;
            let subject = make($options).await;
            let $queue = &subject.queue;
            $body
        }
    };
}

fn leased_for(lease: Duration) -> QueueOptions {
    QueueOptions { lease, ..QueueOptions::default() }
}

sentence! {
    /// What is sent is received once: same id, body and attributes, first receive, sent just now.
    sent_is_received_as_sent, |p| leased_for(p.long), |queue, profile| {
        // Text only: some backends carry nothing else. The second half is what JSON and XML must escape.
        let body = "grüß dich <&> \"quoted\" \\ \n line".as_bytes();
        let before = SystemTime::now() - profile.tolerance - Duration::from_secs(1);
        let id = send(queue, Outgoing::new(body).attribute("trace", "a-1").attribute("reason", "ü\n\"")).await;
        let message = receive_one(queue, profile).await;
        assert_eq!(message.id, id);
        assert_eq!(message.body, body);
        assert_eq!(message.attributes.get("trace").map(String::as_str), Some("a-1"));
        assert_eq!(message.attributes.get("reason").map(String::as_str), Some("ü\n\""));
        assert_eq!(message.attributes.len(), 2);
        assert_eq!(message.receives, 1);
        assert!(message.sent_at >= before, "sent at {:?}, before {before:?}", message.sent_at);
        assert!(message.sent_at <= SystemTime::now() + profile.tolerance + Duration::from_secs(1));
    }
}

sentence! {
    /// One answer for each entry, in the order given: one that is too large fails alone.
    send_answers_each_entry_in_order, |p| leased_for(p.long), |queue, profile| {
        let max = queue.capabilities().body_bytes_max;
        let mut answers =
            queue.send(&[Outgoing::new("a"), Outgoing::new(vec![b'x'; max + 1]), Outgoing::new("c")]).await.into_iter();
        let first = answers.next().unwrap().unwrap();
        let refused = answers.next().unwrap();
        assert!(matches!(refused, Err(QueueError::TooLarge { size, .. }) if size == max + 1), "{refused:?}");
        let third = answers.next().unwrap().unwrap();
        assert!(answers.next().is_none());
        let got = receive_count(queue, profile, 2).await;
        let body_of = |id| got.iter().find(|message| message.id == id).map(|message| message.body.clone());
        assert_eq!(body_of(first), Some(b"a".to_vec()));
        assert_eq!(body_of(third), Some(b"c".to_vec()));
        assert_nothing_comes(queue, profile).await;
    }
}

sentence! {
    /// The largest body that the capabilities promise is taken and comes back whole.
    a_body_of_the_largest_size_passes, |p| leased_for(p.long), |queue, profile| {
        let body = vec![b'y'; queue.capabilities().body_bytes_max];
        send(queue, Outgoing::new(body.clone())).await;
        assert!(receive_one(queue, profile).await.body == body, "the body came back changed");
    }
}

sentence! {
    /// A delayed message is not delivered before its delay is over, and is delivered then.
    a_delayed_message_is_not_delivered_early, |p| leased_for(p.long), |queue, profile| {
        let start = Instant::now();
        send(queue, Outgoing::new("later").delayed(profile.short)).await;
        assert_eq!(receive_one(queue, profile).await.body, b"later");
        assert_not_early(start, profile.short, profile);
    }
}

sentence! {
    /// Nothing asked, nothing answered.
    empty_slices_answer_nothing, |p| leased_for(p.long), |queue, profile| {
        assert!(queue.send(&[]).await.is_empty());
        assert!(queue.ack(&[]).await.is_empty());
        assert!(queue.retry_after(&[]).await.is_empty());
        assert!(queue.bury(&[]).await.is_empty());
        assert!(queue.extend(&[], profile.short).await.is_empty());
        assert!(queue.replay(&[], Duration::ZERO).await.is_empty());
        assert!(queue.discard(&[]).await.is_empty());
        assert!(!queue.name().is_empty());
    }
}

sentence! {
    /// A receive takes no more than `max`; the rest stays.
    receive_takes_up_to_max, |p| leased_for(p.long), |queue, profile| {
        send_many(queue, 5).await;
        let first = queue.receive(3, profile.patience).await.unwrap();
        assert!((1..=3).contains(&first.len()), "asked for 3, got {}", first.len());
        let rest = receive_count(queue, profile, 5 - first.len()).await;
        let ids: HashSet<_> = first.iter().chain(&rest).map(|message| message.id.clone()).collect();
        assert_eq!(ids.len(), 5);
    }
}

sentence! {
    /// A receive of up to nothing takes nothing.
    receive_of_none_takes_none, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("stay")).await;
        assert!(queue.receive(0, Duration::ZERO).await.unwrap().is_empty());
        assert_eq!(receive_one(queue, profile).await.receives, 1);
    }
}

sentence! {
    /// With none due, a receive waits, and returns when one is sent.
    receive_waits_for_a_message, |p| leased_for(p.long), |queue, profile| {
        let receiver = {
            let (queue, patience) = (queue.clone(), profile.patience);
            tokio::spawn(async move { queue.receive(10, patience).await })
        };
        // Long enough to be waiting; if it is not, the test still holds.
        tokio::time::sleep(profile.quiet).await;
        assert!(!receiver.is_finished(), "it did not wait");
        let id = send(queue, Outgoing::new("at last")).await;
        let got = receiver.await.unwrap().unwrap();
        assert_eq!(got.iter().map(|message| message.id.clone()).collect::<Vec<_>>(), [id]);
    }
}

sentence! {
    /// With none due for the whole wait, a receive returns empty, not early, and without an error.
    receive_with_nothing_due_returns_empty_after_its_wait, |p| leased_for(p.long), |queue, profile| {
        let start = Instant::now();
        let got = tokio::time::timeout(profile.patience, queue.receive(10, profile.short)).await;
        assert!(got.expect("it waited without end").unwrap().is_empty());
        assert_not_early(start, profile.short, profile);
    }
}

sentence! {
    /// While messages are due no receiver goes on sleeping: as many receivers as messages are all served.
    every_waiting_receiver_is_served, |p| leased_for(p.long), |queue, profile| {
        let mut receivers = JoinSet::new();
        for _ in 0..8 {
            let (queue, patience) = (queue.clone(), profile.patience);
            receivers.spawn(async move { queue.receive(1, patience).await.unwrap() });
        }
        tokio::time::sleep(profile.quiet).await;
        for number in 0..8 {
            send(queue, Outgoing::new(format!("m{number}"))).await;
        }
        let mut ids = HashSet::new();
        while let Some(got) = receivers.join_next().await {
            let got = got.unwrap();
            assert_eq!(got.len(), 1, "a receiver slept while a message was due");
            ids.extend(got.into_iter().map(|message| message.id));
        }
        assert_eq!(ids.len(), 8);
    }
}

sentence! {
    /// A receiver that was waiting when a delayed message was sent gets it, even if the receiver that first heard of it
    /// has gone.
    a_waiting_receiver_sees_a_delay_end, |p| leased_for(p.long), |queue, profile| {
        let leaves = {
            let (queue, wait) = (queue.clone(), profile.quiet * 2);
            tokio::spawn(async move { queue.receive(1, wait).await.unwrap() })
        };
        let stays = {
            let (queue, patience) = (queue.clone(), profile.patience);
            tokio::spawn(async move { queue.receive(1, patience).await.unwrap() })
        };
        tokio::time::sleep(profile.quiet).await;
        send(queue, Outgoing::new("later").delayed(profile.short)).await;
        let got = leaves.await.unwrap().len() + stays.await.unwrap().len();
        assert_eq!(got, 1);
    }
}

sentence! {
    /// A receiver that was waiting when a lease ended gets the message, with nobody sending anything.
    a_waiting_receiver_sees_a_lease_end, |p| leased_for(p.short), |queue, profile| {
        send(queue, Outgoing::new("again")).await;
        let first = receive_one(queue, profile).await;
        let got = queue.receive(1, profile.patience).await.unwrap();
        assert_eq!(got.iter().map(|message| &message.id).collect::<Vec<_>>(), [&first.id]);
    }
}

sentence! {
    /// Messages of equal age come in the order sent, where the backend promises order.
    equal_age_comes_in_the_order_sent, |p| leased_for(p.long), |queue, profile| {
        if !queue.capabilities().ordered {
            return;
        }
        let mut sent = send_many(queue, 10).await;
        for _ in 0..10 {
            sent.push(send(queue, Outgoing::new("one by one")).await);
        }
        let mut got = Vec::new();
        while got.len() < sent.len() {
            let batch = queue.receive(3, profile.patience).await.unwrap();
            assert!(!batch.is_empty(), "only {} came", got.len());
            got.extend(batch.into_iter().map(|message| message.id));
        }
        assert_eq!(got, sent);
    }
}

sentence! {
    /// While a lease runs nobody else receives the message.
    a_leased_message_is_hidden, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("mine")).await;
        receive_one(queue, profile).await;
        assert_nothing_comes(queue, profile).await;
    }
}

sentence! {
    /// When a lease ends unsettled the message is due again, not before, with one more receive and another receipt.
    an_ended_lease_makes_the_message_due_again, |p| leased_for(p.short), |queue, profile| {
        let id = send(queue, Outgoing::new("again").attribute("k", "v")).await;
        let start = Instant::now();
        let first = receive_one(queue, profile).await;
        let second = receive_one(queue, profile).await;
        assert_not_early(start, profile.short, profile);
        assert_eq!(second.id, id);
        assert_eq!(second.body, b"again");
        assert_eq!(second.attributes, first.attributes);
        assert_eq!(second.receives, 2);
        assert_ne!(second.receipt, first.receipt);
    }
}

sentence! {
    /// Many receivers at once: each message goes to exactly one of them, and none is left.
    concurrent_receivers_never_share_a_message, |p| leased_for(p.long), |queue, profile| {
        let mut expected = HashSet::new();
        for _ in 0..20 {
            expected.extend(send_many(queue, 10).await);
        }
        let mut receivers = JoinSet::new();
        for _ in 0..8 {
            let (queue, quiet, patience) = (queue.clone(), profile.quiet, profile.patience);
            receivers.spawn(async move {
                let mut mine = Vec::new();
                let deadline = Instant::now() + patience;
                // Done once nothing comes and nothing is due.
                while Instant::now() < deadline {
                    let got = queue.receive(7, quiet).await.unwrap();
                    if got.is_empty() && queue.depth().await.unwrap().ready == 0 {
                        break;
                    }
                    mine.extend(got.into_iter().map(|message| message.id));
                }
                mine
            });
        }
        let mut got = Vec::new();
        while let Some(mine) = receivers.join_next().await {
            got.extend(mine.unwrap());
        }
        let distinct: HashSet<_> = got.iter().cloned().collect();
        assert_eq!(got.len(), distinct.len(), "a message went to two receivers");
        assert_eq!(distinct, expected);
    }
}

sentence! {
    /// Cancelling a receive, at whatever point, loses nothing for longer than one lease.
    cancelling_a_receive_loses_nothing, |p| leased_for(p.short), |queue, profile| {
        let mut expected: HashSet<_> = send_many(queue, 10).await.into_iter().collect();
        for step in 0..20 {
            // From "at once" to "probably finished", so that some are cut in the middle of taking.
            let cut = profile.quiet * step / 20;
            drop(tokio::time::timeout(cut, queue.receive(2, profile.patience)).await);
        }
        let deadline = Instant::now() + profile.patience;
        while !expected.is_empty() {
            assert!(Instant::now() < deadline, "{} never came back", expected.len());
            for message in queue.receive(10, profile.short).await.unwrap() {
                expected.remove(&message.id);
                settle_ok(&queue.ack(&[message.receipt]).await);
            }
        }
    }
}

sentence! {
    /// An acknowledged message never comes again.
    ack_removes_for_good, |p| leased_for(p.short), |queue, profile| {
        send_many(queue, 2).await;
        let got = receive_count(queue, profile, 2).await;
        settle_ok(&queue.ack(&receipts(&got)).await);
        let seen = queue.receive(10, profile.short + profile.quiet).await.unwrap();
        assert!(seen.is_empty(), "{seen:?}");
        let depth = queue.depth().await.unwrap();
        assert_eq!((depth.ready, depth.in_flight, depth.delayed, depth.dead), (0, 0, 0, 0));
    }
}

sentence! {
    /// With a lost lease nothing can be settled, and the message stays with its new owner.
    a_lost_lease_settles_nothing, |p| leased_for(p.short), |queue, profile| {
        if !queue.capabilities().fenced {
            return;
        }
        send(queue, Outgoing::new("contested")).await;
        let first = receive_one(queue, profile).await;
        let second = receive_one(queue, profile).await;
        settle_ok(&queue.extend(std::slice::from_ref(&second.receipt), profile.long).await);
        let stale = first.receipt;
        assert_lost(&queue.ack(std::slice::from_ref(&stale)).await);
        assert_lost(&queue.retry_after(&[(stale.clone(), Duration::ZERO)]).await);
        assert_lost(&queue.bury(&[(stale.clone(), "stale".into())]).await);
        assert_lost(&queue.extend(&[stale], Duration::ZERO).await);
        assert_nothing_comes(queue, profile).await;
        assert!(queue.dead_letters(None, 10).await.unwrap().is_empty());
        settle_ok(&queue.ack(&[second.receipt]).await);
    }
}

sentence! {
    /// A receipt settles once.
    a_settled_receipt_is_used_up, |p| leased_for(p.long), |queue, profile| {
        if !queue.capabilities().fenced {
            return;
        }
        send_many(queue, 3).await;
        let got = receive_count(queue, profile, 3).await;
        let [acked, retried, buried] = [0, 1, 2].map(|n: usize| got[n].receipt.clone());
        settle_ok(&queue.ack(std::slice::from_ref(&acked)).await);
        settle_ok(&queue.retry_after(&[(retried.clone(), profile.long)]).await);
        settle_ok(&queue.bury(&[(buried.clone(), "no".into())]).await);
        for used in [acked, retried, buried] {
            assert_lost(&queue.ack(std::slice::from_ref(&used)).await);
            assert_lost(&queue.retry_after(&[(used.clone(), Duration::ZERO)]).await);
            assert_lost(&queue.bury(&[(used.clone(), "again".into())]).await);
            assert_lost(&queue.extend(&[used], profile.long).await);
        }
        assert_eq!(dead(queue, profile, 1).await[0].reason, "no");
        assert_nothing_comes(queue, profile).await;
    }
}

sentence! {
    /// Each entry is answered for itself, in the order given.
    a_batch_may_succeed_in_part, |p| leased_for(p.long), |queue, profile| {
        if !queue.capabilities().fenced {
            return;
        }
        send_many(queue, 3).await;
        let got = receive_count(queue, profile, 3).await;
        settle_ok(&queue.ack(&receipts(&got[1..2])).await);
        let answers = queue.ack(&receipts(&got)).await;
        assert!(matches!(answers[..], [Ok(()), Err(QueueError::LeaseLost), Ok(())]), "{answers:?}");
    }
}

sentence! {
    /// A retry after zero ends the lease: the message is due at once and its receives go on counting.
    retry_after_zero_is_due_at_once_and_counts, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("once more")).await;
        for receives in 1..=3 {
            let message = receive_one(queue, profile).await;
            assert_eq!(message.receives, receives);
            settle_ok(&queue.retry_after(&[(message.receipt, Duration::ZERO)]).await);
        }
    }
}

sentence! {
    /// A retry after a while is not delivered early.
    retry_after_hides_for_its_delay, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("not now")).await;
        let message = receive_one(queue, profile).await;
        let start = Instant::now();
        settle_ok(&queue.retry_after(&[(message.receipt, profile.short)]).await);
        assert_eq!(receive_one(queue, profile).await.receives, 2);
        assert_not_early(start, profile.short, profile);
    }
}

sentence! {
    /// A buried message is a dead letter with its reason, and is not delivered again.
    bury_moves_to_the_dead_letters_with_its_reason, |p| leased_for(p.short), |queue, profile| {
        let id = send(queue, Outgoing::new("bad").attribute("k", "v")).await;
        let message = receive_one(queue, profile).await;
        settle_ok(&queue.bury(&[(message.receipt, "malformed: \"ü\"".into())]).await);
        let letter = dead(queue, profile, 1).await.remove(0);
        assert_eq!(letter.id, id);
        assert_eq!(letter.body, b"bad");
        assert_eq!(letter.attributes.get("k").map(String::as_str), Some("v"));
        assert_eq!((letter.reason.as_str(), letter.by_queue), ("malformed: \"ü\"", false));
        assert_eq!(letter.receives, 1);
        assert!(letter.buried_at + profile.tolerance + Duration::from_secs(1) >= letter.sent_at);
        let seen = queue.receive(10, profile.short + profile.quiet).await.unwrap();
        assert!(seen.is_empty(), "{seen:?}");
    }
}

sentence! {
    /// An extended lease lasts beyond its first end.
    extend_keeps_a_lease, |p| leased_for(p.short), |queue, profile| {
        send(queue, Outgoing::new("long work")).await;
        let message = receive_one(queue, profile).await;
        settle_ok(&queue.extend(std::slice::from_ref(&message.receipt), profile.long).await);
        let seen = queue.receive(10, profile.short * 2).await.unwrap();
        assert!(seen.is_empty(), "{seen:?}");
        settle_ok(&queue.ack(&[message.receipt]).await);
    }
}

sentence! {
    /// "From now instead": an extension may end a lease sooner than it would have.
    extend_ends_a_lease_sooner, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("quick work")).await;
        let message = receive_one(queue, profile).await;
        let start = Instant::now();
        settle_ok(&queue.extend(&[message.receipt], profile.short).await);
        assert_eq!(receive_one(queue, profile).await.receives, 2);
        assert_not_early(start, profile.short, profile);
    }
}

sentence! {
    /// The lease is what was asked for.
    lease_is_as_configured, |p| leased_for(p.long), |queue, profile| {
        assert_eq!(queue.lease(), profile.long);
    }
}

sentence! {
    /// Due, leased, delayed and dead messages are counted apart, and the age is that of a due one.
    depth_counts_each_kind, |p| leased_for(p.long), |queue, profile| {
        assert_eq!(queue.depth().await.unwrap().oldest_age, None);
        send_many(queue, 3).await;
        let got = receive_count(queue, profile, 3).await;
        settle_ok(&queue.bury(&[(got[0].receipt.clone(), "no".into())]).await);
        settle_ok(&queue.retry_after(&[(got[1].receipt.clone(), profile.long)]).await);
        send_many(queue, 4).await;
        send(queue, Outgoing::new("later").delayed(profile.long)).await;
        let deadline = Instant::now() + profile.patience;
        loop {
            let depth = queue.depth().await.unwrap();
            if (depth.ready, depth.in_flight, depth.delayed, depth.dead) == (4, 1, 2, 1) {
                assert!(depth.oldest_age.is_some());
                break;
            }
            assert!(Instant::now() < deadline, "{depth:?}");
            tokio::time::sleep(profile.quiet / 5).await;
        }
    }
}

sentence! {
    /// Dead letters are listed by burial, oldest first, and a page starts after the one named.
    dead_letters_come_oldest_burial_first_in_pages, |p| leased_for(p.long), |queue, profile| {
        send_many(queue, 5).await;
        let mut buried = Vec::new();
        // Not in the order sent.
        for message in receive_count(queue, profile, 5).await.into_iter().rev() {
            settle_ok(&queue.bury(&[(message.receipt, format!("number {}", buried.len()))]).await);
            buried.push(message.id);
            dead(queue, profile, buried.len()).await;
        }
        let first = queue.dead_letters(None, 2).await.unwrap();
        assert_eq!(ids(&first), buried[..2]);
        let second = queue.dead_letters(Some(&buried[1]), 2).await.unwrap();
        assert_eq!(ids(&second), buried[2..4]);
        let last = queue.dead_letters(Some(&buried[3]), 100).await.unwrap();
        assert_eq!(ids(&last), buried[4..]);
        assert!(queue.dead_letters(Some(&buried[4]), 100).await.unwrap().is_empty());
    }
}

sentence! {
    /// Reading dead letters changes nothing.
    reading_dead_letters_changes_nothing, |p| leased_for(p.long), |queue, profile| {
        bury_some(queue, profile, 3).await;
        let show = |letters: &[DeadLetter]| {
            letters.iter().map(|letter| format!("{letter:?}")).collect::<Vec<_>>()
        };
        let first = queue.dead_letters(None, 10).await.unwrap();
        let again = queue.dead_letters(None, 10).await.unwrap();
        assert_eq!(first.len(), 3);
        assert_eq!(show(&first), show(&again));
        assert_eq!(queue.depth().await.unwrap().dead, 3);
    }
}

sentence! {
    /// A replayed dead letter is delivered again: same id, body and attributes, counting receives anew.
    replay_brings_a_dead_letter_back, |p| leased_for(p.long), |queue, profile| {
        let id = send(queue, Outgoing::new("second chance").attribute("k", "v")).await;
        let message = receive_one(queue, profile).await;
        settle_ok(&queue.retry_after(&[(message.receipt, Duration::ZERO)]).await);
        let message = receive_one(queue, profile).await;
        settle_ok(&queue.bury(&[(message.receipt, "first time".into())]).await);
        dead(queue, profile, 1).await;
        settle_ok(&queue.replay(std::slice::from_ref(&id), Duration::ZERO).await);
        let message = receive_one(queue, profile).await;
        assert_eq!(message.id, id);
        assert_eq!(message.body, b"second chance");
        assert_eq!(message.attributes.get("k").map(String::as_str), Some("v"));
        assert_eq!(message.receives, 1);
        assert!(queue.dead_letters(None, 10).await.unwrap().is_empty());
        // And it can be buried and replayed again.
        settle_ok(&queue.bury(&[(message.receipt, "second time".into())]).await);
        assert_eq!(dead(queue, profile, 1).await[0].reason, "second time");
        settle_ok(&queue.replay(&[id], Duration::ZERO).await);
        receive_one(queue, profile).await;
    }
}

sentence! {
    /// A replay with a delay is not delivered early.
    replay_waits_for_its_delay, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_some(queue, profile, 1).await;
        let start = Instant::now();
        settle_ok(&queue.replay(&buried, profile.short).await);
        assert_eq!(receive_one(queue, profile).await.id, buried[0]);
        assert_not_early(start, profile.short, profile);
    }
}

sentence! {
    /// Replaying twice delivers once.
    replay_twice_is_harmless, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_some(queue, profile, 2).await;
        settle_ok(&queue.replay(&buried[..1], Duration::ZERO).await);
        let answers = queue.replay(&buried, Duration::ZERO).await;
        assert!(matches!(answers[..], [Err(QueueError::NotFound), Ok(())]), "{answers:?}");
        receive_count(queue, profile, 2).await;
        assert_nothing_comes(queue, profile).await;
    }
}

sentence! {
    /// A discarded dead letter is gone; its neighbours stay.
    discard_removes_a_dead_letter, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_some(queue, profile, 3).await;
        settle_ok(&queue.discard(&buried[1..2]).await);
        let left = dead(queue, profile, 2).await;
        assert_eq!(ids(&left), [buried[0].clone(), buried[2].clone()]);
        assert_nothing_comes(queue, profile).await;
    }
}

sentence! {
    /// An id that is not there answers `NotFound`.
    unknown_dead_letters_are_not_found, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_some(queue, profile, 1).await;
        let unknown = [MessageId("0190a0a0-0000-7000-8000-000000000000".into()), buried[0].clone()];
        let answers = queue.discard(&unknown).await;
        assert!(matches!(answers[..], [Err(QueueError::NotFound), Ok(())]), "{answers:?}");
        let answers = queue.replay(&unknown, Duration::ZERO).await;
        assert!(matches!(answers[..], [Err(QueueError::NotFound), Err(QueueError::NotFound)]), "{answers:?}");
    }
}

sentence! {
    /// After `receives_max` deliveries, unsettled or retried, the queue buries the message itself and says so.
    too_many_receives_bury_with_a_reason,
    |p| QueueOptions { lease: p.short, receives_max: Some(2), ..QueueOptions::default() },
    |queue, profile| {
        let id = send(queue, Outgoing::new("hopeless")).await;
        let first = receive_one(queue, profile).await;
        settle_ok(&queue.retry_after(&[(first.receipt, Duration::ZERO)]).await);
        assert_eq!(receive_one(queue, profile).await.receives, 2);
        let deadline = Instant::now() + profile.patience;
        let letter = loop {
            let got = queue.receive(1, profile.short).await.unwrap();
            assert!(got.is_empty(), "delivered a third time: {got:?}");
            if let Some(letter) = queue.dead_letters(None, 1).await.unwrap().pop() {
                break letter;
            }
            assert!(Instant::now() < deadline, "never buried");
        };
        assert_eq!(letter.id, id);
        assert_eq!(letter.receives, 2);
        assert!(!letter.reason.is_empty() && letter.by_queue, "{letter:?}");
    }
}

async fn send(queue: &Arc<dyn Queue>, message: Outgoing) -> MessageId {
    let mut answers = queue.send(&[message]).await;
    assert_eq!(answers.len(), 1);
    answers.remove(0).unwrap()
}

async fn send_many(queue: &Arc<dyn Queue>, count: usize) -> Vec<MessageId> {
    let messages: Vec<_> = (0..count).map(|number| Outgoing::new(format!("message {number}"))).collect();
    queue.send(&messages).await.into_iter().map(Result::unwrap).collect()
}

async fn receive_one(queue: &Arc<dyn Queue>, profile: &Profile) -> Message {
    receive_count(queue, profile, 1).await.remove(0)
}

/// Exactly so many, over as many receives as the backend needs.
async fn receive_count(queue: &Arc<dyn Queue>, profile: &Profile, count: usize) -> Vec<Message> {
    let deadline = Instant::now() + profile.patience;
    let mut got = Vec::new();
    while got.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} messages came", got.len());
        got.extend(queue.receive(count - got.len(), profile.patience).await.unwrap());
    }
    assert_eq!(got.len(), count);
    got
}

async fn bury_some(queue: &Arc<dyn Queue>, profile: &Profile, count: usize) -> Vec<MessageId> {
    send_many(queue, count).await;
    let mut buried = Vec::new();
    for message in receive_count(queue, profile, count).await {
        settle_ok(&queue.bury(&[(message.receipt, "for the test".into())]).await);
        buried.push(message.id);
        dead(queue, profile, buried.len()).await;
    }
    buried
}

/// The dead letters, once there are so many.
async fn dead(queue: &Arc<dyn Queue>, profile: &Profile, count: usize) -> Vec<DeadLetter> {
    let deadline = Instant::now() + profile.patience;
    loop {
        let letters = queue.dead_letters(None, count + 10).await.unwrap();
        if letters.len() == count {
            return letters;
        }
        assert!(Instant::now() < deadline, "{} dead letters instead of {count}", letters.len());
        tokio::time::sleep(profile.quiet / 5).await;
    }
}

async fn assert_nothing_comes(queue: &Arc<dyn Queue>, profile: &Profile) {
    let got = queue.receive(10, profile.quiet).await.unwrap();
    assert!(got.is_empty(), "unexpected: {got:?}");
}

fn assert_not_early(start: Instant, delay: Duration, profile: &Profile) {
    let elapsed = start.elapsed();
    assert!(elapsed + profile.tolerance >= delay, "came after {elapsed:?}, {delay:?} was asked");
}

fn assert_lost(answers: &[Result<(), QueueError>]) {
    assert!(matches!(answers, [Err(QueueError::LeaseLost)]), "{answers:?}");
}

fn settle_ok<T: Debug>(answers: &[Result<T, QueueError>]) {
    assert!(!answers.is_empty() && answers.iter().all(Result::is_ok), "{answers:?}");
}

fn receipts(messages: &[Message]) -> Vec<Receipt> {
    messages.iter().map(|message| message.receipt.clone()).collect()
}

fn ids(letters: &[DeadLetter]) -> Vec<MessageId> {
    letters.iter().map(|letter| letter.id.clone()).collect()
}
