//! Which relayer takes the next transaction, and which are skipped (pure): [`selection`] decides, `relayer_state` is what
//! it knows of each relayer, [`reports`] how it learns that, [`cap`] how much one may hold, [`jam`] whether it makes
//! progress, [`network`] whether it is on the right chain.

pub mod cap;
pub mod jam;
pub mod network;
mod relayer_state;
pub mod reports;
pub mod selection;

pub use self::jam::{ChainCounts, JamCause};
pub use self::network::{ChainId, WrongNetwork};
pub use self::reports::{ListReport, StatusReport};
pub use self::selection::{Choice, NoChoice, Reason, RelayerView, Router, Sent, Skipped};
