//! A relayer that gives no usable answer about a transaction that it has (pure). Since when is kept in the row, so that it
//! counts over all consumers and their restarts: beside the relayer's last word, for which it makes no difference.

use std::time::Duration;

use serde_json::{Value, json};

use super::moves::moved;
use super::transaction::{MoveRefused, Moved, Transaction};
use crate::config::Timings;
use crate::timestamp::Timestamp;

/// Its name in [`Transaction::relayer_says`].
const SILENT_SINCE: &str = "batonSilentSince";

impl Transaction {
    /// Since when its relayer has given no usable answer about it; `None` if the last one was.
    pub fn silent_since(&self) -> Option<Timestamp> {
        silent_since(self.relayer_says.as_ref())
    }

    /// Whether its outcome counts as unknown only because its relayer gives no answer. The relayer has not said that it does
    /// not know it, and may still work on it.
    pub fn is_only_silent(&self) -> bool {
        let forgotten = self.binding.as_ref().and_then(|binding| binding.forgotten_since);
        forgotten.is_some_and(|forgotten| is_only_silent(self.relayer_says.as_ref(), forgotten))
    }

    /// Records that its relayer, asked again, gave no usable answer. Once it has been silent for long, the outcome is unknown
    /// until it answers. `silent_for` is the time since [`Self::silent_since`] that has certainly passed.
    pub fn unanswered(
        &self,
        silent_for: Duration,
        at: Timestamp,
        now: Timestamp,
        timings: &Timings,
    ) -> Result<Moved, MoveRefused> {
        let binding = self.binding.as_ref().ok_or(MoveRefused::NotPossible("no relayer has it"))?;
        // A record that was forgotten before the silence stays so, also if the clocks of two processes differ.
        let forgotten = binding.forgotten_since.map_or(now, |forgotten| forgotten + Duration::from_millis(1));
        let since = self.silent_since().unwrap_or_else(|| now.max(forgotten));
        let mut moved = if self.silent_since().is_some() && silent_for >= timings.operator_after {
            let (relayer, tx_id) = (&binding.relayer, &binding.tx_id);
            let why = format!(
                "{relayer} has long given no usable answer about {tx_id}; the chain or an operator must resolve it"
            );
            self.unresolved(&why, at, now)?
        } else {
            self.check_later(at, now)?
        };
        moved.transaction.set_silent_since(Some(since));
        Ok(moved)
    }

    /// Records that its relayer answers again.
    pub fn answered(&self, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        if self.silent_since().is_none() {
            return Err(MoveRefused::NotPossible("its relayer has answered before"));
        }
        let mut next = self.next(now);
        next.updated_at = self.updated_at;
        next.end_silence();
        if self.is_only_silent() {
            return Ok(moved(next, "progress", "its relayer answers again"));
        }
        Ok(Moved::new(next, Vec::new()))
    }

    /// Forgets that its relayer was silent, and what followed from that alone.
    pub(super) fn end_silence(&mut self) {
        if self.is_only_silent()
            && let Some(binding) = &mut self.binding
        {
            binding.forgotten_since = None;
        }
        self.set_silent_since(None);
    }

    fn set_silent_since(&mut self, since: Option<Timestamp>) {
        let mut says = self.relayer_says.take().filter(Value::is_object).unwrap_or_else(|| json!({}));
        if let Some(fields) = says.as_object_mut() {
            match since {
                Some(since) => drop(fields.insert(SILENT_SINCE.to_owned(), json!(since.0))),
                None => drop(fields.remove(SILENT_SINCE)),
            }
        }
        self.relayer_says = Some(says).filter(|says| says.as_object().is_some_and(|fields| !fields.is_empty()));
    }
}

/// [`Transaction::is_only_silent`] by what is stored of a row that counts as forgotten.
pub fn is_only_silent(relayer_says: Option<&Value>, forgotten_since: Timestamp) -> bool {
    silent_since(relayer_says).is_some_and(|silent| forgotten_since >= silent)
}

fn silent_since(relayer_says: Option<&Value>) -> Option<Timestamp> {
    relayer_says?.get(SILENT_SINCE)?.as_i64().map(Timestamp)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::config::RelayMode;
    use crate::relay::request::call::DirectRequest;
    use crate::relay::state::apply_report::{Report, ReportedStatus, Source, Verdict};
    use crate::relay::state::transaction::{
        ConsumerId, Progress, RecordLost, RelayerTxId, RelayerUrl, Status, TransactionId,
    };

    const TIMINGS: Timings = Timings::DEFAULT;

    fn bound() -> Transaction {
        let to = "0x5fbdb2315678afecb367f032d93f642f64180aa3";
        let request = DirectRequest::parse(&json!({ "to": to, "value": "7" })).unwrap();
        let (now, token) = (Timestamp(0), Uuid::from_u128(1));
        let row = Transaction::accepted(TransactionId(Uuid::from_u128(1)), &request, String::new(), now, &TIMINGS);
        let claim = row.claim(&ConsumerId("c".into()), token, &RelayerUrl("http://r1".into()), "idle", now, &TIMINGS);
        let id = RelayerTxId("oz-1".into());
        claim.unwrap().transaction.bind(token, &id, None, "it answered", now, &TIMINGS).unwrap().transaction
    }

    /// Asked at these times, in seconds, its relayer gave no answer.
    fn unanswered_at(row: &Transaction, times: &[i64]) -> Transaction {
        times.iter().fold(row.clone(), |row, seconds| look(&row, *seconds).transaction)
    }

    fn look(row: &Transaction, seconds: i64) -> Moved {
        let now = Timestamp(seconds * 1000);
        let silent_for = row.silent_since().map(|since| now.since(since)).unwrap_or_default();
        row.unanswered(silent_for, now + TIMINGS.submitted_check, now, &TIMINGS).unwrap()
    }

    fn says(status: ReportedStatus) -> Report {
        Report {
            tx_id: RelayerTxId("oz-1".into()),
            status,
            reason: None,
            hash: None,
            nonce: Some(4),
            from: None,
            to: None,
            value: None,
            data: None,
            gas_limit: None,
            created_at: None,
            confirmed_at: None,
            block_number: None,
            raw: json!({ "id": "oz-1", "status": status.name(), "nonce": 4 }),
        }
    }

    #[test]
    fn a_row_whose_relayer_gives_no_answer_for_long_can_be_resolved() {
        let row = unanswered_at(&bound(), &[1000, 1300, 1599]);
        assert!(!row.outcome_unknown() && row.resolve_fail(Timestamp(1_599_000)).is_err(), "not for long");
        let flagged = look(&row, 1600);
        assert_eq!(flagged.steps.iter().map(|step| step.action).collect::<Vec<_>>(), ["outcome-unknown"]);
        let row = flagged.transaction;
        assert!(row.outcome_unknown() && row.is_only_silent());
        assert_eq!((row.unknown_since(), row.check_at), (Some(Timestamp(1_600_000)), Some(Timestamp(1_630_000))));
        assert_eq!(row.updated_at, bound().updated_at, "nothing is known of it");
        assert!(look(&row, 1700).steps.is_empty(), "said once");
        assert!(row.resolve_resend(Timestamp(1_600_000), &TIMINGS).is_ok());
        assert_eq!(row.resolve_fail(Timestamp(1_600_000)).unwrap().transaction.status, Status::Failed);
    }

    #[test]
    fn an_answer_ends_the_silence() {
        let row = unanswered_at(&bound(), &[1000]);
        let heard = row.answered(Timestamp(1_100_000)).unwrap();
        assert_eq!((heard.transaction.silent_since(), heard.steps.len()), (None, 0));
        assert!(!unanswered_at(&heard.transaction, &[1200, 1700]).outcome_unknown(), "counted anew");
        assert!(bound().answered(Timestamp(1)).is_err(), "no news");
        let long = unanswered_at(&bound(), &[1000, 1600]);
        let heard = long.answered(Timestamp(1_700_000)).unwrap();
        assert!(!heard.transaction.outcome_unknown());
        assert_eq!((heard.steps.len(), heard.transaction.relayer_says), (1, None));
        // A webhook is an answer, too.
        let sent = says(ReportedStatus::Open(Progress::Sent));
        let verdict = long.report(&sent, Source::Webhook, RelayMode::FireAndForget, Timestamp(1_700_000), &TIMINGS);
        let Verdict::Move(moved) = verdict else { panic!("{verdict:?}") };
        assert!(!moved.transaction.outcome_unknown() && moved.transaction.silent_since().is_none());
        let waits = long.ask_chain(&says(ReportedStatus::Failed), Timestamp(1_700_000)).unwrap().transaction;
        assert!(!waits.outcome_unknown() && waits.silent_since().is_none());
    }

    #[test]
    fn a_word_that_waits_for_the_chain_outlives_the_silence() {
        let waits = bound().ask_chain(&says(ReportedStatus::Confirmed), Timestamp(1000)).unwrap().transaction;
        let row = unanswered_at(&waits, &[1000, 1600]);
        assert!(row.outcome_unknown());
        assert_eq!(row.relayer_says.as_ref().unwrap()["status"], "confirmed");
        let heard = row.answered(Timestamp(1_700_000)).unwrap().transaction;
        assert_eq!(heard.relayer_says, waits.relayer_says);
    }

    /// The time since which a relayer does not know a record says that it has given the record up. Silence says no such thing.
    #[test]
    fn a_relayer_that_was_silent_has_forgotten_only_since_it_says_so() {
        let row = unanswered_at(&bound(), &[1000, 1600]);
        let (now, at) = (Timestamp(2_000_000), Timestamp(2_030_000));
        let forgotten = row.forgotten(RecordLost::NotKnown, at, now).unwrap();
        assert_eq!(forgotten.steps[0].action, "forgotten");
        let row = forgotten.transaction;
        assert_eq!((row.unknown_since(), row.is_only_silent()), (Some(now), false));
        let silent_again = unanswered_at(&row, &[2100, 2800]);
        assert_eq!((silent_again.unknown_since(), silent_again.is_only_silent()), (Some(now), false));
        let heard = silent_again.answered(Timestamp(2_900_000)).unwrap().transaction;
        assert_eq!(heard.unknown_since(), Some(now), "it has not said that it knows it");
        // Another process, whose clock is behind, asks at the same time.
        let asked_at_once = unanswered_at(&row, &[1999, 2800]);
        assert_eq!((asked_at_once.unknown_since(), asked_at_once.is_only_silent()), (Some(now), false));
    }
}
