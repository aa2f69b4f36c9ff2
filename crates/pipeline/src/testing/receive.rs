//! Tests of `receive`: limits, waiting, order, concurrency and cancellation.

use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::checks::{assert_not_early, assert_ok, leased_for, receive_count, receive_one, send, send_many};
use super::{Profile, Subject};
use crate::{Outgoing, QueueOptions};

contract_test! {
    /// A receive takes at most `max` messages; the others stay due.
    receive_takes_up_to_max, |p| leased_for(p.long), |queue, profile| {
        send_many(queue, 5).await;
        let first = queue.receive(3, profile.patience).await.unwrap();
        assert!((1..=3).contains(&first.len()), "asked for 3, got {}", first.len());
        let rest = receive_count(queue, profile, 5 - first.len()).await;
        let ids: HashSet<_> = first.iter().chain(&rest).map(|message| message.id.clone()).collect();
        assert_eq!(ids.len(), 5);
    }
}

contract_test! {
    /// A receive with `max` 0 takes nothing.
    a_receive_of_zero_takes_nothing, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("stay")).await;
        assert!(queue.receive(0, Duration::ZERO).await.unwrap().is_empty());
        assert_eq!(receive_one(queue, profile).await.receives, 1);
    }
}

contract_test! {
    /// If no message is due, a receive waits and returns when one is sent.
    receive_waits_for_a_message, |p| leased_for(p.long), |queue, profile| {
        let receiver = {
            let (queue, patience) = (queue.clone(), profile.patience);
            tokio::spawn(async move { queue.receive(10, patience).await })
        };
        // Gives the receiver time to start waiting; the test also holds if it has not.
        tokio::time::sleep(profile.quiet).await;
        assert!(!receiver.is_finished(), "the receive did not wait");
        let id = send(queue, Outgoing::new("at last")).await;
        let got = receiver.await.unwrap().unwrap();
        assert_eq!(got.iter().map(|message| message.id.clone()).collect::<Vec<_>>(), [id]);
    }
}

contract_test! {
    /// If no message is due during the whole wait, a receive returns empty, not early and without an error.
    receive_with_nothing_due_returns_empty_after_its_wait, |p| leased_for(p.long), |queue, profile| {
        let start = Instant::now();
        let got = tokio::time::timeout(profile.patience, queue.receive(10, profile.short)).await;
        assert!(got.expect("the receive did not end").unwrap().is_empty());
        assert_not_early(start, profile.short, profile);
    }
}

contract_test! {
    /// While messages are due, no receiver stays asleep: with as many receivers as messages, each gets one.
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

contract_test! {
    /// A receiver that waits when a delayed message is sent gets it, even if another receiver that waited has left.
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

contract_test! {
    /// A receiver that waits when a lease ends gets the message, without a further send.
    a_waiting_receiver_sees_a_lease_end, |p| leased_for(p.short), |queue, profile| {
        send(queue, Outgoing::new("again")).await;
        let first = receive_one(queue, profile).await;
        let got = queue.receive(1, profile.patience).await.unwrap();
        assert_eq!(got.iter().map(|message| &message.id).collect::<Vec<_>>(), [&first.id]);
    }
}

contract_test! {
    /// Messages arrive in the order sent, where the backend promises order.
    messages_arrive_in_the_order_sent, |p| leased_for(p.long), |queue, profile| {
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
            assert!(!batch.is_empty(), "only {} arrived", got.len());
            got.extend(batch.into_iter().map(|message| message.id));
        }
        assert_eq!(got, sent);
    }
}

contract_test! {
    /// With many concurrent receivers, each message goes to exactly one of them, and none is left.
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
                // Done once a receive is empty and no message is due.
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

contract_test! {
    /// Cancelling a receive at any point hides messages for at most one lease.
    cancelling_a_receive_loses_no_message, |p| leased_for(p.short), |queue, profile| {
        let mut expected: HashSet<_> = send_many(queue, 10).await.into_iter().collect();
        for step in 0..20 {
            // From immediately to probably finished, so that some receives are cancelled while they take messages.
            let cut = profile.quiet * step / 20;
            drop(tokio::time::timeout(cut, queue.receive(2, profile.patience)).await);
        }
        let deadline = Instant::now() + profile.patience;
        while !expected.is_empty() {
            assert!(Instant::now() < deadline, "{} were lost", expected.len());
            for message in queue.receive(10, profile.short).await.unwrap() {
                expected.remove(&message.id);
                assert_ok(&queue.ack(&[message.receipt]).await);
            }
        }
    }
}
