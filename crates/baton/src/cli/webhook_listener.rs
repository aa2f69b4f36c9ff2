//! `webhooks listen`: a receiver for trying notifications out. It prints one line for each webhook and, with the endpoint's
//! secret, verifies its signature as a real receiver must.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::{Router, routing};
use clap::Args;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::output::{OutputError, print, printable, say};
use crate::config::{ConnectionLimits, Secret, secret_bytes};
use crate::http::body::RawBody;
use crate::http::problem::Problem;
use crate::http::{connections, server};
use crate::notify::signature;
use crate::timestamp::Timestamp;

/// The arguments of `webhooks listen`.
#[derive(Args)]
pub struct ListenArgs {
    /// Port on 127.0.0.1
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// The endpoint's secret (whsec_…): a webhook with another signature is answered with 400
    // Also from the environment, because every user of the machine can read a command line.
    #[arg(long, value_name = "SECRET", env = "BATON_WEBHOOK_SECRET", hide_env_values = true)]
    secret: Option<String>,
}

/// Largest body. Baton's own have less than 20 kB.
const BODY_BYTES_MAX: usize = 64 * 1024;
/// Longest duration of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const LIMITS: ConnectionLimits = ConnectionLimits {
    connections_max: 128,
    per_address_max: 128,
    idle_timeout: Duration::from_secs(60),
    write_timeout: Duration::from_secs(5),
};

/// State of the receiver.
struct Listener {
    secret: Option<Secret>,
    /// Why a line could not be printed; it ends the command.
    unprinted: Mutex<Option<OutputError>>,
    shutdown: CancellationToken,
}

/// Receives until a signal, or until the reader of the output is gone.
pub async fn run(args: ListenArgs) -> anyhow::Result<ExitCode> {
    let secret = args.secret.map(Secret::new);
    let well_formed = secret.as_ref().is_none_or(|secret| secret_bytes(secret).is_some());
    anyhow::ensure!(well_formed, "--secret must be whsec_ and the base64 of 24 to 64 bytes, as it was registered");
    let socket = connections::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, args.port)), "--port")?;
    let shutdown = super::shutdown_on_signal()?;
    say!("Listening on http://{}. Ctrl-C stops.", socket.local_addr()?);
    if secret.is_none() {
        say!("Signatures are not verified: start it with --secret and the secret of the endpoint.");
    }
    let (unprinted, stop) = (Mutex::default(), shutdown.clone());
    let listener = Arc::new(Listener { secret, unprinted, shutdown });
    let receiver = || routing::post(receive);
    let routes = Router::new().route("/", receiver()).route("/{*path}", receiver()).with_state(Arc::clone(&listener));
    let routes = server::with_layers(routes, BODY_BYTES_MAX, REQUEST_TIMEOUT);
    connections::serve(socket, routes, LIMITS, stop).await;
    let unprinted = listener.unprinted.lock().unwrap_or_else(PoisonError::into_inner).take();
    unprinted.map_or(Ok(ExitCode::SUCCESS), |failure| Err(failure.into()))
}

async fn receive(
    State(listener): State<Arc<Listener>>,
    headers: HeaderMap,
    RawBody(body, _memory): RawBody,
) -> Result<StatusCode, Problem> {
    let now = SystemTime::now();
    let verified = listener.secret.as_ref().map(|secret| verify(secret, &headers, &body, now));
    let line = describe(&body, verified.as_ref());
    if let Err(failure) = print(format_args!("{}  {line}\n", Timestamp::from(now))) {
        *listener.unprinted.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
        listener.shutdown.cancel();
    }
    match verified {
        Some(Err(why)) => Err(Problem::bad_request(format!("the webhook is not verified: {why}"))),
        Some(Ok(())) | None => Ok(StatusCode::NO_CONTENT),
    }
}

/// Checks the signature; the error says what is wrong.
fn verify(secret: &Secret, headers: &HeaderMap, body: &[u8], now: SystemTime) -> Result<(), String> {
    let header = |name: &str| {
        let value = headers.get(name).and_then(|value| value.to_str().ok());
        value.ok_or_else(|| format!("there is no {name} header"))
    };
    let (id, timestamp) = (header("webhook-id")?, header("webhook-timestamp")?);
    let now_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let now_s = i64::try_from(now_s).unwrap_or(i64::MAX);
    signature::verify(secret, id, timestamp, header("webhook-signature")?, body, now_s)
}

/// What arrived, in one line.
fn describe(body: &[u8], verified: Option<&Result<(), String>>) -> String {
    let payload: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |name: &str| payload[name].as_str().map(printable);
    let mut parts = vec![text("event").unwrap_or_else(|| format!("(no event; {} bytes)", body.len()))];
    parts.extend(text("transactionId"));
    parts.extend(text("status"));
    parts.extend(payload["sequence"].as_u64().map(|sequence| format!("sequence {sequence}")));
    parts.push(match verified {
        None => "not verified".to_owned(),
        Some(Ok(())) => "verified".to_owned(),
        Some(Err(why)) => format!("NOT VERIFIED: {}", printable(why)),
    });
    parts.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_webhook_is_one_line_whatever_it_contains() {
        let body = br#"{"event":"transaction.completed","transactionId":"01a1","status":"confirmed","sequence":6}"#;
        let line = describe(body, Some(&Ok(())));
        assert_eq!(line, "transaction.completed  01a1  confirmed  sequence 6  verified");
        assert_eq!(describe(b"x", None), "(no event; 1 bytes)  not verified");
        let line = describe(br#"{"event":"a\n\u001b[2Jb","sequence":"6"}"#, Some(&Err("no\nmatch".to_owned())));
        assert!(!line.contains(['\n', '\u{1b}']), "{line:?}");
    }

    #[test]
    fn a_missing_header_is_named() {
        let secret = Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        let mut headers = HeaderMap::new();
        let why = |headers: &HeaderMap| verify(&secret, headers, b"{}", SystemTime::now()).unwrap_err();
        assert!(why(&headers).contains("webhook-id"));
        headers.insert("webhook-id", "evt_1".parse().unwrap());
        headers.insert("webhook-timestamp", "1".parse().unwrap());
        assert!(why(&headers).contains("webhook-signature"));
    }
}
