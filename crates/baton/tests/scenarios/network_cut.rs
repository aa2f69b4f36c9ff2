//! The network between Baton and its relayer loses every packet right after a submission was written, for longer than the
//! submission may take. The kernel would deliver the bytes when the network is back, after Baton has looked for the
//! submission in vain and sent it again.
//!
//! Real packets and a real kernel: relayer and Baton run in two network namespaces. The relayer lives in the test's own
//! process, so each test starts itself again inside the relayer's namespace.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use harness::ports::free_port;
use harness::process::{Process, Program};
use harness::relayer::{Relayer, RelayerOptions};
use harness::wait::eventually_ok;
use serde_json::json;
use tokio::io::copy;
use tokio::net::{TcpListener, TcpStream};

use crate::relay_fixture::{API_KEY, LATER, SOON, TO, WEBHOOK_KEY, answer};

/// Submissions and the relayer's handler may take 5 s. Unacknowledged bytes are sent again after 0.2, 0.4, 0.8 … 13.4 and
/// 26.7 s: the last ones find a network again, after the submission was repeated at about 20 s.
const LIMIT_MS: &str = "5000";
const CUT_FOR: Duration = Duration::from_secs(14);
/// Submissions at once, each on a connection of its own.
const SUBMISSIONS: usize = 4;
/// Larger than any request but a submission.
const CALL_DATA_BYTES: usize = 1000;
const RELAYER_PORT: u16 = 8080;
/// The relayer's and Baton's end of the network that is cut, and of the one that carries the test's own requests.
const RELAYER_IP: &str = "10.99.0.1";
const BATON_IP: &str = "10.99.0.2";
const TEST_IP: &str = "10.98.0.1";
const API_IP: &str = "10.98.0.2";
/// Set inside the namespaces: the name that both begin with.
const INSIDE: &str = "BATON_TEST_NAMESPACES";

#[tokio::test]
async fn network_cut_until_the_request_is_given_up() {
    let Some(names) = inside("network_cut_until_the_request_is_given_up") else { return };
    let network = Network::new(names).await;
    let mut baton = network.start("serve", "baton").await;
    let sent = network.lose_submissions(&mut baton).await;
    tokio::time::sleep(CUT_FOR).await;
    network.restore();
    network.check(&baton, &sent).await;
}

#[tokio::test]
async fn network_cut_and_the_process_killed() {
    let Some(names) = inside("network_cut_and_the_process_killed") else { return };
    let network = Network::new(names).await;
    let mut baton = network.start("serve", "baton").await;
    let sent = network.lose_submissions(&mut baton).await;
    baton.kill9().await.unwrap();
    baton.restart().await.unwrap();
    tokio::time::sleep(CUT_FOR).await;
    network.restore();
    network.check(&baton, &sent).await;
}

/// A frozen process cannot close its connections; the kernel must.
#[tokio::test]
async fn network_cut_and_the_process_frozen() {
    let Some(names) = inside("network_cut_and_the_process_frozen") else { return };
    let network = Network::new(names).await;
    let mut baton = network.start("serve", "baton").await;
    let sent = network.lose_submissions(&mut baton).await;
    baton.sigstop().unwrap();
    let second = network.start("serve", "baton2").await;
    tokio::time::sleep(CUT_FOR).await;
    network.restore();
    network.check(&second, &sent).await;
    baton.sigcont().unwrap();
}

/// The name of the namespaces, if this process runs inside them. Otherwise makes them, runs the test there, and removes
/// them.
fn inside(test: &str) -> Option<String> {
    if let Ok(names) = std::env::var(INSIDE) {
        return Some(names);
    }
    let namespaces = Namespaces::make();
    let test = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
    let status = Command::new("ip")
        .args(["netns", "exec", &namespaces.relayer()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, &namespaces.0)
        .status()
        .unwrap();
    assert!(status.success(), "{test} failed inside its namespaces");
    None
}

/// Two network namespaces, joined by two links. Removed on drop.
struct Namespaces(String);

impl Namespaces {
    fn make() -> Self {
        let namespaces = Self(format!("baton-{}-{:x}", std::process::id(), rand::random::<u16>()));
        let (relayer, baton) = (namespaces.relayer(), namespaces.baton());
        for name in [&relayer, &baton] {
            ip(&["netns", "add", name]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        for (link, here, there) in [("cut0", RELAYER_IP, BATON_IP), ("test0", TEST_IP, API_IP)] {
            ip(&["-n", &relayer, "link", "add", link, "type", "veth", "peer", "name", link, "netns", &baton]);
            for (name, address) in [(&relayer, here), (&baton, there)] {
                ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", link]);
                ip(&["-n", name, "link", "set", link, "up"]);
            }
        }
        namespaces
    }

    fn relayer(&self) -> String {
        format!("{}-r", self.0)
    }

    fn baton(&self) -> String {
        format!("{}-b", self.0)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in [self.relayer(), self.baton()] {
            // One that was not made cannot be removed.
            let _ = Command::new("ip").args(["netns", "delete", &name]).output();
        }
    }
}

/// Runs `ip`.
///
/// # Panics
/// If it fails, with what it needs.
fn ip(args: &[&str]) -> Output {
    let needs = "these tests need iproute2 (`apt-get install iproute2`, or `scripts/test tools`), root, and a kernel with \
                 network namespaces and veth";
    let output = Command::new("ip").args(args).output().unwrap_or_else(|error| panic!("no `ip` ({error}): {needs}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`ip {}` failed: {said}\n{needs}", args.join(" "));
    output
}

/// A relayer in this namespace, and Baton in the other.
struct Network {
    namespaces: String,
    relayer: Relayer,
    data: tempfile::TempDir,
    http: reqwest::Client,
    api_port: u16,
}

impl Network {
    async fn new(namespaces: String) -> Self {
        let api_port = free_port();
        let webhooks = format!("http://{API_IP}:{api_port}/api/v1/webhooks/oz-relayer");
        let relayer = Relayer::start(RelayerOptions::new("relayer-1").webhook(webhooks, WEBHOOK_KEY)).await;
        // The relayer listens on 127.0.0.1 only.
        let (listener, port) = (TcpListener::bind((RELAYER_IP, RELAYER_PORT)).await.unwrap(), relayer.port());
        tokio::spawn(async move {
            loop {
                let (mut from, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let mut to = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                    let ((mut from_read, mut from_write), (mut to_read, mut to_write)) = (from.split(), to.split());
                    // The end of Baton's side is not passed on: a relayer finishes what it has read. A reset is an error.
                    let _ = tokio::join!(copy(&mut from_read, &mut to_write), copy(&mut to_read, &mut from_write));
                });
            }
        });
        let (http, data) = (harness::http_client(), tempfile::tempdir().unwrap());
        let network = Self { namespaces, relayer, data, http, api_port };
        // Without this an address that is gone would be looked up on the link and the loss be noticed.
        let link = ip(&["-n", &network.relayer_namespace(), "-br", "link", "show", "cut0"]);
        let link = String::from_utf8_lossy(&link.stdout).into_owned();
        let hardware = link.split_whitespace().nth(2).unwrap();
        let baton = network.baton_namespace();
        ip(&["-n", &baton, "neigh", "replace", RELAYER_IP, "lladdr", hardware, "dev", "cut0", "nud", "permanent"]);
        network
    }

    fn relayer_namespace(&self) -> String {
        format!("{}-r", self.namespaces)
    }

    fn baton_namespace(&self) -> String {
        format!("{}-b", self.namespaces)
    }

    /// Packets to the relayer vanish: its address is gone.
    fn cut(&self) {
        let namespace = self.relayer_namespace();
        ip(&["-n", &namespace, "addr", "del", &format!("{RELAYER_IP}/24"), "dev", "cut0"]);
    }

    fn restore(&self) {
        let namespace = self.relayer_namespace();
        ip(&["-n", &namespace, "addr", "add", &format!("{RELAYER_IP}/24"), "dev", "cut0"]);
    }

    /// Starts Baton in its namespace. A second one listens on the next port.
    async fn start(&self, service: &str, name: &str) -> Process {
        let port = if name == "baton" { self.api_port } else { free_port() };
        let env: BTreeMap<String, String> = [
            ("LOG_LEVEL", "info"),
            ("HOST", "0.0.0.0"),
            ("PORT", &port.to_string()),
            ("BATON_DATA_DIR", &self.data.path().display().to_string()),
            ("OZ_RELAYER_URLS", &format!("http://{RELAYER_IP}:{RELAYER_PORT}")),
            ("OZ_RELAYER_API_KEY", self.relayer.api_key()),
            ("RELAY_API_KEY", API_KEY),
            ("WEBHOOK_SIGNING_KEY", WEBHOOK_KEY),
            ("RELAYER_SUBMIT_TIMEOUT_MS", LIMIT_MS),
            ("RELAYER_HANDLER_TIMEOUT_MS", LIMIT_MS),
            ("RELAYER_CLOCK_SKEW_MS", "1"),
            ("RELAYER_HEALTH_INTERVAL_MS", "1000"),
            ("RECONCILE_INTERVAL_MS", "100"),
            ("RECONCILE_ABSENT_MS", "1000"),
            ("CONSUMER_DEAD_AFTER_MS", "2000"),
            ("QUEUE_LEASE_MS", "2000"),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
        let binary = PathBuf::from(env!("CARGO_BIN_EXE_baton"));
        let program =
            Program::new("ip").args(["netns", "exec", &self.baton_namespace()]).arg(binary).arg(service).envs(env);
        let mut baton = program.start().unwrap();
        baton.wait_ready(&format!("http://{API_IP}:{port}/ready"), SOON).await.unwrap();
        baton
    }

    /// Sends transactions; cuts the network so that their submissions are written and lost. Returns their call data.
    async fn lose_submissions(&self, baton: &mut Process) -> Vec<String> {
        // Leaves as many idle connections, so that the submissions need not connect first.
        self.send(0).await;
        self.until_answered().await;
        self.cut();
        let sent = self.send(SUBMISSIONS).await;
        eventually_ok(SOON, "submissions to be written", || async {
            let written = self.sockets().into_iter().filter(|socket| socket.unacknowledged > CALL_DATA_BYTES).count();
            if written > 0 { Ok(()) } else { Err(baton.log_excerpt()) }
        })
        .await;
        assert_eq!(self.relayer.accepted().len(), SUBMISSIONS, "they did not arrive");
        sent
    }

    /// Sends transactions with different call data, all at once.
    async fn send(&self, first: usize) -> Vec<String> {
        let all = (first..first + SUBMISSIONS).map(|serial| async move {
            let data = format!("0x{}{serial:08x}", "ab".repeat(CALL_DATA_BYTES));
            let body = json!({ "to": TO, "value": "1", "data": data, "gas": 60000, "speed": "fast" });
            let (status, accepted) =
                answer(self.request(reqwest::Method::POST, "/api/v1/relay/direct").json(&body)).await;
            assert_eq!(status, 202, "{accepted}");
            data
        });
        futures::future::join_all(all).await
    }

    fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let url = format!("http://{API_IP}:{}{path}", self.api_port);
        self.http.request(method, url).header("x-api-key", API_KEY).timeout(SOON)
    }

    /// Waits until Baton has the relayer's answers to all submissions.
    async fn until_answered(&self) {
        eventually_ok(SOON, "the relayer's answers", || async {
            let pending = self.request(reqwest::Method::GET, "/api/v1/relay/transactions?status=pending");
            let (_, page) = answer(pending).await;
            if page["transactions"].as_array().is_some_and(Vec::is_empty) { Ok(()) } else { Err(page) }
        })
        .await;
    }

    /// Waits until every transaction is at the relayer and no connection has anything left to deliver; then each
    /// transaction has one record.
    async fn check(&self, baton: &Process, sent: &[String]) {
        let records =
            |data: &str| self.relayer.accepted().iter().filter(|record| record.field("data") == *data).count();
        eventually_ok(LATER, "every transaction to be at the relayer", || async {
            let missing = sent.iter().filter(|data| records(data) == 0).count();
            if missing == 0 { Ok(()) } else { Err(format!("{missing} are missing\n{}", baton.log_excerpt())) }
        })
        .await;
        eventually_ok(LATER, "connections to have nothing left to deliver", || async {
            let left: Vec<Socket> =
                self.sockets().into_iter().filter(|socket| socket.unacknowledged > CALL_DATA_BYTES).collect();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
        self.until_handled().await;
        let output = baton.output();
        assert!(output.contains("its outcome stays unknown") || output.contains("resend"), "{}", baton.log_excerpt());
        let counts: Vec<usize> = sent.iter().map(|data| records(data)).collect();
        assert_eq!(counts, vec![1; SUBMISSIONS], "records of each transaction\n{}", baton.log_excerpt());
    }

    /// Waits until the relayer has handled what has arrived in its namespace: the forwarder has read it, and later requests
    /// on the same way were answered.
    async fn until_handled(&self) {
        eventually_ok(SOON, "everything that arrived to be read", || async {
            let unread: usize = table(&self.relayer_namespace()).iter().map(|row| queue(row, 1)).sum();
            if unread == 0 { Ok(()) } else { Err(unread) }
        })
        .await;
        for _ in 0..20 {
            let request = self.http.get(format!("http://{RELAYER_IP}:{RELAYER_PORT}/api/v1/relayers"));
            answer(request.bearer_auth(self.relayer.api_key())).await;
        }
    }

    /// The connections from Baton's namespace to the relayer.
    fn sockets(&self) -> Vec<Socket> {
        let port = format!(":{RELAYER_PORT:04X}");
        let rows = table(&self.baton_namespace()).into_iter();
        let to_relayer = rows.filter(|row| row[2].ends_with(&port));
        to_relayer.map(|row| Socket { state: row[3].clone(), unacknowledged: queue(&row, 0) }).collect()
    }
}

/// The TCP connections of a namespace, by column.
fn table(namespace: &str) -> Vec<Vec<String>> {
    let output = ip(&["netns", "exec", namespace, "cat", "/proc/net/tcp"]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().map(str::to_owned).collect());
    rows.collect()
}

/// Bytes in the send queue (0) or the receive queue (1) of a connection.
fn queue(row: &[String], which: usize) -> usize {
    usize::from_str_radix(row[4].split(':').nth(which).unwrap(), 16).unwrap()
}

/// A line of `/proc/net/tcp`.
#[derive(Debug)]
#[expect(dead_code, reason = "shown in a failure")]
struct Socket {
    state: String,
    unacknowledged: usize,
}
