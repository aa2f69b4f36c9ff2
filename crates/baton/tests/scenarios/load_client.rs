//! Clients: they send, remember what they were told, and go on with the next request when they were told nothing.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::relay_fixture::{API_KEY, SOON, Stand, TO, serial_data};

/// Added to the serial number to make the amount, so that a listed row can be told from the warm-up's.
const AMOUNT_BASE: usize = 1_000_000;

/// Someone who talks to the API.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    /// How often somebody was refused so far.
    pub refusals: Arc<AtomicUsize>,
    /// How often nothing came back at all: no connection, or this client's own patience was over.
    pub silences: Arc<AtomicUsize>,
}

/// What clients were told, by serial number.
#[derive(Debug, Default)]
pub struct Promises {
    /// 202, with this id.
    pub accepted: Vec<(String, usize)>,
    /// 503: it will never happen.
    pub refused: Vec<usize>,
    /// Nothing, or that nobody knows: anything may have become of it, but at most once.
    pub unanswered: Vec<usize>,
    /// What each of those saw instead of an answer.
    pub silences: Vec<String>,
}

/// What one request came to.
pub enum Told {
    Accepted(String),
    Refused,
    /// For this reason.
    Nothing(String),
}

impl Promises {
    pub fn add(&mut self, serial: usize, told: Told) {
        match told {
            Told::Accepted(id) => self.accepted.push((id, serial)),
            Told::Refused => self.refused.push(serial),
            Told::Nothing(silence) => {
                self.unanswered.push(serial);
                self.silences.push(format!("{serial}: {silence}"));
            }
        }
    }

    pub fn extend(&mut self, other: Self) {
        self.accepted.extend(other.accepted);
        self.refused.extend(other.refused);
        self.unanswered.extend(other.unanswered);
        self.silences.extend(other.silences);
    }

    pub fn total(&self) -> usize {
        self.accepted.len() + self.refused.len() + self.unanswered.len()
    }
}

/// How clients behave.
#[derive(Clone, Copy)]
pub struct Manners {
    pub clients: usize,
    /// The longest pause between two requests of one client.
    pub pause_max: Duration,
    /// Every second client names its requests; told nothing, it asks again until it is accepted.
    pub insistent: bool,
}

impl Client {
    pub fn of(stand: &Stand) -> Self {
        Self { http: stand.http.clone(), base: stand.base.clone(), refusals: Arc::default(), silences: Arc::default() }
    }

    pub async fn get(&self, path: &str) -> Option<(u16, Value)> {
        let request = self.http.get(format!("{}{path}", self.base)).header("x-api-key", API_KEY);
        let answer = request.timeout(SOON).send().await.ok()?;
        Some((answer.status().as_u16(), answer.json().await.ok()?))
    }

    /// One page of the list, newest first, and the way to the next.
    pub async fn page(&self, cursor: Option<&str>) -> Option<(Vec<Value>, Option<String>)> {
        let cursor = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
        let (status, mut page) = self.get(&format!("/api/v1/relay/transactions?limit=200{cursor}")).await?;
        let Value::Array(rows) = page["transactions"].take() else { return None };
        (status == 200).then(|| (rows, page["nextCursor"].as_str().map(str::to_owned)))
    }

    /// Sends the transaction of that serial number.
    pub async fn send(&self, serial: usize, key: Option<&str>) -> Told {
        let mut request = self.http.post(format!("{}/api/v1/relay/direct", self.base)).header("x-api-key", API_KEY);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let answer = match request.timeout(SOON).json(&body(serial)).send().await {
            Ok(answer) => answer,
            Err(failure) => {
                self.silences.fetch_add(1, Ordering::Relaxed);
                return Told::Nothing(format!("{failure:?}"));
            }
        };
        let status = answer.status().as_u16();
        let said = match answer.json::<Value>().await {
            Ok(said) => said,
            Err(failure) => return Told::Nothing(format!("{status}, then {failure:?}")),
        };
        match status {
            202 => Told::Accepted(said["transactionId"].as_str().unwrap().to_owned()),
            503 => {
                self.refusals.fetch_add(1, Ordering::Relaxed);
                Told::Refused
            }
            504 => Told::Nothing(said.to_string()),
            other => panic!("an answer that no client expects: {other} {said}"),
        }
    }

    /// Several clients at once send these; they share the serial numbers out among themselves.
    pub async fn crowd(&self, manners: Manners, serials: Range<usize>, seed: u64) -> Promises {
        let lives = (0..manners.clients).map(|number| {
            let own = serials.clone().skip(number).step_by(manners.clients);
            self.live(manners, number, own, seed ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        });
        let mut all = Promises::default();
        for promises in futures::future::join_all(lives).await {
            all.extend(promises);
        }
        all
    }

    async fn live(&self, manners: Manners, number: usize, serials: impl Iterator<Item = usize>, seed: u64) -> Promises {
        let mut dice = StdRng::seed_from_u64(seed);
        let mut promises = Promises::default();
        for serial in serials {
            let named = manners.insistent && number.is_multiple_of(2);
            let key = named.then(|| format!("order-{serial}"));
            let mut told = self.send(serial, key.as_deref()).await;
            // Once it was told nothing, an earlier try may be under way: a refusal then speaks of the last try alone.
            if named && matches!(told, Told::Nothing(_)) {
                while !matches!(told, Told::Accepted(_)) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    told = self.send(serial, key.as_deref()).await;
                }
            }
            promises.add(serial, told);
            tokio::time::sleep(manners.pause_max.mul_f64(dice.random::<f64>())).await;
        }
        promises
    }
}

/// A request that can be recognised everywhere: by its data at the relayers, by its amount in the list.
pub fn body(serial: usize) -> Value {
    let amount = (AMOUNT_BASE + serial).to_string();
    json!({ "to": TO, "value": amount, "data": serial_data(serial), "gas": 60000, "speed": "fast" })
}

/// The serial number of a listed row; none for the warm-up's.
pub fn serial_of_row(row: &Value) -> Option<usize> {
    row["value"].as_str()?.parse::<usize>().ok()?.checked_sub(AMOUNT_BASE)
}

/// The serial number in the data that a relayer was sent.
pub fn serial_of_data(data: &str) -> Option<usize> {
    usize::from_str_radix(data.strip_prefix("0x")?, 16).ok()
}
