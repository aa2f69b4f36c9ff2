//! The settings of a queue in SQS, the errors of opening it, and the SDK client built from the settings.

use std::fmt;
use std::time::Duration;

use aws_sdk_sqs::config::retry::RetryConfig;
use aws_sdk_sqs::config::timeout::TimeoutConfig;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};

use super::client::RequestError;
use super::wire;
use crate::queue::QueueError;

/// The endpoint, the queues and the time limits.
#[derive(Debug, Clone)]
pub struct SqsOptions {
    /// The endpoint and its credentials.
    pub access: SqsAccess,
    /// The AWS region, for example `ap-northeast-2`.
    pub region: String,
    /// Name or URL of the queue.
    pub queue: String,
    /// Name or URL of the dead-letter queue.
    pub dead_letter_queue: String,
    /// Whether missing queues are created. Existing queues are checked and never changed. Off by default.
    pub auto_create: bool,
    /// Time limit of a call, in addition to the wait of a receive. After it a send answers
    /// [`QueueError::OutcomeUnknown`]. 10 seconds by default.
    pub timeout: Duration,
    /// Time limit for establishing a connection. 3 seconds by default.
    pub connect_timeout: Duration,
    /// The longest delay that SQS gets in one step. 15 minutes by default, which is SQS's limit.
    pub delay_step: Duration,
}

/// The endpoint and its credentials. `Debug` does not show the keys.
#[derive(Clone)]
pub enum SqsAccess {
    /// AWS, with the default credential chain: environment, profile, container or instance role.
    Role,
    /// Another endpoint with static keys.
    Endpoint {
        /// `http://` or `https://` URL of the endpoint.
        url: String,
        /// Access key id.
        access_key: String,
        /// Secret access key.
        secret_key: String,
    },
}

impl SqsOptions {
    /// Options for these queues, with default time limits and without `auto_create`.
    pub fn new(
        access: SqsAccess,
        region: impl Into<String>,
        queue: impl Into<String>,
        dead_letter_queue: impl Into<String>,
    ) -> Self {
        Self {
            access,
            region: region.into(),
            queue: queue.into(),
            dead_letter_queue: dead_letter_queue.into(),
            auto_create: false,
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(3),
            delay_step: wire::DELAY_MAX,
        }
    }

    /// The SDK client as the queue uses it, for calls that the queue does not offer: HTTP over rustls with ring, no
    /// retries, and of the SDK's time limits only the one for connecting.
    pub async fn client(&self) -> aws_sdk_sqs::Client {
        let http = aws_smithy_http_client::Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring));
        let http = http.build_https();
        let timeouts = TimeoutConfig::builder().connect_timeout(self.connect_timeout).build();
        let region = Region::new(self.region.clone());
        let config = match &self.access {
            SqsAccess::Role => {
                let chain = aws_config::defaults(BehaviorVersion::latest()).http_client(http.clone()).region(region);
                aws_sdk_sqs::config::Builder::from(&chain.load().await)
            }
            SqsAccess::Endpoint { url, access_key, secret_key } => aws_sdk_sqs::Config::builder()
                .behavior_version(BehaviorVersion::latest())
                .region(region)
                .endpoint_url(url)
                .credentials_provider(Credentials::new(access_key, secret_key, None, None, "configuration")),
        };
        let config = config.http_client(http).retry_config(RetryConfig::disabled()).timeout_config(timeouts);
        aws_sdk_sqs::Client::from_conf(config.build())
    }
}

impl fmt::Debug for SqsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Role => f.write_str("Role"),
            Self::Endpoint { url, .. } => f.debug_struct("Endpoint").field("url", url).field("keys", &"***").finish(),
        }
    }
}

/// Why a queue could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SqsOpenError {
    /// The settings are outside SQS's limits; one text for each.
    #[error("{}", .0.join("; "))]
    Options(Vec<String>),
    /// The queue does not exist and `auto_create` is off.
    #[error("the SQS queue {queue} does not exist")]
    Missing {
        /// Name or URL of the queue, as configured.
        queue: String,
    },
    /// The queue exists with attributes that differ from the settings.
    #[error("the SQS queue {queue} is not as configured: {}", .differences.join("; "))]
    Differs {
        /// Name of the queue.
        queue: String,
        /// One text for each difference.
        differences: Vec<String>,
    },
    /// SQS could not be reached or refused the request.
    #[error("cannot read the SQS queues")]
    Unavailable(#[source] QueueError),
}

impl From<RequestError> for SqsOpenError {
    fn from(error: RequestError) -> Self {
        Self::Unavailable(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_does_not_contain_the_keys() {
        let access = SqsAccess::Endpoint {
            url: "http://127.0.0.1:1".into(),
            access_key: "AKIAEXAMPLE".into(),
            secret_key: "very-secret".into(),
        };
        let options = SqsOptions::new(access, "ap-northeast-2", "q", "q-dlq");
        let shown = format!("{options:?}");
        assert!(
            shown.contains("http://127.0.0.1:1") && !shown.contains("AKIA") && !shown.contains("secret\""),
            "{shown}"
        );
    }
}
