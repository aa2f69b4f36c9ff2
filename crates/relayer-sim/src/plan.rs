//! The plan of a record: the steps from its acceptance to its end, and the pause before each.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::faults::Outcome;
use crate::options::Timing;
use crate::rng::Rng;

/// What happens to a record next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    Sign,
    Broadcast,
    /// The chain gets it, but the relayer fails to store that.
    BroadcastUnstored,
    /// The chain gets the call under another nonce, which the relayer fails to store.
    BroadcastAgain,
    Mine,
    Confirm,
    ConfirmAsNoOp,
    /// `failed` with this reason. Without a nonce nothing was ever signed; with one that was not broadcast it leaves a
    /// nonce gap.
    Fail(String),
    Revert,
    FailExecuted,
    /// `failed`, although the chain may have it.
    GiveUp,
    /// `confirmed`, although the chain never got it.
    ConfirmUnsent,
    Cancel,
    /// A gap filler's reason is overwritten, and with it goes the only mark that it was one.
    LoseName,
    /// Signed again for a higher price: the hash changes and no webhook tells.
    Bump,
}

impl Step {
    /// Whether a jam leaves it alone: it comes before anything is mined.
    pub(crate) fn precedes_mining(&self) -> bool {
        matches!(
            self,
            Self::Sign
                | Self::Broadcast
                | Self::BroadcastUnstored
                | Self::BroadcastAgain
                | Self::Bump
                | Self::Fail(_)
                | Self::GiveUp
                | Self::ConfirmUnsent
        )
    }
}

/// Steps still to come, each with its pause in milliseconds since the step before.
pub(crate) type Plan = VecDeque<(i64, Step)>;

/// The plan for an outcome.
pub(crate) fn plan(outcome: &Outcome, timing: &Timing, rng: &mut Rng) -> Plan {
    let mines = timing.mined.filter(|_| matches!(outcome, Outcome::Confirmed | Outcome::SentTwice));
    let before_final = mines.unwrap_or(timing.submitted);
    let last = timing.confirmed.saturating_sub(before_final);
    let sign = (timing.sent, Step::Sign);
    let broadcast = (timing.submitted.saturating_sub(timing.sent), Step::Broadcast);
    let mine = mines.map(|mined| (mined.saturating_sub(timing.submitted), Step::Mine));
    let steps = match outcome {
        Outcome::WithoutJob => vec![],
        Outcome::NeverSigned(reason) => vec![(timing.sent, Step::Fail(reason.clone()))],
        Outcome::GivenUp => vec![sign, (timing.given_up.saturating_sub(timing.sent), Step::Fail(GIVEN_UP.to_owned()))],
        Outcome::Stuck => vec![sign, broadcast],
        Outcome::Confirmed => [sign, broadcast].into_iter().chain(mine).chain([(last, Step::Confirm)]).collect(),
        Outcome::NoOp => vec![sign, broadcast, (last, Step::ConfirmAsNoOp)],
        Outcome::Reverted => vec![sign, broadcast, (last, Step::Revert)],
        Outcome::Canceled => vec![sign, broadcast, (last, Step::Cancel)],
        Outcome::FailedButExecuted => vec![sign, (broadcast.0, Step::BroadcastUnstored), (last, Step::FailExecuted)],
        Outcome::GasBumped => vec![sign, broadcast, (last / 2, Step::Bump), (last / 2, Step::Confirm)],
        Outcome::GivenUpButSent => vec![sign, (broadcast.0, Step::BroadcastUnstored), (last, Step::GiveUp)],
        Outcome::GivenUpButSentAgain => vec![sign, (broadcast.0, Step::BroadcastAgain), (last, Step::GiveUp)],
        Outcome::FailedUnsignedButSent => {
            let lost = timing.lost_given_up.saturating_sub(timing.sent);
            vec![(timing.sent, Step::BroadcastAgain), (lost, Step::Fail(GIVEN_UP.to_owned()))]
        }
        Outcome::ConfirmedUnsent => vec![sign, (last, Step::ConfirmUnsent)],
        Outcome::SentTwice => {
            let first = [sign.clone(), broadcast.clone()].into_iter().chain(mine);
            first.chain([(last, Step::Confirm), sign, broadcast]).collect()
        }
    };
    steps.into_iter().map(|(pause, step)| (lengthen(pause, timing.jitter_percent, rng), step)).collect()
}

/// The plan of a record that cannot be encoded: it takes a nonce and is given up.
pub(crate) fn malformed(timing: &Timing) -> Plan {
    let give_up = Step::Fail("Transaction could not be encoded: malformed `to` or `data`".to_owned());
    [(millis(timing.sent), Step::Sign), (millis(timing.given_up.saturating_sub(timing.sent)), give_up)].into()
}

/// The reason after 2 minutes in `pending`, as measured.
pub(crate) const GIVEN_UP: &str = "Transaction in Pending state for over 2 minutes. Replacing with NOOP.";
/// The reason of a reverted call, as measured.
pub(crate) const REVERTED: &str = "Transaction reverted on-chain (receipt status: failed)";
/// The reason for lack of balance; the real one names both amounts.
pub(crate) const OUT_OF_FUNDS: &str = "Insufficient balance: Relayer balance 0 is insufficient to cover 1";

fn lengthen(pause: Duration, jitter_percent: u32, rng: &mut Rng) -> i64 {
    let pause = millis(pause);
    if jitter_percent == 0 {
        return pause;
    }
    pause + (pause as f64 * f64::from(jitter_percent) / 100.0 * rng.unit()) as i64
}

pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4)
}
