//! The threads that read. Each has one connection, and there are as many as reads may run at once: a runtime's pool for
//! blocking work starts another thread whenever a read follows at once on one that has just ended, and the memory that each
//! thread's allocator keeps adds up.

use std::io;
use std::sync::mpsc;

use rusqlite::Connection;

use super::read_stop::Read;
use super::{ConnectionRole, DatabaseError, DatabaseState, connect};

/// One thread and its connection. Dropped, its connection is closed and the thread ends.
pub(super) struct Reader {
    thread: Thread,
    /// `None` before its first read, and after one that failed.
    connection: Option<Connection>,
}

/// Takes reads, one at a time.
#[derive(Clone)]
pub(super) struct Thread(mpsc::Sender<Box<dyn FnOnce() + Send>>);

impl Thread {
    /// Runs this on the thread, after what it was given before.
    pub(super) fn run(&self, read: impl FnOnce() + Send + 'static) {
        // The thread ends only with its last sender: it is there.
        self.0.send(Box::new(read)).ok();
    }
}

impl Reader {
    pub(super) fn start() -> io::Result<Self> {
        let (sender, reads) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let run = move || reads.into_iter().for_each(|read| read());
        std::thread::Builder::new().name("sqlite-reader".into()).spawn(run)?;
        Ok(Self { thread: Thread(sender), connection: None })
    }

    pub(super) fn thread(&self) -> Thread {
        self.thread.clone()
    }

    /// Runs a job in one snapshot. If it fails or panics, its connection is dropped with the snapshot.
    pub(super) fn read<T>(
        &mut self,
        state: &DatabaseState,
        read: &Read,
        job: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>,
    ) -> Result<T, DatabaseError> {
        state.files.check()?;
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => connect(&state.path, ConnectionRole::Reader)?,
        };
        if !read.started(connection.get_interrupt_handle()) {
            self.connection = Some(connection);
            return Err(DatabaseError::Closed);
        }
        let transaction = connection.unchecked_transaction()?;
        let value = job(&transaction)?;
        transaction.commit()?;
        self.connection = Some(connection);
        Ok(value)
    }
}
