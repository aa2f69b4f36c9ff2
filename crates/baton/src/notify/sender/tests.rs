use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::notify::address_guard::{AddressPolicy, UrlRefused};
use crate::notify::connections::CONNECT_TIMEOUT;
use crate::notify::lookups::{LOOKUPS_PER_OWNER_MAX, Lookups, Resolver};

const BODY: &str = r#"{"type":"transaction.confirmed"}"#;
/// No error may contain it.
const TOKEN: &str = "s3cret";
/// Long enough for any machine.
const AMPLE: Duration = Duration::from_secs(60);
/// For receivers that never come to an end.
const SHORT: Duration = Duration::from_millis(300);
/// The API key of most tests.
const OWNER: &str = "shop";
/// A name that only [`resolver`] knows.
const NAME: &str = "receiver.test";

fn local() -> AddressPolicy {
    AddressPolicy { allow_http: false, allow_private: true, ports: Vec::new() }
}

/// Allows plain http, but no internal address.
fn public_only() -> AddressPolicy {
    AddressPolicy { allow_http: true, allow_private: false, ports: Vec::new() }
}

fn sender(timeout: Duration) -> Sender {
    Sender::new(AddressGuard::new(local()), timeout).unwrap()
}

fn path(host: &str, port: u16) -> String {
    format!("http://{host}:{port}/hooks/{TOKEN}?token={TOKEN}")
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = path("127.0.0.1", listener.local_addr().unwrap().port());
    (listener, url)
}

/// A listener that no test accepts from: `is_untouched` then says whether there was a connection.
fn trap() -> (std::net::TcpListener, u16) {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn is_untouched(trap: &std::net::TcpListener) -> bool {
    trap.accept().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Answers these addresses, one list after the other, the last one again and again; counts the calls.
fn resolver(answers: &'static [&'static [&'static str]]) -> (Resolver, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let resolver: Resolver = Arc::new(move |host, port| {
        assert_eq!(host, NAME);
        let call = counted.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1);
        let found = answers[call].iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), port)).collect();
        Box::pin(async move { Ok(found) })
    });
    (resolver, calls)
}

async fn send(sender: &Sender, url: &str) -> Sent {
    let headers = vec![("webhook-id", "evt_1".to_owned()), ("webhook-timestamp", "1614265330".to_owned())];
    let sent = sender.send(OWNER, url, headers, Bytes::from_static(BODY.as_bytes())).await;
    assert!(!format!("{sent:?}").contains(TOKEN), "{sent:?}");
    sent
}

/// Reads one request; an empty text if the connection was closed instead.
async fn read_request(stream: &mut TcpStream) -> String {
    let mut request = String::new();
    while !request.ends_with(BODY) {
        let mut piece = [0; 1024];
        match stream.read(&mut piece).await {
            Ok(0) | Err(_) => break,
            Ok(read) => request.push_str(std::str::from_utf8(&piece[..read]).unwrap()),
        }
    }
    request
}

/// Waits until the sender has closed the connection.
async fn wait_until_closed(mut stream: TcpStream) {
    let mut rest = [0; 1024];
    while matches!(stream.read(&mut rest).await, Ok(read) if read > 0) {}
}

/// Sends to a receiver that reads the request and continues as given.
async fn send_to<T>(timeout: Duration, receive: impl AsyncFnOnce(TcpStream) -> T) -> (Sent, T) {
    let (listener, url) = listen().await;
    let received = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        receive(stream).await
    };
    let sender = sender(timeout);
    tokio::join!(send(&sender, &url), received)
}

/// Sends to a receiver that answers this and closes the connection.
async fn send_and_get(answer: &str) -> Sent {
    let answering = async |mut stream: TcpStream| {
        stream.write_all(answer.as_bytes()).await.unwrap();
    };
    send_to(AMPLE, answering).await.0
}

#[tokio::test]
async fn a_request_arrives_whole_and_a_2xx_is_a_success() {
    let (listener, url) = listen().await;
    let received = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let request = read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 202 Accepted\r\ncontent-length: 5\r\n\r\nt\0h\nx").await.unwrap();
        request
    };
    let sender = sender(AMPLE);
    let (sent, request) = tokio::join!(send(&sender, &url), received);
    assert_eq!((sent.status, sent.error, sent.retry_after), (Some(202), None, None));
    assert_eq!(sent.answer.as_deref(), Some("t\u{fffd}h x"));
    assert!(request.starts_with(&format!("POST /hooks/{TOKEN}?token={TOKEN} HTTP/1.1\r\n")), "{request}");
    let head = request.to_lowercase();
    for header in [
        format!("host: {}\r\n", listener.local_addr().unwrap()),
        format!("content-length: {}\r\n", BODY.len()),
        format!("user-agent: baton/{}\r\n", env!("CARGO_PKG_VERSION")),
        "content-type: application/json\r\n".to_owned(),
        "webhook-id: evt_1\r\n".to_owned(),
        "webhook-timestamp: 1614265330\r\n".to_owned(),
    ] {
        assert!(head.contains(&header), "{header}: {request}");
    }
}

#[tokio::test]
async fn an_answer_without_body_or_length_is_a_success() {
    assert_eq!(send_and_get("HTTP/1.1 204 No Content\r\n\r\n").await.error, None);
    let sent = send_and_get("HTTP/1.0 200 OK\r\n\r\nuntil the connection is closed").await;
    assert_eq!((sent.error, sent.answer.as_deref()), (None, Some("until the connection is closed")));
}

#[tokio::test]
async fn any_other_status_is_a_failure() {
    let sent = send_and_get("HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\nno\r\n").await;
    assert_eq!((sent.status, sent.error.as_deref()), (Some(500), Some("answered 500")));
    assert_eq!(sent.answer.as_deref(), Some("no  "));
    let sent = send_and_get("HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!((sent.status, sent.error.as_deref()), (Some(410), Some("answered 410")));
    let sent = send_and_get("HTTP/1.1 503 Busy\r\ncontent-length: 100\r\n\r\nbroken").await;
    assert_eq!(sent.error.as_deref(), Some("answered 503"), "the status says more than the break");
}

#[tokio::test]
async fn a_redirect_is_a_failure_and_its_target_is_not_called() {
    let (trap, port) = trap();
    for status in [301, 302, 307, 308] {
        let target = path("127.0.0.1", port);
        let answer = format!("HTTP/1.1 {status} Elsewhere\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n");
        let sent = send_and_get(&answer).await;
        assert_eq!(sent.status, Some(status));
        assert_eq!(sent.error, Some(format!("answered {status}; redirects are not followed")));
    }
    assert!(is_untouched(&trap));
}

#[tokio::test]
async fn a_receiver_that_asks_for_a_pause_is_heard() {
    let sent = send_and_get("HTTP/1.1 429 Slow\r\nretry-after: 120\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(sent.error.as_deref(), Some("answered 429"));
    assert_eq!(sent.retry_after, Some(Duration::from_secs(120)));
}

#[test]
fn retry_after_is_seconds_or_a_date_and_at_most_a_day() {
    let now = Timestamp::parse("2026-11-15T12:00:00Z").unwrap();
    let read = |pairs: &[(HeaderName, &str)]| {
        let headers = pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
        retry_after(&headers.collect(), now)
    };
    let of = |value| read(&[(RETRY_AFTER, value)]);
    assert_eq!(of("0"), Some(Duration::ZERO));
    assert_eq!(of(" 30 "), Some(Duration::from_secs(30)));
    assert_eq!(of("86401"), Some(RETRY_AFTER_MAX));
    assert_eq!(of("99999999999999999999999999"), Some(RETRY_AFTER_MAX));
    assert_eq!(of("Sun, 15 Nov 2026 12:01:00 GMT"), Some(Duration::from_secs(60)));
    assert_eq!(of("Sun, 15 Nov 2026 11:00:00 GMT"), Some(Duration::ZERO));
    assert_eq!(of("Mon, 15 Nov 2027 12:00:00 GMT"), Some(RETRY_AFTER_MAX));
    for nonsense in ["", "-1", "1.5", "soon", "1e3"] {
        assert_eq!(of(nonsense), None, "{nonsense}");
    }
    assert_eq!(read(&[]), None);
    // The receiver's clock is a year behind ours.
    let behind = [(RETRY_AFTER, "Sat, 15 Nov 2025 12:00:10 GMT"), (DATE, "Sat, 15 Nov 2025 12:00:00 GMT")];
    assert_eq!(read(&behind), Some(Duration::from_secs(10)));
}

#[tokio::test]
async fn a_receiver_that_does_not_answer_is_given_up() {
    let (sent, ()) = send_to(SHORT, wait_until_closed).await;
    assert_eq!((sent.status, sent.error.as_deref()), (None, Some("no answer within 300 ms")));
    assert!(sent.duration >= SHORT, "{:?}", sent.duration);
}

#[tokio::test]
async fn a_slow_head_does_not_extend_the_time() {
    let drip = async |mut stream: TcpStream| {
        let mut tick = tokio::time::interval(SHORT / 20);
        let mut head = b"HTTP/1.1 200 OK\r\n".iter().chain(std::iter::repeat(&b'x'));
        while stream.write_all(&[*head.next().unwrap()]).await.is_ok() {
            tick.tick().await;
        }
    };
    let (sent, ()) = send_to(SHORT, drip).await;
    assert_eq!((sent.status, sent.error.as_deref()), (None, Some("no answer within 300 ms")));
}

/// Hyper skips interim answers without a limit of their number.
#[tokio::test]
async fn endless_interim_answers_end_the_attempt() {
    let interim = async |mut stream: TcpStream| {
        let (many, mut written) = (b"HTTP/1.1 100 Continue\r\n\r\n".repeat(100), 0);
        while stream.write_all(&many).await.is_ok() {
            written += many.len();
        }
        written
    };
    let (sent, written) = send_to(Duration::from_secs(5), interim).await;
    assert_eq!((sent.status, sent.error.as_deref()), (None, Some("more than 10 interim answers (1xx)")));
    assert!(written < 32 << 20, "{written} bytes were taken before the connection was closed");
}

#[tokio::test]
async fn a_few_interim_answers_may_precede_the_answer() {
    for (number, error) in
        [(INTERIM_ANSWERS_MAX, None), (INTERIM_ANSWERS_MAX + 1, Some("more than 10 interim answers (1xx)"))]
    {
        let interim = "HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n".repeat(number);
        let sent = send_and_get(&format!("{interim}HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")).await;
        assert_eq!(sent.error.as_deref(), error);
        assert_eq!(sent.status, error.is_none().then_some(200));
    }
}

#[tokio::test]
async fn a_body_that_does_not_end_is_a_failure_despite_its_status() {
    for head in ["transfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "content-length: 3\r\n\r\nok", "\r\nok"] {
        let answering = async |mut stream: TcpStream| {
            stream.write_all(format!("HTTP/1.1 200 OK\r\n{head}").as_bytes()).await.unwrap();
            wait_until_closed(stream).await;
        };
        let (sent, ()) = send_to(SHORT, answering).await;
        assert_eq!(sent.status, Some(200));
        assert_eq!(sent.error.as_deref(), Some("the answer did not end within 300 ms"));
        assert_eq!(sent.answer.as_deref(), Some("ok"));
    }
}

#[tokio::test]
async fn an_endless_body_is_a_failure_and_is_not_read_on() {
    let endless = async |mut stream: TcpStream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
    };
    let (sent, ()) = send_to(AMPLE, endless).await;
    assert_eq!((sent.status, sent.error.as_deref()), (Some(200), Some("the answer is longer than 4 KiB")));
    assert_eq!(sent.answer.map(|answer| answer.len()), Some(ANSWER_BYTES_KEPT));
}

#[tokio::test]
async fn an_answer_may_be_as_long_as_the_limit_whether_its_length_is_announced_or_not() {
    for (length, error) in [(ANSWER_BYTES_MAX, None), (ANSWER_BYTES_MAX + 1, Some("the answer is longer than 4 KiB"))] {
        for announced in ["".to_owned(), format!("content-length: {length}\r\n")] {
            let sent = send_and_get(&format!("HTTP/1.1 200 OK\r\n{announced}\r\n{}", "x".repeat(length))).await;
            assert_eq!((sent.status, sent.error.as_deref()), (Some(200), error), "{length} {announced}");
        }
    }
}

#[tokio::test]
async fn a_body_that_is_announced_as_long_and_streams_is_a_failure_and_is_not_read_on() {
    for (status, error) in [(200, "the answer is longer than 4 KiB"), (500, "answered 500")] {
        let endless = async |mut stream: TcpStream| {
            let head = format!("HTTP/1.1 {status} Long\r\ncontent-length: 10000000000\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
        };
        let (sent, ()) = send_to(AMPLE, endless).await;
        assert_eq!((sent.status, sent.error.as_deref()), (Some(status), Some(error)));
        assert_eq!(sent.answer.map(|answer| answer.len()), Some(ANSWER_BYTES_KEPT));
    }
}

#[tokio::test]
async fn a_body_that_is_announced_as_long_and_stops_or_breaks_off_is_a_failure() {
    let stopping = async |mut stream: TcpStream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nok").await.unwrap();
        wait_until_closed(stream).await;
    };
    let (sent, ()) = send_to(SHORT, stopping).await;
    assert_eq!((sent.status, sent.answer.as_deref()), (Some(200), Some("ok")));
    assert_eq!(sent.error.as_deref(), Some("the answer did not end within 300 ms"));
    let sent = send_and_get("HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nok").await;
    assert_eq!((sent.status, sent.answer.as_deref()), (Some(200), Some("ok")));
    assert!(sent.error.unwrap().starts_with("the answer broke off: "));
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_a_failure() {
    let before = send_and_get("").await;
    assert_eq!((before.status, before.error.as_deref()), (None, Some("the connection was closed before an answer")));
    let inside = send_and_get("HTTP/1.1 200 OK\r\ncontent-le").await;
    assert_eq!((inside.status, inside.error.as_deref()), (None, Some("the connection was closed before an answer")));
    for rest in ["content-length: 4096\r\n\r\nok", "transfer-encoding: chunked\r\n\r\n2\r\nok\r\n"] {
        let sent = send_and_get(&format!("HTTP/1.1 200 OK\r\n{rest}")).await;
        assert_eq!((sent.status, sent.answer.as_deref()), (Some(200), Some("ok")));
        let error = sent.error.unwrap();
        assert!(error.starts_with("the answer broke off: "), "{error}");
    }
}

#[tokio::test]
async fn a_huge_head_is_a_failure() {
    let one_header = async |mut stream: TcpStream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nx: ").await.unwrap();
        let mut written = 0;
        while written < 10 << 20 && stream.write_all(&[b'x'; 4096]).await.is_ok() {
            written += 4096;
        }
        written
    };
    let (sent, written) = send_to(AMPLE, one_header).await;
    assert_eq!((sent.status, sent.error.as_deref()), (None, Some("the head of the answer is too large")));
    assert!(written < 10 << 20, "the sender reads it to the end");
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(HEADERS_MAX + 1));
    assert_eq!(send_and_get(&many).await.error.as_deref(), Some("the head of the answer is too large"));
}

#[tokio::test]
async fn an_answer_in_another_protocol_is_a_failure() {
    assert_eq!(send_and_get("220 mail.example ESMTP\r\n").await.error.as_deref(), Some("the answer is not HTTP"));
}

#[tokio::test]
async fn no_receiver_is_no_connection() {
    let (listener, url) = listen().await;
    drop(listener);
    let error = send(&sender(AMPLE), &url).await.error.unwrap();
    assert!(error.starts_with("no connection: Connection refused"), "{error}");
}

#[tokio::test]
async fn a_receiver_without_tls_is_a_tls_error() {
    let (listener, url) = listen().await;
    let received = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        wait_until_closed(stream).await;
    };
    let (sender, url) = (sender(AMPLE), url.replace("http:", "https:"));
    let (sent, ()) = tokio::join!(send(&sender, &url), received);
    let error = sent.error.unwrap();
    assert!(error.starts_with("no TLS connection: "), "{error}");
}

#[tokio::test]
async fn a_name_without_address_is_no_connection() {
    let (resolver, _) = resolver(&[&[]]);
    let sender = Sender::new(AddressGuard::with_resolver(local(), resolver), AMPLE).unwrap();
    let sent = send(&sender, &path(NAME, 80)).await;
    assert_eq!(sent.error.as_deref(), Some("no connection: the host name does not resolve"));
}

#[tokio::test]
async fn dns_that_does_not_answer_is_given_up() {
    let silent: Resolver = Arc::new(|_, _| Box::pin(std::future::pending()));
    let sender = Sender::new(AddressGuard::with_resolver(local(), silent), SHORT).unwrap();
    assert_eq!(send(&sender, &path(NAME, 80)).await.error.as_deref(), Some("no answer within 300 ms"));
}

/// The places of a key are in use until its lookups end, also when no attempt waits for them any more.
#[tokio::test]
async fn slow_names_of_one_key_do_not_hold_up_the_deliveries_of_another() {
    let (listener, url) = listen().await;
    let resolver: Resolver = Arc::new(|host, port| {
        if host != NAME {
            return Box::pin(std::future::pending());
        }
        Box::pin(async move { Ok(vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port))]) })
    });
    let guard = AddressGuard::with_lookups(local(), Lookups::with_timeout(resolver, SHORT));
    let sender = Sender::new(guard.clone(), AMPLE).unwrap();
    let slow = async |number: usize| {
        let url = path(&format!("{number}.slow.test"), 80);
        sender.send("slow", &url, Vec::new(), Bytes::new()).await.error.unwrap()
    };
    let errors = futures::future::join_all((0..200).map(slow)).await;
    let busy = "no connection: too many lookups of this API key's host names are in progress";
    assert_eq!(errors.iter().filter(|error| *error == busy).count(), 200 - LOOKUPS_PER_OWNER_MAX, "{errors:?}");
    let url = url.replace("127.0.0.1", NAME);
    let checked = guard.check_url(&url).unwrap();
    assert_eq!(guard.check_resolves(OWNER, &checked).await, Ok(()));
    let received = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    };
    // An attempt that fails before it connects leaves the receiver waiting.
    let sent = tokio::select! {
        biased;
        (sent, ()) = async { tokio::join!(send(&sender, &url), received) } => sent,
        () = tokio::time::sleep(CONNECT_TIMEOUT * 2) => panic!("the other key's event is not delivered"),
    };
    assert_eq!((sent.status, sent.error), (Some(200), None));
}

#[tokio::test]
async fn keys_share_no_connection() {
    let (listener, url) = listen().await;
    let sender = sender(AMPLE);
    let mut open = Vec::new();
    for owner in ["a", "b"] {
        let received = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_request(&mut stream).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            stream
        };
        let sending = sender.send(owner, &url, Vec::new(), Bytes::from_static(BODY.as_bytes()));
        let both = tokio::time::timeout(CONNECT_TIMEOUT, async { tokio::join!(sending, received) });
        let (sent, stream) = both.await.expect("each key opens a connection");
        assert_eq!(sent.error, None);
        open.push(stream);
        // The answered connection returns to the pool in the background.
        tokio::time::sleep(SHORT).await;
    }
}

#[tokio::test]
async fn a_forbidden_address_is_never_connected_to() {
    let (trap, port) = trap();
    // The name also has a public address, which must not be tried either.
    let (resolver, calls) = resolver(&[&["8.8.8.8", "127.0.0.1"]]);
    let sender = Sender::new(AddressGuard::with_resolver(public_only(), resolver), AMPLE).unwrap();
    let sent = send(&sender, &path(NAME, port)).await;
    assert_eq!((sent.status, sent.error.as_deref()), (None, Some("refused: the address is loopback")));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    for host in ["127.0.0.1", "localhost", "127.1", "[::ffff:127.0.0.1]", "0.0.0.0", "me:pw@127.0.0.1"] {
        let error = send(&sender, &path(host, port)).await.error.unwrap();
        assert!(error.starts_with("refused: the URL "), "{host}: {error}");
    }
    assert!(is_untouched(&trap));
}

#[tokio::test]
async fn a_policy_that_has_become_stricter_applies_to_registered_urls() {
    let (trap, port) = trap();
    let policy = AddressPolicy { ports: vec![443], ..local() };
    let sender = Sender::new(AddressGuard::new(policy), AMPLE).unwrap();
    let error = send(&sender, &path("127.0.0.1", port)).await.error.unwrap();
    assert_eq!(error, "refused: the URL must have one of the ports 443 (WEBHOOK_PORTS sets them)");
    assert!(is_untouched(&trap));
}

/// DNS rebinding: the name has a public address when it is registered, and an internal one afterwards.
#[tokio::test]
async fn a_name_that_is_rebound_to_an_internal_address_is_refused() {
    let (trap, port) = trap();
    let (resolver, _) = resolver(&[&["8.8.8.8"], &["127.0.0.1"]]);
    let guard = AddressGuard::with_resolver(public_only(), resolver);
    let url = guard.check_url(&path(NAME, port)).unwrap();
    assert_eq!(guard.check_resolves(OWNER, &url).await, Ok::<(), UrlRefused>(()));
    let sender = Sender::new(guard, AMPLE).unwrap();
    let sent = send(&sender, url.as_str()).await;
    assert_eq!(sent.error.as_deref(), Some("refused: the address is loopback"));
    assert!(is_untouched(&trap));
}

/// Between check and connection there is no second resolution that could answer something else.
#[tokio::test]
async fn only_the_checked_address_is_connected_to() {
    let (listener, url) = listen().await;
    // Refused under every policy, should it be asked for.
    let (resolver, calls) = resolver(&[&["127.0.0.1"], &["224.0.0.1"]]);
    let sender = Sender::new(AddressGuard::with_resolver(local(), resolver), AMPLE).unwrap();
    let received = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let request = read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        request
    };
    let url = url.replace("127.0.0.1", NAME);
    let (sent, request) = tokio::join!(send(&sender, &url), received);
    assert_eq!((sent.status, sent.error), (Some(200), None));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert!(request.contains(&format!("host: {NAME}:")), "{request}");
    // The next connection asks again.
    assert_eq!(send(&sender, &url).await.error.as_deref(), Some("refused: the address is multicast"));
}

#[tokio::test]
async fn an_address_that_does_not_work_leaves_time_for_the_next() {
    let (listener, url) = listen().await;
    // Nothing listens on this port of the first.
    let (resolver, _) = resolver(&[&["::1", "127.0.0.1"]]);
    let sender = Sender::new(AddressGuard::with_resolver(local(), resolver), AMPLE).unwrap();
    let received = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    };
    let url = url.replace("127.0.0.1", NAME);
    let (sent, ()) = tokio::join!(send(&sender, &url), received);
    assert_eq!((sent.status, sent.error), (Some(200), None));
}

/// The connection of an answer returns to the pool in the background, so not every attempt finds it there.
#[tokio::test]
async fn a_connection_is_used_again() {
    let (listener, url) = listen().await;
    let connections = AtomicUsize::new(0);
    let receiving = async {
        let mut open = futures::stream::FuturesUnordered::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    connections.fetch_add(1, Ordering::Relaxed);
                    let mut stream = accepted.unwrap().0;
                    open.push(async move {
                        while !read_request(&mut stream).await.is_empty() {
                            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
                        }
                    });
                }
                Some(()) = futures::StreamExt::next(&mut open) => {}
            }
        }
    };
    let sending = async {
        let (sender, mut attempts) = (sender(AMPLE), 0);
        while attempts <= connections.load(Ordering::Relaxed) {
            assert_eq!(send(&sender, &url).await.error, None);
            attempts += 1;
            assert!(attempts < 1000, "each attempt opens a connection");
        }
    };
    tokio::select! {
        () = sending => {}
        () = receiving => unreachable!("it serves until the test ends"),
    }
}

#[tokio::test]
async fn a_header_that_cannot_be_sent_is_a_failure() {
    let headers = vec![("webhook-id", "two\r\nlines".to_owned())];
    let sent = sender(AMPLE).send(OWNER, "http://127.0.0.1:9/", headers, Bytes::new()).await;
    assert_eq!(sent.error.as_deref(), Some("the request cannot be made: webhook-id is invalid"));
}

#[test]
fn limits_are_shown_in_seconds_where_possible() {
    assert_eq!(shown(Duration::from_secs(15)), "15 s");
    assert_eq!(shown(Duration::from_millis(1500)), "1500 ms");
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_after_their_attempt() {
    let mut sender = sender(AMPLE);
    sender.open_before_closing = 2;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let (listener, url) = listen().await;
        let received = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_request(&mut stream).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            stream
        };
        let (sent, stream) = tokio::join!(send(&sender, &url), received);
        assert_eq!(sent.error, None);
        streams.push(stream);
    }
    for stream in streams.split_off(2) {
        wait_until_closed(stream).await;
    }
    assert_eq!(sender.open.count(), 2, "the first two are kept for their hosts' next events");
}
