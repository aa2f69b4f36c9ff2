//! Asks the chain behind `RPC_URL`, over JSON-RPC: the forwarder's nonces, which addresses have code, how a call would end,
//! and which block a transaction is in. [`account`] reads which transactions an account has made; [`endpoint`] keeps what the
//! calls showed of each URL, for `/health`.
//!
//! The chain is first asked when an answer is needed, so that a service starts while the chain is unavailable. Before its
//! first answer each endpoint's chain id is compared with the configuration, and the forwarder before it is used. With
//! several endpoints, one that does not answer, or is on another chain, is replaced by the next. Beyond that nothing is
//! retried here: the caller decides what a missing answer means.

pub mod account;
pub mod endpoint;
pub mod revert;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::{SolCall, sol};
use futures::future::join_all;
use metrics::counter;
use reqwest::header::HeaderMap;
use reqwest::{Method, StatusCode, Url};
use serde_json::{Value, json};
use tracing::{error, warn};

use self::endpoint::{Endpoint, EndpointView, NoAnswer};
use crate::clock::Clock;
use crate::config::{ChainConfig, ForwarderConfig};
use crate::evm::parse_amount;
use crate::http::outgoing::{self, ConnectionLimits};
use crate::http::transport::{HttpRequest, HttpTransport, Transport, TransportError, TransportFailure};
use crate::relay::request::call::Call;
use crate::relay::request::forward::{DOMAIN_VERSION, Signer};
use crate::relay::store::NUMBER_MAX;

sol! {
    function nonces(address owner) external view returns (uint256);
    function eip712Domain() external view returns (
        bytes1 fields, string name, string version, uint256 chainId, address verifyingContract, bytes32 salt,
        uint256[] extensions
    );
}

/// The chain at `RPC_URL`.
pub struct Chain {
    transport: Arc<dyn Transport>,
    clock: Clock,
    endpoints: Vec<Endpoint>,
    /// The endpoint that answered last.
    current: AtomicUsize,
    timeout: Duration,
    chain_id: Option<u64>,
    /// Blocks on top of one that make it final.
    finality: u64,
    /// The id that every endpoint must have: the configured one, else that of the endpoint that was checked first.
    id: OnceLock<U256>,
    forwarder: Option<ForwarderConfig>,
    /// Whether the forwarder was found to be the configured one.
    forwarder_checked: AtomicBool,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// No answer, or none in time.
    #[error("the chain did not answer")]
    Unreachable(#[source] NoAnswer),
    /// A JSON-RPC error.
    #[error("the chain answered with error {code}: {message}")]
    Refused {
        /// Its code.
        code: i64,
        /// Its text.
        message: String,
        /// Its data: the revert data, if the call reverted.
        data: Value,
    },
    /// An answer that is too long to read.
    #[error("the chain's answer is too long")]
    TooLong,
    /// An answer that is not what JSON-RPC promises.
    #[error("the chain's answer is not understood: {0}")]
    Unreadable(&'static str),
    /// Chain or forwarder differ from the configuration.
    #[error("{0}")]
    Mismatch(String),
}

/// How a call would end if it were made now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trial {
    /// It would succeed.
    Runs,
    /// It would revert.
    Reverts {
        /// Revert data.
        data: Bytes,
        /// The node's error message.
        message: String,
    },
    /// The node gives no verdict, with its message.
    Unclear(String),
}

const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest answer that is read; a block with its transactions is the longest one asked for.
const ANSWER_BYTES_MAX: usize = 16 << 20;

impl Chain {
    /// The chain of the configuration; nothing is sent yet.
    pub fn new(config: &ChainConfig, clock: Clock) -> Result<Self, String> {
        let http = outgoing::client(ConnectionLimits { idle: IDLE_TIMEOUT, unacknowledged: None })?;
        Self::over(Arc::new(HttpTransport::new(http, HeaderMap::new())), config, clock)
    }

    /// [`Chain::new`] over any transport.
    pub fn over(transport: Arc<dyn Transport>, config: &ChainConfig, clock: Clock) -> Result<Self, String> {
        let endpoints = config.rpc_url.expose().split(',').map(str::trim).filter(|url| !url.is_empty());
        let endpoints: Result<Vec<Endpoint>, _> = endpoints.map(|url| Url::parse(url).map(Endpoint::new)).collect();
        let endpoints = endpoints.map_err(|error| format!("RPC_URL: {error}"))?;
        if endpoints.is_empty() {
            return Err("RPC_URL is empty".to_owned());
        }
        let (chain_id, forwarder) = (config.chain_id, config.forwarder.clone());
        let id = chain_id.map_or_else(OnceLock::new, |id| OnceLock::from(U256::from(id)));
        let (current, timeout) = (AtomicUsize::new(0), config.rpc_timeout);
        if endpoints.len() > 1 && chain_id.is_none() {
            warn!(
                action = "chain_id_not_set",
                "RPC_URL names several nodes, and CHAIN_ID is not set: the node that answers first decides which chain it is"
            );
        }
        let forwarder_checked = AtomicBool::new(false);
        let finality = config.finality_blocks;
        Ok(Self { transport, clock, endpoints, current, timeout, chain_id, finality, id, forwarder, forwarder_checked })
    }

    /// Asks every endpoint for its newest block, for `limit` in all. [`Chain::endpoints`] then shows what came of it.
    pub async fn look(&self, limit: Duration) {
        join_all((0..self.endpoints.len()).map(|index| self.look_at(index, limit))).await;
    }

    /// What the last calls showed of each endpoint, in the order of `RPC_URL`.
    pub fn endpoints(&self) -> Vec<EndpointView> {
        self.endpoints.iter().map(Endpoint::view).collect()
    }

    async fn look_at(&self, index: usize, limit: Duration) {
        const METHOD: &str = "eth_getBlockByNumber";
        let endpoint = &self.endpoints[index];
        let asked = async {
            // The first endpoint that answers other calls decides which chain it is; a look does not.
            if self.id.get().is_some() {
                self.check_endpoint(index).await?;
            }
            counter!("baton_rpc_calls_total", "method" => METHOD).increment(1);
            let newest = result(self.post(&endpoint.url, &question(METHOD, json!(["latest", false]))).await?)?;
            number(&newest["number"]).ok_or(ChainError::Unreadable("the newest block"))
        };
        let head = self.clock.timeout(limit, asked).await;
        let head = head.unwrap_or_else(|late| Err(ChainError::Unreachable(late.into())));
        endpoint.saw(&head, self.clock.now());
        // A failed look is not counted: an alert on failed calls must not sound for a standby that nothing needs.
        if let Ok(head) = head {
            endpoint.saw_head(head);
        }
    }

    /// The chain's id.
    pub async fn id(&self) -> Result<u64, ChainError> {
        let answer = self.ask("eth_chainId", json!([])).await?;
        number(&answer).ok_or(ChainError::Unreadable("the chain's id"))
    }

    /// A signer's next nonce at the forwarder.
    pub async fn nonce(&self, signer: Signer) -> Result<U256, ChainError> {
        self.check().await?;
        let call = noncesCall { owner: signer.address };
        let answer = self.read(signer.forwarder, call.abi_encode()).await?;
        noncesCall::abi_decode_returns(&answer).map_err(|_| ChainError::Unreadable("the forwarder's nonce"))
    }

    /// Whether an address is a contract. An account that delegates to a contract's code (EIP-7702) is none: it still signs
    /// by itself.
    pub async fn is_contract(&self, address: Address) -> Result<bool, ChainError> {
        const DELEGATION: [u8; 3] = [0xef, 0x01, 0x00];
        let code = bytes(&self.ask("eth_getCode", json!([address.to_string(), "latest"])).await?)?;
        Ok(!code.is_empty() && !code.starts_with(&DELEGATION))
    }

    /// How a call would end if it were made now by this sender.
    pub async fn try_call(&self, from: Address, call: &Call) -> Result<Trial, ChainError> {
        self.check().await?;
        let mut request = json!({
            "from": from.to_string(), "to": call.to.to_string(), "value": format!("{:#x}", call.value), "data": call.data,
        });
        if let Some(gas) = call.gas_limit {
            request["gas"] = json!(format!("{gas:#x}"));
        }
        match self.ask("eth_call", json!([request, "latest"])).await {
            Ok(_) => Ok(Trial::Runs),
            Err(ChainError::Refused { message, data, .. }) => Ok(revert::judge(message, &data)),
            Err(error) => Err(error),
        }
    }

    /// The number of endpoints.
    fn endpoint_count(&self) -> usize {
        self.endpoints.len()
    }

    /// The endpoint that is asked first.
    fn endpoint(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    /// Asks this endpoint first from now on.
    fn turn_to(&self, endpoint: usize) {
        self.current.store(endpoint % self.endpoints.len(), Ordering::Relaxed);
    }

    /// Why a call that was mined in this block reverted: the same call on the state before it. `None` if the node does
    /// not tell.
    async fn revert_reason(&self, from: Address, call: &Call, block: u64) -> Option<String> {
        let mut request = json!({
            "from": from.to_string(), "to": call.to.to_string(), "value": format!("{:#x}", call.value), "data": call.data,
        });
        if let Some(gas) = call.gas_limit {
            request["gas"] = json!(format!("{gas:#x}"));
        }
        let before = format!("{:#x}", block.saturating_sub(1));
        match self.ask("eth_call", json!([request, before])).await {
            Err(ChainError::Refused { message, data, .. }) => match revert::judge(message, &data) {
                Trial::Reverts { data, message } => Some(revert::reason(&data, &message)),
                Trial::Runs | Trial::Unclear(_) => None,
            },
            _ => None,
        }
    }

    /// The block that a transaction is in, and whether it succeeded there, if its receipt tells; `None` if the chain has no
    /// receipt of it.
    pub async fn block_of(&self, hash: B256) -> Result<Option<(u64, Option<bool>)>, ChainError> {
        let receipt = self.ask("eth_getTransactionReceipt", json!([hash.to_string()])).await?;
        // Some nodes return a receipt before the transaction is in a block.
        let Some(block) = receipt.get("blockNumber").filter(|number| !number.is_null()) else { return Ok(None) };
        let block = number(block).ok_or(ChainError::Unreadable("the receipt's block"))?;
        Ok(Some((block, receipt.get("status").and_then(number).map(|status| status == 1))))
    }

    /// Whether the transaction with this hash makes this call, in a block that cannot be replaced any more.
    pub async fn has_made(&self, call: &Call, hash: B256) -> Result<bool, ChainError> {
        let found = self.ask("eth_getTransactionByHash", json!([hash.to_string()])).await?;
        let Some(made) = account::read_transaction(&found).map(|(made, _)| made).filter(|made| made.makes(call)) else {
            return Ok(false);
        };
        let newest = self.ask("eth_getBlockByNumber", json!(["latest", false])).await?;
        let head = number(&newest["number"]).ok_or(ChainError::Unreadable("the newest block"))?;
        Ok(made.block.saturating_add(self.finality) <= head)
    }

    /// Compares the forwarder with the configuration, until it once was found to match.
    async fn check(&self) -> Result<(), ChainError> {
        if self.forwarder_checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(forwarder) = &self.forwarder {
            self.check_forwarder(forwarder).await?;
        }
        self.forwarder_checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Compares an endpoint's chain with the one that every endpoint must have, before its first answer is used. One on
    /// another chain is not used: an account has another history there.
    async fn check_endpoint(&self, index: usize) -> Result<(), ChainError> {
        let endpoint = &self.endpoints[index];
        let nothing_to_compare = self.endpoints.len() == 1 && self.chain_id.is_none();
        if nothing_to_compare || endpoint.checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        counter!("baton_rpc_calls_total", "method" => "eth_chainId").increment(1);
        let answer = result(self.post(&endpoint.url, &question("eth_chainId", json!([]))).await?)?;
        let found = answer.as_str().and_then(parse_amount).ok_or(ChainError::Unreadable("the chain's id"))?;
        let wanted = *self.id.get_or_init(|| found);
        if found == wanted {
            endpoint.checked.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let place = if self.endpoints.len() == 1 { String::new() } else { format!("URL {} of ", index + 1) };
        let difference = match self.chain_id {
            Some(wanted) => format!("CHAIN_ID is {wanted}, but the chain at {place}RPC_URL has the id {found}"),
            None => format!("the chain at {place}RPC_URL has the id {found}, but that at another URL has {wanted}"),
        };
        if !endpoint.announced.swap(true, Ordering::Relaxed) {
            error!(action = "wrong_chain", "{difference}; it is not asked");
        }
        Err(ChainError::Mismatch(difference))
    }

    async fn check_forwarder(&self, forwarder: &ForwarderConfig) -> Result<(), ChainError> {
        let address = forwarder.address;
        let none = || ChainError::Mismatch(format!("there is no ERC2771Forwarder at FORWARDER_ADDRESS {address}"));
        let answer = match self.read(address, eip712DomainCall {}.abi_encode()).await {
            Err(ChainError::Refused { message, data, .. })
                if matches!(revert::judge(message.clone(), &data), Trial::Reverts { .. }) =>
            {
                return Err(none());
            }
            answer => answer?,
        };
        let found = eip712DomainCall::abi_decode_returns(&answer).map_err(|_| none())?;
        let differs = |variable: &str, wanted: String, found: String| {
            let difference = format!("{variable} is {wanted}, but the forwarder's EIP-712 domain has {found}");
            Err(ChainError::Mismatch(difference))
        };
        if found.name != forwarder.name {
            return differs("FORWARDER_NAME", format!("{:?}", forwarder.name), format!("{:?}", found.name));
        }
        if found.version != DOMAIN_VERSION {
            return differs("the version", format!("{DOMAIN_VERSION:?}"), format!("{:?}", found.version));
        }
        if found.chainId != U256::from(forwarder.chain_id) {
            return differs("CHAIN_ID", forwarder.chain_id.to_string(), found.chainId.to_string());
        }
        if found.verifyingContract != address {
            return differs("FORWARDER_ADDRESS", address.to_string(), found.verifyingContract.to_string());
        }
        Ok(())
    }

    async fn read(&self, to: Address, data: Vec<u8>) -> Result<Bytes, ChainError> {
        bytes(
            &self
                .ask("eth_call", json!([{ "to": to.to_string(), "data": Bytes::from(data).to_string() }, "latest"]))
                .await?,
        )
    }

    async fn ask(&self, method: &str, params: Value) -> Result<Value, ChainError> {
        counter!("baton_rpc_calls_total", "method" => method.to_owned()).increment(1);
        result(self.post_to_any(&question(method, params)).await?)
    }

    /// Asks the endpoint that answered last, and the others if it does not answer or is on another chain.
    async fn post_to_any(&self, body: &Value) -> Result<Value, ChainError> {
        let first = self.current.load(Ordering::Relaxed);
        let mut failure = None;
        for offset in 0..self.endpoints.len() {
            let index = (first + offset) % self.endpoints.len();
            let endpoint = &self.endpoints[index];
            let answer = async {
                self.check_endpoint(index).await?;
                self.post(&endpoint.url, body).await
            };
            let answer = answer.await;
            endpoint.saw(&answer, self.clock.now());
            match answer {
                Ok(answer) => {
                    self.current.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(error) => {
                    counter!("baton_rpc_failures_total").increment(1);
                    // One on another chain is no answer to why the others gave none.
                    if failure.is_none() || !matches!(error, ChainError::Mismatch(_)) {
                        failure = Some(error);
                    }
                }
            }
        }
        Err(failure.unwrap_or(ChainError::Unreadable("there is no endpoint")))
    }

    async fn post(&self, url: &Url, body: &Value) -> Result<Value, ChainError> {
        let request = HttpRequest {
            method: Method::POST,
            url: url.to_string(),
            body: Some(body.to_string().into()),
            fence: None,
            timeout: self.timeout,
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        let answer = self.transport.send(request).await?;
        let status = answer.status;
        match serde_json::from_slice::<Value>(&answer.body) {
            // Some nodes answer a call that reverts with status 4xx or 5xx; the JSON-RPC answer is in the body.
            Ok(answer) if answer.get("result").is_some() || answer.get("error").is_some_and(Value::is_object) => {
                let limited = is_limited(status, &answer);
                if limited || matches!(status.as_u16(), 401..=403 | 502..=504) {
                    let detail = format!(": {}", answer["error"]);
                    return Err(ChainError::Unreachable(NoAnswer::Refused { status, limited, detail }));
                }
                Ok(answer)
            }
            _ if !status.is_success() => {
                let limited = is_limited(status, &Value::Null);
                Err(ChainError::Unreachable(NoAnswer::Refused { status, limited, detail: String::new() }))
            }
            _ => Err(ChainError::Unreadable("it is no JSON-RPC")),
        }
    }
}

fn question(method: &str, params: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params })
}

/// The result in a JSON-RPC answer.
fn result(mut answer: Value) -> Result<Value, ChainError> {
    match answer.get("error").filter(|error| !error.is_null()) {
        None => answer.get_mut("result").map(Value::take).ok_or(ChainError::Unreadable("neither result nor error")),
        Some(error) => Err(ChainError::Refused {
            code: error["code"].as_i64().unwrap_or_default(),
            message: error["message"].as_str().unwrap_or_default().chars().take(TEXT_LENGTH_MAX).collect(),
            data: error["data"].clone(),
        }),
    }
}

impl From<TransportError> for ChainError {
    fn from(error: TransportError) -> Self {
        match error.kind {
            TransportFailure::AnswerTooLong => Self::TooLong,
            _ => Self::Unreachable(NoAnswer::Transport(error)),
        }
    }
}

/// Whether an endpoint refuses to work because the limit of calls is reached. Another endpoint may answer.
fn is_limited(status: StatusCode, answer: &Value) -> bool {
    /// "Limit exceeded" (EIP-1474), and the code that providers take from HTTP.
    const LIMITS: [i64; 2] = [-32_005, 429];
    let code = answer["error"]["code"].as_i64();
    status == StatusCode::TOO_MANY_REQUESTS || code.is_some_and(|code| LIMITS.contains(&code))
}

/// Longest text of an error that is kept, in characters.
const TEXT_LENGTH_MAX: usize = 500;

/// A quantity that fits into 64 bits, and into every store.
fn number(value: &Value) -> Option<u64> {
    let number = value.as_str().and_then(parse_amount).and_then(|number| u64::try_from(number).ok());
    number.filter(|number| *number <= NUMBER_MAX)
}

fn bytes(answer: &Value) -> Result<Bytes, ChainError> {
    let text = answer.as_str().and_then(|text| text.strip_prefix("0x"));
    let decoded = text.and_then(|digits| hex::decode(digits).ok());
    decoded.map(Bytes::from).ok_or(ChainError::Unreadable("no bytes"))
}
