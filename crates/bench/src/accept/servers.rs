//! Accepts on MySQL with SQS or RabbitMQ, beside the database alone and the broker alone.

use super::{AcceptRounds, load, start_empty_server};
use crate::Settings;
use crate::process::{NO_RELAYERS, ServiceProcess, service_vars};
use crate::report::{Report, Spread, sequential_rate};
use crate::scratch::{Round, ScratchDirectory};
use crate::servers::relay::RelayServers;

/// Target: share of the slower raw part, in percent.
const SLOWER_PART_SHARE_MIN: f64 = 60.0;

pub async fn run(settings: &Settings, servers: &RelayServers) -> anyhow::Result<Report> {
    let directory = ScratchDirectory::create(&settings.data_dir, "accept")?;
    let vars = [service_vars(directory.path(), NO_RELAYERS), servers.new_queue_vars()?].concat();
    let empty_server = start_empty_server(&vars).await?;
    let api = ServiceProcess::start(&["relay-api"], &vars).await?;
    let (mut inserts, mut broker) = (servers.raw_inserts(), servers.raw_broker().await?);

    let (mut empty, mut inserted, mut published) = (Vec::new(), Vec::new(), Vec::new());
    let mut accepts = AcceptRounds::default();
    for round in Round::all(settings.rounds) {
        round.progress("raw multi-row inserts");
        inserted.push(inserts.rate(settings.span()).await?);
        round.progress("raw batch publishes");
        published.push(broker.publish_rate(settings.span()).await?);
        round.progress("empty server");
        empty.push(load(&empty_server, settings).await?.rate());
        round.progress("durable accepts");
        accepts.measure(&api, settings).await?;
    }
    let (inserted, published, empty) = (Spread::of(inserted), Spread::of(published), Spread::of(empty));
    let accepted = Spread::of(accepts.rates.clone());
    let slower = inserted.median.min(published.median);
    let sequential = sequential_rate(&[inserted.median, published.median, empty.median]);
    let connections = format!("{} connections", settings.concurrency);
    let mut report = Report::default();
    let note = format!("{}; {}", inserts.fastest(), inserted.range);
    report.figure("raw multi-row insert", inserted.median, "rows/s", note);
    let note = format!("{}; {}", broker.fastest_publish(), published.range);
    report.figure("raw batch publish", published.median, "msg/s", note);
    report.figure("empty server", empty.median, "req/s", format!("{connections}; {}", empty.range));
    report.figure("  these three in sequence", sequential, "/s", "if they share the same processors");
    report.figure("durable accept", accepted.median, "202/s", format!("{connections}; {}", accepted.range));
    report.figure("  share of the slower raw part", 100.0 * accepted.median / slower, "%", "");
    report.figure("  share of the three in sequence", 100.0 * accepted.median / sequential, "%", "");
    accepts.report(&mut report, &api);
    let name = "durable accept, share of the slower raw part";
    report.at_least(name, 100.0 * accepted.median / slower, SLOWER_PART_SHARE_MIN, "%");
    Ok(report)
}
