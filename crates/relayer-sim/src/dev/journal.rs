//! The records of a development relayer on disk: one line for each change, the last line of a record counts.
//!
//! A line is written before its POST is answered. It survives the end of the process, but perhaps not a power failure.
//! The file is compacted at each start.

use std::{
    collections::BTreeMap,
    fs::{DirBuilder, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use super::stored::StoredRecord;

pub(crate) struct Journal(Mutex<File>);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Record(Box<StoredRecord>),
    /// The final webhook of this record is delivered or given up.
    Notified(u64),
}

/// By number, with whether the final webhook is done.
pub(crate) type Loaded = BTreeMap<u64, (StoredRecord, bool)>;

impl Journal {
    /// Reads the file, which may be missing, and drops all but the newest `notified_max` records whose final webhook is done.
    pub(crate) fn open(path: &Path, notified_max: usize) -> io::Result<(Self, Loaded)> {
        if let Some(directory) = path.parent() {
            // For the owner alone, as the data that may be beside it.
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let mut loaded = load(path)?;
        let notified: Vec<u64> =
            loaded.iter().filter(|(_, (_, notified))| *notified).map(|(number, _)| *number).collect();
        for number in &notified[..notified.len().saturating_sub(notified_max)] {
            loaded.remove(number);
        }
        let compacted = path.with_extension("new");
        let mut file =
            BufWriter::new(OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&compacted)?);
        for (number, (stored, notified)) in &loaded {
            write_line(&mut file, "record", stored)?;
            if *notified {
                write_line(&mut file, "notified", number)?;
            }
        }
        file.into_inner()?;
        std::fs::rename(&compacted, path)?;
        Ok((Self(Mutex::new(OpenOptions::new().append(true).open(path)?)), loaded))
    }

    /// Writes a record, or its new state.
    pub(crate) fn write(&self, stored: &StoredRecord) -> io::Result<()> {
        write_line(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), "record", stored)
    }

    /// Marks the final webhook of a record as done.
    pub(crate) fn mark_notified(&self, number: u64) -> io::Result<()> {
        write_line(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), "notified", &number)
    }
}

fn write_line(file: &mut impl Write, kind: &str, value: &impl Serialize) -> io::Result<()> {
    // In one call, so that a killed process leaves whole lines; on a line of its own even after a write that broke off.
    file.write_all(format!("\n{{\"{kind}\":{}}}\n", serde_json::to_string(value)?).as_bytes())
}

pub(super) fn load(path: &Path) -> io::Result<Loaded> {
    let mut loaded = Loaded::new();
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(loaded),
        file => file?,
    };
    for line in BufReader::new(file).lines() {
        let line = line?;
        if line.is_empty() {
            continue;
        }
        match serde_json::from_str(&line) {
            Ok(Line::Record(stored)) => drop(loaded.insert(stored.number, (*stored, false))),
            Ok(Line::Notified(number)) => {
                if let Some((_, notified)) = loaded.get_mut(&number) {
                    *notified = true;
                }
            }
            Err(error) => tracing::warn!(%error, "a line of a development relayer's journal is left out"),
        }
    }
    Ok(loaded)
}
