//! The files of a database: the directory is checked before the first use, and a database whose files are no longer in
//! their place is refused. SQLite keeps writing to a file that was deleted or replaced, and its data ends with the process.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::DatabaseError;

/// The files that a database had when it was opened.
#[derive(Debug)]
pub(super) struct OpenFiles {
    path: PathBuf,
    files: Vec<(PathBuf, FileId)>,
}

/// With less free space than this, the next write may be one too many. SQLite can find room for a small write in its log
/// where a larger one fails, so a small write that succeeds proves nothing.
const SPACE_MIN: u64 = 1024 * 1024;

/// Device and inode.
type FileId = (u64, u64);

impl OpenFiles {
    /// The main file and the write-ahead log, as they are now.
    pub(super) fn of(path: &Path) -> Result<Self, DatabaseError> {
        let fail = |source| DatabaseError::Io { path: path.to_owned(), source };
        let mut files = Vec::new();
        for file in [path.to_owned(), log_path(path)] {
            let id = file_id(&file).map_err(fail)?;
            files.push((file, id));
        }
        Ok(Self { path: path.to_owned(), files })
    }

    /// Fails if a file was deleted, moved or replaced. Costs one `stat` for each file.
    pub(super) fn check(&self) -> Result<(), DatabaseError> {
        let in_place = self.files.iter().all(|(file, id)| file_id(file).is_ok_and(|now| now == *id));
        if in_place { Ok(()) } else { Err(DatabaseError::Gone { path: self.path.clone() }) }
    }
}

/// Fails if there is no space for the next writes.
pub(super) fn check_space(path: &Path) -> Result<(), DatabaseError> {
    let disk =
        rustix::fs::statvfs(path).map_err(|error| DatabaseError::Io { path: path.to_owned(), source: error.into() })?;
    if disk.f_bavail.saturating_mul(disk.f_frsize) < SPACE_MIN { Err(DatabaseError::Full) } else { Ok(()) }
}

/// The write-ahead log of the database at `path`.
pub(super) fn log_path(path: &Path) -> PathBuf {
    let mut log = path.to_owned().into_os_string();
    log.push("-wal");
    log.into()
}

fn file_id(path: &Path) -> std::io::Result<FileId> {
    let file = std::fs::metadata(path)?;
    Ok((file.dev(), file.ino()))
}

/// Creates the directory and the file, for the owner alone, and checks that files can be created there. SQLite reports only
/// "unable to open database file" when it cannot create its log; this returns the operating system's error.
pub(super) fn prepare(path: &Path) -> Result<(), DatabaseError> {
    static PROBES: AtomicU64 = AtomicU64::new(0);
    let fail = |source| DatabaseError::Io { path: path.to_owned(), source };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(fail)?;
    let number = PROBES.fetch_add(1, Ordering::Relaxed);
    let probe = directory.join(format!(".writable-{}-{number}", std::process::id()));
    std::fs::write(&probe, b"").and_then(|()| std::fs::remove_file(&probe)).map_err(fail)?;
    // SQLite gives its log the permissions of the main file.
    OpenOptions::new().create(true).append(true).mode(0o600).open(path).map_err(fail)?;
    hide(path);
    Ok(())
}

/// Checks that the file is there; creates nothing.
pub(super) fn find(path: &Path) -> Result<(), DatabaseError> {
    std::fs::metadata(path).map_err(|source| DatabaseError::Io { path: path.to_owned(), source })?;
    Ok(())
}

/// Takes the files of an earlier version, which every user of the machine could read, away from all but owner and group.
/// The group stays: services that run as several users share files by it.
fn hide(path: &Path) {
    for file in [path.to_owned(), log_path(path)] {
        let Ok(found) = std::fs::metadata(&file) else { continue };
        let mode = found.mode();
        if mode & 0o007 != 0
            && let Err(error) = std::fs::set_permissions(&file, Permissions::from_mode(mode & 0o770))
        {
            tracing::warn!(%error, path = %file.display(), "every user of this machine can read the database");
        }
    }
}
