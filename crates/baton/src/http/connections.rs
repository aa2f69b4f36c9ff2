//! Accepts connections and serves them until shutdown, so that no client can take the service from the others: a cap on
//! all connections and on those from one address, and time limits for each direction ([`super::timed_stream`]).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;
use hyper_util::service::TowerToHyperService;
use metrics::{counter, gauge};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

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
    let permits = Arc::new(Semaphore::new(limits.connections_max));
    let addresses = Arc::new(Addresses::default());
    let connections = TaskTracker::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.idle_timeout).max_buf_size(HEAD_BYTES_MAX);
    let mut failing = false;
    let mut refusals_logged: Option<Instant> = None;
    loop {
        let accepted = async {
            let permit = Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = accepted => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(failure) if is_about_one_connection(&failure) => continue,
            Err(failure) => {
                counter!("baton_connections_refused_total", "reason" => "accept").increment(1);
                if !failing {
                    warn!(
                        action = "accept_failed",
                        "no connection can be accepted, tried again until it can: {failure}"
                    );
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
        let Some(address) = addresses.enter(peer.ip(), limits.per_address_max) else {
            counter!("baton_connections_refused_total", "reason" => "address").increment(1);
            if refusals_logged.is_none_or(|last| last.elapsed() >= REFUSALS_LOGGED_EVERY) {
                let (ip, max) = (peer.ip(), limits.per_address_max);
                warn!(action = "connection_refused", "{ip} has {max} open connections (CONNECTIONS_PER_ADDRESS_MAX)");
                refusals_logged = Some(Instant::now());
            }
            refuse(&stream);
            continue;
        };
        // Answers are small and complete: waiting to fill a packet only delays them.
        stream.set_nodelay(true).ok();
        let stream = TimedStream::new(stream, limits.write_timeout);
        let connection = http.serve_connection(stream, TowerToHyperService::new(routes.clone()));
        let shutdown = shutdown.clone();
        connections.spawn(async move {
            let _held = (permit, address, OpenConnection::count());
            let mut connection = std::pin::pin!(connection);
            let served = tokio::select! {
                served = connection.as_mut() => served,
                () = shutdown.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(failure) = served {
                debug!(action = "connection_ended", "a connection ended early: {failure}");
            }
        });
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(LAST_ANSWERS_TIMEOUT, connections.wait()).await.is_err() {
        warn!(action = "connections_left", "{} clients did not read their answers in time", connections.len());
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

/// The number of open connections, as a gauge.
struct OpenConnection;

impl OpenConnection {
    fn count() -> Self {
        gauge!("baton_connections").increment(1.0);
        Self
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        gauge!("baton_connections").decrement(1.0);
    }
}

/// Open connections of each address.
#[derive(Default)]
struct Addresses(Mutex<HashMap<IpAddr, usize>>);

/// One open connection of an address; dropped when it ends.
struct AddressPermit {
    addresses: Arc<Addresses>,
    address: IpAddr,
}

impl Addresses {
    /// Counts one more connection; `None` if the address has `max` already.
    fn enter(self: &Arc<Self>, address: IpAddr, max: usize) -> Option<AddressPermit> {
        let address = counted(address);
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(address).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(AddressPermit { addresses: Arc::clone(self), address })
    }
}

impl Drop for AddressPermit {
    fn drop(&mut self) {
        let mut open = self.addresses.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.address);
            }
        }
    }
}

/// The address that the cap counts. An IPv6 host chooses freely among the addresses of its /64 network.
fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mut segments = address.segments();
            segments[4..].fill(0);
            IpAddr::from(segments)
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_own_count_and_gets_it_back() {
        let addresses = Arc::new(Addresses::default());
        let enter = |text: &str| addresses.enter(text.parse().unwrap(), 2);
        let first = (enter("10.0.0.1").unwrap(), enter("::ffff:10.0.0.1").unwrap());
        assert!(enter("10.0.0.1").is_none() && enter("10.0.0.2").is_some());
        drop(first);
        assert!(enter("10.0.0.1").is_some());
        assert!(addresses.0.lock().unwrap().is_empty(), "an address without connections takes no memory");
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

    #[test]
    fn the_addresses_of_one_ipv6_network_count_together() {
        let addresses = Arc::new(Addresses::default());
        let enter = |text: &str| addresses.enter(text.parse().unwrap(), 1);
        let _first = enter("2001:db8:1:2::1").unwrap();
        assert!(enter("2001:db8:1:2:ffff::9").is_none() && enter("2001:db8:1:3::1").is_some());
    }
}
