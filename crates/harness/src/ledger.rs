//! The books: what clients were promised against what the relayers really took.
//!
//! A key ties the two together. It must be something the test put into the transaction and that reaches the relayer
//! unchanged, such as a serial number inside `data`; the relayers know nothing of our ids.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
};

use crate::relayer::{Accepted, Relayer};

/// How many rows of each kind a failure message shows.
const ROWS_SHOWN: usize = 20;

/// The outcome of a comparison. `Display` is a readable table.
#[derive(Clone, Debug, Default)]
pub struct Books {
    /// Keys that were promised and taken exactly once.
    pub once: usize,
    /// Promised, taken by nobody: the promised id and the key.
    pub lost: Vec<(String, String)>,
    /// Taken more than once: the key and every taking.
    pub duplicates: Vec<(String, Vec<Effect>)>,
    /// Taken although nobody was promised it: the key and every taking.
    pub extras: Vec<(String, Vec<Effect>)>,
    /// How much each relayer took.
    pub per_relayer: BTreeMap<String, usize>,
}

/// One taking: a relayer accepted a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The relayer's id.
    pub relayer: String,
    /// The record's id there.
    pub record: String,
    /// How often it was sent to the chain.
    pub broadcasts: u32,
}

impl Books {
    /// Compares `promised` (our id, key) with everything the relayers accepted.
    pub fn compare<'a, I, K>(promised: I, relayers: impl IntoIterator<Item = &'a Relayer>, key: K) -> Self
    where
        I: IntoIterator<Item = (String, String)>,
        K: Fn(&Accepted) -> String,
    {
        let mut books = Self::default();
        let mut taken: BTreeMap<String, Vec<Effect>> = BTreeMap::new();
        for relayer in relayers {
            let accepted = relayer.accepted();
            books.per_relayer.insert(relayer.id().to_owned(), accepted.len());
            for record in accepted {
                taken.entry(key(&record)).or_default().push(Effect {
                    relayer: record.relayer_id,
                    record: record.id,
                    broadcasts: record.broadcasts,
                });
            }
        }
        for (id, key) in promised {
            match taken.remove(&key) {
                None => books.lost.push((id, key)),
                Some(effects) if effects.len() == 1 => books.once += 1,
                Some(effects) => books.duplicates.push((key, effects)),
            }
        }
        books.extras.extend(taken);
        books
    }

    /// Whether everything promised was taken once and nothing else was.
    pub fn is_exactly_once(&self) -> bool {
        self.lost.is_empty() && self.is_at_most_once()
    }

    /// Whether nothing was taken twice or unasked. What was promised may still be under way.
    pub fn is_at_most_once(&self) -> bool {
        self.duplicates.is_empty() && self.extras.is_empty()
    }

    /// # Panics
    /// With the table, unless everything promised was taken exactly once.
    #[track_caller]
    pub fn assert_exactly_once(&self) {
        assert!(self.is_exactly_once(), "not exactly once:\n{self}");
    }

    /// # Panics
    /// With the table, if anything was taken twice or unasked.
    #[track_caller]
    pub fn assert_at_most_once(&self) {
        assert!(self.is_at_most_once(), "more than once, or unasked:\n{self}");
    }
}

impl Display for Books {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lost, duplicates, extras) = (self.lost.len(), self.duplicates.len(), self.extras.len());
        writeln!(f, "  once {}   lost {lost}   duplicates {duplicates}   extras {extras}", self.once)?;
        for (relayer, count) in &self.per_relayer {
            writeln!(f, "  taken by {relayer:<14} {count}")?;
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
