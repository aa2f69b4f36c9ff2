//! What every measurement needs around it: a temporary directory, rounds, progress messages, and a clean end on an
//! interrupt.

use std::path::{Path, PathBuf};

use anyhow::Context;
use tokio_util::sync::CancellationToken;

use crate::report::Report;

/// A directory that is removed on drop, and its parent with it if that is empty.
pub struct ScratchDirectory(PathBuf);

impl ScratchDirectory {
    /// Creates `NAME-PID` and the missing parents.
    pub fn create(parent: &Path, name: &str) -> anyhow::Result<Self> {
        let path = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
        if let Some(parent) = self.0.parent() {
            // Fails if another run uses it.
            std::fs::remove_dir(parent).ok();
        }
    }
}

/// One round of a measurement.
pub struct Round {
    /// Counted from 1.
    pub number: usize,
    total: usize,
}

impl Round {
    /// All rounds in order; at least one.
    pub fn all(total: usize) -> impl Iterator<Item = Self> {
        let total = total.max(1);
        (1..=total).map(move |number| Self { number, total })
    }

    pub fn progress(&self, step: impl std::fmt::Display) {
        progress(format_args!("round {} of {}: {step}", self.number, self.total));
    }
}

/// Prints to the error stream; standard output carries only the report.
pub fn progress(text: impl std::fmt::Display) {
    eprintln!("… {text}");
}

/// Drops the measurement on an interrupt, which kills its services.
pub async fn unless_interrupted(
    interrupted: CancellationToken,
    measure: impl Future<Output = anyhow::Result<Report>>,
) -> anyhow::Result<Report> {
    tokio::select! {
        measured = measure => measured,
        () = interrupted.cancelled() => Err(anyhow::anyhow!("interrupted")),
    }
}
