//! The simulated network, with the relayers at its other end.
//!
//! A request is a packet once it is written: it arrives later, or never, whatever becomes of its sender. The relayers are
//! the crate `relayer-sim`, driven in process; what they do wrong is chosen here, request by request.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use baton::http::transport::{HttpRequest, Response, Transport, TransportError, TransportFailure};
use bytes::Bytes;
use futures::future::{Either, select};
use relayer_sim::{Event, Faults, Memory, PostFault, Record, Reply, SimRequest, SimResponse, Status};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::chain::EvmChain;
use super::setup::{Fault, Mutation};
use super::world::{BASE, BYTES_LATE, Effect, RELAYER_WORKS, Sim, World, note};

pub type Answer = Result<Response, TransportError>;

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

/// One process's way to the relayers.
pub struct SimTransport {
    pub sim: Sim,
}

pub fn failure(kind: TransportFailure) -> TransportError {
    TransportError { kind, cause: "simulated".to_owned(), status: None }
}

#[async_trait]
impl Transport for SimTransport {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
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
    fn write(&mut self, request: &HttpRequest, deadline: i64) -> Result<usize, TransportError> {
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
        let mut transit = self.latency().min(BYTES_LATE);
        if post {
            let effect = Effect::of_body(&body);
            self.check_written(node, &effect, fence);
            if self.mutation == Mutation::LateBytes && self.rng.one_in(3) {
                transit = BYTES_LATE + RELAYER_WORKS + 1000 + self.rng.below(120_000) as i64;
            } else if self.has(Fault::Retransmit) && self.rng.one_in(4) {
                transit = if self.rng.one_in(2) { BYTES_LATE } else { self.rng.below(BYTES_LATE as u64) as i64 };
                self.counters.late_bytes += 1;
            }
            note!(self, "network: POST to r{node} is written, arrives in {transit} ms");
        }
        let slot = self.slots.len();
        self.slots.push(Slot { node, answer: None, closed: false, waker: None });
        let (path, query) = (path.to_owned(), query.to_owned());
        let arrives = now + transit;
        let until = arrives + if self.mutation == Mutation::LateBytes { 1 } else { RELAYER_WORKS };
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
        let blocks = self.evm.as_ref().and_then(EvmChain::next_due);
        packets.chain(answers).chain(webhooks).chain(relayers).chain(blocks).min()
    }

    /// Everything outside our processes that happens up to now; returns the webhooks that arrive.
    pub fn move_outside(&mut self) -> Vec<Arc<str>> {
        let now = self.now;
        self.advance_chain();
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
        self.advance_chain();
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
        // Another relayer's webhook, or one from before a change: signed, and not what this relayer would say.
        if self.evm.is_some() && self.has(Fault::Webhook) && self.rng.one_in(4) {
            let mut said: Value = serde_json::from_str(body).unwrap();
            let record = &mut said["payload"];
            (record["status"], record["nonce"], record["hash"]) = (json!("failed"), Value::Null, Value::Null);
            record["status_reason"] = json!("Transaction in Pending state for over 2 minutes");
            let at = self.now + self.rng.below(4) as i64;
            self.webhooks.push((at, said.to_string().into()));
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
            self.packets.push(Packet { arrives: stalled_until, until: stalled_until + RELAYER_WORKS, ..packet });
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
        let reply = self.distort_reply(node, &packet, reply);
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
            Mutation::TakesOldest | Mutation::NoUnprovenWait | Mutation::TrustsAnyList => {
                &[PostFault::HangAfterStoring, PostFault::CutAfterStoring]
            }
            Mutation::IgnoresTaken => &[PostFault::ErrorBeforeStoring],
            Mutation::ResendsWhileOpen => &[PostFault::ErrorAfterStoring],
            Mutation::FillerByName => &[PostFault::ErrorBeforeStoring, PostFault::CutBeforeStoring],
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
            Mutation::UnlistedIsRefusal if packet.method == Method::POST && response.status == 409 => {
                response.status = 400;
            }
            Mutation::FillerByName if is_list(packet) => {
                // Told apart by their time no more.
                change_list(response, |records, _| {
                    for record in records.iter_mut().filter(|record| record["to"] == record["from"]) {
                        record["created_at"] = Value::Null;
                    }
                });
            }
            Mutation::ErrorIsRefusal if packet.method == Method::POST && response.status == 500 => {
                response.status = 400;
            }
            _ => {}
        }
        reply
    }

    /// What proxies and storages make of an honest answer.
    fn distort_reply(&mut self, node: usize, packet: &Packet, mut reply: Reply) -> Reply {
        let Reply::Answer { response, .. } = &mut reply else { return reply };
        let post = packet.method == Method::POST;
        if post && response.status == 200 && self.has(Fault::Proxy) && self.rng.one_in(3) {
            let sent = Effect::of_body(&packet.body);
            let exchanged = self.rng.one_in(2);
            let others = self.nodes[1 - node].relayer.records().chain(self.nodes[node].relayer.records());
            let is_other = |to: &str| exchanged && !to.eq_ignore_ascii_case(&sent.to);
            let others = others.filter(|record| record.to.as_deref().is_some_and(is_other));
            // One that no row has yet does the most harm.
            let bound = |record: &&Record| self.owners.iter().any(|(tx_id, _)| tx_id.0 == record.id);
            let other = others.min_by_key(bound).map(|other| (other.id.clone(), other.to_json()));
            match other {
                Some((id, other)) => {
                    note!(self, "r{node}: its answer is exchanged for one about {id}");
                    response.body = json!({ "success": true, "data": other }).to_string().into_bytes();
                }
                None => {
                    self.item_failures.push(sent);
                    response.status = 409;
                }
            }
        }
        if is_list(packet) && self.evm.is_some() && self.has(Fault::Lists) && !self.rng.one_in(4) {
            let lie = self.rng.below(4);
            note!(self, "r{node}: lies in its list in way {lie}");
            change_list(response, |records, total| match lie {
                0 => {
                    records.clear();
                    *total = json!(0);
                }
                1 => records.reverse(),
                2 => records.truncate(records.len() / 2),
                _ => {
                    records.drain(..records.len().div_ceil(2));
                    *total = json!(records.len());
                }
            });
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
        self.nodes[node].epoch += 1;
        self.nodes[node].forgot_at = self.now;
        self.crash_relayer(node, Memory::Forget);
    }

    /// A relayer crashes and restarts with what it still knows.
    pub fn crash_relayer(&mut self, node: usize, memory: Memory) {
        note!(self, "r{node}: crashes, {memory:?}");
        let now = self.now;
        let crashed = &mut self.nodes[node];
        crashed.stalled_until = 0;
        crashed.tickets.clear();
        crashed.relayer.restart(now, memory);
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
        let known = self.nodes[node].effects_stored.len();
        for entry in known..self.nodes[node].relayer.audit().len() {
            let audit = &self.nodes[node].relayer.audit()[entry];
            let (effect, id) = (Effect::of_body(&audit.body), audit.id.clone());
            note!(self, "r{node}: stores {id} ({} {})", effect.to, effect.value);
            self.nodes[node].effects_stored.push(effect.clone());
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
                if let Some(chain) = &self.evm {
                    return chain.mined(&truth.effect).any(|mined| !mined.reverts);
                }
                let mut records = self.nodes.iter().flat_map(|node| node.records_of(&truth.effect));
                records.any(|record| record.status == Status::Confirmed && !record.is_no_op())
            })
        };
        (0..).take_while(|nonce| executed(*nonce)).count() as u64
    }
}

fn is_list(packet: &Packet) -> bool {
    packet.method == Method::GET && packet.path.ends_with("/transactions")
}

/// Changes the records of a list, and their number.
fn change_list(response: &mut SimResponse, change: impl FnOnce(&mut Vec<Value>, &mut Value)) {
    let Ok(mut list) = serde_json::from_slice::<Value>(&response.body) else { return };
    let (mut records, mut total) = (list["data"].take(), list["pagination"]["total_items"].take());
    if let Some(records) = records.as_array_mut() {
        change(records, &mut total);
    }
    (list["data"], list["pagination"]["total_items"]) = (records, total);
    response.body = list.to_string().into_bytes();
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
