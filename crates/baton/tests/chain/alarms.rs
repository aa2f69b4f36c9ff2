//! What becomes an alarm only after a minute. The name puts it before the other tests of this target, so that they run while
//! it waits.

use harness::relayer::Outcome;
use serde_json::json;

use crate::misled_fixture::Misled;

/// A node may be a minute behind the relayer's; only then is it an alarm.
#[tokio::test]
async fn a_confirmation_that_the_chain_does_not_have_for_a_minute_is_an_alarm_and_an_unknown_outcome() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::Confirmed);
    let (id, relayer) = misled.send(13).await;
    let unknown = misled.until(&id, "an unknown outcome", |status| status["outcomeUnknown"] == json!(true)).await;
    assert_eq!(unknown["status"], "submitted");
    assert_eq!(misled.relay.metric("baton_unfounded_confirmations_total", "").await, 1.0);
    misled.execute(relayer, 13).await;
    misled.finalise().await;
    misled.relay.until_status(&id, "confirmed").await;
}
