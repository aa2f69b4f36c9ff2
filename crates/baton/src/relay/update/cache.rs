//! The first tier of the status: transactions that can never change again. Optional, and never authoritative.
//!
//! Several processes write and do not learn of each other's writes, so a cache would return old states. Therefore only
//! transactions that succeeded are cached (ADR 5), and all others are read from the database each time. With `REDIS_URL`
//! all processes share the entries `tx:{id}`.

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

/// Lifetime of an entry.
const LIFETIME: Duration = Duration::from_secs(600);
/// Maximum entries in this process.
const ENTRIES_MAX: usize = 10_000;
/// Timeout of Redis: a slow cache is worse than none.
const REDIS_TIMEOUT: Duration = Duration::from_millis(200);
/// Pause after a failure of Redis.
const REDIS_PAUSE: Duration = Duration::from_secs(1);
/// Maximum writes to Redis in flight; further ones are dropped.
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

/// Successful transactions, in this process and in Redis.
#[derive(Default)]
pub struct Cache {
    near: Mutex<HashMap<TransactionId, (Value, Instant)>>,
    far: Option<Redis>,
}

/// A transaction as clients see it, with its version.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The transaction.
    pub id: TransactionId,
    /// The row's version.
    pub version: u64,
    /// The JSON that clients get.
    pub shown: Value,
}

impl Cache {
    /// Also caches in Redis, which may be unavailable.
    pub fn with_redis(url: &str) -> Result<Self, redis::RedisError> {
        Ok(Self { near: Mutex::default(), far: Some(Redis::open(url)?) })
    }

    /// The cached JSON, if any.
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

    /// Whether a transaction of this status can no longer change. A failed one can be replayed.
    pub fn keeps(status: Status) -> bool {
        matches!(status, Status::Confirmed | Status::Success)
    }

    /// Caches a transaction that can no longer change.
    pub fn put(&self, entry: Entry) {
        self.put_near(entry.id, entry.shown.clone());
        if let Some(redis) = &self.far {
            redis.put(entry);
        }
    }

    /// Returns when no write to Redis is in flight.
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
            counter!("baton_cache_total", "tier" => "redis", "result" => "skipped").increment(1);
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

    /// Writes in the background; an entry that is not written is read from the database.
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
        note(&self.left_alone_until, asked.map_err(|_| timed_out()).flatten()).is_some()
    }
}

fn key(id: TransactionId) -> String {
    format!("tx:{id}")
}

fn timed_out() -> redis::RedisError {
    redis::RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))
}

/// The answer of Redis; a failure starts the pause.
fn note<T>(left_alone_until: &Mutex<Option<Instant>>, said: Result<T, redis::RedisError>) -> Option<T> {
    let mut until = left_alone_until.lock().unwrap_or_else(PoisonError::into_inner);
    match said {
        Ok(value) => {
            if until.take().is_some() {
                info!(action = "redis_recovered", "Redis answers again");
            }
            Some(value)
        }
        Err(failure) => {
            counter!("baton_cache_total", "tier" => "redis", "result" => "failed").increment(1);
            if until.is_none() {
                warn!(action = "redis_unavailable", "Redis is unavailable, the database answers instead: {failure}");
            }
            *until = Some(Instant::now() + REDIS_PAUSE);
            None
        }
    }
}
