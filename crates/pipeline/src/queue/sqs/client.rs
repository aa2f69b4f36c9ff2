//! The requests to SQS, each with a time limit, and a limit on concurrent settlements. The SDK's retries are off: a
//! repeated send would store the message twice, and the pipeline retries settlements itself.
//!
//! Every failure is classified by whether the request may have taken effect. It had no effect if no connection was
//! established or SQS rejected it (4xx). After a 5xx, a broken connection or a timeout the outcome is unknown.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::http::HttpResponse;
use aws_sdk_sqs::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_sqs::types::{
    BatchResultErrorEntry, ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry,
    MessageSystemAttributeName, QueueAttributeName, SendMessageBatchRequestEntry,
};
use futures::future::join_all;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::wire::{self, SendEntry, SqsDelivery};
use crate::error_chain::ErrorChain;
use crate::queue::server_away::ServerAway;
use crate::queue::{BoxError, QueueError};

/// Entries that SQS accepts in one request and returns in one answer.
pub(super) const BATCH_MAX: usize = 10;
/// Concurrent delete and visibility requests.
const CONCURRENT_SETTLES_MAX: usize = 32;

/// The SDK's client with this backend's limits.
pub(super) struct SqsClient {
    pub(super) sdk: Client,
    pub(super) timeout: Duration,
    /// SQS has answered that a queue does not exist.
    pub(super) queue_missing: AtomicBool,
    settle_permits: Semaphore,
}

/// Why a request failed. Cloned for each entry of the request.
#[derive(Debug, Clone)]
pub(super) struct RequestError {
    /// The request certainly had no effect; otherwise its outcome is unknown.
    had_no_effect: bool,
    /// SQS did not answer, or a server before it answered that it cannot.
    server_away: bool,
    code: Option<String>,
    text: Arc<str>,
}

/// The answer for each entry of a batch, or the error of the whole batch.
type Answers = Result<Vec<Result<(), QueueError>>, RequestError>;

/// SQS's approximate counts of a queue.
pub(super) struct Counts {
    pub(super) ready: u64,
    pub(super) hidden: u64,
    pub(super) delayed: u64,
}

impl SqsClient {
    pub(super) fn new(sdk: Client, timeout: Duration) -> Self {
        Self {
            sdk,
            timeout,
            queue_missing: AtomicBool::new(false),
            settle_permits: Semaphore::new(CONCURRENT_SETTLES_MAX),
        }
    }

    /// The time limit of a call that starts now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Sends one request and waits for its answer until `deadline`.
    pub(super) async fn request<T, E>(
        &self,
        deadline: Instant,
        request: impl Future<Output = Result<T, SdkError<E, HttpResponse>>>,
    ) -> Result<T, RequestError>
    where
        E: ProvideErrorMetadata + Error + 'static,
    {
        let error = match timeout_at(deadline, request).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => RequestError::from(error),
            Err(_) => {
                RequestError { had_no_effect: false, server_away: true, code: None, text: "no answer in time".into() }
            }
        };
        if error.is_no_such_queue() {
            self.queue_missing.store(true, Ordering::Relaxed);
        }
        Err(error)
    }

    /// Sends one batch of messages, within SQS's limits of entries and bytes.
    pub(super) async fn send(&self, queue_url: &str, messages: Vec<SendEntry>) -> Vec<Result<(), QueueError>> {
        let count = messages.len();
        let entry = |(number, message): (usize, SendEntry)| {
            SendMessageBatchRequestEntry::builder()
                .id(number.to_string())
                .message_body(message.body)
                .delay_seconds(message.delay_s)
                .set_message_attributes(Some(message.attributes))
                .build()
        };
        let entries: Result<Vec<_>, _> = messages.into_iter().enumerate().map(entry).collect();
        let entries = match entries {
            Ok(entries) => entries,
            Err(error) => return all(count, &RequestError::not_built(&error)),
        };
        let request = self.sdk.send_message_batch().queue_url(queue_url).set_entries(Some(entries)).send();
        match self.request(self.deadline(), request).await {
            Ok(answer) => {
                answer_each(count, answer.successful().iter().map(|entry| entry.id()), answer.failed(), send_rejected)
            }
            Err(error) => all(count, &error),
        }
    }

    /// Receives up to ten messages and hides them from other receivers for `hide_s`.
    pub(super) async fn receive(
        &self,
        queue_url: &str,
        max: usize,
        wait_s: i32,
        hide_s: i32,
    ) -> Result<Vec<SqsDelivery>, RequestError> {
        #[expect(deprecated, reason = "older servers know only this name of the field and would return no counts")]
        let request = self
            .sdk
            .receive_message()
            .queue_url(queue_url)
            .max_number_of_messages(i32::try_from(max.clamp(1, BATCH_MAX)).unwrap_or(1))
            .wait_time_seconds(wait_s)
            .visibility_timeout(hide_s)
            .message_system_attribute_names(MessageSystemAttributeName::All)
            .attribute_names(QueueAttributeName::All)
            .message_attribute_names("All")
            .send();
        let wait = Duration::from_secs(u64::try_from(wait_s).unwrap_or(0));
        let answer = self.request(self.deadline() + wait, request).await?;
        let now = SystemTime::now();
        Ok(answer.messages.unwrap_or_default().into_iter().filter_map(|message| wire::read(message, now)).collect())
    }

    /// Deletes messages, ten in each request.
    pub(super) async fn delete(&self, queue_url: &str, handles: &[String]) -> Vec<Result<(), QueueError>> {
        let deadline = self.deadline();
        let answers =
            join_all(handles.chunks(BATCH_MAX).map(|part| self.delete_batch(queue_url, part, deadline))).await;
        join_answers(handles.chunks(BATCH_MAX), answers)
    }

    async fn delete_batch(&self, queue_url: &str, part: &[String], deadline: Instant) -> Answers {
        let _permit = self.settle_permit(deadline).await?;
        let entry = |(number, handle): (usize, &String)| {
            DeleteMessageBatchRequestEntry::builder().id(number.to_string()).receipt_handle(handle).build()
        };
        let entries = part.iter().enumerate().map(entry).collect::<Result<Vec<_>, _>>();
        let entries = entries.map_err(|error| RequestError::not_built(&error))?;
        let request = self.sdk.delete_message_batch().queue_url(queue_url).set_entries(Some(entries)).send();
        let answer = self.request(deadline, request).await?;
        let done = answer.successful().iter().map(|entry| entry.id());
        Ok(answer_each(part.len(), done, answer.failed(), settle_rejected))
    }

    /// Hides each message for its number of seconds from now, ten in each request.
    pub(super) async fn hide(&self, queue_url: &str, entries: &[(String, i32)]) -> Vec<Result<(), QueueError>> {
        let deadline = self.deadline();
        let answers = join_all(entries.chunks(BATCH_MAX).map(|part| self.hide_batch(queue_url, part, deadline))).await;
        join_answers(entries.chunks(BATCH_MAX), answers)
    }

    async fn hide_batch(&self, queue_url: &str, part: &[(String, i32)], deadline: Instant) -> Answers {
        let _permit = self.settle_permit(deadline).await?;
        let entry = |(number, (handle, seconds)): (usize, &(String, i32))| {
            ChangeMessageVisibilityBatchRequestEntry::builder()
                .id(number.to_string())
                .receipt_handle(handle)
                .visibility_timeout(*seconds)
                .build()
        };
        let entries = part.iter().enumerate().map(entry).collect::<Result<Vec<_>, _>>();
        let entries = entries.map_err(|error| RequestError::not_built(&error))?;
        let change = self.sdk.change_message_visibility_batch();
        let answer = self.request(deadline, change.queue_url(queue_url).set_entries(Some(entries)).send()).await?;
        let done = answer.successful().iter().map(|entry| entry.id());
        Ok(answer_each(part.len(), done, answer.failed(), settle_rejected))
    }

    /// Waits for a permit to settle. If none is free by `deadline`, no request was sent.
    async fn settle_permit(&self, deadline: Instant) -> Result<SemaphorePermit<'_>, RequestError> {
        timeout_at(deadline, self.settle_permits.acquire())
            .await
            .ok()
            .and_then(Result::ok)
            .ok_or_else(RequestError::not_started)
    }

    /// The queue's approximate counts.
    pub(super) async fn counts(&self, queue_url: &str) -> Result<Counts, RequestError> {
        use QueueAttributeName as Name;
        let names = [
            Name::ApproximateNumberOfMessages,
            Name::ApproximateNumberOfMessagesNotVisible,
            Name::ApproximateNumberOfMessagesDelayed,
        ];
        let attributes = self.sdk.get_queue_attributes().queue_url(queue_url);
        let request = attributes.set_attribute_names(Some(names.to_vec())).send();
        let answer = self.request(self.deadline(), request).await?;
        let [ready, hidden, delayed] = names.map(|name| {
            let value = answer.attributes().and_then(|attributes| attributes.get(&name));
            value.and_then(|value| value.parse().ok()).unwrap_or(0)
        });
        Ok(Counts { ready, hidden, delayed })
    }
}

impl RequestError {
    pub(super) fn not_started() -> Self {
        let text = "no request could be started in time".into();
        Self { had_no_effect: true, server_away: false, code: None, text }
    }

    fn not_built(error: &(dyn Error + 'static)) -> Self {
        let text = ErrorChain(error).to_string().into();
        Self { had_no_effect: true, server_away: false, code: None, text }
    }

    /// Whether SQS answered that the queue does not exist. Servers use several codes for it.
    pub(super) fn is_no_such_queue(&self) -> bool {
        self.code.as_deref().is_some_and(|code| code.contains("NonExistentQueue") || code.contains("QueueDoesNotExist"))
    }

    /// Whether SQS answered that a queue with this name exists with other attributes.
    pub(super) fn is_queue_name_taken(&self) -> bool {
        self.code.as_deref().is_some_and(|code| code.contains("QueueNameExists") || code.contains("QueueAlreadyExists"))
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for RequestError {}

impl From<RequestError> for QueueError {
    fn from(error: RequestError) -> Self {
        let had_no_effect = error.had_no_effect;
        let source: BoxError = if error.server_away { ServerAway(error.text).into() } else { error.into() };
        if had_no_effect { Self::Unavailable(source) } else { Self::OutcomeUnknown(source) }
    }
}

impl<E> From<SdkError<E, HttpResponse>> for RequestError
where
    E: ProvideErrorMetadata + Error + 'static,
{
    fn from(error: SdkError<E, HttpResponse>) -> Self {
        let had_no_effect = match &error {
            SdkError::ConstructionFailure(_) => true,
            SdkError::DispatchFailure(failure) => {
                failure.is_user() || failure.as_connector_error().is_some_and(|error| was_never_sent(error))
            }
            SdkError::ServiceError(answer) => answer.raw().status().is_client_error(),
            _ => false,
        };
        let server_away = match &error {
            SdkError::TimeoutError(_) => true,
            SdkError::DispatchFailure(failure) => {
                // The only other failure with a kind: the connection ended before the answer did.
                let broke_off = failure.as_other().is_some();
                (failure.is_io() || failure.is_timeout() || broke_off) && !is_certificate_refused(&error)
            }
            SdkError::ServiceError(answer) => answer.raw().status().is_server_error(),
            _ => false,
        };
        let code = error.code().map(str::to_owned);
        Self { had_no_effect, server_away, code, text: ErrorChain(&error).to_string().into() }
    }
}

/// Whether the request failed before it was sent: no connection was established, or there were no credentials.
fn was_never_sent(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| {
        cause.downcast_ref::<hyper_util::client::legacy::Error>().is_some_and(|error| error.is_connect())
            || cause.is::<aws_credential_types::provider::error::CredentialsError>()
    })
}

/// Whether the server's certificate was refused.
fn is_certificate_refused(error: &(dyn Error + 'static)) -> bool {
    let is_invalid = |error: &io::Error| error.kind() == io::ErrorKind::InvalidData;
    causes(error).any(|cause| cause.downcast_ref().is_some_and(is_invalid))
}

/// The error and its causes. The source of an [`io::Error`] is that of the error in it, which would be left out.
fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| match error.downcast_ref::<io::Error>() {
        Some(error) => error.get_ref().map(|inner| inner as &(dyn Error + 'static)),
        None => error.source(),
    })
}

/// Joins the answers of all batches, one for each entry in order.
fn join_answers<'a, T: 'a>(
    batches: impl Iterator<Item = &'a [T]>,
    answers: Vec<Answers>,
) -> Vec<Result<(), QueueError>> {
    let answer = |(part, answers): (&[T], Answers)| answers.unwrap_or_else(|error| all(part.len(), &error));
    batches.zip(answers).flat_map(answer).collect()
}

fn all(count: usize, error: &RequestError) -> Vec<Result<(), QueueError>> {
    (0..count).map(|_| Err(error.clone().into())).collect()
}

/// Orders an answer's entries by their ids, which are the positions in the request. An entry that is missing in the answer
/// may have taken effect.
fn answer_each<'a>(
    count: usize,
    done: impl Iterator<Item = &'a str>,
    failed: &[BatchResultErrorEntry],
    rejected: fn(&BatchResultErrorEntry) -> QueueError,
) -> Vec<Result<(), QueueError>> {
    let not_in_answer = || Err(QueueError::OutcomeUnknown("the answer does not contain this entry".into()));
    let mut answers: Vec<_> = (0..count).map(|_| not_in_answer()).collect();
    for id in done {
        if let Some(place) = id.parse().ok().and_then(|place: usize| answers.get_mut(place)) {
            *place = Ok(());
        }
    }
    for entry in failed {
        if let Some(place) = entry.id().parse().ok().and_then(|place: usize| answers.get_mut(place)) {
            *place = Err(rejected(entry));
        }
    }
    answers
}

fn send_rejected(entry: &BatchResultErrorEntry) -> QueueError {
    let text = rejection(entry);
    if entry.sender_fault() { QueueError::Unavailable(text.into()) } else { QueueError::OutcomeUnknown(text.into()) }
}

/// A receipt handle that SQS no longer accepts means a lost lease.
fn settle_rejected(entry: &BatchResultErrorEntry) -> QueueError {
    let about_handle = entry.message().is_some_and(|text| text.contains("ReceiptHandle") || text.contains("receipt"));
    let lost = match entry.code() {
        code if code.contains("ReceiptHandleIsInvalid") || code.contains("MessageNotInflight") => true,
        code if code.contains("InvalidParameterValue") => about_handle,
        _ => false,
    };
    if lost { QueueError::LeaseLost } else { send_rejected(entry) }
}

fn rejection(entry: &BatchResultErrorEntry) -> String {
    format!("SQS rejected the entry: {} ({})", entry.code(), entry.message().unwrap_or("no message"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(id: &str, code: &str, message: &str, sender_fault: bool) -> BatchResultErrorEntry {
        let entry = BatchResultErrorEntry::builder().id(id).code(code).message(message).sender_fault(sender_fault);
        entry.build().unwrap()
    }

    #[test]
    fn each_entry_gets_its_own_answer() {
        let failed = [
            failed("3", "ReceiptHandleIsInvalid", "no", true),
            failed("0", "InternalError", "oops", false),
            failed("99", "InternalError", "not ours", false),
            failed("x", "InternalError", "not ours", false),
        ];
        let answers = answer_each(5, ["4", "1", "77"].into_iter(), &failed, settle_rejected);
        use QueueError::{LeaseLost, OutcomeUnknown};
        assert!(
            matches!(answers[..], [Err(OutcomeUnknown(_)), Ok(()), Err(OutcomeUnknown(_)), Err(LeaseLost), Ok(())]),
            "{answers:?}"
        );
    }

    #[test]
    fn a_rejected_entry_is_classified_by_its_code() {
        let lost = |code, message| matches!(settle_rejected(&failed("0", code, message, true)), QueueError::LeaseLost);
        assert!(lost("ReceiptHandleIsInvalid", "The input receipt handle is invalid."));
        assert!(lost("AWS.SimpleQueueService.MessageNotInflight", ""));
        assert!(lost(
            "InvalidParameterValue",
            "Value x for parameter ReceiptHandle is invalid. Reason: Message does not exist"
        ));
        assert!(!lost("InvalidParameterValue", "Total VisibilityTimeout for the message is beyond the limit"));
        assert!(!lost("AccessDenied", "receipt"));
        let sent = send_rejected(&failed("0", "InvalidMessageContents", "bad", true));
        assert!(matches!(sent, QueueError::Unavailable(_)), "rejected for certain");
        let sent = send_rejected(&failed("0", "ReceiptHandleIsInvalid", "bad", false));
        assert!(matches!(sent, QueueError::OutcomeUnknown(_)), "SQS failed internally");
    }

    #[test]
    fn a_missing_queue_is_recognised_by_each_of_its_codes() {
        let coded = |code: &str| RequestError {
            had_no_effect: true,
            server_away: false,
            code: Some(code.into()),
            text: "".into(),
        };
        assert!(coded("AWS.SimpleQueueService.NonExistentQueue").is_no_such_queue());
        assert!(coded("QueueDoesNotExist").is_no_such_queue());
        assert!(!coded("AccessDenied").is_no_such_queue());
        assert!(!RequestError::not_started().is_no_such_queue());
    }
}
