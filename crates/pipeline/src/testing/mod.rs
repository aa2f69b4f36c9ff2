//! The conformance suite: each sentence of the [`Queue`] contract has a test, and every backend passes it unchanged.
//!
//! A backend provides a constructor and a [`Profile`], and calls [`queue_conformance!`](crate::queue_conformance):
//!
//! ```
//! use pipeline::QueueOptions;
//! use pipeline::queue::memory::MemoryQueue;
//! use pipeline::testing::{Profile, Subject};
//!
//! async fn fresh(options: QueueOptions) -> Subject {
//!     Subject::new(MemoryQueue::new("test", options))
//! }
//!
//! pipeline::queue_conformance!(memory, Profile::fast(), fresh);
//! # fn main() {}
//! ```
//!
//! No test asserts that something happens quickly, only that it happens within [`Profile::patience`] and not early. A test
//! of a promise that the backend does not make ([`Capabilities`](crate::Capabilities)) returns without checking.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

use std::any::Any;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::{Queue, QueueOptions};

/// Declares one test: its sentence of the contract, the queue options, and its body over `queue` and `profile`.
macro_rules! contract_test {
    ($(#[doc = $doc:literal])* $name:ident, |$p:ident| $options:expr, |$queue:ident, $profile:ident| $body:block) => {
        $(#[doc = $doc])*
        pub async fn $name<F, R>($profile: &Profile, make: F)
        where
            F: Fn(QueueOptions) -> R,
            R: Future<Output = Subject>,
        {
            let $p = $profile;
            let subject = make($options).await;
            let $queue = &subject.queue;
            $body
        }
    };
}

mod checks;
mod dead_letters;
mod lease;
mod receive;
mod send;
mod settle;

pub use dead_letters::*;
pub use lease::*;
pub use receive::*;
pub use send::*;
pub use settle::*;

/// The durations that suit a backend.
#[derive(Debug, Clone)]
pub struct Profile {
    /// A lease or delay that a test waits for. At least the backend's granularity.
    pub short: Duration,
    /// A lease or delay that does not end during a test.
    pub long: Duration,
    /// How long to wait before concluding that no message is due. Several times the backend's usual delivery time.
    pub quiet: Duration,
    /// How long to wait for an expected message.
    pub patience: Duration,
    /// How much earlier than requested a backend may act, because it rounds.
    pub tolerance: Duration,
}

impl Profile {
    /// For backends in this process or on this machine.
    pub fn fast() -> Self {
        Self {
            short: Duration::from_millis(300),
            long: Duration::from_secs(120),
            quiet: Duration::from_millis(100),
            patience: Duration::from_secs(30),
            tolerance: Duration::from_millis(2),
        }
    }

    /// For backends that count in whole seconds.
    pub fn whole_seconds() -> Self {
        Self {
            short: Duration::from_secs(2),
            long: Duration::from_secs(300),
            quiet: Duration::from_secs(1),
            patience: Duration::from_secs(60),
            tolerance: Duration::from_secs(1),
        }
    }
}

/// A new, empty queue, and a value that must live as long (a directory, a server).
pub struct Subject {
    /// The queue under test.
    pub queue: Arc<dyn Queue>,
    /// Dropped after the test.
    pub keep: Box<dyn Any + Send>,
}

impl Subject {
    /// A queue that needs no other value.
    pub fn new(queue: impl Queue) -> Self {
        Self { queue: Arc::new(queue), keep: Box::new(()) }
    }

    /// Keeps `value` alive as long as the queue.
    #[must_use]
    pub fn keeping(mut self, value: impl Any + Send) -> Self {
        self.keep = Box::new(value);
        self
    }
}

/// Declares a module with one `#[tokio::test]` for each sentence of the contract.
///
/// Takes the module's name, a [`Profile`] and an async function from [`QueueOptions`](crate::QueueOptions) to a
/// [`Subject`] with a new queue.
#[macro_export]
macro_rules! queue_conformance {
    ($module:ident, $profile:expr, $make:path) => {
        $crate::queue_conformance!(@contract_tests tests [$module, $profile, $make]);
    };
    (@contract_tests $then:ident $args:tt) => {
        $crate::queue_conformance!(@$then $args
            a_sent_message_is_received_unchanged
            send_answers_each_entry_in_order
            the_largest_body_is_accepted
            a_delayed_message_is_not_delivered_early
            empty_slices_return_no_answers
            receive_takes_up_to_max
            a_receive_of_zero_takes_nothing
            receive_waits_for_a_message
            receive_with_nothing_due_returns_empty_after_its_wait
            every_waiting_receiver_is_served
            a_waiting_receiver_sees_a_delay_end
            a_waiting_receiver_sees_a_lease_end
            messages_arrive_in_the_order_sent
            a_leased_message_is_hidden
            an_ended_lease_makes_the_message_due_again
            concurrent_receivers_never_share_a_message
            cancelling_a_receive_loses_no_message
            ack_removes_a_message_permanently
            a_lost_lease_settles_nothing
            a_receipt_settles_only_once
            a_batch_may_succeed_in_part
            retry_after_zero_is_due_immediately_and_counts
            retry_after_hides_for_its_delay
            bury_moves_to_the_dead_letters_with_its_reason
            extend_keeps_a_lease
            extend_ends_a_lease_sooner
            the_lease_is_as_configured
            depth_counts_each_kind
            dead_letters_are_listed_by_burial_in_pages
            reading_dead_letters_changes_nothing
            replay_delivers_a_dead_letter_again
            replay_waits_for_its_delay
            a_repeated_replay_delivers_once
            discard_removes_a_dead_letter
            unknown_dead_letters_are_not_found
            too_many_receives_bury_a_message_with_a_reason
        );
    };
    (@tests [$module:ident, $profile:expr, $make:path] $($name:ident)*) => {
        mod $module {
            #[allow(unused_imports, reason = "the caller's profile expression may use names of its module")]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    $crate::testing::$name(&$profile, $make).await;
                }
            )*
        }
    };
    (@calls [$profile:expr, $make:expr] $($name:ident)*) => {
        $($name($profile, $make).await;)*
    };
}

/// Runs all tests one after the other, for a backend that cannot be tested in parallel.
pub async fn conformance<F, R>(profile: &Profile, make: F)
where
    F: Fn(QueueOptions) -> R,
    R: Future<Output = Subject>,
{
    queue_conformance!(@contract_tests calls [profile, &make]);
}
