//! Throughput of services that work through a full queue, and how busy the machine is meanwhile.

use std::time::{Duration, Instant};

use crate::cpu::MachineCpu;
use crate::process::ServiceProcess;
use crate::scratch::progress;

/// The measurement fails when the counters do not grow for this long.
const STALL_MAX: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// Throughput over the middle 80 % of the work, which leaves out process start and the last messages of the queue.
pub struct Throughput {
    /// Items per second.
    pub rate: f64,
    /// Share of all processors in use, in percent.
    pub cpu_percent: f64,
}

/// Polls the services' counters until they add up to `total`: those lines of `/metrics` that start with `metric` and
/// contain `label`. Counting rows in the database would compete with the work under test.
pub async fn measure(services: &[ServiceProcess], metric: &str, label: &str, total: u64) -> anyhow::Result<Throughput> {
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build()?;
    let mut samples = Samples::start();
    let mut last_progress = Instant::now();
    loop {
        let mut done = 0;
        for service in services {
            let text = http.get(format!("http://{}/metrics", service.admin)).send().await?.text().await?;
            let counters = text.lines().filter(|line| line.starts_with(metric) && line.contains(label));
            done += counters.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum::<u64>();
        }
        samples.taken.push(Sample::now(done));
        if done >= total {
            return Ok(samples.throughput(total));
        }
        if last_progress.elapsed() > PROGRESS_INTERVAL {
            progress(format_args!("{done} of {total}"));
            last_progress = Instant::now();
        }
        let stalled = samples.last_growth().elapsed();
        anyhow::ensure!(stalled < STALL_MAX, "stalled at {done} of {total} for {} s", stalled.as_secs());
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

struct Samples {
    start: Sample,
    taken: Vec<Sample>,
}

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    /// Items done since the start.
    done: u64,
    cpu: MachineCpu,
}

impl Sample {
    fn now(done: u64) -> Self {
        Self { at: Instant::now(), done, cpu: MachineCpu::now() }
    }
}

impl Samples {
    fn start() -> Self {
        Self { start: Sample::now(0), taken: Vec::new() }
    }

    /// Time of the first sample with the current count.
    fn last_growth(&self) -> Instant {
        let done = self.taken.last().map_or(0, |sample| sample.done);
        let first = self.taken.iter().find(|sample| sample.done == done && done > 0);
        first.unwrap_or(&self.start).at
    }

    fn throughput(&self, total: u64) -> Throughput {
        let first = self.taken.iter().find(|sample| sample.done >= total / 10);
        let last = self.taken.iter().rfind(|sample| sample.done <= total - total / 10);
        let (first, last) = match (first, last) {
            (Some(first), Some(last)) if last.at > first.at && last.done > first.done => (first, last),
            // The work was done before a sample fell into its middle: take all of it.
            _ => (&self.start, self.taken.last().unwrap_or(&self.start)),
        };
        let seconds = (last.at - first.at).as_secs_f64().max(0.001);
        let rate = (last.done - first.done) as f64 / seconds;
        Throughput { rate, cpu_percent: last.cpu.percent_since(&first.cpu) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(samples: &Samples, second: u64, done: u64) -> Sample {
        Sample { at: samples.start.at + Duration::from_secs(second), ..Sample::now(done) }
    }

    #[test]
    fn the_first_and_the_last_tenth_of_the_work_do_not_count() {
        let mut samples = Samples::start();
        // Slow at the start, then ten per second, then slow again.
        for (second, done) in [(10, 5), (11, 10), (12, 20), (15, 50), (19, 90), (30, 95), (60, 100)] {
            samples.taken.push(sample(&samples, second, done));
        }
        assert_eq!(samples.throughput(100).rate.round(), 10.0);
        assert_eq!(samples.last_growth(), samples.start.at + Duration::from_secs(60));
    }

    #[test]
    fn work_that_one_sample_covers_counts_as_a_whole() {
        let mut samples = Samples::start();
        samples.taken.push(sample(&samples, 2, 100));
        assert_eq!(samples.throughput(100).rate, 50.0);
    }
}
