//! How many submissions a second one consumer makes, beside raw POSTs to the same development relayers; and how long a
//! transaction takes from the client's POST to the relayer's when nothing else is going on.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::Context;
use pipeline::sqlite::Database;
use serde_json::Value;

use super::accept::RawCommits;
use super::load;
use super::process::{API_KEY, BODY, Directory, RELAYER_KEY, Service, free_port, vars};
use super::table::{Report, median};
use super::{Settings, progress};
use crate::relay::store::TransactionStore;
use crate::relay::store::sqlite::SqliteStore;
use crate::relay::transaction::Status;
use crate::timestamp::Timestamp;

const RELAYERS: u16 = 3;
/// A step that does not come while this runs.
const NEVER: &str = "3600000";
/// Transactions sent one by one for the idle delay.
const IDLE_SENT: usize = 100;
/// The documents' figure, which the bar is fifty times of.
const DOCUMENTED_TPS: f64 = 32.0;

pub async fn run(settings: &Settings) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let directory = Directory::create(&settings.data_dir, "relay")?;
    let (first_port, api_port) = (free_port()?, free_port()?);
    let ports = first_port.to_string();
    let webhook = format!("http://127.0.0.1:{api_port}/api/v1/webhooks/oz-relayer");
    let relayer_dir = directory.path().join("relayers").display().to_string();
    // They take transactions and go no further with them: what is measured is the handing over, not their webhooks.
    let args =
        ["bench-relayers", "--port", &ports, "--webhook-url", &webhook, "--data-dir", &relayer_dir, "--step-ms", NEVER];
    let relayers = Service::start(&args, first_port, &[]).await?;
    let urls: Vec<String> = (0..RELAYERS).map(|index| format!("http://127.0.0.1:{}", first_port + index)).collect();
    let vars = vars(directory.path(), &urls.join(","));

    progress("raw POSTs to the development relayers");
    let mut raw = Vec::new();
    for _ in 0..settings.rounds {
        raw.push(raw_posts(first_port, settings).await?);
    }
    let raw = median(raw);

    progress(format_args!("queueing {} transactions", settings.transactions));
    let database = Database::open(&directory.path().join("baton.db"))?;
    let filler = RawCommits::on(&database).await?;
    filler.fill(settings.transactions).await?;
    let store = SqliteStore::open(&database).await?;
    let consumer_port = free_port()?;
    let started = Instant::now();
    let consumer = Service::start(&["queue-consumer"], consumer_port, &vars).await?;
    let rate = watch(&store, settings.transactions, started).await?;
    let consumer_mib = consumer.peak_mib();
    drop(consumer);

    progress(format_args!("{IDLE_SENT} transactions one by one"));
    let api = Service::start(&["serve"], api_port, &vars).await?;
    let idle = idle_delay(&api, &urls).await?;

    let note = format!("{} transactions, 3 development relayers on the same machine", settings.transactions);
    report.figure("raw POSTs to the relayers", raw, "POST/s", "64 connections to one relayer, median");
    report.figure("submissions of one consumer", rate, "tx/s", note);
    report.figure("  of the raw POSTs", 100.0 * rate / raw, "%", "claim, POST, bind and acknowledge each");
    report.figure("accept to relayer POST, idle, median", idle, "ms", format!("{IDLE_SENT} one by one, one process"));
    report.figure("peak memory of queue-consumer", consumer_mib, "MiB", "");
    report.figure("peak memory of serve", api.peak_mib(), "MiB", "");
    report.figure("peak memory of the relayers", relayers.peak_mib(), "MiB", "not part of the product's bar");
    report.at_least("submissions of one consumer", rate, 50.0 * DOCUMENTED_TPS, "tx/s");
    report.at_most("accept to relayer POST, idle, median", idle, 50.0, "ms");
    report.at_most("peak memory of queue-consumer", consumer_mib, 100.0, "MiB");
    Ok(report)
}

async fn raw_posts(port: u16, settings: &Settings) -> anyhow::Result<f64> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let body = BODY.replace("\"gas\":\"60000\"", "\"gas_limit\":60000");
    let headers = format!("authorization: Bearer {RELAYER_KEY}\r\n");
    let request = load::post(address, "/api/v1/relayers/dev-relayer-1/transactions", &headers, &body);
    Ok(load::run(address, request, 64, 200, settings.span()).await?.rate())
}

/// Waits until nothing is pending; the rate counts from the first submission seen, not from the process's start.
async fn watch(store: &SqliteStore, total: u64, started: Instant) -> anyhow::Result<f64> {
    let mut first: Option<(Instant, u64)> = None;
    let mut said = Instant::now();
    loop {
        let census = store.census().await?;
        let pending = census.open.iter().find(|(status, _)| *status == Status::Pending).map_or(0, |(_, count)| *count);
        let done = total.saturating_sub(pending);
        if first.is_none() && done > 0 {
            first = Some((Instant::now(), done));
        }
        if pending == 0 {
            let (since, before) = first.unwrap_or((started, 0));
            return Ok((total - before) as f64 / since.elapsed().as_secs_f64().max(0.001));
        }
        if said.elapsed() > Duration::from_secs(1) {
            progress(format_args!("{done} of {total} submitted"));
            said = Instant::now();
        }
        anyhow::ensure!(started.elapsed() < Duration::from_secs(300), "{pending} are still pending after 5 minutes");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// From the client's POST to the moment the relayer stored it, by the one clock of this machine.
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
    let url = format!("{}/api/v1/relayers/dev-relayer-{index}/transactions/{}", bound.1, bound.0);
    let record: Value = http.get(url).bearer_auth(RELAYER_KEY).send().await?.json().await?;
    let created = record["data"]["created_at"].as_str().and_then(Timestamp::parse).context("no created_at")?;
    Ok(created.since(sent).as_secs_f64() * 1000.0)
}
