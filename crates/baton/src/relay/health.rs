//! The relay lane's part of `/ready` and `/health`: store, queue, cache, relayers and chain.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::clock::Clock;
use crate::http::health::{HealthCheck, LaneHealth, PART_TIMEOUT, QueueCheck, in_time};
use crate::relay::chain::Chain;
use crate::relay::chain::endpoint::EndpointView;
use crate::relay::relayer::pool::Pool;
use crate::relay::relayer::routing::RelayerView;
use crate::relay::update::guarded_store::GuardedStore;

/// What the lane is asked about.
pub struct RelayHealth {
    /// Store and cache.
    pub guarded: Arc<GuardedStore>,
    /// The queue.
    pub queue: QueueCheck,
    /// The relayers, as this process sees them.
    pub pool: Arc<Pool>,
    /// The chain, if this process asks it.
    pub chain: Option<ChainLook>,
}

/// Looks at the chain for `/health`: a process may have had no reason to ask it for long.
pub struct ChainLook {
    chain: Arc<Chain>,
    clock: Clock,
    /// Shortest pause between two looks. Providers count calls, and anyone may ask for `/health`.
    every: Duration,
    last: Mutex<LastLook>,
}

/// The last look at the chain. It goes on when the request that began it is gone: otherwise clients that go at once would
/// have the chain asked each time, and one whose patience is shorter than a slow node's answer would never get any.
struct LastLook {
    began: Option<Instant>,
    /// Its sender is dropped at the end of the look.
    ends: watch::Receiver<()>,
    _task: Option<AbortOnDropHandle<()>>,
}

/// Longest wait for a look that has just begun; after it `/health` shows what was known before.
const LOOK_WAIT: Duration = Duration::from_millis(300);

impl ChainLook {
    /// Looks at this chain, at most once in each period of this length.
    pub fn new(chain: Arc<Chain>, clock: Clock, every: Duration) -> Self {
        let last = LastLook { began: None, ends: watch::channel(()).1, _task: None };
        Self { chain, clock, every, last: Mutex::new(last) }
    }

    async fn check(&self) -> Value {
        let mut ends = self.look_if_due();
        tokio::time::timeout(LOOK_WAIT, ends.changed()).await.ok();
        chain_part(&self.chain.endpoints())
    }

    /// The end of the last look, which begins here if the one before is long ago.
    fn look_if_due(&self) -> watch::Receiver<()> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let under_way = last.ends.has_changed().is_ok();
        if !under_way && last.began.is_none_or(|at| self.clock.elapsed(at) >= self.every) {
            let (running, ends) = watch::channel(());
            let chain = Arc::clone(&self.chain);
            let task = tokio::spawn(async move {
                chain.look(PART_TIMEOUT).await;
                drop(running);
            });
            let began = Some(self.clock.instant());
            *last = LastLook { began, ends, _task: Some(AbortOnDropHandle::new(task)) };
        }
        last.ends.clone()
    }
}

#[async_trait]
impl HealthCheck for RelayHealth {
    /// A relayer that is down only delays work. A queue on a server is not asked: statuses and webhooks need only the store,
    /// and that outage ends without an operator. An embedded queue that cannot be written refuses every transaction until
    /// an operator acts.
    async fn is_ready(&self) -> bool {
        let (store, queue) = tokio::join!(in_time(self.guarded.store.ping()), self.queue.is_writable());
        store.is_some() && queue
    }

    async fn check(&self) -> LaneHealth {
        // The counts are read; the ping is a write, which a full disk refuses.
        let store = async { tokio::try_join!(self.guarded.store.ping(), self.guarded.store.counts()) };
        let chain = async {
            match &self.chain {
                Some(chain) => Some(chain.check().await),
                None => None,
            }
        };
        let (counts, (queue_healthy, queue), cache, chain) = tokio::join!(
            tokio::time::timeout(PART_TIMEOUT, store),
            self.queue.check(),
            self.guarded.cache.ping(),
            chain
        );
        let relayers = self.pool.view();
        let able = relayers.iter().filter(|relayer| relayer.is_able()).count();
        let store = match &counts {
            Ok(Ok(((), counts))) => json!({
                "status": "ok",
                "open": counts.open.iter().map(|(status, count)| (status.name().to_owned(), json!(count)))
                    .collect::<Map<_, _>>(),
                "claims": counts.claims,
                "outcomeUnknown": counts.claims_outcome_unknown,
                "forgottenByRelayer": counts.forgotten,
            }),
            Ok(Err(failure)) => json!({ "status": "unavailable", "reason": failure.reason() }),
            Err(_) => json!({ "status": "unavailable", "reason": "no answer in time" }),
        };
        // Never a reason to be unhealthy: without the cache the database answers.
        let cache = match cache {
            None => "in process",
            Some(true) => "ok",
            Some(false) => "unavailable",
        };
        let each = relayers.iter().map(relayer_part);
        // A process that needs none, such as a notifier, may have none.
        let enough = able > 0 || relayers.is_empty();
        let status = if enough { "ok" } else { "unavailable" };
        let relayers = json!({ "status": status, "able": able, "each": each.collect::<Value>() });
        let parts = [("store", store), ("queue", queue), ("cache", json!({ "status": cache })), ("relayers", relayers)];
        // Nor is the chain: what needs it waits, gasless requests get 503 with the reason, and everything else goes on.
        let chain = chain.map(|part| ("chain", part));
        LaneHealth {
            healthy: matches!(counts, Ok(Ok(_))) && queue_healthy && enough,
            parts: parts.into_iter().chain(chain).map(|(name, part)| (name.to_owned(), part)).collect(),
        }
    }
}

/// The JSON of a chain whose endpoints, in the order of `RPC_URL`, last showed this.
fn chain_part(endpoints: &[EndpointView]) -> Value {
    let answering = || endpoints.iter().filter(|endpoint| endpoint.answers);
    // One that does not answer may be far behind, or on a chain that was reset.
    let head = answering().filter_map(|endpoint| endpoint.head).max();
    let head = head.or_else(|| endpoints.iter().filter_map(|endpoint| endpoint.head).max());
    let status = |answers| if answers { "ok" } else { "unavailable" };
    let each = endpoints.iter().enumerate().map(|(index, endpoint)| {
        let mut part = json!({
            "place": index + 1,
            "status": status(endpoint.answers),
            "head": endpoint.head,
            "lastAnswerAt": endpoint.answered_at,
        });
        if let Some(reason) = &endpoint.reason {
            part["reason"] = json!(reason);
        }
        part
    });
    json!({
        "status": status(answering().next().is_some()),
        "head": head,
        "lastAnswerAt": endpoints.iter().filter_map(|endpoint| endpoint.answered_at).max(),
        "endpoints": each.collect::<Value>(),
    })
}

fn relayer_part(relayer: &RelayerView) -> Value {
    let mut part = json!({
        "url": relayer.url.0,
        "status": relayer.skipped.map_or("ok", |reason| reason.name()),
        "healthKnown": relayer.known,
        "breaker": relayer.breaker,
        "inFlight": relayer.load,
        "inFlightMax": relayer.cap,
    });
    if let Some(trouble) = &relayer.trouble {
        part["reason"] = json!(trouble);
    }
    if let Some(cause) = relayer.jam {
        part["reason"] = json!(cause.to_string());
        if let Some(missing) = cause.missing_nonce() {
            part["missingNonce"] = json!(missing);
        }
    }
    if let Some(wrong) = &relayer.wrong_network {
        part["reason"] = json!(wrong.to_string());
        part["network"] = json!(wrong.network);
        part["chainId"] = json!(wrong.chain_id);
        part["expectedNetwork"] = json!(wrong.expected_network);
        part["expectedChainId"] = json!(wrong.expected_chain_id);
    }
    if let Some(other) = &relayer.shares_key_with {
        part["reason"] = json!(format!("it signs with the same key as {other}; give each relayer a key of its own"));
    }
    part
}
