//! Helpers that the tests of the suite share.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Profile;
use crate::{DeadLetter, Message, MessageId, Outgoing, Queue, QueueError, QueueOptions, Receipt};

pub(super) fn leased_for(lease: Duration) -> QueueOptions {
    QueueOptions { lease, ..QueueOptions::default() }
}

pub(super) async fn send(queue: &Arc<dyn Queue>, message: Outgoing) -> MessageId {
    let mut answers = queue.send(&[message]).await;
    assert_eq!(answers.len(), 1);
    answers.remove(0).unwrap()
}

pub(super) async fn send_many(queue: &Arc<dyn Queue>, count: usize) -> Vec<MessageId> {
    let messages: Vec<_> = (0..count).map(|number| Outgoing::new(format!("message {number}"))).collect();
    queue.send(&messages).await.into_iter().map(Result::unwrap).collect()
}

pub(super) async fn receive_one(queue: &Arc<dyn Queue>, profile: &Profile) -> Message {
    receive_count(queue, profile, 1).await.remove(0)
}

/// Receives exactly `count` messages, in as many receives as the backend needs.
pub(super) async fn receive_count(queue: &Arc<dyn Queue>, profile: &Profile, count: usize) -> Vec<Message> {
    let deadline = Instant::now() + profile.patience;
    let mut got = Vec::new();
    while got.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} messages arrived", got.len());
        got.extend(queue.receive(count - got.len(), profile.patience).await.unwrap());
    }
    assert_eq!(got.len(), count);
    got
}

pub(super) async fn bury_count(queue: &Arc<dyn Queue>, profile: &Profile, count: usize) -> Vec<MessageId> {
    send_many(queue, count).await;
    let mut buried = Vec::new();
    for message in receive_count(queue, profile, count).await {
        assert_ok(&queue.bury(&[(message.receipt, "for the test".into())]).await);
        buried.push(message.id);
        dead_letters(queue, profile, buried.len()).await;
    }
    buried
}

/// Waits until there are `count` dead letters and returns them.
pub(super) async fn dead_letters(queue: &Arc<dyn Queue>, profile: &Profile, count: usize) -> Vec<DeadLetter> {
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

pub(super) async fn assert_nothing_is_due(queue: &Arc<dyn Queue>, profile: &Profile) {
    let got = queue.receive(10, profile.quiet).await.unwrap();
    assert!(got.is_empty(), "unexpected messages: {got:?}");
}

pub(super) fn assert_not_early(start: Instant, delay: Duration, profile: &Profile) {
    let elapsed = start.elapsed();
    assert!(elapsed + profile.tolerance >= delay, "arrived after {elapsed:?}, expected {delay:?}");
}

pub(super) fn assert_lost(answers: &[Result<(), QueueError>]) {
    assert!(matches!(answers, [Err(QueueError::LeaseLost)]), "{answers:?}");
}

pub(super) fn assert_ok<T: Debug>(answers: &[Result<T, QueueError>]) {
    assert!(!answers.is_empty() && answers.iter().all(Result::is_ok), "{answers:?}");
}

pub(super) fn receipts(messages: &[Message]) -> Vec<Receipt> {
    messages.iter().map(|message| message.receipt.clone()).collect()
}

pub(super) fn ids(letters: &[DeadLetter]) -> Vec<MessageId> {
    letters.iter().map(|letter| letter.id.clone()).collect()
}
