//! Tests of the dead-letter queue: listing, replay, discard and automatic burial.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::checks::{
    assert_not_early, assert_nothing_is_due, assert_ok, bury_count, dead_letters, ids, leased_for, receive_count,
    receive_one, send, send_many,
};
use super::{Profile, Subject};
use crate::{DeadLetter, MessageId, Outgoing, QueueError, QueueOptions};

contract_test! {
    /// Dead letters are listed by burial, oldest first; a page starts after the given letter.
    dead_letters_are_listed_by_burial_in_pages, |p| leased_for(p.long), |queue, profile| {
        send_many(queue, 5).await;
        let mut buried = Vec::new();
        // Buried in the reverse of the order sent.
        for message in receive_count(queue, profile, 5).await.into_iter().rev() {
            assert_ok(&queue.bury(&[(message.receipt, format!("number {}", buried.len()))]).await);
            buried.push(message.id);
            dead_letters(queue, profile, buried.len()).await;
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

contract_test! {
    /// Listing dead letters changes nothing.
    reading_dead_letters_changes_nothing, |p| leased_for(p.long), |queue, profile| {
        bury_count(queue, profile, 3).await;
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

contract_test! {
    /// A replayed dead letter is delivered with the same id, body and attributes, and a receive count of 1.
    replay_delivers_a_dead_letter_again, |p| leased_for(p.long), |queue, profile| {
        let id = send(queue, Outgoing::new("second chance").attribute("k", "v")).await;
        let message = receive_one(queue, profile).await;
        assert_ok(&queue.retry_after(&[(message.receipt, Duration::ZERO)]).await);
        let message = receive_one(queue, profile).await;
        assert_ok(&queue.bury(&[(message.receipt, "first time".into())]).await);
        dead_letters(queue, profile, 1).await;
        assert_ok(&queue.replay(std::slice::from_ref(&id), Duration::ZERO).await);
        let message = receive_one(queue, profile).await;
        assert_eq!(message.id, id);
        assert_eq!(message.body, b"second chance");
        assert_eq!(message.attributes.get("k").map(String::as_str), Some("v"));
        assert_eq!(message.receives, 1);
        assert!(queue.dead_letters(None, 10).await.unwrap().is_empty());
        // It can be buried and replayed again.
        assert_ok(&queue.bury(&[(message.receipt, "second time".into())]).await);
        assert_eq!(dead_letters(queue, profile, 1).await[0].reason, "second time");
        assert_ok(&queue.replay(&[id], Duration::ZERO).await);
        receive_one(queue, profile).await;
    }
}

contract_test! {
    /// A replay with a delay is not delivered early.
    replay_waits_for_its_delay, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_count(queue, profile, 1).await;
        let start = Instant::now();
        assert_ok(&queue.replay(&buried, profile.short).await);
        assert_eq!(receive_one(queue, profile).await.id, buried[0]);
        assert_not_early(start, profile.short, profile);
    }
}

contract_test! {
    /// A repeated replay delivers the message once.
    a_repeated_replay_delivers_once, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_count(queue, profile, 2).await;
        assert_ok(&queue.replay(&buried[..1], Duration::ZERO).await);
        let answers = queue.replay(&buried, Duration::ZERO).await;
        assert!(matches!(answers[..], [Err(QueueError::NotFound), Ok(())]), "{answers:?}");
        receive_count(queue, profile, 2).await;
        assert_nothing_is_due(queue, profile).await;
    }
}

contract_test! {
    /// A discarded dead letter is removed; the others stay.
    discard_removes_a_dead_letter, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_count(queue, profile, 3).await;
        assert_ok(&queue.discard(&buried[1..2]).await);
        let left = dead_letters(queue, profile, 2).await;
        assert_eq!(ids(&left), [buried[0].clone(), buried[2].clone()]);
        assert_nothing_is_due(queue, profile).await;
    }
}

contract_test! {
    /// An unknown id answers `NotFound`.
    unknown_dead_letters_are_not_found, |p| leased_for(p.long), |queue, profile| {
        let buried = bury_count(queue, profile, 1).await;
        let unknown = [MessageId("0190a0a0-0000-7000-8000-000000000000".into()), buried[0].clone()];
        let answers = queue.discard(&unknown).await;
        assert!(matches!(answers[..], [Err(QueueError::NotFound), Ok(())]), "{answers:?}");
        let answers = queue.replay(&unknown, Duration::ZERO).await;
        assert!(matches!(answers[..], [Err(QueueError::NotFound), Err(QueueError::NotFound)]), "{answers:?}");
    }
}

contract_test! {
    /// After `receives_max` deliveries, unsettled or retried, the queue buries the message itself with a reason.
    too_many_receives_bury_a_message_with_a_reason,
    |p| QueueOptions { lease: p.short, receives_max: Some(2), ..QueueOptions::default() },
    |queue, profile| {
        let id = send(queue, Outgoing::new("hopeless")).await;
        let first = receive_one(queue, profile).await;
        assert_ok(&queue.retry_after(&[(first.receipt, Duration::ZERO)]).await);
        assert_eq!(receive_one(queue, profile).await.receives, 2);
        let deadline = Instant::now() + profile.patience;
        let letter = loop {
            let got = queue.receive(1, profile.short).await.unwrap();
            assert!(got.is_empty(), "delivered a third time: {got:?}");
            if let Some(letter) = queue.dead_letters(None, 1).await.unwrap().pop() {
                break letter;
            }
            assert!(Instant::now() < deadline, "the queue did not bury the message");
        };
        assert_eq!(letter.id, id);
        assert_eq!(letter.receives, 2);
        assert!(!letter.reason.is_empty() && letter.by_queue, "{letter:?}");
    }
}
