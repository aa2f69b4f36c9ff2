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
use tokio::time::Instant;

use super::problem::Problem;
use super::strict_json;

/// Maximum bytes of client bodies in memory, not counting the one body that may exceed the pool ([`Pool`]). Each byte
/// is held several times until its request is answered: as JSON, as a row, as a message.
const CLIENT_BYTES_MAX: usize = 512 * 1024;
/// The same for webhooks. Apart, because their senders prove who they are by a signature over the whole body: before that,
/// anyone could hold the memory that clients need.
const WEBHOOK_BYTES_MAX: usize = 256 * 1024;
/// What a body counts for at least.
const CHARGE_MIN: usize = 512;
/// Longest wait for memory. Until then a request takes no more of it than its head.
const MEMORY_WAIT: Duration = Duration::from_secs(5);
/// Longest time that a body may take for its rest when it is its turn: others wait for it.
const TURN_MAX: Duration = Duration::from_secs(1);
/// Most requests that wait for memory: each has a connection and a head.
const WAITING_MAX: usize = 256;
/// Longest time for the body of a webhook. Relayers are near, and send it in one piece.
const WEBHOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// A body whose announced length slightly exceeds the limit is read and dropped for this long before the answer: a
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
    clients: Pool,
    webhooks: Pool,
}

/// Memory that bodies share. A body that is charged as it arrives may find none left for its rest; several of those would
/// wait for one another. So one at a time may go beyond the pool, and the others wait for their turn.
#[derive(Debug)]
struct Pool {
    bytes: Arc<Semaphore>,
    turn: Arc<Semaphore>,
    waiting: Semaphore,
}

impl Pool {
    fn of(bytes: usize) -> Self {
        let turn = Arc::new(Semaphore::new(1));
        Self { bytes: Arc::new(Semaphore::new(bytes)), turn, waiting: Semaphore::new(WAITING_MAX) }
    }
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
pub struct BodyMemory(#[expect(dead_code, reason = "held for its drop")] Vec<OwnedSemaphorePermit>);

impl BodyLimits {
    /// These limits, and nothing held.
    pub fn new(bytes_max: usize, timeout: Duration) -> Self {
        Self {
            bytes_max,
            timeout,
            memory_wait: MEMORY_WAIT.min(timeout / 3),
            clients: Pool::of(CLIENT_BYTES_MAX),
            webhooks: Pool::of(WEBHOOK_BYTES_MAX),
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
        memory: &Pool,
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
            let bytes = if charge == Charge::Announced { known } else { 0 }.max(CHARGE_MIN);
            let held = self.reserve(memory, &memory.bytes, bytes).await?;
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
        memory: &Pool,
    ) -> Result<RawBody, Problem> {
        let mut first: Option<Bytes> = None;
        let mut all = BytesMut::new();
        let mut size = 0;
        let mut turn: Option<(OwnedSemaphorePermit, Instant)> = None;
        loop {
            let until = turn.as_ref().map_or_else(|| Instant::now() + self.timeout, |(_, began)| *began + TURN_MAX);
            let Ok(frame) = tokio::time::timeout_at(until, body.frame()).await else { return Err(Problem::too_slow()) };
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|_| Problem::bad_request("the body ended early"))?;
            let Ok(piece) = frame.into_data() else { continue };
            size += piece.len();
            if size > self.bytes_max {
                return Err(Problem::too_large(self.bytes_max));
            }
            if size > held.num_permits() && turn.is_none() {
                let more = size.max(2 * held.num_permits()).min(self.bytes_max) - held.num_permits();
                match Arc::clone(&memory.bytes).try_acquire_many_owned(permits(more)) {
                    Ok(more) => held.merge(more),
                    Err(_) => turn = Some((self.reserve(memory, &memory.turn, 1).await?, Instant::now())),
                }
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
        let memory = std::iter::once(held).chain(turn.map(|(turn, _)| turn)).collect();
        Ok(RawBody(first.unwrap_or_else(|| all.freeze()), BodyMemory(memory)))
    }

    /// Takes this much of a pool's memory or its turn, or refuses the request.
    async fn reserve(&self, pool: &Pool, part: &Arc<Semaphore>, count: usize) -> Result<OwnedSemaphorePermit, Problem> {
        let count = permits(count);
        if let Ok(held) = Arc::clone(part).try_acquire_many_owned(count) {
            return Ok(held);
        }
        if let Ok(_place) = pool.waiting.try_acquire() {
            let waited = tokio::time::timeout(self.memory_wait, Arc::clone(part).acquire_many_owned(count)).await;
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

fn permits(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
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
    use futures::future::join_all;
    use futures::stream::{self, StreamExt};

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

    /// Each has a part of the memory when none is left for the rest of any.
    #[tokio::test]
    async fn large_bodies_that_arrive_in_pieces_at_once_do_not_wait_for_one_another() {
        let limits = BodyLimits::new(MAX, Duration::from_secs(15));
        let slowly = || {
            let pieces = stream::iter(0..12).then(async |_| {
                tokio::task::yield_now().await;
                Ok::<_, std::convert::Infallible>(Bytes::from(vec![b'x'; 16 * 1024]))
            });
            Request::new(Body::from_stream(pieces))
        };
        let webhooks =
            (0..40).map(|_| async { limits.webhook(slowly()).await.map(drop).map_err(|problem| problem.code) });
        let bodies = (0..40).map(|_| async { read(&limits, slowly()).await.map(drop) });
        let (webhooks, bodies) = tokio::join!(join_all(webhooks), join_all(bodies));
        assert!(webhooks.iter().chain(&bodies).all(Result::is_ok), "{webhooks:?} {bodies:?}");
        assert_eq!(limits.webhooks.bytes.available_permits(), WEBHOOK_BYTES_MAX);
        assert_eq!(limits.webhooks.turn.available_permits(), 1);
    }

    /// The one whose turn it is holds up all others.
    #[tokio::test]
    async fn a_body_whose_turn_it_is_must_arrive_soon() {
        let limits = BodyLimits::new(MAX, Duration::from_secs(15));
        let _shared = Arc::clone(&limits.webhooks.bytes)
            .try_acquire_many_owned(permits(WEBHOOK_BYTES_MAX - 2 * CHARGE_MIN))
            .unwrap();
        let pieces = stream::iter([Ok::<_, std::convert::Infallible>(Bytes::from(vec![b'x'; 5000]))]);
        let stalled = Request::new(Body::from_stream(pieces.chain(stream::pending())));
        let code = |read: Result<RawBody, Problem>| read.map(drop).map_err(|problem| problem.code);
        let next = limits.webhook(post(None, vec![Bytes::from(vec![b'x'; 5000])]));
        let (stalled, next) = tokio::join!(limits.webhook(stalled), next);
        assert_eq!((code(stalled), code(next)), (Err("request-timeout"), Ok(())));
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
        assert_eq!(limits.clients.bytes.available_permits(), CLIENT_BYTES_MAX);
    }

    #[tokio::test]
    async fn a_body_without_a_length_is_charged_as_it_arrives() {
        let limits = limits();
        let pieces = vec![Bytes::from(vec![b'a'; 10_000]), Bytes::from(vec![b'b'; 50_000]), Bytes::from_static(b"c")];
        let body = read(&limits, post(None, pieces)).await.unwrap();
        assert_eq!((body.0.len(), body.0[0], body.0[60_000]), (60_001, b'a', b'c'));
        assert!(CLIENT_BYTES_MAX - limits.clients.bytes.available_permits() >= 60_001);
        let endless = vec![Bytes::from(vec![b'a'; 100_000]); 10];
        assert_eq!(read(&limits, post(None, endless)).await.err(), Some("too-large"));
        drop(body);
        assert_eq!(limits.clients.bytes.available_permits(), CLIENT_BYTES_MAX);
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
