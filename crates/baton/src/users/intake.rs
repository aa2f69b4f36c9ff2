//! Where the 200 is earned: the message, in the queue for good. There is no row yet; the message is the promise.
//!
//! A queue that refuses has nothing, and the client is told 503. A queue that does not answer may have the message, and
//! nobody can take it back: the client is told 504 with the id, never 503 on a guess. Concurrent requests share the
//! queue's confirms (RabbitMQ) or commits (embedded), since those under way at once go out together.
//!
//! Next: the message reaches [`super::consumer`].

use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, histogram};
use pipeline::{Outgoing, Queue, QueueError};
use tokio::time::{Instant, timeout};
use tracing::error;

use super::store::{Enrolled, UserStore};
use super::user::{User, UserId};

/// Accepts users.
#[derive(Clone)]
pub struct Intake {
    /// Where messages go.
    pub queue: Arc<dyn Queue>,
    /// Where users are.
    pub store: Arc<dyn UserStore>,
    /// How long the queue may take before the client is told that the outcome is unknown.
    pub timeout: Duration,
}

/// Why a user was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum IntakeError {
    /// The queue has nothing and nothing will happen.
    #[error("the queue is unavailable; nothing was accepted")]
    Unavailable(#[source] QueueError),
    /// The user under this idempotency key has another name or address.
    #[error("the idempotency key was used for another request")]
    KeyReused,
    /// It may have been queued: the user of this id will tell.
    #[error("it is not known whether user {0} was accepted")]
    OutcomeUnknown(UserId),
}

/// How long the store may take to say whether a key was used before. Without its answer the consumer will say so.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

impl Intake {
    /// Queues users, each by its own fate; what is `Ok` will be enrolled.
    pub async fn accept(&self, users: &[User]) -> Vec<Result<(), IntakeError>> {
        let started = Instant::now();
        let messages: Vec<_> = users.iter().map(|user| Outgoing::new(user.to_message())).collect();
        let sent = match timeout(self.timeout, self.queue.send(&messages)).await {
            Ok(sent) => sent,
            Err(_) => users.iter().map(|_| Err(QueueError::OutcomeUnknown("no answer in time".into()))).collect(),
        };
        let taken = histogram!("baton_users_accept_seconds");
        let answer = |(user, sent): (&User, Result<_, QueueError>)| {
            taken.record(started.elapsed().as_secs_f64());
            sent.map(drop).map_err(|failure| told(user.id, failure))
        };
        let answers: Vec<_> = users.iter().zip(sent).map(answer).collect();
        let accepted = answers.iter().filter(|answer| answer.is_ok()).count();
        counter!("baton_users_accepted_total").increment(accepted as u64);
        answers
    }

    /// The same for one user; under an idempotency key, one that is enrolled already is not queued again.
    pub async fn accept_one(&self, user: User, keyed: bool) -> Result<UserId, IntakeError> {
        let id = user.id;
        if keyed && let Ok(Ok(Some(Enrolled { user: first, .. }))) = timeout(LOOK_TIMEOUT, self.store.get(id)).await {
            counter!("baton_users_idempotent_repeats_total").increment(1);
            return if first == user { Ok(id) } else { Err(IntakeError::KeyReused) };
        }
        let answer = self.accept(&[user]).await.into_iter().next();
        answer.unwrap_or(Err(IntakeError::OutcomeUnknown(id))).map(|()| id)
    }
}

/// What the queue's failure means for the client.
fn told(id: UserId, failure: QueueError) -> IntakeError {
    let count = |reason: &'static str| counter!("baton_users_accept_failures_total", "reason" => reason).increment(1);
    if matches!(failure, QueueError::OutcomeUnknown(_)) {
        count("unknown");
        error!(userId = %id, action = "accept_unknown", "{failure}");
        IntakeError::OutcomeUnknown(id)
    } else {
        count("unavailable");
        IntakeError::Unavailable(failure)
    }
}
