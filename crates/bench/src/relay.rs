//! How many submissions a second one consumer makes, beside raw POSTs to the same development relayers; and how long a
//! transaction takes from the client's POST to the relayer's when nothing else is going on.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::Context;
use pipeline::sqlite::Database;
use serde_json::Value;

use super::accept::RawCommits;
use super::load;
use super::process::{API_KEY, BODY, Directory, Service, free_port, vars};
use super::simulated_relayers::{RELAYER_KEY, RELAYERS, transactions_path};
use super::table::{Report, median};
use super::watched::{Middle, watch};
use super::{Settings, progress};
use baton::relay::store::TransactionStore;
use baton::relay::store::sqlite::SqliteStore;
use baton::relay::transaction::Status;
use baton::timestamp::Timestamp;

/// Transactions sent one by one for the idle delay.
pub const IDLE_SENT: usize = 100;
/// The documents' figure, which the bar is fifty times of.
const DOCUMENTED_TPS: f64 = 32.0;

pub async fn run(settings: &Settings) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let directory = Directory::create(&settings.data_dir, "relay")?;
    let relayers = Relayers::start(&directory).await?;
    let vars = vars(directory.path(), &relayers.urls.join(","));
    let raw = relayers.raw_posts(settings).await?;

    progress(format_args!("queueing {} transactions", settings.transactions));
    let database = Database::open(&directory.path().join("baton.db"))?;
    let filler = RawCommits::on(&database).await?;
    filler.fill(settings.transactions).await?;
    let store = SqliteStore::open(&database).await?;
    let consumer = [Service::start(&["queue-consumer"], free_port()?, &vars).await?];
    let rate = submitted(&consumer, &store, settings.transactions).await?.rate;
    let [consumer] = consumer;
    let consumer_mib = consumer.peak_mib();
    drop(consumer);

    progress(format_args!("{IDLE_SENT} transactions one by one"));
    let api = Service::start(&["serve"], relayers.api_port, &vars).await?;
    let idle = relayers.idle_delay(&api).await?;

    let note = format!("{} transactions, 3 development relayers on the same machine", settings.transactions);
    report.figure("raw POSTs to the relayers", raw, "POST/s", "64 connections to one relayer, median");
    report.figure("submissions of one consumer", rate, "tx/s", note);
    report.figure("  of the raw POSTs", 100.0 * rate / raw, "%", "claim, POST, bind and acknowledge each");
    report.figure("accept to relayer POST, idle, median", idle, "ms", format!("{IDLE_SENT} one by one, one process"));
    report.figure("peak memory of queue-consumer", consumer_mib, "MiB", "");
    report.figure("peak memory of serve", api.peak_mib(), "MiB", "");
    report.figure("peak memory of the relayers", relayers.service.peak_mib(), "MiB", "not part of the product's bar");
    report.at_least("submissions of one consumer", rate, 50.0 * DOCUMENTED_TPS, "tx/s");
    report.at_most("accept to relayer POST, idle, median", idle, 50.0, "ms");
    report.at_most("peak memory of queue-consumer", consumer_mib, 100.0, "MiB");
    Ok(report)
}

/// Three development relayers in a process of their own.
pub struct Relayers {
    /// The process.
    pub service: Service,
    /// Where each is.
    pub urls: Vec<String>,
    /// Where they think the API is.
    pub api_port: u16,
    first_port: u16,
}

impl Relayers {
    /// They take transactions and go no further with them: what is measured is the handing over, not their webhooks.
    pub async fn start(directory: &Directory) -> anyhow::Result<Self> {
        let (first_port, api_port) = (free_port()?, free_port()?);
        let port = first_port.to_string();
        let webhook = format!("http://127.0.0.1:{api_port}/api/v1/webhooks/oz-relayer");
        let data = directory.path().join("relayers").display().to_string();
        let args = ["relayers", "--port", &port, "--webhook-url", &webhook, "--data-dir", &data];
        let service = Service::start_own(&args, first_port, &[]).await?;
        let urls = (0..RELAYERS).map(|index| format!("http://127.0.0.1:{}", first_port + index)).collect();
        Ok(Self { service, urls, api_port, first_port })
    }

    /// POSTs a second to one of them, the median.
    pub async fn raw_posts(&self, settings: &Settings) -> anyhow::Result<f64> {
        progress("raw POSTs to the development relayers");
        let mut raw = Vec::new();
        for _ in 0..settings.rounds {
            raw.push(raw_posts(self.first_port, settings).await?);
        }
        Ok(median(raw))
    }

    /// From the client's POST to the moment the relayer stored it, by the one clock of this machine; in milliseconds.
    pub async fn idle_delay(&self, api: &Service) -> anyhow::Result<f64> {
        idle_delay(api, &self.urls).await
    }
}

async fn raw_posts(port: u16, settings: &Settings) -> anyhow::Result<f64> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let body = BODY.replace("\"gas\":\"60000\"", "\"gas_limit\":60000");
    let headers = format!("authorization: Bearer {RELAYER_KEY}\r\n");
    let request = load::post(address, &transactions_path(1), &headers, &body);
    Ok(load::run(address, request, 64, 200, settings.span()).await?.rate())
}

/// Waits until these services have submitted all of the store's transactions.
pub async fn submitted(services: &[Service], store: &dyn TransactionStore, total: u64) -> anyhow::Result<Middle> {
    let middle = watch(services, "baton_transactions_total{", "\"submitted\"", total).await?;
    let census = store.census().await?;
    let pending = census.open.iter().find(|(status, _)| *status == Status::Pending).map_or(0, |(_, count)| *count);
    anyhow::ensure!(pending == 0, "{pending} of {total} are pending, after as many were submitted");
    Ok(middle)
}

async fn idle_delay(api: &Service, relayers: &[String]) -> anyhow::Result<f64> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let base = format!("http://{}/api/v1", api.address);
    // The first health checks must be over.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut delays = Vec::new();
    for _ in 0..IDLE_SENT {
        let sent = Timestamp::now();
        let posted = http.post(format!("{base}/relay/direct")).header("x-api-key", API_KEY);
        let answer: Value = posted.header("content-type", "application/json").body(BODY).send().await?.json().await?;
        let id = answer["transactionId"].as_str().context("no transactionId in the answer")?.to_owned();
        delays.push(stored_after(&http, &base, &id, relayers, sent).await?);
    }
    Ok(median(delays))
}

async fn stored_after(
    http: &reqwest::Client,
    base: &str,
    id: &str,
    relayers: &[String],
    sent: Timestamp,
) -> anyhow::Result<f64> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let bound = loop {
        let status = http.get(format!("{base}/relay/status/{id}")).header("x-api-key", API_KEY);
        let row: Value = status.send().await?.json().await?;
        if let (Some(tx_id), Some(url)) = (row["ozRelayerTxId"].as_str(), row["ozRelayerUrl"].as_str()) {
            break (tx_id.to_owned(), url.to_owned());
        }
        anyhow::ensure!(Instant::now() < deadline, "{id} was not submitted within 10 s");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let index = relayers.iter().position(|url| *url == bound.1).context("an unknown relayer")? + 1;
    let url = format!("{}{}/{}", bound.1, transactions_path(index), bound.0);
    let record: Value = http.get(url).bearer_auth(RELAYER_KEY).send().await?.json().await?;
    let created = record["data"]["created_at"].as_str().and_then(Timestamp::parse).context("no created_at")?;
    Ok(created.since(sent).as_secs_f64() * 1000.0)
}
