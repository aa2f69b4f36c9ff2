//! A webhook receiver: records every request with its exact bytes, and answers as configured.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Bytes,
    extract::{ConnectInfo, OriginalUri, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};

use relayer_sim::server::connections::{Connection, CuttableServer};
use tokio_util::sync::CancellationToken;

use crate::{ports::free_port, wait::eventually_ok};

/// How the sink answers one request. The request is recorded in every case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// 200 with an empty body.
    Ok,
    /// This status with an empty body; 410 is `Status(410)`.
    Status(u16),
    /// This status and a `Retry-After` header with the given text (seconds or a date).
    RetryAfter(u16, String),
    /// 200, but only after this long.
    Slow(Duration),
    /// This status, but only after [`Sink::release`].
    Held(u16),
    /// Never answered; the connection stays open.
    Hang,
    /// The connection ends without an answer.
    Cut,
}

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Received {
    /// HTTP method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// All headers.
    pub headers: HeaderMap,
    /// The exact bytes of the body.
    pub body: Bytes,
    /// When its body was complete.
    pub at: Instant,
}

impl Received {
    /// The value of one header as text, if present.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is not JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("the webhook's body is JSON")
    }
}

/// A running receiver. Stops when dropped.
pub struct Sink {
    port: u16,
    shared: Arc<Shared>,
    server: Mutex<Option<CuttableServer>>,
}

#[derive(Default)]
struct Shared {
    memory: Mutex<Memory>,
    released: CancellationToken,
}

struct Memory {
    received: Vec<Received>,
    next: VecDeque<Reply>,
    reply: Reply,
}

impl Default for Memory {
    fn default() -> Self {
        Self { received: Vec::new(), next: VecDeque::new(), reply: Reply::Ok }
    }
}

impl Sink {
    /// Starts on a free port and answers 200 to everything, on any path.
    ///
    /// # Panics
    /// When it cannot listen.
    pub async fn start() -> Self {
        let sink = Self { port: free_port(), shared: Arc::default(), server: Mutex::new(None) };
        sink.restart().await;
        sink
    }

    /// `http://127.0.0.1:PORT/hook`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/hook", self.port)
    }

    /// Every request so far, in order of arrival.
    pub fn received(&self) -> Vec<Received> {
        self.shared.lock().received.clone()
    }

    /// How many requests came in so far.
    pub fn count(&self) -> usize {
        self.shared.lock().received.len()
    }

    /// Forgets the requests so far.
    pub fn clear(&self) {
        self.shared.lock().received.clear();
    }

    /// Sets the answer to every request, except those that [`Sink::reply_next`] covers.
    pub fn reply(&self, reply: Reply) {
        self.shared.lock().reply = reply;
    }

    /// Sets the answer to the next `n` requests.
    pub fn reply_next(&self, n: usize, reply: Reply) {
        self.shared.lock().next.extend(std::iter::repeat_n(reply, n));
    }

    /// Gives the answers that [`Reply::Held`] holds back.
    pub fn release(&self) {
        self.shared.released.cancel();
    }

    /// Waits until at least `n` requests came in, and returns all of them.
    ///
    /// # Panics
    /// After the deadline.
    pub async fn wait_for(&self, n: usize, deadline: Duration) -> Vec<Received> {
        eventually_ok(deadline, format!("{n} requests at the sink"), || async {
            let received = self.received();
            if received.len() >= n { Ok(received) } else { Err(format!("{} so far", received.len())) }
        })
        .await
    }

    /// Stops listening and cuts every connection; what was received is kept.
    pub async fn stop(&self) {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(server) = server {
            server.stop().await;
        }
    }

    /// Listens again on the same port.
    ///
    /// # Panics
    /// When it cannot listen.
    pub async fn restart(&self) {
        self.stop().await;
        let router = Router::new().fallback(receive).with_state(self.shared.clone());
        let server = CuttableServer::start(self.port, router).await.expect("the sink's port is free");
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn receive(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(connection): ConnectInfo<Connection>,
    method: Method,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let reply = {
        let mut memory = shared.lock();
        memory.received.push(Received { method, path: uri.to_string(), headers, body, at: Instant::now() });
        memory.next.pop_front().unwrap_or_else(|| memory.reply.clone())
    };
    match reply {
        Reply::Ok => StatusCode::OK.into_response(),
        Reply::Status(status) => code(status).into_response(),
        Reply::RetryAfter(status, after) => {
            let after = HeaderValue::from_str(&after).expect("a header value");
            (code(status), [(RETRY_AFTER, after)]).into_response()
        }
        Reply::Slow(delay) => {
            tokio::select! {
                () = connection.is_cut() => {}
                () = tokio::time::sleep(delay) => {}
            }
            StatusCode::OK.into_response()
        }
        Reply::Held(status) => {
            tokio::select! {
                () = connection.is_cut() => {}
                () = shared.released.cancelled() => {}
            }
            code(status).into_response()
        }
        Reply::Hang => {
            connection.is_cut().await;
            StatusCode::OK.into_response()
        }
        Reply::Cut => {
            connection.cut();
            StatusCode::OK.into_response()
        }
    }
}

fn code(status: u16) -> StatusCode {
    StatusCode::from_u16(status).expect("an HTTP status")
}
