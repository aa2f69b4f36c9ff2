//! Tests of the harness: a fake service that does not do what it promises proves nothing about the product.

mod link;
mod relayer;
mod tools;
mod webhooks;

use std::time::Duration;

use harness::relayer::{Relayer, RelayerOptions};
use serde_json::{Value, json};

/// Long enough for a busy machine; successful tests do not wait for it.
const SOON: Duration = Duration::from_secs(10);
const KEY: &str = "whsec-0123456789abcdef0123456789abcdef";

async fn start(id: &str) -> Relayer {
    Relayer::start(RelayerOptions::new(id)).await
}

/// A body that the relayer accepts, distinguished by its data.
fn body(serial: u32) -> Value {
    json!({
        "to": "0x90F79bf6EB2c4f870365E785982E1f101E93b906", "value": "1000", "data": format!("0x{serial:08x}"),
        "gas_limit": 60000, "speed": "fast",
    })
}

fn post(relayer: &Relayer, body: &str) -> reqwest::RequestBuilder {
    harness::http_client()
        .post(format!("{}/api/v1/relayers/{}/transactions", relayer.url(), relayer.id()))
        .bearer_auth(relayer.api_key())
        .header("content-type", "application/json")
        .timeout(Duration::from_secs(5))
        .body(body.to_owned())
}

/// Status and JSON body (null when it is not JSON) of a POST, or the client's error.
async fn send(relayer: &Relayer, body: &str) -> reqwest::Result<(u16, Value)> {
    let answer = post(relayer, body).send().await?;
    let status = answer.status().as_u16();
    Ok((status, serde_json::from_slice(&answer.bytes().await?).unwrap_or_default()))
}

async fn read(relayer: &Relayer, path: &str) -> reqwest::Result<(u16, Value)> {
    let url = format!("{}/api/v1/relayers{path}", relayer.url());
    let answer = harness::http_client().get(url).bearer_auth(relayer.api_key()).send().await?;
    let status = answer.status().as_u16();
    Ok((status, serde_json::from_slice(&answer.bytes().await?).unwrap_or_default()))
}
