//! The optional pre-flight: a transaction is tried on the chain before it is submitted, and one that would revert fails
//! without costing gas. Only a transaction that was never submitted is tried, and only a revert is a verdict.

use alloy_primitives::{Address, U256};
use tracing::{debug, info};

use crate::relay::chain::{Chain, ChainError, Trial, revert};
use crate::relay::request::call::Call;
use crate::relay::request::forward::Forward;
use crate::relay::state::transaction::Transaction;

/// Verdict of the pre-flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Preflight {
    /// Submit it.
    Go,
    /// It would revert, for this reason.
    Reverts(String),
    /// The chain cannot be asked now, for this reason.
    Later(String),
}

/// Tries a transaction as the relayer of that address would send it.
pub async fn preflight(chain: &Chain, row: &Transaction, relayer: Address) -> Preflight {
    match judge(chain, row, relayer).await {
        Ok(verdict) => verdict,
        Err(ChainError::Refused { code, message, .. }) => {
            info!(
                transactionId = %row.id, action = "preflight_unclear",
                "the pre-flight was inconclusive: error {code}, {message}"
            );
            Preflight::Go
        }
        Err(error) => Preflight::Later(format!("not tried before it is submitted: {}", crate::errors::chain(&error))),
    }
}

async fn judge(chain: &Chain, row: &Transaction, relayer: Address) -> Result<Preflight, ChainError> {
    if let Some(forward) = &row.forward {
        let (wanted, now) = (forward.gasless.request.nonce, chain.nonce(forward.signer()).await?);
        if now > wanted {
            let reason = format!("its nonce {wanted} was used: the forwarder's next for this signer is {now}");
            return Ok(Preflight::Reverts(reason));
        }
        if now < wanted {
            // Its predecessors, which are on their way, would have to be tried first.
            debug!(
                transactionId = %row.id, action = "preflight_skipped",
                "pre-flight skipped: nonce {wanted} is ahead of the forwarder's {now}"
            );
            return Ok(Preflight::Go);
        }
    }
    match chain.try_call(relayer, &row.call).await? {
        Trial::Runs => Ok(Preflight::Go),
        Trial::Unclear(message) => {
            info!(transactionId = %row.id, action = "preflight_unclear", "the pre-flight was inconclusive: {message}");
            Ok(Preflight::Go)
        }
        Trial::Reverts { data, message } => match &row.forward {
            Some(forward) if revert::is_failed_call(&data) => Ok(Preflight::Reverts(inner(chain, forward).await?)),
            _ => Ok(Preflight::Reverts(revert::reason(&data, &message))),
        },
    }
}

/// The target's own revert reason, which the forwarder does not pass on: repeats the call as the forwarder makes it.
async fn inner(chain: &Chain, forward: &Forward) -> Result<String, ChainError> {
    let request = &forward.gasless.request;
    let mut data = request.data.to_vec();
    data.extend_from_slice(request.from.as_slice());
    let call = Call {
        to: request.to,
        value: U256::ZERO,
        data: format!("0x{}", hex::encode(data)),
        gas_limit: None,
        ..forward.call()
    };
    // Without the value, which the forwarder does not hold yet, and without the gas limit, which a call from outside
    // shares with the intrinsic gas of the transaction.
    Ok(match chain.try_call(forward.forwarder, &call).await? {
        Trial::Reverts { data, message } => format!("the target refuses the call: {}", revert::reason(&data, &message)),
        Trial::Runs | Trial::Unclear(_) => {
            "the target refuses the call, perhaps for want of gas or value: sign for more gas".to_owned()
        }
    })
}
