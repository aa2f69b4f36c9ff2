//! Logs and metrics of a process. JSON lines by default, text for people; durations as histograms with fixed buckets.

use std::io::IsTerminal;
use std::time::Duration;

use metrics::gauge;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use pipeline::Depth;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::config::LogConfig;

/// Starts the logs. An unreadable level is an error that names it.
pub fn start_logs(config: &LogConfig) -> anyhow::Result<()> {
    // It shows the bodies of messages that came back; what became of them is logged by us.
    let quiet = if config.level.contains("lapin") { "" } else { ",lapin=error" };
    // The address of a chain's node may have a key in it.
    let filter = EnvFilter::try_new(format!("{}{quiet},alloy_transport_http=warn", config.level))
        .map_err(|error| anyhow::anyhow!("LOG_LEVEL {:?} cannot be read: {error}", config.level))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if config.json {
        builder.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).compact().try_init()
    };
    started.map_err(|error| anyhow::anyhow!("the logs cannot start: {error}"))
}

/// From a tenth of a millisecond to a minute.
const SECONDS: [f64; 17] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Folds the samples of histograms that nobody scrapes, which would otherwise be kept one by one.
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

/// Installs the recorder of this process.
pub fn start_metrics() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .install_recorder()?;
    Ok(handle)
}

/// Shows how full a queue is.
pub fn measure_queue(queue: &'static str, depth: &Depth) {
    let parts =
        [("ready", depth.ready), ("in_flight", depth.in_flight), ("delayed", depth.delayed), ("dead", depth.dead)];
    for (state, count) in parts {
        gauge!("baton_queue_messages", "queue" => queue, "state" => state).set(count as f64);
    }
    let age = depth.oldest_age.unwrap_or_default();
    gauge!("baton_queue_oldest_age_seconds", "queue" => queue).set(age.as_secs_f64());
}
