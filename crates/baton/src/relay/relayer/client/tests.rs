use std::sync::Mutex;

use async_trait::async_trait;
use serde_json::json;

use super::*;
use crate::clock::Clock;
use crate::relay::request::call::DirectRequest;

fn judged(status: u16, text: &str) -> SubmissionAnswer {
    judge_answer(StatusCode::from_u16(status).unwrap(), &HeaderMap::new(), text)
}

#[test]
fn each_status_maps_to_what_it_proves() {
    let record = r#"{"success":true,"data":{"id":"a","status":"pending","from":"0x1"},"error":null}"#;
    assert!(matches!(judged(200, record), SubmissionAnswer::Accepted(report) if report.tx_id.0 == "a"));
    assert!(matches!(judged(200, "ok"), SubmissionAnswer::Unknown { .. }));
    assert!(matches!(judged(200, r#"{"success":true,"data":null}"#), SubmissionAnswer::Unknown { .. }));
    assert_eq!(judged(400, r#"{"error":"Gas too low"}"#), SubmissionAnswer::Refused("Gas too low".into()));
    for status in [401, 404] {
        assert!(matches!(judged(status, ""), SubmissionAnswer::NotTaken { why: NotTaken::Fault, .. }), "{status}");
    }
    assert!(matches!(judged(403, "Relayer paused"), SubmissionAnswer::NotTaken { why: NotTaken::Closed, .. }));
    assert!(
        matches!(judged(429, ""), SubmissionAnswer::NotTaken { why: NotTaken::Busy(wait), .. } if wait > Duration::ZERO)
    );
    for status in [302, 405, 408, 500, 502, 503, 504] {
        assert!(matches!(judged(status, ""), SubmissionAnswer::Unknown { .. }), "{status}");
    }
    // Only the relayer itself answers 500. A proxy's error leaves open whether the relayer still works on the request.
    for (status, expected) in [(500, true), (408, false), (501, false), (502, false), (504, false), (520, false)] {
        assert!(
            matches!(judged(status, ""), SubmissionAnswer::Unknown { answered, .. } if answered == expected),
            "{status}"
        );
    }
    for status in [302, 307, 405, 505, 522, 524, 530, 598, 599] {
        assert!(matches!(judged(status, ""), SubmissionAnswer::Unknown { answered: false, .. }), "{status}");
    }
    for status in [409, 413, 422] {
        assert!(matches!(judged(status, ""), SubmissionAnswer::ClientError(_)), "{status}");
    }
}

const OWN: &str = "0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266";
const OTHER: &str = "0x70997970c51812dc3a010c7d01b50e0d17dc79c8";

/// A proxy that answers everything about transactions with this record, whatever was asked.
struct Proxy(Value);

#[async_trait]
impl Transport for Proxy {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        let relayer = json!({ "id": "relayer-a", "address": OWN, "paused": false, "system_disabled": false });
        let list = request.url.ends_with("/relayers");
        let body = if list { json!({ "data": [relayer] }) } else { json!({ "data": self.0 }) };
        Ok(Response { status: StatusCode::OK, headers: HeaderMap::new(), body: body.to_string().into() })
    }
}

fn behind_proxy(id: &str, from: &str) -> RelayerClient {
    let record = json!({ "id": id, "status": "confirmed", "from": from, "nonce": 4 });
    RelayerClient::over(Arc::new(Proxy(record)), &Url::parse("http://relayer").unwrap())
}

#[tokio::test]
async fn an_answer_about_another_id_or_another_account_is_none() {
    let (id, limit) = (RelayerTxId("a".into()), Duration::from_secs(1));
    let told = async |client: RelayerClient| {
        (client.transaction(&id, limit).await.is_ok(), client.cancel(&id, limit).await.is_ok())
    };
    assert_eq!(told(behind_proxy("a", OWN)).await, (true, true));
    assert_eq!(told(behind_proxy("b", OWN)).await, (false, false), "another id");
    assert_eq!(told(behind_proxy("a", OTHER)).await, (false, false), "another account");
}

#[tokio::test]
async fn a_submission_answered_with_another_accounts_record_has_an_unknown_outcome() {
    let call = DirectRequest::parse(&json!({ "to": OTHER })).unwrap().call;
    let answer = async |from| {
        let fence = Clock::system().send_fence(Duration::from_secs(60));
        behind_proxy("a", from).submit(&call, fence, Duration::from_secs(1)).await
    };
    assert!(matches!(answer(OWN).await, SubmissionAnswer::Accepted(_)));
    assert!(matches!(answer(OTHER).await, SubmissionAnswer::Unknown { answered: true, .. }));
}

/// A relayer without transactions; records how much of each answer may be read.
#[derive(Default)]
struct Recorder(Mutex<Vec<usize>>);

#[async_trait]
impl Transport for Recorder {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        self.0.lock().unwrap().push(request.answer_bytes_max);
        Proxy(json!([])).send(request).await
    }
}

/// A page of 256 MB was read, and was in memory twice.
#[tokio::test]
async fn every_answer_has_a_limit_of_its_size() {
    let recorder = Arc::new(Recorder::default());
    let client = RelayerClient::over(recorder.clone(), &Url::parse("http://relayer").unwrap());
    let (page, _) = client.transactions(1, 500, Duration::from_secs(1)).await.unwrap();
    assert!(page.records.is_empty());
    assert_eq!(*recorder.0.lock().unwrap(), [2 << 20, 8 << 20], "the list of relayers, and a page of transactions");
}

#[test]
fn a_url_may_name_one_relayer_of_a_process() {
    let (base, id) = split_url(&Url::parse("http://host:8080/api/v1/relayers/relayer-a").unwrap());
    assert_eq!((base.as_str(), id.as_deref()), ("http://host:8080/", Some("relayer-a")));
    let (base, id) = split_url(&Url::parse("http://host:8080/prefix/").unwrap());
    assert_eq!((base.as_str(), id), ("http://host:8080/prefix/", None));
}
