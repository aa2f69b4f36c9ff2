//! Durable 202 responses per second of `relay-api`, beside the parts that an accept consists of.

pub mod embedded;
pub mod servers;

use std::time::Duration;

use relayer_sim::server::ports::free_port;

use crate::Settings;
use crate::cpu::MachineCpu;
use crate::load::{self, LoadResult};
use crate::process::{API_KEY, ServiceProcess, Vars};
use crate::report::{Report, median};
use crate::transactions::BODY;

/// The path that the product and the empty server answer.
pub const PATH: &str = "/api/v1/relay/direct";
/// Target for the peak memory of `relay-api`, in MiB.
const MEMORY_MAX_MIB: f64 = 100.0;

async fn start_empty_server(vars: &Vars) -> anyhow::Result<ServiceProcess> {
    ServiceProcess::start_own(free_port(), &["empty-server"], vars).await
}

/// Sends direct requests over all connections for one measurement.
async fn load(service: &ServiceProcess, settings: &Settings) -> anyhow::Result<LoadResult> {
    let headers = format!("x-api-key: {API_KEY}\r\n");
    let request = load::post(service.address, PATH, &headers, BODY);
    load::run(service.address, request, settings.concurrency, 202, settings.span()).await
}

/// The accepts of all rounds.
#[derive(Default)]
struct AcceptRounds {
    rates: Vec<f64>,
    last: LoadResult,
    expected: u64,
    unexpected: u64,
    cpu_time: Duration,
    machine_percent: Vec<f64>,
}

impl AcceptRounds {
    async fn measure(&mut self, api: &ServiceProcess, settings: &Settings) -> anyhow::Result<()> {
        let (machine, cpu_time) = (MachineCpu::now(), api.cpu_time());
        self.last = load(api, settings).await?;
        self.machine_percent.push(MachineCpu::now().percent_since(&machine));
        self.cpu_time += api.cpu_time().saturating_sub(cpu_time);
        self.rates.push(self.last.rate());
        self.expected += self.last.expected;
        self.unexpected += self.last.unexpected;
        Ok(())
    }

    /// Everything but the rate.
    fn report(&self, report: &mut Report, api: &ServiceProcess) {
        let cpu_us = self.cpu_time.as_secs_f64() * 1e6 / self.expected.max(1) as f64;
        report.figure("  latency, median", self.last.latency_ms(0.5), "ms", "last round");
        report.figure("  latency, 99th percentile", self.last.latency_ms(0.99), "ms", "last round");
        report.figure("  unexpected responses", self.unexpected as f64, "", "");
        report.figure("  CPU time of relay-api per accept", cpu_us, "µs", "");
        report.figure("  CPU use of the machine", median(self.machine_percent.clone()), "%", "100 is all processors");
        report.figure("peak memory of relay-api", api.peak_mib(), "MiB", "");
        report.at_most("peak memory of relay-api", api.peak_mib(), MEMORY_MAX_MIB, "MiB");
    }
}
