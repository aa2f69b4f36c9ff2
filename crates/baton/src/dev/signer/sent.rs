//! What a development relayer sent to its chain: again until it is mined, and told when it is.
//!
//! There are two ways out of a nonce: a receipt, or the proof that another transaction has used it up (somebody else
//! signs with this key), after which the record gets another one.

use std::time::{Duration, Instant};

use super::{Desk, InFlight, PLAYGROUNDS, Signer, Stopped};
use crate::dev::{
    node::{Mined, Offer, Taken, sign},
    record::{Record, Status, now},
    relayer::Relayer,
    signed::{OnChain, Signed},
};

/// When what was sent and is not mined is sent again: the node may have been started anew and know nothing of it.
const SEND_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// How often a node may refuse a transaction that it never had before it is given up.
const REFUSALS_MAX: u32 = 5;
/// How often, so long apart, a nonce must be found used without a receipt: a node may be slow to show one, most of all
/// one that is many behind one address.
const LOST_LOOKS: u32 = 15;
const LOST_LOOKS_PLAYGROUND: u32 = 3;
/// No-ops sent at once to fill the nonces that a chain has forgotten.
const GAP_FILL_MAX: u64 = 100;

impl Relayer {
    /// Tells the end of what was mined. Nonces are mined in order, so the first without a receipt is the last to ask for.
    pub(super) async fn settle(&self, signer: &Signer, desk: &mut Desk) -> Result<(), Stopped> {
        while let Some((nonce, number)) = desk.first() {
            let Some((record, signed)) = self.signed(number) else {
                desk.in_flight.remove(&nonce);
                continue;
            };
            let Some(mined) = signer.node.mined(signed.hash).await? else { break };
            self.tell_end(signer, &record, &signed, mined).await?;
            desk.in_flight.remove(&nonce);
        }
        Ok(())
    }

    async fn tell_end(&self, signer: &Signer, record: &Record, signed: &Signed, mined: Mined) -> Result<(), Stopped> {
        let Mined { well, block } = mined;
        if well {
            return self.advance(record, |chain| chain.confirmed(now())).await;
        }
        let why = signer.node.revert_reason(signer.address, &record.request, signed, block.unwrap_or(1)).await?;
        let mut reason = "Transaction reverted on-chain (receipt status: failed)".to_owned();
        if let Some(why) = why {
            reason = format!("{reason}: {why}");
        }
        self.advance(record, |chain| chain.failed(reason)).await
    }

    /// Sends what the chain should have and perhaps has not.
    pub(super) async fn send_due(&self, signer: &Signer, desk: &mut Desk) -> Result<(), Stopped> {
        let due: Vec<u64> = desk.in_flight.iter().filter(|(_, sent)| sent.is_due()).map(|(nonce, _)| *nonce).collect();
        for nonce in due {
            self.send_one(signer, desk, nonce).await?;
        }
        Ok(())
    }

    pub(super) async fn send_one(&self, signer: &Signer, desk: &mut Desk, nonce: u64) -> Result<(), Stopped> {
        let Some(sent) = desk.in_flight.get_mut(&nonce) else { return Ok(()) };
        let Some((record, signed)) = self.signed(sent.number) else { return Ok(()) };
        let taken = signer.node.send(&signed.raw).await?;
        sent.sent_at = Some(Instant::now());
        match taken {
            Taken::Yes => self.advance(&record, OnChain::submitted).await,
            Taken::NonceUsed => {
                // In this order: a nonce that is used and a receipt that is not there, not the other way round.
                let used = signer.node.nonce_mined(signer.address).await? > nonce;
                let ours = signer.node.mined(signed.hash).await?.is_some();
                sent.lost_looks = if used && !ours { sent.lost_looks + 1 } else { 0 };
                let playground = PLAYGROUNDS.contains(&signed.chain_id);
                if sent.lost_looks >= if playground { LOST_LOOKS_PLAYGROUND } else { LOST_LOOKS } {
                    tracing::warn!(
                        relayer = self.identity.id, record = %record.id, nonce,
                        "somebody else used this nonce; the transaction gets another"
                    );
                    desk.in_flight.remove(&nonce);
                    self.book().unsigned.insert(record.number);
                }
                Ok(())
            }
            Taken::NotNow(word) => {
                tracing::warn!(relayer = self.identity.id, record = %record.id, nonce, word, "the node does not take it yet");
                Ok(())
            }
            // A node that had it before does not prove by a refusal that it is gone.
            Taken::Refused(_) if record.status_at(0) > Status::Sent => Ok(()),
            Taken::Refused(word) => {
                sent.refusals += 1;
                if sent.refusals < REFUSALS_MAX {
                    return Ok(());
                }
                // Nobody has these bytes, and something else will use the nonce: see `fill_gap`.
                self.advance(&record, |chain| chain.failed(format!("The node refused it: {word}"))).await?;
                desk.in_flight.remove(&nonce);
                Ok(())
            }
        }
    }

    /// A chain that lost its memory counts from below what was signed; so does one that refused something in between. No
    /// other transaction will ever fill such a gap, so no-ops do, as at the real one.
    pub(super) async fn fill_gap(&self, signer: &Signer, desk: &Desk, chain_id: u64) -> Result<(), Stopped> {
        let Some((oldest, sent)) = desk.in_flight.first_key_value() else { return Ok(()) };
        if sent.sent_at.is_none() || signer.node.nonce_mined(signer.address).await? >= *oldest {
            return Ok(());
        }
        let next = signer.node.nonce_pending(signer.address).await?;
        for nonce in next..(*oldest).min(next.saturating_add(GAP_FILL_MAX)) {
            tracing::warn!(relayer = self.identity.id, nonce, "a no-op fills a gap in the nonces");
            let no_op =
                sign(&signer.wallet, chain_id, nonce, Offer::no_op(&signer.node, signer.address).await?).await?;
            if let Taken::Refused(word) = signer.node.send(&no_op.raw).await? {
                tracing::warn!(relayer = self.identity.id, nonce, word, "the node refused a no-op");
                break;
            }
        }
        Ok(())
    }
}

impl Desk {
    /// The lowest nonce, and whose it is.
    fn first(&self) -> Option<(u64, u64)> {
        self.in_flight.first_key_value().map(|(nonce, sent)| (*nonce, sent.number))
    }
}

impl InFlight {
    pub(super) fn new(number: u64) -> Self {
        Self { number, sent_at: None, refusals: 0, lost_looks: 0 }
    }

    fn is_due(&self) -> bool {
        self.sent_at.is_none_or(|at| at.elapsed() >= SEND_AGAIN_AFTER)
    }
}
