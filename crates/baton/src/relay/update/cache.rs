//! The first tier of the status: what can never change again. Always optional, never the truth.
//!
//! Several processes write, and none of them hears of the others' writes; a cache that was away for a moment would hold
//! old states. So only transactions that ended well are kept (ADR 5): everything else is read from the database each
//! time, and no reader is ever shown an old state. With `REDIS_URL` they are kept there too, for all processes, as
//! `tx:{id}`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::counter;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{AsyncCommands, Script};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tracing::{info, warn};

use crate::relay::state::transaction::{Status, TransactionId};

/// How long an entry stays.
const LIFETIME: Duration = Duration::from_secs(600);
/// How many entries stay in this process at most.
const ENTRIES_MAX: usize = 10_000;
/// How long Redis may take: a slow cache is worse than none.
const REDIS_TIMEOUT: Duration = Duration::from_millis(200);
/// How long Redis is left alone after it failed.
const REDIS_PAUSE: Duration = Duration::from_secs(1);
/// How many writes to Redis may be under way; more are left out.
const REDIS_WRITES_MAX: usize = 256;
/// Writes unless there is a version at least as new. KEYS: the entry. ARGV: version, entry, lifetime in seconds.
const PUT: &str = "
    local known = redis.call('GET', KEYS[1])
    if known then
        local ok, entry = pcall(cjson.decode, known)
        if ok and type(entry) == 'table' and tonumber(entry.version) and tonumber(entry.version) >= tonumber(ARGV[1])
        then
            return 0
        end
    end
    redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
    return 1";

/// The cache.
#[derive(Default)]
pub struct Cache {
    near: Mutex<HashMap<TransactionId, (Value, Instant)>>,
    far: Option<Redis>,
}

/// A transaction as clients see it, and which version of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Which.
    pub id: TransactionId,
    /// The row's version.
    pub version: u64,
    /// What clients are shown.
    pub shown: Value,
}

impl Cache {
    /// With entries in Redis, too. Redis need not be there yet, or ever.
    pub fn with_redis(url: &str) -> Result<Self, redis::RedisError> {
        Ok(Self { near: Mutex::default(), far: Some(Redis::open(url)?) })
    }

    /// What clients are shown, if it is here.
    pub async fn get(&self, id: TransactionId) -> Option<Value> {
        let found = self.get_near(id);
        if found.is_some() {
            counter!("baton_cache_total", "tier" => "process", "result" => "hit").increment(1);
            return found;
        }
        counter!("baton_cache_total", "tier" => "process", "result" => "miss").increment(1);
        let found = match &self.far {
            Some(redis) => redis.get(id).await,
            None => None,
        };
        if let Some(shown) = &found {
            self.put_near(id, shown.clone());
        }
        found
    }

    /// Whether a transaction of this status cannot change any more, and may be kept. A failed one can be replayed.
    pub fn keeps(status: Status) -> bool {
        matches!(status, Status::Confirmed | Status::Success)
    }

    /// Keeps a transaction that cannot change any more.
    pub fn put(&self, entry: Entry) {
        self.put_near(entry.id, entry.shown.clone());
        if let Some(redis) = &self.far {
            redis.put(entry);
        }
    }

    /// Returns when nothing is being written any more.
    pub async fn settled(&self) {
        if let Some(redis) = &self.far {
            drop(redis.writes.acquire_many(REDIS_WRITES_MAX as u32).await);
        }
    }

    /// Whether Redis answers; `None` if there is none.
    pub async fn ping(&self) -> Option<bool> {
        match &self.far {
            Some(redis) => Some(redis.ping().await),
            None => None,
        }
    }

    fn get_near(&self, id: TransactionId) -> Option<Value> {
        let entries = self.near.lock().unwrap_or_else(PoisonError::into_inner);
        entries.get(&id).filter(|(_, until)| Instant::now() < *until).map(|(shown, _)| shown.clone())
    }

    fn put_near(&self, id: TransactionId, shown: Value) {
        let now = Instant::now();
        let mut entries = self.near.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= ENTRIES_MAX {
            entries.retain(|_, (_, until)| now < *until);
        }
        if entries.len() >= ENTRIES_MAX {
            entries.clear();
        }
        entries.insert(id, (shown, now + LIFETIME));
    }
}

struct Redis {
    connection: ConnectionManager,
    put: Arc<Script>,
    writes: Arc<Semaphore>,
    left_alone_until: Arc<Mutex<Option<Instant>>>,
}

impl Redis {
    fn open(url: &str) -> Result<Self, redis::RedisError> {
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(REDIS_TIMEOUT))
            .set_response_timeout(Some(REDIS_TIMEOUT))
            .set_number_of_retries(1);
        let connection = ConnectionManager::new_lazy_with_config(redis::Client::open(url)?, config)?;
        Ok(Self {
            connection,
            put: Arc::new(Script::new(PUT)),
            writes: Arc::new(Semaphore::new(REDIS_WRITES_MAX)),
            left_alone_until: Arc::default(),
        })
    }

    fn is_left_alone(&self) -> bool {
        let until = self.left_alone_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    async fn get(&self, id: TransactionId) -> Option<Value> {
        if self.is_left_alone() {
            counter!("baton_cache_total", "tier" => "redis", "result" => "away").increment(1);
            return None;
        }
        let mut connection = self.connection.clone();
        let asked = tokio::time::timeout(REDIS_TIMEOUT, connection.get::<_, Option<String>>(key(id))).await;
        let text = note(&self.left_alone_until, asked.map_err(|_| timed_out()).flatten())?;
        let shown = text
            .and_then(|text| serde_json::from_str::<Value>(&text).ok())
            .and_then(|mut entry| entry.get_mut("shown").map(Value::take))
            .filter(|shown| shown["transactionId"] == id.to_string());
        let result = if shown.is_some() { "hit" } else { "miss" };
        counter!("baton_cache_total", "tier" => "redis", "result" => result).increment(1);
        shown
    }

    /// In the background: nobody waits for a cache to be written. What is not written is read from the database.
    fn put(&self, entry: Entry) {
        let Ok(permit) = Arc::clone(&self.writes).try_acquire_owned() else { return };
        if self.is_left_alone() {
            return;
        }
        let (mut connection, script) = (self.connection.clone(), Arc::clone(&self.put));
        let left_alone_until = Arc::clone(&self.left_alone_until);
        tokio::spawn(async move {
            let _permit = permit;
            let text = json!({ "version": entry.version, "shown": entry.shown }).to_string();
            let mut call = script.key(key(entry.id));
            call.arg(entry.version).arg(text).arg(LIFETIME.as_secs());
            let written = tokio::time::timeout(REDIS_TIMEOUT, call.invoke_async::<i64>(&mut connection)).await;
            note(&left_alone_until, written.map_err(|_| timed_out()).flatten());
        });
    }

    async fn ping(&self) -> bool {
        let mut connection = self.connection.clone();
        let asked = tokio::time::timeout(REDIS_TIMEOUT, connection.ping::<String>()).await;
        matches!(asked, Ok(Ok(_)))
    }
}

fn key(id: TransactionId) -> String {
    format!("tx:{id}")
}

fn timed_out() -> redis::RedisError {
    redis::RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))
}

/// What Redis said; and if it failed, that it is left alone for a moment.
fn note<T>(left_alone_until: &Mutex<Option<Instant>>, said: Result<T, redis::RedisError>) -> Option<T> {
    let mut until = left_alone_until.lock().unwrap_or_else(PoisonError::into_inner);
    match said {
        Ok(value) => {
            if until.take().is_some() {
                info!(action = "redis_back", "Redis answers again");
            }
            Some(value)
        }
        Err(failure) => {
            counter!("baton_cache_total", "tier" => "redis", "result" => "failed").increment(1);
            if until.is_none() {
                warn!(action = "redis_away", "Redis is away, the database answers instead: {failure}");
            }
            *until = Some(Instant::now() + REDIS_PAUSE);
            None
        }
    }
}
