//! Tests of `send`: content, sizes, answers and delays.

use std::future::Future;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::checks::{assert_not_early, assert_nothing_is_due, leased_for, receive_count, receive_one, send};
use super::{Profile, Subject};
use crate::{Outgoing, QueueError, QueueOptions};

contract_test! {
    /// A sent message is received with the same id, body and attributes, a receive count of 1 and its send time.
    a_sent_message_is_received_unchanged, |p| leased_for(p.long), |queue, profile| {
        // Text, because some backends carry nothing else; with characters that JSON and XML escape.
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

contract_test! {
    /// `send` returns one answer for each entry, in the order given; an entry that is too large fails alone.
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
        assert_nothing_is_due(queue, profile).await;
    }
}

contract_test! {
    /// A body of the largest size in the capabilities is accepted and received unchanged.
    the_largest_body_is_accepted, |p| leased_for(p.long), |queue, profile| {
        let body = vec![b'y'; queue.capabilities().body_bytes_max];
        send(queue, Outgoing::new(body.clone())).await;
        assert!(receive_one(queue, profile).await.body == body, "the body was changed");
    }
}

contract_test! {
    /// A delayed message is not delivered before its delay has passed, and is delivered then.
    a_delayed_message_is_not_delivered_early, |p| leased_for(p.long), |queue, profile| {
        let start = Instant::now();
        send(queue, Outgoing::new("later").delayed(profile.short)).await;
        assert_eq!(receive_one(queue, profile).await.body, b"later");
        assert_not_early(start, profile.short, profile);
    }
}

contract_test! {
    /// An empty slice returns no answers.
    empty_slices_return_no_answers, |p| leased_for(p.long), |queue, profile| {
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
