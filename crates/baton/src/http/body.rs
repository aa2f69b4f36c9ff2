//! Request bodies: content type, size, syntax and arrival time are checked here, and how many bytes of them the process
//! holds at once.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use bytes::BytesMut;
use http_body_util::BodyExt;
use metrics::counter;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::problem::Problem;
use super::strict_json;

/// Bytes of clients' bodies that the process holds at once. Each byte is in memory several times until its request is
/// answered: as JSON, as a row, as a message.
const CLIENT_BYTES_MAX: usize = 512 * 1024;
/// The same for webhooks. Apart, because their senders prove who they are by a signature over the whole body: before that,
/// anyone could hold the memory that clients need.
const WEBHOOK_BYTES_MAX: usize = 512 * 1024;
/// What a body counts for at least.
const CHARGE_MIN: usize = 512;
/// Longest wait for memory. Until then a request takes no more of it than its head.
const MEMORY_WAIT: Duration = Duration::from_secs(5);
/// Most requests that wait for memory: each has a connection and a head.
const WAITING_MAX: usize = 256;
/// Longest time for the body of a webhook. Relayers are near, and send it in one piece.
const WEBHOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// A body that is too large by its own account, and not much so, is read and dropped for this long before the answer: a
/// client that is still sending may otherwise see a reset instead of the answer.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

/// Limits of the request bodies of one listener.
#[derive(Debug)]
pub struct BodyLimits {
    /// Largest size in bytes.
    pub bytes_max: usize,
    /// Longest time from the request's head to the body's last byte.
    pub timeout: Duration,
    memory_wait: Duration,
    waiting: Semaphore,
    webhooks_waiting: Semaphore,
    clients: Arc<Semaphore>,
    webhooks: Arc<Semaphore>,
}

/// When the memory of a body is charged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Charge {
    /// At once, for its announced length.
    Announced,
    /// As its bytes arrive.
    Arriving,
}

/// The memory of one body. Dropped with the request's answer, it lets the next body in.
#[derive(Debug, Default)]
pub struct BodyMemory(#[expect(dead_code, reason = "held for its drop")] Option<OwnedSemaphorePermit>);

impl BodyLimits {
    /// These limits, and nothing held.
    pub fn new(bytes_max: usize, timeout: Duration) -> Self {
        let of = |bytes: usize| Arc::new(Semaphore::new(bytes));
        Self {
            bytes_max,
            timeout,
            memory_wait: MEMORY_WAIT.min(timeout / 3),
            waiting: Semaphore::new(WAITING_MAX),
            webhooks_waiting: Semaphore::new(WAITING_MAX),
            clients: of(CLIENT_BYTES_MAX),
            webhooks: of(WEBHOOK_BYTES_MAX),
        }
    }

    /// The limits of a request.
    pub fn of(request: &Request) -> Arc<Self> {
        Arc::clone(request.extensions().get().expect("the server sets the limits of every request"))
    }

    /// Reads a webhook's body. Its memory is charged as it arrives: its sender has proven nothing yet, and could otherwise
    /// hold the memory of all webhooks by announcing two bodies.
    pub async fn webhook(&self, request: Request) -> Result<RawBody, Problem> {
        self.read(request, &self.webhooks, self.timeout.min(WEBHOOK_TIMEOUT), Charge::Arriving).await
    }

    async fn read(
        &self,
        request: Request,
        memory: &Arc<Semaphore>,
        timeout: Duration,
        charge: Charge,
    ) -> Result<RawBody, Problem> {
        let (head, mut body) = request.into_parts();
        let said = body.size_hint().lower();
        if usize::try_from(said).unwrap_or(usize::MAX) > self.bytes_max {
            self.drain(&head.headers, body, said).await;
            return Err(Problem::too_large(self.bytes_max));
        }
        let known = usize::try_from(said).unwrap_or(self.bytes_max);
        let read = async {
            let held = self.reserve(memory, if charge == Charge::Announced { known } else { 0 }).await?;
            self.collect(&mut body, known, held, memory).await
        };
        // Timed apart from the handler: a body that arrives too late (408) has had no effect.
        tokio::time::timeout(timeout, read).await.unwrap_or_else(|_| Err(Problem::too_slow()))
    }

    /// A body without a length is charged as it arrives.
    async fn collect(
        &self,
        body: &mut Body,
        known: usize,
        mut held: OwnedSemaphorePermit,
        memory: &Arc<Semaphore>,
    ) -> Result<RawBody, Problem> {
        let mut first: Option<Bytes> = None;
        let mut all = BytesMut::new();
        let mut size = 0;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Problem::bad_request("the body ended early"))?;
            let Ok(piece) = frame.into_data() else { continue };
            size += piece.len();
            if size > self.bytes_max {
                return Err(Problem::too_large(self.bytes_max));
            }
            if size > held.num_permits() {
                let more =
                    self.reserve(memory, size.max(2 * held.num_permits()).min(self.bytes_max) - held.num_permits());
                held.merge(more.await?);
            }
            // One piece is kept as it is; several are copied together.
            match first.take() {
                None if all.is_empty() => first = Some(piece),
                None => all.extend_from_slice(&piece),
                Some(before) => {
                    all.reserve(known.max(size));
                    all.extend_from_slice(&before);
                    all.extend_from_slice(&piece);
                }
            }
        }
        Ok(RawBody(first.unwrap_or_else(|| all.freeze()), BodyMemory(Some(held))))
    }

    /// Reserves memory for this many bytes, or refuses the request.
    async fn reserve(&self, memory: &Arc<Semaphore>, bytes: usize) -> Result<OwnedSemaphorePermit, Problem> {
        let count = u32::try_from(bytes.max(CHARGE_MIN)).unwrap_or(u32::MAX);
        if let Ok(held) = Arc::clone(memory).try_acquire_many_owned(count) {
            return Ok(held);
        }
        let waiting = if Arc::ptr_eq(memory, &self.webhooks) { &self.webhooks_waiting } else { &self.waiting };
        if let Ok(_turn) = waiting.try_acquire() {
            let waited = tokio::time::timeout(self.memory_wait, Arc::clone(memory).acquire_many_owned(count)).await;
            if let Ok(Ok(held)) = waited {
                return Ok(held);
            }
        }
        counter!("baton_requests_refused_total", "reason" => "memory").increment(1);
        Err(Problem::overloaded())
    }

    /// Reads and drops a body that is a little too large, unless the client waits for permission to send it.
    async fn drain(&self, headers: &HeaderMap, mut body: Body, said: u64) {
        if said <= 4 * self.bytes_max as u64 && !headers.contains_key(header::EXPECT) {
            let rest = async { while let Some(Ok(_)) = body.frame().await {} };
            tokio::time::timeout(DRAIN_TIMEOUT, rest).await.ok();
        }
    }
}

/// A request body as sent, within [`BodyLimits`].
pub struct RawBody(pub Bytes, pub BodyMemory);

impl<S: Send + Sync> FromRequest<S> for RawBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let limits = BodyLimits::of(&request);
        limits.read(request, &limits.clients, limits.timeout, Charge::Announced).await
    }
}

/// A request body of type `application/json`, parsed; its fields are unchecked.
pub struct JsonBody(pub Value, pub BodyMemory);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        if !is_json(request.headers()) {
            return Err(Problem::wrong_content_type());
        }
        let RawBody(body, memory) = RawBody::from_request(request, state).await?;
        Ok(Self(parse(&body)?, memory))
    }
}

/// A request body of type `application/json`, parsed; `None` if the request has no body, whatever its type.
pub struct OptionalJsonBody(pub Option<Value>, pub BodyMemory);

impl<S: Send + Sync> FromRequest<S> for OptionalJsonBody {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let is_json = is_json(request.headers());
        let RawBody(body, memory) = RawBody::from_request(request, state).await?;
        match body.is_empty() {
            true => Ok(Self(None, memory)),
            false if is_json => Ok(Self(Some(parse(&body)?), memory)),
            false => Err(Problem::wrong_content_type()),
        }
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

fn parse(body: &[u8]) -> Result<Value, Problem> {
    strict_json::parse(body).map_err(|rule| Problem::bad_request(format!("the body {rule}")))
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    const MAX: usize = 256 * 1024;

    fn post(length: Option<usize>, pieces: Vec<Bytes>) -> Request {
        let body = match length {
            Some(length) => Body::from(vec![b'x'; length]),
            None => Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, std::convert::Infallible>))),
        };
        Request::new(body)
    }

    /// A body that is announced and never comes.
    struct Announced;

    impl HttpBody for Announced {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Self::Error>>> {
            std::task::Poll::Pending
        }

        fn size_hint(&self) -> hyper::body::SizeHint {
            hyper::body::SizeHint::with_exact(MAX as u64)
        }
    }

    fn limits() -> BodyLimits {
        BodyLimits { memory_wait: Duration::from_millis(1), ..BodyLimits::new(MAX, Duration::from_secs(5)) }
    }

    async fn read(limits: &BodyLimits, request: Request) -> Result<RawBody, &'static str> {
        limits.read(request, &limits.clients, limits.timeout, Charge::Announced).await.map_err(|problem| problem.code)
    }

    #[tokio::test]
    async fn webhooks_that_announce_much_and_send_nothing_leave_the_memory_to_others() {
        let limits = Arc::new(limits());
        let held = (0..8).map(|_| {
            let limits = Arc::clone(&limits);
            tokio::spawn(async move {
                limits.webhook(Request::new(Body::new(Announced))).await.map(drop).map_err(|problem| problem.code)
            })
        });
        let held: Vec<_> = held.collect();
        tokio::task::yield_now().await;
        assert!(limits.webhook(post(Some(MAX), Vec::new())).await.is_ok());
        held.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[tokio::test]
    async fn bodies_in_memory_are_bounded_and_given_back() {
        let limits = limits();
        let mut held = Vec::new();
        for _ in 0..CLIENT_BYTES_MAX / MAX {
            held.push(read(&limits, post(Some(MAX), Vec::new())).await.unwrap());
        }
        assert_eq!(read(&limits, post(Some(1), Vec::new())).await.err(), Some("overloaded"));
        let webhook = limits.webhook(post(Some(MAX), Vec::new())).await;
        assert!(webhook.is_ok(), "webhooks have memory of their own");
        held.pop();
        assert!(read(&limits, post(Some(MAX), Vec::new())).await.is_ok());
        held.clear();
        assert_eq!(limits.clients.available_permits(), CLIENT_BYTES_MAX);
    }

    #[tokio::test]
    async fn a_body_without_a_length_is_charged_as_it_arrives() {
        let limits = limits();
        let pieces = vec![Bytes::from(vec![b'a'; 10_000]), Bytes::from(vec![b'b'; 50_000]), Bytes::from_static(b"c")];
        let body = read(&limits, post(None, pieces)).await.unwrap();
        assert_eq!((body.0.len(), body.0[0], body.0[60_000]), (60_001, b'a', b'c'));
        assert!(CLIENT_BYTES_MAX - limits.clients.available_permits() >= 60_001);
        let endless = vec![Bytes::from(vec![b'a'; 100_000]); 10];
        assert_eq!(read(&limits, post(None, endless)).await.err(), Some("too-large"));
        drop(body);
        assert_eq!(limits.clients.available_permits(), CLIENT_BYTES_MAX);
    }

    #[tokio::test]
    async fn a_length_over_the_limit_is_refused_before_the_body_is_read() {
        let limits = limits();
        // Never ends: reading it would run into the time limit.
        let waiting = stream::pending::<Result<Bytes, std::convert::Infallible>>();
        let body = Body::new(SaysLength(Body::from_stream(waiting), 10_000_000_000));
        assert_eq!(read(&limits, Request::new(body)).await.err(), Some("too-large"));
    }

    /// A body with a `Content-Length`.
    struct SaysLength(Body, u64);

    impl HttpBody for SaysLength {
        type Data = Bytes;
        type Error = axum::Error;

        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            context: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
            std::pin::Pin::new(&mut self.0).poll_frame(context)
        }

        fn size_hint(&self) -> hyper::body::SizeHint {
            hyper::body::SizeHint::with_exact(self.1)
        }
    }
}
