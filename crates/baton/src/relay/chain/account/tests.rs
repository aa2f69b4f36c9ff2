mod limits;
mod sharing;

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use futures::future::BoxFuture;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use tokio::sync::watch;

use super::*;
use crate::clock::TimeSource;
use crate::config::{ChainConfig, Secret};
use crate::http::transport::{HttpRequest, Response, Transport, TransportError, TransportFailure};

const ACCOUNT: Address = Address::repeat_byte(0xaa);
/// Seconds between two blocks.
const BLOCK_TIME: u64 = 10;
/// Blocks on top of one that make it final.
const FINALITY: u64 = 4;

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
        if method == "eth_chainId" {
            return json!({ "result": "0x1" });
        }
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
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let body: Value = serde_json::from_slice(&request.body.unwrap()).unwrap();
        let answer = (self.state)(call).answer(body["method"].as_str().unwrap(), &body["params"]);
        Ok(Response { status: StatusCode::OK, headers: HeaderMap::new(), body: answer.to_string().into() })
    }
}

async fn history(state: fn(usize) -> State) -> Result<AccountHistory, ChainError> {
    let node = Node { calls: AtomicUsize::new(0), state };
    reader("http://node", node).history(ACCOUNT, Timestamp(50_000)).await
}

fn reader(urls: &str, node: impl Transport + 'static) -> AccountReader {
    reader_at(Clock::system(), urls, node)
}

fn reader_at(clock: Clock, urls: &str, node: impl Transport + 'static) -> AccountReader {
    reader_of(clock, urls, None, node)
}

fn reader_of(clock: Clock, urls: &str, chain_id: Option<u64>, node: impl Transport + 'static) -> AccountReader {
    let config = ChainConfig {
        rpc_url: Secret::new(urls),
        rpc_timeout: Duration::from_secs(1),
        chain_id,
        preflight: false,
        gasless: crate::config::GaslessPolicy { allow_value: false, gas_max: 2_000_000, preflight: false },
        forwarder: None,
        decides: true,
        finality_blocks: 4,
        calls_per_second: None,
    };
    let chain = Arc::new(Chain::over(Arc::new(node), &config, clock.clone()).unwrap());
    AccountReader::new(chain, clock, FINALITY)
}

/// A clock that passes only when a test says so.
#[derive(Clone)]
struct HandClock {
    started: Instant,
    passed: watch::Sender<Duration>,
}

impl HandClock {
    fn new() -> Self {
        Self { started: Instant::now(), passed: watch::Sender::new(Duration::ZERO) }
    }

    fn elapsed_since(&self, earlier: Instant) -> Duration {
        self.instant() - earlier
    }

    fn pass(&self, span: Duration) {
        self.passed.send_modify(|passed| *passed += span);
    }
}

impl TimeSource for HandClock {
    fn now(&self) -> Timestamp {
        Timestamp(0) + *self.passed.borrow()
    }

    fn instant(&self) -> Instant {
        self.started + *self.passed.borrow()
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        let mut passed = self.passed.subscribe();
        let until = *passed.borrow() + span;
        Box::pin(tokio::task::unconstrained(async move {
            let _ = passed.wait_for(|passed| *passed >= until).await;
        }))
    }
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

#[tokio::test]
async fn the_probe_tells_what_a_node_lacks() {
    fn refused(code: i64) -> Value {
        json!({ "error": { "code": code, "message": "not here" } })
    }
    type Lacks = fn(&str, &Value) -> Option<Value>;
    let verdict = async |lacks: Lacks| {
        let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
            Ok((200, lacks(method, params).unwrap_or_else(|| STEADY.answer(method, params))))
        });
        reader("http://node", nodes).probe().await.ok()
    };
    assert_eq!(verdict(|_, _| None).await, Some(true));
    let no_history: Lacks = |method, params| {
        let old = method == "eth_getTransactionCount" && params[1].as_str().unwrap().starts_with("0x");
        old.then(|| refused(-32_000))
    };
    assert_eq!(verdict(no_history).await, Some(false), "its blocks are read one by one");
    let without: [(&str, Lacks); 4] = [
        ("no transaction counts", |method, _| (method == "eth_getTransactionCount").then(|| refused(-32_601))),
        ("no count of the pool", |method, params| {
            (method == "eth_getTransactionCount" && params[1] == "pending").then(|| refused(-32_602))
        }),
        ("no blocks", |method, _| (method == "eth_getBlockByNumber").then(|| refused(-32_601))),
        ("no transactions in blocks", |method, params| {
            let mut block = STEADY.answer(method, params);
            block["result"]["transactions"] = json!([B256::with_last_byte(1)]);
            (method == "eth_getBlockByNumber").then_some(block)
        }),
    ];
    for (name, lacks) in without {
        assert_eq!(verdict(lacks).await, None, "{name}");
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

/// Nodes whose answer depends on the URL and the question. Each question is counted.
struct Nodes<F> {
    answer: F,
    asked: Arc<Mutex<Vec<String>>>,
}

type Answered = Result<(u16, Value), TransportFailure>;

impl<F: Fn(&str, &str, &Value) -> Answered> Nodes<F> {
    fn of(answer: F) -> Self {
        Self { answer, asked: Arc::default() }
    }
}

#[async_trait]
impl<F: Fn(&str, &str, &Value) -> Answered + Send + Sync + 'static> Transport for Nodes<F> {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        let body: Value = serde_json::from_slice(&request.body.unwrap()).unwrap();
        self.asked.lock().unwrap().push(body.to_string());
        match (self.answer)(&request.url, body["method"].as_str().unwrap(), &body["params"]) {
            Ok((status, answer)) => Ok(Response {
                status: StatusCode::from_u16(status).unwrap(),
                headers: HeaderMap::new(),
                body: answer.to_string().into(),
            }),
            Err(kind) => Err(TransportError { kind, cause: "made up".to_owned(), status: None }),
        }
    }
}

const SINCE: Timestamp = Timestamp(50_000);

#[tokio::test]
async fn an_endpoint_that_refuses_to_work_for_us_is_replaced_by_the_next() {
    for (status, code) in [(200, -32_005), (200, 429), (401, -32_600), (402, -32_000), (403, -32_000), (429, -32_000)] {
        let refusal = json!({ "error": { "code": code, "message": "not for you" } });
        let nodes = Nodes::of(move |url: &str, method: &str, params: &Value| {
            Ok(if url.contains("first") { (status, refusal.clone()) } else { (200, STEADY.answer(method, params)) })
        });
        let history = reader("http://first,http://second", nodes).history(ACCOUNT, SINCE).await;
        assert_eq!(history.map(|history| history.count).ok(), Some(1), "{status} {code}");
    }
}

/// The endpoint that answered last has stopped following the chain, or is not ready.
#[tokio::test]
async fn an_endpoint_with_an_old_newest_block_is_left_for_one_with_a_newer() {
    let stuck = State { head: 18, mined: None, historical: true };
    for first_is_empty in [false, true] {
        let nodes = Nodes::of(move |url: &str, method: &str, params: &Value| match url.contains("first") {
            true if first_is_empty => Ok((200, json!({ "result": null }))),
            true => Ok((200, stuck.answer(method, params))),
            false => Ok((200, STEADY.answer(method, params))),
        });
        let reader = reader("http://first,http://second", nodes);
        let history = reader.history(ACCOUNT, SINCE).await.unwrap();
        assert_eq!((history.head, history.count), (20, 1));
        assert_eq!(reader.head().await.unwrap(), 20, "and stays there");
    }
}

/// The account has another history on another chain, in which its calls seem never to have been made.
#[tokio::test]
async fn an_endpoint_on_another_chain_is_never_used_although_it_is_the_only_one_that_answers() {
    let other = State { head: 1_000, mined: None, historical: true };
    for chain_id in [None, Some(1)] {
        // Whether the first endpoint follows the chain, has stopped, or is away.
        let first_is = Arc::new(AtomicUsize::new(0));
        let state = Arc::clone(&first_is);
        let nodes = Nodes::of(move |url: &str, method: &str, params: &Value| match url.contains("first") {
            true if state.load(Ordering::Relaxed) == 2 => Err(TransportFailure::NoConnection),
            true => Ok((200, STEADY.answer(method, params))),
            false if method == "eth_chainId" => Ok((200, json!({ "result": "0x2" }))),
            false => Ok((200, other.answer(method, params))),
        });
        let asked = Arc::clone(&nodes.asked);
        let clock = HandClock::new();
        clock.pass(Duration::from_secs(STEADY.head * BLOCK_TIME));
        let reader = reader_of(Clock::new(clock.clone()), "http://first,http://second", chain_id, nodes);
        assert_eq!(reader.history(ACCOUNT, SINCE).await.unwrap().count, 1);
        clock.pass(Duration::from_secs(3_600));
        let stuck = reader.history(ACCOUNT, SINCE).await.unwrap();
        assert_eq!((stuck.head, stuck.count), (STEADY.head, 1), "{chain_id:?}");
        first_is.store(2, Ordering::Relaxed);
        for _ in 0..3 {
            assert!(reader.history(ACCOUNT, SINCE).await.is_err(), "{chain_id:?}");
            clock.pass(PAUSE);
        }
        let ids = asked.lock().unwrap().iter().filter(|asked| asked.contains("eth_chainId")).count();
        assert!(ids >= 2, "each endpoint is asked");
    }
}

/// A node that is behind may answer for a block that it does not have with its newest state.
#[tokio::test]
async fn final_blocks_that_were_misread_are_read_again() {
    let misreads = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let behind = Arc::clone(&misreads);
    let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
        let mined = (!behind.load(Ordering::Relaxed)).then_some(15);
        Ok((200, State { head: 40, mined, historical: true }.answer(method, params)))
    });
    let reader = reader("http://node", nodes);
    assert_eq!(reader.history(ACCOUNT, SINCE).await.unwrap().count, 0);
    misreads.store(false, Ordering::Relaxed);
    for _ in 0..2 {
        if let Ok(history) = reader.history(ACCOUNT, SINCE).await {
            assert_eq!((history.count, history.transactions.len()), (1, 1), "a used nonce has no transaction");
        }
    }
    assert_eq!(reader.history(ACCOUNT, SINCE).await.unwrap().transactions.len(), 1);
}

/// The same within one reading, at any of its calls: a load balancer sends them to two nodes.
#[tokio::test]
async fn a_used_nonce_without_its_transaction_gives_no_history() {
    for (call, begins_behind) in (1..20).flat_map(|call| [(call, false), (call, true)]) {
        let calls = AtomicUsize::new(0);
        let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
            let behind = (calls.fetch_add(1, Ordering::Relaxed) < call) == begins_behind;
            Ok((200, State { head: 40, mined: (!behind).then_some(15), historical: true }.answer(method, params)))
        });
        if let Ok(history) = reader("http://node", nodes).history(ACCOUNT, SINCE).await {
            assert_eq!(history.transactions.len() as u64, history.count, "from call {call} on, {begins_behind}");
        }
    }
}

#[tokio::test]
async fn what_would_not_be_kept_is_not_read() {
    let many = KEPT_MAX as u64 + 1;
    let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
        let mut answer = State { mined: Some(15), head: 40, historical: true }.answer(method, params);
        match method {
            "eth_getTransactionCount" if answer["result"] == "0x1" => answer["result"] = json!(format!("{many:#x}")),
            "eth_getBlockByNumber" if params[0] == "0xf" && params[1] == true => {
                let with_nonce = |nonce: u64| {
                    let mut made = transaction(15);
                    made["nonce"] = json!(format!("{nonce:#x}"));
                    made
                };
                answer["result"]["transactions"] = (0..many).map(with_nonce).collect();
            }
            _ => {}
        }
        Ok((200, answer))
    });
    let asked = Arc::clone(&nodes.asked);
    let reader = reader("http://node", nodes);
    for _ in 0..3 {
        assert!(reader.history(ACCOUNT, SINCE).await.is_err());
    }
    let whole = asked.lock().unwrap().iter().filter(|asked| asked.contains("0xf\",true")).count();
    assert_eq!(whole, 0, "the counts tell");
}

/// One transaction in each block after this one.
const QUIET_UNTIL: u64 = 20;
const BUSY_HEAD: u64 = 400;

fn busy(method: &str, params: &Value) -> Value {
    let named = params[if method == "eth_getBlockByNumber" { 0 } else { 1 }].as_str().unwrap();
    let block = number(&json!(named)).unwrap_or(BUSY_HEAD);
    match method {
        "eth_getTransactionCount" => json!({ "result": format!("{:#x}", block.saturating_sub(QUIET_UNTIL)) }),
        "eth_getBlockByNumber" => {
            let made = |block| {
                let mut made = transaction(block);
                made["nonce"] = json!(format!("{:#x}", block - QUIET_UNTIL - 1));
                made
            };
            let transactions: Vec<Value> = (block > QUIET_UNTIL).then(|| made(block)).into_iter().collect();
            let (number, at) = (format!("{block:#x}"), format!("{:#x}", block * BLOCK_TIME));
            let hash = B256::from(U256::from(block));
            json!({ "result": { "number": number, "hash": hash, "timestamp": at, "transactions": transactions } })
        }
        _ => unreachable!("{method} is not asked for"),
    }
}

fn blocks_read(asked: &Mutex<Vec<String>>) -> usize {
    asked.lock().unwrap().iter().filter(|asked| asked.contains("\",true]")).count()
}

#[tokio::test]
async fn a_reading_that_fails_goes_on_where_it_ended() {
    // Back from what is known, and on from there.
    for known_since in [None, Some(380)] {
        let clock = HandClock::new();
        clock.pass(Duration::from_secs(BUSY_HEAD * BLOCK_TIME));
        let failing = Arc::new(AtomicUsize::new(0));
        let fails = Arc::clone(&failing);
        let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
            let at_half_way = method == "eth_getBlockByNumber" && params == &json!(["0xc8", true]);
            match at_half_way && fails.fetch_add(1, Ordering::Relaxed) == 0 {
                true => Err(TransportFailure::Lost),
                false => Ok((200, busy(method, params))),
            }
        });
        let asked = Arc::clone(&nodes.asked);
        let reader = reader_at(Clock::new(clock.clone()), "http://node", nodes);
        if let Some(block) = known_since {
            let since = Timestamp(0) + Duration::from_secs(block * BLOCK_TIME);
            reader.history(ACCOUNT, since).await.unwrap();
        }
        assert!(reader.history(ACCOUNT, SINCE).await.is_err());
        clock.pass(PAUSE);
        let history = reader.history(ACCOUNT, SINCE).await.unwrap();
        assert_eq!(history.transactions.len() as u64, BUSY_HEAD - QUIET_UNTIL);
        // Each block once, and again those of the part that failed and the newest ones.
        let most = (BUSY_HEAD - QUIET_UNTIL) as usize + 50;
        let read = blocks_read(&asked);
        assert!(read <= most, "{read} blocks are read, {most} are enough");
    }
}

#[tokio::test]
async fn a_reading_that_takes_long_is_divided() {
    for historical in [true, false] {
        let clock = HandClock::new();
        clock.pass(Duration::from_secs(BUSY_HEAD * BLOCK_TIME));
        let passes = clock.clone();
        let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
            passes.pass(Duration::from_millis(100));
            let old = method == "eth_getTransactionCount" && params[1].as_str().unwrap().starts_with("0x");
            if old && !historical {
                return Ok((200, json!({ "error": { "code": -32_000, "message": "missing trie node" } })));
            }
            Ok((200, busy(method, params)))
        });
        let reader = reader_at(Clock::new(clock.clone()), "http://node", nodes);
        let mut looks = 0;
        let found = loop {
            let started = clock.instant();
            let history = reader.history(ACCOUNT, SINCE).await;
            looks += 1;
            // The newest blocks, and a part that has begun.
            let took = clock.elapsed_since(started);
            assert!(took <= READ_MAX * 2, "{took:?}");
            match history {
                Ok(history) => break history.transactions.len() as u64,
                Err(error) => assert!(error.to_string().contains("still being read"), "{error}"),
            }
            assert!(looks < 50, "it comes to an end");
        };
        assert_eq!(found, BUSY_HEAD - QUIET_UNTIL);
        assert!(looks > 2, "{looks}");
    }
}

#[tokio::test]
async fn a_block_that_is_too_long_for_one_answer_is_read_by_its_transactions() {
    for historical in [true, false] {
        let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
            let state = State { historical, ..STEADY };
            match method {
                "eth_getBlockByNumber" if params[0] == "0x13" && params[1] == true => {
                    Err(TransportFailure::AnswerTooLong)
                }
                "eth_getBlockByNumber" if params[0] == "0x13" => {
                    let mut answer = state.answer(method, params);
                    answer["result"]["transactions"] = json!([B256::with_last_byte(1)]);
                    Ok((200, answer))
                }
                "eth_getTransactionByHash" => Ok((200, json!({ "result": transaction(19) }))),
                _ => Ok((200, state.answer(method, params))),
            }
        });
        let history = reader("http://node", nodes).history(ACCOUNT, SINCE).await.unwrap();
        assert_eq!(history.transactions.iter().map(|found| found.block).collect::<Vec<_>>(), [19]);
    }
}
