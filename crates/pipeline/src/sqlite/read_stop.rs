//! Stops a read whose caller has gone: a client that gives up must not keep a reader busy.

use std::sync::{Arc, Mutex};

use rusqlite::InterruptHandle;

use crate::lock::lock;

/// Where a read stands.
enum ReadState {
    Waiting,
    Running(InterruptHandle),
    Finished,
    /// Its caller is gone.
    Stopped,
}

/// The read's own side. Dropped at its end, also by a panic.
pub(super) struct Read(Arc<Mutex<ReadState>>);

/// The caller's side: dropping it stops the read.
pub(super) struct ReadStop(Arc<Mutex<ReadState>>);

pub(super) fn pair() -> (Read, ReadStop) {
    let state = Arc::new(Mutex::new(ReadState::Waiting));
    (Read(state.clone()), ReadStop(state))
}

impl Read {
    /// Records that the read runs on this connection; `false` if its caller is gone already.
    pub(super) fn started(&self, connection: InterruptHandle) -> bool {
        let mut state = lock(&self.0);
        if matches!(*state, ReadState::Stopped) {
            return false;
        }
        *state = ReadState::Running(connection);
        true
    }

    /// Records that the connection is no longer this read's.
    pub(super) fn finished(&self) {
        *lock(&self.0) = ReadState::Finished;
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        self.finished();
    }
}

impl Drop for ReadStop {
    fn drop(&mut self) {
        let mut state = lock(&self.0);
        match &*state {
            ReadState::Waiting => *state = ReadState::Stopped,
            // Under the lock, so that the connection is still this read's.
            ReadState::Running(connection) => connection.interrupt(),
            ReadState::Finished | ReadState::Stopped => {}
        }
    }
}
