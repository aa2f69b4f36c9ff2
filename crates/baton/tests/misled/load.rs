//! The clients: every call has a serial number in its data and its amount, and some calls are made by two clients at the
//! same time, under two idempotency keys.

use std::time::Duration;

use alloy_primitives::Address;
use rand::RngExt;
use serde_json::{Value, json};

use crate::dice;
use crate::relay_fixture::{API_KEY, SOON};
use crate::world::{Run, World};

const CLIENTS: usize = 8;
/// One in this many calls is made by two clients.
const TWINS: u32 = 12;
/// One in this many calls reverts.
const REVERTS: u32 = 40;

/// An accepted transaction.
#[derive(Clone, Debug)]
pub struct Sent {
    pub id: String,
    pub serial: usize,
}

pub struct Load {
    run: Run,
    http: reqwest::Client,
    base: String,
    target: Address,
}

impl Load {
    pub fn new(world: &World) -> Self {
        let (http, base) = (world.relay.http.clone(), world.relay.base.clone());
        Self { run: world.run.clone(), http, base, target: world.target }
    }

    /// Sends as many as the run asks for; all are accepted.
    pub async fn send_all(&self) -> Vec<Sent> {
        // What is sent is fixed beforehand: (serial number, number of its client).
        let mut orders = Vec::new();
        for serial in 0.. {
            let twins = self.pick(serial, 1).random_ratio(1, TWINS) && orders.len() + 2 <= self.run.transactions;
            orders.push((serial, 0));
            if twins {
                orders.push((serial, 1));
            }
            if orders.len() >= self.run.transactions {
                break;
            }
        }
        let clients = (0..CLIENTS).map(|client| {
            let own: Vec<(usize, u32)> = orders.iter().skip(client).step_by(CLIENTS).copied().collect();
            async move {
                let mut sent = Vec::new();
                let mut rng = dice(&[self.run.seed, 2, client as u64]);
                for (serial, twin) in own {
                    let pause = rng.random_range(0.0..2.0 * CLIENTS as f64 / self.run.per_second as f64);
                    tokio::time::sleep(Duration::from_secs_f64(pause)).await;
                    sent.push(Sent { id: self.send(serial, twin).await, serial });
                }
                sent
            }
        });
        futures::future::join_all(clients).await.concat()
    }

    /// Repeats the request under its key until it is accepted.
    async fn send(&self, serial: usize, twin: u32) -> String {
        let body = json!({
            "to": self.target.to_string(), "value": amount(serial).to_string(), "data": data(&self.run, serial),
            "gas": 60000, "speed": "fast",
        });
        loop {
            let request = self.http.post(format!("{}/api/v1/relay/direct", self.base)).timeout(SOON);
            let request = request.header("x-api-key", API_KEY).header("idempotency-key", format!("{serial}-{twin}"));
            if let Ok(answer) = request.json(&body).send().await {
                let status = answer.status().as_u16();
                let answer: Value = answer.json().await.unwrap_or_default();
                match status {
                    202 => return answer["transactionId"].as_str().unwrap().to_owned(),
                    503 | 504 => {}
                    other => panic!("{other}: {answer}"),
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn pick(&self, serial: usize, what: u64) -> rand::rngs::StdRng {
        dice(&[self.run.seed, what, serial as u64])
    }
}

pub fn reverts(run: &Run, serial: usize) -> bool {
    dice(&[run.seed, 3, serial as u64]).random_ratio(1, REVERTS)
}

/// The call data: whether it reverts, and the serial number.
pub fn data(run: &Run, serial: usize) -> String {
    format!("0x{}{serial:08x}", if reverts(run, serial) { "ff" } else { "00" })
}

pub fn amount(serial: usize) -> usize {
    serial + 1
}

/// The serial number in call data.
pub fn serial_of(data: &str) -> Option<usize> {
    usize::from_str_radix(data.strip_prefix("0x")?.get(2..10)?, 16).ok()
}
