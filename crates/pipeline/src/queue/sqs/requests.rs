//! The requests to SQS: each with a time limit, no more than a bounded number at once, and each answer sorted into what
//! it means. The SDK retries nothing: a send that is repeated in secret is a message twice, and whoever settles
//! repeats what failed for a passing reason anyway.
//!
//! The question after every failure is whether the request may have had its effect. It certainly had none if no
//! connection came up or SQS said no (4xx); a 5xx, a broken connection or silence leaves it open.

use std::error::Error;
use std::fmt;
use std::future::Future;
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

use super::wire::{self, Delivery, Parcel};
use crate::queue::QueueError;

/// How many entries SQS takes in one request, and hands out in one answer.
pub(super) const BATCH_MAX: usize = 10;
/// How many requests that settle run at once.
const SETTLING_MAX: usize = 32;

/// The client, and how long it may take.
pub(super) struct Calls {
    pub(super) client: Client,
    pub(super) timeout: Duration,
    /// SQS has said that a queue is not there.
    pub(super) missing: AtomicBool,
    settling: Semaphore,
}

/// Why a request failed, for everybody who had a part in it.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    /// It certainly had no effect.
    certain: bool,
    code: Option<String>,
    text: Arc<str>,
}

/// What became of each entry of a batch, or of the batch.
type Answers = Result<Vec<Result<(), QueueError>>, Fault>;

/// How full SQS says a queue is.
pub(super) struct Counts {
    pub(super) ready: u64,
    pub(super) hidden: u64,
    pub(super) delayed: u64,
}

impl Calls {
    pub(super) fn new(client: Client, timeout: Duration) -> Self {
        Self { client, timeout, missing: AtomicBool::new(false), settling: Semaphore::new(SETTLING_MAX) }
    }

    /// When a call that starts now must be over.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// One request. Waiting for its answer ends at `deadline`, whatever the server does.
    pub(super) async fn ask<T, E>(
        &self,
        deadline: Instant,
        request: impl Future<Output = Result<T, SdkError<E, HttpResponse>>>,
    ) -> Result<T, Fault>
    where
        E: ProvideErrorMetadata + Error + 'static,
    {
        let fault = match timeout_at(deadline, request).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => Fault::from(error),
            Err(_) => Fault { certain: false, code: None, text: "no answer in time".into() },
        };
        if fault.is_no_such_queue() {
            self.missing.store(true, Ordering::Relaxed);
        }
        Err(fault)
    }

    /// One batch of messages, of no more entries and bytes than SQS takes.
    pub(super) async fn send(&self, queue_url: &str, parcels: Vec<Parcel>) -> Vec<Result<(), QueueError>> {
        let count = parcels.len();
        let entry = |(number, parcel): (usize, Parcel)| {
            SendMessageBatchRequestEntry::builder()
                .id(number.to_string())
                .message_body(parcel.body)
                .delay_seconds(parcel.delay_s)
                .set_message_attributes(Some(parcel.attributes))
                .build()
        };
        let entries: Result<Vec<_>, _> = parcels.into_iter().enumerate().map(entry).collect();
        let entries = match entries {
            Ok(entries) => entries,
            Err(error) => return all(count, &Fault::unsent(&error)),
        };
        let request = self.client.send_message_batch().queue_url(queue_url).set_entries(Some(entries)).send();
        match self.ask(self.deadline(), request).await {
            Ok(answer) => {
                answer_each(count, answer.successful().iter().map(|entry| entry.id()), answer.failed(), send_refused)
            }
            Err(fault) => all(count, &fault),
        }
    }

    /// Up to ten deliveries, hidden from others for `hide_s`.
    pub(super) async fn receive(
        &self,
        queue_url: &str,
        max: usize,
        wait_s: i32,
        hide_s: i32,
    ) -> Result<Vec<Delivery>, Fault> {
        #[expect(deprecated, reason = "older servers know no other name for the field and would answer no counts")]
        let request = self
            .client
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
        let answer = self.ask(self.deadline() + wait, request).await?;
        let now = SystemTime::now();
        Ok(answer.messages.unwrap_or_default().into_iter().filter_map(|message| wire::read(message, now)).collect())
    }

    /// Deletes, ten at a time.
    pub(super) async fn delete(&self, queue_url: &str, handles: &[String]) -> Vec<Result<(), QueueError>> {
        let deadline = self.deadline();
        let answers =
            join_all(handles.chunks(BATCH_MAX).map(|part| self.delete_batch(queue_url, part, deadline))).await;
        in_order(handles.chunks(BATCH_MAX), answers)
    }

    async fn delete_batch(&self, queue_url: &str, part: &[String], deadline: Instant) -> Answers {
        let _turn = self.turn(deadline).await?;
        let entry = |(number, handle): (usize, &String)| {
            DeleteMessageBatchRequestEntry::builder().id(number.to_string()).receipt_handle(handle).build()
        };
        let entries = part.iter().enumerate().map(entry).collect::<Result<Vec<_>, _>>();
        let entries = entries.map_err(|error| Fault::unsent(&error))?;
        let request = self.client.delete_message_batch().queue_url(queue_url).set_entries(Some(entries)).send();
        let answer = self.ask(deadline, request).await?;
        let done = answer.successful().iter().map(|entry| entry.id());
        Ok(answer_each(part.len(), done, answer.failed(), settle_refused))
    }

    /// Makes each message come back after so many seconds, ten at a time.
    pub(super) async fn hide(&self, queue_url: &str, entries: &[(String, i32)]) -> Vec<Result<(), QueueError>> {
        let deadline = self.deadline();
        let answers = join_all(entries.chunks(BATCH_MAX).map(|part| self.hide_batch(queue_url, part, deadline))).await;
        in_order(entries.chunks(BATCH_MAX), answers)
    }

    async fn hide_batch(&self, queue_url: &str, part: &[(String, i32)], deadline: Instant) -> Answers {
        let _turn = self.turn(deadline).await?;
        let entry = |(number, (handle, seconds)): (usize, &(String, i32))| {
            ChangeMessageVisibilityBatchRequestEntry::builder()
                .id(number.to_string())
                .receipt_handle(handle)
                .visibility_timeout(*seconds)
                .build()
        };
        let entries = part.iter().enumerate().map(entry).collect::<Result<Vec<_>, _>>();
        let entries = entries.map_err(|error| Fault::unsent(&error))?;
        let change = self.client.change_message_visibility_batch();
        let answer = self.ask(deadline, change.queue_url(queue_url).set_entries(Some(entries)).send()).await?;
        let done = answer.successful().iter().map(|entry| entry.id());
        Ok(answer_each(part.len(), done, answer.failed(), settle_refused))
    }

    /// Leave to start a request that settles. If the others take too long, nothing was asked.
    async fn turn(&self, deadline: Instant) -> Result<SemaphorePermit<'_>, Fault> {
        timeout_at(deadline, self.settling.acquire()).await.ok().and_then(Result::ok).ok_or_else(Fault::not_started)
    }

    /// What SQS says about a queue, as far as it knows at the moment.
    pub(super) async fn counts(&self, queue_url: &str) -> Result<Counts, Fault> {
        use QueueAttributeName as Name;
        let names = [
            Name::ApproximateNumberOfMessages,
            Name::ApproximateNumberOfMessagesNotVisible,
            Name::ApproximateNumberOfMessagesDelayed,
        ];
        let ask = self.client.get_queue_attributes().queue_url(queue_url);
        let request = ask.set_attribute_names(Some(names.to_vec())).send();
        let answer = self.ask(self.deadline(), request).await?;
        let [ready, hidden, delayed] = names.map(|name| {
            let value = answer.attributes().and_then(|attributes| attributes.get(&name));
            value.and_then(|value| value.parse().ok()).unwrap_or(0)
        });
        Ok(Counts { ready, hidden, delayed })
    }
}

impl Fault {
    pub(super) fn not_started() -> Self {
        Self { certain: true, code: None, text: "no request could be started in time".into() }
    }

    fn unsent(error: &(dyn Error + 'static)) -> Self {
        Self { certain: true, code: None, text: chain(error).into() }
    }

    /// Whether SQS said that there is no such queue. Servers write the code in more than one way.
    pub(super) fn is_no_such_queue(&self) -> bool {
        self.code.as_deref().is_some_and(|code| code.contains("NonExistentQueue") || code.contains("QueueDoesNotExist"))
    }

    /// Whether SQS said that a queue of that name is there already, with other attributes.
    pub(super) fn is_queue_exists(&self) -> bool {
        self.code.as_deref().is_some_and(|code| code.contains("QueueNameExists") || code.contains("QueueAlreadyExists"))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for Fault {}

impl From<Fault> for QueueError {
    fn from(fault: Fault) -> Self {
        if fault.certain { Self::Unavailable(fault.into()) } else { Self::OutcomeUnknown(fault.into()) }
    }
}

impl<E> From<SdkError<E, HttpResponse>> for Fault
where
    E: ProvideErrorMetadata + Error + 'static,
{
    fn from(error: SdkError<E, HttpResponse>) -> Self {
        let certain = match &error {
            SdkError::ConstructionFailure(_) => true,
            SdkError::DispatchFailure(failure) => {
                failure.is_user() || failure.as_connector_error().is_some_and(|error| never_left(error))
            }
            SdkError::ServiceError(answer) => answer.raw().status().is_client_error(),
            _ => false,
        };
        let code = error.code().map(str::to_owned);
        Self { certain, code, text: chain(&error).into() }
    }
}

/// No connection came up, or there were no keys to sign with.
fn never_left(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let refused = error.downcast_ref::<hyper_util::client::legacy::Error>().is_some_and(|error| error.is_connect());
        if refused || error.is::<aws_credential_types::provider::error::CredentialsError>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// An error and its causes in one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// The answers to all batches, one for each entry.
fn in_order<'a, T: 'a>(batches: impl Iterator<Item = &'a [T]>, answers: Vec<Answers>) -> Vec<Result<(), QueueError>> {
    let answer = |(part, answers): (&[T], Answers)| answers.unwrap_or_else(|fault| all(part.len(), &fault));
    batches.zip(answers).flat_map(answer).collect()
}

fn all(count: usize, fault: &Fault) -> Vec<Result<(), QueueError>> {
    (0..count).map(|_| Err(fault.clone().into())).collect()
}

/// Puts each part of an answer where its entry was; our entry ids are their places. An entry that the answer does not
/// mention may have had its effect.
fn answer_each<'a>(
    count: usize,
    done: impl Iterator<Item = &'a str>,
    failed: &[BatchResultErrorEntry],
    refused: fn(&BatchResultErrorEntry) -> QueueError,
) -> Vec<Result<(), QueueError>> {
    let unmentioned = || Err(QueueError::OutcomeUnknown("the answer leaves this entry out".into()));
    let mut answers: Vec<_> = (0..count).map(|_| unmentioned()).collect();
    for id in done {
        if let Some(place) = id.parse().ok().and_then(|place: usize| answers.get_mut(place)) {
            *place = Ok(());
        }
    }
    for entry in failed {
        if let Some(place) = entry.id().parse().ok().and_then(|place: usize| answers.get_mut(place)) {
            *place = Err(refused(entry));
        }
    }
    answers
}

fn send_refused(entry: &BatchResultErrorEntry) -> QueueError {
    let text = refusal(entry);
    if entry.sender_fault() { QueueError::Unavailable(text.into()) } else { QueueError::OutcomeUnknown(text.into()) }
}

/// A handle that SQS does not take any more is a lease that was lost.
fn settle_refused(entry: &BatchResultErrorEntry) -> QueueError {
    let about_handle = entry.message().is_some_and(|text| text.contains("ReceiptHandle") || text.contains("receipt"));
    let lost = match entry.code() {
        code if code.contains("ReceiptHandleIsInvalid") || code.contains("MessageNotInflight") => true,
        code if code.contains("InvalidParameterValue") => about_handle,
        _ => false,
    };
    if lost { QueueError::LeaseLost } else { send_refused(entry) }
}

fn refusal(entry: &BatchResultErrorEntry) -> String {
    format!("SQS refused: {} ({})", entry.code(), entry.message().unwrap_or("no message"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(id: &str, code: &str, message: &str, sender_fault: bool) -> BatchResultErrorEntry {
        let entry = BatchResultErrorEntry::builder().id(id).code(code).message(message).sender_fault(sender_fault);
        entry.build().unwrap()
    }

    #[test]
    fn each_failed_entry_is_told_to_its_owner() {
        let failed = [
            failed("3", "ReceiptHandleIsInvalid", "no", true),
            failed("0", "InternalError", "oops", false),
            failed("99", "InternalError", "not ours", false),
            failed("x", "InternalError", "not ours", false),
        ];
        let answers = answer_each(5, ["4", "1", "77"].into_iter(), &failed, settle_refused);
        use QueueError::{LeaseLost, OutcomeUnknown};
        assert!(
            matches!(answers[..], [Err(OutcomeUnknown(_)), Ok(()), Err(OutcomeUnknown(_)), Err(LeaseLost), Ok(())]),
            "{answers:?}"
        );
    }

    #[test]
    fn a_refusal_is_sorted_by_its_code() {
        let lost = |code, message| matches!(settle_refused(&failed("0", code, message, true)), QueueError::LeaseLost);
        assert!(lost("ReceiptHandleIsInvalid", "The input receipt handle is invalid."));
        assert!(lost("AWS.SimpleQueueService.MessageNotInflight", ""));
        assert!(lost(
            "InvalidParameterValue",
            "Value x for parameter ReceiptHandle is invalid. Reason: Message does not exist"
        ));
        assert!(!lost("InvalidParameterValue", "Total VisibilityTimeout for the message is beyond the limit"));
        assert!(!lost("AccessDenied", "receipt"));
        let sent = send_refused(&failed("0", "InvalidMessageContents", "bad", true));
        assert!(matches!(sent, QueueError::Unavailable(_)), "refused for certain");
        let sent = send_refused(&failed("0", "ReceiptHandleIsInvalid", "bad", false));
        assert!(matches!(sent, QueueError::OutcomeUnknown(_)), "SQS failed half-way");
    }

    #[test]
    fn a_missing_queue_has_many_names() {
        let coded = |code: &str| Fault { certain: true, code: Some(code.into()), text: "".into() };
        assert!(coded("AWS.SimpleQueueService.NonExistentQueue").is_no_such_queue());
        assert!(coded("QueueDoesNotExist").is_no_such_queue());
        assert!(!coded("AccessDenied").is_no_such_queue());
        assert!(!Fault::not_started().is_no_such_queue());
    }
}
