//! One transaction as the relayer keeps it, and the JSON in which it shows it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use time::{OffsetDateTime, format_description::well_known::Rfc3339, macros::format_description};

use crate::request::{SendRequest, Speed};

/// Fees of a signed transaction whose request left them to the relayer: maximum and priority, in wei per gas.
const FEES_CHOSEN: (u128, u128) = (2_000_000_000, 1_000_000_000);
/// Gas limit of a no-op.
pub(crate) const NO_OP_GAS: u64 = 21_000;

/// The relayer's statuses, in the order of a normal run; the last four are final.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the relayer's own names")]
pub enum Status {
    Pending,
    Sent,
    Submitted,
    Mined,
    Confirmed,
    Failed,
    Canceled,
    Expired,
}

impl Status {
    const ALL: [Self; 8] = [
        Self::Pending,
        Self::Sent,
        Self::Submitted,
        Self::Mined,
        Self::Confirmed,
        Self::Failed,
        Self::Canceled,
        Self::Expired,
    ];

    /// The name used in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sent => "sent",
            Self::Submitted => "submitted",
            Self::Mined => "mined",
            Self::Confirmed => "confirmed",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
            Self::Expired => "expired",
        }
    }

    /// Case-insensitive, like the list's `status` filter.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str().eq_ignore_ascii_case(text))
    }

    /// Whether the relayer changes the record no further.
    pub fn is_final(self) -> bool {
        self >= Self::Confirmed
    }

    /// Whether it counts into `pending_transactions_count`: `mined` does not.
    pub fn is_pending(self) -> bool {
        self <= Self::Submitted
    }
}

/// A record of the relayer. Times are milliseconds since 1970 on the relayer's own clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The relayer's id for it, a UUID.
    pub id: String,
    /// Present status.
    pub status: Status,
    /// Reason of a failure, or the name of a gap filler.
    pub status_reason: Option<String>,
    /// Set from `sent` on.
    pub nonce: Option<u64>,
    /// 0x-hex, set from `sent` on.
    pub hash: Option<String>,
    /// As requested; the relayer's own address after a no-op replaced it.
    pub to: Option<String>,
    /// Wei in 0x-hex.
    pub value: String,
    /// As requested.
    pub data: Option<String>,
    /// As requested, or as a signer on a chain chose it.
    pub gas_limit: Option<u64>,
    /// Wei per gas, as requested.
    pub gas_price: Option<u128>,
    /// Wei per gas, as requested.
    pub max_fee_per_gas: Option<u128>,
    /// Wei per gas, as requested.
    pub max_priority_fee_per_gas: Option<u128>,
    /// As requested.
    pub speed: Option<Speed>,
    /// Whether a cancellation was asked for and not refused.
    pub is_canceled: bool,
    /// When the relayer stored it.
    pub created_at_ms: i64,
    /// When it took its nonce. The relayer may lose this value although it sent the transaction.
    pub sent_at_ms: Option<i64>,
    /// Set for `confirmed` only.
    pub confirmed_at_ms: Option<i64>,
    /// Fees and signature once signed.
    pub signed: Option<SignedParts>,
    /// The relayer's address. Not part of a stored record: it is the same for all of them.
    #[serde(skip)]
    pub from: Arc<str>,
    /// The relayer's id. Not part of a stored record.
    #[serde(skip)]
    pub relayer_id: Arc<str>,
}

/// What signing adds to a record beside nonce and hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedParts {
    /// Maximum and priority fee in wei per gas, if the request left them to the relayer.
    pub fees: Option<(u128, u128)>,
    /// A real signature; a made-up one is derived from the hash when this is absent.
    pub signature: Option<SignatureParts>,
}

/// An ECDSA signature: `r` and `s` in hex without 0x, `v` 0 or 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names of the curve's own numbers")]
pub struct SignatureParts {
    pub r: String,
    pub s: String,
    pub v: u8,
}

impl Record {
    pub(crate) fn new(id: String, request: SendRequest, created_at_ms: i64, from: &Arc<str>, owner: &Arc<str>) -> Self {
        Self {
            id,
            status: Status::Pending,
            status_reason: None,
            nonce: None,
            hash: None,
            to: request.to,
            value: request.value,
            data: request.data,
            gas_limit: request.gas_limit,
            gas_price: request.gas_price,
            max_fee_per_gas: request.max_fee_per_gas,
            max_priority_fee_per_gas: request.max_priority_fee_per_gas,
            speed: request.speed,
            is_canceled: false,
            created_at_ms,
            sent_at_ms: None,
            confirmed_at_ms: None,
            signed: None,
            from: Arc::clone(from),
            relayer_id: Arc::clone(owner),
        }
    }

    /// The object of POST, GET and list answers.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self.view()).expect("a view has text keys only")
    }

    /// Whether a failed record proves that nothing was signed: it has neither nonce nor hash.
    pub fn never_signed(&self) -> bool {
        self.status == Status::Failed && self.nonce.is_none() && self.hash.is_none()
    }

    /// Whether the relayer's own no-op took the place of the call: a transfer of nothing to itself.
    pub fn is_no_op(&self) -> bool {
        self.to.as_deref() == Some(&*self.from) && self.value == "0x0" && self.data.as_deref() == Some("0x")
    }

    pub(crate) fn become_no_op(&mut self) {
        self.to = Some(self.from.to_string());
        "0x0".clone_into(&mut self.value);
        self.data = Some("0x".to_owned());
        self.gas_limit = Some(NO_OP_GAS);
    }

    /// Takes a nonce and a made-up hash and signature.
    pub(crate) fn sign(&mut self, nonce: u64, hash: String, now_ms: i64) {
        self.status = Status::Sent;
        self.nonce = Some(nonce);
        self.hash = Some(hash);
        self.sent_at_ms = Some(now_ms);
        self.signed = Some(SignedParts { fees: self.speed.map(|_| FEES_CHOSEN), signature: None });
    }

    pub(crate) fn fail(&mut self, reason: String) {
        self.status = Status::Failed;
        self.status_reason = Some(reason);
    }

    pub(crate) fn view(&self) -> RecordView<'_> {
        let fees = self.signed.as_ref().and_then(|signed| signed.fees);
        let (max, priority) = (fees.map(|fees| fees.0), fees.map(|fees| fees.1));
        RecordView {
            payload_type: None,
            id: &self.id,
            hash: self.hash.as_deref(),
            status: self.status,
            status_reason: self.status_reason.as_deref(),
            created_at: timestamp(self.created_at_ms),
            sent_at: self.sent_at_ms.map(timestamp),
            confirmed_at: self.confirmed_at_ms.map(timestamp),
            gas_price: self.gas_price.map(|price| price.to_string()),
            gas_limit: self.gas_limit,
            nonce: self.nonce,
            value: &self.value,
            from: &self.from,
            to: self.to.as_deref(),
            relayer_id: &self.relayer_id,
            data: self.data.as_deref(),
            max_fee_per_gas: self.max_fee_per_gas.or(max).map(|fee| fee.to_string()),
            max_priority_fee_per_gas: self.max_priority_fee_per_gas.or(priority).map(|fee| fee.to_string()),
            signature: self.signature(),
            speed: self.speed,
            is_canceled: self.is_canceled,
        }
    }

    /// The flat object of the older dialect.
    pub(crate) fn flat_view(&self) -> FlatView<'_> {
        FlatView {
            transaction_id: &self.id,
            hash: self.hash.as_deref(),
            status: self.status,
            from: &self.from,
            to: self.to.as_deref(),
            created_at: flat_timestamp(self.created_at_ms),
            confirmed_at: self.confirmed_at_ms.map(flat_timestamp),
        }
    }

    fn signature(&self) -> Option<SignatureView> {
        let parts = match &self.signed.as_ref()?.signature {
            Some(parts) => parts.clone(),
            None => {
                let r = self.hash.as_deref()?.trim_start_matches("0x").to_owned();
                let s = hex::encode(Sha256::digest(&r));
                SignatureParts { r, s, v: 1 }
            }
        };
        let sig = format!("{}{}{:02x}", parts.r, parts.s, parts.v);
        Some(SignatureView { r: parts.r, s: parts.s, v: parts.v, sig })
    }
}

/// The object of every answer and webhook, with the real relayer's fields in its order.
#[derive(Serialize)]
pub(crate) struct RecordView<'a> {
    /// In webhooks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) payload_type: Option<&'static str>,
    id: &'a str,
    hash: Option<&'a str>,
    status: Status,
    status_reason: Option<&'a str>,
    created_at: String,
    sent_at: Option<String>,
    confirmed_at: Option<String>,
    gas_price: Option<String>,
    gas_limit: Option<u64>,
    nonce: Option<u64>,
    value: &'a str,
    from: &'a str,
    to: Option<&'a str>,
    relayer_id: &'a str,
    data: Option<&'a str>,
    max_fee_per_gas: Option<String>,
    max_priority_fee_per_gas: Option<String>,
    signature: Option<SignatureView>,
    speed: Option<Speed>,
    is_canceled: bool,
}

#[derive(Serialize)]
struct SignatureView {
    r: String,
    s: String,
    v: u8,
    sig: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FlatView<'a> {
    transaction_id: &'a str,
    hash: Option<&'a str>,
    status: Status,
    from: &'a str,
    to: Option<&'a str>,
    created_at: String,
    confirmed_at: Option<String>,
}

/// `2026-11-15T18:30:57.458000000+00:00`, with nine digits as the real relayer writes it.
pub(crate) fn timestamp(ms: i64) -> String {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:9]+00:00");
    date(ms).format(&format).unwrap_or_default()
}

/// `Tue, 17 Nov 2026 18:56:08 GMT`, for the `Date` header.
pub(crate) fn http_date(ms: i64) -> String {
    let format =
        format_description!("[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT");
    date(ms).format(&format).unwrap_or_default()
}

fn flat_timestamp(ms: i64) -> String {
    date(ms).format(&Rfc3339).unwrap_or_default()
}

pub(crate) fn date(ms: i64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
