//! Which relayer takes the next transaction, and which are skipped (pure): [`selection`] decides, `relayer_state` is what
//! it knows of each relayer.

mod relayer_state;
pub mod selection;

pub use self::selection::{Choice, HealthReport, NoChoice, Reason, RelayerView, Router, Sent};
