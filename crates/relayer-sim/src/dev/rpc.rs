//! JSON-RPC over HTTP, and the difference between a node that answers with an error and one that does not answer.

use std::time::Duration;

use alloy_primitives::{Bytes, U256};
use serde_json::{Value, json};

/// Shorter than the real relayer's 10 s: a laptop's chain answers at once or not at all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// JSON-RPC's "internal error" and "limit exceeded": statements about the node, not about the request.
const NODE_ERRORS: [i64; 2] = [-32603, -32005];

pub(super) struct Rpc {
    client: reqwest::Client,
    url: reqwest::Url,
}

/// The node did not answer, with the reason. Nothing is known.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Away(pub(super) String);

/// Why a call has no result.
#[derive(Debug)]
pub(super) enum RpcFailure {
    /// The node answered with an error.
    Error(RpcErrorAnswer),
    Away(Away),
}

#[derive(Debug)]
pub(super) struct RpcErrorAnswer {
    code: i64,
    pub(super) message: String,
    data: Value,
}

impl Rpc {
    pub(super) fn new(url: reqwest::Url) -> reqwest::Result<Self> {
        let builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy();
        let client = builder.connect_timeout(CONNECT_TIMEOUT).timeout(ANSWER_TIMEOUT).tcp_nodelay(true).build()?;
        Ok(Self { client, url })
    }

    /// Messages leave out the node's address, which contains a key at some providers.
    pub(super) async fn call(&self, method: &str, params: Value) -> Result<Value, RpcFailure> {
        let away = |reason: &str| RpcFailure::Away(Away(reason.to_owned()));
        let failed = |error: reqwest::Error| match error {
            error if error.is_connect() => away("the node cannot be reached"),
            error if error.is_timeout() => away("the node does not answer"),
            error if error.is_decode() => away("the node's answer cannot be read"),
            _ => away("the connection to the node failed"),
        };
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let answer = self.client.post(self.url.clone()).json(&request).send().await.map_err(failed)?;
        let status = answer.status();
        // Some nodes answer a call that reverts with 4xx or 5xx and the JSON-RPC error in the body.
        let mut answer = match answer.json::<Value>().await {
            Ok(answer) if status.is_success() || answer["error"].is_object() => answer,
            _ if !status.is_success() => return Err(away(&format!("the node answers {status}"))),
            Ok(answer) => answer,
            Err(error) => return Err(failed(error)),
        };
        if let Some(error) = answer.get("error").filter(|error| error.is_object()) {
            return Err(RpcFailure::Error(RpcErrorAnswer {
                code: error["code"].as_i64().unwrap_or_default(),
                message: error["message"].as_str().unwrap_or_default().to_owned(),
                data: error["data"].clone(),
            }));
        }
        answer.get_mut("result").map(Value::take).ok_or_else(|| away("the node's answer cannot be read"))
    }
}

impl RpcErrorAnswer {
    /// Whether the error is about the request, and not about the node.
    pub(super) fn is_about_the_request(&self) -> bool {
        // Hardhat calls a revert an internal error.
        !NODE_ERRORS.contains(&self.code) || self.message.contains("revert")
    }

    /// The revert data, which nodes put at different depths.
    pub(super) fn revert_data(&self) -> Option<Bytes> {
        let mut data = &self.data;
        while let Some(inner) = data.get("data") {
            data = inner;
        }
        data.as_str()?.parse().ok()
    }
}

impl From<RpcFailure> for Away {
    fn from(failure: RpcFailure) -> Self {
        match failure {
            RpcFailure::Away(away) => away,
            RpcFailure::Error(error) => Self(format!("the node says {}", error.message)),
        }
    }
}

/// A quantity of JSON-RPC: 0x and hexadecimal digits.
pub(super) fn quantity(value: &Value) -> Result<U256, Away> {
    let digits = value.as_str().and_then(|text| text.strip_prefix("0x"));
    let number = digits.and_then(|digits| U256::from_str_radix(digits, 16).ok());
    number.ok_or_else(|| Away("the node's answer is not a number".to_owned()))
}

/// A quantity that fits the type.
pub(super) fn number<T: TryFrom<U256>>(value: &Value) -> Result<T, Away> {
    T::try_from(quantity(value)?).map_err(|_| Away("the node's answer is too large a number".to_owned()))
}
