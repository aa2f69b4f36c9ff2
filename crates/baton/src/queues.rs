//! Opening a queue on SQS, which both lanes can run on.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use pipeline::queue::sqs::{SqsAccess, SqsOptions, SqsQueue};
use pipeline::{Queue, QueueOptions};

use crate::config::SqsConfig;

/// The longest retention that SQS allows.
const SQS_RETENTION_MAX: Duration = Duration::from_secs(14 * 24 * 3600);

/// Opens a queue on SQS. An error names `variables`, the settings that chose it.
pub async fn open_sqs(
    sqs: &SqsConfig,
    auto_create: bool,
    variables: &str,
    mut options: QueueOptions,
) -> anyhow::Result<Arc<dyn Queue>> {
    let access = match &sqs.endpoint {
        None => SqsAccess::Role,
        Some(endpoint) => SqsAccess::Endpoint {
            url: endpoint.url.to_string(),
            access_key: endpoint.access_key_id.expose().to_owned(),
            secret_key: endpoint.secret_access_key.expose().to_owned(),
        },
    };
    options.retention = options.retention.min(SQS_RETENTION_MAX);
    let mut access = SqsOptions::new(access, &sqs.region, sqs.queue_url.as_str(), sqs.dlq_url.as_str());
    access.auto_create = auto_create;
    let queue = SqsQueue::open(access, options).await;
    Ok(Arc::new(queue.with_context(|| format!("{variables}: cannot prepare the queue"))?))
}
