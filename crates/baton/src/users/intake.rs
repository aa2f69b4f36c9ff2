//! Accepts users: a user is accepted (200) once its message is safely in the queue. There is no row yet; the message is
//! the promise.
//!
//! If the queue refuses, it has nothing, and the client gets 503. If the queue does not answer, it may have the message,
//! which cannot be taken back: the client gets 504 with the id, never 503 on a guess. Concurrent requests share the
//! queue's confirms (RabbitMQ) or commits (embedded), since the queue sends together what is in flight together.
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
use crate::errors::chain;
use crate::http::problem::Problem;

/// Accepts users.
#[derive(Clone)]
pub struct UserIntake {
    /// The lane's queue.
    pub queue: Arc<dyn Queue>,
    /// The users' store, to look up an idempotency key.
    pub store: Arc<dyn UserStore>,
    /// Time limit of the queue; after it the outcome is unknown (504).
    pub timeout: Duration,
}

/// Why a user was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum UserIntakeError {
    /// The queue refused the message: the user will not be enrolled.
    #[error("the queue is unavailable; the user was not accepted")]
    Unavailable(#[source] QueueError),
    /// The user enrolled under this idempotency key has another name or address.
    #[error("the idempotency key was used for another request")]
    KeyReused,
    /// The queue may have the message. A later lookup of this id shows whether the user was enrolled.
    #[error("it is not known whether user {0} was accepted")]
    OutcomeUnknown(UserId),
}

/// Time limit of the lookup of a used key. Without an answer the user is queued, and the consumer finds the repeat.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

impl From<UserIntakeError> for Problem {
    fn from(failure: UserIntakeError) -> Self {
        match &failure {
            UserIntakeError::KeyReused => Self::key_reused(),
            UserIntakeError::Unavailable(cause) => {
                Self::unavailable("the user was not accepted and will not be enrolled; send it again later", cause)
            }
            UserIntakeError::OutcomeUnknown(id) => Self::user_outcome_unknown(&id.to_string()),
        }
    }
}

impl UserIntake {
    /// Queues users; one result for each. A user with `Ok` will be enrolled.
    pub async fn accept(&self, users: &[User]) -> Vec<Result<(), UserIntakeError>> {
        let started = Instant::now();
        let messages: Vec<_> = users.iter().map(|user| Outgoing::new(user.to_message())).collect();
        let sent = match timeout(self.timeout, self.queue.send(&messages)).await {
            Ok(sent) => sent,
            Err(_) => users.iter().map(|_| Err(QueueError::OutcomeUnknown("no answer in time".into()))).collect(),
        };
        let taken = histogram!("baton_users_accept_seconds");
        let answer = |(user, sent): (&User, Result<_, QueueError>)| {
            taken.record(started.elapsed().as_secs_f64());
            sent.map(drop).map_err(|failure| intake_error(user.id, failure))
        };
        let answers: Vec<_> = users.iter().zip(sent).map(answer).collect();
        let accepted = answers.iter().filter(|answer| answer.is_ok()).count();
        counter!("baton_users_accepted_total").increment(accepted as u64);
        answers
    }

    /// Queues one user. With `keyed`, its id comes from an idempotency key, and a user that is enrolled already is not
    /// queued again.
    pub async fn accept_one(&self, user: User, keyed: bool) -> Result<UserId, UserIntakeError> {
        let id = user.id;
        if keyed
            && let Ok(Ok(Some(Enrolled { user: enrolled, .. }))) = timeout(LOOKUP_TIMEOUT, self.store.get(id)).await
        {
            counter!("baton_users_idempotent_repeats_total").increment(1);
            return if enrolled == user { Ok(id) } else { Err(UserIntakeError::KeyReused) };
        }
        let answer = self.accept(&[user]).await.into_iter().next();
        answer.unwrap_or(Err(UserIntakeError::OutcomeUnknown(id))).map(|()| id)
    }
}

/// The error for the client, counted and, if the outcome is unknown, logged.
fn intake_error(id: UserId, failure: QueueError) -> UserIntakeError {
    let count = |reason: &'static str| counter!("baton_users_accept_failures_total", "reason" => reason).increment(1);
    if matches!(failure, QueueError::OutcomeUnknown(_)) {
        count("unknown");
        error!(userId = %id, action = "accept_unknown", "unknown whether the queue has the user: {}", chain(&failure));
        UserIntakeError::OutcomeUnknown(id)
    } else {
        count("unavailable");
        UserIntakeError::Unavailable(failure)
    }
}
