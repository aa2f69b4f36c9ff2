//! Direct calls to the SQS emulator, bypassing Baton.

use harness::engine::server;
use serde_json::{Value, json};

use crate::relay_fixture::{RelayFixture, SOON};

/// One of a fixture's queues.
pub struct SqsQueue {
    http: reqwest::Client,
    url: String,
}

impl SqsQueue {
    pub fn live(relay: &RelayFixture) -> Self {
        Self { http: relay.http.clone(), url: relay.env["SQS_QUEUE_URL"].clone() }
    }

    pub fn dead(relay: &RelayFixture) -> Self {
        Self { http: relay.http.clone(), url: relay.env["SQS_DLQ_URL"].clone() }
    }

    /// Receives up to ten messages and hides them from other readers for this time.
    pub async fn receive(&self, visibility_timeout_s: u32) -> Vec<Value> {
        let request = json!({
            "QueueUrl": self.url, "MaxNumberOfMessages": 10, "VisibilityTimeout": visibility_timeout_s, "WaitTimeSeconds": 0,
            "MessageAttributeNames": ["All"],
        });
        match self.call("ReceiveMessage", &request).await["Messages"].take() {
            Value::Array(messages) => messages,
            _ => Vec::new(),
        }
    }

    /// Sends a copy of the message.
    pub async fn copy(&self, message: &Value) {
        let copy = json!({
            "QueueUrl": self.url, "MessageBody": message["Body"], "MessageAttributes": message["MessageAttributes"],
        });
        self.call("SendMessage", &copy).await;
    }

    /// The number of messages, hidden ones included.
    pub async fn count(&self) -> usize {
        let request = json!({ "QueueUrl": self.url, "AttributeNames": ["All"] });
        let answer = self.call("GetQueueAttributes", &request).await;
        let number = |name: &str| answer["Attributes"][name].as_str().unwrap().parse::<usize>().unwrap();
        number("ApproximateNumberOfMessages") + number("ApproximateNumberOfMessagesNotVisible")
    }

    async fn call(&self, action: &str, body: &Value) -> Value {
        // The emulator reads the region from the header and does not check the signature.
        let authorization = "AWS4-HMAC-SHA256 Credential=test/20260101/ap-northeast-2/sqs/aws4_request, \
                      SignedHeaders=host, Signature=0";
        let request = self
            .http
            .post(server("BATON_TEST_SQS_URL"))
            .header("content-type", "application/x-amz-json-1.0")
            .header("x-amz-target", format!("AmazonSQS.{action}"))
            .header("authorization", authorization)
            .timeout(SOON)
            .body(body.to_string());
        let answer = request.send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert!(status.is_success(), "{action}: {status} {text}");
        serde_json::from_str(&text).unwrap_or_default()
    }
}
