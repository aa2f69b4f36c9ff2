//! Clients without a key, or with one, that try to take the service from the others: by connections, by memory, by file
//! descriptors. Each attack comes from a loopback address of its own, as from another machine.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use baton::relay::observe::api::LISTS_MAX;
use futures::future::join_all;
use harness::engine::TestEngine;
use harness::process::Process;
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::relay_fixture::{API_KEY, LATER, RelayFixture, RelaySetup, SOON, TO, serial_body};
use crate::store::fixture::Schema;

/// Most memory of a service in a debug build, in MiB.
const MEMORY_MIB_MAX: u64 = 128;

/// An attacker's address.
fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 0, number)
}

/// Connects from this address, with room for few bytes of an answer. The kernel accepts before the service does, so this
/// succeeds as long as the backlog has room.
async fn connect(relay: &RelayFixture, from: Ipv4Addr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.bind((from, 0).into()).unwrap();
    let service = relay.base.strip_prefix("http://").unwrap().parse().unwrap();
    tokio::time::timeout(SOON, socket.connect(service)).await.expect("the kernel connects").unwrap()
}

async fn connect_many(relay: &RelayFixture, from: Ipv4Addr, count: usize) -> Vec<TcpStream> {
    join_all((0..count).map(|_| connect(relay, from))).await
}

/// Requests without a key whose answers fill the sockets on both sides.
async fn send_without_reading(stream: &mut TcpStream) {
    let requests = "GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n".repeat(4000);
    // The service stops reading when its answers are not read.
    tokio::time::timeout(Duration::from_millis(200), stream.write_all(requests.as_bytes())).await.ok();
}

/// A webhook whose sender knows no key: it stops before the last byte.
async fn send_slow_webhook(stream: &mut TcpStream, bytes: usize) {
    let signature = "00".repeat(32);
    let head = format!(
        "POST /api/v1/webhooks/oz-relayer HTTP/1.1\r\nhost: x\r\nx-signature: {signature}\r\ncontent-length: {bytes}\r\n\r\n"
    );
    let body = "x".repeat(bytes - 1);
    let sent = async {
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await
    };
    tokio::time::timeout(Duration::from_millis(200), sent).await.ok();
}

/// The status line and head of the answer, or how the connection ended.
async fn read_head(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    let mut piece = [0; 1024];
    loop {
        match tokio::time::timeout(SOON, stream.read(&mut piece)).await.expect("an answer or an end") {
            Ok(0) => return format!("{}(closed)", String::from_utf8_lossy(&read)),
            Ok(count) => read.extend_from_slice(&piece[..count]),
            Err(error) => return format!("{}({error})", String::from_utf8_lossy(&read)),
        }
        if read.windows(4).any(|window| window == b"\r\n\r\n") {
            return String::from_utf8_lossy(&read).into_owned();
        }
    }
}

/// The answer with its body, from a connection that stays open.
async fn read_answer(stream: &mut TcpStream) -> String {
    let mut read = String::new();
    loop {
        if let Some((head, body)) = read.split_once("\r\n\r\n")
            && let Some(length) = head.lines().find_map(|line| line.strip_prefix("content-length: "))
            && length.parse() == Ok(body.len())
        {
            return read;
        }
        let mut piece = [0; 1024];
        let count = tokio::time::timeout(SOON, stream.read(&mut piece)).await.expect("an answer").unwrap();
        assert_ne!(count, 0, "it was closed after {read:?}");
        read.push_str(std::str::from_utf8(&piece[..count]).unwrap());
    }
}

/// A field of `/proc/PID/status`, in MiB.
fn memory_mib(process: &Process, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id().unwrap())).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// Sends transactions one after the other; returns the time of each in milliseconds, sorted.
async fn well_behaved(relay: &RelayFixture, count: usize) -> Vec<u128> {
    let mut times = Vec::new();
    for serial in 0..count {
        let started = Instant::now();
        relay.send(&serial_body(serial)).await;
        times.push(started.elapsed().as_millis());
    }
    times.sort_unstable();
    times
}

/// Asks the listener of probes; returns the time of each in milliseconds, sorted.
async fn probes(relay: &RelayFixture, count: usize) -> Vec<u128> {
    let mut times = Vec::new();
    // A new connection each time, as orchestrators do.
    let http = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
    for path in ["/live", "/ready", "/health", "/metrics"].into_iter().cycle().take(count) {
        let started = Instant::now();
        let url = format!("{}{path}", harness::admin_url(&relay.base));
        let answer = http.get(url).timeout(SOON).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        times.push(started.elapsed().as_millis());
    }
    times.sort_unstable();
    times
}

#[tokio::test]
async fn clients_that_never_read_their_answers_are_reset() {
    let relay = RelaySetup::relayers(1).env("WRITE_TIMEOUT_MS", "300").start().await;
    let mut streams = connect_many(&relay, address(2), 20).await;
    join_all(streams.iter_mut().map(send_without_reading)).await;
    // Few bytes, which the service reads at once, and large answers: only the reset can drop what is not read of them.
    let mut brief = connect(&relay, address(2)).await;
    brief.write_all("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(200).as_bytes()).await.unwrap();
    eventually_ok(SOON, "the connections to be reset", || async {
        let reset = relay.metric("baton_connections_reset_total", "write_timeout").await;
        if reset == 21.0 { Ok(()) } else { Err(reset) }
    })
    .await;
    for stream in [&mut streams[0], &mut brief] {
        let end = stream.read_to_end(&mut Vec::new()).await;
        assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "unread bytes are dropped");
    }
    relay.send_serial(1).await;
}

#[tokio::test]
async fn one_address_cannot_take_every_connection() {
    let relay = RelaySetup::relayers(1).env("CONNECTIONS_PER_ADDRESS_MAX", "20").start().await;
    let held = connect_many(&relay, address(2), 60).await;
    eventually_ok(SOON, "the connections over the cap to be refused", || async {
        let (refused, replaced) = over_cap(&relay).await;
        if refused + replaced >= 40.0 { Ok(()) } else { Err(format!("{refused} refused, {replaced} replaced")) }
    })
    .await;
    let live = "GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let ask = async |from| {
        let mut stream = connect(&relay, from).await;
        stream.write_all(live.as_bytes()).await.unwrap();
        read_head(&mut stream).await
    };
    assert!(ask(address(3)).await.starts_with("HTTP/1.1 200 "), "another address is served");
    // Its silent connections make room for one that asks.
    eventually_ok(SOON, "the address to be served", || async {
        let answer = ask(address(2)).await;
        if answer.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(answer) }
    })
    .await;
    assert!(over_cap(&relay).await.1 >= 1.0, "a silent connection was replaced");
    drop(held);
}

/// Connections that a cap refused, and those that it closed for others.
async fn over_cap(relay: &RelayFixture) -> (f64, f64) {
    let refused = relay.metric("baton_connections_refused_total", "cap").await;
    (refused, relay.metric("baton_connections_reset_total", "replaced").await)
}

#[tokio::test]
async fn probes_answer_while_clients_hold_every_connection() {
    let setup = RelaySetup::relayers(1).env("CONNECTIONS_MAX", "30").env("IDLE_TIMEOUT_MS", "1500");
    let relay = setup.start().await;
    // More than the service takes at once.
    let mut idle = connect_many(&relay, address(2), 100).await;
    eventually(SOON, "every connection to be taken", || async {
        let (refused, replaced) = over_cap(&relay).await;
        (refused + replaced > 0.0).then_some(())
    })
    .await;
    let times = probes(&relay, 40).await;
    println!("probes with every connection taken: median {} ms, max {} ms", times[20], times[39]);
    // Idle connections end by themselves, the first as the last, and the service is there again.
    for stream in &mut idle {
        let end = read_head(stream).await;
        assert!(!end.starts_with("HTTP/1.1 200"), "{end}");
    }
    relay.send_serial(1).await;
}

/// Otherwise a client would keep a connection for one request, for as long as it likes.
#[tokio::test]
async fn a_connection_that_is_idle_after_its_answers_is_closed() {
    let relay = RelaySetup::relayers(1).env("IDLE_TIMEOUT_MS", "1500").start().await;
    let mut stream = connect(&relay, address(2)).await;
    for _ in 0..2 {
        stream.write_all(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let answer = read_answer(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with(r#"{"status":"ok"}"#), "{answer}");
    }
    let end = read_head(&mut stream).await;
    assert_eq!(end, "(closed)", "nothing more comes, and it ends in order");
}

#[tokio::test]
async fn a_request_head_over_16_kib_is_refused_before_its_end() {
    const HEAD_BYTES_MAX: usize = 16 * 1024;
    // Longer than a test waits for an answer.
    let relay = RelaySetup::relayers(1).env("IDLE_TIMEOUT_MS", "120000").start().await;
    let start = "GET /live HTTP/1.1\r\nhost: x\r\nx-filler: ";
    let filled = |bytes: usize| format!("{start}{}", "a".repeat(bytes - start.len()));
    for bytes in [HEAD_BYTES_MAX, 64 * 1024] {
        let mut stream = connect(&relay, address(2)).await;
        // The head never ends: a service without the limit waits for more of it.
        stream.write_all(filled(bytes).as_bytes()).await.unwrap();
        let answer = read_head(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{bytes}: {answer}");
    }
    let mut stream = connect(&relay, address(2)).await;
    stream.write_all(format!("{}\r\n\r\n", filled(HEAD_BYTES_MAX - 100)).as_bytes()).await.unwrap();
    let answer = read_head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

/// Otherwise the service accepts in vain, at full speed and with a log line each time.
#[tokio::test]
async fn a_service_without_file_descriptors_waits_and_recovers() {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let relay = RelaySetup::relayers(1).env("CONNECTIONS_MAX", "2000000000").start().await;
    assert!(relay.api.output().contains("descriptors_short"), "descriptors are left to the rest of the process");
    let id = relay.api.id().unwrap();
    let pid = Pid::from_raw(i32::try_from(id).unwrap()).unwrap();
    // This connection to the probes stays open.
    relay.metric("baton_connections", "").await;
    let open = std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().count() as u64;
    let limit = Rlimit { current: Some(open), maximum: getrlimit(Resource::Nofile).maximum };
    let before = prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    let streams = connect_many(&relay, address(2), 40).await;
    eventually(SOON, "accepting to fail", || async {
        (relay.metric("baton_connections_refused_total", "accept").await >= 5.0).then_some(())
    })
    .await;
    let failures = relay.api.output().matches("accept_failed").count();
    assert_eq!(failures, 1, "one line for one shortage:\n{}", relay.api.log_excerpt());
    prlimit(Some(pid), Resource::Nofile, before).unwrap();
    drop(streams);
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    assert!(relay.api.output().contains("accept_recovered"));
}

#[tokio::test]
async fn a_webhook_without_a_signature_and_a_body_too_large_are_answered_before_the_body() {
    let relay = RelaySetup::relayers(1).start().await;
    let hook = "POST /api/v1/webhooks/oz-relayer HTTP/1.1\r\nhost: x\r\n";
    let direct = format!(
        "POST /api/v1/relay/direct HTTP/1.1\r\nhost: x\r\nx-api-key: {API_KEY}\r\ncontent-type: application/json\r\n"
    );
    for (head, length, expected) in [
        (hook.to_owned(), 200_000_u64, "401"),
        (format!("{hook}x-signature: nonsense\r\n"), 200_000, "401"),
        (direct.clone(), 10_000_000_000, "413"),
        (direct, 262_145, "413"),
    ] {
        let mut stream = connect(&relay, address(2)).await;
        // The body never comes: a service that waits for it answers 408.
        stream.write_all(format!("{head}content-length: {length}\r\n\r\n").as_bytes()).await.unwrap();
        let answer = read_head(&mut stream).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected} ")), "{head}{length}: {answer}");
    }
}

/// 500 at once took 487 MiB, webhooks without a key 448 MiB.
#[tokio::test]
async fn memory_is_bounded_however_large_and_many_the_bodies_are() {
    // No submission times out: its relayer's list, with all the call data in it, would be read.
    let relay = RelaySetup::relayers(1)
        .env("RELAYER_SUBMIT_TIMEOUT_MS", "30000")
        .env("RELAYER_HANDLER_TIMEOUT_MS", "30000")
        .env("LOG_LEVEL", "error")
        .split()
        .start()
        .await;
    let quiet = memory_mib(&relay.api, "VmRSS");
    let body = json!({ "to": TO, "value": "1", "data": format!("0x{}", "ab".repeat(100_000)) });
    let posts = join_all((0..500).map(|_| relay.post(&body))).await;
    let accepted = posts.iter().filter(|(status, _)| *status == 202).count();
    let refused = posts.iter().filter(|(status, body)| *status == 503 && body["code"] == "overloaded").count();
    assert_eq!(accepted + refused, 500, "{:?}", posts.iter().find(|(status, _)| !matches!(status, 202 | 503)));
    assert!(accepted >= 5, "{accepted} accepted");
    let after_posts = memory_mib(&relay.api, "VmHWM");
    let mut hooks = connect_many(&relay, address(3), 300).await;
    join_all(hooks.iter_mut().map(|stream| send_slow_webhook(stream, 200_000))).await;
    relay.send_serial(1).await;
    eventually(LATER, "the consumer to have large messages in hand", || async {
        (relay.count("confirmed").await >= 5).then_some(())
    })
    .await;
    let (peak, consumer) = (memory_mib(&relay.api, "VmHWM"), memory_mib(&relay.consumers[0], "VmHWM"));
    println!(
        "memory: {quiet} MiB quiet, {after_posts} MiB after 500 posts of 200 KB ({accepted} accepted, {refused} refused), \
         {peak} MiB after 300 slow webhooks; the consumer {consumer} MiB"
    );
    assert!(peak < MEMORY_MIB_MAX && consumer < MEMORY_MIB_MAX, "{peak} MiB, {consumer} MiB");
}

/// Prints what the attack costs the others; only its effects are asserted, never times.
#[tokio::test]
async fn a_flood_leaves_the_service_and_its_probes_to_the_others() {
    let relay = RelaySetup::relayers(2)
        .env("CONNECTIONS_PER_ADDRESS_MAX", "80")
        .env("WRITE_TIMEOUT_MS", "2000")
        .env("LOG_LEVEL", "error")
        .start()
        .await;
    let quiet = (well_behaved(&relay, 30).await, probes(&relay, 30).await, memory_mib(&relay.api, "VmRSS"));
    let (mut deaf, mut slow) =
        (connect_many(&relay, address(2), 100).await, connect_many(&relay, address(4), 100).await);
    let idle = connect_many(&relay, address(3), 100).await;
    join_all(deaf.iter_mut().map(send_without_reading)).await;
    join_all(slow.iter_mut().map(|stream| send_slow_webhook(stream, 100_000))).await;
    let flooded = (well_behaved(&relay, 30).await, probes(&relay, 30).await, memory_mib(&relay.api, "VmHWM"));
    for (name, (client, probe, memory)) in [("quiet", quiet), ("flooded", flooded)] {
        println!(
            "{name}: client median {} ms, max {} ms; probe median {} ms, max {} ms; {memory} MiB",
            client[15], client[29], probe[15], probe[29]
        );
        assert!(memory < MEMORY_MIB_MAX, "{memory} MiB");
    }
    let (refused, replaced) = over_cap(&relay).await;
    assert!(refused + replaced >= 60.0, "20 too many of each: {refused}, {replaced}");
    eventually(LATER, "the deaf clients to be reset", || async {
        (relay.metric("baton_connections_reset_total", "write_timeout").await >= 1.0).then_some(())
    })
    .await;
    drop((deaf, slow, idle));
    relay.until_all_final(LATER).await;
    assert_eq!(relay.count("confirmed").await, 60, "each was executed");
}

/// 32 lists that took long made `/ready` answer 503: they had every connection to the store.
#[tokio::test]
async fn lists_on_mysql_that_take_long_leave_the_store_to_the_others() {
    const LISTS: &str = "SELECT COUNT(*) FROM information_schema.processlist \
         WHERE db = DATABASE() AND id <> CONNECTION_ID() AND info LIKE 'SELECT%ORDER BY createdAt DESC%'";
    let schema = Schema::migrated().await;
    let setup = RelaySetup::relayers(1).engine(TestEngine::Embedded).env("DATABASE_URL", schema.options().url);
    let relay = setup.start().await;
    let mut holder = schema.connect().await;
    // Every read of the table waits from now on.
    sqlx::query("LOCK TABLES transactions WRITE").execute(&mut holder).await.unwrap();
    let mut watcher = schema.connect().await;
    let mut running = async || sqlx::query_scalar::<_, i64>(LISTS).fetch_one(&mut watcher).await.unwrap();
    let lists = join_all((0..40).map(|_| relay.get("/api/v1/relay/transactions")));
    let watch = async {
        let mut most = 0;
        while most < LISTS_MAX as i64 {
            most = most.max(running().await);
        }
        // The other requests have arrived too by the time that these are answered.
        for _ in 0..20 {
            assert_eq!(relay.get("/ready").await.0, 200);
            most = most.max(running().await);
        }
        sqlx::query("UNLOCK TABLES").execute(&mut holder).await.unwrap();
        most
    };
    let (lists, most) = futures::join!(lists, watch);
    assert_eq!(most, LISTS_MAX as i64, "lists at once in the store");
    assert_eq!(lists.iter().filter(|(status, _)| *status == 200).count(), 40, "each has its turn: {lists:?}");
}

/// One request cost 9.7 MB of answer.
#[tokio::test]
async fn an_answer_about_many_bad_fields_is_short() {
    let relay = RelaySetup::relayers(1).start().await;
    let (status, answer) = relay.get(&format!("/api/v1/relay/transactions?{}", "a&".repeat(7000))).await;
    assert_eq!((status, answer["errors"].as_array().map(Vec::len)), (400, Some(1)), "{answer}");
    let fields: serde_json::Map<String, Value> = (0..500).map(|field| (format!("f{field}"), json!(1))).collect();
    let (status, answer) = relay.post(&Value::Object(fields)).await;
    assert_eq!((status, answer["errors"].as_array().map(Vec::len)), (400, Some(10)));
    assert!(answer.to_string().len() < 8 * 1024, "{}", answer.to_string().len());
}
