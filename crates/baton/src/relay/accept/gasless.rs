//! What is checked of a gasless request before it is accepted, beyond its form: the signature, the deadline, the nonce.
//! Each refusal names the field and the fix; without an answer from the chain nothing is stored.

use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, U256};
use serde_json::json;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use crate::config::ForwarderConfig;
use crate::http::problem::Problem;
use crate::relay::chain::{Chain, ChainError};
use crate::relay::request::call::FieldProblem;
use crate::relay::request::forward::{DOMAIN_VERSION, Forward, GaslessRequest, Signer};
use crate::relay::state::transaction::{Status, TransactionId};
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::GuardedStore;
use crate::timestamp::Timestamp;

/// Checks gasless requests.
pub struct Gasless {
    chain: Arc<Chain>,
    forwarder: ForwarderConfig,
    guarded: Arc<GuardedStore>,
}

/// How many transactions of one signer may wait for their turn.
const AHEAD_MAX: u64 = 1000;
/// What every store can keep; no forwarder has counted so far.
const NONCE_MAX: U256 = U256::from_limbs([i64::MAX as u64, 0, 0, 0]);
/// The part of a request's time that is left for storing it.
const KEPT_FOR_STORING: u32 = 2;

impl Gasless {
    /// Checks for this forwarder on this chain.
    pub fn new(chain: Arc<Chain>, forwarder: ForwarderConfig, guarded: Arc<GuardedStore>) -> Self {
        Self { chain, forwarder, guarded }
    }

    /// The next nonce of an address as the forwarder counts them; `with_pending`: after those that wait here.
    pub async fn nonce(&self, address: Address, with_pending: bool, deadline: Instant) -> Result<U256, Problem> {
        let signer = Signer { forwarder: self.forwarder.address, address };
        let count = self.count(signer, deadline).await?;
        Ok(if with_pending { count.max(self.after_last(signer, deadline).await?) } else { count })
    }

    /// The request as it will be stored, if it was signed by whom it says.
    pub async fn signed(&self, request: GaslessRequest, deadline: Instant) -> Result<Forward, Problem> {
        let from = request.request.from;
        let forwarder = &self.forwarder;
        let signer = request.signer(forwarder).map_err(|why| Problem::bad_signature(format!("signature: {why}")))?;
        if signer != from {
            return Err(self.signed_by_another(from, signer, deadline).await);
        }
        request.forward(forwarder).map_err(|rule| invalid("request.gas", &rule))
    }

    /// That it can still be executed, and that it is its turn: after all that the forwarder has counted, and after all
    /// that wait here.
    pub async fn is_next(&self, forward: &Forward, deadline: Instant) -> Result<(), Problem> {
        let request = &forward.gasless.request;
        let now = Timestamp::now();
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
        let from = request.from;
        let waiting = if next > count { " (with what waits here)" } else { "" };
        let wanted = format!("is {}, but the next nonce of {from} at the forwarder is {next}{waiting}", request.nonce);
        let rule = format!("{wanted}: sign again with that one");
        let holder = match u64::try_from(request.nonce) {
            Ok(nonce) if request.nonce < next => {
                in_time(deadline, self.guarded.store.nonce_holder(signer, nonce)).await?
            }
            _ => None,
        };
        Err(match holder {
            Some(holder) if holder.status != Status::Failed => self.nonce_taken(forward, holder.id),
            _ => invalid("request.nonce", &rule),
        })
    }

    /// 400: another transaction has the nonce.
    pub fn nonce_taken(&self, forward: &Forward, holder: TransactionId) -> Problem {
        let nonce = forward.gasless.request.nonce;
        // Whoever had no answer and sends again must not be told to sign the same payment a second time.
        let rule = format!(
            "{nonce} is taken by transaction {holder}: if that is this request, follow it there; if it is another, sign \
             with the next"
        );
        let mut problem = invalid("request.nonce", &rule);
        problem.more.push(("transactionId", json!(holder.to_string())));
        problem
    }

    /// How long the chain may take for a request that must be answered by then.
    fn patience(deadline: Instant) -> Instant {
        let left: Duration = deadline.saturating_duration_since(Instant::now());
        Instant::now() + left / KEPT_FOR_STORING
    }

    async fn count(&self, signer: Signer, deadline: Instant) -> Result<U256, Problem> {
        let asked = timeout_at(Self::patience(deadline), self.chain.nonce(signer)).await;
        asked.unwrap_or_else(|late| Err(ChainError::Unreachable(late.into()))).map_err(|error| no_chain(&error))
    }

    async fn after_last(&self, signer: Signer, deadline: Instant) -> Result<U256, Problem> {
        let last = in_time(deadline, self.guarded.store.last_nonce(signer)).await?;
        Ok(last.map_or(U256::ZERO, |last| U256::from(last) + U256::from(1)))
    }

    /// 401: whoever signed it is not who it says. What it was compared with is named, since a wrong domain looks like a
    /// wrong signer.
    async fn signed_by_another(&self, from: Address, signer: Address, deadline: Instant) -> Problem {
        let asked = timeout_at(Self::patience(deadline), self.chain.is_contract(from)).await;
        if let Ok(Ok(true)) = asked {
            return Problem::bad_signature(format!(
                "request.from: {from} is a contract, and the forwarder takes plain signatures of accounts only; \
                 sign with an account of your own"
            ));
        }
        debug!(action = "signer_differs", "whether {from} is a contract: {asked:?}");
        let ForwarderConfig { address, name, chain_id, .. } = &self.forwarder;
        Problem::bad_signature(format!(
            "signature: it is {signer}'s and not {from}'s; sign exactly these fields, with from's key, for the EIP-712 \
             domain name {name:?}, version {DOMAIN_VERSION:?}, chainId {chain_id}, verifyingContract {address}"
        ))
    }
}

fn invalid(field: &str, message: &str) -> Problem {
    Problem::invalid(vec![FieldProblem { field: field.to_owned(), message: message.to_owned() }])
}

/// What the store says, if it does so in time.
async fn in_time<T>(deadline: Instant, asked: impl Future<Output = Result<T, StoreError>>) -> Result<T, Problem> {
    let late = |_| Err(StoreError::Unavailable("no answer in time".into()));
    timeout_at(deadline, asked).await.unwrap_or_else(late).map_err(|failure| {
        Problem::unavailable("the store is unavailable; nothing was accepted, send it again later", &failure)
    })
}

/// 503. What differs from the configuration is no secret, and whoever runs the service must know.
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
