//! Relayers' words against the chain, on the embedded store: what verifies a failure, what becomes of an imported record, when
//! a confirmation is unfounded, and what becomes of the rows of a relayer that gives no answer. The node is simulated.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::State;
use axum::{Json, Router, routing};
use baton::clock::Clock;
use baton::config::{Config, RelayMode, Secret, Service};
use baton::randomness::Randomness;
use baton::relay::chain::Chain;
use baton::relay::chain::account::AccountReader;
use baton::relay::observe::block::Blocks;
use baton::relay::observe::status::{Found, StatusLookup};
use baton::relay::reconcile::chain_check::{ChainCheck, ChainCheckResult, RelayerStatement};
use baton::relay::reconcile::sweeps::{Reconciler, ReconcilerSettings, Sweep};
use baton::relay::relayer::client::RelayerClient;
use baton::relay::relayer::pool::{Pool, PoolSettings};
use baton::relay::relayer::routing::ChainId;
use baton::relay::relayer::wire;
use baton::relay::state::apply_report::{Report, Source, Verdict};
use baton::relay::state::transaction::{ConsumerId, RelayerTxId, RelayerUrl, Transaction, TransactionId};
use baton::relay::store::sqlite::SqliteStore;
use baton::relay::update::cache::Cache;
use baton::relay::update::guarded_store::GuardedStore;
use harness::relayer::{Outcome, Relayer, RelayerOptions};
use harness::wait::{eventually, eventually_ok};
use pipeline::QueueOptions;
use pipeline::queue::memory::MemoryQueue;
use pipeline::sqlite::Database;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::relay_fixture::{SOON, TO, answer};
use crate::store::fixture::{now, row};

/// The relayer's account.
const ACCOUNT: &str = "0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266";
/// The newest block.
const HEAD: u64 = 100;
/// Blocks on top of one that make it final.
const FINALITY: u64 = 12;
/// A relayer that is silent for this long needs an operator.
const OPERATOR_AFTER: Duration = Duration::from_millis(50);

/// A relayer gives an unsigned record up within this time.
const GIVEN_UP_AFTER: Duration = Duration::from_millis(50);

/// A node with one block a second. Dropping it stops it.
struct Node {
    url: String,
    mined: Arc<Mutex<Mined>>,
    server: JoinHandle<()>,
}

#[derive(Default)]
struct Mined {
    transactions: Vec<Value>,
    /// It answers nothing.
    is_away: bool,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Node {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mined = Arc::new(Mutex::new(Mined::default()));
        let started = now().0 / 1000;
        let app = Router::new().route("/", routing::post(reply)).with_state((Arc::clone(&mined), started));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, mined, server }
    }

    /// The account's next nonce makes this row's call, or a no-op, in this block; returns the hash.
    fn mine(&self, row: Option<&Transaction>, block: u64, succeeded: bool) -> String {
        let mut mined = self.mined.lock().unwrap();
        let nonce = mined.transactions.len();
        let hash = format!("0x{:064x}", nonce + 1);
        let (to, value, data) = match row {
            Some(row) => (row.call.to.to_string(), format!("{:#x}", row.call.value), row.call.data.clone()),
            None => (ACCOUNT.to_owned(), "0x0".to_owned(), "0x".to_owned()),
        };
        mined.transactions.push(json!({
            "hash": hash, "nonce": format!("{nonce:#x}"), "blockNumber": format!("{block:#x}"), "from": ACCOUNT,
            "to": to, "value": value, "input": data, "status": if succeeded { "0x1" } else { "0x0" },
        }));
        hash
    }

    fn set_away(&self, is_away: bool) {
        self.mined.lock().unwrap().is_away = is_away;
    }
}

async fn reply(
    State((mined, started)): State<(Arc<Mutex<Mined>>, i64)>,
    Json(body): Json<Value>,
) -> Result<Json<Value>, axum::http::StatusCode> {
    let mined = mined.lock().unwrap();
    if mined.is_away {
        return Err(axum::http::StatusCode::SERVICE_UNAVAILABLE);
    }
    let (method, params) = (body["method"].as_str().unwrap(), &body["params"]);
    let number = |text: &Value| u64::from_str_radix(text.as_str()?.strip_prefix("0x")?, 16).ok();
    let block_of = |transaction: &Value| number(&transaction["blockNumber"]).unwrap();
    let by_hash = || mined.transactions.iter().find(|known| known["hash"] == params[0]).cloned().unwrap_or(Value::Null);
    let result = match method {
        "eth_getTransactionByHash" | "eth_getTransactionReceipt" => by_hash(),
        "eth_getTransactionCount" => {
            let until = number(&params[1]).unwrap_or(HEAD);
            json!(format!("{:#x}", mined.transactions.iter().filter(|known| block_of(known) <= until).count()))
        }
        "eth_getBlockByNumber" => {
            let block = number(&params[0]).unwrap_or(HEAD);
            let at = started + block as i64 - HEAD as i64;
            let listed: Vec<_> = mined.transactions.iter().filter(|known| block_of(known) == block).collect();
            json!({
                "number": format!("{block:#x}"), "hash": format!("0x{block:064x}"), "timestamp": format!("{at:#x}"),
                "transactions": listed,
            })
        }
        _ => panic!("{method} is not asked for"),
    };
    Ok(Json(json!({ "jsonrpc": "2.0", "id": body["id"], "result": result })))
}

struct Fixture {
    node: Node,
    guarded: Arc<GuardedStore>,
    pool: Arc<Pool>,
    chain: Arc<Chain>,
    _directory: tempfile::TempDir,
}

impl Fixture {
    async fn over(clients: Vec<RelayerClient>) -> Self {
        let node = Node::start().await;
        let directory = tempfile::tempdir().unwrap();
        let database = Database::open(&directory.path().join("baton.db")).unwrap();
        let store = Arc::new(SqliteStore::open(&database).await.unwrap());
        let rpc_url = |name: &str| (name == "RPC_URL").then(|| node.url.clone());
        let mut config = Config::from_vars(Service::Command, rpc_url).unwrap().relay;
        config.timings.operator_after = OPERATOR_AFTER;
        config.timings.unproven_wait = GIVEN_UP_AFTER;
        let mut chain = config.chain.unwrap();
        chain.finality_blocks = FINALITY;
        let clock = Clock::of_file(database.clock());
        let chain = Arc::new(Chain::new(&chain, clock.clone()).unwrap());
        let guarded = Arc::new(GuardedStore {
            store: store.clone(),
            queue: Arc::new(MemoryQueue::new("relay-transactions", QueueOptions::default())),
            cache: Cache::default(),
            mode: RelayMode::FireAndForget,
            timings: config.timings,
            clock: clock.clone(),
            random: Randomness::system(),
            chain_decides: true,
        });
        let settings = PoolSettings {
            routing: config.routing.clone(),
            health_interval: config.health_interval,
            health_timeout: config.health_timeout,
            chain_id: None,
            has_chain: true,
        };
        let pool = Pool::new(clients, settings, store, clock);
        for client in pool.clients() {
            pool.learn_chain_id(client.url(), ChainId::NotTold);
        }
        Self { node, guarded, pool, chain, _directory: directory }
    }

    fn check(&self) -> Arc<ChainCheck> {
        let reader = AccountReader::new(Arc::clone(&self.chain), self.guarded.clock.clone(), FINALITY);
        Arc::new(ChainCheck::new(Arc::new(reader), Arc::clone(&self.guarded), Arc::clone(&self.pool), SOON))
    }

    fn reconciler(&self, with_chain: bool) -> Reconciler {
        let settings = ReconcilerSettings {
            interval: Duration::from_millis(20),
            dead_letters_every: Duration::from_millis(20),
            dead_letters_reread_after: None,
            consumer_dead_after: SOON,
            clock_skew: Duration::ZERO,
            relayer_retention: Duration::from_secs(3600),
            question_timeout: SOON,
        };
        let (guarded, pool, me) = (Arc::clone(&self.guarded), Arc::clone(&self.pool), ConsumerId::generate());
        Reconciler::new(guarded, pool, me, settings, with_chain.then(|| self.check()))
    }

    fn lookup(&self) -> StatusLookup {
        let blocks = Blocks::new(Arc::clone(&self.chain), Arc::clone(&self.guarded), SOON);
        StatusLookup::new(Arc::clone(&self.guarded), Arc::clone(&self.pool), Some(blocks), SOON)
    }

    /// A row that this relayer has had for this long.
    fn bound(&self, relayer: &RelayerUrl, tx_id: &str, ago: Duration) -> Transaction {
        let (then, timings, token) = (self.guarded.clock.now() - ago, &self.guarded.timings, Uuid::new_v4());
        let claim = row(then.0).claim(&ConsumerId::generate(), token, relayer, "test", then, timings).unwrap();
        let tx_id = RelayerTxId(tx_id.to_owned());
        claim.transaction.bind(token, &tx_id, Some(ACCOUNT), "it answered", then, timings).unwrap().transaction
    }

    async fn insert(&self, row: &Transaction) {
        self.guarded.store.insert(std::slice::from_ref(row)).await.unwrap();
    }

    async fn get(&self, id: TransactionId) -> Transaction {
        self.guarded.store.get(id).await.unwrap().unwrap()
    }

    /// Looks at the row, whenever its next look is due, until this holds.
    async fn sweep_until(
        &self,
        reconciler: &Reconciler,
        id: TransactionId,
        what: &str,
        holds: fn(&Transaction) -> bool,
    ) {
        eventually_ok(SOON, what.to_owned(), || async {
            self.sweep(reconciler, id).await;
            let row = self.get(id).await;
            if holds(&row) { Ok(()) } else { Err(format!("{row:?}")) }
        })
        .await;
    }

    async fn sweep(&self, reconciler: &Reconciler, id: TransactionId) {
        let due = |row: &Transaction| row.check_later(self.guarded.clock.now(), self.guarded.clock.now());
        self.guarded.update(id, due).await.unwrap();
        reconciler.sweep(Sweep::Submitted).await.unwrap();
    }

    async fn steps(&self, id: TransactionId, action: &str) -> usize {
        let timeline = self.guarded.store.timeline(id).await.unwrap();
        timeline.iter().filter(|entry| entry.action == action).count()
    }

    /// Status, `unverified` and block as a client reads them.
    async fn shown(&self, id: TransactionId) -> (String, bool, Option<u64>) {
        let Found::Known(shown) = self.lookup().find(id).await.unwrap() else { panic!("{id} is not known") };
        let status = shown["status"].as_str().unwrap().to_owned();
        (status, shown["unverified"].as_bool().unwrap(), shown["block_number"].as_u64())
    }
}

const SOME_TIME: Duration = Duration::from_secs(90);

fn relayer_url() -> RelayerUrl {
    RelayerUrl("http://relayer".to_owned())
}

/// What a relayer says of a record that it has signed.
fn signed(tx_id: &str, status: &str, hash: &str) -> Report {
    let record = json!({ "id": tx_id, "status": status, "hash": hash, "nonce": 7, "status_reason": "nonce consumed" });
    wire::read_record(&record).unwrap()
}

/// A row that its relayer has called failed without a chain to ask; `executed` says what the chain has under its hash.
async fn failed(fixture: &Fixture, tx_id: &str, executed: impl FnOnce(&Transaction) -> String) -> TransactionId {
    let bound = fixture.bound(&relayer_url(), tx_id, SOME_TIME);
    let (report, timings) = (signed(tx_id, "failed", &executed(&bound)), &fixture.guarded.timings);
    let verdict = bound.report(&report, Source::Asked, RelayMode::FireAndForget, fixture.guarded.clock.now(), timings);
    let Verdict::Move(moved) = verdict else { panic!("{verdict:?}") };
    fixture.insert(&moved.transaction).await;
    bound.id
}

/// The block of any receipt counted as a proof.
#[tokio::test]
async fn a_failure_is_verified_only_by_a_final_revert_of_its_own_call() {
    let fixture = Fixture::over(Vec::new()).await;
    let node = &fixture.node;
    let failed = |tx_id: &'static str, row: bool, block, succeeded| {
        failed(&fixture, tx_id, move |own| node.mine(row.then_some(own), block, succeeded))
    };
    let unverified = ("failed".to_owned(), true, None);
    let executed = failed("executed", true, 50, true).await;
    for _ in 0..2 {
        assert_eq!(fixture.shown(executed).await, unverified);
    }
    assert_eq!(fixture.steps(executed, "failed-but-executed").await, 1, "the alarm is raised once");
    let reverted = failed("reverted", true, 50, false).await;
    assert_eq!(fixture.shown(reverted).await, ("failed".to_owned(), false, Some(50)));
    for (id, why) in [
        (failed("replaced", false, 50, true).await, "the hash is that of a no-op"),
        (failed("reverted just now", true, HEAD - 3, false).await, "the block may be replaced"),
        (failed("executed just now", true, HEAD - 3, true).await, "the block may be replaced"),
        (failed("unknown", true, 50, true).await, "the chain has no such hash"),
    ] {
        if why.contains("no such hash") {
            node.mined.lock().unwrap().transactions.pop();
        }
        assert_eq!(fixture.shown(id).await, unverified, "{why}");
        assert_eq!(fixture.steps(id, "failed-but-executed").await, 0, "{why}");
    }
}

/// A relayer that ends what it accepts like this, and its client.
async fn relayer_with(outcome: Outcome) -> (Relayer, RelayerClient) {
    let options = RelayerOptions { address: Some(ACCOUNT.to_owned()), ..RelayerOptions::new("relayer-1") };
    let relayer = Relayer::start(options).await;
    relayer.change_faults(|faults| faults.outcome = outcome);
    let client = RelayerClient::new(&relayer.url().parse().unwrap(), &Secret::new(relayer.api_key()), SOON).unwrap();
    (relayer, client)
}

/// Stores the call of [`row`] at the relayer; returns its id there.
async fn post(relayer: &Relayer) -> String {
    let call = row(0).call;
    let body =
        json!({ "to": TO, "value": call.value.to_string(), "data": call.data, "gas_limit": 60000, "speed": "fast" });
    let submit = harness::http_client().post(format!("{}/api/v1/relayers/relayer-1/transactions", relayer.url()));
    let (status, record) = answer(submit.bearer_auth(relayer.api_key()).json(&body)).await;
    record["data"]["id"].as_str().unwrap_or_else(|| panic!("{status}: {record}")).to_owned()
}

#[tokio::test]
async fn an_imported_record_becomes_final_only_by_the_chain() {
    for (executed, end) in [(true, ("confirmed", Some(80))), (false, ("failed", Some(80)))] {
        let (relayer, client) = relayer_with(Outcome::FailedButExecuted).await;
        let fixture = Fixture::over(vec![client]).await;
        let id = post(&relayer).await;
        eventually_ok(SOON, "the relayer to call it failed", || async {
            let record = relayer.record(&id).unwrap().to_json();
            if record["status"] == "failed" { Ok(()) } else { Err(record) }
        })
        .await;
        let id = TransactionId(id.parse().unwrap());
        assert_eq!(fixture.shown(id).await, ("submitted".to_owned(), false, None));
        let imported = fixture.get(id).await;
        assert_eq!(imported.binding.as_ref().unwrap().nonce, Some(0), "its word is kept");
        fixture.node.mine(executed.then_some(&imported), 80, true);
        let reconciler = fixture.reconciler(true);
        fixture.sweep_until(&reconciler, id, "its end", |row| row.status.is_final()).await;
        assert_eq!(fixture.shown(id).await, (end.0.to_owned(), false, end.1));
    }
}

#[tokio::test]
async fn a_confirmation_is_unfounded_only_if_the_chain_answered_and_lacks_the_call() {
    let fixture = Fixture::over(Vec::new()).await;
    let bound = fixture.bound(&relayer_url(), "oz-1", SOME_TIME * 2);
    let hash = format!("0x{}", "ab".repeat(32));
    let said = signed("oz-1", "confirmed", &hash);
    let waits = bound.ask_chain(&said, fixture.guarded.clock.now() - SOME_TIME).unwrap().transaction;
    fixture.insert(&waits).await;
    let check = fixture.check();
    let look = async || {
        let row = fixture.get(bound.id).await;
        check.settle(&row, RelayerStatement::Says(&said)).await.unwrap()
    };
    let alarms = async || fixture.steps(bound.id, "unfounded-confirmation").await;
    fixture.node.set_away(true);
    assert!(matches!(look().await, ChainCheckResult::Open(_)));
    assert_eq!((alarms().await, fixture.get(bound.id).await.outcome_unknown()), (0, true), "no answer");
    fixture.node.set_away(false);
    // The node is left alone for a while after a failure.
    eventually_ok(SOON, "the chain's answer", || async {
        match look().await {
            ChainCheckResult::Absent(_) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    look().await;
    assert_eq!(alarms().await, 1, "once, also if the outcome was unknown before");

    let there = fixture.bound(&relayer_url(), "oz-2", SOME_TIME * 2);
    fixture.node.mine(Some(&there), HEAD - 3, true);
    let said = signed("oz-2", "confirmed", &hash);
    let waits = there.ask_chain(&said, fixture.guarded.clock.now() - SOME_TIME).unwrap().transaction;
    fixture.guarded.update(bound.id, |row| row.resolve_fail(now())).await.unwrap();
    fixture.insert(&waits).await;
    let looked = fixture.check().settle(&waits, RelayerStatement::Says(&said)).await.unwrap();
    assert!(matches!(&looked, ChainCheckResult::Open(why) if why.contains("not final")), "{looked:?}");
    assert_eq!(fixture.steps(there.id, "unfounded-confirmation").await, 0, "the chain has it");
}

/// It waited for ever, was not counted, and no operator could resolve it.
#[tokio::test]
async fn a_row_whose_relayer_gives_no_answer_is_counted_until_it_answers() {
    let (relayer, client) = relayer_with(Outcome::Stuck).await;
    let url = client.url().clone();
    let fixture = Fixture::over(vec![client]).await;
    let bound = fixture.bound(&url, &post(&relayer).await, SOME_TIME);
    fixture.insert(&bound).await;
    let (reconciler, store) = (fixture.reconciler(false), &fixture.guarded.store);
    relayer.change_faults(|faults| faults.transaction_reads.status = Some(401));
    fixture.sweep(&reconciler, bound.id).await;
    assert!(!fixture.get(bound.id).await.outcome_unknown(), "one answer is missing");
    fixture.sweep_until(&reconciler, bound.id, "an unknown outcome", Transaction::outcome_unknown).await;
    let row = fixture.get(bound.id).await;
    assert_eq!((store.counts().await.unwrap().forgotten, fixture.steps(row.id, "outcome-unknown").await), (1, 1));
    assert!(row.resolve_fail(now()).is_ok() && row.resolve_resend(now(), &fixture.guarded.timings).is_ok());
    relayer.change_faults(|faults| faults.transaction_reads.status = None);
    fixture.sweep(&reconciler, bound.id).await;
    let row = fixture.get(bound.id).await;
    assert_eq!((row.outcome_unknown(), store.counts().await.unwrap().forgotten), (false, 0), "{row:?}");
}

/// Every webhook was lost, so the chain was never asked.
#[tokio::test]
async fn the_chain_is_asked_about_a_row_without_a_signature_if_its_relayer_gives_no_answer() {
    let (relayer, client) = relayer_with(Outcome::Stuck).await;
    let url = client.url().clone();
    let fixture = Fixture::over(vec![client]).await;
    relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
    // The second row's relayer is no longer configured.
    for (relayer, tx_id) in [(&url, "oz-1"), (&relayer_url(), "oz-2")] {
        let bound = fixture.bound(relayer, tx_id, SOME_TIME);
        fixture.insert(&bound).await;
        let hash = fixture.node.mine(Some(&bound), 80, true);
        let reconciler = fixture.reconciler(true);
        fixture.sweep_until(&reconciler, bound.id, "its confirmation", |row| row.status.is_final()).await;
        let row = fixture.get(bound.id).await;
        assert_eq!((row.status.name(), row.hash), ("confirmed", Some(hash)));
    }
}

/// After one that did not answer, the others of its relayer are not asked about in that sweep. As many again are looked up on
/// the chain; the rest waits, so that rows of other relayers do not.
#[tokio::test]
async fn rows_that_are_skipped_after_a_silent_one_are_held_against_the_chain_too() {
    const ROWS: usize = 40;
    let (relayer, client) = relayer_with(Outcome::Stuck).await;
    let url = client.url().clone();
    let fixture = Fixture::over(vec![client]).await;
    relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
    let mut ids = Vec::new();
    for number in 0..ROWS {
        let mut bound = fixture.bound(&url, &format!("oz-{number}"), SOME_TIME);
        bound.call.value = alloy_primitives::U256::from(number);
        let request = json!({ "to": TO, "value": number.to_string(), "data": "0xab", "gas": 21000 });
        bound.request = request.to_string().into();
        let hash = fixture.node.mine(Some(&bound), 80, true);
        fixture.insert(&bound).await;
        ids.push((bound.id, hash));
    }
    let clock = &fixture.guarded.clock;
    eventually(SOON, "the rows to be old", || async {
        (clock.passed_since(now() - SOME_TIME) >= OPERATOR_AFTER).then_some(())
    })
    .await;
    fixture.reconciler(true).sweep(Sweep::Submitted).await.unwrap();
    assert!(relayer.count_requests("GET", "oz-") < ROWS, "a silent relayer is left alone");
    let mut confirmed = 0;
    for (id, hash) in ids {
        let row = fixture.get(id).await;
        if row.status.is_final() {
            assert_eq!((row.status.name(), row.hash), ("confirmed", Some(hash)));
            confirmed += 1;
        }
    }
    assert_eq!(confirmed, 32, "16 that are asked about, and 16 of those that are skipped");
}

/// Silence counted as the time for which the relayer had not known the record: the first 404 re-routed it.
#[tokio::test]
async fn a_relayer_that_was_silent_has_not_forgotten_a_row_for_long() {
    let (relayer, client) = relayer_with(Outcome::WithoutJob).await;
    let url = client.url().clone();
    let fixture = Fixture::over(vec![client]).await;
    let bound = fixture.bound(&url, &post(&relayer).await, SOME_TIME);
    fixture.insert(&bound).await;
    let reconciler = fixture.reconciler(true);
    relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
    fixture.sweep_until(&reconciler, bound.id, "an unknown outcome", Transaction::outcome_unknown).await;
    let since = fixture.get(bound.id).await.unknown_since().unwrap();
    eventually(SOON, "a long silence", || async {
        (fixture.guarded.clock.passed_since(since) > GIVEN_UP_AFTER).then_some(())
    })
    .await;
    relayer.forget();
    relayer.change_faults(|faults| faults.transaction_reads.status = None);
    fixture.sweep(&reconciler, bound.id).await;
    let row = fixture.get(bound.id).await;
    assert!(row.binding.is_some() && row.unknown_since() > Some(since), "{row:?}");
    fixture.sweep_until(&reconciler, bound.id, "another relayer's turn", |row| row.binding.is_none()).await;
}
