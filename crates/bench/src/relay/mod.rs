//! Submissions per second of the consumers, beside raw POSTs to the same relayers; and the time from the client's POST to
//! the relayer's when nothing else is going on.

pub mod embedded;
pub mod servers;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use baton::timestamp::Timestamp;
use relayer_sim::server::ports::{free_port, free_row};
use serde_json::Value;

use crate::Settings;
use crate::load;
use crate::process::{API_KEY, ServiceProcess, Vars};
use crate::report::{Report, median};
use crate::scratch::{Round, ScratchDirectory, progress};
use crate::simulated_relayers::{RELAYER_KEY, RELAYERS, transactions_path};
use crate::throughput::{self, Throughput};
use crate::transactions::BODY;

/// Transactions that the latency measurement sends, each after the one before is submitted.
const IDLE_TRANSACTIONS: usize = 100;
/// Connections of the raw POSTs.
const RAW_CONNECTIONS: usize = 64;
/// Target for the latency when idle, in milliseconds.
const IDLE_LATENCY_MAX_MS: f64 = 50.0;
/// Target for the peak memory of `queue-consumer`, in MiB.
const MEMORY_MAX_MIB: f64 = 100.0;

/// The simulated relayers, in one process.
struct SimulatedRelayers {
    process: ServiceProcess,
    urls: Vec<String>,
    /// Port that their webhooks go to.
    api_port: u16,
}

impl SimulatedRelayers {
    async fn start(directory: &ScratchDirectory) -> anyhow::Result<Self> {
        let (first_port, api_port) = (free_row(RELAYERS), free_port());
        let port = first_port.to_string();
        let webhook = format!("http://127.0.0.1:{api_port}/api/v1/webhooks/oz-relayer");
        let data = directory.path().join("relayers").display().to_string();
        let args = ["relayers", "--port", &port, "--webhook-url", &webhook, "--data-dir", &data];
        let process = ServiceProcess::start_own(first_port, &args, &Vars::new()).await?;
        let urls = (first_port..first_port + RELAYERS).map(|port| format!("http://127.0.0.1:{port}")).collect();
        Ok(Self { process, urls, api_port })
    }

    /// POSTs per second to the first relayer, without the product.
    async fn raw_post_rate(&self, settings: &Settings) -> anyhow::Result<f64> {
        let address = self.process.address;
        let body = BODY.replace("\"gas\":\"60000\"", "\"gas_limit\":60000");
        let headers = format!("authorization: Bearer {RELAYER_KEY}\r\n");
        let mut rates = Vec::new();
        for round in Round::all(settings.rounds) {
            round.progress("raw POSTs to a simulated relayer");
            let request = load::post(address, &transactions_path(1), &headers, &body);
            rates.push(load::run(address, request, RAW_CONNECTIONS, 200, settings.span()).await?.rate());
        }
        Ok(median(rates))
    }

    /// Starts `serve` and measures the median time from the client's POST until the relayer has stored the transaction.
    async fn measure_idle(&self, vars: &Vars) -> anyhow::Result<IdleLatency> {
        progress(format_args!("{IDLE_TRANSACTIONS} transactions one by one"));
        let service = ServiceProcess::start_on(self.api_port, &["serve"], vars).await?;
        // By then the first health checks of the relayers are done.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let http = reqwest::Client::builder().no_proxy().build()?;
        let mut latencies = Vec::new();
        for _ in 0..IDLE_TRANSACTIONS {
            latencies.push(self.submit_one(&http, service.address).await?);
        }
        Ok(IdleLatency { median_ms: median(latencies), service })
    }

    /// Milliseconds from the client's POST to the relayer's `created_at`; both processes read this machine's clock.
    async fn submit_one(&self, http: &reqwest::Client, api: SocketAddr) -> anyhow::Result<f64> {
        let base = format!("http://{api}/api/v1/relay");
        let sent_at = Timestamp::from(std::time::SystemTime::now());
        let post = http.post(format!("{base}/direct")).header("x-api-key", API_KEY);
        let accepted: Value = post.header("content-type", "application/json").body(BODY).send().await?.json().await?;
        let id = accepted["transactionId"].as_str().context("a response without transactionId")?;

        let deadline = Instant::now() + Duration::from_secs(10);
        let (relayer_tx_id, relayer_url) = loop {
            let status = http.get(format!("{base}/status/{id}")).header("x-api-key", API_KEY);
            let row: Value = status.send().await?.json().await?;
            if let (Some(tx_id), Some(url)) = (row["ozRelayerTxId"].as_str(), row["ozRelayerUrl"].as_str()) {
                break (tx_id.to_owned(), url.to_owned());
            }
            anyhow::ensure!(Instant::now() < deadline, "{id} was not submitted within 10 s");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let index = self.urls.iter().position(|url| *url == relayer_url).context("an unknown relayer")?;
        let url = format!("{relayer_url}{}/{relayer_tx_id}", transactions_path(index + 1));
        let record: Value = http.get(url).bearer_auth(RELAYER_KEY).send().await?.json().await?;
        let created = record["data"]["created_at"].as_str().and_then(Timestamp::parse).context("no created_at")?;
        Ok(created.since(sent_at).as_secs_f64() * 1000.0)
    }
}

/// The latency of a `serve` that has nothing else to do.
struct IdleLatency {
    median_ms: f64,
    service: ServiceProcess,
}

/// Waits until the consumers have submitted `total` transactions.
async fn submission_throughput(consumers: &[ServiceProcess], total: u64) -> anyhow::Result<Throughput> {
    throughput::measure(consumers, "baton_transactions_total{", "\"submitted\"", total).await
}

fn report_raw_posts(report: &mut Report, rate: f64) {
    let note = format!("{RAW_CONNECTIONS} connections to one relayer, median");
    report.figure("raw POSTs to the relayers", rate, "POST/s", note);
}

fn report_latency_and_memory(report: &mut Report, idle: &IdleLatency, consumer_mib: f64) {
    let name = "accept to relayer POST, idle, median";
    report.figure(name, idle.median_ms, "ms", format!("{IDLE_TRANSACTIONS} one by one, one process"));
    report.figure("peak memory of queue-consumer", consumer_mib, "MiB", "");
    report.figure("peak memory of serve", idle.service.peak_mib(), "MiB", "");
    report.at_most(name, idle.median_ms, IDLE_LATENCY_MAX_MS, "ms");
    report.at_most("peak memory of queue-consumer", consumer_mib, MEMORY_MAX_MIB, "MiB");
}
