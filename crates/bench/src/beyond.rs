//! The same two questions as in `accept` and `relay`, on the engines beyond one machine: how much of what database and
//! broker can do by themselves is left when the product uses them.

use std::sync::Arc;
use std::time::Duration;

use super::accept::hit;
use super::load::Load;
use super::process::{Directory, Machine, Service, free_port, vars};
use super::raw::{Broker, new_row};
use super::relay::{IDLE_SENT, Relayers, submitted};
use super::servers::Servers;
use super::table::{Report, Spread, median};
use super::{Settings, progress};
use baton::config::{Config, Service as Kind};
use baton::relay::engine::Engine;
use baton::relay::message::Envelope;
use baton::relay::store::TransactionStore;

/// The share of the slower raw part that an accept must reach, and of the raw queue that a consumer must; in percent.
const BAR: f64 = 60.0;
/// What one consumer must do on RabbitMQ, in submissions a second.
const SUBMISSIONS_MIN: f64 = 1000.0;
/// A machine that is busier than this is full.
const FULL: f64 = 90.0;

/// Durable 202s a second.
pub async fn accept(settings: &Settings, servers: &Servers) -> anyhow::Result<Report> {
    let directory = Directory::create(&settings.data_dir, "accept")?;
    let vars = [vars(directory.path(), "http://127.0.0.1:1"), servers.vars_of_a_new_queue()?].concat();
    let nothing = Service::start_own(&["empty-server"], free_port()?, &vars).await?;
    let api = Service::start(&["relay-api"], free_port()?, &vars).await?;
    let (mut inserts, mut broker) = (servers.raw_inserts(), servers.raw_broker().await?);

    let (mut idle, mut inserted, mut published, mut accepted) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut latency, mut answers, mut bad, mut spent) = (Load::default(), 0, 0, Duration::ZERO);
    let mut busy = Vec::new();
    for round in 1..=settings.rounds {
        let say = |what: &str| progress(format_args!("round {round} of {}: {what}", settings.rounds));
        say("raw multi-row inserts");
        inserted.push(inserts.rate(settings.span()).await?);
        say("raw batch publishes");
        published.push(broker.publish_rate(settings.span()).await?);
        say("the server doing nothing");
        idle.push(hit(&nothing, settings).await?.rate());
        say("durable accepts");
        let (machine, before) = (Machine::now(), api.processor_time());
        let load = hit(&api, settings).await?;
        busy.push(Machine::now().busy_since(&machine));
        spent += api.processor_time().saturating_sub(before);
        accepted.push(load.rate());
        (answers, bad) = (answers + load.good, bad + load.bad);
        latency = load;
    }
    let (inserted, published, idle, accepted) =
        (Spread::of(inserted), Spread::of(published), Spread::of(idle), Spread::of(accepted));
    let slower = inserted.median.min(published.median);
    let in_turn = 1.0 / (1.0 / inserted.median + 1.0 / published.median + 1.0 / idle.median);
    let connections = format!("{} connections", settings.concurrency);
    let mut report = Report::default();
    report.figure("raw multi-row insert", inserted.median, "rows/s", format!("{}; {}", inserts.how(), inserted.range));
    let how = format!("{}; {}", broker.published_how(), published.range);
    report.figure("raw batch publish", published.median, "msg/s", how);
    report.figure("same server doing nothing", idle.median, "req/s", format!("{connections}; {}", idle.range));
    report.figure("  these three in turn", in_turn, "/s", "if all of it is work for the same processors");
    report.figure("durable accept", accepted.median, "202/s", format!("{connections}; {}", accepted.range));
    report.figure("  of the slower raw part", 100.0 * accepted.median / slower, "%", "");
    report.figure("  of the three in turn", 100.0 * accepted.median / in_turn, "%", "");
    report.figure("  answered within, median", latency.within(0.5), "ms", "last round");
    report.figure("  answered within, 99 %", latency.within(0.99), "ms", "last round");
    report.figure("  other answers", bad as f64, "", "");
    report.figure("  relay-api's processor time each", spent.as_secs_f64() * 1e6 / answers.max(1) as f64, "µs", "");
    report.figure("  machine in use meanwhile", median(busy), "%", "of all its processors");
    report.figure("peak memory of relay-api", api.peak_mib(), "MiB", "");
    report.at_least("durable accept of the slower raw part", 100.0 * accepted.median / slower, BAR, "%");
    report.at_most("peak memory of relay-api", api.peak_mib(), 100.0, "MiB");
    Ok(report)
}

/// Submissions a second, of one consumer and of two.
pub async fn relay(settings: &Settings, servers: &Servers) -> anyhow::Result<Report> {
    let directory = Directory::create(&settings.data_dir, "relay")?;
    let relayers = Relayers::start(&directory).await?;
    let common = vars(directory.path(), &relayers.urls.join(","));
    let posts = relayers.raw_posts(settings).await?;
    let mut broker = servers.raw_broker().await?;

    let (mut drained, mut one, mut two) = (Vec::new(), Vec::new(), Vec::new());
    let (mut busy_one, mut busy_two, mut consumer_mib) = (Vec::new(), Vec::new(), 0.0_f64);
    for round in 1..=settings.rounds {
        progress(format_args!("round {round} of {}: {}", settings.rounds, broker.drain_name()));
        drained.push(broker.drain_rate(settings.transactions).await?);
        let mut parts = [(1, &mut one, &mut busy_one), (2, &mut two, &mut busy_two)];
        // Turn and turn about: the emulator of SQS gets slower the more it has done.
        if round % 2 == 0 {
            parts.reverse();
        }
        for (consumers, rates, busy) in parts {
            progress(format_args!("round {round} of {}: {consumers} consumers", settings.rounds));
            let vars = [common.clone(), servers.vars_of_a_new_queue()?].concat();
            let store = fill(&vars, settings.transactions).await?;
            let ports = (0..consumers).map(|_| free_port()).collect::<anyhow::Result<Vec<_>>>()?;
            let starts = ports.into_iter().map(|port| Service::start(&["queue-consumer"], port, &vars));
            let services = futures::future::try_join_all(starts).await?;
            let middle = submitted(&services, &*store, settings.transactions).await?;
            rates.push(middle.rate);
            busy.push(middle.busy);
            consumer_mib = services.iter().map(Service::peak_mib).fold(consumer_mib, f64::max);
        }
    }
    progress(format_args!("{IDLE_SENT} transactions one by one"));
    let vars = [common, servers.vars_of_a_new_queue()?].concat();
    let api = Service::start(&["serve"], relayers.api_port, &vars).await?;
    let idle = relayers.idle_delay(&api).await?;

    let (drained, one, two) = (Spread::of(drained), Spread::of(one), Spread::of(two));
    let (busy_one, busy_two) = (median(busy_one), median(busy_two));
    let mut report = Report::default();
    report.figure("raw POSTs to the relayers", posts, "POST/s", "64 connections to one relayer, median");
    report.figure(broker.drain_name(), drained.median, "msg/s", format!("{}; {}", broker.drained_how(), drained.range));
    let note = format!("{} transactions, 3 development relayers on the same machine", settings.transactions);
    report.figure("submissions of one consumer", one.median, "tx/s", format!("{note}; {}", one.range));
    report.figure(format!("  of the {}", broker.drain_name()), 100.0 * one.median / drained.median, "%", "");
    report.figure("  machine in use meanwhile", busy_one, "%", "of all its processors, over the same middle");
    report.figure("submissions of two consumers", two.median, "tx/s", two.range);
    report.figure("  machine in use meanwhile", busy_two, "%", "of all its processors");
    report.figure("accept to relayer POST, idle, median", idle, "ms", format!("{IDLE_SENT} one by one, one process"));
    report.figure("peak memory of queue-consumer", consumer_mib, "MiB", "");
    report.figure("peak memory of serve", api.peak_mib(), "MiB", "");
    match broker {
        Broker::Sqs(_) => {
            let share = 100.0 * one.median / drained.median;
            report.at_least("submissions of one consumer, of the raw receive + delete", share, BAR, "%");
        }
        Broker::RabbitMq(_) => report.at_least("submissions of one consumer", one.median, SUBMISSIONS_MIN, "tx/s"),
    }
    let more = format!("two consumers, of one, while the machine is not full ({busy_one:.0} % with one)");
    report.at_least_or(more, two.median / one.median, 1.0, "×", busy_one >= FULL);
    report.at_most("accept to relayer POST, idle, median", idle, 50.0, "ms");
    report.at_most("peak memory of queue-consumer", consumer_mib, 100.0, "MiB");
    Ok(report)
}

/// Stores so many rows with their messages; gives back the store.
async fn fill(vars: &[(&'static str, String)], count: u64) -> anyhow::Result<Arc<dyn TransactionStore>> {
    const AT_ONCE: u64 = 500;
    let lookup = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    let config = Config::from_vars(Kind::Command, lookup)?;
    let engine = Engine::open(&config).await?;
    let (store, queue) = (engine.store(), engine.queue());
    for start in (0..count).step_by(AT_ONCE as usize) {
        let rows = (start..count.min(start + AT_ONCE))
            .map(|_| Ok((new_row(&config.relay.clocks)?, None)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let messages: Vec<_> = rows.iter().map(|(row, _)| Envelope::of(row).outgoing()).collect();
        for stored in store.accept(&rows).await {
            stored?;
        }
        for sent in queue.send(&messages).await {
            sent?;
        }
    }
    Ok(store)
}
