//! What a queue in SQS is opened with, what may be wrong with it, and the SDK's client made of it.

use std::fmt;
use std::time::Duration;

use aws_sdk_sqs::config::retry::RetryConfig;
use aws_sdk_sqs::config::timeout::TimeoutConfig;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};

use super::requests::Fault;
use super::wire;
use crate::queue::QueueError;

/// Where SQS is and which queues to use.
#[derive(Debug, Clone)]
pub struct SqsOptions {
    /// The endpoint and how to sign in.
    pub access: SqsAccess,
    /// The region, `ap-northeast-2` for example.
    pub region: String,
    /// The queue: its name or its URL.
    pub queue: String,
    /// The dead-letter queue: its name or its URL.
    pub dead_letter_queue: String,
    /// Whether missing queues are created. Existing ones are only ever checked.
    pub auto_create: bool,
    /// How long a call may take, beyond the wait that a receive asks for. After it a send answers
    /// [`QueueError::OutcomeUnknown`], whatever the server does.
    pub timeout: Duration,
    /// How long one connection may take to come up.
    pub connect_timeout: Duration,
    /// The longest delay asked of SQS in one step: 15 minutes, which is SQS's limit, or less.
    pub delay_step: Duration,
}

/// How to sign in, one of two ways. The keys never show in logs.
#[derive(Clone)]
pub enum SqsAccess {
    /// AWS itself, with the default credential chain: environment, profile, container or instance role.
    Role,
    /// Another endpoint, with keys of its own.
    Endpoint {
        /// Its URL; plain http will do.
        url: String,
        /// The access key.
        access_key: String,
        /// The secret key.
        secret_key: String,
    },
}

impl SqsOptions {
    /// These queues, with usual time limits, not created when missing.
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

    /// The SDK's client as the queue uses it, for what the queue itself does not do: our own HTTP underneath, no retries,
    /// and of the SDK's time limits only the one for connecting.
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
    /// What is configured is beyond what SQS does.
    #[error("{}", .0.join("; "))]
    Options(Vec<String>),
    /// There is no such queue, and it is not to be created.
    #[error("the SQS queue {queue} does not exist")]
    Missing {
        /// As configured.
        queue: String,
    },
    /// The queue is there but works in another way than configured.
    #[error("the SQS queue {queue} is not as configured: {}", .differences.join("; "))]
    Differs {
        /// Its name.
        queue: String,
        /// Each difference, in words.
        differences: Vec<String>,
    },
    /// SQS could not be asked.
    #[error("cannot ask SQS about its queues")]
    Unavailable(#[source] QueueError),
}

impl From<Fault> for SqsOpenError {
    fn from(fault: Fault) -> Self {
        Self::Unavailable(fault.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_not_show() {
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
