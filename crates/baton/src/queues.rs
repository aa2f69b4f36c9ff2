//! Opening what both lanes can run on: a file in the data directory, and a queue on SQS.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use pipeline::queue::sqs::{SqsAccess, SqsOptions, SqsQueue};
use pipeline::sqlite::Database;
use pipeline::{Queue, QueueOptions};

use crate::config::SqsConfig;

/// How a lane's store and queue are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// By a service: creates what is missing and brings the schema up to date.
    Prepare,
    /// By a command: what is not there, or of another version, is an error.
    Existing,
}

impl Opening {
    /// Whether missing queues are created, given the setting of services.
    pub fn may_create(self, auto_create: bool) -> bool {
        self == Self::Prepare && auto_create
    }
}

/// Opens the database file at `path`.
pub fn open_file(data_dir: &Path, path: &Path, opening: Opening) -> anyhow::Result<Database> {
    let directory = data_dir.display();
    match opening {
        Opening::Prepare => Database::open(path).with_context(|| {
            format!("cannot use the data directory {directory}; make it writable or set BATON_DATA_DIR")
        }),
        Opening::Existing => Database::open_existing(path).with_context(|| {
            format!("no data in {directory} (BATON_DATA_DIR); a service or `baton migrate` creates it")
        }),
    }
}

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
