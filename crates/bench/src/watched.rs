//! How work goes on while it is watched: how fast, and how busy the machine is with it.

use std::time::{Duration, Instant};

use super::process::{Machine, Service};
use super::progress;

/// Nothing done in so long: something is wrong.
const STANDSTILL: Duration = Duration::from_secs(60);
/// Between two looks, and between two lines about them.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const SAY_EVERY: Duration = Duration::from_secs(2);

/// Waits until so many are done, by the services' own counts after each commit: asking the database would take time of
/// what is being measured. The counts are those of `metric` with `label`.
pub async fn watch(services: &[Service], metric: &str, label: &str, total: u64) -> anyhow::Result<Middle> {
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build()?;
    let mut watched = Watched::start();
    let mut said = Instant::now();
    loop {
        let mut done = 0;
        for service in services {
            let text = http.get(format!("http://{}/metrics", service.address)).send().await?.text().await?;
            let counts = text.lines().filter(|line| line.starts_with(metric) && line.contains(label));
            done += counts.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum::<u64>();
        }
        watched.saw(done);
        if done >= total {
            return Ok(watched.middle(total));
        }
        if said.elapsed() > SAY_EVERY {
            progress(format_args!("{done} of {total}"));
            said = Instant::now();
        }
        anyhow::ensure!(watched.last_step().elapsed() < STANDSTILL, "{done} of {total}, and no more for a minute");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What was seen at some moments.
struct Watched {
    started: Look,
    seen: Vec<Look>,
}

#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    done: u64,
    machine: Machine,
}

/// The middle eight tenths of the work: processes that start and a queue that runs dry are left out.
pub struct Middle {
    /// A second.
    pub rate: f64,
    /// How much of the machine was in use, in percent; 100 is all processors.
    pub busy: f64,
}

impl Look {
    fn now(done: u64) -> Self {
        Self { at: Instant::now(), done, machine: Machine::now() }
    }
}

impl Watched {
    /// Nothing is done yet.
    fn start() -> Self {
        Self { started: Look::now(0), seen: Vec::new() }
    }

    /// So many are done now.
    fn saw(&mut self, done: u64) {
        self.seen.push(Look::now(done));
    }

    /// When some more were done than before.
    fn last_step(&self) -> Instant {
        let done = self.seen.last().map_or(0, |look| look.done);
        let since = self.seen.iter().find(|look| look.done == done && done > 0);
        since.unwrap_or(&self.started).at
    }

    /// Of so many in all.
    fn middle(&self, total: u64) -> Middle {
        let first = self.seen.iter().find(|look| look.done >= total / 10);
        let last = self.seen.iter().rfind(|look| look.done <= total - total / 10);
        let (first, last) = match (first, last) {
            (Some(first), Some(last)) if last.at > first.at && last.done > first.done => (first, last),
            // Too few to have a middle.
            _ => (&self.started, self.seen.last().unwrap_or(&self.started)),
        };
        let seconds = (last.at - first.at).as_secs_f64().max(0.001);
        Middle { rate: (last.done - first.done) as f64 / seconds, busy: last.machine.busy_since(&first.machine) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_tenth_at_each_end_does_not_count() {
        let mut watched = Watched::start();
        // Slow at the start, then ten a second, then slow again.
        for (second, done) in [(10, 5), (11, 10), (12, 20), (15, 50), (19, 90), (30, 95), (60, 100)] {
            let look = Look { at: watched.started.at + Duration::from_secs(second), ..Look::now(done) };
            watched.seen.push(look);
        }
        assert_eq!(watched.middle(100).rate.round(), 10.0);
        assert_eq!(watched.last_step(), watched.started.at + Duration::from_secs(60));
    }

    #[test]
    fn what_is_over_at_once_has_no_middle() {
        let mut watched = Watched::start();
        watched.seen.push(Look { at: watched.started.at + Duration::from_secs(2), ..Look::now(100) });
        assert_eq!(watched.middle(100).rate, 50.0);
    }
}
