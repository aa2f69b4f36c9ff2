//! Leases, counts and acknowledgements, without a broker.

use std::time::UNIX_EPOCH;

use super::*;

const LEASE: Duration = Duration::from_secs(60);

fn arrive(inbox: &mut Inbox, tag: u64, id: &str, earlier_deliveries: u32) {
    let envelope = Envelope {
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
    let receives = inbox.received(&envelope, earlier_deliveries);
    inbox.keep(Held { tag, envelope: Arc::new(envelope), receives });
}

fn connected(instance: u64) -> (Inbox, Instant) {
    let (mut inbox, now) = (Inbox::new(instance), Instant::now());
    inbox.reset(true, now);
    (inbox, now)
}

#[test]
fn an_ended_lease_is_lost_at_once() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    let receipt = inbox.take(1, now, LEASE).remove(0).receipt;
    assert!(inbox.extend(&receipt, now + LEASE, now));
    assert!(!inbox.extend(&receipt, now + LEASE * 2, now + LEASE), "it had ended");
    assert!(inbox.take_lease(&receipt, now + LEASE).is_none());
    let (lapsed, next) = inbox.lapsed(now + LEASE);
    assert_eq!((lapsed.len(), next), (1, None));
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
    assert!(!inbox.settle(&moving), "its tag means another message now");
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
fn what_was_given_back_unread_does_not_count_as_received() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    inbox.give_back_unread();
    assert_eq!(inbox.frames(Instant::now(), true).returns, [1]);
    // The broker counts the delivery that was given back.
    arrive(&mut inbox, 2, "a", 1);
    assert_eq!(inbox.take(1, now, LEASE)[0].receives, 1);
    // A crash of another process counts.
    arrive(&mut inbox, 3, "a", 2);
    assert_eq!(inbox.take(1, now, LEASE)[0].receives, 2);
}

#[test]
fn what_was_unread_when_the_connection_broke_does_not_count_as_received() {
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
fn a_settled_message_starts_counting_anew() {
    let (mut inbox, now) = connected(7);
    arrive(&mut inbox, 1, "a", 0);
    inbox.give_back_unread();
    arrive(&mut inbox, 2, "a", 1);
    let receipt = inbox.take(1, now, LEASE).remove(0).receipt;
    let taken = inbox.take_lease(&receipt, now).unwrap();
    assert!(inbox.settle(&taken));
    // Replayed: another copy, whose first redelivery is a real one.
    arrive(&mut inbox, 3, "a", 1);
    assert_eq!(inbox.take(1, now, LEASE)[0].receives, 2);
}

#[test]
fn one_frame_acknowledges_those_at_the_front() {
    let (mut inbox, now) = connected(7);
    for tag in 1..=4 {
        arrive(&mut inbox, tag, &tag.to_string(), 0);
    }
    let messages = inbox.take(4, now, LEASE);
    for place in [0, 1, 3] {
        let taken = inbox.take_lease(&messages[place].receipt, now).unwrap();
        inbox.settle(&taken);
    }
    let frames = inbox.frames(Instant::now(), true);
    assert_eq!(frames.acks, [Frame { tag: 2, multiple: true }, Frame { tag: 4, multiple: false }]);
    assert_eq!(frames.consumers.len(), 3);
    assert_eq!(inbox.counts(), (0, 1));
}

#[test]
fn an_acknowledgement_waits_for_those_before_it_but_not_for_long() {
    let (mut inbox, now) = connected(7);
    for tag in 1..=4 {
        arrive(&mut inbox, tag, &tag.to_string(), 0);
    }
    let messages = inbox.take(4, now, LEASE);
    let settle = |inbox: &mut Inbox, place: usize| {
        let taken = inbox.take_lease(&messages[place].receipt, now).unwrap();
        inbox.settle(&taken);
    };
    settle(&mut inbox, 1);
    assert!(inbox.frames(now, false).acks.is_empty());
    assert_eq!(inbox.acks_wait_until(), Some(now + ACK_WAIT));
    settle(&mut inbox, 0);
    settle(&mut inbox, 3);
    // One frame for the first two; the last waits anew.
    let later = now + ACK_WAIT / 2;
    assert_eq!(inbox.frames(later, false).acks, [Frame { tag: 2, multiple: true }]);
    assert_eq!(inbox.acks_wait_until(), Some(later + ACK_WAIT));
    let due = later + ACK_WAIT;
    let frames = inbox.frames(due, false);
    assert_eq!((frames.acks, frames.consumers.len()), (vec![Frame { tag: 4, multiple: false }], 1));
    assert_eq!(inbox.acks_wait_until(), None);
}

#[test]
fn an_acknowledgement_does_not_wait_for_ever_behind_slow_ones() {
    let (mut inbox, now) = connected(7);
    for tag in 1..=40 {
        arrive(&mut inbox, tag, &tag.to_string(), 0);
    }
    let messages = inbox.take(40, now, LEASE);
    let settle = |inbox: &mut Inbox, place: usize| {
        let taken = inbox.take_lease(&messages[place].receipt, now).unwrap();
        inbox.settle(&taken);
    };
    settle(&mut inbox, 39);
    // The front gets on just in time, again and again.
    let sent = (0..39).find(|&place| {
        settle(&mut inbox, place);
        let at = now + (ACK_WAIT / 2) * u32::try_from(place).unwrap();
        inbox.frames(at, false).acks.iter().any(|frame| frame.tag == 40)
    });
    assert_eq!(sent, Some(20), "after ACK_WAIT_MAX");
}

#[test]
fn no_more_is_wanted_than_may_be_held() {
    let (mut inbox, now) = connected(7);
    inbox.ask(5);
    assert_eq!(inbox.wanted(100), 5);
    arrive(&mut inbox, 1, "a", 0);
    assert_eq!(inbox.wanted(100), 4);
    assert_eq!(inbox.wanted(3), 2);
    inbox.stop_asking(5, now);
    assert_eq!((inbox.wanted(100), inbox.idle_since()), (0, Some(now)));
}

#[test]
fn a_few_wait_for_more_right_after_some_were_taken_and_otherwise_do_not_wait() {
    let (mut inbox, now) = connected(7);
    inbox.ask(3);
    arrive(&mut inbox, 1, "a", 0);
    assert!(inbox.worth_telling(now), "the first after a pause");
    assert_eq!(inbox.gathers_until(3, now), None);
    inbox.take(3, now, LEASE);
    arrive(&mut inbox, 2, "b", 0);
    let until = inbox.gathers_until(3, now).expect("one of three, right after");
    assert!(!inbox.worth_telling(now));
    assert_eq!(inbox.gathers_until(1, now), None, "as many as are asked for");
    assert_eq!(inbox.gathers_until(3, until), None, "no longer");
    assert!(inbox.worth_telling(until));
    arrive(&mut inbox, 3, "c", 0);
    arrive(&mut inbox, 4, "d", 0);
    assert!(inbox.worth_telling(now), "all that are wanted");
}
