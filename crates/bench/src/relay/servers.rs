//! Submissions of one consumer and of two on MySQL with SQS or RabbitMQ, beside the broker alone.

use super::{SimulatedRelayers, report_latency_and_memory, report_raw_posts, submission_throughput};
use crate::Settings;
use crate::process::{ServiceProcess, service_vars};
use crate::raw::RawBroker;
use crate::receiver::Receiver;
use crate::report::{Report, Spread, median};
use crate::scratch::{Round, ScratchDirectory};
use crate::servers::relay::RelayServers;
use crate::simulated_relayers::RELAYERS;
use crate::transactions;

/// Target on SQS, where the emulator is the limit: share of the raw broker, in percent.
const BROKER_SHARE_MIN: f64 = 60.0;
/// Target on RabbitMQ, in submissions per second.
const SUBMISSIONS_MIN: f64 = 1000.0;
/// From this CPU use of the machine on, in percent, a second consumer cannot add throughput.
const SATURATED_PERCENT: f64 = 90.0;

/// All rounds with the same number of consumers.
#[derive(Default)]
struct ConsumerRounds {
    rates: Vec<f64>,
    machine_percent: Vec<f64>,
}

pub async fn run(settings: &Settings, servers: &RelayServers) -> anyhow::Result<Report> {
    let directory = ScratchDirectory::create(&settings.data_dir, "relay")?;
    let relayers = SimulatedRelayers::start(&directory).await?;
    let receiver = Receiver::start(settings).await?;
    let common = [service_vars(directory.path(), &relayers.urls.join(",")), receiver.vars()].concat();
    let posts = relayers.raw_post_rate(settings).await?;
    let mut broker = servers.raw_broker().await?;

    let (mut drained, mut consumer_mib) = (Vec::new(), 0.0_f64);
    let (mut one, mut two) = (ConsumerRounds::default(), ConsumerRounds::default());
    for round in Round::all(settings.rounds) {
        round.progress(broker.drain_name());
        drained.push(broker.drain_rate(settings.transactions).await?);
        let mut measurements = [(1, &mut one), (2, &mut two)];
        // Alternate the order: the emulator of SQS slows down the more it has done.
        if round.number % 2 == 0 {
            measurements.reverse();
        }
        for (consumers, rounds) in measurements {
            round.progress(format_args!("{consumers} consumers"));
            let vars = [common.clone(), servers.new_queue_vars()?].concat();
            let store = transactions::fill(&vars, settings.transactions).await?;
            let starts = (0..consumers).map(|_| ServiceProcess::start(&["queue-consumer"], &vars));
            let services = futures::future::try_join_all(starts).await?;
            let throughput = submission_throughput(&services, settings.transactions).await?;
            transactions::ensure_none_pending(&*store).await?;
            rounds.rates.push(throughput.rate);
            rounds.machine_percent.push(throughput.cpu_percent);
            consumer_mib = services.iter().map(ServiceProcess::peak_mib).fold(consumer_mib, f64::max);
        }
    }
    let idle = relayers.measure_idle(&[common, servers.new_queue_vars()?].concat()).await?;

    let drained = Spread::of(drained);
    let (one_percent, two_percent) = (median(one.machine_percent), median(two.machine_percent));
    let (one, two) = (Spread::of(one.rates), Spread::of(two.rates));
    let share = 100.0 * one.median / drained.median;
    let mut report = Report::default();
    report_raw_posts(&mut report, posts);
    let note = format!("{}; {}", broker.drain_method(), drained.range);
    report.figure(broker.drain_name(), drained.median, "msg/s", note);
    let note = format!(
        "{} transactions, {RELAYERS} simulated relayers on this machine{}",
        settings.transactions,
        receiver.note()
    );
    report.figure("submissions of one consumer", one.median, "tx/s", format!("{note}; {}", one.range));
    report.figure(format!("  share of {}", broker.drain_name()), share, "%", "");
    report.figure("  CPU use of the machine", one_percent, "%", "100 is all processors");
    report.figure("submissions of two consumers", two.median, "tx/s", two.range);
    report.figure("  CPU use of the machine", two_percent, "%", "100 is all processors");
    report_latency_and_memory(&mut report, &idle, consumer_mib);
    match broker {
        RawBroker::Sqs(_) => {
            report.at_least("submissions of one consumer, share of raw receive + delete", share, BROKER_SHARE_MIN, "%");
        }
        RawBroker::RabbitMq(_) => report.at_least("submissions of one consumer", one.median, SUBMISSIONS_MIN, "tx/s"),
    }
    let name = format!("two consumers, of one, unless one saturates the machine ({one_percent:.0} % in use)");
    report.at_least_or(name, two.median / one.median, 1.0, "×", one_percent >= SATURATED_PERCENT);
    Ok(report)
}
