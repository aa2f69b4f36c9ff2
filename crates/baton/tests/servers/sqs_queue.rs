//! SQS as others use it, behind Baton's back: plain calls to the emulator.

use harness::engine::server;
use serde_json::{Value, json};

use crate::relay_fixture::{SOON, Stand};

/// One queue of a stand's.
pub struct SqsQueue {
    http: reqwest::Client,
    url: String,
}

impl SqsQueue {
    pub fn live(stand: &Stand) -> Self {
        Self { http: stand.http.clone(), url: stand.env["SQS_QUEUE_URL"].clone() }
    }

    pub fn dead(stand: &Stand) -> Self {
        Self { http: stand.http.clone(), url: stand.env["SQS_DLQ_URL"].clone() }
    }

    /// Up to ten messages, hidden from others for so long.
    pub async fn receive(&self, hidden_s: u32) -> Vec<Value> {
        let asked = json!({
            "QueueUrl": self.url, "MaxNumberOfMessages": 10, "VisibilityTimeout": hidden_s, "WaitTimeSeconds": 0,
            "MessageAttributeNames": ["All"],
        });
        match self.call("ReceiveMessage", &asked).await["Messages"].take() {
            Value::Array(messages) => messages,
            _ => Vec::new(),
        }
    }

    /// The same message once more.
    pub async fn copy(&self, message: &Value) {
        let copy = json!({
            "QueueUrl": self.url, "MessageBody": message["Body"], "MessageAttributes": message["MessageAttributes"],
        });
        self.call("SendMessage", &copy).await;
    }

    /// How many there are, hidden ones included.
    pub async fn count(&self) -> usize {
        let asked = json!({ "QueueUrl": self.url, "AttributeNames": ["All"] });
        let answer = self.call("GetQueueAttributes", &asked).await;
        let number = |name: &str| answer["Attributes"][name].as_str().unwrap().parse::<usize>().unwrap();
        number("ApproximateNumberOfMessages") + number("ApproximateNumberOfMessagesNotVisible")
    }

    async fn call(&self, action: &str, body: &Value) -> Value {
        // The emulator wants to know the region; it does not check who signs.
        let signed = "AWS4-HMAC-SHA256 Credential=test/20260101/ap-northeast-2/sqs/aws4_request, \
                      SignedHeaders=host, Signature=0";
        let request = self
            .http
            .post(server("BATON_TEST_SQS_URL"))
            .header("content-type", "application/x-amz-json-1.0")
            .header("x-amz-target", format!("AmazonSQS.{action}"))
            .header("authorization", signed)
            .timeout(SOON)
            .body(body.to_string());
        let answer = request.send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert!(status.is_success(), "{action}: {status} {text}");
        serde_json::from_str(&text).unwrap_or_default()
    }
}
