//! Tests of the dead-letter queue: listing, replay, discard and automatic burial.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::checks::{
    assert_not_early, assert_nothing_comes, bury_some, dead, ids, leased_for, receive_count, receive_one, send,
    send_many, settle_ok,
};
use super::{Profile, Subject};
use crate::{DeadLetter, MessageId, Outgoing, QueueError, QueueOptions};

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
