use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;

use super::*;
use crate::config::{ChainConfig, Secret};
use crate::http::transport::{Request, Response, Transport, TransportError};

const ACCOUNT: Address = Address::repeat_byte(0xaa);
/// Seconds between two blocks.
const BLOCK_TIME: u64 = 10;

/// A chain of which each call may find another state.
struct Node {
    calls: AtomicUsize,
    state: fn(usize) -> State,
}

/// The newest block, and the block that the account's transaction with nonce 0 is in.
#[derive(Clone, Copy)]
struct State {
    head: u64,
    mined: Option<u64>,
    /// Whether the node has the state of older blocks.
    historical: bool,
}

impl State {
    fn answer(self, method: &str, params: &Value) -> Value {
        let named = params[if method == "eth_getBlockByNumber" { 0 } else { 1 }].as_str().unwrap();
        let block = number(&json!(named)).unwrap_or(self.head);
        let mined = self.mined.filter(|mined| *mined <= block);
        match method {
            "eth_getTransactionCount" if !self.historical && named.starts_with("0x") => {
                json!({ "error": { "code": -32000, "message": "missing trie node" } })
            }
            // The transaction is in a block, or waits for one.
            "eth_getTransactionCount" if named == "pending" => json!({ "result": "0x1" }),
            "eth_getTransactionCount" => json!({ "result": format!("{:#x}", u64::from(mined.is_some())) }),
            "eth_getBlockByNumber" => {
                let transactions: Vec<Value> =
                    self.mined.filter(|mined| *mined == block).map(transaction).into_iter().collect();
                let (number, at) = (format!("{block:#x}"), format!("{:#x}", block * BLOCK_TIME));
                // Another block if it, or one before it, has other transactions.
                let hash = B256::from(U256::from(block * 1_000 + mined.unwrap_or(0)));
                json!({ "result": { "number": number, "hash": hash, "timestamp": at, "transactions": transactions } })
            }
            _ => unreachable!("{method} is not asked for"),
        }
    }
}

fn transaction(block: u64) -> Value {
    json!({
        "hash": B256::with_last_byte(1), "nonce": "0x0", "blockNumber": format!("{block:#x}"), "from": ACCOUNT,
        "to": ACCOUNT, "value": "0x1", "input": "0x",
    })
}

#[async_trait]
impl Transport for Node {
    async fn send(&self, request: Request) -> Result<Response, TransportError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let body: Value = serde_json::from_slice(&request.body.unwrap()).unwrap();
        let answer = (self.state)(call).answer(body["method"].as_str().unwrap(), &body["params"]);
        Ok(Response { status: StatusCode::OK, headers: HeaderMap::new(), body: answer.to_string().into() })
    }
}

async fn history(state: fn(usize) -> State) -> Result<AccountHistory, ChainError> {
    let config = ChainConfig {
        rpc_url: Secret::new("http://node"),
        rpc_timeout: Duration::from_secs(1),
        chain_id: None,
        preflight: false,
        gasless: crate::config::GaslessPolicy { allow_value: false, gas_max: 2_000_000, preflight: false },
        forwarder: None,
        decides: true,
        finality_blocks: 4,
        calls_per_second: None,
    };
    let node = Arc::new(Node { calls: AtomicUsize::new(0), state });
    let chain = Arc::new(Chain::over(node, &config).unwrap());
    AccountReader::new(chain, Clock::system(), 4).history(ACCOUNT, Timestamp(50_000)).await
}

const STEADY: State = State { head: 20, mined: Some(19), historical: true };

#[tokio::test]
async fn a_transaction_is_found_with_and_without_historical_state() {
    for state in [|_| STEADY, |_| State { historical: false, ..STEADY }] as [fn(usize) -> State; 2] {
        let history = history(state).await.unwrap();
        assert_eq!((history.count, history.count_final, history.count_pending), (1, 0, 1));
        assert_eq!(history.transactions.iter().map(|found| found.block).collect::<Vec<_>>(), [19]);
    }
}

/// The transaction must not vanish between the count, in which it is, and the blocks, in which it no longer is: neither
/// mined nor waiting, it would seem never to have been sent.
#[tokio::test]
async fn a_block_that_is_replaced_while_it_is_read_gives_no_history() {
    let mut refused = 0;
    for calls in 1..40 {
        // A function pointer captures nothing, so the call at which the block is replaced is in a thread's own cell.
        REPLACED_AT.set(calls);
        for state in [
            |call| State { mined: (call < REPLACED_AT.get()).then_some(19), ..STEADY },
            |call| State { mined: (call < REPLACED_AT.get()).then_some(19), historical: false, ..STEADY },
        ] as [fn(usize) -> State; 2]
        {
            match history(state).await {
                Ok(history) => {
                    let used = history.transactions.len() as u64;
                    assert_eq!(used, history.count, "replaced at call {calls}: a used nonce has no transaction");
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 0, "the block is replaced in between");
}

/// A node that is ahead of the one that named the head counts transactions of blocks that were not read.
#[tokio::test]
async fn a_count_of_another_head_gives_no_history() {
    for calls in 1..40 {
        REPLACED_AT.set(calls);
        let state = |call| {
            let ahead = call >= REPLACED_AT.get();
            State { head: if ahead { 21 } else { 20 }, mined: Some(21).filter(|_| ahead), historical: false }
        };
        if let Ok(history) = history(state).await {
            assert_eq!(history.transactions.len() as u64, history.count, "ahead from call {calls} on");
        }
    }
}

thread_local! {
    static REPLACED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
