//! A transaction, its legal moves and the meaning of a relayer's report (pure), and the message that points to it.

pub mod apply_report;
pub mod event;
pub mod false_failure;
pub mod message;
pub mod moves;
pub mod operator_moves;
pub mod silence;
pub mod transaction;
