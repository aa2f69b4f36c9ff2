//! The relayer's HTTP side as values: request in, reply out.
//!
//! A reply says what happens on the connection, so that a socket server and an in-process driver share every fault:
//! answered now or after a while, cut, hanging, or [`Reply::Waiting`] for an event that brings the reply.

use serde_json::json;

use crate::{
    answers::{failure, json_body, rate_limited, success, text, unauthorized_missing, unauthorized_wrong},
    core::{Entry, SimRelayer, Ticket, Work},
    faults::{DateHeader, PostFault, ReadFault},
    options::Dialect,
    plan::millis,
    record::{Record, date, http_date},
    request::{Refusal, SendRequest},
};

/// Longest wait of an answer for another one to be exchanged with.
const EXCHANGED_WITHIN_MS: i64 = 300;
pub(crate) const DISABLED_DETAILS: &str = "the simulated chain does not answer";

/// A request as the relayer reads it. Header names are lower case.
#[derive(Clone, Copy, Debug)]
pub struct SimRequest<'a> {
    /// `GET`, `POST` …
    pub method: &'a str,
    /// Without the query.
    pub path: &'a str,
    /// The part behind `?`, or empty.
    pub query: &'a str,
    /// Only `authorization`, `content-type` and `x-request-id` matter.
    pub headers: &'a [(&'a str, &'a str)],
    /// The whole body.
    pub body: &'a [u8],
}

impl SimRequest<'_> {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
    }
}

/// An answer as bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimResponse {
    /// HTTP status.
    pub status: u16,
    /// Names are lower case.
    pub headers: Vec<(&'static str, String)>,
    /// The whole body.
    pub body: Vec<u8>,
}

impl SimResponse {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| *other == name).map(|(_, value)| value.as_str())
    }
}

/// What happens on a request's connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer leaves after this many milliseconds, often 0.
    Answer {
        /// The whole answer.
        response: SimResponse,
        /// The relayer has done its part; only the answer is slow.
        after_ms: u64,
    },
    /// Status, headers and half of the body leave; then the connection ends.
    BreakOff(SimResponse),
    /// The connection ends without an answer.
    Cut,
    /// No answer, and the connection stays open.
    Hang,
    /// The reply comes later, as an event with this ticket.
    Waiting(Ticket),
}

impl Reply {
    pub(crate) fn now(response: SimResponse) -> Self {
        Self::Answer { response, after_ms: 0 }
    }
}

/// A request that waits to be read.
#[derive(Clone, Debug)]
pub(crate) struct OwnedRequest {
    method: String,
    path: String,
    query: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl SimRelayer {
    /// Handles one request at `now_ms`. Call [`SimRelayer::advance`] afterwards: a request may cause events at once.
    pub fn handle(&mut self, now_ms: i64, request: &SimRequest) -> Reply {
        self.now_ms = self.now_ms.max(now_ms);
        if now_ms < self.stalled_until_ms {
            let ticket = self.ticket();
            let owned = |text: &str| text.to_owned();
            let headers = request.headers.iter().map(|(name, value)| (owned(name), owned(value))).collect();
            let (method, path, query) = (owned(request.method), owned(request.path), owned(request.query));
            self.unread.push((ticket, OwnedRequest { method, path, query, headers, body: request.body.to_vec() }));
            return Reply::Waiting(ticket);
        }
        self.serve(now_ms, request, None)
    }

    /// Serves the requests that arrived while the process was frozen.
    pub(crate) fn read_unread(&mut self, now_ms: i64) {
        for (ticket, request) in std::mem::take(&mut self.unread) {
            let headers: Vec<(&str, &str)> = request.headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
            let borrowed = SimRequest {
                method: &request.method,
                path: &request.path,
                query: &request.query,
                headers: &headers,
                body: &request.body,
            };
            match self.serve(now_ms, &borrowed, Some(ticket)) {
                // It has taken over the ticket.
                Reply::Waiting(_) => {}
                reply => self.events.push(crate::Event::Reply { ticket, reply }),
            }
        }
    }

    fn serve(&mut self, now_ms: i64, request: &SimRequest, ticket: Option<Ticket>) -> Reply {
        let mut reply = match self.refusal(now_ms, request) {
            Some(refusal) => Reply::now(refusal),
            None => self.route(now_ms, request, ticket),
        };
        if let Reply::Answer { response, .. } | Reply::BreakOff(response) = &mut reply {
            let id = request.header("x-request-id").map_or_else(|| self.ids.uuid().to_string(), str::to_owned);
            response.headers.push(("x-request-id", id));
            self.stamp(now_ms, response);
        }
        reply
    }

    /// Adds the `Date` header, by the relayer's own clock unless a fault says otherwise.
    fn stamp(&self, now_ms: i64, response: &mut SimResponse) {
        let by = match self.faults.date {
            DateHeader::Own => self.options.date_header.then(|| self.clock(now_ms)),
            DateHeader::Proxy => Some(now_ms),
            DateHeader::Absent => None,
        };
        if let Some(at_ms) = by {
            response.headers.push(("date", http_date(at_ms)));
        }
    }

    /// What stops a request before it reaches a route: faults for every request, the rate limit, and the key.
    fn refusal(&mut self, now_ms: i64, request: &SimRequest) -> Option<SimResponse> {
        if let Some(status) = self.faults.every_request {
            return Some(failure(status, "Internal Server Error"));
        }
        if !self.is_within_rate_limit(now_ms) {
            return Some(rate_limited());
        }
        let public = matches!(request.path, "/api/v1/health" | "/api/v1/ready");
        match request.header("authorization") {
            _ if public => None,
            None => Some(unauthorized_missing()),
            Some(given) if given.strip_prefix("Bearer ") == Some(&self.options.api_key) => None,
            Some(_) => Some(unauthorized_wrong()),
        }
    }

    fn is_within_rate_limit(&mut self, now_ms: i64) -> bool {
        let Some((per_second, burst)) = self.options.rate_limit else { return true };
        let (left, since_ms) = self.bucket.unwrap_or((burst, now_ms));
        let left = (left + per_second * (now_ms - since_ms) as f64 / 1000.0).min(burst);
        let passes = left >= 1.0;
        self.bucket = Some((if passes { left - 1.0 } else { left }, now_ms));
        passes
    }

    fn route(&mut self, now_ms: i64, request: &SimRequest, ticket: Option<Ticket>) -> Reply {
        let mut parts = [""; 8];
        let mut count = 0;
        for part in request.path.trim_matches('/').split('/') {
            let Some(place) = parts.get_mut(count) else { return Reply::now(not_found()) };
            *place = part;
            count += 1;
        }
        let real = self.options.dialect == Dialect::Real;
        let path = match &parts[..count] {
            ["api", "v1", rest @ ..] if real || matches!(rest, ["health" | "relayers"]) => rest,
            rest if !real => rest,
            _ => return Reply::now(not_found()),
        };
        match (request.method, path) {
            ("GET", ["health"]) => Reply::now(text(200, "OK".to_owned())),
            ("GET", ["ready"]) => Reply::now(success(json!({"ready": true, "status": "healthy"}))),
            ("GET", ["relayers"]) => self.read(ReadOf::Relayers, |relayer| relayer.list_relayers(request.query)),
            ("GET", ["relayers", id]) => self.read_of(id, ReadOf::Relayers, |relayer| relayer.show_relayer()),
            ("POST", ["transactions"]) if !real => self.send(now_ms, request, ticket),
            ("GET", ["transactions", tx]) if !real => {
                self.read(ReadOf::Transactions, |relayer| match relayer.shown_record(now_ms, tx) {
                    Some(record) => json_body(200, &record.flat_view()),
                    None => unknown_transaction(tx),
                })
            }
            _ if !real => Reply::now(not_found()),
            ("GET", ["relayers", id, "status"]) => self.read_of(id, ReadOf::Chain, |relayer| relayer.show_status()),
            ("GET", ["relayers", id, "balance"]) => self.read_of(id, ReadOf::Chain, |relayer| relayer.show_balance()),
            ("POST", ["relayers", id, "rpc"]) => {
                self.read_of(id, ReadOf::Chain, |relayer| relayer.pass_on(request.body).unwrap_or_else(not_found))
            }
            ("GET", ["relayers", id, "transactions"]) => {
                self.read_of(id, ReadOf::Transactions, |relayer| relayer.list_transactions(now_ms, request.query))
            }
            ("GET", ["relayers", id, "transactions", "by-nonce", nonce]) => {
                self.read_of(id, ReadOf::Transactions, |relayer| relayer.show_by_nonce(now_ms, nonce))
            }
            ("GET", ["relayers", id, "transactions", tx]) => {
                self.read_of(id, ReadOf::Transactions, |relayer| match relayer.shown_record(now_ms, tx) {
                    Some(record) => success(record.view()),
                    None => unknown_transaction(tx),
                })
            }
            ("DELETE", ["relayers", _, "transactions", _]) if self.faults.cancels_hang => Reply::Hang,
            // A journal knows no cancellations.
            ("DELETE", ["relayers", id, "transactions", tx]) if self.is_audited() => {
                Reply::now(self.not_mine(id).unwrap_or_else(|| self.cancel_transaction(now_ms, tx)))
            }
            ("POST", ["relayers", id, "transactions"]) => {
                if !request.header("content-type").is_some_and(|kind| kind.starts_with("application/json")) {
                    return Reply::now(text(400, "Content type error".to_owned()));
                }
                match self.not_mine(id) {
                    Some(response) => Reply::now(response),
                    None => self.send(now_ms, request, ticket),
                }
            }
            _ => Reply::now(not_found()),
        }
    }

    fn not_mine(&self, id: &str) -> Option<SimResponse> {
        (id != self.options.id).then(|| failure(404, &format!("Relayer with ID {id} not found")))
    }

    fn read_of(&mut self, id: &str, of: ReadOf, answer: impl FnOnce(&Self) -> SimResponse) -> Reply {
        self.read(of, |relayer| relayer.not_mine(id).unwrap_or_else(|| answer(relayer)))
    }

    /// A read, with the faults that concern it.
    fn read(&mut self, of: ReadOf, answer: impl FnOnce(&Self) -> SimResponse) -> Reply {
        self.answers_given += u64::from(matches!(of, ReadOf::Transactions));
        let chain_behaves = self.faults.chain_reads == ReadFault::default();
        let ReadFault { delay, status, hang } = match of {
            ReadOf::Chain if !chain_behaves => &self.faults.chain_reads,
            ReadOf::Chain | ReadOf::Relayers => &self.faults.relayer_reads,
            ReadOf::Transactions => &self.faults.transaction_reads,
        };
        if *hang {
            return Reply::Hang;
        }
        let response = match status {
            Some(504) => text(504, "Request handler timeout".to_owned()),
            Some(status) => failure(*status, "Provider error: made up by the simulation"),
            None => answer(self),
        };
        Reply::Answer { response, after_ms: delay.map_or(0, |delay| millis(delay).unsigned_abs()) }
    }

    fn send(&mut self, now_ms: i64, request: &SimRequest, ticket: Option<Ticket>) -> Reply {
        let body = request.body;
        let parsed = match self.options.dialect {
            Dialect::Real => SendRequest::parse(body, date(self.clock(now_ms))),
            Dialect::Spec => SendRequest::parse_flat(body),
        };
        if let Err(Refusal::NotJson(message)) = parsed {
            return Reply::now(text(400, message));
        }
        if self.faults.paused {
            return Reply::now(failure(403, "Relayer paused"));
        }
        if self.faults.system_disabled {
            return Reply::now(failure(403, "Relayer disabled"));
        }
        let fault = self.next_fault(body);
        if let Some(fault) = fault.as_ref().filter(|fault| !fault.stores()) {
            return reply_without_storing(fault);
        }
        let sent = match parsed {
            Ok(sent) => sent,
            Err(Refusal::Invalid(message) | Refusal::NotJson(message)) => return Reply::now(failure(400, &message)),
        };
        if let Some((fault, delay)) = fault.as_ref().and_then(|fault| Some((fault, fault.store_delay()?))) {
            return self.send_late(now_ms, sent, body, fault, millis(delay), ticket);
        }
        let number = self.store(now_ms, sent, body, fault.as_ref());
        let Some(entry) = self.entry(number) else { return Reply::Cut };
        let mut response = self.accepted_body(&entry.record);
        match fault {
            Some(PostFault::ExchangedAnswer) => return self.exchange_answer(now_ms, response, ticket),
            Some(PostFault::WrongId) => {
                let id = self.ids.uuid().to_string();
                response = self.answer_under(number, id);
            }
            Some(PostFault::IdOfAnother) => {
                let before = self.entries.iter().rev().find(|entry| entry.number < number && entry.audit.is_some());
                if let Some(id) = before.map(|entry| entry.record.id.clone()) {
                    response = self.answer_under(number, id);
                }
            }
            _ => {}
        }
        let reply = reply_after_storing(fault.as_ref(), response);
        let Some(until) = self.faults.webhooks.before_answer else { return reply };
        let webhooks = self.run_ahead(number, until, now_ms);
        if webhooks.is_empty() {
            return reply;
        }
        let ticket = ticket.unwrap_or_else(|| self.ticket());
        self.reply_after(ticket, reply, webhooks);
        Reply::Waiting(ticket)
    }

    fn send_late(
        &mut self,
        now_ms: i64,
        sent: SendRequest,
        body: &[u8],
        fault: &PostFault,
        delay_ms: i64,
        ticket: Option<Ticket>,
    ) -> Reply {
        let (answered, reply) = match fault {
            PostFault::StoreLate(_) => {
                let ticket = ticket.unwrap_or_else(|| self.ticket());
                (Some(ticket), Reply::Waiting(ticket))
            }
            PostFault::TimeoutThenStore(_) => (None, Reply::now(text(504, "Request handler timeout".to_owned()))),
            PostFault::CutThenStore(_) => (None, Reply::Cut),
            _ => (None, Reply::Hang),
        };
        self.schedule(now_ms + delay_ms, Work::Store(Box::new(sent), body.to_vec(), answered));
        reply
    }

    /// The fault for this POST, if any.
    fn next_fault(&mut self, body: &[u8]) -> Option<PostFault> {
        let ruled = self.post_rule.as_ref().and_then(|rule| rule(&serde_json::from_slice(body).unwrap_or_default()));
        // A rule does not use up a fault that is meant for the next POST.
        let fault = match ruled {
            Some(ruled) => Some(ruled),
            None => match self.faults.next_posts.pop_front() {
                Some(next) => next,
                None => match (&self.faults.every_post, &self.faults.plan) {
                    (Some(fault), _) => Some(fault.clone()),
                    (None, Some(plan)) => plan.pick(self.plan_rng.unit()).cloned(),
                    (None, None) => None,
                },
            },
        };
        if let Some(fault) = &fault {
            *self.struck.entry(fault.name()).or_default() += 1;
        }
        fault
    }

    fn accepted_body(&self, record: &Record) -> SimResponse {
        match self.options.dialect {
            Dialect::Real => success(record.view()),
            Dialect::Spec => json_body(200, &json!({"transactionId": record.id, "status": record.status})),
        }
    }

    /// The answer about a record, with another id.
    fn answer_under(&self, number: u64, id: String) -> SimResponse {
        let record = self.entry(number).map(|entry| Record { id, ..entry.record.clone() });
        record.map_or_else(not_found, |record| self.accepted_body(&record))
    }

    /// Holds an answer until the next one of its kind, and exchanges the two.
    fn exchange_answer(&mut self, now_ms: i64, mut response: SimResponse, ticket: Option<Ticket>) -> Reply {
        if let Some((other, held)) = self.exchanged.take() {
            self.stamp(now_ms, &mut response);
            self.events.push(crate::Event::Reply { ticket: other, reply: Reply::now(response) });
            return Reply::now(held);
        }
        let ticket = ticket.unwrap_or_else(|| self.ticket());
        self.exchanged = Some((ticket, response));
        self.schedule(now_ms + EXCHANGED_WITHIN_MS, Work::AnswerAlone(ticket));
        Reply::Waiting(ticket)
    }

    /// No second answer came in time.
    pub(crate) fn answer_alone(&mut self, ticket: Ticket) {
        if let Some((_, mut response)) = self.exchanged.take_if(|(held, _)| *held == ticket) {
            self.stamp(self.now_ms, &mut response);
            self.events.push(crate::Event::Reply { ticket, reply: Reply::now(response) });
        }
    }

    /// The answer to a POST that was stored late.
    pub(crate) fn accepted_response(&self, now_ms: i64, record: &Record) -> SimResponse {
        let mut response = self.accepted_body(record);
        self.stamp(now_ms, &mut response);
        response
    }

    fn cancel_transaction(&mut self, now_ms: i64, tx: &str) -> SimResponse {
        if self.faults.paused {
            return failure(403, "Relayer paused");
        }
        let found = self.entries.iter().find(|entry| entry.record.id == tx && self.is_retained(entry, now_ms));
        let Some(Entry { number, record, .. }) = found else { return unknown_transaction(tx) };
        if record.status.is_final() {
            return failure(400, &format!("Cannot cancel transaction in status {}", record.status.as_str()));
        }
        let number = *number;
        self.cancel(number, now_ms);
        self.entry(number).map_or_else(|| unknown_transaction(tx), |entry| success(entry.record.view()))
    }
}

/// Which faults concern a read.
#[derive(Clone, Copy)]
enum ReadOf {
    Relayers,
    Chain,
    Transactions,
}

fn not_found() -> SimResponse {
    SimResponse { status: 404, headers: Vec::new(), body: Vec::new() }
}

fn unknown_transaction(tx: &str) -> SimResponse {
    failure(404, &format!("Transaction with ID {tx} not found"))
}

fn reply_without_storing(fault: &PostFault) -> Reply {
    Reply::now(match fault {
        PostFault::Unauthorized => unauthorized_wrong(),
        PostFault::Paused => failure(403, "Relayer paused"),
        PostFault::Disabled => failure(403, "Relayer disabled"),
        PostFault::RateLimited => rate_limited(),
        PostFault::TooManyConcurrent => {
            json_body(429, &json!({"error": "Too many concurrent requests", "max_concurrent": 100}))
        }
        PostFault::Refused(message) => failure(400, message),
        PostFault::Status(status) => failure(*status, "made up by the simulation"),
        PostFault::HangBeforeStoring => return Reply::Hang,
        PostFault::CutBeforeStoring => return Reply::Cut,
        _ => failure(500, "Internal Server Error: made up by the simulation, before storing"),
    })
}

fn reply_after_storing(fault: Option<&PostFault>, response: SimResponse) -> Reply {
    match fault {
        Some(PostFault::ErrorAfterStoring | PostFault::QueueUnavailable) => {
            Reply::now(failure(500, "Queue error: Redis error: made up by the simulation"))
        }
        Some(PostFault::StatusAfterStoring(status)) => Reply::now(failure(*status, "made up by the simulation")),
        Some(PostFault::TimeoutAfterStoring) => Reply::now(text(504, "Request handler timeout".to_owned())),
        Some(PostFault::HangAfterStoring) => Reply::Hang,
        Some(PostFault::CutAfterStoring) => Reply::Cut,
        Some(PostFault::BreakOffAfterStoring) => Reply::BreakOff(response),
        Some(PostFault::Slow(delay)) => Reply::Answer { response, after_ms: millis(*delay).unsigned_abs() },
        Some(PostFault::GarbledAnswer) => {
            let body = b"<html>Welcome to the hotel network</html>".to_vec();
            Reply::now(SimResponse { status: 200, headers: vec![("content-type", "text/html".to_owned())], body })
        }
        _ => Reply::now(response),
    }
}
