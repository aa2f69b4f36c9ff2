//! The relayers' JSON, in both dialects (pure): the OpenZeppelin Relayer's own (`openzeppelin`, snake_case inside an
//! envelope) and the one of the older hosted product's documents (`flat`, camelCase). Which one a relayer speaks
//! is read from its answers.

use alloy_primitives::{Address, U256};
use serde_json::{Map, Value, json};

use crate::evm::parse_amount;
use crate::relay::relayer::routing::ChainId;
use crate::relay::request::call::Call;
use crate::relay::state::apply_report::{Report, ReportedStatus};
use crate::relay::state::transaction::{Progress, RelayerTxId};
use crate::relay::store::NUMBER_MAX;
use crate::timestamp::Timestamp;

/// How a relayer wants to be spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `POST /api/v1/relayers/{id}/transactions`, snake_case.
    OpenZeppelin,
    /// `POST /transactions`, camelCase.
    Flat,
}

/// One relayer in the answer to `GET /api/v1/relayers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its id at that process.
    pub id: String,
    /// How it speaks.
    pub dialect: Dialect,
    /// Whether it takes work.
    pub state: ListedState,
    /// Its pending count, where the list carries it.
    pub pending: Option<u64>,
    /// The address that it sends from, where the list carries it.
    pub address: Option<Address>,
    /// The name of its network, where the list carries it.
    pub network: Option<String>,
}

/// Whether a relayer takes work, by its own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListedState {
    /// It takes work.
    Active,
    /// An operator paused it.
    Paused,
    /// It disabled itself.
    Disabled,
}

/// The answer to `GET /relayers/{id}/status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayerStatus {
    /// Accepted and not yet mined.
    pub pending: Option<u64>,
    /// Balance in wei.
    pub balance: Option<U256>,
    /// The last time it confirmed anything, as it writes it.
    pub last_confirmed: Option<String>,
    /// Whether it takes work.
    pub state: ListedState,
    /// The nonce that it takes next, by its own counter.
    pub nonce: Option<u64>,
}

/// Every relayer in a list answer; `None` if it is no such answer.
pub fn read_list(body: &Value) -> Option<Vec<Listed>> {
    let items = body.get("data").unwrap_or(body);
    let items = items.as_array().cloned().unwrap_or_else(|| vec![items.clone()]);
    items.iter().map(read_listed).collect()
}

fn read_listed(item: &Value) -> Option<Listed> {
    let object = item.as_object()?;
    let id = text(object, &["id", "relayerId"])?;
    // Only the flat dialect carries a count, its own id name, or no `system_disabled` flag.
    let flat = object.contains_key("relayerId") || !object.contains_key("system_disabled");
    Some(Listed {
        id,
        dialect: if flat { Dialect::Flat } else { Dialect::OpenZeppelin },
        state: read_state(object),
        pending: number(object, &PENDING_NAMES),
        address: text(object, &["address"]).and_then(|address| address.parse().ok()),
        network: text(object, &["network"]),
    })
}

const PENDING_NAMES: [&str; 3] = ["pending_transactions_count", "pending_transactions", "numberOfPendingTransactions"];

fn read_state(object: &Map<String, Value>) -> ListedState {
    let flag = |name: &str| object.get(name).and_then(Value::as_bool).unwrap_or(false);
    if flag("system_disabled") {
        ListedState::Disabled
    } else if flag("paused") || object.get("status").and_then(Value::as_str) == Some("paused") {
        ListedState::Paused
    } else {
        ListedState::Active
    }
}

/// Reads a status answer.
pub fn read_status(body: &Value) -> Option<RelayerStatus> {
    let object = body.get("data").unwrap_or(body).as_object()?;
    Some(RelayerStatus {
        pending: number(object, &PENDING_NAMES),
        balance: amount(object.get("balance")),
        last_confirmed: text(object, &["last_confirmed_transaction_timestamp"]),
        state: read_state(object),
        nonce: number(object, &["nonce"]),
    })
}

/// The question for the chain's id, which a relayer passes on to its node.
pub fn write_chain_id_question() -> Value {
    json!({ "jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": [] })
}

/// Reads the answer to it: JSON-RPC, by itself or inside `data`. `None` for an error that may pass.
pub fn read_chain_id(body: &Value) -> Option<ChainId> {
    const METHOD_NOT_FOUND: i64 = -32601;
    let inner = body.get("data").filter(|data| !data.is_null()).unwrap_or(body);
    let known = match inner {
        Value::Object(object) => number(object, &["result"]),
        Value::String(text) => parse_amount(text).and_then(|id| u64::try_from(id).ok()),
        _ => None,
    };
    match (known, inner.get("error").filter(|error| !error.is_null())) {
        (Some(id), _) => Some(ChainId::Known(id)),
        (None, Some(error)) => (error["code"] == METHOD_NOT_FOUND).then_some(ChainId::NotTold),
        (None, None) => Some(ChainId::NotTold),
    }
}

/// The body that asks a relayer to make a call. The value is a decimal string, the gas limit a JSON integer: a
/// relayer ignores a gas limit it does not know by name, and refuses one written as text.
pub fn write_send(call: &Call, dialect: Dialect) -> Value {
    let mut body = json!({
        "to": call.to.to_checksum(None),
        "data": call.data,
        "value": call.value.to_string(),
        "speed": call.speed.name(),
    });
    if let (Some(gas), Some(fields)) = (call.gas_limit, body.as_object_mut()) {
        match dialect {
            Dialect::OpenZeppelin => fields.insert("gas_limit".to_owned(), json!(gas)),
            Dialect::Flat => fields.insert("gasLimit".to_owned(), json!(gas.to_string())),
        };
    }
    body
}

/// The longest id that is taken for one.
const TX_ID_LENGTH_MAX: usize = 512;
/// An address is shorter; what is longer is cut, so that every store can keep it and it still is there.
const NAME_LENGTH_MAX: usize = 255;

/// Reads a record: the answer to a send or a get, one entry of a list, or a webhook's payload.
pub fn read_record(body: &Value) -> Option<Report> {
    let object = body.get("data").filter(|data| data.is_object()).unwrap_or(body).as_object()?;
    let name = |key: &str| text(object, &[key]).map(|text| text.chars().take(NAME_LENGTH_MAX).collect());
    // The flat dialect's own name comes first: a body that carries both means the transaction by it.
    let tx_id = text(object, &["transactionId", "id"]).filter(|id| id.chars().count() <= TX_ID_LENGTH_MAX)?;
    let status = text(object, &["status"])?;
    Some(Report {
        tx_id: RelayerTxId(tx_id),
        status: read_reported_status(&status),
        reason: text(object, &["status_reason", "statusReason", "error"]),
        hash: text(object, &["hash"]).filter(|hash| is_hash(hash)),
        // Cut, not left out: what has no nonce counts as never signed.
        nonce: number(object, &["nonce"]).map(|nonce| nonce.min(NUMBER_MAX)),
        from: name("from"),
        to: text(object, &["to"]),
        value: amount(object.get("value")),
        data: text(object, &["data"]),
        gas_limit: number(object, &["gas_limit", "gasLimit"]),
        created_at: text(object, &["created_at", "createdAt"]).and_then(|at| Timestamp::parse(&at)),
        confirmed_at: text(object, &["confirmed_at", "confirmedAt"]).and_then(|at| Timestamp::parse(&at)),
        block_number: number(object, &["block_number", "blockNumber"]).filter(|block| *block <= NUMBER_MAX),
        raw: Value::Object(object.clone()),
    })
}

/// Whether it is a transaction's hash: 32 bytes. The text is stored and shown, so nothing else is taken for one.
fn is_hash(text: &str) -> bool {
    let digits = text.strip_prefix("0x").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn read_reported_status(name: &str) -> ReportedStatus {
    match name.to_ascii_lowercase().as_str() {
        "pending" => ReportedStatus::Open(Progress::Pending),
        "sent" => ReportedStatus::Open(Progress::Sent),
        "submitted" | "inmempool" => ReportedStatus::Open(Progress::Submitted),
        "mined" => ReportedStatus::Open(Progress::Mined),
        "confirmed" => ReportedStatus::Confirmed,
        "failed" => ReportedStatus::Failed,
        "canceled" | "cancelled" => ReportedStatus::Canceled,
        "expired" => ReportedStatus::Expired,
        _ => ReportedStatus::Unknown,
    }
}

/// One page of a relayer's transactions.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    /// Newest first, if the relayer keeps its word.
    pub records: Vec<Report>,
    /// The relayer's own counts, if it gives them.
    pub counts: Option<PageCounts>,
}

/// A page's place in the list, as the relayer counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCounts {
    /// Number of the page, from 1.
    pub page: u64,
    /// Records on a full page.
    pub size: u64,
    /// Records in the whole list.
    pub total: u64,
}

impl Page {
    /// Whether no page follows. The number of records says nothing: a relayer leaves out records that it cannot load, and
    /// may give fewer than it was asked for. The last page is the one at which its own count ends, or else an empty one.
    pub fn is_last(&self) -> bool {
        match self.counts {
            Some(PageCounts { page, size, total }) => page.saturating_mul(size) >= total,
            None => self.records.is_empty(),
        }
    }
}

/// Reads one page.
pub fn read_page(body: &Value) -> Option<Page> {
    let records = body.get("data")?.as_array()?.iter().map(read_record).collect::<Option<Vec<_>>>()?;
    let count = |name: &str| body.get("pagination")?.get(name)?.as_u64();
    let counts = match (count("current_page"), count("per_page"), count("total_items")) {
        (Some(page), Some(size), Some(total)) => Some(PageCounts { page, size, total }),
        _ => None,
    };
    Some(Page { records, counts })
}

/// What a webhook says.
#[derive(Debug, Clone, PartialEq)]
pub enum Webhook {
    /// News of a transaction.
    Transaction(Box<Report>),
    /// News of the relayer itself, or of something we do not follow.
    Other(String),
}

/// Reads a webhook body: the real relayer's envelope, or the flat form. In the envelope the top-level `id` is the
/// notification's, never the transaction's.
pub fn read_webhook(body: &Value) -> Option<Webhook> {
    match body.get("payload") {
        Some(payload) => {
            let kind = payload.get("payload_type").and_then(Value::as_str).unwrap_or("transaction");
            if kind != "transaction" {
                return Some(Webhook::Other(kind.to_owned()));
            }
            read_record(payload).map(|report| Webhook::Transaction(Box::new(report)))
        }
        None => read_record(body).map(|report| Webhook::Transaction(Box::new(report))),
    }
}

/// The error text of a refusal, whatever its shape; shortened, since it is stored and shown.
pub fn read_error(body: &str) -> String {
    const LENGTH_MAX: usize = 500;
    let said = serde_json::from_str::<Value>(body)
        .ok()
        .and_then(|body| ["error", "message"].iter().find_map(|name| body.get(*name)?.as_str().map(str::to_owned)));
    let said = said.unwrap_or_else(|| body.trim().to_owned());
    if said.is_empty() { "no reason given".to_owned() } else { said.chars().take(LENGTH_MAX).collect() }
}

fn text(object: &Map<String, Value>, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| object.get(*name)?.as_str().map(str::to_owned)).filter(|text| !text.is_empty())
}

fn number(object: &Map<String, Value>, names: &[&str]) -> Option<u64> {
    names.iter().find_map(|name| match object.get(*name)? {
        Value::Number(number) => number.as_u64(),
        Value::String(digits) => parse_amount(digits).and_then(|amount| u64::try_from(amount).ok()),
        _ => None,
    })
}

/// An amount as relayers write it: hex or decimal text, or a bare integer.
fn amount(value: Option<&Value>) -> Option<U256> {
    match value? {
        Value::String(text) => parse_amount(text),
        Value::Number(number) => parse_amount(&number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::request::call::DirectRequest;

    fn parse(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_real_list_is_read() {
        let body = parse(
            r#"{"success":true,"data":[{"id":"relayer-a","name":"A","network":"devnet","network_type":"evm",
            "paused":false,"address":"0xf39f","system_disabled":false}],"error":null,
            "pagination":{"current_page":1,"per_page":10,"total_items":1}}"#,
        );
        let listed = read_list(&body).unwrap();
        assert_eq!((listed[0].id.as_str(), listed[0].dialect), ("relayer-a", Dialect::OpenZeppelin));
        assert_eq!((listed[0].state, listed[0].network.as_deref()), (ListedState::Active, Some("devnet")));
    }

    #[test]
    fn the_chains_id_is_read_in_every_form() {
        for body in [
            json!({ "jsonrpc": "2.0", "id": 1, "result": "0x7a69", "error": null }),
            json!({ "success": true, "data": { "jsonrpc": "2.0", "id": 1, "result": "0x7a69" }, "error": null }),
            json!({ "success": true, "data": "0x7a69", "error": null }),
            json!({ "jsonrpc": "2.0", "id": 1, "result": 31337 }),
        ] {
            assert_eq!(read_chain_id(&body), Some(ChainId::Known(31337)), "{body}");
        }
        let error = |code: i64| json!({ "jsonrpc": "2.0", "id": 1, "error": { "code": code, "message": "m" } });
        assert_eq!(read_chain_id(&error(-32601)), Some(ChainId::NotTold), "it does not offer the method");
        assert_eq!(read_chain_id(&error(-32603)), None, "its node is away");
        assert_eq!(read_chain_id(&json!({ "success": false, "data": null, "error": "Provider error" })), None);
        assert_eq!(read_chain_id(&json!("OK")), Some(ChainId::NotTold));
    }

    #[test]
    fn the_documents_list_is_read() {
        let listed =
            read_list(&json!({ "data": [{ "id": "r1", "pending_transactions": 5, "status": "paused" }] })).unwrap();
        assert_eq!((listed[0].dialect, listed[0].pending), (Dialect::Flat, Some(5)));
        assert_eq!(listed[0].state, ListedState::Paused);
        let one = read_list(&json!({ "relayerId": "r1", "numberOfPendingTransactions": 2, "paused": false })).unwrap();
        assert_eq!((one[0].id.as_str(), one[0].pending), ("r1", Some(2)));
    }

    #[test]
    fn disabled_and_paused_are_seen() {
        let body = json!({ "data": [{ "id": "a", "paused": true, "system_disabled": true }, { "id": "b", "paused": true, "system_disabled": false }] });
        let states: Vec<_> = read_list(&body).unwrap().into_iter().map(|listed| listed.state).collect();
        assert_eq!(states, [ListedState::Disabled, ListedState::Paused]);
    }

    #[test]
    fn status_counts_and_balance_are_read() {
        let body = parse(
            r#"{"success":true,"data":{"network_type":"evm","balance":"10000000000000000000000",
            "pending_transactions_count":3,"last_confirmed_transaction_timestamp":null,"system_disabled":false,
            "paused":false,"nonce":"0"},"error":null}"#,
        );
        let status = read_status(&body).unwrap();
        assert_eq!((status.pending, status.last_confirmed, status.nonce), (Some(3), None, Some(0)));
        assert_eq!(status.balance.unwrap().to_string(), "10000000000000000000000");
    }

    #[test]
    fn the_largest_value_is_sent_digit_for_digit() {
        let max = U256::MAX.to_string();
        let request = DirectRequest::parse(&json!({
            "to": "0x5fbdb2315678afecb367f032d93f642f64180aa3", "value": max, "gas": 21000, "speed": "fast",
        }))
        .unwrap();
        let real = write_send(&request.call, Dialect::OpenZeppelin);
        assert_eq!((&real["value"], &real["gas_limit"]), (&json!(max), &json!(21000)));
        assert!(real.get("gasLimit").is_none());
        let flat = write_send(&request.call, Dialect::Flat);
        assert_eq!(flat["gasLimit"], json!("21000"));
    }

    #[test]
    fn the_real_webhook_is_read_by_its_payload() {
        let body = parse(
            r#"{"id":"1501abdc","event":"transaction_update","payload":{"payload_type":"transaction",
            "id":"75a98651","hash":"0xcf00b729e903ea467fde35c0fdd3ad0edaf4794918256e49148be454ae9a89c1","status":"confirmed","status_reason":null,
            "created_at":"2026-11-15T18:30:57.458707822+00:00","confirmed_at":"2026-11-15T18:31:07.224789542+00:00",
            "gas_limit":21000,"nonce":0,"value":"0x38d7ea4c68000","from":"0xf39f","to":"0x90F7","data":"0x"},
            "timestamp":"2026-11-15T18:31:07.224853264+00:00"}"#,
        );
        let Some(Webhook::Transaction(report)) = read_webhook(&body) else { panic!() };
        assert_eq!((report.tx_id.0.as_str(), report.status), ("75a98651", ReportedStatus::Confirmed));
        assert_eq!((report.nonce, report.gas_limit, report.block_number), (Some(0), Some(21000), None));
        assert_eq!(report.value.unwrap().to_string(), "1000000000000000");
    }

    #[test]
    fn the_documents_webhook_is_read() {
        let hash = format!("0x{}", "aB".repeat(32));
        let body = json!({ "transactionId": "oz-123", "hash": hash, "status": "confirmed", "to": "0x1",
            "createdAt": "2026-01-08T10:00:00Z", "confirmedAt": "2026-01-08T10:01:00Z" });
        let Some(Webhook::Transaction(report)) = read_webhook(&body) else { panic!() };
        assert_eq!((report.tx_id.0.as_str(), report.hash), ("oz-123", Some(hash)));
        assert_eq!(report.value, None);
    }

    /// A store refuses what does not fit, and would be asked again for ever.
    #[test]
    fn what_no_store_could_keep_is_cut_or_not_read() {
        let long = "a".repeat(100_000);
        let report = read_record(&json!({ "id": "x", "status": "confirmed", "hash": long, "from": long })).unwrap();
        assert_eq!(report.from.map(|from| from.len()), Some(NAME_LENGTH_MAX));
        assert_eq!(read_record(&json!({ "id": long, "status": "confirmed" })), None);
        let in_block = |block: u64| json!({ "id": "x", "status": "confirmed", "block_number": block });
        let read = |block: u64| read_record(&in_block(block)).unwrap().block_number;
        let nonce = read_record(&json!({ "id": "x", "status": "failed", "nonce": u64::MAX })).unwrap().nonce;
        assert_eq!(nonce, Some(NUMBER_MAX), "it was signed");
        assert_eq!((read(12), read(NUMBER_MAX), read(u64::MAX)), (Some(12), Some(NUMBER_MAX), None));
    }

    /// A webhook's `<img …>` was stored as the hash and shown to every reader.
    #[test]
    fn a_hash_is_32_bytes_and_a_malformed_one_still_means_that_it_was_signed() {
        let report = |hash: Value| read_record(&json!({ "id": "x", "status": "failed", "hash": hash, "nonce": null }));
        let (short, letters) = ("ab".repeat(31), "zz".repeat(32));
        for bad in [
            "<img src=x onerror=alert(1)>",
            "0x",
            "0x1",
            &"ab".repeat(32),
            &format!("0x{short}"),
            &format!("0x{letters}"),
        ] {
            let report = report(json!(bad)).unwrap();
            assert_eq!(report.hash, None, "{bad}");
            assert!(report.hash_is_malformed() && !report.never_signed(), "{bad}");
        }
        let good = report(json!(format!("0x{}", "ab".repeat(32)))).unwrap();
        assert!(good.hash.is_some() && !good.hash_is_malformed());
        let none = report(Value::Null).unwrap();
        assert!(none.never_signed() && !none.hash_is_malformed());
    }

    #[test]
    fn a_short_page_is_not_the_last_unless_the_relayer_says_so() {
        let record = json!({ "id": "a", "status": "pending" });
        let page =
            |pagination: Value| read_page(&json!({ "data": [record], "pagination": pagination })).unwrap().is_last();
        assert!(!page(json!({ "current_page": 1, "per_page": 500, "total_items": 501 })));
        assert!(page(json!({ "current_page": 2, "per_page": 500, "total_items": 501 })));
        assert!(!page(Value::Null));
        assert!(read_page(&json!({ "data": [] })).unwrap().is_last());
    }

    #[test]
    fn relayer_state_webhooks_are_not_transactions() {
        let body =
            json!({ "id": "x", "event": "relayer_state_update", "payload": { "payload_type": "relayer_enabled" } });
        assert_eq!(read_webhook(&body), Some(Webhook::Other("relayer_enabled".into())));
    }

    #[test]
    fn errors_are_found_in_any_shape() {
        assert_eq!(read_error(r#"{"success":false,"error":"Relayer paused"}"#), "Relayer paused");
        assert_eq!(read_error("Json deserialize error: x"), "Json deserialize error: x");
        assert_eq!(read_error(""), "no reason given");
    }
}
