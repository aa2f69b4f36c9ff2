//! Tests of `ack`, `retry_after`, `bury` and `depth`.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::checks::{
    assert_lost, assert_not_early, assert_nothing_comes, dead, leased_for, receipts, receive_count, receive_one, send,
    send_many, settle_ok,
};
use super::{Profile, Subject};
use crate::{Outgoing, QueueError, QueueOptions};

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
