//! SQS with the credentials of a task role: no keys in the configuration, only the address that hands out short-lived ones,
//! as ECS and EKS set it. A proxy before the emulator, which checks no keys, refuses expired ones as AWS does.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use harness::engine::{TestEngine, server};
use harness::wait::eventually;
use serde_json::json;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::relay_fixture::{LATER, RelaySetup, SOON};

const AUTHORIZATION: &str = "token-of-the-task";

/// Keys that were handed out.
struct Keys {
    id: String,
    expires_at: OffsetDateTime,
}

/// What the metadata service and the proxy share.
struct Aws {
    handed_out: Mutex<Vec<Keys>>,
    /// Key ids of the calls, in order, and whether each was taken.
    calls: Mutex<Vec<(String, bool)>>,
    http: reqwest::Client,
}

impl Aws {
    fn new() -> Arc<Self> {
        Arc::new(Self { handed_out: Mutex::default(), calls: Mutex::default(), http: harness::http_client() })
    }

    /// The number of calls with these keys, and of those that were refused.
    fn calls_with(&self, id: &str) -> (usize, usize) {
        let calls = self.calls.lock().unwrap();
        let with = calls.iter().filter(|(used, _)| used == id);
        (with.clone().count(), with.filter(|(_, taken)| !taken).count())
    }

    /// Whether calls with these keys are taken: they were handed out and have not expired.
    fn is_valid(&self, id: &str) -> bool {
        let now = OffsetDateTime::now_utc();
        self.handed_out.lock().unwrap().iter().any(|keys| keys.id == id && now < keys.expires_at)
    }
}

/// The first keys expire as soon as the SDK's own margin of ten seconds allows; those after them stay.
async fn hand_out(State(aws): State<Arc<Aws>>, headers: HeaderMap) -> Response {
    if headers.get("authorization").is_none_or(|value| value != AUTHORIZATION) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let mut handed_out = aws.handed_out.lock().unwrap();
    let (id, lifetime) = match handed_out.len() {
        0 => ("AKIAFIRST", Duration::from_secs(14)),
        _ => ("AKIASECOND", Duration::from_secs(3600)),
    };
    let expires_at = OffsetDateTime::now_utc() + lifetime;
    handed_out.push(Keys { id: id.to_owned(), expires_at });
    let keys = json!({
        "AccessKeyId": id, "SecretAccessKey": format!("secret of {id}"), "Token": format!("session of {id}"),
        "Expiration": expires_at.format(&Rfc3339).unwrap(),
    });
    axum::Json(keys).into_response()
}

/// Passes a call on to the emulator if its keys are valid and its session belongs to them.
async fn call(State(aws): State<Arc<Aws>>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let signed = text("authorization");
    let id = signed.split_once("Credential=").and_then(|(_, rest)| rest.split_once('/')).map_or("", |(id, _)| id);
    let taken = aws.is_valid(id) && text("x-amz-security-token") == format!("session of {id}");
    aws.calls.lock().unwrap().push((id.to_owned(), taken));
    if !taken {
        let error = json!({ "__type": "com.amazonaws.sqs#ExpiredToken", "message": "The security token is expired" });
        return (StatusCode::FORBIDDEN, error.to_string()).into_response();
    }
    let url = format!("{}{}", server("BATON_TEST_SQS_URL"), uri.path());
    let mut request = aws.http.post(url).timeout(LATER).body(body);
    for name in ["content-type", "x-amz-target", "authorization"] {
        request = request.header(name, text(name));
    }
    let Ok(answer) = request.send().await else { return StatusCode::BAD_GATEWAY.into_response() };
    (answer.status(), answer.bytes().await.unwrap_or_default()).into_response()
}

/// Serves until the test ends.
async fn serve(routes: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

#[tokio::test]
async fn the_keys_of_a_task_role_are_used_and_rotated() {
    let aws = Aws::new();
    let metadata = serve(Router::new().route("/keys", get(hand_out)).with_state(Arc::clone(&aws))).await;
    let sqs = serve(Router::new().fallback(call).with_state(Arc::clone(&aws))).await;
    let queue = format!("http://{sqs}/000000000000/role-{}", uuid::Uuid::new_v4().simple());
    let relay = RelaySetup::relayers(1)
        .engine(TestEngine::Embedded)
        .env("SQS_QUEUE_URL", &queue)
        .env("SQS_DLQ_URL", format!("{queue}-dlq"))
        .env("QUEUE_AUTO_CREATE", "true")
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("http://{metadata}/keys"))
        .env("AWS_CONTAINER_AUTHORIZATION_TOKEN", AUTHORIZATION)
        .env("AWS_ENDPOINT_URL_SQS", format!("http://{sqs}"))
        // Where no profile is.
        .env("HOME", "/nonexistent")
        .start()
        .await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    let (calls, _) = aws.calls_with("AKIAFIRST");
    assert!(calls > 0, "{:?}", aws.calls.lock().unwrap());

    // Work goes on over the rotation and after the first keys have expired.
    let serial = AtomicUsize::new(1);
    eventually(LATER, "the first keys to expire under load", || async {
        relay.send_serial(serial.fetch_add(1, Ordering::SeqCst) + 1).await;
        (!aws.is_valid("AKIAFIRST") && aws.calls_with("AKIASECOND").0 > 0).then_some(())
    })
    .await;
    let last = serial.into_inner() + 1;
    let id = relay.send_serial(last).await;
    relay.until_status(&id, "confirmed").await;
    relay.until_all_final(SOON).await;
    assert_eq!(relay.count("confirmed").await, last);
    let refused = aws.calls_with("AKIAFIRST").1 + aws.calls_with("AKIASECOND").1;
    assert_eq!(refused, 0, "{:?}", aws.calls.lock().unwrap());
    let output = relay.api.output();
    assert!(!output.contains("secret of") && !output.contains("session of"), "keys are never logged");
}
