//! Processor time of the whole machine, from `/proc/stat`.

/// Processor time since boot, in clock ticks over all processors.
#[derive(Clone, Copy)]
pub struct MachineCpu {
    busy: u64,
    total: u64,
}

impl MachineCpu {
    /// Reads the counters.
    pub fn now() -> Self {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
        // The ninth and tenth field (guests) are part of the first two; the fourth and fifth are idle and I/O wait.
        let total: u64 = ticks.iter().take(8).sum();
        let idle: u64 = ticks.iter().skip(3).take(2).sum();
        Self { busy: total - idle, total }
    }

    /// Share of the machine in use since `start`, in percent; 100 means all processors.
    pub fn percent_since(&self, start: &Self) -> f64 {
        let (busy, total) = (self.busy.saturating_sub(start.busy), self.total.saturating_sub(start.total));
        100.0 * busy as f64 / total.max(1) as f64
    }
}
