//! Clients that put load on the API and record each answer. A client without an answer continues with its next request,
//! unless its profile makes it repeat the request.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::relay_fixture::{API_KEY, RelayFixture, SOON, TO, serial_data};

/// A request's amount is this plus its serial number, which distinguishes its row from the rows of the warm-up.
const AMOUNT_BASE: usize = 1_000_000;

/// A client of the API.
#[derive(Clone)]
pub struct LoadClient {
    http: reqwest::Client,
    base: String,
    /// Requests answered with 503 so far.
    pub refusals: Arc<AtomicUsize>,
    /// Requests without any response so far: no connection, or the client's own timeout.
    pub without_response: Arc<AtomicUsize>,
}

/// The answers that clients received, by serial number.
#[derive(Debug, Default)]
pub struct ClientAnswers {
    /// 202: transaction id and serial number.
    pub accepted: Vec<(String, usize)>,
    /// 503: the transaction must never be sent.
    pub refused: Vec<usize>,
    /// 504 or no response: the transaction may have been sent, at most once.
    pub unanswered: Vec<usize>,
    /// The cause of each unanswered request.
    pub unanswered_causes: Vec<String>,
}

/// The answer to one request.
pub enum Answer {
    Accepted(String),
    Refused,
    /// 504 or no response, with the cause.
    OutcomeUnknown(String),
}

impl ClientAnswers {
    pub fn add(&mut self, serial: usize, answer: Answer) {
        match answer {
            Answer::Accepted(id) => self.accepted.push((id, serial)),
            Answer::Refused => self.refused.push(serial),
            Answer::OutcomeUnknown(cause) => {
                self.unanswered.push(serial);
                self.unanswered_causes.push(format!("{serial}: {cause}"));
            }
        }
    }

    pub fn extend(&mut self, other: Self) {
        self.accepted.extend(other.accepted);
        self.refused.extend(other.refused);
        self.unanswered.extend(other.unanswered);
        self.unanswered_causes.extend(other.unanswered_causes);
    }

    pub fn total(&self) -> usize {
        self.accepted.len() + self.refused.len() + self.unanswered.len()
    }
}

/// Number and behaviour of the clients of one load.
#[derive(Clone, Copy)]
pub struct LoadProfile {
    pub clients: usize,
    /// Upper bound of the random pause between two requests of one client.
    pub pause_max: Duration,
    /// Every second client sends idempotency keys and, without an answer, repeats the request until it is accepted.
    pub retry_until_accepted: bool,
}

impl LoadClient {
    pub fn of(relay: &RelayFixture) -> Self {
        Self {
            http: relay.http.clone(),
            base: relay.base.clone(),
            refusals: Arc::default(),
            without_response: Arc::default(),
        }
    }

    pub async fn get(&self, path: &str) -> Option<(u16, Value)> {
        let request = self.http.get(format!("{}{path}", self.base)).header("x-api-key", API_KEY);
        let answer = request.timeout(SOON).send().await.ok()?;
        Some((answer.status().as_u16(), answer.json().await.ok()?))
    }

    /// One page of the list, newest first, and the cursor of the next page.
    pub async fn page(&self, cursor: Option<&str>) -> Option<(Vec<Value>, Option<String>)> {
        let cursor = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
        let (status, mut page) = self.get(&format!("/api/v1/relay/transactions?limit=200{cursor}")).await?;
        let Value::Array(rows) = page["transactions"].take() else { return None };
        (status == 200).then(|| (rows, page["nextCursor"].as_str().map(str::to_owned)))
    }

    /// Sends the transaction with this serial number.
    pub async fn send(&self, serial: usize, key: Option<&str>) -> Answer {
        let mut request = self.http.post(format!("{}/api/v1/relay/direct", self.base)).header("x-api-key", API_KEY);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let response = match request.timeout(SOON).json(&body(serial)).send().await {
            Ok(response) => response,
            Err(failure) => {
                self.without_response.fetch_add(1, Ordering::Relaxed);
                return Answer::OutcomeUnknown(format!("{failure:?}"));
            }
        };
        let status = response.status().as_u16();
        let body = match response.json::<Value>().await {
            Ok(body) => body,
            Err(failure) => return Answer::OutcomeUnknown(format!("{status}, then {failure:?}")),
        };
        match status {
            202 => Answer::Accepted(body["transactionId"].as_str().unwrap().to_owned()),
            503 => {
                self.refusals.fetch_add(1, Ordering::Relaxed);
                Answer::Refused
            }
            504 => Answer::OutcomeUnknown(body.to_string()),
            other => panic!("unexpected status {other}: {body}"),
        }
    }

    /// Sends these transactions from several concurrent clients; client `n` takes every `clients`-th serial number.
    pub async fn send_all(&self, profile: LoadProfile, serials: Range<usize>, seed: u64) -> ClientAnswers {
        let clients = (0..profile.clients).map(|number| {
            let own = serials.clone().skip(number).step_by(profile.clients);
            self.send_as_client(profile, number, own, seed ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        });
        let mut all = ClientAnswers::default();
        for answers in futures::future::join_all(clients).await {
            all.extend(answers);
        }
        all
    }

    async fn send_as_client(
        &self,
        profile: LoadProfile,
        number: usize,
        serials: impl Iterator<Item = usize>,
        seed: u64,
    ) -> ClientAnswers {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut answers = ClientAnswers::default();
        for serial in serials {
            let keyed = profile.retry_until_accepted && number.is_multiple_of(2);
            let key = keyed.then(|| format!("order-{serial}"));
            let mut answer = self.send(serial, key.as_deref()).await;
            // After a request without an answer, 503 applies only to the last attempt: an earlier one may still take effect.
            if keyed && matches!(answer, Answer::OutcomeUnknown(_)) {
                while !matches!(answer, Answer::Accepted(_)) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    answer = self.send(serial, key.as_deref()).await;
                }
            }
            answers.add(serial, answer);
            tokio::time::sleep(profile.pause_max.mul_f64(rng.random::<f64>())).await;
        }
        answers
    }
}

/// A request that carries its serial number twice: relayers show it in `data`, the list shows it in `value`.
pub fn body(serial: usize) -> Value {
    let amount = (AMOUNT_BASE + serial).to_string();
    json!({ "to": TO, "value": amount, "data": serial_data(serial), "gas": 60000, "speed": "fast" })
}

/// The serial number of a listed row; `None` for a row of the warm-up.
pub fn serial_of_row(row: &Value) -> Option<usize> {
    row["value"].as_str()?.parse::<usize>().ok()?.checked_sub(AMOUNT_BASE)
}

/// The serial number in the `data` that a relayer received.
pub fn serial_of_data(data: &str) -> Option<usize> {
    usize::from_str_radix(data.strip_prefix("0x")?, 16).ok()
}
