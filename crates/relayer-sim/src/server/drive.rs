//! Drives the core in real time: requests from sockets, a task that follows the schedule, and webhooks.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::{ConnectInfo, Request, State},
    http::{HeaderName, HeaderValue, StatusCode},
    response::{IntoResponse, Response},
};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Seen, connections::Connection};
use crate::{Event, Mode, OutgoingWebhook, RelayerOptions, Reply, SimRelayer, SimRequest, SimResponse, Ticket};

/// Webhooks under way at once. The real relayer has 30 workers.
const WEBHOOK_WORKERS: usize = 30;

/// A relayer's core with its clock, tasks and waiting requests.
pub(crate) struct Driver {
    pub(crate) options: Arc<RelayerOptions>,
    pub(crate) address: Arc<str>,
    state: Mutex<Driven>,
    seen: Mutex<Vec<Seen>>,
    client: reqwest::Client,
    workers: Semaphore,
    wake: Notify,
    tasks: Mutex<Option<Tasks>>,
    #[cfg(feature = "dev")]
    pub(crate) dev: Option<crate::dev::DevParts>,
}

pub(crate) struct Driven {
    pub(crate) core: SimRelayer,
    replies: HashMap<Ticket, oneshot::Sender<Reply>>,
    /// Time until which the schedule's task sleeps.
    sleeps_until_ms: i64,
}

/// The tasks between a start and a stop.
struct Tasks {
    stop: CancellationToken,
    tracker: TaskTracker,
}

/// Milliseconds since 1970. A change of the machine's clock does not move it.
pub(crate) fn now_ms() -> i64 {
    static START: LazyLock<(Instant, Duration)> =
        LazyLock::new(|| (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()));
    let (instant, wall) = *START;
    i64::try_from((wall + instant.elapsed()).as_millis()).unwrap_or(i64::MAX)
}

impl Driver {
    pub(crate) fn new(options: RelayerOptions) -> Self {
        let options = Arc::new(options);
        let core = SimRelayer::new(Arc::clone(&options), rand::random());
        Self {
            options,
            address: Arc::from(core.address()),
            state: Mutex::new(Driven { core, replies: HashMap::new(), sleeps_until_ms: i64::MAX }),
            seen: Mutex::new(Vec::new()),
            client: super::http_client(),
            workers: Semaphore::new(WEBHOOK_WORKERS),
            wake: Notify::new(),
            tasks: Mutex::new(None),
            #[cfg(feature = "dev")]
            dev: None,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Driven> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn seen(&self) -> MutexGuard<'_, Vec<Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the core from outside, and lets the schedule's task carry out the consequences.
    pub(crate) fn change(&self, change: impl FnOnce(&mut SimRelayer, i64)) {
        change(&mut self.lock().core, now_ms());
        self.wake.notify_one();
    }

    /// Starts the task that follows the schedule.
    pub(crate) fn begin_tasks(self: &Arc<Self>) {
        let tasks = Tasks { stop: CancellationToken::new(), tracker: TaskTracker::new() };
        let mut current = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Some(tasks);
        drop(current);
        let driver = Arc::clone(self);
        self.spawn(async move { driver.follow_schedule().await });
    }

    /// Stops all tasks, and the core with them; the returned tracker ends when they have.
    pub(crate) fn end_tasks(&self) -> Option<TaskTracker> {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        tasks.stop.cancel();
        tasks.tracker.close();
        let mut state = self.lock();
        state.core.crash(now_ms());
        state.replies.clear();
        Some(tasks.tracker)
    }

    /// Runs work that ends when the relayer stops.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(tasks) = &*self.tasks.lock().unwrap_or_else(PoisonError::into_inner) {
            let stop = tasks.stop.clone();
            tasks.tracker.spawn(async move { stop.run_until_cancelled(work).await });
        }
    }

    async fn follow_schedule(self: Arc<Self>) {
        loop {
            let due_ms = {
                let mut state = self.lock();
                self.carry_out(&mut state);
                let due_ms = state.core.next_due_ms();
                state.sleeps_until_ms = due_ms.unwrap_or(i64::MAX);
                due_ms
            };
            let sleep = async {
                match due_ms {
                    Some(due_ms) => {
                        let pause_ms = u64::try_from(due_ms.saturating_sub(now_ms())).unwrap_or_default();
                        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.wake.notified() => {}
                () = sleep => {}
            }
        }
    }

    /// Lets the core advance to the present and carries out its events. Stored records are durable when this returns.
    fn carry_out(self: &Arc<Self>, state: &mut Driven) {
        for event in state.core.advance(now_ms()) {
            match event {
                Event::Webhook(webhook) => {
                    let driver = Arc::clone(self);
                    self.spawn(async move { driver.deliver(webhook).await });
                }
                Event::Reply { ticket, reply } => {
                    if let Some(waiting) = state.replies.remove(&ticket) {
                        // An error means that the caller has hung up.
                        let _ = waiting.send(reply);
                    }
                }
                #[cfg(feature = "dev")]
                Event::Stored(number) => {
                    if let Some(dev) = &self.dev {
                        dev.stored(&state.core, number);
                    }
                }
                #[cfg(feature = "dev")]
                Event::Notified(number) => {
                    if let Some(dev) = &self.dev {
                        dev.notified(number);
                    }
                }
                // No mode without a journal has these.
                #[cfg(not(feature = "dev"))]
                Event::Stored(_) | Event::Notified(_) => {}
            }
        }
        if state.core.next_due_ms().is_some_and(|due_ms| due_ms < state.sleeps_until_ms) {
            self.wake.notify_one();
        }
    }

    /// One attempt. Like the real relayer without a timeout: a slow receiver is waited for.
    async fn deliver(self: Arc<Self>, webhook: OutgoingWebhook) {
        let Ok(_worker) = self.workers.acquire().await else { return };
        let mut request = self.client.post(&*webhook.url).body(webhook.body.to_string());
        for (name, value) in webhook.headers {
            request = request.header(name, value);
        }
        let status = match request.send().await {
            Ok(answer) => {
                let status = answer.status().as_u16();
                // Read to the end, or the connection cannot be used again.
                let _ = answer.bytes().await;
                Some(status)
            }
            Err(_) => None,
        };
        let mut state = self.lock();
        state.core.webhook_result(now_ms(), webhook.id, status);
        self.carry_out(&mut state);
    }

    /// Handles a request, and waits for its reply if that comes later.
    async fn handle(self: &Arc<Self>, request: &SimRequest<'_>) -> Reply {
        let (reply, waiting) = {
            let mut state = self.lock();
            let reply = state.core.handle(now_ms(), request);
            let waiting = match reply {
                Reply::Waiting(ticket) => {
                    let (sender, waiting) = oneshot::channel();
                    state.replies.insert(ticket, sender);
                    Some(waiting)
                }
                _ => None,
            };
            self.carry_out(&mut state);
            (reply, waiting)
        };
        match waiting {
            // The sender is dropped when the relayer stops.
            Some(waiting) => waiting.await.unwrap_or(Reply::Cut),
            None => reply,
        }
    }
}

/// Every request of every path.
pub(super) async fn serve(
    State(driver): State<Arc<Driver>>,
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request,
) -> Response {
    let (head, body) = request.into_parts();
    #[cfg(feature = "dev")]
    if let Some(refusal) = driver.dev.as_ref().and_then(|dev| dev.refuse(&head)) {
        return answer(refusal);
    }
    let query = head.uri.query().unwrap_or_default();
    if driver.options.mode == Mode::Audited {
        let (method, path) = (head.method.to_string(), head.uri.path().to_owned());
        driver.seen().push(Seen { method, path, query: query.to_owned(), at: Instant::now() });
    }
    let Ok(body) = to_bytes(body, usize::MAX).await else { return StatusCode::BAD_REQUEST.into_response() };
    let headers: Vec<(&str, &str)> = ["authorization", "content-type", "x-request-id"]
        .into_iter()
        .filter_map(|name| Some((name, head.headers.get(name)?.to_str().unwrap_or("not text"))))
        .collect();
    let request =
        SimRequest { method: head.method.as_str(), path: head.uri.path(), query, headers: &headers, body: &body };
    #[cfg(feature = "dev")]
    if let Some(dev) = &driver.dev
        && let Some(failure) = dev.ask_balance(&driver, head.uri.path()).await
    {
        return answer(failure);
    }
    match driver.handle(&request).await {
        Reply::Answer { response, after_ms } => {
            if after_ms > 0 {
                tokio::time::sleep(Duration::from_millis(after_ms)).await;
            }
            answer(response)
        }
        Reply::BreakOff(response) => break_off(response),
        Reply::Cut | Reply::Waiting(_) => {
            connection.cut();
            // Never seen: the connection is gone.
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
        Reply::Hang => {
            connection.is_cut().await;
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn answer(response: SimResponse) -> Response {
    let mut answer = Response::new(Body::from(response.body));
    *answer.status_mut() = StatusCode::from_u16(response.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    for (name, value) in response.headers {
        if let Ok(value) = HeaderValue::try_from(value) {
            answer.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    answer
}

/// Announces the whole body and sends half of it.
fn break_off(response: SimResponse) -> Response {
    let length = response.body.len();
    let half = Bytes::copy_from_slice(&response.body[..length / 2]);
    let pieces = futures::stream::iter([Ok(half), Err(std::io::Error::other("the connection breaks off"))]);
    let mut answer = answer(SimResponse { body: Vec::new(), ..response });
    answer.headers_mut().insert("content-length", HeaderValue::from(length));
    *answer.body_mut() = Body::from_stream(pieces);
    answer
}
