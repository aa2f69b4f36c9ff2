//! Publishes with confirms: one task for each connection keeps many messages in flight, and each caller waits for its own.
//!
//! A single task is needed for two reasons. The channel numbers its publishes, so they must be issued in one order. And
//! lapin attaches a returned (unroutable) message to the confirm that completes next, not to the message's own, so all
//! completed confirms must be read before any of them is trusted.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lapin::message::Delivery;
use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel, Confirmation, ErrorKind};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::super::{BoxError, QueueError};

/// Publishes that may wait for their confirm.
const OUTSTANDING_MAX: usize = 4096;
/// Messages that may wait to be published.
pub(super) const WAITING_MAX: usize = 4096;
/// Time limit for the last confirms. They normally fail immediately when the connection ends.
const LAST_CONFIRMS_WAIT: Duration = Duration::from_secs(1);

/// A message to publish, and where to send the answer.
pub(super) struct Publish {
    pub(super) exchange: String,
    pub(super) key: String,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<Vec<u8>>,
    pub(super) answer: oneshot::Sender<Result<(), PublishError>>,
}

/// Why a message was not published, or may not have been.
#[derive(Debug, thiserror::Error)]
pub(super) enum PublishError {
    #[error("not connected to the broker")]
    NotSent,
    #[error("the broker refused the message")]
    Refused,
    #[error("the message could not be routed to the queue {0}")]
    Unroutable(String),
    #[error("the connection was lost before the broker confirmed the message")]
    Lost(#[source] Option<BoxError>),
    #[error("the broker did not confirm the message in time")]
    Late,
}

impl From<PublishError> for QueueError {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Lost(_) | PublishError::Late => Self::OutcomeUnknown(error.into()),
            PublishError::NotSent | PublishError::Refused | PublishError::Unroutable(_) => {
                Self::Unavailable(error.into())
            }
        }
    }
}

/// Identifies a message in flight: its routing key and its id.
type MessageKey = (String, String);
type Answer = (MessageKey, oneshot::Sender<Result<(), PublishError>>, lapin::Result<Confirmation>);
type Pending = FuturesUnordered<Pin<Box<dyn Future<Output = Answer> + Send>>>;

/// Publishes until the channel ends or `stop` is cancelled.
pub(super) async fn run(channel: Channel, mut requests: mpsc::Receiver<Publish>, stop: CancellationToken) {
    let mut pending = Pending::new();
    let mut returned = HashMap::new();
    while channel.status().connected() {
        tokio::select! {
            request = requests.recv(), if pending.len() < OUTSTANDING_MAX => {
                let Some(request) = request else { break };
                publish(&channel, request, &mut pending).await;
            }
            Some(first) = pending.next(), if !pending.is_empty() => answer(first, &mut pending, &mut returned).await,
            () = stop.cancelled() => break,
        }
    }
    requests.close();
    while let Ok(request) = requests.try_recv() {
        // The caller may have stopped waiting.
        let _ = request.answer.send(Err(PublishError::NotSent));
    }
    let last_answers = async {
        while let Some(first) = pending.next().await {
            answer(first, &mut pending, &mut returned).await;
        }
    };
    // A caller without an answer sees its channel dropped, which means the same: lost.
    let _ = tokio::time::timeout(LAST_CONFIRMS_WAIT, last_answers).await;
}

async fn publish(channel: &Channel, request: Publish, pending: &mut Pending) {
    // The caller stopped waiting and was answered that the outcome is unknown: do not publish late.
    if request.answer.is_closed() {
        return;
    }
    let Publish { exchange, key, properties, body, answer } = request;
    let id = properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
    let (channel, name) = (channel.clone(), (key.clone(), id));
    let mut confirmed = Box::pin(async move {
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let sent = channel.basic_publish(exchange.into(), key.into(), options, &body, properties).await;
        let confirmation = match sent {
            Ok(confirm) => confirm.await,
            Err(error) => Err(error),
        };
        (name, answer, confirmation)
    });
    // The first poll numbers the message and queues its frames, so poll here, in the order of the requests.
    match futures::poll!(&mut confirmed) {
        Poll::Ready(done) => pending.push(Box::pin(std::future::ready(done))),
        Poll::Pending => pending.push(confirmed),
    }
}

/// Answers `first` and all other completed publishes.
async fn answer(first: Answer, pending: &mut Pending, returned: &mut HashMap<MessageKey, u32>) {
    let mut done = vec![first];
    // A returned message is attached to a confirm that completed before its own, so it is among the ready ones. The set
    // stops polling early when it has polled as many futures as it holds; each publish is pending at most twice more
    // (written, confirmed), so after three stops nothing ready is left.
    let mut stops = 0;
    while stops < 3 && !pending.is_empty() {
        match futures::poll!(pending.next()) {
            Poll::Ready(Some(next)) => done.push(next),
            Poll::Ready(None) => break,
            Poll::Pending => stops += 1,
        }
    }
    let mut answers = Vec::with_capacity(done.len());
    for (name, caller, confirmation) in done {
        let answer = match confirmation {
            Ok(Confirmation::Ack(carried)) => {
                record_returned(returned, carried.as_deref());
                Ok(())
            }
            Ok(Confirmation::Nack(carried)) => {
                record_returned(returned, carried.as_deref());
                Err(PublishError::Refused)
            }
            Ok(Confirmation::NotRequested) => Err(PublishError::Lost(None)),
            Err(error) => Err(match error.kind() {
                // This error is returned before anything is queued; the same kind with another text may come later.
                ErrorKind::InvalidChannelState(_, "basic.publish") => PublishError::NotSent,
                _ => PublishError::Lost(Some(error.into())),
            }),
        };
        answers.push((name, caller, answer));
    }
    for (name, caller, mut answer) in answers {
        if let Some(times) = returned.get_mut(&name) {
            *times -= 1;
            if *times == 0 {
                returned.remove(&name);
            }
            answer = Err(PublishError::Unroutable(name.0));
        }
        // The caller may have stopped waiting.
        let _ = caller.send(answer);
    }
}

fn record_returned(returned: &mut HashMap<MessageKey, u32>, message: Option<&Delivery>) {
    if let Some(message) = message {
        let id = message.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
        *returned.entry((message.routing_key.to_string(), id)).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use lapin::message::BasicReturnMessage;

    use super::*;

    fn name(id: &str) -> MessageKey {
        ("queue".into(), id.into())
    }

    /// A completed confirm as lapin returns it, with the returned message of this id attached.
    fn confirmed(id: &str, carried: Option<&str>) -> (Answer, oneshot::Receiver<Result<(), PublishError>>) {
        let carried = carried.map(|id| {
            let mut delivery = Delivery::mock(0, "".into(), "queue".into(), false, Vec::new());
            delivery.properties = BasicProperties::default().with_message_id(id.into());
            BasicReturnMessage { delivery, reply_code: 312, reply_text: "NO_ROUTE".into() }
        });
        let (caller, answer) = oneshot::channel();
        ((name(id), caller, Ok(Confirmation::Ack(carried))), answer)
    }

    fn is_ok(mut answer: oneshot::Receiver<Result<(), PublishError>>) -> bool {
        answer.try_recv().expect("it was answered").is_ok()
    }

    #[tokio::test]
    async fn a_returned_message_is_found_on_the_confirm_that_carries_it() {
        let (lost, lost_answer) = confirmed("lost", None);
        let (kept, kept_answer) = confirmed("kept", Some("lost"));
        let mut pending = Pending::new();
        pending.push(Box::pin(std::future::ready(kept)));
        answer(lost, &mut pending, &mut HashMap::new()).await;
        assert!(!is_ok(lost_answer), "it was returned, although its own confirm does not carry it");
        assert!(is_ok(kept_answer), "it only carried the other");
    }

    #[tokio::test]
    async fn a_returned_message_is_remembered_until_its_own_confirm_arrives() {
        let (kept, kept_answer) = confirmed("kept", Some("lost"));
        let (mut pending, mut returned) = (Pending::new(), HashMap::new());
        answer(kept, &mut pending, &mut returned).await;
        assert!(is_ok(kept_answer));
        let (lost, lost_answer) = confirmed("lost", None);
        answer(lost, &mut pending, &mut returned).await;
        assert!(!is_ok(lost_answer));
        assert!(returned.is_empty());
    }
}
