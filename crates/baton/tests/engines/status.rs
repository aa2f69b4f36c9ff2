//! The three tiers of the status with Redis as the first: hit, miss with backfill, Redis gone, the relayers; and somebody
//! who reads all the time never sees a step back.

use harness::engine::{Engine, server};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::load_client::{Client, Manners};
use crate::relay_fixture::{LATER, Plan, SOON, Stand};
use crate::status_watcher::Watch;

async fn stand(redis: &Proxy) -> Stand {
    Plan::relayers(2).engine(Engine::MySqlRabbitMq).api_behind("REDIS_URL", redis).split().start().await
}

async fn link() -> Proxy {
    let url = reqwest::Url::parse(&server("BATON_TEST_REDIS_URL")).unwrap();
    Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await
}

/// What Redis has under that key.
async fn in_redis(id: &str) -> Option<String> {
    let client = redis::Client::open(server("BATON_TEST_REDIS_URL")).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::AsyncCommands::get(&mut connection, format!("tx:{id}")).await.unwrap()
}

async fn forget(id: &str) {
    let client = redis::Client::open(server("BATON_TEST_REDIS_URL")).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::AsyncCommands::del::<_, ()>(&mut connection, format!("tx:{id}")).await.unwrap();
}

#[tokio::test]
async fn what_has_ended_well_is_in_redis_for_ten_minutes_and_comes_back_from_the_database() {
    let link = link().await;
    let mut stand = stand(&link).await;
    let id = stand.send_serial(1).await;
    stand.until_status(&id, "confirmed").await;
    let entry = eventually(SOON, "the entry in Redis", || in_redis(&id)).await;
    assert!(entry.contains("confirmed"), "{entry}");
    // A new process has nothing of its own: what it shows comes from Redis, and after a loss from the database again.
    stand.api.restart().await.unwrap();
    stand.api_ready().await;
    assert_eq!(stand.status(&id).await["status"], "confirmed");
    assert_eq!(stand.metric("baton_cache_total", r#"tier="redis",result="hit""#).await, 1.0);
    forget(&id).await;
    stand.api.restart().await.unwrap();
    stand.api_ready().await;
    assert_eq!(stand.status(&id).await["status"], "confirmed");
    eventually(SOON, "the backfill", || in_redis(&id)).await;
}

#[tokio::test]
async fn without_redis_everything_is_slower_and_nothing_is_wrong() {
    let link = link().await;
    let stand = stand(&link).await;
    for mode in [Mode::Refuse, Mode::BlackHole, Mode::Cut] {
        link.set(mode).await;
        let (code, health) = stand.get("/health").await;
        assert_eq!((code, &health["parts"]["cache"]["status"]), (200, &"unavailable".into()), "{mode:?}");
        let sent = stand.send_many(0..20).await;
        stand.until_all_final(LATER).await;
        for (id, _) in &sent {
            assert_eq!(stand.status(id).await["status"], "confirmed", "{mode:?}");
        }
    }
    link.set(Mode::Forward).await;
    let mut serial = 100;
    eventually(SOON, "Redis to be used again", || {
        serial += 1;
        let stand = &stand;
        async move {
            let id = stand.send_serial(serial).await;
            stand.until_status(&id, "confirmed").await;
            in_redis(&id).await
        }
    })
    .await;
}

/// Several clients send, Redis comes and goes and forgets, the API starts anew, a relayer is asked about what only it
/// knows; and somebody looks at all of it all the time.
#[tokio::test]
async fn a_reader_of_all_tiers_never_sees_a_step_back() {
    let link = link().await;
    let plan = Plan::relayers(2).engine(Engine::MySqlSqs).api_behind("REDIS_URL", &link).env("QUEUE_LEASE_MS", "2000");
    let mut stand = plan.split().start().await;
    let client = Client::of(&stand);
    let watch = Watch::begin(client.clone());
    let manners = Manners { clients: 4, pause_max: std::time::Duration::from_millis(20), insistent: false };
    let mut ids = Vec::new();
    for (round, mode) in
        [Mode::Forward, Mode::Refuse, Mode::Forward, Mode::BlackHole, Mode::Forward, Mode::Cut].into_iter().enumerate()
    {
        link.set(mode).await;
        let promises = client.crowd(manners, round * 40..(round + 1) * 40, round as u64).await;
        assert_eq!(promises.accepted.len(), 40, "{mode:?}: {:?}", promises.silences);
        ids.extend(promises.accepted.into_iter().map(|(id, _)| id));
        for id in ids.iter().step_by(3) {
            forget(id).await;
        }
        if mode == Mode::Forward {
            // The process's own tier is gone; Redis has what it was not made to forget.
            stand.api.restart().await.unwrap();
            stand.api_ready().await;
        }
    }
    link.set(Mode::Forward).await;
    let unknown = stand.post_at_relayer(0, "0x").await;
    let found = stand.until_status(&unknown, "confirmed").await;
    assert_eq!(found["ozRelayerTxId"], unknown.as_str());
    stand.until_all_final(LATER).await;
    let seen = watch.end().await;
    assert!(seen.steps_back.is_empty(), "{:#?}", seen.steps_back);
    assert!(seen.reads > ids.len(), "only {} looks", seen.reads);

    // Once more from the start, with nobody else reading: some come from Redis, and the last one cannot.
    forget(&ids[ids.len() - 1]).await;
    stand.api.restart().await.unwrap();
    stand.api_ready().await;
    for id in &ids {
        assert_eq!(stand.status(id).await["status"], "confirmed");
    }
    for tier in [r#"tier="redis",result="hit""#, r#"tier="redis",result="miss""#] {
        assert!(stand.metric("baton_cache_total", tier).await > 0.0, "{tier}");
    }
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
        // Another process each time.
        let cache = Cache::with_redis(&url).unwrap();
        cache.put(entry(version));
        cache.settled().await;
        let text = in_redis(&id.to_string()).await.unwrap();
        assert!(text.contains(&format!(r#""version":{wins}"#)), "{version} after: {text}");
    }
}
