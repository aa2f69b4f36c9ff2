//! How many durable 202s a second, beside the two things a 202 is made of: an HTTP answer and a commit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::{Json, Router, middleware, routing};
use pipeline::Outgoing;
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::load::{self, Load};
use super::process::{API_KEY, BODY, Directory, Service, free_port, vars};
use super::table::{Report, median};
use super::{Settings, progress};
use baton::config::{Config, Service as Kind};
use baton::http::body::RawBody;
use baton::http::{auth, server};
use baton::relay::call::DirectRequest;
use baton::relay::message::Envelope;
use baton::relay::store::sqlite::SqliteStore;
use baton::relay::transaction::{Transaction, TransactionId};
use baton::timestamp::Timestamp;

const PATH: &str = "/api/v1/relay/direct";

/// The same server, with the same layers, key and body, that answers 202 and does nothing.
pub async fn serve_nothing(config: Config) -> anyhow::Result<()> {
    let _metrics = baton::telemetry::start_metrics()?;
    let shutdown = CancellationToken::new();
    let listener = server::bind(config.http.listen).await?;
    let keys = Arc::new(config.http.api_keys.clone());
    let answer =
        |_: RawBody| async { (StatusCode::ACCEPTED, Json(json!({ "transactionId": "none", "status": "pending" }))) };
    let routes =
        Router::new().route(PATH, routing::post(answer)).layer(middleware::from_fn_with_state(keys, auth::require_key));
    let routes = server::with_layers(routes, config.http.body_bytes_max, config.http.request_timeout);
    server::serve(listener, routes, shutdown).await;
    Ok(())
}

pub async fn run(settings: &Settings) -> anyhow::Result<Report> {
    let directory = Directory::create(&settings.data_dir, "accept")?;
    let vars = vars(directory.path(), "http://127.0.0.1:1");
    let nothing = Service::start_own(&["empty-server"], free_port()?, &vars).await?;
    let api = Service::start(&["relay-api"], free_port()?, &vars).await?;
    let raw = RawCommits::open(&Directory::create(directory.path(), "raw")?).await?;

    let (mut idle, mut accepted, mut commits) = (Vec::new(), Vec::new(), Vec::new());
    let (mut latency, mut bad) = (Load::default(), 0);
    for round in 1..=settings.rounds {
        progress(format_args!("round {round} of {}: the server doing nothing", settings.rounds));
        idle.push(hit(&nothing, settings).await?.rate());
        progress(format_args!("round {round} of {}: raw group commits", settings.rounds));
        commits.push(raw.rate(settings.concurrency, settings.span()).await?);
        progress(format_args!("round {round} of {}: durable accepts", settings.rounds));
        let load = hit(&api, settings).await?;
        accepted.push(load.rate());
        bad += load.bad;
        latency = load;
    }
    let (idle, accepted, commits) = (median(idle), median(accepted), median(commits));
    let mut report = Report::default();
    let connections = format!("{} connections, median of {}", settings.concurrency, settings.rounds);
    report.figure("same server doing nothing", idle, "req/s", &connections);
    report.figure("raw group commit of row + message", commits, "rows/s", "same statements, no HTTP");
    report.figure("durable accept", accepted, "202/s", &connections);
    report.figure("  of the server doing nothing", 100.0 * accepted / idle, "%", "");
    report.figure("  of the raw group commit", 100.0 * accepted / commits, "%", "");
    report.figure("  answered within, median", latency.within(0.5), "ms", "last round");
    report.figure("  answered within, 99 %", latency.within(0.99), "ms", "last round");
    report.figure("  other answers", bad as f64, "", "");
    report.figure("peak memory of relay-api", api.peak_mib(), "MiB", "");
    report.at_least("durable accept of the server doing nothing", 100.0 * accepted / idle, 50.0, "%");
    report.at_most("peak memory of relay-api", api.peak_mib(), 100.0, "MiB");
    Ok(report)
}

pub async fn hit(service: &Service, settings: &Settings) -> anyhow::Result<Load> {
    let headers = format!("x-api-key: {API_KEY}\r\n");
    let request = load::post(service.address, PATH, &headers, BODY);
    load::run(service.address, request, settings.concurrency, 202, settings.span()).await
}

/// The statements of an accept, without the HTTP around it.
pub struct RawCommits {
    store: SqliteStore,
    queue: SqliteQueue,
    config: Config,
}

impl RawCommits {
    /// On a database of its own.
    pub async fn open(directory: &Directory) -> anyhow::Result<Self> {
        let database = Database::open(&directory.path().join("baton.db"))?;
        Self::on(&database).await
    }

    /// On this database.
    pub async fn on(database: &Database) -> anyhow::Result<Self> {
        let config = Config::from_vars(Kind::Command, |_| None)?;
        let store = SqliteStore::open(database).await?;
        let queue = SqliteQueue::open(database, baton::relay::lane::QUEUE, pipeline::QueueOptions::default()).await?;
        Ok(Self { store, queue, config })
    }

    async fn rate(&self, concurrency: usize, span: Duration) -> anyhow::Result<f64> {
        let deadline = Instant::now() + span;
        let rows = futures::future::try_join_all((0..concurrency).map(|_| async {
            let mut rows = 0_u64;
            while Instant::now() < deadline {
                self.accept_one().await?;
                rows += 1;
            }
            Ok::<_, anyhow::Error>(rows)
        }));
        Ok(rows.await?.iter().sum::<u64>() as f64 / span.as_secs_f64())
    }

    /// Stores so many.
    pub async fn fill(&self, count: u64) -> anyhow::Result<()> {
        const AT_ONCE: u64 = 1000;
        for start in (0..count).step_by(AT_ONCE as usize) {
            let many = (start..count.min(start + AT_ONCE)).map(|_| self.accept_one());
            futures::future::try_join_all(many).await?;
        }
        Ok(())
    }

    async fn accept_one(&self) -> anyhow::Result<()> {
        let request = DirectRequest::parse(&serde_json::from_str(BODY)?)
            .map_err(|_| anyhow::anyhow!("the benchmark's body is not valid"))?;
        let (id, now) = (TransactionId::generate(), Timestamp::now());
        let row = Box::new(Transaction::accepted(id, &request, "bench".to_owned(), now, &self.config.relay.clocks));
        let message: Outgoing = Envelope::of(&row).outgoing();
        self.store.accept_queued(row, None, message, &self.queue).await?;
        Ok(())
    }
}
