//! Requests that clients were promised, compared with what the relayers accepted.
//!
//! A key connects the two: something that the test put into the transaction and that reaches the relayer unchanged,
//! such as a serial number inside `data`. The relayers do not know our ids.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
};

use crate::relayer::{Accepted, Relayer};

/// Rows of each kind in a failure message.
const ROWS_SHOWN: usize = 20;

/// The result of a comparison. `Display` is a table.
#[derive(Clone, Debug, Default)]
pub struct EffectLedger {
    /// Keys that were promised and accepted exactly once.
    pub once: usize,
    /// Promised but accepted by no relayer: the promised id and the key.
    pub lost: Vec<(String, String)>,
    /// Accepted more than once: the key and every effect.
    pub duplicates: Vec<(String, Vec<Effect>)>,
    /// Accepted but never promised: the key and every effect.
    pub extras: Vec<(String, Vec<Effect>)>,
    /// Number of records accepted by each relayer.
    pub per_relayer: BTreeMap<String, usize>,
}

/// One record that a relayer accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The relayer's id.
    pub relayer: String,
    /// The record's id there.
    pub record: String,
    /// How often the chain got it.
    pub broadcasts: u32,
}

impl EffectLedger {
    /// Compares `promised` (our id, key) with everything the relayers accepted.
    pub fn compare<'a, I, K>(promised: I, relayers: impl IntoIterator<Item = &'a Relayer>, key: K) -> Self
    where
        I: IntoIterator<Item = (String, String)>,
        K: Fn(&Accepted) -> String,
    {
        let mut ledger = Self::default();
        let mut accepted_by_key: BTreeMap<String, Vec<Effect>> = BTreeMap::new();
        for relayer in relayers {
            let accepted = relayer.accepted();
            ledger.per_relayer.insert(relayer.id().to_owned(), accepted.len());
            for record in accepted {
                accepted_by_key.entry(key(&record)).or_default().push(Effect {
                    relayer: record.relayer_id,
                    record: record.id,
                    broadcasts: record.broadcasts,
                });
            }
        }
        for (id, key) in promised {
            match accepted_by_key.remove(&key) {
                None => ledger.lost.push((id, key)),
                Some(effects) if effects.len() == 1 => ledger.once += 1,
                Some(effects) => ledger.duplicates.push((key, effects)),
            }
        }
        ledger.extras.extend(accepted_by_key);
        ledger
    }

    /// Whether everything promised was accepted once, and nothing else was.
    pub fn is_exactly_once(&self) -> bool {
        self.lost.is_empty() && self.is_at_most_once()
    }

    /// Whether nothing was accepted twice or without a promise. Promised requests may still be under way.
    pub fn is_at_most_once(&self) -> bool {
        self.duplicates.is_empty() && self.extras.is_empty()
    }

    /// # Panics
    /// With the table, unless everything promised was accepted exactly once.
    #[track_caller]
    pub fn assert_exactly_once(&self) {
        assert!(self.is_exactly_once(), "not exactly once:\n{self}");
    }

    /// # Panics
    /// With the table, if anything was accepted twice or without a promise.
    #[track_caller]
    pub fn assert_at_most_once(&self) {
        assert!(self.is_at_most_once(), "more than once, or never promised:\n{self}");
    }
}

impl Display for EffectLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lost, duplicates, extras) = (self.lost.len(), self.duplicates.len(), self.extras.len());
        writeln!(f, "  once {}   lost {lost}   duplicates {duplicates}   extras {extras}", self.once)?;
        for (relayer, count) in &self.per_relayer {
            writeln!(f, "  accepted by {relayer:<14} {count}")?;
        }
        for (id, key) in self.lost.iter().take(ROWS_SHOWN) {
            writeln!(f, "  lost       id {id}  key {key}")?;
        }
        for (kind, rows) in [("duplicate", &self.duplicates), ("extra", &self.extras)] {
            for (key, effects) in rows.iter().take(ROWS_SHOWN) {
                writeln!(f, "  {kind:<10} key {key}")?;
                for effect in effects {
                    let Effect { relayer, record, broadcasts } = effect;
                    writeln!(f, "             at {relayer:<14} record {record}  broadcasts {broadcasts}")?;
                }
            }
        }
        if lost.max(duplicates).max(extras) > ROWS_SHOWN {
            writeln!(f, "  (only the first {ROWS_SHOWN} of each kind are shown)")?;
        }
        Ok(())
    }
}
