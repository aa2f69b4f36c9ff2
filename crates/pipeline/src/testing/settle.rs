//! Tests of `ack`, `retry_after`, `bury` and `depth`.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::checks::{
    assert_lost, assert_not_early, assert_nothing_is_due, assert_ok, dead_letters, leased_for, receipts, receive_count,
    receive_one, send, send_many,
};
use super::{Profile, Subject};
use crate::{Outgoing, QueueError, QueueOptions};

contract_test! {
    /// An acknowledged message is never delivered again.
    ack_removes_a_message_permanently, |p| leased_for(p.short), |queue, profile| {
        send_many(queue, 2).await;
        let got = receive_count(queue, profile, 2).await;
        assert_ok(&queue.ack(&receipts(&got)).await);
        let seen = queue.receive(10, profile.short + profile.quiet).await.unwrap();
        assert!(seen.is_empty(), "{seen:?}");
        let depth = queue.depth().await.unwrap();
        assert_eq!((depth.ready, depth.in_flight, depth.delayed, depth.dead), (0, 0, 0, 0));
    }
}

contract_test! {
    /// A receipt settles only once.
    a_receipt_settles_only_once, |p| leased_for(p.long), |queue, profile| {
        if !queue.capabilities().fenced {
            return;
        }
        send_many(queue, 3).await;
        let got = receive_count(queue, profile, 3).await;
        let [acked, retried, buried] = [0, 1, 2].map(|n: usize| got[n].receipt.clone());
        assert_ok(&queue.ack(std::slice::from_ref(&acked)).await);
        assert_ok(&queue.retry_after(&[(retried.clone(), profile.long)]).await);
        assert_ok(&queue.bury(&[(buried.clone(), "no".into())]).await);
        for used in [acked, retried, buried] {
            assert_lost(&queue.ack(std::slice::from_ref(&used)).await);
            assert_lost(&queue.retry_after(&[(used.clone(), Duration::ZERO)]).await);
            assert_lost(&queue.bury(&[(used.clone(), "again".into())]).await);
            assert_lost(&queue.extend(&[used], profile.long).await);
        }
        assert_eq!(dead_letters(queue, profile, 1).await[0].reason, "no");
        assert_nothing_is_due(queue, profile).await;
    }
}

contract_test! {
    /// Each entry has its own answer, in the order given.
    a_batch_may_succeed_in_part, |p| leased_for(p.long), |queue, profile| {
        if !queue.capabilities().fenced {
            return;
        }
        send_many(queue, 3).await;
        let got = receive_count(queue, profile, 3).await;
        assert_ok(&queue.ack(&receipts(&got[1..2])).await);
        let answers = queue.ack(&receipts(&got)).await;
        assert!(matches!(answers[..], [Ok(()), Err(QueueError::LeaseLost), Ok(())]), "{answers:?}");
    }
}

contract_test! {
    /// A retry after zero ends the lease: the message is due immediately and keeps its receive count.
    retry_after_zero_is_due_immediately_and_counts, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("once more")).await;
        for receives in 1..=3 {
            let message = receive_one(queue, profile).await;
            assert_eq!(message.receives, receives);
            assert_ok(&queue.retry_after(&[(message.receipt, Duration::ZERO)]).await);
        }
    }
}

contract_test! {
    /// A retry with a delay is not delivered early.
    retry_after_hides_for_its_delay, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("not now")).await;
        let message = receive_one(queue, profile).await;
        let start = Instant::now();
        assert_ok(&queue.retry_after(&[(message.receipt, profile.short)]).await);
        assert_eq!(receive_one(queue, profile).await.receives, 2);
        assert_not_early(start, profile.short, profile);
    }
}

contract_test! {
    /// A buried message becomes a dead letter with its reason and is not delivered again.
    bury_moves_to_the_dead_letters_with_its_reason, |p| leased_for(p.short), |queue, profile| {
        let id = send(queue, Outgoing::new("bad").attribute("k", "v")).await;
        let message = receive_one(queue, profile).await;
        assert_ok(&queue.bury(&[(message.receipt, "malformed: \"ü\"".into())]).await);
        let letter = dead_letters(queue, profile, 1).await.remove(0);
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

contract_test! {
    /// Due, leased, delayed and dead messages are counted separately; the age is that of a due message.
    depth_counts_each_kind, |p| leased_for(p.long), |queue, profile| {
        assert_eq!(queue.depth().await.unwrap().oldest_age, None);
        send_many(queue, 3).await;
        let got = receive_count(queue, profile, 3).await;
        assert_ok(&queue.bury(&[(got[0].receipt.clone(), "no".into())]).await);
        assert_ok(&queue.retry_after(&[(got[1].receipt.clone(), profile.long)]).await);
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
