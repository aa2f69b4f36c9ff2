//! Shared by the stores: a row as a database returns it, its conversion into a transaction, and limits that must be equal
//! in all databases.

use std::sync::Arc;

use uuid::Uuid;

use super::StoreError;
use crate::relay::request::call::DirectRequest;
use crate::relay::request::forward::Forward;
use crate::relay::state::silence;
use crate::relay::state::transaction::{
    Binding, Claim, ConsumerId, FailedBy, Kind, Progress, RelayerTxId, RelayerUrl, Status, Step, Transaction,
    TransactionId, UnknownCause, UnknownOutcome,
};
use crate::timestamp::Timestamp;

/// Maximum entries of a timeline. Ignored webhooks stop earlier, which leaves room for alarms.
const TIMELINE_ENTRIES_MAX: u32 = 2000;
/// The same for alarms: a full timeline must still remember that they were raised.
const TIMELINE_ALARMS_MAX: u32 = 2100;
const TIMELINE_IGNORED_MAX: u32 = 200;
/// A client decides how often it is notified, and must not fill the timeline before an alarm.
const TIMELINE_NOTIFIED_MAX: u32 = 1000;

/// Maximum webhooks kept for a transaction that is not bound yet.
pub(super) const EARLY_WEBHOOKS_MAX: u32 = 20;

/// Number of entries at which a timeline no longer takes this step.
pub(super) fn timeline_max(step: &Step) -> u32 {
    match step.action {
        "webhook-ignored" => TIMELINE_IGNORED_MAX,
        "notified" | "notification-failed" | "notification-given-up" => TIMELINE_NOTIFIED_MAX,
        "double-send" | "failed-but-executed" => TIMELINE_ALARMS_MAX,
        // Written once, so that there is always room for it.
        "unfounded-confirmation" => TIMELINE_ALARMS_MAX + 1,
        _ => TIMELINE_ENTRIES_MAX,
    }
}

/// A page of rows ends with the row that exceeds this many bytes: a client may store rows of hundreds of kilobytes, and several
/// pages are read, shown and sent at once.
pub(super) const PAGE_BYTES_MAX: usize = 512 * 1024;

/// Relayer, relayer transaction id, bound at, progress, nonce, forgotten since.
pub(super) type RawBinding = (Option<String>, Option<String>, Option<i64>, Option<String>, Option<u64>, Option<i64>);

/// A row as a database returns it. The conversion names the column that it cannot read.
pub(super) struct RawRow {
    pub(super) id: [u8; 16],
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) version: u64,
    pub(super) request: String,
    pub(super) imported: bool,
    pub(super) api_key: String,
    pub(super) created_at: i64,
    pub(super) updated_at: i64,
    pub(super) confirmed_at: Option<i64>,
    pub(super) hash: Option<String>,
    pub(super) sender: Option<String>,
    pub(super) claim: (Option<String>, Option<[u8; 16]>, Option<String>, Option<i64>),
    pub(super) unknown: (Option<String>, Option<i64>, Option<String>, Option<i64>),
    pub(super) binding: RawBinding,
    pub(super) attempts: u32,
    pub(super) reroutes: u32,
    pub(super) replays: u32,
    pub(super) auto_replayed: bool,
    pub(super) avoid: Option<String>,
    pub(super) failed_by: Option<String>,
    pub(super) error_message: Option<String>,
    pub(super) result: Option<String>,
    pub(super) check_at: Option<i64>,
    pub(super) block_number: Option<u64>,
    pub(super) relayer_says: Option<String>,
    pub(super) cancel_requested_at: Option<i64>,
    pub(super) claim_account: Option<String>,
}

/// The relayer's account as it is stored, with the token of the claim that it was listed for.
pub(super) fn claimed_account(claim: &Claim) -> Option<String> {
    claim.account.map(|account| format!("{} {}", claim.token, account.to_checksum(None)))
}

/// Whether a row that counts as forgotten is only silent, by its stored columns.
pub(super) fn is_only_silent(relayer_says: Option<&str>, forgotten_since: Timestamp) -> bool {
    let says = relayer_says.and_then(|text| serde_json::from_str(text).ok());
    silence::is_only_silent(says.as_ref(), forgotten_since)
}

impl RawRow {
    /// Size of what may be large.
    pub(super) fn size_bytes(&self) -> usize {
        let large = [&self.error_message, &self.result, &self.relayer_says];
        self.request.len() + large.into_iter().flatten().map(String::len).sum::<usize>()
    }

    pub(super) fn read(self) -> Result<Transaction, StoreError> {
        let id = TransactionId(Uuid::from_bytes(self.id));
        let corrupt = |column| StoreError::Corrupt { table: "transactions", column, id: id.to_string() };
        let request = serde_json::from_str(&self.request).map_err(|_| corrupt("request"))?;
        let kind = Kind::parse(&self.kind).ok_or_else(|| corrupt("kind"))?;
        let (call, retry_on_failure, forward) = match kind {
            Kind::Direct => {
                let parsed = DirectRequest::parse(&request).map_err(|_| corrupt("request"))?;
                (parsed.call, parsed.retry_on_failure, None)
            }
            Kind::Gasless => {
                let forward = Forward::parse(&request).ok_or_else(|| corrupt("request"))?;
                (forward.call(), forward.gasless.retry_on_failure, Some(Arc::new(forward)))
            }
        };
        let claim = match self.claim {
            (None, None, None, None) => None,
            (Some(consumer), Some(token), Some(relayer), Some(at)) => Some(Claim {
                consumer: ConsumerId(consumer),
                token: Uuid::from_bytes(token),
                relayer: RelayerUrl(relayer),
                // A process of an earlier version leaves that of an earlier claim in its place.
                account: self
                    .claim_account
                    .as_deref()
                    .and_then(|stored| stored.strip_prefix(&format!("{} ", Uuid::from_bytes(token))))
                    .and_then(|account| account.parse().ok()),
                at: Timestamp(at),
                unknown: match self.unknown {
                    (None, None, None, None) => None,
                    (Some(reason), Some(open_until), Some(kind), absent) => Some(UnknownOutcome {
                        reason,
                        open_until: Timestamp(open_until),
                        kind: UnknownCause::parse(&kind).ok_or_else(|| corrupt("claim_unknown"))?,
                        absent_since: absent.map(Timestamp),
                    }),
                    _ => return Err(corrupt("claim_doubt")),
                },
            }),
            _ => return Err(corrupt("claim_consumer")),
        };
        let binding = match self.binding {
            (None, None, None, None, None, None) => None,
            (Some(relayer), Some(tx_id), Some(at), Some(progress), nonce, forgotten) => Some(Binding {
                relayer: RelayerUrl(relayer),
                tx_id: RelayerTxId(tx_id),
                at: Timestamp(at),
                progress: Progress::parse(&progress).ok_or_else(|| corrupt("relayer_progress"))?,
                nonce,
                forgotten_since: forgotten.map(Timestamp),
            }),
            _ => return Err(corrupt("relayer_url")),
        };
        let failed_by = match self.failed_by {
            Some(name) => Some(FailedBy::parse(&name).ok_or_else(|| corrupt("failed_by"))?),
            None => None,
        };
        let result = match self.result {
            Some(text) => Some(serde_json::from_str(&text).map_err(|_| corrupt("result"))?),
            None => None,
        };
        Ok(Transaction {
            id,
            kind,
            status: Status::parse(&self.status).ok_or_else(|| corrupt("status"))?,
            version: self.version,
            retry_on_failure,
            call,
            forward,
            request: self.request.into(),
            imported: self.imported,
            api_key: self.api_key,
            created_at: Timestamp(self.created_at),
            updated_at: Timestamp(self.updated_at),
            confirmed_at: self.confirmed_at.map(Timestamp),
            hash: self.hash,
            block_number: self.block_number,
            from: self.sender,
            claim,
            binding,
            attempts: self.attempts,
            reroutes: self.reroutes,
            replays: self.replays,
            auto_replayed: self.auto_replayed,
            avoid: self.avoid.map(RelayerUrl),
            failed_by,
            error_message: self.error_message,
            result,
            check_at: self.check_at.map(Timestamp),
            relayer_says: self.relayer_says.as_deref().and_then(|text| serde_json::from_str(text).ok()),
            cancel_requested_at: self.cancel_requested_at.map(Timestamp),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_leave_room_for_alarms_in_a_timeline() {
        let max = |action| timeline_max(&Step::new(action, ""));
        for action in ["notified", "notification-failed", "notification-given-up", "webhook-ignored"] {
            assert!(max(action) <= max("double-send") / 2, "{action}");
        }
    }

    #[test]
    fn a_full_timeline_still_has_room_for_alarms() {
        let max = |action| timeline_max(&Step::new(action, ""));
        for action in ["progress", "webhook-ignored", "notified", "outcome-unknown", "waiting"] {
            assert!(max(action) < max("double-send") && max(action) < max("failed-but-executed"), "{action}");
        }
        assert!(max("unfounded-confirmation") > max("double-send").max(max("failed-but-executed")));
    }
}
