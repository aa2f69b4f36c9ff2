//! The three tiers of the status (Redis, the database, the relayers): hit, miss with backfill, Redis unavailable. A reader
//! never sees a status move back.

use harness::engine::{TestEngine, address, server};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::load_client::{LoadClient, LoadProfile};
use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON};
use crate::status_watcher::StatusWatcher;

async fn start_relay(redis: &Proxy) -> RelayFixture {
    RelaySetup::relayers(2).engine(TestEngine::MySqlRabbitMq).api_behind("REDIS_URL", redis).split().start().await
}

async fn redis_link() -> Proxy {
    Proxy::start(address("BATON_TEST_REDIS_URL")).await
}

/// The cache entry of this transaction in Redis.
async fn cached(id: &str) -> Option<String> {
    let client = redis::Client::open(server("BATON_TEST_REDIS_URL")).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::AsyncCommands::get(&mut connection, format!("tx:{id}")).await.unwrap()
}

/// Removes the cache entry of this transaction from Redis.
async fn evict(id: &str) {
    let client = redis::Client::open(server("BATON_TEST_REDIS_URL")).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::AsyncCommands::del::<_, ()>(&mut connection, format!("tx:{id}")).await.unwrap();
}

#[tokio::test]
async fn a_confirmed_transaction_is_cached_in_redis_and_backfilled_from_the_database() {
    let link = redis_link().await;
    let mut relay = start_relay(&link).await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    let entry = eventually(SOON, "the entry in Redis", || cached(&id)).await;
    assert!(entry.contains("confirmed"), "{entry}");
    // A new process has an empty cache: the status comes from Redis, and after an eviction from the database.
    relay.api.restart().await.unwrap();
    relay.api_ready().await;
    assert_eq!(relay.status(&id).await["status"], "confirmed");
    assert_eq!(relay.metric("baton_cache_total", r#"tier="redis",result="hit""#).await, 1.0);
    evict(&id).await;
    relay.api.restart().await.unwrap();
    relay.api_ready().await;
    assert_eq!(relay.status(&id).await["status"], "confirmed");
    eventually(SOON, "the backfill", || cached(&id)).await;
}

#[tokio::test]
async fn without_redis_every_status_is_still_correct() {
    let link = redis_link().await;
    let relay = start_relay(&link).await;
    for mode in [Mode::Refuse, Mode::BlackHole, Mode::Cut] {
        link.set(mode).await;
        let (code, health) = relay.get("/health").await;
        assert_eq!((code, &health["parts"]["cache"]["status"]), (200, &"unavailable".into()), "{mode:?}");
        let sent = relay.send_many(0..20).await;
        relay.until_all_final(LATER).await;
        for (id, _) in &sent {
            assert_eq!(relay.status(id).await["status"], "confirmed", "{mode:?}");
        }
    }
    link.set(Mode::Forward).await;
    let mut serial = 100;
    eventually(SOON, "Redis to be used again", || {
        serial += 1;
        let relay = &relay;
        async move {
            let id = relay.send_serial(serial).await;
            relay.until_status(&id, "confirmed").await;
            cached(&id).await
        }
    })
    .await;
}

/// Clients send while Redis fails and loses entries, the API restarts, and one transaction is known only to a relayer. A
/// reader polls all of it.
#[tokio::test]
async fn a_reader_of_all_tiers_never_sees_a_status_move_back() {
    let link = redis_link().await;
    let setup = RelaySetup::relayers(2)
        .engine(TestEngine::MySqlSqs)
        .api_behind("REDIS_URL", &link)
        .env("QUEUE_LEASE_MS", "2000");
    let mut relay = setup.split().start().await;
    let client = LoadClient::of(&relay);
    let watcher = StatusWatcher::start(client.clone());
    let profile =
        LoadProfile { clients: 4, pause_max: std::time::Duration::from_millis(20), retry_until_accepted: false };
    let mut ids = Vec::new();
    for (round, mode) in
        [Mode::Forward, Mode::Refuse, Mode::Forward, Mode::BlackHole, Mode::Forward, Mode::Cut].into_iter().enumerate()
    {
        link.set(mode).await;
        let answers = client.send_all(profile, round * 40..(round + 1) * 40, round as u64).await;
        assert_eq!(answers.accepted.len(), 40, "{mode:?}: {:?}", answers.unanswered_causes);
        ids.extend(answers.accepted.into_iter().map(|(id, _)| id));
        for id in ids.iter().step_by(3) {
            evict(id).await;
        }
        if mode == Mode::Forward {
            // The restart empties the process's own cache; Redis keeps the entries that were not evicted.
            relay.api.restart().await.unwrap();
            relay.api_ready().await;
        }
    }
    link.set(Mode::Forward).await;
    let unknown = relay.post_at_relayer(0, "0x").await;
    let found = relay.until_status(&unknown, "confirmed").await;
    assert_eq!(found["ozRelayerTxId"], unknown.as_str());
    relay.until_all_final(LATER).await;
    let watched = watcher.stop().await;
    assert!(watched.regressions.is_empty(), "{:#?}", watched.regressions);
    assert!(watched.reads > ids.len(), "only {} reads", watched.reads);

    // Once more after a restart, without other readers: some come from Redis, and the evicted one cannot. A Redis that
    // is slow to answer once is not asked for a second, which may be the whole of such a reading: then once more.
    let last = &ids[ids.len() - 1];
    let mut counts = [0.0, 0.0];
    for _ in 0..5 {
        evict(last).await;
        relay.api.restart().await.unwrap();
        relay.api_ready().await;
        for id in [last].into_iter().chain(&ids) {
            assert_eq!(relay.status(id).await["status"], "confirmed");
        }
        for (count, result) in counts.iter_mut().zip(["hit", "miss"]) {
            *count += relay.metric("baton_cache_total", &format!(r#"tier="redis",result="{result}""#)).await;
        }
        if counts.iter().all(|count| *count > 0.0) {
            return;
        }
    }
    panic!("hits and misses in Redis after five restarts: {counts:?}");
}

#[tokio::test]
async fn an_older_version_never_replaces_a_newer_one() {
    use baton::relay::state::transaction::TransactionId;
    use baton::relay::update::cache::{Cache, Entry};
    let url = server("BATON_TEST_REDIS_URL");
    let id = TransactionId::generate();
    let entry =
        |version| Entry { id, version, shown: serde_json::json!({ "transactionId": id.to_string(), "v": version }) };
    for (version, wins) in [(3, 3), (2, 3), (5, 5), (4, 5)] {
        // A new cache each time, as in another process.
        let cache = Cache::with_redis(&url).unwrap();
        cache.put(entry(version));
        cache.settled().await;
        let text = cached(&id.to_string()).await.unwrap();
        assert!(text.contains(&format!(r#""version":{wins}"#)), "{version} after: {text}");
    }
}
