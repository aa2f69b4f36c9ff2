//! The reconciler against relayers and a chain that a test makes up, over the embedded store.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use async_trait::async_trait;
use futures::future::BoxFuture;
use metrics_exporter_prometheus::PrometheusBuilder;
use pipeline::queue::memory::MemoryQueue;
use pipeline::sqlite::Database;
use pipeline::{CancellationToken, QueueOptions};
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use serde_json::{Value, json};
use uuid::Uuid;

use super::chain_check::{ChainCheck, ChainCheckResult, RelayerStatement};
use super::chain_owners::{ClaimOnChain, Shown};
use super::relayer_list::{RelayerListing, SignedRecord};
use super::sweeps::{Reconciler, ReconcilerSettings};
use super::unknown_outcomes::UnknownOutcomes;
use crate::clock::Clock;
use crate::config::{ChainConfig, GaslessPolicy, RelayMode, RoutingSettings, Secret, Timings};
use crate::http::transport::{HttpRequest, Response, Transport, TransportError};
use crate::randomness::Randomness;
use crate::relay::chain::Chain;
use crate::relay::chain::account::AccountReader;
use crate::relay::relayer::client::RelayerClient;
use crate::relay::relayer::pool::{Pool, PoolSettings};
use crate::relay::relayer::routing::ChainId;
use crate::relay::relayer::wire::read_record;
use crate::relay::request::call::DirectRequest;
use crate::relay::state::apply_report::{Report, Source, Verdict};
use crate::relay::state::transaction::{
    Claim, ConsumerId, RecordLost, RelayerTxId, RelayerUrl, Status, Step, Transaction, TransactionId, UnknownCause,
};
use crate::relay::store::TransactionStore;
use crate::relay::store::sqlite::SqliteStore;
use crate::relay::update::cache::Cache;
use crate::relay::update::guarded_store::{GuardedStore, Origin};
use crate::timestamp::Timestamp;

const TO: &str = "0x5fbdb2315678afecb367f032d93f642f64180aa3";
const K1: Address = Address::repeat_byte(0x11);
const K2: Address = Address::repeat_byte(0x22);
const HEAD: u64 = 10_000;
/// Seconds between two blocks.
const BLOCK_TIME: i64 = 2;
const FINALITY: u64 = 4;
/// The newest transactions are this many blocks back: they are final.
const DEPTH: u64 = 10;

/// A relayer: its account, the nonce that it signs next, and its records, newest first.
#[derive(Default)]
struct FakeRelayer {
    address: Address,
    nonce: u64,
    records: Vec<Value>,
    /// A record that it knows and does not list.
    unlisted: Option<Value>,
    /// The id of its chain, if it tells.
    chain_id: Option<u64>,
}

/// A transaction on the chain.
#[derive(Clone)]
struct Mined {
    from: Address,
    nonce: u64,
    block: u64,
    value: u64,
}

impl Mined {
    fn hash(&self) -> B256 {
        B256::from(U256::from(self.nonce + 1) + U256::from(self.from.0[0]) * U256::from(1_000_000))
    }

    fn shown(&self) -> Value {
        json!({
            "hash": self.hash(), "nonce": format!("{:#x}", self.nonce), "blockNumber": format!("{:#x}", self.block),
            "from": self.from, "to": TO, "value": format!("{:#x}", self.value), "input": "0x",
        })
    }
}

struct FakeChain {
    head: u64,
    mined: Vec<Mined>,
    /// Transactions that wait in the pool.
    waiting: BTreeMap<Address, u64>,
}

type Meanwhile = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

/// What answers relayers' and the node's questions.
struct Outside {
    started: Timestamp,
    relayers: Mutex<BTreeMap<&'static str, FakeRelayer>>,
    chain: Mutex<FakeChain>,
    /// What happens once, before a question that contains this text is answered.
    meanwhile: Mutex<Option<(&'static str, Meanwhile)>>,
}

impl Outside {
    fn block_at(&self, block: u64) -> i64 {
        self.started.0 / 1000 - (HEAD as i64 - block as i64) * BLOCK_TIME
    }

    fn rpc(&self, method: &str, params: &Value) -> Value {
        let chain = self.chain.lock().unwrap();
        let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(chain.head);
        let by_hash = || chain.mined.iter().find(|mined| json!(mined.hash()) == params[0]);
        match method {
            "eth_chainId" => json!("0x1"),
            "eth_getBlockByNumber" => {
                let block = number(params[0].as_str().unwrap());
                let mined: Vec<Value> =
                    chain.mined.iter().filter(|mined| mined.block == block).map(Mined::shown).collect();
                let (name, at) = (format!("{block:#x}"), format!("{:#x}", self.block_at(block)));
                json!({ "number": name, "hash": B256::from(U256::from(block)), "timestamp": at, "transactions": mined })
            }
            "eth_getTransactionCount" => {
                let address: Address = params[0].as_str().unwrap().parse().unwrap();
                let named = params[1].as_str().unwrap();
                let block = number(named);
                let of_it = chain.mined.iter().filter(|mined| mined.from == address && mined.block <= block).count();
                let waiting = if named == "pending" { chain.waiting.get(&address).copied().unwrap_or(0) } else { 0 };
                json!(format!("{:#x}", of_it as u64 + waiting))
            }
            "eth_getTransactionByHash" => by_hash().map_or(Value::Null, Mined::shown),
            "eth_getTransactionReceipt" => by_hash()
                .map_or(Value::Null, |mined| json!({ "blockNumber": format!("{:#x}", mined.block), "status": "0x1" })),
            _ => panic!("{method} is not asked for"),
        }
    }

    fn relayer(&self, host: &str, path: &str) -> (u16, Value) {
        let relayers = self.relayers.lock().unwrap();
        let relayer = &relayers[host];
        let path = path.strip_prefix("/api/v1/relayers").unwrap();
        match path.strip_prefix("/r").unwrap_or(path).split('?').next().unwrap() {
            "" => (200, json!({ "data": [{ "id": "r", "address": relayer.address, "system_disabled": false }] })),
            "/rpc" => match relayer.chain_id {
                Some(id) => (200, json!({ "jsonrpc": "2.0", "id": 1, "result": format!("{id:#x}") })),
                None => (404, json!({ "error": "no such call" })),
            },
            "/status" => (200, json!({ "data": { "nonce": relayer.nonce } })),
            "/transactions" => {
                let total = relayer.records.len();
                let pagination = json!({ "current_page": 1, "per_page": 500, "total_items": total });
                (200, json!({ "data": relayer.records, "pagination": pagination }))
            }
            one => {
                let id = one.rsplit('/').next().unwrap();
                match relayer.records.iter().chain(&relayer.unlisted).find(|record| record["id"] == id) {
                    Some(record) => (200, json!({ "data": record })),
                    None => (404, json!({ "error": "no such transaction" })),
                }
            }
        }
    }
}

struct Wire(Arc<Outside>);

#[async_trait]
impl Transport for Wire {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        let body = request.body.map(|body| String::from_utf8(body.to_vec()).unwrap()).unwrap_or_default();
        let question = format!("{} {body}", request.url);
        let first = {
            let mut meanwhile = self.0.meanwhile.lock().unwrap();
            meanwhile.take_if(|(text, _)| question.contains(*text))
        };
        if let Some((_, happens)) = first {
            happens().await;
        }
        let url: reqwest::Url = request.url.parse().unwrap();
        let (status, answer) = match url.host_str().unwrap() {
            "node" => {
                let body: Value = serde_json::from_str(&body).unwrap();
                (200, json!({ "result": self.0.rpc(body["method"].as_str().unwrap(), &body["params"]) }))
            }
            host => self.0.relayer(host, url.path()),
        };
        let status = StatusCode::from_u16(status).unwrap();
        Ok(Response { status, headers: HeaderMap::new(), body: answer.to_string().into() })
    }
}

struct World {
    outside: Arc<Outside>,
    guarded: Arc<GuardedStore>,
    pool: Arc<Pool>,
    chain: Arc<ChainCheck>,
    unknown_outcomes: UnknownOutcomes,
    without_chain: UnknownOutcomes,
    reconciler: Arc<Reconciler>,
    _directory: tempfile::TempDir,
}

impl World {
    /// Two relayers, of which the account is `K1` and `K2`.
    /// With relayers that do not tell which chain they are on.
    async fn new() -> Self {
        let world = Self::unasked().await;
        for relayer in ["http://r1", "http://r2"] {
            world.pool.learn_chain_id(&RelayerUrl(relayer.to_owned()), ChainId::NotTold);
        }
        world
    }

    /// With relayers that were not asked yet which chain they are on.
    async fn unasked() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let database = Database::open(&directory.path().join("baton.db")).unwrap();
        let store: Arc<dyn TransactionStore> = Arc::new(SqliteStore::open(&database).await.unwrap());
        let (clock, timings) = (Clock::system(), Timings::DEFAULT);
        let relayer = |address| FakeRelayer { address, ..FakeRelayer::default() };
        let outside = Arc::new(Outside {
            started: clock.now(),
            relayers: Mutex::new(BTreeMap::from([("r1", relayer(K1)), ("r2", relayer(K2))])),
            chain: Mutex::new(FakeChain { head: HEAD, mined: Vec::new(), waiting: BTreeMap::new() }),
            meanwhile: Mutex::default(),
        });
        let guarded = Arc::new(GuardedStore {
            store: Arc::clone(&store),
            queue: Arc::new(MemoryQueue::new("relay", QueueOptions::default())),
            cache: Cache::default(),
            mode: RelayMode::FireAndForget,
            timings,
            clock: clock.clone(),
            random: Randomness::system(),
            chain_decides: true,
        });
        let routing = RoutingSettings {
            in_flight_max: Some(100),
            rate_per_second: None,
            balance_min: U256::ZERO,
            breaker_failures: 5,
            breaker_open: Duration::from_secs(5),
            breaker_open_max: Duration::from_secs(60),
            jam_after: Duration::from_secs(1_000),
            report_lifetime: Duration::from_secs(30),
        };
        let second = Duration::from_secs(1);
        let settings =
            PoolSettings { routing, health_interval: second, health_timeout: second, chain_id: None, has_chain: true };
        let wire = || Arc::new(Wire(Arc::clone(&outside)));
        let client = |host| RelayerClient::over(wire(), &format!("http://{host}").parse().unwrap());
        let pool = Pool::new(vec![client("r1"), client("r2")], settings, store, clock.clone());
        let config = ChainConfig {
            rpc_url: Secret::new("http://node"),
            rpc_timeout: second,
            chain_id: None,
            preflight: false,
            gasless: GaslessPolicy { allow_value: false, gas_max: 2_000_000, preflight: false },
            forwarder: None,
            decides: true,
            finality_blocks: FINALITY,
            calls_per_second: None,
        };
        let chain = Arc::new(Chain::over(wire(), &config, clock.clone()).unwrap());
        let reader = AccountReader::new(chain, clock, FINALITY);
        let chain = Arc::new(ChainCheck::new(Arc::new(reader), Arc::clone(&guarded), Arc::clone(&pool), second));
        let settings = ReconcilerSettings {
            interval: Duration::from_millis(20),
            dead_letters_every: second,
            dead_letters_reread_after: None,
            consumer_dead_after: second,
            clock_skew: Duration::from_secs(30),
            relayer_retention: Duration::from_secs(3_600),
            question_timeout: second,
        };
        let me = ConsumerId::generate();
        let reconciler = Reconciler::new(
            Arc::clone(&guarded),
            Arc::clone(&pool),
            me.clone(),
            settings.clone(),
            Some(Arc::clone(&chain)),
        );
        let unknown_outcomes =
            |chain| UnknownOutcomes::new(Arc::clone(&guarded), Arc::clone(&pool), me.clone(), settings.clone(), chain);
        let (unknown_outcomes, without_chain) = (unknown_outcomes(Some(Arc::clone(&chain))), unknown_outcomes(None));
        let reconciler = Arc::new(reconciler);
        Self { outside, guarded, pool, chain, unknown_outcomes, without_chain, reconciler, _directory: directory }
    }

    fn now(&self) -> Timestamp {
        self.guarded.clock.now()
    }

    fn ago(&self, seconds: u64) -> Timestamp {
        self.now() - Duration::from_secs(seconds)
    }

    fn relayer<T>(&self, host: &'static str, change: impl FnOnce(&mut FakeRelayer) -> T) -> T {
        change(self.outside.relayers.lock().unwrap().get_mut(host).unwrap())
    }

    fn mine(&self, from: Address, nonce: u64, value: u64) -> Mined {
        let mut chain = self.outside.chain.lock().unwrap();
        let mined = Mined { from, nonce, block: chain.head - DEPTH, value };
        chain.mined.push(mined.clone());
        mined
    }

    /// Time passes on the chain.
    fn advance(&self) {
        self.outside.chain.lock().unwrap().head += 2 * DEPTH;
    }

    /// The number of the account's transactions in the node's pool.
    fn waiting(&self, from: Address, count: u64) {
        self.outside.chain.lock().unwrap().waiting.insert(from, count);
    }

    fn meanwhile(&self, before: &'static str, happens: impl FnOnce() -> BoxFuture<'static, ()> + Send + 'static) {
        *self.outside.meanwhile.lock().unwrap() = Some((before, Box::new(happens)));
    }

    fn row(&self, value: u64, at: Timestamp) -> Transaction {
        let request = DirectRequest::parse(&json!({ "to": TO, "value": value.to_string(), "data": "0x" })).unwrap();
        Transaction::accepted(TransactionId::generate(), &request, String::new(), at, &self.guarded.timings)
    }

    fn claimed(&self, row: &Transaction, host: &str, at: Timestamp) -> Transaction {
        let url = RelayerUrl(format!("http://{host}"));
        let token = Uuid::new_v4();
        row.claim(&ConsumerId("c".into()), token, &url, "test", at, &self.guarded.timings).unwrap().transaction
    }

    /// A claim whose relayer answered with an error at that time.
    fn lost(&self, value: u64, host: &str, at: Timestamp) -> (Transaction, Claim) {
        let claimed = self.claimed(&self.row(value, at), host, at);
        let token = claimed.claim.as_ref().unwrap().token;
        let lost = claimed.mark_unknown(token, "500", UnknownCause::Answered, at, &self.guarded.timings).unwrap();
        let claim = lost.transaction.claim.clone().unwrap();
        (lost.transaction, claim)
    }

    /// A row that its relayer took at that time.
    fn bound(&self, value: u64, host: &str, id: &str, from: Address, at: Timestamp) -> Transaction {
        let claimed = self.claimed(&self.row(value, at), host, at);
        let token = claimed.claim.as_ref().unwrap().token;
        let (id, from) = (RelayerTxId(id.to_owned()), from.to_checksum(None));
        claimed.bind(token, &id, Some(&from), "test", at, &self.guarded.timings).unwrap().transaction
    }

    async fn insert(&self, rows: &[Transaction]) {
        self.guarded.store.insert(rows).await.unwrap();
    }

    async fn stored(&self, row: &Transaction) -> Transaction {
        self.guarded.store.get(row.id).await.unwrap().unwrap()
    }

    /// A list that proves itself and has these records.
    fn listing(&self, signed: Vec<SignedRecord>) -> RelayerListing {
        RelayerListing {
            records: Vec::new(),
            oldest: Some(self.ago(3_000)),
            unproven: None,
            kept_since: None,
            behind: Duration::from_secs(30),
            ahead: Duration::from_secs(30),
            signed,
            read_at: self.now(),
        }
    }

    /// What the chain says of a claim, in a word.
    async fn judged(&self, lost: &(Transaction, Claim), signed: Vec<SignedRecord>, next_nonce: u64) -> String {
        let listing = self.listing(signed);
        let shown = Shown { listing: &listing, next_nonce: Some(next_nonce) };
        match self.chain.claim(&lost.0, &lost.1, Some(shown)).await.unwrap() {
            ClaimOnChain::Executed(..) => "executed".to_owned(),
            ClaimOnChain::Clear => "clear".to_owned(),
            ClaimOnChain::Undecided(why) | ClaimOnChain::Open(why) => why,
        }
    }
}

impl World {
    /// Takes the claim over and looks at it; returns the row after that.
    async fn settled(&self, row: &Transaction) -> Transaction {
        self.unknown_outcomes.settle(vec![self.stored(row).await]).await.unwrap();
        self.stored(row).await
    }

    /// The same without a chain.
    async fn settled_without_chain(&self, row: &Transaction) -> Transaction {
        self.without_chain.settle(vec![self.stored(row).await]).await.unwrap();
        self.stored(row).await
    }

    /// A row of value 2 whose relayer has given no answer about its record `oz-silent` since it was bound, and that counts
    /// as forgotten since a moment ago.
    fn silent(&self, bound_at: Timestamp) -> Transaction {
        let (timings, at) = (&self.guarded.timings, self.ago(20));
        let row = self.bound(2, "r1", "oz-silent", K1, bound_at);
        let asked = row.unanswered(Duration::ZERO, at, bound_at, timings).unwrap().transaction;
        let silent = asked.unanswered(timings.operator_after, at, at, timings).unwrap().transaction;
        assert!(silent.is_only_silent() && silent.outcome_unknown());
        silent
    }

    /// A relayer's record from long before anything else here.
    fn old_record(&self) -> Value {
        self.record("old", 0, 99, self.ago(3_000))
    }

    fn record(&self, id: &str, nonce: u64, value: u64, created: Timestamp) -> Value {
        let created = time::OffsetDateTime::from_unix_timestamp(created.0 / 1000).unwrap();
        let created = created.format(&time::format_description::well_known::Rfc3339).unwrap();
        json!({
            "id": id, "status": "confirmed", "created_at": created, "nonce": nonce, "from": K1, "to": TO,
            "value": value.to_string(), "data": "0x",
        })
    }
}

fn is_absent_so_far(row: &Transaction) -> bool {
    let unknown = row.claim.as_ref().and_then(|claim| claim.unknown.as_ref());
    row.binding.is_none() && unknown.is_some_and(|unknown| unknown.absent_since.is_some())
}

fn report(record: &Value) -> Report {
    read_record(record).unwrap()
}

/// What the first key did is not in the history of the second.
#[tokio::test]
async fn a_changed_key_is_noticed_however_much_the_new_one_has_taken_since() {
    let world = World::new().await;
    let lost = world.lost(1, "r1", world.ago(600));
    assert_eq!(world.judged(&lost, vec![], 0).await, "clear", "nothing is known of another key");
    world.insert(&[world.bound(2, "r1", "before", K2, world.ago(700))]).await;
    let since: Vec<_> = (0..250).map(|n| world.bound(3, "r1", &format!("oz-{n}"), K1, world.ago(500))).collect();
    world.insert(&since).await;
    assert!(world.judged(&lost, vec![], 0).await.contains("key was changed"));
}

#[tokio::test]
async fn a_key_changed_after_the_first_submission_of_all_is_noticed_by_the_claim() {
    let world = World::new().await;
    let mut lost = world.lost(1, "r1", world.ago(600));
    lost.1.account = Some(K1);
    assert_eq!(world.judged(&lost, vec![], 0).await, "clear");
    lost.1.account = Some(K2);
    assert!(world.judged(&lost, vec![], 0).await.contains("key was changed"));
}

/// The relayer signed the lost call and an operator canceled or replaced its record there: the original may still win.
#[tokio::test]
async fn a_record_that_may_have_replaced_a_lost_submission_does_not_own_its_nonce() {
    let world = World::new().await;
    let lost = world.lost(1, "r1", world.ago(600));
    world.waiting(K1, 1);
    let record = |created: Timestamp| {
        vec![SignedRecord { tx_id: RelayerTxId("oz-1".into()), nonce: 0, created_at: Some(created) }]
    };
    let since = lost.1.at + Duration::from_secs(1);
    assert!(world.judged(&lost, record(since), 1).await.contains("nonce 0 of the relayer is signed and not mined"));
    assert_eq!(world.judged(&lost, record(world.ago(631)), 1).await, "clear", "stored before the claim");
    assert_eq!(world.judged(&lost, record(world.ago(500)), 1).await, "clear", "stored after the submission was over");
    world.insert(&[world.bound(2, "r1", "oz-1", K1, world.ago(600))]).await;
    assert_eq!(world.judged(&lost, record(since), 1).await, "clear", "another row's");
    // Another call has used the nonce for good.
    let world = World::new().await;
    world.mine(K1, 0, 9);
    assert_eq!(world.judged(&lost, record(since), 1).await, "clear", "used for good");
}

/// The relayer's job was still running when it said that it never signed it; its webhook comes while the chain is asked.
#[tokio::test]
async fn a_row_that_its_relayer_signs_while_the_chain_is_asked_is_neither_re_routed_nor_failed() {
    let own_reason = Some("Transaction in Pending state for over 2 minutes");
    for reason in [own_reason, Some("execution reverted"), None] {
        let world = World::new().await;
        let mut row = world.bound(1, "r1", "oz-1", K1, world.ago(900));
        if reason.is_none() {
            row = row.forgotten(RecordLost::NotKnown, world.now(), world.ago(800)).unwrap().transaction;
        }
        world.insert(std::slice::from_ref(&row)).await;
        let (guarded, id) = (Arc::clone(&world.guarded), row.id);
        // The last question before the row is moved.
        let last = if reason.is_some() { "\"pending\"" } else { "/status" };
        world.meanwhile(last, move || {
            Box::pin(async move {
                let hash = B256::repeat_byte(7);
                let signed = json!({ "id": "oz-1", "status": "submitted", "nonce": 5, "hash": hash });
                guarded.apply(id, &report(&signed), Origin::Webhook).await.unwrap();
            })
        });
        let failed = json!({ "id": "oz-1", "status": "failed", "status_reason": reason, "nonce": null });
        let failed = report(&failed);
        let word = if reason.is_some() { RelayerStatement::Says(&failed) } else { RelayerStatement::Forgotten };
        world.chain.settle(&row, word).await.unwrap();
        let stored = world.stored(&row).await;
        assert_eq!(stored.status, Status::Submitted, "{reason:?}");
        assert_eq!(stored.binding.and_then(|binding| binding.nonce), Some(5), "{reason:?}");
    }
}

/// As by a relayer whose URL is spelled in another way now: the nonces of the old one's rows are not found under the new one.
#[tokio::test]
async fn a_transaction_that_confirmed_a_row_at_another_url_is_no_equal_rows() {
    for confirmed_by_this_version in [true, false] {
        let world = World::new().await;
        let mined = world.mine(K1, 0, 1);
        let confirmed = json!({ "id": "oz-a", "status": "confirmed", "nonce": 0, "hash": mined.hash(), "from": K1 });
        let first = world.bound(1, "old", "oz-a", K1, world.ago(200));
        if confirmed_by_this_version {
            world.insert(std::slice::from_ref(&first)).await;
            world.chain.settle(&first, RelayerStatement::Says(&report(&confirmed))).await.unwrap();
        } else {
            let (mode, now) = (RelayMode::FireAndForget, world.now());
            let verdict = first.report(&report(&confirmed), Source::Asked, mode, now, &world.guarded.timings);
            let Verdict::Move(moved) = verdict else { panic!("{verdict:?}") };
            world.insert(&[moved.transaction]).await;
        }
        assert_eq!(world.stored(&first).await.status, Status::Confirmed);
        let (second, _) = world.lost(1, "r1", world.ago(100));
        world.insert(std::slice::from_ref(&second)).await;
        let records = vec![world.record("oz-a", 0, 1, world.ago(200)), world.old_record()];
        world.relayer("r1", |relayer| (relayer.nonce, relayer.records) = (1, records));
        let settled = world.settled(&second).await;
        assert_eq!((settled.status, &settled.binding), (Status::Pending, &None), "{confirmed_by_this_version}");
        assert_eq!(is_absent_so_far(&settled), confirmed_by_this_version);
    }
}

/// The relayer was away for long. Its silence about a record counted as forgetting that record.
#[tokio::test]
async fn a_row_of_which_its_relayer_was_only_silent_does_not_spoil_the_list_that_shows_it() {
    for (forgotten, with_chain) in [(false, true), (false, false), (true, true), (true, false)] {
        let world = World::new().await;
        let mut other = world.silent(world.ago(1500));
        if forgotten {
            other = other.forgotten(RecordLost::NotKnown, world.now(), world.ago(10)).unwrap().transaction;
        }
        let (lost, _) = world.lost(1, "r1", world.ago(100));
        world.insert(&[other, lost.clone()]).await;
        world.mine(K1, 0, 2);
        let records = vec![world.record("oz-silent", 0, 2, world.ago(1500)), world.old_record()];
        world.relayer("r1", |relayer| (relayer.nonce, relayer.records) = (1, records));
        let settled = if with_chain { world.settled(&lost).await } else { world.settled_without_chain(&lost).await };
        assert_eq!(is_absent_so_far(&settled), !forgotten, "{forgotten} {with_chain}");
    }
}

/// The relayer has lost what it took in the seconds before it fell silent, the lost submission among it. It has taken more
/// since than is compared.
#[tokio::test]
async fn a_silent_row_whose_record_the_relayer_has_lost_spoils_the_list() {
    for (listed, known) in [(false, false), (false, true), (true, true)] {
        let world = World::new().await;
        let (lost, _) = world.lost(1, "r1", world.ago(1000));
        let mut rows: Vec<_> = (0..250).map(|n| world.bound(3, "r1", &format!("oz-{n}"), K1, world.ago(100))).collect();
        let mut records: Vec<_> = (0..250).map(|n| world.record(&format!("oz-{n}"), n, 3, world.ago(100))).collect();
        rows.extend([lost.clone(), world.silent(world.ago(900))]);
        world.insert(&rows).await;
        if listed {
            records.push(world.record("oz-silent", 250, 2, world.ago(900)));
        }
        records.push(world.old_record());
        world.relayer("r1", |relayer| {
            relayer.records = records;
            relayer.unlisted = (known && !listed).then(|| world.record("oz-silent", 250, 2, world.ago(900)));
        });
        let settled = world.settled_without_chain(&lost).await;
        assert_eq!(is_absent_so_far(&settled), listed, "{listed} {known}");
    }
}

/// The relayer gave the twin's record up as unsigned and had signed it: the twin was sent to another relayer, and its record
/// was mined all the same.
#[tokio::test]
async fn a_claim_gets_what_was_made_by_a_record_that_an_equal_row_has_left() {
    for (twin_is, claimed, is_its_own) in [
        ("at another relayer", 400, true),
        ("waiting", 400, true),
        ("at another relayer", 100, false),
        ("failed there", 400, false),
    ] {
        let world = World::new().await;
        let mined = world.mine(K1, 0, 1);
        let mut twin = world.bound(1, "r1", "oz-twin", K1, world.ago(700));
        world.insert(std::slice::from_ref(&twin)).await;
        let (now, timings) = (world.now(), &world.guarded.timings);
        let left = |row: &Transaction| row.not_executed("the relayer failed it unsigned", now, timings);
        match twin_is {
            "failed there" => {
                let forgotten = |row: &Transaction| row.forgotten(RecordLost::NotKnown, now, now);
                world.guarded.update(twin.id, forgotten).await.unwrap();
                world.guarded.update(twin.id, |row| row.resolve_fail(now)).await.unwrap();
            }
            _ => drop(world.guarded.update(twin.id, left).await.unwrap()),
        }
        if twin_is == "at another relayer" {
            let token = Uuid::new_v4();
            let (consumer, url) = (ConsumerId("c".into()), RelayerUrl("http://r2".into()));
            let claim = |row: &Transaction| row.claim(&consumer, token, &url, "test", now, timings);
            world.guarded.update(twin.id, claim).await.unwrap();
            let tx_id = RelayerTxId("oz-elsewhere".into());
            let bind = |row: &Transaction| row.bind(token, &tx_id, None, "test", now, timings);
            world.guarded.update(twin.id, bind).await.unwrap();
        }
        twin = world.stored(&twin).await;
        let (lost, _) = world.lost(1, "r1", world.ago(claimed));
        world.insert(std::slice::from_ref(&lost)).await;
        let records = vec![world.record("oz-twin", 0, 1, world.ago(700)), world.old_record()];
        world.relayer("r1", |relayer| (relayer.nonce, relayer.records) = (1, records));
        let settled = world.settled(&lost).await;
        if is_its_own {
            assert_eq!(settled.status, Status::Confirmed, "{twin_is}");
            assert_eq!(settled.hash, Some(mined.hash().to_string()), "{twin_is}");
        } else {
            assert!(settled.outcome_unknown() && !is_absent_so_far(&settled), "{twin_is}: {settled:?}");
        }
        assert_eq!(world.stored(&twin).await, twin, "the twin goes on: {twin_is}");
    }
}

/// A timeline takes 2000 steps, and is what remembers that the alarm was raised.
#[tokio::test]
async fn an_unfounded_confirmation_is_raised_once_also_if_the_timeline_is_full_or_two_look_at_once() {
    for steps in [0, 3000] {
        let recorder = PrometheusBuilder::new().build_recorder();
        let raised = recorder.handle();
        let _recording = metrics::set_default_local_recorder(&recorder);
        let world = World::new().await;
        let row = world.bound(1, "r1", "oz-1", K1, world.ago(900));
        world.insert(std::slice::from_ref(&row)).await;
        let mut noted = row.noted(Step::new("progress", "one of many"), world.now());
        noted.steps = vec![noted.steps[0].clone(); steps];
        world.guarded.store.save(&noted).await.unwrap();
        let said = json!({ "id": "oz-1", "status": "confirmed", "nonce": 0, "hash": B256::repeat_byte(7), "from": K1 });
        let said = report(&said);
        let look = async || {
            let row = world.stored(&row).await;
            world.chain.settle(&row, RelayerStatement::Says(&said)).await.unwrap()
        };
        let (first, second) = tokio::join!(look(), look());
        for looked in [first, second, look().await] {
            assert!(matches!(looked, ChainCheckResult::Absent(_)), "{looked:?}");
        }
        let timeline = world.guarded.store.timeline(row.id).await.unwrap();
        assert_eq!(timeline.iter().filter(|entry| entry.action == "unfounded-confirmation").count(), 1, "{steps}");
        let shown = raised.render();
        assert!(shown.contains("baton_unfounded_confirmations_total 1\n"), "{steps}: {shown}");
    }
}

/// `RPC_URL` leads to another chain, on which the relayer's key has used the same nonces.
#[tokio::test]
async fn another_chain_than_the_relayers_proves_nothing() {
    for (relayers_chain, is_elsewhere) in [(None, false), (Some(1), false), (Some(5), true)] {
        let world = World::unasked().await;
        world.relayer("r1", |relayer| (relayer.nonce, relayer.chain_id) = (1, relayers_chain));
        let watching = CancellationToken::new();
        let watch = tokio::spawn({
            let (pool, watching) = (Arc::clone(&world.pool), watching.clone());
            async move { pool.watch(None, watching).await }
        });
        let url = RelayerUrl("http://r1".into());
        let told = async {
            while world.pool.chain_id_of(&url) == Some(ChainId::Unasked) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), told).await.expect("the relayer tells its chain's id");
        watching.cancel();
        watch.await.unwrap();
        world.mine(K1, 0, 9);
        let row = world.bound(1, "r1", "oz-1", K1, world.ago(900));
        world.insert(std::slice::from_ref(&row)).await;
        let said =
            report(&json!({ "id": "oz-1", "status": "failed", "status_reason": "lost", "nonce": 0, "from": K1 }));
        world.chain.settle(&row, RelayerStatement::Says(&said)).await.unwrap();
        let stored = world.stored(&row).await;
        assert_eq!(
            (stored.binding.is_some(), stored.outcome_unknown()),
            (is_elsewhere, is_elsewhere),
            "{relayers_chain:?}"
        );
        let lost = world.lost(1, "r1", world.ago(600));
        let judged = world.judged(&lost, vec![], 1).await;
        assert_eq!(judged.contains("the relayer is on the chain with id 5"), is_elsewhere, "{judged}");
    }
}

/// As after each start, and while the relayer does not answer the question: it may be on another chain.
#[tokio::test]
async fn nothing_is_given_up_before_the_relayer_has_told_its_chain() {
    let world = World::unasked().await;
    world.mine(K1, 0, 9);
    let row = world.bound(1, "r1", "oz-1", K1, world.ago(900));
    world.insert(std::slice::from_ref(&row)).await;
    let said = report(&json!({ "id": "oz-1", "status": "failed", "status_reason": "lost", "nonce": 0, "from": K1 }));
    world.relayer("r1", |relayer| relayer.nonce = 1);
    let lost = world.lost(1, "r1", world.ago(600));
    for (told, gives_up) in [(ChainId::Unasked, false), (ChainId::NotTold, true)] {
        world.pool.learn_chain_id(&RelayerUrl("http://r1".into()), told);
        let judged = world.judged(&lost, vec![], 1).await;
        assert_eq!(judged.contains("has not told yet"), !gives_up, "{judged}");
        let settled = world.chain.settle(&world.stored(&row).await, RelayerStatement::Says(&said)).await.unwrap();
        assert_eq!(world.stored(&row).await.binding.is_none(), gives_up, "{settled:?}");
    }
}

/// The relayer has sent the call again, and says that this one is confirmed too, before the chain has shown the first.
#[tokio::test]
async fn a_second_confirmation_while_the_chain_is_asked_raises_the_alarm_once() {
    let world = World::new().await;
    let row = world.bound(1, "r1", "oz-1", K1, world.ago(900));
    world.insert(std::slice::from_ref(&row)).await;
    for (nonce, hash) in [(5, 1), (6, 2), (6, 2)] {
        let hash = B256::repeat_byte(hash);
        let said = json!({ "id": "oz-1", "status": "confirmed", "nonce": nonce, "hash": hash, "from": K1 });
        world.guarded.apply(row.id, &report(&said), Origin::Webhook).await.unwrap();
    }
    let timeline = world.guarded.store.timeline(row.id).await.unwrap();
    let alarms: Vec<_> = timeline.iter().filter(|entry| entry.action == "double-send").collect();
    assert_eq!(alarms.len(), 1, "{timeline:?}");
    assert!(alarms[0].detail.contains(&B256::repeat_byte(2).to_string()), "{alarms:?}");
}

/// Two URLs lead to relayers with one key, each of which says that it has sent the call with this nonce.
#[tokio::test]
async fn one_transaction_confirms_one_of_two_equal_rows_at_relayers_with_the_same_key() {
    let world = World::new().await;
    let mined = world.mine(K1, 0, 1);
    let rows = ["r1", "r2"].map(|host| world.bound(1, host, &format!("oz-{host}"), K1, world.ago(200)));
    world.insert(&rows).await;
    for (row, host) in rows.iter().zip(["r1", "r2"]) {
        let said = json!({
            "id": format!("oz-{host}"), "status": "confirmed", "nonce": 0, "hash": mined.hash(), "from": K1,
        });
        world.guarded.apply(row.id, &report(&said), Origin::Reconciler).await.unwrap();
        world.chain.settle(&world.stored(row).await, RelayerStatement::Says(&report(&said))).await.unwrap();
    }
    assert_eq!(world.stored(&rows[0]).await.status, Status::Confirmed);
    assert_eq!(world.stored(&rows[1]).await.status, Status::Submitted);
}

#[tokio::test]
async fn what_a_busy_relayer_signs_while_its_list_is_read_needs_no_owner() {
    let world = World::new().await;
    world.mine(K1, 0, 99);
    let old = world.old_record();
    world.relayer("r1", |relayer| (relayer.nonce, relayer.records) = (1, vec![old]));
    let (row, _) = world.lost(1, "r1", world.ago(100));
    world.insert(std::slice::from_ref(&row)).await;
    // Their webhooks have not come yet: only the list tells which nonces they have.
    let others: Vec<_> = (1..4).map(|nonce| world.bound(99, "r1", &format!("new-{nonce}"), K1, world.ago(1))).collect();
    let (outside, guarded) = (Arc::clone(&world.outside), Arc::clone(&world.guarded));
    let new: Vec<Value> =
        (1..4).map(|nonce| world.record(&format!("new-{nonce}"), nonce, 99, world.now())).rev().collect();
    // After the list, and before the relayer says which nonce comes next.
    world.meanwhile("/status", move || {
        Box::pin(async move {
            guarded.store.insert(&others).await.unwrap();
            let mut relayers = outside.relayers.lock().unwrap();
            let relayer = relayers.get_mut("r1").unwrap();
            relayer.nonce = 4;
            relayer.records.splice(0..0, new);
            outside.chain.lock().unwrap().waiting.insert(K1, 3);
        })
    });
    assert!(is_absent_so_far(&world.settled(&row).await));
}

/// A gap filler has no owner, and new ones come all the time.
#[tokio::test]
async fn a_row_at_a_busy_relayer_waits_only_for_the_nonces_that_its_own_submission_can_have() {
    let failed = json!({
        "id": "oz-1", "status": "failed", "status_reason": "in Pending state for over 2 minutes", "nonce": null,
    });
    let failed = report(&failed);
    for word in [RelayerStatement::Forgotten, RelayerStatement::Says(&failed)] {
        let world = World::new().await;
        for nonce in 0..9 {
            world.mine(K1, nonce, 99);
        }
        world.waiting(K1, 1);
        world.relayer("r1", |relayer| relayer.nonce = 10);
        let row = world.bound(1, "r1", "oz-1", K1, world.ago(900));
        let row = row.forgotten(RecordLost::NotKnown, world.now(), world.ago(800)).unwrap().transaction;
        world.insert(std::slice::from_ref(&row)).await;
        world.chain.settle(&row, word).await.unwrap();
        assert!(world.stored(&row).await.binding.is_some(), "its own may be among them: {word:?}");
        world.advance();
        world.mine(K1, 9, 99);
        world.waiting(K1, 2);
        world.relayer("r1", |relayer| relayer.nonce = 12);
        world.chain.settle(&world.stored(&row).await, word).await.unwrap();
        assert_eq!(world.stored(&row).await.binding, None, "{word:?}");
    }
}

#[tokio::test]
async fn a_relayer_whose_list_does_not_come_does_not_delay_claims_at_another() {
    let world = World::new().await;
    let old = world.old_record();
    for host in ["r1", "r2"] {
        world.relayer(host, |relayer| (relayer.nonce, relayer.records) = (0, vec![old.clone()]));
    }
    world.meanwhile("r1/api/v1/relayers/r/transactions?", || Box::pin(std::future::pending()));
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(Arc::clone(&world.reconciler).run(shutdown.clone()));
    let (slow, _) = world.lost(1, "r1", world.ago(100));
    world.insert(&[slow]).await;
    let within = Duration::from_secs(10);
    let asked = async {
        while world.outside.meanwhile.lock().unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(within, asked).await.expect("the first relayer's list is asked for");
    let (other, _) = world.lost(2, "r2", world.ago(100));
    world.insert(std::slice::from_ref(&other)).await;
    let looked_at = async {
        while !is_absent_so_far(&world.stored(&other).await) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(within, looked_at).await.expect("the second relayer's claim is looked at");
    shutdown.cancel();
    running.await.unwrap();
}
