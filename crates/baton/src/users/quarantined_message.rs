//! One message in the quarantine: a dead letter that can never become a user, kept with its error until an operator
//! replays or drops it. [`super::dead_letter_consumer`] decides which, [`super::store`] keeps them. A row that the database
//! refuses is found in `store/postgres/insert_batch.rs`, and [`super::consumer`] makes it a dead letter.
//!
//! The table is called `users_set_aside` and its time `set_aside_at`, from before this term was chosen: renaming them
//! would need a migration that old and new processes could not share during a rollout.

use pipeline::DeadLetter;

use crate::timestamp::Timestamp;

/// One message in the quarantine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// The id that the message had in the queue.
    pub message_id: String,
    /// Why it can never become a user.
    pub error: String,
    /// The message, byte for byte.
    pub body: Vec<u8>,
    /// When it was quarantined.
    pub at: Timestamp,
}

impl Quarantined {
    /// A dead letter, quarantined now.
    pub fn new(letter: &DeadLetter, error: String) -> Self {
        Self {
            message_id: letter.id.0.clone(),
            error,
            body: letter.body.clone(),
            at: Timestamp::from(std::time::SystemTime::now()),
        }
    }
}
