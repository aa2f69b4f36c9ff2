//! Rows that are stuck. Where to look:
//!
//! | question | file |
//! |---|---|
//! | When is a row checked, and queued again? | [`sweeps`] |
//! | What happens to a claim whose consumer died, or whose outcome is unknown? | [`unknown_outcomes`] |
//! | Does a relayer's list prove itself? | [`relayer_list`] |
//! | What does a relayer's list prove? | [`absence_proof`]; absence counts after a second listing: `Transaction::absent` |
//! | What does the chain prove, against a relayer's word? | [`chain_proof`]; [`chain_check`] asks and acts |
//! | Which of two equal calls is on the chain? | [`chain_owners`] |
//! | Which dead letters are put back? | [`dead_letter_sweep`] |
//! | What can an operator do with a dead letter? | [`dead_letters`] |

pub mod absence_proof;
pub mod chain_check;
pub mod chain_owners;
pub mod chain_proof;
pub mod dead_letter_sweep;
pub mod dead_letters;
pub mod relayer_list;
pub mod sweeps;
pub mod unknown_outcomes;

#[cfg(test)]
mod tests;
