//! The simulated network, with the relayers and the chain at its other end.
//!
//! A request is a packet once it is written: it arrives later, or never, whatever becomes of its sender. The relayers are
//! the crate `relayer-sim`, driven in process; what they do wrong is chosen here, request by request.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use baton::http::transport::{Request, Response, Transport, TransportError, TransportFailure};
use bytes::Bytes;
use futures::future::{Either, select};
use relayer_sim::{
    Event, Faults, ListFault, Memory, Outcome, PostFault, Record, RelayerOptions, Reply, SimRelayer, SimRequest,
    SimResponse, Status, Ticket, Timing,
};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::setup::{Fault, Mutation};
use super::world::{
    BASE, Effect, HISTORY, REQUEST_LIFETIME, RETENTION, Rng, SIGNERS, Sim, World, direct_request, note, signer,
};

pub type Answer = Result<Response, TransportError>;

/// A relayer.
pub struct Node {
    pub relayer: SimRelayer,
    pub down: bool,
    /// How often it has lost its memory, and when it last did.
    pub epoch: u32,
    pub forgot_at: i64,
    pub stalled_until: i64,
    /// A record from before the world began.
    pub history: Option<String>,
    /// The effect of each entry of the relayer's audit.
    effects: Vec<Effect>,
    tickets: Vec<(Ticket, usize)>,
}

/// A written request on its way.
pub struct Packet {
    pub arrives: i64,
    node: usize,
    slot: usize,
    method: Method,
    path: String,
    query: String,
    body: Bytes,
    /// When the relayer is done with it at the latest, unless it was frozen.
    until: i64,
}

/// Where a sender waits for its answer.
pub struct Slot {
    node: usize,
    answer: Option<Answer>,
    closed: bool,
    waker: Option<Waker>,
}

pub fn url(node: usize) -> String {
    format!("http://relayer{node}")
}

impl Node {
    pub fn new(index: usize, rng: &mut Rng, skewed: bool, faults: u32, history: bool, now: i64) -> Self {
        let has = |fault: Fault| faults & (1 << fault as u32) != 0;
        let dated = rng.one_in(2);
        // Without a date only the configured skew is allowed for.
        let clock_offset_ms = match (skewed, dated) {
            (false, _) => 0,
            (true, false) => rng.pick(&[-29_000, -10_000, 500, 29_000]),
            (true, true) => rng.pick(&[-120_000, -29_000, 31_000, 120_000]),
        };
        let step = |rng: &mut Rng| Duration::from_millis(rng.pick(&[3, 20, 1000, 5000]));
        let sent = step(rng);
        let submitted = sent + step(rng);
        let confirmed = submitted + step(rng);
        let timing = Timing { sent, submitted, mined: None, confirmed, given_up: confirmed, jitter_percent: 1000 };
        let options = RelayerOptions {
            timing,
            retention: Some(RETENTION),
            date_header: dated,
            seed: rng.next(),
            api_key: "key".to_owned(),
            ..RelayerOptions::new(format!("r{index}"))
        }
        .webhook("http://baton", "key");
        let mut relayer = SimRelayer::new(options, rng.next());
        let next_outcomes: VecDeque<Outcome> = (0..24)
            .map(|_| match rng.below(16) {
                0..=5 if has(Fault::Unsigned) => {
                    Outcome::NeverSigned("Transaction in Pending state for over 2 minutes".to_owned())
                }
                6 if has(Fault::Item) => Outcome::NeverSigned("exceeds block gas limit".to_owned()),
                7 if has(Fault::Item) => Outcome::Reverted,
                8 if has(Fault::Item) => Outcome::Canceled,
                9..=10 if has(Fault::NoOp) => Outcome::NoOp,
                _ => Outcome::Confirmed,
            })
            .collect();
        let late_by = Duration::from_millis(if has(Fault::Late) { rng.pick(&[0, 900, 4000]) } else { 0 });
        let listing = ListFault { late_by, ..ListFault::default() };
        relayer.set_faults(now, Faults { clock_offset_ms, next_outcomes, listing, ..Faults::default() });
        let history = history.then(|| {
            let call = direct_request(HISTORY).call;
            let (to, value) = (format!("{:#x}", call.to), format!("{:#x}", call.value));
            relayer.add_old_record(now - 1_000_000, now - 999_000, &to, &value, &call.data)
        });
        Self {
            relayer,
            down: false,
            epoch: 0,
            forgot_at: 0,
            stalled_until: 0,
            history,
            effects: Vec::new(),
            tickets: Vec::new(),
        }
    }

    /// A record, whether or not the relayer still knows it.
    pub fn find(&self, id: &str) -> Option<&Record> {
        self.relayer.records().chain(self.relayer.forgotten()).find(|record| record.id == id)
    }

    /// The records of this effect that have taken place or may still do so.
    pub fn effects<'a>(&'a self, effect: &'a Effect) -> impl Iterator<Item = &'a str> {
        let audit = self.relayer.audit().iter().zip(&self.effects);
        audit
            .filter(move |(audit, of)| *of == effect && self.takes_place(&audit.id, audit.broadcasts))
            .map(|(audit, _)| audit.id.as_str())
    }

    fn takes_place(&self, id: &str, broadcasts: u32) -> bool {
        let Some(record) = self.find(id) else { return broadcasts > 0 };
        let replaced = record.is_no_op() && record.status.is_final();
        let lost = broadcasts == 0 && self.relayer.forgotten().iter().any(|record| record.id == id);
        !record.never_signed() && !replaced && !lost
    }

    pub fn records_of<'a>(&'a self, effect: &'a Effect) -> impl Iterator<Item = &'a Record> {
        let audit = self.relayer.audit().iter().zip(&self.effects);
        audit.filter(move |(_, of)| *of == effect).filter_map(|(audit, _)| self.find(&audit.id))
    }

    fn set_fault(&mut self, now: i64, fault: PostFault) {
        let mut faults = self.relayer.faults().clone();
        faults.next_posts.clear();
        faults.next_posts.push_back(Some(fault));
        self.relayer.set_faults(now, faults);
    }

    pub fn set_paused(&mut self, now: i64, paused: bool) {
        let faults = Faults { paused, ..self.relayer.faults().clone() };
        self.relayer.set_faults(now, faults);
    }

    /// No more faults, except that clocks stay as they are.
    pub fn calm_down(&mut self, now: i64) {
        let clock_offset_ms = self.relayer.faults().clock_offset_ms;
        self.relayer.set_faults(now, Faults { clock_offset_ms, ..Faults::default() });
        self.down = false;
    }
}

/// One process's way to the relayers.
pub struct SimTransport {
    pub sim: Sim,
}

fn failure(kind: TransportFailure) -> TransportError {
    TransportError { kind, cause: "simulated".to_owned(), status: None }
}

#[async_trait]
impl Transport for SimTransport {
    async fn send(&self, request: Request) -> Result<Response, TransportError> {
        let deadline = self.sim.w().now + request.timeout.as_millis() as i64;
        // Connecting, and waiting for a free connection.
        self.sim.turn().await;
        let slot = self.sim.w().write(&request, deadline)?;
        let sim = self.sim.clone();
        let answered = poll_fn(move |context| {
            let mut world = sim.w();
            let slot = &mut world.slots[slot];
            match slot.answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    slot.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        match select(answered, self.sim.wait_until(deadline)).await {
            Either::Left((answer, _)) => {
                // A process that was frozen finds both the answer and the end of its time.
                let mut world = self.sim.w();
                let late = world.now >= deadline && world.rng.one_in(2);
                if late { Err(failure(TransportFailure::TimedOut)) } else { answer }
            }
            Either::Right(((), _)) => Err(failure(TransportFailure::TimedOut)),
        }
    }
}

impl World {
    /// Writes a request: from here on it arrives or not, whatever its sender does.
    fn write(&mut self, request: &Request, deadline: i64) -> Result<usize, TransportError> {
        let rest = request.url.strip_prefix("http://relayer").unwrap();
        let node = usize::from(rest.starts_with('1'));
        let now = self.now;
        if self.nodes[node].down {
            return Err(failure(TransportFailure::NoConnection));
        }
        if now >= deadline {
            return Err(failure(TransportFailure::TimedOut));
        }
        let fence = request.fence.as_ref().map(|fence| BASE + fence.ends().as_millis() as i64);
        if let Some(fence) = fence {
            let fence = match self.mutation {
                Mutation::NoFence => i64::MAX,
                Mutation::LateFence => fence + 20_000,
                _ => fence,
            };
            if now >= fence {
                self.counters.fenced += 1;
                return Err(failure(TransportFailure::Fenced));
            }
        }
        let (path, query) = rest[1..].split_once('?').unwrap_or((&rest[1..], ""));
        let post = request.method == Method::POST;
        let body = request.body.clone().unwrap_or_default();
        let mut transit = self.latency().min(REQUEST_LIFETIME / 2);
        let mut until = now + REQUEST_LIFETIME;
        if post {
            let effect = Effect::of_body(&body);
            self.check_written(node, &effect, fence);
            if self.mutation == Mutation::LateBytes && self.rng.one_in(3) {
                transit = REQUEST_LIFETIME + 1000 + self.rng.below(120_000) as i64;
                until = now + transit + 1;
            } else if self.has(Fault::Retransmit) && self.rng.one_in(4) {
                let span = REQUEST_LIFETIME as u64 - 10;
                transit = if self.rng.one_in(2) { span as i64 } else { self.rng.below(span) as i64 };
                self.counters.late_bytes += 1;
            }
            note!(self, "network: POST to r{node} is written, arrives in {transit} ms");
        }
        let slot = self.slots.len();
        self.slots.push(Slot { node, answer: None, closed: false, waker: None });
        let (path, query) = (path.to_owned(), query.to_owned());
        let arrives = now + transit;
        self.packets.push(Packet { arrives, node, slot, method: request.method.clone(), path, query, body, until });
        // The connection may break while the bytes are on their way, and they may arrive all the same.
        if post && self.has(Fault::BadAnswer) && self.rng.one_in(12) {
            self.answer_later(0, slot, Err(failure(TransportFailure::Lost)));
        }
        Ok(slot)
    }

    fn answer_later(&mut self, after: i64, slot: usize, answer: Answer) {
        let slow = self.has(Fault::Webhook) && self.rng.one_in(3);
        let at = self.now + after + if slow { 3000 } else { (self.rng.next() & 3) as i64 };
        self.answers.push((at, slot, answer));
    }

    /// The time of the next thing that happens outside our processes.
    pub fn next_outside(&self) -> Option<i64> {
        let packets = self.packets.iter().map(|packet| packet.arrives);
        let answers = self.answers.iter().map(|(at, _, _)| *at);
        let webhooks = self.webhooks.iter().map(|(at, _)| *at);
        let relayers = self.nodes.iter().filter_map(|node| node.relayer.next_due_ms());
        packets.chain(answers).chain(webhooks).chain(relayers).min()
    }

    /// Everything outside our processes that happens up to now; returns the webhooks that arrive.
    pub fn move_outside(&mut self) -> Vec<Arc<str>> {
        let now = self.now;
        for node in 0..self.nodes.len() {
            self.advance(node);
        }
        while let Some(position) = self.packets.iter().position(|packet| packet.arrives <= now) {
            let packet = self.packets.swap_remove(position);
            self.arrive(packet);
        }
        while let Some(position) = self.answers.iter().position(|(at, _, _)| *at <= now) {
            let (_, slot, answer) = self.answers.swap_remove(position);
            self.answer(slot, answer);
        }
        let mut arrived = Vec::new();
        while let Some(position) = self.webhooks.iter().position(|(at, _)| *at <= now) {
            arrived.push(self.webhooks.swap_remove(position).1);
        }
        arrived
    }

    fn answer(&mut self, slot: usize, answer: Answer) {
        let slot = &mut self.slots[slot];
        if !slot.closed {
            slot.closed = true;
            slot.answer = Some(answer);
            if let Some(waker) = slot.waker.take() {
                waker.wake();
            }
        }
    }

    fn advance(&mut self, node: usize) {
        let now = self.now;
        if self.nodes[node].relayer.next_due_ms().is_none_or(|due| due > now) {
            return;
        }
        for event in self.nodes[node].relayer.advance(now) {
            match event {
                Event::Webhook(webhook) => {
                    self.nodes[node].relayer.webhook_result(now, webhook.id, Some(200));
                    self.send_webhook(&webhook.body);
                }
                Event::Reply { ticket, reply } => {
                    let tickets = &mut self.nodes[node].tickets;
                    if let Some(position) = tickets.iter().position(|(known, _)| *known == ticket) {
                        let (_, slot) = tickets.swap_remove(position);
                        self.reply(node, slot, reply, true);
                    }
                }
                Event::Stored(_) | Event::Notified(_) => {}
            }
        }
        self.check_stored(node);
    }

    fn send_webhook(&mut self, body: &Arc<str>) {
        let copies = match (self.has(Fault::Webhook), self.rng.below(8)) {
            (true, 0..=2) => 0,
            (true, 3..=4) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let delay = match (self.has(Fault::Webhook), self.rng.below(4)) {
                (true, 0) => self.rng.below(60_000),
                (true, 1) => self.rng.below(2000),
                _ => self.rng.below(4),
            };
            let at = self.now + delay as i64;
            self.webhooks.push((at, Arc::clone(body)));
        }
    }

    fn arrive(&mut self, packet: Packet) {
        let (now, node) = (self.now, packet.node);
        if self.nodes[node].down {
            return self.answer(packet.slot, Err(failure(TransportFailure::Lost)));
        }
        let stalled_until = self.nodes[node].stalled_until;
        if stalled_until > now {
            // The time that it may take begins when it is read.
            self.packets.push(Packet { arrives: stalled_until, until: stalled_until + REQUEST_LIFETIME, ..packet });
            return;
        }
        let post = packet.method == Method::POST;
        // The request waits, unread, beyond the time that its sender allows for it.
        let stalls = matches!(self.shape, Mutation::NoSecondLook | Mutation::HastySecondLook);
        if post && stalls && stalled_until == 0 && !self.calm && self.rng.one_in(2) {
            let until = now + self.rng.pick(&[34_000, 36_000, 39_000, 41_000]);
            self.stall(node, until);
            return self.arrive(packet);
        }
        if post && let Some(fault) = self.post_fault(packet.until - now) {
            note!(self, "r{node}: {}", fault.name());
            if matches!(fault, PostFault::Refused(_) | PostFault::Status(_)) {
                self.item_failures.push(Effect::of_body(&packet.body));
            }
            self.nodes[node].set_fault(now, fault);
        }
        let body = if post { with_gas_limit(&packet.body) } else { packet.body.clone() };
        let request = SimRequest {
            method: packet.method.as_str(),
            path: &packet.path,
            query: &packet.query,
            headers: &[("authorization", "Bearer key"), ("content-type", "application/json")],
            body: &body,
        };
        let reply = self.nodes[node].relayer.handle(now, &request);
        // A paused relayer does not get as far as the fault.
        if !self.nodes[node].relayer.faults().next_posts.is_empty() {
            let faults = Faults { next_posts: VecDeque::new(), ..self.nodes[node].relayer.faults().clone() };
            self.nodes[node].relayer.set_faults(now, faults);
        }
        self.check_stored(node);
        if !post && self.has(Fault::BadAnswer) && self.rng.one_in(10) {
            // A question without an answer.
            return;
        }
        let reply = self.mutate_reply(&packet, reply);
        self.reply(node, packet.slot, reply, post);
        self.advance(node);
    }

    /// What goes wrong with a POST that has `left` milliseconds until the relayer must be done with it.
    fn post_fault(&mut self, left: i64) -> Option<PostFault> {
        let left = left.max(1);
        // Mostly at the end of what is possible: that is where the mistakes are.
        let late = if self.rng.one_in(3) { left - 1 } else { self.rng.below(left as u64) as i64 };
        let late = Duration::from_millis(late as u64);
        let likely: &[PostFault] = match self.shape {
            Mutation::TakesUnproven => &[PostFault::ErrorAfterStoring, PostFault::CutAfterStoring],
            Mutation::TakesOldest => &[PostFault::HangAfterStoring, PostFault::CutAfterStoring],
            Mutation::NoSecondLook | Mutation::HastySecondLook => {
                &[PostFault::HangThenStore(late), PostFault::CutThenStore(late), PostFault::TimeoutThenStore(late)]
            }
            _ => &[],
        };
        if !self.calm && !likely.is_empty() && !self.rng.one_in(3) {
            return Some(self.rng.pick(likely));
        }
        if self.has(Fault::Late) && self.rng.one_in(3) {
            return Some(self.rng.pick(&[
                PostFault::StoreLate(late),
                PostFault::HangThenStore(late),
                PostFault::CutThenStore(late),
                PostFault::TimeoutThenStore(late),
            ]));
        }
        if self.has(Fault::BadAnswer) && self.rng.one_in(2) {
            return Some(self.rng.pick(&[
                PostFault::ErrorBeforeStoring,
                PostFault::ErrorAfterStoring,
                PostFault::BreakOffAfterStoring,
                PostFault::CutBeforeStoring,
                PostFault::CutAfterStoring,
                PostFault::HangBeforeStoring,
                PostFault::HangAfterStoring,
                PostFault::GarbledAnswer,
                PostFault::RateLimited,
                PostFault::Unauthorized,
            ]));
        }
        if self.has(Fault::Item) && self.rng.one_in(4) {
            return Some(self.rng.pick(&[PostFault::Refused("bad item".to_owned()), PostFault::Status(409)]));
        }
        None
    }

    fn mutate_reply(&self, packet: &Packet, mut reply: Reply) -> Reply {
        let Reply::Answer { response, .. } = &mut reply else { return reply };
        match self.mutation {
            Mutation::ErrorIsRefusal if packet.method == Method::POST && response.status == 500 => {
                response.status = 400;
            }
            _ => {}
        }
        reply
    }

    fn reply(&mut self, node: usize, slot: usize, reply: Reply, post: bool) {
        match reply {
            Reply::Answer { response, after_ms } => {
                if post {
                    note!(self, "r{node}: answers {}", response.status);
                }
                self.answer_later(after_ms as i64, slot, Ok(whole(response)));
            }
            Reply::BreakOff(response) => {
                let status = StatusCode::from_u16(response.status).ok();
                self.answer_later(0, slot, Err(TransportError { status, ..failure(TransportFailure::Lost) }));
            }
            Reply::Cut => self.answer_later(0, slot, Err(failure(TransportFailure::Lost))),
            Reply::Hang => {}
            Reply::Waiting(ticket) => self.nodes[node].tickets.push((ticket, slot)),
        }
    }

    /// A relayer crashes; it keeps its records in memory only.
    pub fn forget(&mut self, node: usize) {
        note!(self, "r{node}: crashes and loses its memory");
        let now = self.now;
        let crashed = &mut self.nodes[node];
        crashed.epoch += 1;
        crashed.forgot_at = now;
        crashed.stalled_until = 0;
        crashed.tickets.clear();
        crashed.relayer.restart(now, Memory::Forget);
        self.packets.retain(|packet| packet.node != node);
        for slot in 0..self.slots.len() {
            if self.slots[slot].node == node {
                self.answer(slot, Err(failure(TransportFailure::Lost)));
            }
        }
    }

    pub fn stall(&mut self, node: usize, until: i64) {
        let stalled = &mut self.nodes[node];
        stalled.stalled_until = stalled.stalled_until.max(until);
        let until = stalled.stalled_until;
        stalled.relayer.stall_until(until);
        note!(self, "r{node}: stands still until {}", until - super::world::BASE);
    }

    /// Checks what a relayer has stored since the last time.
    fn check_stored(&mut self, node: usize) {
        let known = self.nodes[node].effects.len();
        for entry in known..self.nodes[node].relayer.audit().len() {
            let audit = &self.nodes[node].relayer.audit()[entry];
            let (effect, id) = (Effect::of_body(&audit.body), audit.id.clone());
            note!(self, "r{node}: stores {id} ({} {})", effect.to, effect.value);
            self.nodes[node].effects.push(effect.clone());
            self.check_effects(&effect);
        }
    }

    /// How many of a signer's gasless transactions the chain has executed.
    pub fn executed(&self, signer: usize) -> u64 {
        let executed = |nonce: u64| {
            let effects = self
                .truth
                .iter()
                .filter(|truth| truth.gasless.is_some_and(|(by, taken, _)| (by, taken) == (signer, nonce)));
            effects.into_iter().any(|truth| {
                let mut records = self.nodes.iter().flat_map(|node| node.records_of(&truth.effect));
                records.any(|record| record.status == Status::Confirmed && !record.is_no_op())
            })
        };
        (0..).take_while(|nonce| executed(*nonce)).count() as u64
    }
}

/// A relayer shows its own estimate for a request without a gas limit.
fn with_gas_limit(body: &Bytes) -> Bytes {
    let mut request: Value = serde_json::from_slice(body).unwrap();
    if request["gas_limit"].is_null() {
        request["gas_limit"] = json!(50_000);
    }
    request.to_string().into()
}

fn whole(response: SimResponse) -> Response {
    let mut headers = HeaderMap::new();
    for (name, value) in &response.headers {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
    }
    Response { status: StatusCode::from_u16(response.status).unwrap(), headers, body: response.body.into() }
}

/// The way to the chain's node.
pub struct SimChain {
    pub sim: Sim,
}

#[async_trait]
impl Transport for SimChain {
    async fn send(&self, request: Request) -> Result<Response, TransportError> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.chain_away && !world.calm {
            return Err(failure(TransportFailure::NoConnection));
        }
        let body: Value = serde_json::from_slice(&request.body.unwrap_or_default()).unwrap();
        let call = &body["params"][0];
        let data = call["data"].as_str().unwrap_or_default();
        let asked = (0..SIGNERS).find(|index| {
            let address = format!("{:x}", signer(*index).address);
            call.get("from").is_none() && data.ends_with(&address)
        });
        let result = match asked {
            Some(signer) => json!({ "result": format!("0x{:064x}", world.executed(signer)) }),
            None if world.has(Fault::Item) && world.rng.one_in(6) => {
                let effect = world.truth.iter().map(|truth| truth.effect.clone()).find(|effect| {
                    call["to"].as_str().is_some_and(|to| to.eq_ignore_ascii_case(&effect.to)) && effect.data == data
                });
                world.item_failures.extend(effect);
                json!({ "error": { "code": 3, "message": "execution reverted", "data": "0x" } })
            }
            None => json!({ "result": "0x" }),
        };
        Ok(Response { status: StatusCode::OK, headers: HeaderMap::new(), body: result.to_string().into() })
    }
}
