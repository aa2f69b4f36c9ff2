//! Submissions of one consumer on the embedded engine.

use pipeline::sqlite::Database;

use super::{SimulatedRelayers, report_latency_and_memory, report_raw_posts, submission_throughput};
use crate::Settings;
use crate::process::{ServiceProcess, service_vars};
use crate::receiver::Receiver;
use crate::report::Report;
use crate::scratch::{ScratchDirectory, progress};
use crate::simulated_relayers::RELAYERS;
use crate::transactions::EmbeddedAccepts;

/// Target, in submissions per second: fifty times the 32 per second that the existing service plans for.
const SUBMISSIONS_MIN: f64 = 50.0 * 32.0;

pub async fn run(settings: &Settings) -> anyhow::Result<Report> {
    let directory = ScratchDirectory::create(&settings.data_dir, "relay")?;
    let relayers = SimulatedRelayers::start(&directory).await?;
    let receiver = Receiver::start(settings).await?;
    let vars = [service_vars(directory.path(), &relayers.urls.join(",")), receiver.vars()].concat();
    let posts = relayers.raw_post_rate(settings).await?;

    progress(format_args!("queueing {} transactions", settings.transactions));
    let accepts = EmbeddedAccepts::open(&Database::open(&directory.path().join("baton.db"))?).await?;
    accepts.fill(settings.transactions).await?;
    progress("one consumer");
    let (rate, consumer_mib) = {
        let consumers = [ServiceProcess::start(&["queue-consumer"], &vars).await?];
        let rate = submission_throughput(&consumers, settings.transactions).await?.rate;
        (rate, consumers[0].peak_mib())
    };
    accepts.ensure_none_pending().await?;
    let idle = relayers.measure_idle(&vars).await?;

    let mut report = Report::default();
    report_raw_posts(&mut report, posts);
    let note = format!(
        "{} transactions, {RELAYERS} simulated relayers on this machine{}",
        settings.transactions,
        receiver.note()
    );
    report.figure("submissions of one consumer", rate, "tx/s", note);
    report.figure("  share of the raw POSTs", 100.0 * rate / posts, "%", "claim, POST, bind, acknowledge");
    report_latency_and_memory(&mut report, &idle, consumer_mib);
    report.figure("peak memory of the relayers", relayers.process.peak_mib(), "MiB", "not part of the product");
    report.at_least("submissions of one consumer", rate, SUBMISSIONS_MIN, "tx/s");
    Ok(report)
}
