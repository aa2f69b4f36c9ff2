//! Accepts on the embedded engine, beside the two parts of an accept: an HTTP response and a commit.

use pipeline::sqlite::Database;

use super::{AcceptRounds, load, start_empty_server};
use crate::Settings;
use crate::process::{NO_RELAYERS, ServiceProcess, service_vars};
use crate::receiver::Receiver;
use crate::report::{Report, median};
use crate::scratch::{Round, ScratchDirectory};
use crate::transactions::EmbeddedAccepts;

/// Target: share of the empty server's rate, in percent.
const EMPTY_SERVER_SHARE_MIN: f64 = 50.0;

pub async fn run(settings: &Settings) -> anyhow::Result<Report> {
    let directory = ScratchDirectory::create(&settings.data_dir, "accept")?;
    let receiver = Receiver::start(settings).await?;
    let vars = [service_vars(directory.path(), NO_RELAYERS), receiver.vars()].concat();
    let empty_server = start_empty_server(&vars).await?;
    let api = ServiceProcess::start(&["relay-api"], &vars).await?;
    let raw_directory = ScratchDirectory::create(directory.path(), "raw")?;
    let raw = EmbeddedAccepts::open(&Database::open(&raw_directory.path().join("baton.db"))?).await?;

    let (mut empty, mut commits, mut accepts) = (Vec::new(), Vec::new(), AcceptRounds::default());
    for round in Round::all(settings.rounds) {
        round.progress("empty server");
        empty.push(load(&empty_server, settings).await?.rate());
        round.progress("raw group commits");
        commits.push(raw.rate(settings.concurrency, settings.span()).await?);
        round.progress("durable accepts");
        accepts.measure(&api, settings).await?;
    }
    let (empty, commits, accepted) = (median(empty), median(commits), median(accepts.rates.clone()));
    let connections = format!("{} connections, median of {}", settings.concurrency, settings.rounds);
    let mut report = Report::default();
    report.figure("empty server", empty, "req/s", format!("{connections}; same HTTP layers, no work"));
    report.figure("raw group commit of row + message", commits, "rows/s", "same statements, no HTTP");
    report.figure("durable accept", accepted, "202/s", format!("{connections}{}", receiver.note()));
    report.figure("  share of the empty server", 100.0 * accepted / empty, "%", "");
    report.figure("  share of the raw group commit", 100.0 * accepted / commits, "%", "");
    accepts.report(&mut report, &api);
    let name = "durable accept, share of the empty server";
    report.at_least(name, 100.0 * accepted / empty, EMPTY_SERVER_SHARE_MIN, "%");
    Ok(report)
}
