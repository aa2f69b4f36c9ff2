//! Tests of leases: hiding, expiry, extension and fencing.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::checks::{assert_lost, assert_not_early, assert_nothing_is_due, assert_ok, leased_for, receive_one, send};
use super::{Profile, Subject};
use crate::{Outgoing, QueueOptions};

contract_test! {
    /// While a lease runs, no other receive returns the message.
    a_leased_message_is_hidden, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("mine")).await;
        receive_one(queue, profile).await;
        assert_nothing_is_due(queue, profile).await;
    }
}

contract_test! {
    /// When a lease ends unsettled, and not before, the message is due again with one more receive and a new receipt.
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

contract_test! {
    /// A receipt whose lease was lost settles nothing, and the message stays with its new holder.
    a_lost_lease_settles_nothing, |p| leased_for(p.short), |queue, profile| {
        if !queue.capabilities().fenced {
            return;
        }
        send(queue, Outgoing::new("contested")).await;
        let first = receive_one(queue, profile).await;
        let second = receive_one(queue, profile).await;
        assert_ok(&queue.extend(std::slice::from_ref(&second.receipt), profile.long).await);
        let stale = first.receipt;
        assert_lost(&queue.ack(std::slice::from_ref(&stale)).await);
        assert_lost(&queue.retry_after(&[(stale.clone(), Duration::ZERO)]).await);
        assert_lost(&queue.bury(&[(stale.clone(), "stale".into())]).await);
        assert_lost(&queue.extend(&[stale], Duration::ZERO).await);
        assert_nothing_is_due(queue, profile).await;
        assert!(queue.dead_letters(None, 10).await.unwrap().is_empty());
        assert_ok(&queue.ack(&[second.receipt]).await);
    }
}

contract_test! {
    /// An extended lease lasts beyond its original end.
    extend_keeps_a_lease, |p| leased_for(p.short), |queue, profile| {
        send(queue, Outgoing::new("long work")).await;
        let message = receive_one(queue, profile).await;
        assert_ok(&queue.extend(std::slice::from_ref(&message.receipt), profile.long).await);
        let seen = queue.receive(10, profile.short * 2).await.unwrap();
        assert!(seen.is_empty(), "{seen:?}");
        assert_ok(&queue.ack(&[message.receipt]).await);
    }
}

contract_test! {
    /// An extension may end a lease earlier than before.
    extend_ends_a_lease_sooner, |p| leased_for(p.long), |queue, profile| {
        send(queue, Outgoing::new("quick work")).await;
        let message = receive_one(queue, profile).await;
        let start = Instant::now();
        assert_ok(&queue.extend(&[message.receipt], profile.short).await);
        assert_eq!(receive_one(queue, profile).await.receives, 2);
        assert_not_early(start, profile.short, profile);
    }
}

contract_test! {
    /// The lease has the configured duration.
    the_lease_is_as_configured, |p| leased_for(p.long), |queue, profile| {
        assert_eq!(queue.lease(), profile.long);
    }
}
