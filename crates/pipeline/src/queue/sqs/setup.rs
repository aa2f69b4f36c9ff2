//! Finds or creates the two queues, and rejects queues whose attributes differ from the settings: with a shorter lease
//! than configured work is done twice, and without a redrive policy a poison message is delivered forever.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName as Name;

use super::client::{RequestError, SqsClient};
use super::wire::whole_seconds;
use super::{SqsOpenError, SqsOptions};
use crate::queue::QueueOptions;

// SQS's own limits.
const RETENTION_MIN: Duration = Duration::from_secs(60);
const RETENTION_MAX: Duration = Duration::from_secs(14 * 24 * 3600);
const LEASE_MAX: Duration = Duration::from_secs(12 * 3600);
const RECEIVES_MAX: u32 = 1000;
/// The queue's default long poll, for other readers; this backend sets the wait in each receive.
const LONG_POLL_S: &str = "20";

/// The URLs of the two queues.
pub(super) struct Urls {
    pub(super) queue: String,
    pub(super) dead: String,
}

/// The attributes that a queue must have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ExpectedAttributes {
    lease_s: Option<i32>,
    retention_s: i32,
    /// Whether a longer retention is accepted, because it loses nothing.
    retention_at_least: bool,
    /// ARN of the dead-letter queue and the receive limit; `Some(None)`: there must be no redrive policy.
    redrive: Option<Option<(String, u32)>>,
}

/// Finds or creates both queues, checks their attributes and returns their URLs.
pub(super) async fn prepare(
    client: &SqsClient,
    options: &SqsOptions,
    queue: &QueueOptions,
) -> Result<Urls, SqsOpenError> {
    check_options(options, queue)?;
    let retention_s = whole_seconds(queue.retention);
    let expected_dead = ExpectedAttributes { retention_s, retention_at_least: true, ..ExpectedAttributes::default() };
    let (dead, found) = ensure(client, &options.dead_letter_queue, options.auto_create, &expected_dead).await?;
    let arn = found.get(&Name::QueueArn).cloned().unwrap_or_default();
    let wanted = ExpectedAttributes {
        lease_s: Some(whole_seconds(queue.lease)),
        retention_s,
        retention_at_least: false,
        redrive: Some(queue.receives_max.map(|max| (arn, max))),
    };
    let (queue, _) = ensure(client, &options.queue, options.auto_create, &wanted).await?;
    Ok(Urls { queue, dead })
}

fn check_options(options: &SqsOptions, queue: &QueueOptions) -> Result<(), SqsOpenError> {
    let mut wrong = Vec::new();
    if !(RETENTION_MIN..=RETENTION_MAX).contains(&queue.retention) {
        wrong.push(format!("SQS keeps messages for 1 minute to 14 days, not {} s", queue.retention.as_secs()));
    }
    if queue.lease.is_zero() || queue.lease > LEASE_MAX {
        wrong.push(format!("SQS leases messages for up to 12 hours, not {} s", queue.lease.as_secs()));
    }
    if queue.receives_max.is_some_and(|max| !(1..=RECEIVES_MAX).contains(&max)) {
        wrong.push(format!("the SQS redrive limit is 1 to {RECEIVES_MAX} receives"));
    }
    if name_of(&options.queue) == name_of(&options.dead_letter_queue) {
        wrong.push("the queue and its dead-letter queue are the same".into());
    }
    if wrong.is_empty() { Ok(()) } else { Err(SqsOpenError::Options(wrong)) }
}

/// Finds or creates one queue, checks its attributes, and returns its URL and attributes.
async fn ensure(
    client: &SqsClient,
    queue: &str,
    auto_create: bool,
    wanted: &ExpectedAttributes,
) -> Result<(String, HashMap<Name, String>), SqsOpenError> {
    let (url, attributes) = match find(client, queue).await? {
        Some(found) => found,
        None if auto_create => {
            create(client, name_of(queue), wanted).await?;
            find(client, queue).await?.ok_or_else(|| SqsOpenError::Missing { queue: queue.to_owned() })?
        }
        None => return Err(SqsOpenError::Missing { queue: queue.to_owned() }),
    };
    let differences = differences(&attributes, wanted);
    if differences.is_empty() {
        Ok((url, attributes))
    } else {
        Err(SqsOpenError::Differs { queue: name_of(queue).to_owned(), differences })
    }
}

async fn find(client: &SqsClient, queue: &str) -> Result<Option<(String, HashMap<Name, String>)>, SqsOpenError> {
    let url = if is_url(queue) {
        queue.to_owned()
    } else {
        let request = client.sdk.get_queue_url().queue_name(queue).send();
        match client.request(client.deadline(), request).await {
            Ok(answer) => answer.queue_url.unwrap_or_default(),
            Err(error) if error.is_no_such_queue() => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    };
    let request = client.sdk.get_queue_attributes().queue_url(&url).attribute_names(Name::All).send();
    match client.request(client.deadline(), request).await {
        Ok(answer) => Ok(Some((url, answer.attributes.unwrap_or_default()))),
        Err(error) if error.is_no_such_queue() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Creates a queue. Two processes may do this at the same time: with equal attributes SQS creates one queue and both
/// succeed. With different attributes SQS answers that the name is taken, and the check that follows names the difference.
async fn create(client: &SqsClient, name: &str, wanted: &ExpectedAttributes) -> Result<(), RequestError> {
    let create = client.sdk.create_queue().queue_name(name).set_attributes(Some(attributes(wanted)));
    match client.request(client.deadline(), create.send()).await {
        Err(error) if !error.is_queue_name_taken() => Err(error),
        _ => Ok(()),
    }
}

fn attributes(wanted: &ExpectedAttributes) -> HashMap<Name, String> {
    let mut attributes = HashMap::from([
        (Name::MessageRetentionPeriod, wanted.retention_s.to_string()),
        (Name::ReceiveMessageWaitTimeSeconds, LONG_POLL_S.to_owned()),
    ]);
    if let Some(lease_s) = wanted.lease_s {
        attributes.insert(Name::VisibilityTimeout, lease_s.to_string());
    }
    if let Some(Some((arn, max))) = &wanted.redrive {
        let policy = serde_json::json!({ "deadLetterTargetArn": arn, "maxReceiveCount": max });
        attributes.insert(Name::RedrivePolicy, policy.to_string());
    }
    attributes
}

/// One text for each attribute that differs from the expected one.
fn differences(found: &HashMap<Name, String>, wanted: &ExpectedAttributes) -> Vec<String> {
    let mut differences = Vec::new();
    let seconds = |name: Name| found.get(&name).and_then(|value| value.parse::<i32>().ok());
    let mut compare = |what: &str, found: Option<i32>, wanted: i32, at_least: bool| {
        if found.is_none_or(|found| if at_least { found < wanted } else { found != wanted }) {
            let found = found.map_or("not reported".to_owned(), |found| format!("{found} s"));
            differences.push(format!("{what} is {found}, configured is {wanted} s"));
        }
    };
    if let Some(lease_s) = wanted.lease_s {
        compare("the visibility timeout", seconds(Name::VisibilityTimeout), lease_s, false);
    }
    compare("the retention", seconds(Name::MessageRetentionPeriod), wanted.retention_s, wanted.retention_at_least);
    if let Some(wanted) = &wanted.redrive {
        differences.extend(redrive_differences(found.get(&Name::RedrivePolicy).map(String::as_str), wanted.as_ref()));
    }
    differences
}

fn redrive_differences(found: Option<&str>, wanted: Option<&(String, u32)>) -> Vec<String> {
    let policy = found.filter(|text| !text.is_empty()).map(|text| serde_json::from_str(text).unwrap_or_default());
    let policy: Option<serde_json::Value> = policy;
    let (policy, (arn, max)) = match (policy, wanted) {
        (None, None) => return Vec::new(),
        (Some(policy), None) => return vec![format!("there is a redrive policy, {policy}; none is configured")],
        (None, Some((arn, max))) => {
            return vec![format!("there is no redrive policy, configured is {arn} after {max} receives")];
        }
        (Some(policy), Some(wanted)) => (policy, wanted),
    };
    let mut differences = Vec::new();
    let found_arn = policy["deadLetterTargetArn"].as_str().unwrap_or("not reported");
    if found_arn != arn {
        differences.push(format!("the redrive goes to {found_arn}, configured is {arn}"));
    }
    // Some tools write the number as text.
    let found_max = &policy["maxReceiveCount"];
    let found_max = found_max.as_u64().or_else(|| found_max.as_str().and_then(|text| text.parse().ok()));
    if found_max != Some(u64::from(*max)) {
        let found_max = found_max.map_or("not reported".to_owned(), |found| found.to_string());
        differences.push(format!("the redrive limit is {found_max} receives, configured is {max}"));
    }
    differences
}

fn is_url(queue: &str) -> bool {
    queue.contains("://")
}

/// The queue's name: the last part of its URL, or the name itself.
pub(super) fn name_of(queue: &str) -> &str {
    if is_url(queue) { queue.rsplit('/').next().unwrap_or(queue) } else { queue }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARN: &str = "arn:aws:sqs:ap-northeast-2:1:q-dlq";

    fn wanted() -> ExpectedAttributes {
        ExpectedAttributes {
            lease_s: Some(60),
            retention_s: 345_600,
            retention_at_least: false,
            redrive: Some(Some((ARN.into(), 3))),
        }
    }

    fn found(changes: &[(Name, &str)]) -> HashMap<Name, String> {
        let mut found = attributes(&wanted());
        found.extend(changes.iter().map(|(name, value)| (name.clone(), value.to_string())));
        found
    }

    #[test]
    fn created_attributes_have_no_differences() {
        assert!(differences(&found(&[]), &wanted()).is_empty());
        let dead = ExpectedAttributes { retention_s: 100, retention_at_least: true, ..ExpectedAttributes::default() };
        assert!(differences(&attributes(&dead), &dead).is_empty());
        let none = ExpectedAttributes { redrive: Some(None), ..wanted() };
        assert!(differences(&attributes(&none), &none).is_empty());
    }

    #[test]
    fn each_difference_is_named() {
        let said = |changes: &[(Name, &str)]| differences(&found(changes), &wanted()).join("; ");
        assert_eq!(said(&[(Name::VisibilityTimeout, "30")]), "the visibility timeout is 30 s, configured is 60 s");
        assert_eq!(said(&[(Name::MessageRetentionPeriod, "60")]), "the retention is 60 s, configured is 345600 s");
        let other = r#"{"deadLetterTargetArn":"arn:other","maxReceiveCount":"5"}"#;
        assert_eq!(
            said(&[(Name::RedrivePolicy, other)]),
            format!(
                "the redrive goes to arn:other, configured is {ARN}; the redrive limit is 5 receives, configured is 3"
            )
        );
        assert!(said(&[(Name::RedrivePolicy, "")]).starts_with("there is no redrive policy"));
        assert!(said(&[(Name::RedrivePolicy, "nonsense")]).contains("not reported"));
        let none = ExpectedAttributes { redrive: Some(None), ..wanted() };
        assert!(differences(&found(&[]), &none)[0].starts_with("there is a redrive policy"));
    }

    #[test]
    fn a_receive_limit_written_as_text_is_accepted() {
        let text = format!(r#"{{"deadLetterTargetArn":"{ARN}","maxReceiveCount":"3"}}"#);
        assert!(differences(&found(&[(Name::RedrivePolicy, &text)]), &wanted()).is_empty());
    }

    #[test]
    fn a_longer_retention_of_dead_letters_is_accepted() {
        let dead =
            ExpectedAttributes { retention_s: 345_600, retention_at_least: true, ..ExpectedAttributes::default() };
        let kept = |seconds: &str| differences(&HashMap::from([(Name::MessageRetentionPeriod, seconds.into())]), &dead);
        assert!(kept("1209600").is_empty());
        assert_eq!(kept("60").len(), 1);
    }

    #[test]
    fn a_queue_is_configured_by_name_or_url() {
        assert_eq!(name_of("relay-transactions"), "relay-transactions");
        assert_eq!(name_of("https://sqs.ap-northeast-2.amazonaws.com/123/relay-transactions"), "relay-transactions");
    }
}
