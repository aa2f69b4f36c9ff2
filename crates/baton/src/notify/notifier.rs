//! Delivers notifications until shutdown: the pipeline over the deliveries that are due, the environment's endpoint, the
//! gauges, and the deletion of what is old.

use std::sync::Arc;
use std::time::Duration;

use metrics::gauge;
use pipeline::{Pipeline, PipelineOptions, Queue};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::address_guard::AddressGuard;
use super::delivery::Deliverer;
use super::outbox_queue::OutboxQueue;
use super::sender::Sender;
use crate::clock::Clock;
use crate::config::{NotifyConfig, Secret};
use crate::randomness::Randomness;
use crate::relay::state::event::EventType;
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{Disabled, EVERY_KEY, Endpoint, EndpointId, NotificationStore};
use crate::timestamp::Timestamp;

/// Delivers the events of one store.
pub struct Notifier {
    store: Arc<dyn NotificationStore>,
    clock: Clock,
    config: NotifyConfig,
    drain_timeout: Duration,
}

/// Pause between two refreshes of the gauges and looks for old rows.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// A lease covers an attempt and the storing of its result, each limited by the timeout of an attempt, and as much again.
const LEASE_TIMEOUTS: u32 = 4;
/// Nothing is deleted for this long after the store's clock has jumped ahead, so that a jump is noticed before it makes
/// everything look old. It also counts as a jump that no process ran for a few seconds, so this is short.
const KEPT_AFTER_JUMP: Duration = Duration::from_secs(3600);
/// Old rows of each kind that one commit deletes.
const FORGOTTEN_AT_ONCE: usize = 1000;

impl Notifier {
    /// Delivers what this store has.
    pub fn new(store: Arc<dyn NotificationStore>, clock: Clock, config: NotifyConfig, drain_timeout: Duration) -> Self {
        Self { store, clock, config, drain_timeout }
    }

    /// Delivers until shutdown, then finishes the attempts in flight.
    pub async fn run(&self, shutdown: CancellationToken) -> anyhow::Result<()> {
        let random = Randomness::system();
        let lease = self.config.timeout * LEASE_TIMEOUTS;
        let (store, clock) = (Arc::clone(&self.store), self.clock.clone());
        let queue = Arc::new(OutboxQueue::new(store, clock, random.clone(), lease, self.config.concurrency));
        let sender = Sender::new(AddressGuard::new((&self.config).into()), self.config.timeout)
            .map_err(|why| anyhow::anyhow!("webhooks cannot be sent: {why}"))?;
        let deliverer = Deliverer {
            queue: Arc::clone(&queue),
            store: Arc::clone(&self.store),
            sender,
            clock: self.clock.clone(),
            random,
            environment_secret: self.config.environment_endpoint.as_ref().map(|(_, secret)| secret.clone()),
            schedule_second: self.config.schedule_second,
            store_for: self.config.timeout,
        };
        let options = PipelineOptions {
            concurrency: self.config.concurrency,
            drain_timeout: self.drain_timeout,
            ..PipelineOptions::default()
        };
        info!(action = "notifier_started", "delivering client notifications");
        let pipeline = Pipeline::new(Arc::clone(&queue) as Arc<dyn Queue>, options);
        let drained = CancellationToken::new();
        let delivering = async {
            pipeline.run(Arc::new(deliverer), shutdown.clone()).await;
            drained.cancel();
        };
        tokio::join!(
            delivering,
            self.keep_environment_endpoint(&shutdown),
            self.check_environment_endpoint(&shutdown),
            self.keep_up(&queue, &drained)
        );
        info!(action = "notifier_stopped", "the notifier has stopped");
        Ok(())
    }

    /// Logs why the environment's endpoint would get nothing, if this process does not call its address. Only a warning:
    /// its host may get another address.
    async fn check_environment_endpoint(&self, shutdown: &CancellationToken) {
        let Some((url, _)) = &self.config.environment_endpoint else { return };
        let guard = AddressGuard::new((&self.config).into());
        let checked = async {
            let url = guard.check_url(url.expose())?;
            guard.check_resolves(EVERY_KEY, &url).await
        };
        if let Some(Err(refused)) = shutdown.run_until_cancelled(checked).await {
            warn!(
                action = "environment_endpoint",
                "CLIENT_WEBHOOK_URL {refused}: every attempt to deliver to it fails"
            );
        }
    }

    /// Stores the environment's endpoint, or disables the one of an earlier start; tried until the store answers.
    async fn keep_environment_endpoint(&self, shutdown: &CancellationToken) {
        loop {
            match self.set_environment_endpoint().await {
                Ok(true) => return,
                // Another process changed it meanwhile.
                Ok(false) => continue,
                Err(failure) => {
                    warn!(
                        action = "environment_endpoint",
                        "cannot store the CLIENT_WEBHOOK_URL endpoint; retrying: {failure}"
                    )
                }
            }
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = self.clock.sleep(UPKEEP_EVERY) => {}
            }
        }
    }

    /// Whether the environment's endpoint is now as it is configured.
    async fn set_environment_endpoint(&self) -> Result<bool, StoreError> {
        let known = self.store.endpoint(EndpointId::ENVIRONMENT).await?;
        let now = self.clock.now();
        let wanted = self.config.environment_endpoint.as_ref().map(|(url, _)| url.expose());
        match (known, wanted) {
            (None, None) => Ok(true),
            (Some(known), Some(url)) if known.url == url && known.disabled.is_none() => Ok(true),
            (Some(known), None) if known.disabled.is_some() => Ok(true),
            (Some(known), None) => {
                let reason = "CLIENT_WEBHOOK_URL is not set".to_owned();
                let disabled = Some(Disabled { at: now, reason });
                let changed = self.store.change_endpoint(&Endpoint { disabled, updated_at: now, ..known }).await?;
                if changed {
                    warn!(
                        action = "environment_endpoint",
                        "CLIENT_WEBHOOK_URL is not set: the endpoint of an earlier start, or of another process, is disabled"
                    );
                }
                Ok(changed)
            }
            (Some(known), Some(url)) => {
                let url = url.to_owned();
                self.store.change_endpoint(&Endpoint { url, disabled: None, updated_at: now, ..known }).await
            }
            (None, Some(url)) => {
                let endpoint = Endpoint {
                    id: EndpointId::ENVIRONMENT,
                    owner: EVERY_KEY.to_owned(),
                    url: url.to_owned(),
                    events: EventType::SUBSCRIBABLE.to_vec(),
                    description: Some("CLIENT_WEBHOOK_URL".to_owned()),
                    secret: Secret::new(""),
                    previous_secret: None,
                    version: 1,
                    created_at: now,
                    updated_at: now,
                    disabled: None,
                    failing_since: None,
                    failures: 0,
                    paused_until: None,
                };
                self.store.put_endpoint(&endpoint, usize::MAX).await
            }
        }
    }

    /// Deletes what is older, in small commits, until nothing is left.
    async fn forget(&self, before: Timestamp, shutdown: &CancellationToken) {
        while !shutdown.is_cancelled() {
            match self.store.forget_notifications(before, self.clock.now(), FORGOTTEN_AT_ONCE).await {
                Ok(deleted) if deleted >= FORGOTTEN_AT_ONCE as u64 => {}
                Ok(_) => return,
                Err(failure) => {
                    return warn!(action = "webhook_retention", "old notifications are not deleted: {failure}");
                }
            }
        }
    }

    async fn keep_up(&self, queue: &OutboxQueue, shutdown: &CancellationToken) {
        loop {
            let now = self.clock.now();
            gauge!("baton_webhook_hosts_paused").set(queue.paused_hosts() as f64);
            match self.store.notification_counts(now).await {
                Ok(counts) => {
                    let age = counts.oldest_waiting.map(|since| now.since(since)).unwrap_or_default();
                    gauge!("baton_webhook_events_waiting").set(counts.waiting as f64);
                    gauge!("baton_webhook_events_oldest_seconds").set(age.as_secs_f64());
                    gauge!("baton_webhook_endpoints", "state" => "enabled").set(counts.enabled as f64);
                    gauge!("baton_webhook_endpoints", "state" => "disabled").set(counts.disabled as f64);
                    gauge!("baton_webhook_endpoints", "state" => "failing").set(counts.failing as f64);
                }
                Err(failure) => {
                    warn!(action = "webhook_gauges", "baton_webhook_* gauges are not up to date: {failure}");
                }
            }
            let before = now - self.config.retention;
            if !self.clock.jump_hides(before, now, KEPT_AFTER_JUMP) {
                self.forget(before, shutdown).await;
            }
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = self.clock.sleep(UPKEEP_EVERY) => {}
            }
        }
    }
}
