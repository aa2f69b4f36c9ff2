//! What the relayer remembers, and how its records move on: accepted, signed, broadcast, and to their end.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::Value;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Accepted, Delivery, Dialect, RelayerOptions, Seen, Timing,
    faults::{Faults, Outcome, PostFault},
    record::{self, Record, Request, Status, Step},
    webhook::Hook,
};

/// How soon a jammed record is looked at again.
const JAM_PAUSE: Duration = Duration::from_millis(20);

type Rule<T> = Arc<dyn Fn(&Value) -> Option<T> + Send + Sync>;

pub(super) struct Shared {
    pub(super) options: RelayerOptions,
    pub(super) port: u16,
    pub(super) address: String,
    pub(super) client: reqwest::Client,
    pub(super) wake: Notify,
    state: Mutex<State>,
}

pub(super) struct State {
    /// What may be forgotten.
    pub(super) entries: Vec<Entry>,
    index: HashMap<String, usize>,
    queue: BinaryHeap<Reverse<(Instant, usize)>>,
    pub(super) last_confirmed: Option<OffsetDateTime>,
    /// What the chain knows.
    pub(super) next_nonce: u64,
    pub(super) balance: String,
    /// What the test sets.
    pub(super) faults: Faults,
    pub(super) post_rule: Option<Rule<PostFault>>,
    pub(super) outcome_rule: Option<Rule<Outcome>>,
    pub(super) hook: Option<Hook>,
    /// What the test asks.
    pub(super) audit: Vec<Accepted>,
    pub(super) seen: Vec<Seen>,
    pub(super) struck: BTreeMap<&'static str, usize>,
    pub(super) deliveries: Vec<Delivery>,
    pub(super) dice: StdRng,
    plan_dice: StdRng,
    /// Tokens left in the rate limit's bucket, and when that was counted.
    bucket: Option<(f64, Instant)>,
    life: Option<Life>,
}

/// A record and what only the relayer needs to know about it.
pub(super) struct Entry {
    pub(super) record: Record,
    /// Its place in the audit, which outlives the record.
    audit: usize,
    steps: VecDeque<Step>,
    /// Webhooks kept back until the final one was tried.
    pub(super) held: Vec<(Status, String)>,
    /// Ends when the webhook before was tried once: keeps one record's webhooks in order.
    pub(super) last_webhook: Option<oneshot::Receiver<()>>,
}

/// The time between a start and a stop.
struct Life {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Shared {
    pub(super) fn new(options: RelayerOptions, port: u16) -> Self {
        let hook = options.webhook.clone().map(|(url, key)| Hook { url, key });
        let digest = Sha256::digest(options.id.as_bytes());
        let state = State {
            entries: Vec::new(),
            index: HashMap::new(),
            queue: BinaryHeap::new(),
            last_confirmed: None,
            next_nonce: 0,
            balance: "10000000000000000000000".to_owned(),
            faults: Faults::default(),
            post_rule: None,
            outcome_rule: None,
            hook,
            audit: Vec::new(),
            seen: Vec::new(),
            struck: BTreeMap::new(),
            deliveries: Vec::new(),
            dice: StdRng::seed_from_u64(options.seed),
            plan_dice: StdRng::seed_from_u64(options.seed),
            bucket: None,
            life: None,
        };
        Self {
            address: format!("0x{}", hex::encode(&digest[..20])),
            client: crate::http_client(),
            wake: Notify::new(),
            state: Mutex::new(state),
            options,
            port,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts moving records; those that were under way go on.
    pub(super) fn begin_life(self: &Arc<Self>) {
        let mut state = self.lock();
        let now = Instant::now();
        for index in 0..state.entries.len() {
            state.schedule(index, now, self.options.timing);
        }
        let life = Life { stop: CancellationToken::new(), tasks: TaskTracker::new() };
        let (shared, stop) = (Arc::clone(self), life.stop.clone());
        life.tasks.spawn(async move { stop.run_until_cancelled(shared.keep_moving()).await });
        state.life = Some(life);
    }

    /// Stops everything that is under way; the returned tasks end soon.
    pub(super) fn end_life(&self) -> Option<TaskTracker> {
        let mut state = self.lock();
        state.queue.clear();
        let life = state.life.take()?;
        life.stop.cancel();
        life.tasks.close();
        Some(life.tasks)
    }

    /// Stores a record. The error is the message of a 400.
    pub(super) fn accept(self: &Arc<Self>, body: &[u8], fault: Option<&PostFault>) -> Result<Record, String> {
        let request: Value = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let (mut record, value_text) = match self.options.dialect {
            Dialect::Real => self.record(&Request::parse(body)?)?,
            Dialect::Spec => self.spec_record(body)?,
        };
        let mut state = self.lock();
        let outcome = state.next_outcome(&request);
        let mut steps = record::steps(&outcome, self.options.timing.mined.is_some());
        if fault == Some(&PostFault::QueueUnavailable) {
            record.status = Status::Failed;
            record.status_reason = Some("Queue unavailable".to_owned());
            steps.clear();
        }
        let audit = state.audit.len();
        state.audit.push(Accepted {
            relayer_id: self.options.id.clone(),
            id: record.id.clone(),
            body: String::from_utf8_lossy(body).into_owned(),
            request,
            value_text,
            received_at: record.created_at,
            broadcasts: 0,
        });
        let index = state.entries.len();
        state.index.insert(record.id.clone(), index);
        let answer = record.clone();
        state.entries.push(Entry { record, audit, steps, held: Vec::new(), last_webhook: None });
        state.schedule(index, Instant::now(), self.options.timing);
        drop(state);
        self.wake.notify_one();
        Ok(answer)
    }

    /// Stores a record later, whether or not anybody still waits for it.
    pub(super) fn accept_later(self: &Arc<Self>, body: Vec<u8>, delay: Duration) {
        let shared = Arc::clone(self);
        self.spawn(async move {
            tokio::time::sleep(delay).await;
            // A body that is refused leaves nothing behind, late or not.
            let _ = shared.accept(&body, None);
        });
    }

    /// Runs work that ends with this life.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let state = self.lock();
        state.spawn(work);
    }

    /// Runs one record up to a status (or its end) at once, and returns when its webhooks were tried.
    pub(super) async fn run_ahead(self: &Arc<Self>, id: &str, until: Status) {
        let mut tried = Vec::new();
        {
            let mut state = self.lock();
            let Some(&index) = state.index.get(id) else { return };
            while state.entries[index].record.status < until {
                let Some(step) = state.entries[index].steps.pop_front() else { break };
                tried.extend(self.take(&mut state, index, step));
            }
        }
        for webhook in tried {
            // An error means that the relayer was stopped meanwhile.
            let _ = webhook.await;
        }
    }

    async fn keep_moving(self: Arc<Self>) {
        loop {
            let next = self.move_what_is_due();
            let sleep = async {
                match next {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.wake.notified() => {}
                () = sleep => {}
            }
        }
    }

    /// Returns when the next record is due.
    fn move_what_is_due(self: &Arc<Self>) -> Option<Instant> {
        let mut state = self.lock();
        let now = Instant::now();
        while let Some(&Reverse((due, index))) = state.queue.peek() {
            if due > now {
                return Some(due);
            }
            state.queue.pop();
            let jammed = state.faults.jammed;
            // The index may be from before a forgetting.
            let Some(entry) = state.entries.get_mut(index) else { continue };
            match entry.steps.front() {
                None => continue,
                Some(step) if jammed && !matches!(step, Step::Sign | Step::Broadcast) => {
                    state.queue.push(Reverse((now + JAM_PAUSE, index)));
                }
                Some(_) => {
                    if let Some(step) = entry.steps.pop_front() {
                        self.take(&mut state, index, step);
                        state.schedule(index, now, self.options.timing);
                    }
                }
            }
        }
        None
    }

    /// One step of one record, and the webhook that tells about it. Returns what ends when that was tried once.
    fn take(self: &Arc<Self>, state: &mut State, index: usize, step: Step) -> Option<oneshot::Receiver<()>> {
        let now = OffsetDateTime::now_utc();
        let nonce = state.next_nonce;
        let fresh_hash = format!("0x{}", hex::encode(state.dice.random::<[u8; 32]>()));
        let audit = state.entries[index].audit;
        let record = &mut state.entries[index].record;
        match step {
            Step::Sign => {
                record.status = Status::Sent;
                record.nonce = Some(nonce);
                record.hash = Some(fresh_hash);
                record.sent_at = Some(now);
                state.next_nonce += 1;
            }
            Step::Broadcast => {
                record.status = Status::Submitted;
                state.audit[audit].broadcasts += 1;
            }
            Step::Mine => record.status = Status::Mined,
            Step::Confirm | Step::ConfirmAsNoOp => {
                if step == Step::ConfirmAsNoOp {
                    record.becomes_noop();
                }
                record.status = Status::Confirmed;
                record.confirmed_at = Some(now);
                state.last_confirmed = Some(now);
            }
            Step::FailUnsigned(reason) => {
                record.status = Status::Failed;
                record.status_reason = Some(reason);
            }
            Step::Revert => {
                record.status = Status::Failed;
                record.status_reason = Some("Transaction reverted on-chain (receipt status: failed)".to_owned());
            }
            Step::Cancel => {
                record.becomes_noop();
                record.status = Status::Canceled;
                record.is_canceled = true;
            }
        }
        self.tell(state, index)
    }

    fn record(&self, request: &Request) -> Result<(Record, String), String> {
        let mut record = self.empty_record(request.value_hex()?);
        record.to.clone_from(&request.to);
        record.data.clone_from(&request.data);
        record.gas_limit = request.gas_limit;
        record.gas_price = request.gas_price;
        record.max_fee_per_gas = request.max_fee_per_gas;
        record.max_priority_fee_per_gas = request.max_priority_fee_per_gas;
        record.speed = request.speed.map(|speed| speed.as_str().to_owned());
        Ok((record, request.value.get().to_owned()))
    }

    /// The older dialect asks less: everything but the amount's form is taken as it is.
    fn spec_record(&self, body: &[u8]) -> Result<(Record, String), String> {
        #[derive(serde::Deserialize)]
        struct SpecRequest {
            to: Option<String>,
            data: Option<String>,
            value: Option<Box<serde_json::value::RawValue>>,
            #[serde(rename = "gasLimit")]
            gas_limit: Option<Value>,
        }
        let request: SpecRequest = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let value_text = request.value.map(|raw| raw.get().to_owned()).unwrap_or_default();
        let value = if value_text.is_empty() { "0x0".to_owned() } else { record::hex_amount(&value_text)? };
        let mut record = self.empty_record(value);
        record.to = request.to;
        record.data = request.data;
        record.gas_limit = match request.gas_limit {
            Some(Value::String(text)) => text.parse().ok(),
            Some(number) => number.as_u64(),
            None => None,
        };
        Ok((record, value_text))
    }

    fn empty_record(&self, value: String) -> Record {
        Record {
            id: uuid::Uuid::new_v4().to_string(),
            status: Status::Pending,
            status_reason: None,
            nonce: None,
            hash: None,
            to: None,
            value,
            data: None,
            gas_limit: None,
            speed: None,
            is_canceled: false,
            from: self.address.clone(),
            relayer_id: self.options.id.clone(),
            created_at: OffsetDateTime::now_utc(),
            sent_at: None,
            confirmed_at: None,
            gas_price: None,
            max_fee_per_gas: None,
            max_priority_fee_per_gas: None,
        }
    }
}

impl State {
    pub(super) fn entry(&self, id: &str) -> Option<&Entry> {
        self.index.get(id).map(|&index| &self.entries[index])
    }

    pub(super) fn set_faults(&mut self, faults: Faults) {
        // The dice start again only with a new plan, so that other faults can change without repeating the same throws.
        if let Some(plan) = &faults.plan
            && self.faults.plan.as_ref() != Some(plan)
        {
            self.plan_dice = StdRng::seed_from_u64(plan.seed);
        }
        self.faults = faults;
    }

    pub(super) fn forget(&mut self) {
        self.entries.clear();
        self.index.clear();
        self.queue.clear();
        self.last_confirmed = None;
    }

    /// The fault that strikes this POST, if any.
    pub(super) fn next_fault(&mut self, request: &Value) -> Option<PostFault> {
        let ruled = self.post_rule.as_ref().and_then(|rule| rule(request));
        let fault = match (ruled, self.faults.next_posts.pop_front()) {
            (Some(ruled), next) => {
                // A rule does not use up what was meant for the next POST.
                next.into_iter().for_each(|next| self.faults.next_posts.push_front(next));
                Some(ruled)
            }
            (None, Some(next)) => next,
            (None, None) => match (&self.faults.every_post, &self.faults.plan) {
                (Some(fault), _) => Some(fault.clone()),
                (None, Some(plan)) => plan.pick(self.plan_dice.random::<f64>()).cloned(),
                (None, None) => None,
            },
        };
        if let Some(fault) = &fault {
            *self.struck.entry(fault.name()).or_default() += 1;
        }
        fault
    }

    /// Whether the rate limit lets one more request through.
    pub(super) fn within_limit(&mut self, limit: Option<(f64, f64)>) -> bool {
        let Some((per_second, burst)) = limit else { return true };
        let now = Instant::now();
        let (left, since) = self.bucket.unwrap_or((burst, now));
        let left = (left + per_second * (now - since).as_secs_f64()).min(burst);
        let passes = left >= 1.0;
        self.bucket = Some((if passes { left - 1.0 } else { left }, now));
        passes
    }

    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(life) = &self.life {
            let stop = life.stop.clone();
            life.tasks.spawn(async move { stop.run_until_cancelled(work).await });
        }
    }

    fn next_outcome(&mut self, request: &Value) -> Outcome {
        self.outcome_rule
            .as_ref()
            .and_then(|rule| rule(request))
            .or_else(|| self.faults.next_outcomes.pop_front())
            .unwrap_or_else(|| self.faults.outcome.clone())
    }

    fn schedule(&mut self, index: usize, now: Instant, timing: Timing) {
        let Some(step) = self.entries[index].steps.front() else { return };
        let before_final = timing.mined.unwrap_or(timing.submitted);
        let pause = match step {
            Step::Sign | Step::FailUnsigned(_) => timing.sent,
            Step::Broadcast => timing.submitted.saturating_sub(timing.sent),
            Step::Mine => before_final.saturating_sub(timing.submitted),
            Step::Confirm | Step::ConfirmAsNoOp | Step::Revert | Step::Cancel => {
                timing.confirmed.saturating_sub(before_final)
            }
        };
        self.queue.push(Reverse((now + pause, index)));
    }
}
