//! Tests of leases, counts and acknowledgements without a broker.

use std::time::UNIX_EPOCH;

use super::*;

const LEASE: Duration = Duration::from_secs(60);

fn arrive(inbox: &mut Inbox, tag: u64, id: &str, earlier_deliveries: u32) {
    let message = WireMessage {
        id: MessageId(id.into()),
        body: Arc::new(id.as_bytes().to_vec()),
        attributes: Default::default(),
        receives: 0,
        sent_at: UNIX_EPOCH,
        expires_at: None,
        hops: 0,
        burial: None,
        content_type: None,
    };
    inbox.delivered(tag, 1);
    let receives = inbox.received(&message, earlier_deliveries);
    inbox.buffer(HeldDelivery { tag, message: Arc::new(message), receives });
}

fn connected(instance: u64) -> (Inbox, Instant) {
    let (mut inbox, now) = (Inbox::new(instance), Instant::now());
    inbox.reset(true, now);
    (inbox, now)
}

/// Delivers and leases `count` messages.
fn leased(inbox: &mut Inbox, count: u64, now: Instant) -> Vec<Message> {
    for tag in 1..=count {
        arrive(inbox, tag, &tag.to_string(), 0);
    }
    inbox.take(usize::MAX, now, LEASE)
}

fn settle(inbox: &mut Inbox, message: &Message, now: Instant) {
    let detached = inbox.take_lease(&message.receipt, now).unwrap();
    assert!(inbox.settle(&detached));
}

#[test]
fn a_lease_is_lost_as_soon_as_it_ends() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    let receipt = inbox.take(1, now, LEASE).remove(0).receipt;
    assert!(inbox.extend(&receipt, now + LEASE, now));
    assert!(!inbox.extend(&receipt, now + LEASE * 2, now + LEASE), "the lease has ended");
    assert!(inbox.take_lease(&receipt, now + LEASE).is_none());
    let (expired, next) = inbox.expired(now + LEASE);
    assert_eq!((expired.len(), next), (1, None));
    assert!(inbox.take_lease(&receipt, now).is_none());
}

#[test]
fn a_receipt_of_an_earlier_connection_settles_nothing() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    arrive(&mut inbox, 2, "b", 0);
    let messages = inbox.take(2, now, LEASE);
    let moving = inbox.take_lease(&messages[1].receipt, now).unwrap();
    inbox.reset(true, now);
    assert!(inbox.take_lease(&messages[0].receipt, now).is_none());
    assert!(!inbox.settle(&moving), "its tag belongs to another message now");
    assert!(!inbox.put_back(moving));
    assert!(inbox.frames(Instant::now(), true).acks.is_empty());
}

#[test]
fn a_receipt_of_another_process_settles_nothing() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    let receipt = inbox.take(1, now, LEASE).remove(0).receipt;
    let (mut other, _) = connected(8);
    arrive(&mut other, 1, "a", 0);
    other.take(1, now, LEASE);
    assert!(other.take_lease(&receipt, now).is_none());
    assert!(inbox.take_lease(&receipt, now).is_some());
}

#[test]
fn a_delivery_returned_unread_does_not_count_as_received() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    inbox.return_unread();
    assert_eq!(inbox.frames(Instant::now(), true).returns, [1]);
    // The broker counts the returned delivery.
    arrive(&mut inbox, 2, "a", 1);
    assert_eq!(inbox.take(1, now, LEASE)[0].receives, 1);
    // A delivery to a process that crashed counts.
    arrive(&mut inbox, 3, "a", 2);
    assert_eq!(inbox.take(1, now, LEASE)[0].receives, 2);
}

#[test]
fn a_delivery_unread_when_the_connection_broke_does_not_count_as_received() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    arrive(&mut inbox, 2, "b", 0);
    inbox.take(1, now, LEASE);
    inbox.reset(true, now);
    arrive(&mut inbox, 1, "a", 1);
    arrive(&mut inbox, 2, "b", 1);
    let messages = inbox.take(2, now, LEASE);
    assert_eq!((messages[0].receives, messages[1].receives), (2, 1));
}

#[test]
fn settling_a_message_clears_its_return_count() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    inbox.return_unread();
    arrive(&mut inbox, 2, "a", 1);
    let receipt = inbox.take(1, now, LEASE).remove(0).receipt;
    let taken = inbox.take_lease(&receipt, now).unwrap();
    assert!(inbox.settle(&taken));
    // Replayed: a new copy, whose first redelivery counts.
    arrive(&mut inbox, 3, "a", 1);
    assert_eq!(inbox.take(1, now, LEASE)[0].receives, 2);
}

#[test]
fn one_frame_acknowledges_the_contiguous_front() {
    let (mut inbox, now) = connected(7);
    let messages = leased(&mut inbox, 4, now);
    for place in [0, 1, 3] {
        settle(&mut inbox, &messages[place], now);
    }
    let frames = inbox.frames(Instant::now(), true);
    assert_eq!(frames.acks, [AckFrame { tag: 2, multiple: true }, AckFrame { tag: 4, multiple: false }]);
    assert_eq!(frames.consumers.len(), 3);
    assert_eq!(inbox.counts(), (0, 1));
}

#[test]
fn an_acknowledgement_waits_for_earlier_ones_up_to_a_limit() {
    let (mut inbox, now) = connected(7);
    let messages = leased(&mut inbox, 4, now);
    settle(&mut inbox, &messages[1], now);
    assert!(inbox.frames(now, false).acks.is_empty());
    assert_eq!(inbox.acks_deadline(), Some(now + ACK_WAIT));
    settle(&mut inbox, &messages[0], now);
    settle(&mut inbox, &messages[3], now);
    // One frame for the first two; the wait of the last one starts again.
    let later = now + ACK_WAIT / 2;
    assert_eq!(inbox.frames(later, false).acks, [AckFrame { tag: 2, multiple: true }]);
    assert_eq!(inbox.acks_deadline(), Some(later + ACK_WAIT));
    let due = later + ACK_WAIT;
    let frames = inbox.frames(due, false);
    assert_eq!((frames.acks, frames.consumers.len()), (vec![AckFrame { tag: 4, multiple: false }], 1));
    assert_eq!(inbox.acks_deadline(), None);
}

#[test]
fn an_acknowledgement_waits_at_most_ack_wait_max_while_there_is_progress() {
    let (mut inbox, now) = connected(7);
    let messages = leased(&mut inbox, 40, now);
    settle(&mut inbox, &messages[39], now);
    // The front is settled just before each wait ends.
    let sent = (0..39).find(|&place| {
        settle(&mut inbox, &messages[place], now);
        let at = now + (ACK_WAIT / 2) * u32::try_from(place).unwrap();
        inbox.frames(at, false).acks.iter().any(|frame| frame.tag == 40)
    });
    assert_eq!(sent, Some(20), "after ACK_WAIT_MAX");
}

#[test]
fn demand_is_limited_by_the_messages_held() {
    let (mut inbox, now) = connected(7);
    inbox.add_demand(5);
    assert_eq!(inbox.wanted(100), 5);
    arrive(&mut inbox, 1, "a", 0);
    assert_eq!(inbox.wanted(100), 4);
    assert_eq!(inbox.wanted(3), 2);
    inbox.remove_demand(5, now);
    assert_eq!((inbox.wanted(100), inbox.idle_since()), (0, Some(now)));
}

#[test]
fn fewer_messages_than_demanded_wait_only_within_the_batching_window() {
    let (mut inbox, now) = connected(7);
    inbox.add_demand(3);
    arrive(&mut inbox, 1, "a", 0);
    assert_eq!(inbox.announce(now), Announcement::Now, "first message after a pause");
    assert_eq!(inbox.announce(now), Announcement::Nothing, "the receivers have been woken");
    assert_eq!(inbox.batching_until(3, now), None);
    inbox.take(3, now, LEASE);
    arrive(&mut inbox, 2, "b", 0);
    let until = inbox.batching_until(3, now).expect("one of three, right after a receive");
    assert_eq!(inbox.batching_until(1, now), None, "as many as demanded");
    assert_eq!(inbox.batching_until(3, until), None, "the window has passed");
    arrive(&mut inbox, 3, "c", 0);
    arrive(&mut inbox, 4, "d", 0);
    assert_eq!(inbox.announce(now), Announcement::Now, "all that are demanded");
}

#[test]
fn receivers_are_woken_at_the_end_of_the_batching_window() {
    let (mut inbox, now) = connected(7);
    // This receiver waits; another one takes the first message before the waiting receiver is woken.
    inbox.add_demand(3);
    arrive(&mut inbox, 1, "a", 0);
    inbox.take(3, now, LEASE);
    assert_eq!(inbox.announce(now), Announcement::Nothing);
    arrive(&mut inbox, 2, "b", 0);
    let until = now + BATCHING_WINDOW;
    assert_eq!(inbox.announce(now), Announcement::Later(until));
    assert_eq!(inbox.announce(until), Announcement::Now);
    assert_eq!(inbox.announce(until), Announcement::Nothing);
}
