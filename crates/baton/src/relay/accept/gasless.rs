//! Checks of a gasless request before it is accepted, beyond its form: signature, deadline and nonce. Each refusal names
//! the field and the fix; without an answer from the chain nothing is stored.

use std::sync::Arc;
use std::time::Instant;

use alloy_primitives::{Address, U256};
use serde_json::json;
use tracing::debug;

use crate::clock::Clock;
use crate::config::{ForwarderConfig, GaslessPolicy};
use crate::http::problem::{FieldProblem, Problem};
use crate::relay::chain::{Chain, ChainError};

use crate::relay::request::forward::{DOMAIN_VERSION, Forward, GaslessRequest, Signer};
use crate::relay::state::transaction::{Status, TransactionId};
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::GuardedStore;

/// Checks gasless requests.
pub struct Gasless {
    chain: Arc<Chain>,
    forwarder: ForwarderConfig,
    policy: GaslessPolicy,
    guarded: Arc<GuardedStore>,
}

/// Maximum number of transactions of one signer that wait for their turn.
const AHEAD_MAX: u64 = 1000;
/// Largest nonce that every store can keep.
const NONCE_MAX: U256 = U256::from_limbs([i64::MAX as u64, 0, 0, 0]);
/// The chain may use up to one part in this many of a request's time; the rest is for storing.
const CHAIN_PART: u32 = 2;

impl Gasless {
    /// Checks for this forwarder on this chain.
    pub fn new(
        chain: Arc<Chain>,
        forwarder: ForwarderConfig,
        policy: GaslessPolicy,
        guarded: Arc<GuardedStore>,
    ) -> Self {
        Self { chain, forwarder, policy, guarded }
    }

    /// Checks what the relayers would pay for, before anything else is looked at.
    pub fn within_policy(&self, request: &GaslessRequest) -> Result<(), Problem> {
        let mut problems = Vec::new();
        let mut problem = |field: &str, message: String| {
            problems.push(FieldProblem { field: field.to_owned(), message });
        };
        if request.request.value > U256::ZERO && !self.policy.allow_value {
            let rule = "must be 0: a relayer would pay it. The operator can allow it (GASLESS_ALLOW_VALUE)";
            problem("request.value", rule.to_owned());
        }
        if request.request.gas > U256::from(self.policy.gas_max) {
            problem("request.gas", format!("must be at most {} (GASLESS_GAS_MAX)", self.policy.gas_max));
        }
        if problems.is_empty() { Ok(()) } else { Err(Problem::invalid(problems)) }
    }

    /// The next nonce of an address at the forwarder; `with_pending`: after the transactions that wait here.
    pub async fn nonce(&self, address: Address, with_pending: bool, deadline: Instant) -> Result<U256, Problem> {
        let signer = Signer { forwarder: self.forwarder.address, address };
        let count = self.count(signer, deadline).await?;
        if !with_pending {
            return Ok(count);
        }
        let next = count.max(self.after_last(signer, deadline).await?);
        Ok(self.gap(signer, count, next, deadline).await?.unwrap_or(next))
    }

    /// The request as it will be stored, if `from` signed it.
    pub async fn signed(&self, request: GaslessRequest, deadline: Instant) -> Result<Forward, Problem> {
        let from = request.request.from;
        let forwarder = &self.forwarder;
        let signer = request.signer(forwarder).map_err(|why| Problem::bad_signature(format!("signature: {why}")))?;
        if signer != from {
            return Err(self.signed_by_another(from, signer, deadline).await);
        }
        request.forward(forwarder).map_err(|rule| invalid("request.gas", &rule))
    }

    /// Checks that it can still be executed, and that its nonce is the next one after the forwarder's own count and the
    /// transactions that wait here.
    pub async fn is_next(&self, forward: &Forward, deadline: Instant) -> Result<(), Problem> {
        let request = &forward.gasless.request;
        let now = self.guarded.clock.now();
        if forward.gasless.is_expired(now) {
            let (then, now) = (request.deadline, now.0 / 1000);
            let rule = format!("was {then}, and it is {now} now: sign again with a later one (seconds since 1970)");
            return Err(invalid("request.deadline", &rule));
        }
        let signer = forward.signer();
        let count = self.count(signer, deadline).await?;
        let next = count.max(self.after_last(signer, deadline).await?);
        if next - count >= U256::from(AHEAD_MAX) {
            let rule = format!("is {AHEAD_MAX} ahead of the forwarder's ({count}): wait until some have been executed");
            return Err(invalid("request.nonce", &rule));
        }
        if request.nonce == next && next <= NONCE_MAX {
            return Ok(());
        }
        // What waits behind a request that was never accepted goes on once another takes its nonce.
        let gap = self.gap(signer, count, next, deadline).await?;
        if gap == Some(request.nonce) {
            return Ok(());
        }
        let wanted = gap.unwrap_or(next);
        let from = request.from;
        let waiting = if next > count { " (counting transactions that wait in Baton)" } else { "" };
        let differs =
            format!("is {}, but the next nonce of {from} at the forwarder is {wanted}{waiting}", request.nonce);
        let rule = format!("{differs}; sign again with nonce {wanted}");
        let holder = match u64::try_from(request.nonce) {
            Ok(nonce) if request.nonce < next => {
                in_time(&self.guarded.clock, deadline, self.guarded.store.nonce_holder(signer, nonce)).await?
            }
            _ => None,
        };
        Err(match holder {
            Some(holder) if holder.status != Status::Failed => self.nonce_taken(forward, holder.id),
            _ => invalid("request.nonce", &rule),
        })
    }

    /// Checks that this request did not fail on the chain before: posted again, it would only cost gas again. A request that
    /// failed there and whose nonce another one takes is recorded, so that it is not forgotten with its nonce.
    pub async fn never_failed_on_chain(&self, forward: &Forward, deadline: Instant) -> Result<(), Problem> {
        let (store, clock) = (&self.guarded.store, &self.guarded.clock);
        let digest = forward.digest();
        let holder = in_time(clock, deadline, store.nonce_holder(forward.signer(), forward.nonce())).await?;
        if let Some(failed) = holder.filter(|holder| holder.status == Status::Failed && holder.hash.is_some())
            && let Some(before) = &failed.forward
        {
            if before.digest() == digest {
                return Err(failed_before(Some(failed.id)));
            }
            let now = clock.now();
            in_time(clock, deadline, store.record_failed_forward(before.digest(), now)).await?;
        }
        match in_time(clock, deadline, store.is_failed_forward(digest)).await? {
            true => Err(failed_before(None)),
            false => Ok(()),
        }
    }

    /// 400: another transaction has the nonce.
    pub fn nonce_taken(&self, forward: &Forward, holder: TransactionId) -> Problem {
        let nonce = forward.gasless.request.nonce;
        // A client that got no answer and repeats its request must not be asked to sign the same payment again.
        let rule = format!(
            "{nonce} is taken by transaction {holder}: if that is this request, follow it there; if it is another, sign \
             with the next"
        );
        let mut problem = invalid("request.nonce", &rule);
        problem.more.push(("transactionId", json!(holder.to_string())));
        problem
    }

    /// Deadline of the chain's answer for a request that must be answered by `deadline`.
    fn chain_deadline(&self, deadline: Instant) -> Instant {
        let now = self.guarded.clock.instant();
        now + deadline.saturating_duration_since(now) / CHAIN_PART
    }

    async fn count(&self, signer: Signer, deadline: Instant) -> Result<U256, Problem> {
        let asked = self.guarded.clock.timeout_at(self.chain_deadline(deadline), self.chain.nonce(signer)).await;
        asked.unwrap_or_else(|late| Err(ChainError::Unreachable(late.into()))).map_err(|error| no_chain(&error))
    }

    async fn after_last(&self, signer: Signer, deadline: Instant) -> Result<U256, Problem> {
        let last = in_time(&self.guarded.clock, deadline, self.guarded.store.last_nonce(signer)).await?;
        Ok(last.map_or(U256::ZERO, |last| U256::from(last) + U256::from(1)))
    }

    /// The lowest nonce between the forwarder's count and the next one whose request was never accepted.
    async fn gap(&self, signer: Signer, count: U256, next: U256, deadline: Instant) -> Result<Option<U256>, Problem> {
        let Ok(from) = u64::try_from(count) else { return Ok(None) };
        if next <= count {
            return Ok(None);
        }
        let asked = self.guarded.store.withdrawn_nonce(signer, from);
        let withdrawn = in_time(&self.guarded.clock, deadline, asked).await?.map(U256::from);
        Ok(withdrawn.filter(|nonce| *nonce < next))
    }

    /// 401: `from` did not sign it. The answer names the EIP-712 domain, since a wrong domain looks like a wrong signer.
    async fn signed_by_another(&self, from: Address, signer: Address, deadline: Instant) -> Problem {
        let asked = self.guarded.clock.timeout_at(self.chain_deadline(deadline), self.chain.is_contract(from)).await;
        if let Ok(Ok(true)) = asked {
            return Problem::bad_signature(format!(
                "request.from: {from} is a contract, and the forwarder takes plain signatures of accounts only; \
                 sign with an account of your own"
            ));
        }
        debug!(action = "signer_differs", "{from} is not known to be a contract");
        let ForwarderConfig { address, name, chain_id, .. } = &self.forwarder;
        Problem::bad_signature(format!(
            "signature: recovers to {signer}, not {from}; sign exactly these fields with the key of `from`, for the \
             EIP-712 domain name {name:?}, version {DOMAIN_VERSION:?}, chainId {chain_id}, verifyingContract {address}"
        ))
    }
}

/// 400: the same request was executed and failed.
fn failed_before(id: Option<TransactionId>) -> Problem {
    let by = id.map(|id| format!(" as transaction {id}")).unwrap_or_default();
    let rule = format!("was executed{by} and failed on the chain; Baton does not accept it again: sign a new request");
    let mut problem = invalid("request", &rule);
    problem.more.extend(id.map(|id| ("transactionId", json!(id.to_string()))));
    problem
}

fn invalid(field: &str, message: &str) -> Problem {
    Problem::invalid(vec![FieldProblem { field: field.to_owned(), message: message.to_owned() }])
}

/// The store's answer, if it comes in time.
async fn in_time<T>(
    clock: &Clock,
    deadline: Instant,
    asked: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, Problem> {
    let late = |_| Err(StoreError::Unavailable("no answer in time".into()));
    clock.timeout_at(deadline, asked).await.unwrap_or_else(late).map_err(|failure| {
        Problem::unavailable("the store is unavailable; nothing was accepted, send it again later", &failure)
    })
}

/// 503. A difference from the configuration is no secret, and the operator must know it.
fn no_chain(error: &ChainError) -> Problem {
    match error {
        ChainError::Mismatch(difference) => Problem::unavailable(
            format!(
                "gasless transactions are configured for another chain or forwarder, and nothing was accepted: {difference}"
            ),
            error,
        ),
        _ => Problem::unavailable(
            "the chain (RPC_URL) gives no answer; nothing was accepted, send it again later",
            error,
        ),
    }
}
