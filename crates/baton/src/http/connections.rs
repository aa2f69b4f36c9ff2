//! Accepts connections and serves them until shutdown, so that no client can take the service from the others: caps on
//! connections ([`super::open_connections`]), and time limits for each direction ([`super::timed_stream`]).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use metrics::counter;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service as _;
use tracing::{debug, info, warn};

use super::open_connections::{OpenConnections, Place};
use super::timed_stream::TimedStream;
use crate::config::ConnectionLimits;

/// Limits of the listener of probes and metrics. Its clients are few, and they read their answers.
pub const ADMIN_LIMITS: ConnectionLimits = ConnectionLimits {
    connections_max: 64,
    per_address_max: 64,
    idle_timeout: Duration::from_secs(30),
    write_timeout: Duration::from_secs(5),
};

/// Size of each socket buffer. By itself the kernel lets one connection have megabytes in each direction.
const SOCKET_BUFFER_BYTES: u32 = 128 * 1024;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// Longest request head. A connection may make the process keep this much before any key is checked.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// Longest time for clients to read the last answers during shutdown.
const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(35);
/// Pause after a failed accept, such as when the process is out of file descriptors: the failed connection stays in the
/// queue, so that the next accept would fail at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Longest silence between two log lines about refused connections.
const REFUSALS_LOGGED_EVERY: Duration = Duration::from_secs(60);

/// Binds the address; an error names it and the variable that sets its port.
pub fn bind(listen: SocketAddr, variable: &str) -> anyhow::Result<TcpListener> {
    let bound = || -> io::Result<TcpListener> {
        let socket = if listen.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        // Accepted connections inherit both.
        socket.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
        socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
        socket.bind(listen)?;
        socket.listen(BACKLOG)
    };
    bound().with_context(|| format!("cannot listen on {listen}; is another process there? Set {variable} to another"))
}

/// Serves until shutdown, then lets the requests in flight finish.
pub async fn serve(listener: TcpListener, routes: Router, limits: ConnectionLimits, shutdown: CancellationToken) {
    let (idle_timeout, write_timeout) = (limits.idle_timeout, limits.write_timeout);
    let open = OpenConnections::new(limits);
    let connections = TaskTracker::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(idle_timeout).max_buf_size(HEAD_BYTES_MAX);
    let mut failing = false;
    let mut refusals_logged: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(failure) if is_about_one_connection(&failure) => continue,
            Err(failure) => {
                counter!("baton_connections_refused_total", "reason" => "accept").increment(1);
                if !failing {
                    warn!(action = "accept_failed", "cannot accept connections; retrying: {failure}");
                    failing = true;
                }
                tokio::select! {
                    () = shutdown.cancelled() => break,
                    () = tokio::time::sleep(ACCEPT_PAUSE) => continue,
                }
            }
        };
        if failing {
            info!(action = "accept_recovered", "connections are accepted again");
            failing = false;
        }
        let Some(place) = open.enter(peer.ip()) else {
            counter!("baton_connections_refused_total", "reason" => "cap").increment(1);
            if refusals_logged.is_none_or(|last| last.elapsed() >= REFUSALS_LOGGED_EVERY) {
                let caps = "CONNECTIONS_PER_ADDRESS_MAX or CONNECTIONS_MAX";
                warn!(
                    action = "connection_refused",
                    "refused a connection from {}: {caps} reached and no connection can be replaced",
                    peer.ip()
                );
                refusals_logged = Some(Instant::now());
            }
            refuse(&stream);
            continue;
        };
        connections.spawn(serve_one(http.clone(), stream, routes.clone(), place, write_timeout, shutdown.clone()));
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(LAST_ANSWERS_TIMEOUT, connections.wait()).await.is_err() {
        warn!(action = "connections_left", "{} clients did not read their answers in time", connections.len());
    }
}

/// Serves one connection until its client or this service ends it, or another connection takes its place.
async fn serve_one(
    http: http1::Builder,
    stream: TcpStream,
    routes: Router,
    place: Place,
    write_timeout: Duration,
    shutdown: CancellationToken,
) {
    // Answers are small and complete: waiting to fill a packet only delays them.
    stream.set_nodelay(true).ok();
    let activity = Arc::clone(&place.activity);
    let stream = TimedStream::new(stream, write_timeout, Arc::clone(&activity));
    let service = service_fn(move |request: Request<Incoming>| {
        let handling = activity.handle();
        let answer = routes.clone().call(request);
        async move {
            let answer = answer.await;
            drop(handling);
            answer
        }
    });
    let mut connection = std::pin::pin!(http.serve_connection(stream, service));
    let served = tokio::select! {
        // In this order: a request that arrives while the connection is given up is seen first.
        biased;
        served = connection.as_mut() => served,
        () = place.activity.replaced.cancelled() => {
            if !place.activity.is_handling() {
                place.activity.reset();
                return;
            }
            // Its client must read the answer: the request may have had its effect.
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(failure) = served {
        debug!(action = "connection_ended", "a connection ended early: {failure}");
    }
}

/// Whether only the connection at the head of the queue failed: it is gone, and the next one may be accepted at once.
fn is_about_one_connection(failure: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(failure.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// The answer to a connection over the cap.
const REFUSAL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\
    content-type: application/problem+json\r\ncontent-length: 173\r\n\r\n\
    {\"type\":\"urn:baton:problem:too-many-connections\",\"title\":\"Too many connections\",\"status\":503,\
    \"code\":\"too-many-connections\",\"statusCode\":503,\"message\":\"too many connections\"}";

/// Answers without reading anything: nothing that the client sent has an effect.
fn refuse(stream: &TcpStream) {
    // Best effort: a client whose bytes were not read may see a reset instead.
    stream.try_write(REFUSAL).ok();
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use axum::routing;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// The row was accepted and its client saw a reset.
    #[tokio::test]
    async fn a_request_that_begins_while_its_connection_is_given_up_is_answered() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, peer) = listener.accept().await.unwrap();
        let place = OpenConnections::new(ADMIN_LIMITS).enter(peer.ip()).unwrap();
        let replaced = place.activity.replaced.clone();
        let handler = async move || {
            replaced.cancel();
            // The connection's task sees it before this handler ends.
            tokio::time::sleep(Duration::from_millis(20)).await;
            StatusCode::ACCEPTED
        };
        let routes = Router::new().route("/", routing::post(handler));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new());
        let serving =
            tokio::spawn(serve_one(http, stream, routes, place, Duration::from_secs(5), CancellationToken::new()));
        client.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 202 "), "{answer:?}");
        serving.await.unwrap();
    }

    #[test]
    fn a_refusal_is_a_whole_answer() {
        let text = std::str::from_utf8(REFUSAL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}\r\n", body.len()))
                || head.ends_with(&format!("content-length: {}", body.len()))
        );
        assert_eq!(serde_json::from_str::<serde_json::Value>(body).unwrap()["statusCode"], 503);
    }
}
