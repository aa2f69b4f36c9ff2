//! The settings of client notifications.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use super::reader::Vars;
use super::{Secret, Service};

/// Client notifications.
#[derive(Debug, Clone)]
pub struct NotifyConfig {
    /// `CLIENT_WEBHOOK_URL` and `CLIENT_WEBHOOK_SECRET`: an endpoint that gets every event.
    pub environment_endpoint: Option<(Secret, Secret)>,
    /// `WEBHOOK_ALLOW_HTTP`: plain http is allowed.
    pub allow_http: bool,
    /// `WEBHOOK_ALLOW_PRIVATE`: private and loopback addresses are allowed, and plain http.
    pub allow_private: bool,
    /// `WEBHOOK_PORTS`: ports that endpoints may have; empty: any.
    pub ports: Vec<u16>,
    /// `WEBHOOK_ENDPOINTS_MAX`: maximum endpoints of one API key.
    pub endpoints_max: usize,
    /// `WEBHOOK_RETENTION_DAYS`: how long delivered and given-up events are kept.
    pub retention: Duration,
    /// `WEBHOOK_CONCURRENCY`: deliveries in flight of this process.
    pub concurrency: usize,
    /// `NOTIFIER_IN_CONSUMER`: deliver from `serve` and `queue-consumer`.
    pub in_consumer: bool,
    /// `WEBHOOK_TIMEOUT_MS`: timeout of one attempt.
    pub timeout: Duration,
    /// `WEBHOOK_SCHEDULE_SECOND_US`: length of a second of the schedule.
    pub schedule_second: Duration,
}

impl NotifyConfig {
    /// Whether this service delivers.
    pub fn delivers(&self, service: Service) -> bool {
        service == Service::Notifier || (service.notifies() && self.in_consumer)
    }
}

/// The bytes of a signing secret in its text form; `None` if it has another form.
pub fn secret_bytes(secret: &Secret) -> Option<Vec<u8>> {
    let bytes = BASE64_STANDARD.decode(secret.expose().strip_prefix("whsec_")?).ok()?;
    (24..=64).contains(&bytes.len()).then_some(bytes)
}

impl Vars<'_> {
    pub(super) fn notify(&mut self, service: Service) -> NotifyConfig {
        let ports = self.list("WEBHOOK_PORTS").iter().map(|port| port.parse().ok()).collect::<Option<Vec<u16>>>();
        if ports.is_none() {
            self.problem("WEBHOOK_PORTS", "must be port numbers separated by commas");
        }
        let days: u32 = self.count("WEBHOOK_RETENTION_DAYS");
        NotifyConfig {
            environment_endpoint: if service.notifies() { self.environment_endpoint() } else { None },
            allow_http: self.parsed("WEBHOOK_ALLOW_HTTP"),
            allow_private: self.parsed("WEBHOOK_ALLOW_PRIVATE"),
            ports: ports.unwrap_or_default(),
            endpoints_max: self.count("WEBHOOK_ENDPOINTS_MAX"),
            retention: Duration::from_secs(24 * 3600) * days,
            concurrency: self.count("WEBHOOK_CONCURRENCY"),
            in_consumer: self.parsed("NOTIFIER_IN_CONSUMER"),
            timeout: self.millis("WEBHOOK_TIMEOUT_MS"),
            schedule_second: Duration::from_micros(self.count("WEBHOOK_SCHEDULE_SECOND_US")),
        }
    }

    fn environment_endpoint(&mut self) -> Option<(Secret, Secret)> {
        let url = self.url("CLIENT_WEBHOOK_URL");
        let secret = self.text("CLIENT_WEBHOOK_SECRET").map(Secret::new);
        match (url, secret) {
            (Some(url), Some(secret)) if secret_bytes(&secret).is_some() => Some((Secret::from(url), secret)),
            (_, Some(_)) if self.text("CLIENT_WEBHOOK_URL").is_none() => {
                self.problem("CLIENT_WEBHOOK_SECRET", "is set without CLIENT_WEBHOOK_URL");
                None
            }
            (Some(_), Some(_)) => {
                let rule = "must be whsec_ and the base64 of 24 to 64 bytes (echo whsec_$(openssl rand -base64 32))";
                self.problem("CLIENT_WEBHOOK_SECRET", rule);
                None
            }
            (Some(_), None) => {
                let why = "is not set: CLIENT_WEBHOOK_URL needs it (echo whsec_$(openssl rand -base64 32))";
                self.problem("CLIENT_WEBHOOK_SECRET", why);
                None
            }
            (None, _) => None,
        }
    }
}
