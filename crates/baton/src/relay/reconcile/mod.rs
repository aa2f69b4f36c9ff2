//! Rows that are stuck: periodic sweeps, unknown outcomes and the proof of absence that settles them.

pub mod absence_proof;
pub mod dead_letters;
pub mod sweeps;
pub mod unknown_outcomes;
