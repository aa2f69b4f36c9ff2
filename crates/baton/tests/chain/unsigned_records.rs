//! Records that their relayer canceled or lost before it signed them, as far as it says. They are sent again only once the
//! chain shows that nothing of them can still be executed.

use harness::relayer::Outcome;
use harness::wait::eventually;

use crate::misled_fixture::Misled;
use crate::relay_fixture::{LATER, SOON, serial_body, serial_data};

/// Call data of a transaction at a relayer that is not Baton's.
const FOREIGN: &str = "0xbeef";

impl Misled {
    /// Sends one through this relayer; returns its id once the relayer has its record.
    async fn send_through(&self, relayer: usize, serial: usize) -> String {
        self.pause(1 - relayer, true).await;
        let id = self.relay.send(&serial_body(serial)).await;
        self.until_taken(relayer, serial).await;
        id
    }

    /// Pauses a relayer, or lets it go on, and waits until Baton knows.
    async fn pause(&self, relayer: usize, paused: bool) {
        self.relay.relayers[relayer].change_faults(|faults| faults.paused = paused);
        self.relay.until_relayer(relayer, if paused { "paused" } else { "ok" }).await;
    }

    /// How often this relayer has accepted the call.
    fn taken(&self, relayer: usize, serial: usize) -> usize {
        let accepted = self.relay.relayers[relayer].accepted();
        accepted.iter().filter(|accepted| accepted.field("data") == serial_data(serial)).count()
    }

    async fn until_taken(&self, relayer: usize, serial: usize) {
        eventually(LATER, format!("relayer {relayer} to take {serial}"), || async {
            (self.taken(relayer, serial) == 1).then_some(())
        })
        .await;
    }

    /// Has the relayer sign a transaction that no row of Baton makes, and that does not reach the chain.
    async fn sign_foreign(&self, relayer: usize) {
        let id = self.relay.post_at_relayer(relayer, FOREIGN).await;
        eventually(SOON, "it to be signed", || async { self.relay.relayers[relayer].record(&id)?.nonce }).await;
    }

    /// Baton's own records get no job; others are signed and stay open.
    fn never_sign_ours(&self) {
        for relayer in &self.relay.relayers {
            relayer.set_outcome_rule(|request| {
                Some(if request["data"] == FOREIGN { Outcome::Stuck } else { Outcome::WithoutJob })
            });
        }
    }
}

/// The relayer signed it while it canceled it.
#[tokio::test]
async fn a_canceled_record_is_confirmed_if_the_chain_has_its_call() {
    let misled = Misled::start(true).await;
    misled.never_sign_ours();
    let id = misled.send_through(0, 30).await;
    misled.pause(1, false).await;
    let receipt = misled.execute(0, 30).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    misled.until_timeline(&id, "cancel-requested").await;
    assert_eq!(end["hash"], receipt.transaction_hash.to_string(), "{end}");
    assert_eq!((misled.taken(0, 30), misled.taken(1, 30)), (1, 0), "not sent again");
}

/// The relayer may have signed it under a nonce that it does not tell.
#[tokio::test]
async fn a_canceled_record_is_not_sent_again_while_a_nonce_of_its_relayer_lacks_an_owner() {
    let misled = Misled::start(true).await;
    misled.never_sign_ours();
    misled.sign_foreign(0).await;
    let id = misled.send_through(0, 31).await;
    misled.pause(1, false).await;
    misled.until_timeline(&id, "nonce 0 of the relayer is signed and not mined").await;
    misled.until_timeline(&id, "cancel-requested").await;
    misled.assert_stays_open(&id).await;
    assert_eq!(misled.taken(1, 31), 0, "not sent again");
    misled.use_nonce(0).await;
    misled.finalise().await;
    misled.until_taken(1, 31).await;
    misled.until_timeline(&id, "the relayer has canceled it unsigned and the chain does not have it").await;
}

/// Both relayers lose a record. One of them has signed something since the claim that no row accounts for.
#[tokio::test]
async fn a_record_that_its_relayer_lost_is_sent_again_unless_a_nonce_there_lacks_an_owner() {
    let misled = Misled::start(true).await;
    misled.never_sign_ours();
    misled.sign_foreign(0).await;
    let waits = misled.send_through(0, 32).await;
    misled.pause(1, false).await;
    let goes_on = misled.send_through(1, 33).await;
    misled.pause(0, false).await;
    for (relayer, id) in [(0, &waits), (1, &goes_on)] {
        misled.relay.relayers[relayer].forget();
        misled.until_timeline(id, "forgotten").await;
    }
    // Forgotten later than the other one: whatever has to pass has passed for both.
    misled.until_taken(0, 33).await;
    misled.until_timeline(&goes_on, "the relayer has lost it and the chain does not have it").await;
    misled.assert_stays_open(&waits).await;
    assert_eq!(misled.taken(1, 32), 0, "not sent again");
    misled.use_nonce(0).await;
    misled.finalise().await;
    misled.until_taken(1, 32).await;
}
