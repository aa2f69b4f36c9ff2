//! Transactions that were sent to the chain: sent again until they are mined, and reported then.
//!
//! A nonce is done with a receipt, or with the proof that another transaction has used it (another program signs with
//! this key); in the second case the record gets another nonce.

use std::time::{Duration, Instant};

use super::{Flight, InFlight, LOCAL_CHAINS, Signer, Stopped};
use crate::{
    Status,
    dev::{
        node::{Mined, Taken},
        signed::Signed,
    },
    server::{Driver, now_ms},
};

/// A transaction that is not mined is sent again after this long: the node may have restarted without it.
const SEND_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// Refusals after which a transaction that the node never had is given up.
const REFUSALS_MAX: u32 = 5;
/// Checks, [`SEND_AGAIN_AFTER`] apart, that must find a nonce used without a receipt before it counts as lost. A node can
/// be slow to show a receipt, above all a group of nodes behind one address.
const LOST_CHECKS: u32 = 15;
const LOST_CHECKS_LOCAL: u32 = 3;
/// No-ops sent at once to fill nonces that a chain has lost.
const GAP_FILL_MAX: u64 = 100;

impl Driver {
    /// Reports mined transactions. Nonces are mined in order, so the first one without a receipt ends the search.
    pub(super) async fn settle(&self, signer: &Signer, flight: &mut Flight) -> Result<(), Stopped> {
        while let Some((nonce, number)) = flight.first() {
            let signed = signer.state().signed.get(&number).cloned();
            if let Some(signed) = signed {
                let Some(mined) = signer.node.mined(signed.hash).await? else { break };
                self.report_end(signer, number, &signed, mined).await?;
            }
            flight.in_flight.remove(&nonce);
        }
        Ok(())
    }

    async fn report_end(&self, signer: &Signer, number: u64, signed: &Signed, mined: Mined) -> Result<(), Stopped> {
        let Mined { succeeded, block } = mined;
        if succeeded {
            self.update(signer, number, None, |record| {
                record.status = Status::Confirmed;
                record.confirmed_at_ms = Some(now_ms());
            })?;
            signer.state().signed.remove(&number);
            return Ok(());
        }
        let record = self.lock().core.record_of(number).cloned();
        let Some(record) = record else { return Ok(()) };
        let why = signer.node.revert_reason(signer.address, &record, signed, block.unwrap_or(1)).await?;
        let mut reason = crate::plan::REVERTED.to_owned();
        if let Some(why) = why {
            reason = format!("{reason}: {why}");
        }
        self.fail(signer, number, reason)
    }

    /// Sends transactions that the chain may not have.
    pub(super) async fn send_due(&self, signer: &Signer, flight: &mut Flight) -> Result<(), Stopped> {
        let due: Vec<u64> =
            flight.in_flight.iter().filter(|(_, sent)| sent.is_due()).map(|(nonce, _)| *nonce).collect();
        for nonce in due {
            self.send_one(signer, flight, nonce).await?;
        }
        Ok(())
    }

    pub(super) async fn send_one(&self, signer: &Signer, flight: &mut Flight, nonce: u64) -> Result<(), Stopped> {
        let Some(sent) = flight.in_flight.get_mut(&nonce) else { return Ok(()) };
        let number = sent.number;
        let found = signer.state().signed.get(&number).cloned();
        let Some(signed) = found else { return Ok(()) };
        let taken = signer.node.send(&signed.raw).await?;
        sent.sent_at = Some(Instant::now());
        match taken {
            Taken::Yes => {
                self.update(signer, number, None, |record| record.status = record.status.max(Status::Submitted))
            }
            Taken::NonceUsed => {
                // In this order: first a used nonce, then no receipt. The other way round, it could be mined in between.
                let used = signer.node.nonce_mined(signer.address).await? > nonce;
                let ours = signer.node.mined(signed.hash).await?.is_some();
                sent.lost_checks = if used && !ours { sent.lost_checks + 1 } else { 0 };
                let local = LOCAL_CHAINS.contains(&signed.chain_id);
                if sent.lost_checks >= if local { LOST_CHECKS_LOCAL } else { LOST_CHECKS } {
                    tracing::warn!(
                        relayer = self.options.id,
                        record = number,
                        nonce,
                        "another sender used this nonce; the transaction gets another"
                    );
                    flight.in_flight.remove(&nonce);
                    signer.state().unsigned.insert(number);
                }
                Ok(())
            }
            Taken::NotNow(reason) => {
                tracing::warn!(
                    relayer = self.options.id,
                    record = number,
                    nonce,
                    reason,
                    "the node does not take a transaction yet"
                );
                Ok(())
            }
            Taken::Refused(reason) => {
                let status = self.lock().core.record_of(number).map(|record| record.status);
                // A refusal by a node that had it before does not prove that it is gone.
                if status.is_some_and(|status| status > Status::Sent) {
                    return Ok(());
                }
                sent.refusals += 1;
                if sent.refusals < REFUSALS_MAX {
                    return Ok(());
                }
                // No node has these bytes. `fill_gap` uses the nonce if no other transaction does.
                self.fail(signer, number, format!("The node refused it: {reason}"))?;
                flight.in_flight.remove(&nonce);
                Ok(())
            }
        }
    }

    /// Fills a nonce gap with no-ops, as the real relayer does. A gap arises when a chain lost its state, or refused a
    /// transaction in between; no other transaction would ever fill it.
    pub(super) async fn fill_gap(&self, signer: &Signer, flight: &Flight, chain_id: u64) -> Result<(), Stopped> {
        let Some((oldest, sent)) = flight.in_flight.first_key_value() else { return Ok(()) };
        if sent.sent_at.is_none() || signer.node.nonce_mined(signer.address).await? >= *oldest {
            return Ok(());
        }
        let next = signer.node.nonce_pending(signer.address).await?;
        for nonce in next..(*oldest).min(next.saturating_add(GAP_FILL_MAX)) {
            tracing::warn!(relayer = self.options.id, nonce, "a no-op fills a gap in the nonces");
            let no_op = signer.node.no_op(signer.address).await?.with_nonce(chain_id, nonce);
            let no_op = signer.key.sign(&no_op)?;
            if let Taken::Refused(reason) = signer.node.send(&no_op.raw).await? {
                tracing::warn!(relayer = self.options.id, nonce, reason, "the node refused a no-op");
                break;
            }
        }
        Ok(())
    }
}

impl Flight {
    /// The lowest nonce, with the number of its record.
    fn first(&self) -> Option<(u64, u64)> {
        self.in_flight.first_key_value().map(|(nonce, sent)| (*nonce, sent.number))
    }
}

impl InFlight {
    pub(super) fn new(number: u64) -> Self {
        Self { number, sent_at: None, refusals: 0, lost_checks: 0 }
    }

    fn is_due(&self) -> bool {
        self.sent_at.is_none_or(|at| at.elapsed() >= SEND_AGAIN_AFTER)
    }
}
