//! One transaction at a development relayer (pure).
//!
//! Without a chain a record never changes: nonce, hash and the times of its statuses are fixed when it is accepted, and
//! what it shows is a function of the time. So one write makes it durable, and after a restart it stands where it would
//! have stood. With a chain it is what [`OnChain`] says.

use std::{borrow::Cow, time::Duration};

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use time::{OffsetDateTime, macros::format_description};
use uuid::Uuid;

use super::{
    request::{Request, Speed},
    signed::{Fees, OnChain},
};

/// Call data that starts so reverts.
const REVERTS: &str = "0xdeadbeef";
/// Shown from `sent` on when the request named a speed and left the fees to the relayer.
const FEES: (u128, u128) = (2_000_000_000, 1_000_000_000);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
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
    /// In any case of letters, as the list's filter takes it.
    pub(super) fn parse(text: &str) -> Option<Self> {
        Some(match text.to_ascii_lowercase().as_str() {
            "pending" => Self::Pending,
            "sent" => Self::Sent,
            "submitted" => Self::Submitted,
            "mined" => Self::Mined,
            "confirmed" => Self::Confirmed,
            "failed" => Self::Failed,
            "canceled" => Self::Canceled,
            "expired" => Self::Expired,
            _ => return None,
        })
    }

    pub(super) fn is_final(self) -> bool {
        self >= Self::Confirmed
    }

    /// Whether it counts into `pending_transactions_count`.
    pub(super) fn is_pending(self) -> bool {
        self <= Self::Submitted
    }
}

/// Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) id: Uuid,
    pub(super) created_at: i64,
    /// Made up from seed, relayer and number; 0x-hex. Empty with a chain.
    pub(super) hash: String,
    /// What was asked for.
    pub(super) request: Request,
    /// When it reaches its statuses, after `created_at`. None with a chain.
    steps: Vec<i64>,
    /// What has come of it on the chain, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) chain: Option<OnChain>,
    /// Its number at this relayer, which is the key in the journal and so not repeated inside; its nonce, too, unless a
    /// chain has its own idea of that.
    #[serde(skip)]
    pub(super) number: u64,
}

/// Who shows a record.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) address: String,
    pub(super) index: usize,
    pub(super) seed: u64,
}

impl Identity {
    pub(super) fn new(index: usize, seed: u64) -> Self {
        let digest = Sha256::digest(format!("baton development relayer {index}"));
        Self {
            id: format!("dev-relayer-{index}"),
            name: format!("Development relayer {index} (no chain)"),
            address: format!("0x{}", hex::encode(&digest[..20])),
            index,
            seed,
        }
    }

    /// With a key of its own.
    pub(super) fn on_chain(index: usize, address: Address) -> Self {
        let name = format!("Development relayer {index}");
        Self { name, address: address.to_string().to_lowercase(), ..Self::new(index, 0) }
    }
}

/// Reverted, malformed or well: the statuses on the way there.
const WELL: &[Status] = &[Status::Sent, Status::Submitted, Status::Mined, Status::Confirmed];
const REVERTED: &[Status] = &[Status::Sent, Status::Submitted, Status::Failed];
const MALFORMED: &[Status] = &[Status::Sent, Status::Failed];

impl Record {
    pub(super) fn new(identity: &Identity, number: u64, request: Request, now: i64, step: Duration) -> Self {
        let digest =
            Sha256::digest(format!("{} dev-relayer {} nonce {number}", identity.seed, identity.index).as_bytes());
        let step = i64::try_from(step.as_nanos()).unwrap_or(i64::MAX / 16);
        let mut record = Self {
            id: Uuid::new_v4(),
            created_at: now,
            hash: format!("0x{}", hex::encode(digest)),
            request,
            steps: Vec::new(),
            chain: None,
            number,
        };
        let mut at = 0;
        for (place, _) in record.way().iter().enumerate() {
            // Up to a fifth longer, so that neighbours overtake each other as they do at the real one.
            at += step + step / 5 * i64::from(digest[place]) / 255;
            record.steps.push(at);
        }
        record
    }

    pub(super) fn on_chain(number: u64, request: Request, now: i64) -> Self {
        let chain = Some(OnChain::accepted());
        Self { id: Uuid::new_v4(), created_at: now, hash: String::new(), request, steps: Vec::new(), chain, number }
    }

    /// The statuses it will have after `pending`, in order.
    fn way(&self) -> &'static [Status] {
        if !self.request.is_well_formed() {
            return MALFORMED;
        }
        let reverts = self.request.data.as_deref().is_some_and(|data| data.to_ascii_lowercase().starts_with(REVERTS));
        if reverts { REVERTED } else { WELL }
    }

    pub(super) fn status_at(&self, now: i64) -> Status {
        if let Some(chain) = &self.chain {
            return chain.status;
        }
        let reached = self.steps.iter().take_while(|after| self.created_at.saturating_add(**after) <= now).count();
        reached.checked_sub(1).and_then(|place| self.way().get(place)).copied().unwrap_or(Status::Pending)
    }

    /// The status after `status`, and when it comes.
    ///
    /// Nobody knows on a chain.
    pub(super) fn next(&self, status: Status) -> Option<(Status, i64)> {
        if self.chain.is_some() {
            return None;
        }
        let place = self.way().iter().position(|other| *other == status).map_or(0, |place| place + 1);
        if status.is_final() {
            return None;
        }
        self.way().get(place).copied().zip(self.steps.get(place).map(|after| self.created_at.saturating_add(*after)))
    }

    /// What it shows when it has this status.
    pub(super) fn view<'a>(&'a self, identity: &'a Identity, status: Status) -> View<'a> {
        match &self.chain {
            Some(chain) => self.view_on_chain(identity, chain),
            None => self.view_at(identity, status),
        }
    }

    /// What it is on the chain. Its block is not told, as at the real one.
    fn view_on_chain<'a>(&'a self, identity: &'a Identity, chain: &'a OnChain) -> View<'a> {
        let signed = chain.signed.as_ref();
        let fees = signed.map(|signed| signed.fees);
        let eip1559 = fees.and_then(|fees| match fees {
            Fees::Eip1559 { max, priority } => Some((max, priority)),
            Fees::GasPrice(_) => None,
        });
        View {
            hash: signed.map(|signed| Cow::Owned(signed.hash.to_string())),
            status_reason: chain.reason.as_deref(),
            sent_at: signed.map(|signed| timestamp(signed.at)),
            confirmed_at: chain.confirmed_at.map(timestamp),
            gas_limit: self.request.gas_limit.or(signed.map(|signed| signed.gas_limit)),
            nonce: signed.map(|signed| signed.nonce),
            max_fee_per_gas: self.request.max_fee_per_gas.or(eip1559.map(|fees| fees.0)).map(|fee| fee.to_string()),
            max_priority_fee_per_gas: self
                .request
                .max_priority_fee_per_gas
                .or(eip1559.map(|fees| fees.1))
                .map(|fee| fee.to_string()),
            signature: signed.map(|signed| Signature::of(signed.r, signed.s, signed.v)),
            ..self.view_at(identity, chain.status)
        }
    }

    fn view_at<'a>(&'a self, identity: &'a Identity, status: Status) -> View<'a> {
        let at = |wanted: &dyn Fn(Status) -> bool| {
            let place = self.way().iter().position(|status| wanted(*status))?;
            self.steps.get(place).map(|after| timestamp(self.created_at.saturating_add(*after)))
        };
        let signed = status > Status::Pending;
        let fees = (signed && self.request.speed.is_some()).then_some(FEES);
        View {
            payload_type: None,
            id: self.id,
            hash: signed.then_some(Cow::Borrowed(&self.hash)),
            status,
            status_reason: (status == Status::Failed).then(|| match self.request.is_well_formed() {
                true => "Transaction reverted on-chain (receipt status: failed)",
                false => "Transaction could not be encoded: malformed `to` or `data`",
            }),
            created_at: timestamp(self.created_at),
            sent_at: signed.then(|| at(&|status| status == Status::Sent)).flatten(),
            confirmed_at: (status == Status::Confirmed).then(|| at(&|status| status == Status::Confirmed)).flatten(),
            gas_price: self.request.gas_price.map(|price| price.to_string()),
            gas_limit: self.request.gas_limit,
            nonce: signed.then_some(self.number),
            value: &self.request.value,
            from: &identity.address,
            to: self.request.to.as_deref(),
            relayer_id: &identity.id,
            data: self.request.data.as_deref(),
            max_fee_per_gas: self.request.max_fee_per_gas.or(fees.map(|fees| fees.0)).map(|fee| fee.to_string()),
            max_priority_fee_per_gas: self
                .request
                .max_priority_fee_per_gas
                .or(fees.map(|fees| fees.1))
                .map(|fee| fee.to_string()),
            signature: signed.then(|| Signature::made_up(&self.hash)),
            speed: self.request.speed,
            is_canceled: false,
        }
    }
}

/// The object of every answer and webhook, with the real one's fields in its order.
#[derive(Serialize)]
pub(super) struct View<'a> {
    /// In webhooks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) payload_type: Option<&'static str>,
    id: Uuid,
    hash: Option<Cow<'a, str>>,
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
    signature: Option<Signature<'a>>,
    speed: Option<Speed>,
    is_canceled: bool,
}

#[derive(Serialize)]
struct Signature<'a> {
    r: Cow<'a, str>,
    s: Cow<'a, str>,
    v: u8,
    sig: String,
}

impl<'a> Signature<'a> {
    /// The shape of a signature. There is no key behind it.
    fn made_up(hash: &'a str) -> Self {
        let r = hash.trim_start_matches("0x");
        let s = hex::encode(Sha256::digest(r));
        Self { sig: format!("{r}{s}01"), r: Cow::Borrowed(r), s: Cow::Owned(s), v: 1 }
    }

    fn of(r: B256, s: B256, v: u8) -> Self {
        let (r, s) = (hex::encode(r), hex::encode(s));
        Self { sig: format!("{r}{s}{v:02x}"), r: Cow::Owned(r), s: Cow::Owned(s), v }
    }
}

/// Nanoseconds since 1970, now.
pub(super) fn now() -> i64 {
    i64::try_from(OffsetDateTime::now_utc().unix_timestamp_nanos()).unwrap_or(i64::MAX)
}

/// `2026-11-15T18:30:57.458707822+00:00`.
pub(super) fn timestamp(nanos: i64) -> String {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:9]+00:00");
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(nanos))
        .ok()
        .and_then(|at| at.format(&format).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(300);

    fn record(nonce: u64, extra: &str) -> Record {
        let body = format!(
            r#"{{"to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","value":"7","gas_limit":90000,"speed":"fast"{extra}}}"#
        );
        let request = Request::parse(body.as_bytes(), OffsetDateTime::UNIX_EPOCH).unwrap();
        Record::new(&Identity::new(1, 42), nonce, request, 1_000_000_000, STEP)
    }

    #[test]
    fn statuses_follow_each_other_within_two_seconds() {
        let record = record(5, "");
        assert_eq!(record.status_at(record.created_at), Status::Pending);
        let mut status = Status::Pending;
        let mut seen = vec![];
        while let Some((next, at)) = record.next(status) {
            assert_eq!(record.status_at(at - 1), status);
            assert_eq!(record.status_at(at), next);
            seen.push(next);
            status = next;
            assert!(at - record.created_at < 2_000_000_000);
        }
        assert_eq!(seen, WELL);
    }

    #[test]
    fn reverting_and_malformed_calls_fail() {
        let end = i64::MAX;
        let reverted = record(1, r#","data":"0xDEADBEEF00""#);
        assert_eq!(reverted.status_at(end), Status::Failed);
        assert_eq!(record(1, r#","data":"zz""#).status_at(end), Status::Failed);
        let view = serde_json::to_value(reverted.view(&Identity::new(1, 42), Status::Failed)).unwrap();
        assert_eq!(view["status_reason"], "Transaction reverted on-chain (receipt status: failed)");
        assert!(view["nonce"].is_number() && view["hash"].is_string() && view["confirmed_at"].is_null());
    }

    #[test]
    fn hashes_depend_on_seed_relayer_and_nonce_alone() {
        assert_eq!(record(5, "").hash, record(5, r#","data":"0x12""#).hash);
        assert_ne!(record(5, "").hash, record(6, "").hash);
        let request = record(5, "").request;
        let other = |index, seed| Record::new(&Identity::new(index, seed), 5, request.clone(), 0, STEP).hash;
        assert_eq!(other(1, 42), record(5, "").hash);
        assert_ne!(other(2, 42), other(1, 42));
        assert_ne!(other(1, 43), other(1, 42));
        assert_eq!(other(1, 42).len(), 66);
    }

    #[test]
    fn a_record_shows_the_fields_of_the_real_one() {
        let record = record(5, "");
        let identity = Identity::new(1, 42);
        let shown = |status| serde_json::to_value(record.view(&identity, status)).unwrap();
        let pending = shown(Status::Pending);
        let fields: Vec<&str> = pending.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            fields.join(","),
            "id,hash,status,status_reason,created_at,sent_at,confirmed_at,gas_price,gas_limit,nonce,value,from,to,\
             relayer_id,data,max_fee_per_gas,max_priority_fee_per_gas,signature,speed,is_canceled"
        );
        assert!(pending["hash"].is_null() && pending["nonce"].is_null() && pending["signature"].is_null());
        assert_eq!(pending["created_at"], "1970-01-01T00:00:01.000000000+00:00");
        let confirmed = shown(Status::Confirmed);
        assert_eq!((confirmed["status"].as_str(), confirmed["nonce"].as_u64()), (Some("confirmed"), Some(5)));
        assert!(confirmed["confirmed_at"].as_str() > confirmed["sent_at"].as_str());
        assert_eq!(confirmed["value"], "0x7");
    }
}
