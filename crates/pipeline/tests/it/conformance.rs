//! The contract on the backends that need no server.

use pipeline::QueueOptions;
use pipeline::queue::memory::MemoryQueue;
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::testing::{Profile, Subject};

async fn memory_queue(options: QueueOptions) -> Subject {
    Subject::new(MemoryQueue::new("test", options))
}

async fn sqlite_queue(options: QueueOptions) -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let db = Database::open(&dir.path().join("test.db")).unwrap();
    Subject::new(SqliteQueue::open(&db, "test", options).await.unwrap()).keeping(dir)
}

pipeline::queue_conformance!(memory, Profile::fast(), memory_queue);
pipeline::queue_conformance!(sqlite, Profile::fast(), sqlite_queue);
