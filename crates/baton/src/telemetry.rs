//! Logs and metrics of a process: JSON lines, or text for people; durations as histograms with fixed buckets.

use std::io::IsTerminal;
use std::time::Duration;

use metrics::gauge;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use pipeline::Depth;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::LogConfig;

/// Starts the logs. The error names a `LOG_LEVEL` that cannot be parsed.
pub fn start_logs(config: &LogConfig) -> anyhow::Result<()> {
    // Lapin logs the bodies of returned messages; Baton logs their outcome itself, without the body.
    let quiet = if config.level.contains("lapin") { "" } else { ",lapin=error" };
    let filter: Targets = format!("{}{quiet}", config.level)
        .parse()
        .map_err(|error| anyhow::anyhow!("LOG_LEVEL {} cannot be parsed: {error}", config.level))?;
    // A line that cannot be written is lost; reporting that on the same stream panics.
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let started = if config.json {
        let lines = lines.json().flatten_event(true).with_current_span(false).with_span_list(false);
        tracing_subscriber::registry().with(filter).with(lines).try_init()
    } else {
        let lines = lines.with_ansi(std::io::stderr().is_terminal()).with_target(false).compact();
        tracing_subscriber::registry().with(filter).with(lines).try_init()
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the logs: {error}"))
}

/// Histogram buckets in seconds, from 0.1 ms to 1 minute.
const SECONDS: [f64; 17] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Folds the samples of histograms every 5 s. Without it, an unscraped process keeps every sample in memory.
pub async fn keep_up(metrics: PrometheusHandle, shutdown: CancellationToken) {
    const EVERY: Duration = Duration::from_secs(5);
    loop {
        metrics.run_upkeep();
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Installs the metrics recorder of this process.
pub fn start_metrics() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .install_recorder()?;
    Ok(handle)
}

/// Sets the gauges of a queue: messages by state, and the age of the oldest.
pub fn measure_queue(queue: &'static str, depth: &Depth) {
    let parts =
        [("ready", depth.ready), ("in_flight", depth.in_flight), ("delayed", depth.delayed), ("dead", depth.dead)];
    for (state, count) in parts {
        gauge!("baton_queue_messages", "queue" => queue, "state" => state).set(count as f64);
    }
    let age = depth.oldest_age.unwrap_or_default();
    gauge!("baton_queue_oldest_age_seconds", "queue" => queue).set(age.as_secs_f64());
}
