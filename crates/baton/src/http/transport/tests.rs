use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;
use crate::clock::{Clock, TimeSource};
use crate::http::outgoing::{self, ConnectionLimits};
use crate::timestamp::Timestamp;

const BODY: &str = "{\"to\":\"0x00\"}";
const ANSWER_BYTES_MAX: usize = 1000;

fn transport() -> HttpTransport {
    let limits = ConnectionLimits { idle: Duration::from_secs(3), unacknowledged: Some(Duration::from_secs(5)) };
    HttpTransport::new(outgoing::client(limits).unwrap(), HeaderMap::new())
}

fn post(url: String, fence: Option<SendFence>, timeout: Duration) -> HttpRequest {
    let body = Some(Bytes::from_static(BODY.as_bytes()));
    HttpRequest { method: Method::POST, url, body, fence, timeout, answer_bytes_max: ANSWER_BYTES_MAX }
}

async fn listen() -> (TcpListener, String) {
    let socket = TcpSocket::new_v4().unwrap();
    // A server that does not read then takes little.
    socket.set_recv_buffer_size(64 << 10).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(16).unwrap();
    let url = format!("http://{}/transactions", listener.local_addr().unwrap());
    (listener, url)
}

/// What arrives on the connection, until the body is there.
async fn read_request(stream: &mut TcpStream) -> String {
    let mut request = String::new();
    while !request.ends_with(BODY) {
        let mut piece = [0; 1024];
        match stream.read(&mut piece).await.unwrap() {
            0 => break,
            read => request.push_str(std::str::from_utf8(&piece[..read]).unwrap()),
        }
    }
    request
}

#[tokio::test]
async fn a_request_arrives_whole_and_its_answer_is_read() {
    let (listener, url) = listen().await;
    let answered = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let request = read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        request
    };
    let transport = transport();
    let (answer, request) = tokio::join!(transport.send(post(url, None, Duration::from_secs(30))), answered);
    let answer = answer.unwrap();
    assert_eq!((answer.status, answer.body.as_ref()), (StatusCode::CREATED, b"ok".as_slice()));
    let head = request.to_lowercase();
    assert!(head.starts_with("post /transactions http/1.1\r\n"), "{request}");
    for header in [format!("content-length: {}", BODY.len()), "content-type: application/json".to_owned()] {
        assert!(head.contains(&header), "{request}");
    }
}

/// A graceful close would leave it to the kernel to deliver them, whenever the other side reads.
#[tokio::test]
async fn bytes_of_a_request_that_is_given_up_are_dropped() {
    let (listener, url) = listen().await;
    let transport = transport();
    // More than a server takes that does not read.
    let body = Some(Bytes::from(vec![b'x'; 16 << 20]));
    let request = HttpRequest { body, ..post(url, None, Duration::from_millis(300)) };
    let (answer, accepted) = tokio::join!(transport.send(request), listener.accept());
    assert_eq!(answer.unwrap_err().kind, TransportFailure::TimedOut);
    let mut received = Vec::new();
    let end = accepted.unwrap().0.read_to_end(&mut received).await;
    assert_eq!(end.map_err(|error| error.kind()), Err(std::io::ErrorKind::ConnectionReset));
}

/// Sends a request, which is answered with this and nothing after it; the connection is returned too.
async fn answered_with(transport: &HttpTransport, answer: &str) -> (Result<Response, TransportError>, TcpStream) {
    let (listener, url) = listen().await;
    let answering = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        // Fails if the client gives up before the end.
        stream.write_all(answer.as_bytes()).await.ok();
        stream
    };
    tokio::join!(transport.send(post(url, None, Duration::from_secs(20))), answering)
}

fn with_length(length: usize) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{}", "x".repeat(length))
}

/// `count` chunks of 100 bytes, without the last chunk.
fn chunks(count: usize) -> String {
    let chunk = format!("64\r\n{}\r\n", "x".repeat(100));
    format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{}", chunk.repeat(count))
}

#[tokio::test]
async fn an_answer_longer_than_allowed_is_not_read_to_its_end() {
    let transport = transport();
    // The chunks never end: a client that waits for the rest runs into its time limit.
    for (answer, arrives_whole) in [
        (with_length(ANSWER_BYTES_MAX + 1), true),
        (with_length(1 << 20), false),
        (chunks(11), false),
        (chunks(10_000), false),
    ] {
        let head: String = answer.chars().take(60).collect();
        let (received, mut stream) = answered_with(&transport, &answer).await;
        let failed = received.unwrap_err();
        assert_eq!((failed.kind, failed.status), (TransportFailure::AnswerTooLong, Some(StatusCode::OK)), "{head}");
        if !arrives_whole {
            // With a reset, if bytes were left unread.
            let end = tokio::time::timeout(Duration::from_secs(20), stream.read(&mut [0; 1])).await;
            assert!(matches!(end, Ok(Ok(0) | Err(_))), "the connection is closed: {end:?}");
        }
    }
    for answer in [with_length(ANSWER_BYTES_MAX), format!("{}0\r\n\r\n", chunks(10))] {
        let (received, _stream) = answered_with(&transport, &answer).await;
        assert_eq!(received.unwrap().body.len(), ANSWER_BYTES_MAX, "as long as allowed");
    }
}

#[tokio::test]
async fn no_server_is_no_connection() {
    let (listener, url) = listen().await;
    drop(listener);
    let failed = transport().send(post(url, None, Duration::from_secs(30))).await.unwrap_err();
    assert_eq!(failed.kind, TransportFailure::NoConnection, "{failed}");
}

/// A machine that is suspended once its clock was read.
#[derive(Default)]
struct Suspended(Mutex<u64>);

impl TimeSource for Suspended {
    fn now(&self) -> Timestamp {
        Timestamp(0)
    }

    fn since_boot(&self) -> Duration {
        let mut reads = self.0.lock().unwrap();
        *reads += 1;
        Duration::from_secs(3600 * *reads)
    }

    fn wall(&self) -> SystemTime {
        UNIX_EPOCH
    }
}

#[tokio::test]
async fn a_closed_fence_keeps_the_body_back() {
    let (listener, url) = listen().await;
    let fence = Clock::new(Suspended::default()).send_fence(Duration::from_secs(5));
    let seen = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        // It may end with a reset.
        let _ = stream.read_to_end(&mut request).await;
        String::from_utf8(request).unwrap()
    };
    let transport = transport();
    let (answer, request) = tokio::join!(transport.send(post(url, Some(fence), Duration::from_secs(30))), seen);
    let failed = answer.unwrap_err();
    assert_eq!(failed.kind, TransportFailure::Fenced, "{failed}");
    assert!(!request.contains(BODY), "{request}");
}

#[test]
fn credentials_in_a_url_become_a_header() {
    let mut url = Url::parse("https://user:p%40ss@node.example/key?x=1").unwrap();
    let header = credentials(&mut url).unwrap();
    assert_eq!(header.to_str().unwrap(), format!("Basic {}", BASE64_STANDARD.encode("user:p@ss")));
    assert_eq!(url.as_str(), "https://node.example/key?x=1");
    assert!(credentials(&mut url).is_none());
}
