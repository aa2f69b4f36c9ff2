//! Counts the events of a run, for the metrics and for the [`Summary`] at its end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

/// The totals of a run, from start to shutdown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Messages received.
    pub received: u64,
    /// Messages whose handler has finished, panics included.
    pub handled: u64,
    /// Messages acknowledged and removed.
    pub done: u64,
    /// Messages scheduled for another attempt.
    pub retried: u64,
    /// Messages moved to the dead-letter queue.
    pub dead: u64,
    /// Messages that the dead-letter queue did not take. They are delivered again.
    pub unburied: u64,
    /// Messages returned to the queue unstarted at shutdown.
    pub handed_back: u64,
    /// Messages whose handler had not finished at the end of the drain. They become due again when their lease ends.
    pub abandoned: u64,
    /// Messages that were handled but could not be settled. They become due again too.
    pub unsettled: u64,
    /// Leases lost while the message was being handled or settled.
    pub lease_lost: u64,
    /// Handler calls that panicked or returned the wrong number of outcomes; a batch counts each of its messages.
    pub panics: u64,
}

pub(super) struct Meters {
    received: SummedCounter,
    handled: SummedCounter,
    done: SummedCounter,
    retried: SummedCounter,
    dead: SummedCounter,
    unburied: SummedCounter,
    handed_back: SummedCounter,
    abandoned: SummedCounter,
    failed: SummedCounter,
    lease_lost: SummedCounter,
    panics: SummedCounter,
    extended: Counter,
    extend_failed: Counter,
    receive_failed: Counter,
    settle_retried: Counter,
    in_flight: Gauge,
    handle_seconds: Histogram,
}

/// A metric and this run's own sum: the metric cannot be read, and other runs may share it.
struct SummedCounter {
    metric: Counter,
    sum: AtomicU64,
}

impl SummedCounter {
    fn new(metric: Counter) -> Self {
        Self { metric, sum: AtomicU64::new(0) }
    }

    fn add(&self, count: u64) {
        self.metric.increment(count);
        self.sum.fetch_add(count, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }
}

impl Meters {
    pub(super) fn new(queue: &str) -> Self {
        let plain = |name: &'static str| counter!(name, "queue" => queue.to_owned());
        let settled = |outcome: &'static str| {
            SummedCounter::new(counter!("pipeline_settled_total", "queue" => queue.to_owned(), "outcome" => outcome))
        };
        let extend =
            |result: &'static str| counter!("pipeline_extended_total", "queue" => queue.to_owned(), "result" => result);
        Self {
            received: SummedCounter::new(plain("pipeline_received_total")),
            handled: SummedCounter::new(plain("pipeline_handled_total")),
            done: settled("done"),
            retried: settled("retry"),
            dead: settled("dead"),
            unburied: settled("unburied"),
            handed_back: settled("handed_back"),
            failed: settled("failed"),
            abandoned: SummedCounter::new(plain("pipeline_abandoned_total")),
            lease_lost: SummedCounter::new(plain("pipeline_lease_lost_total")),
            panics: SummedCounter::new(plain("pipeline_panics_total")),
            extended: extend("ok"),
            extend_failed: extend("error"),
            receive_failed: plain("pipeline_receive_errors_total"),
            settle_retried: plain("pipeline_settle_retries_total"),
            in_flight: gauge!("pipeline_in_flight", "queue" => queue.to_owned()),
            handle_seconds: histogram!("pipeline_handle_seconds", "queue" => queue.to_owned()),
        }
    }

    pub(super) fn received(&self) {
        self.received.add(1);
        self.in_flight.increment(1.0);
    }

    /// A delivery has ended, settled or abandoned.
    pub(super) fn delivery_ended(&self, abandoned: bool) {
        self.in_flight.decrement(1.0);
        if abandoned {
            self.abandoned.add(1);
        }
    }

    /// One handler call on this many messages.
    pub(super) fn handled(&self, messages: u64, took: Duration) {
        self.handled.add(messages);
        self.handle_seconds.record(took);
    }

    /// A message that was settled without joining a batch.
    pub(super) fn handled_unbatched(&self) {
        self.handled.add(1);
    }

    pub(super) fn panicked(&self) {
        self.panics.add(1);
    }

    pub(super) fn done(&self) {
        self.done.add(1);
    }

    pub(super) fn retried(&self) {
        self.retried.add(1);
    }

    pub(super) fn dead(&self) {
        self.dead.add(1);
    }

    /// The dead-letter queue did not take the message.
    pub(super) fn unburied(&self) {
        self.unburied.add(1);
    }

    pub(super) fn handed_back(&self) {
        self.handed_back.add(1);
    }

    /// The message could not be settled, and no retry follows.
    pub(super) fn settle_failed(&self) {
        self.failed.add(1);
    }

    pub(super) fn settle_retried(&self, count: usize) {
        self.settle_retried.increment(count as u64);
    }

    pub(super) fn lease_lost(&self) {
        self.lease_lost.add(1);
    }

    pub(super) fn extended(&self) {
        self.extended.increment(1);
    }

    pub(super) fn extend_failed(&self) {
        self.extend_failed.increment(1);
    }

    pub(super) fn receive_failed(&self) {
        self.receive_failed.increment(1);
    }

    /// The totals. `still_held` is the number of messages whose settlement was still pending at the end.
    pub(super) fn summary(&self, still_held: usize) -> Summary {
        Summary {
            received: self.received.sum(),
            handled: self.handled.sum(),
            done: self.done.sum(),
            retried: self.retried.sum(),
            dead: self.dead.sum(),
            unburied: self.unburied.sum(),
            handed_back: self.handed_back.sum(),
            abandoned: self.abandoned.sum(),
            unsettled: self.failed.sum() + still_held as u64,
            lease_lost: self.lease_lost.sum(),
            panics: self.panics.sum(),
        }
    }
}
