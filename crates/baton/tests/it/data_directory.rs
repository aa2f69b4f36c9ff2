//! The data directory of the embedded engine, under an operator's hands.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use harness::engine::TestEngine;
use serde_json::Value;

use crate::relay_fixture::{RelaySetup, SOON, baton, serial_body};

async fn run<const N: usize>(args: [&str; N], env: &BTreeMap<String, String>) -> (i32, String) {
    let mut process = baton(args, env).start().unwrap();
    let status = process.wait_exit(SOON).await.unwrap();
    (status.code().unwrap_or(-1), process.output())
}

fn data_dir(path: &Path) -> BTreeMap<String, String> {
    BTreeMap::from([("BATON_DATA_DIR".to_owned(), path.display().to_string())])
}

/// The embedded engine, whatever the other tests run on: only it has a data directory.
fn embedded() -> RelaySetup {
    RelaySetup::relayers(1).engine(TestEngine::Embedded)
}

#[tokio::test]
async fn nothing_is_accepted_into_a_deleted_data_directory() {
    let relay = embedded().start().await;
    let directory = relay.env["BATON_DATA_DIR"].clone();
    relay.send_serial(1).await;
    for entry in std::fs::read_dir(&directory).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    for serial in 2..30 {
        let (status, body) = relay.post(&serial_body(serial)).await;
        assert_eq!(status, 503, "the next process would not find it: {body}");
    }
    let health = assert_not_ready(&relay).await;
    assert_eq!(health["parts"]["store"]["reason"], "the database file was deleted or replaced", "{health}");
    assert_eq!(health["parts"]["queue"]["status"], "unavailable", "{health}");
    assert!(!Path::new(&directory).join("baton.db").exists(), "no empty file stands in for the deleted one");

    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(relay.post(&serial_body(30)).await.0, 503);
    assert_not_ready(&relay).await;
}

async fn assert_not_ready(relay: &crate::relay_fixture::RelayFixture) -> Value {
    assert_eq!(relay.get("/ready").await.0, 503);
    let (status, health) = relay.get("/health").await;
    assert_eq!((status, &health["status"]), (503, &Value::from("degraded")), "{health}");
    health
}

/// Commands that read, each with the name of its lane's file.
const READING: [([&str; 4], &str); 4] = [
    (["dlq", "list", "--lane", "relay"], "baton.db"),
    (["dlq", "list", "--lane", "users"], "users.db"),
    (["dlq", "show", "some-id", "--lane=relay"], "baton.db"),
    (["tx", "show", "00000000-0000-7000-8000-000000000000", "--json"], "baton.db"),
];

#[tokio::test]
async fn reading_commands_create_and_migrate_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("data");
    let env = data_dir(&directory);
    for (command, _) in READING {
        let (code, output) = run(command, &env).await;
        assert!(code == 1 && output.contains("no data in") && output.contains("migrate"), "{command:?}: {output}");
        assert!(!directory.exists(), "{command:?} created the directory");
    }
    assert_eq!(run(["migrate"], &env).await.0, 0);
    for (name, table) in [("baton.db", "schema_version"), ("users.db", "users_schema_version")] {
        let file = rusqlite::Connection::open(directory.join(name)).unwrap();
        file.execute(&format!("DELETE FROM {table} WHERE version = (SELECT MAX(version) FROM {table})"), []).unwrap();
    }
    for (command, file) in READING {
        let (code, output) = run(command, &env).await;
        assert!(code == 1 && output.contains("baton migrate"), "{command:?}: {output}");
        let table = if file == "baton.db" { "schema_version" } else { "users_schema_version" };
        let version = version(&directory.join(file), table);
        assert!(version.is_none_or(|version| version < newest(file)), "{command:?} migrated {file}");
    }
}

#[tokio::test]
async fn a_schema_newer_than_the_program_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let env = data_dir(directory.path());
    assert_eq!(run(["migrate"], &env).await.0, 0);
    for (file, table, command) in [
        ("baton.db", "schema_version", ["dlq", "list", "--lane", "relay"]),
        ("users.db", "users_schema_version", ["dlq", "list", "--lane", "users"]),
    ] {
        let connection = rusqlite::Connection::open(directory.path().join(file)).unwrap();
        connection.execute(&format!("INSERT INTO {table} (version, applied_at) VALUES (1000, 0)"), []).unwrap();
        for (code, output) in [run(["migrate"], &env).await, run(command, &env).await] {
            assert!(code == 1 && output.contains("1000") && output.contains("newer version of baton"), "{output}");
        }
        connection.execute(&format!("DELETE FROM {table} WHERE version = 1000"), []).unwrap();
        assert_eq!(run(command, &env).await.0, 0);
    }
}

fn version(file: &Path, table: &str) -> Option<i64> {
    let connection = rusqlite::Connection::open(file).unwrap();
    connection.query_row(&format!("SELECT MAX(version) FROM {table}"), [], |row| row.get(0)).unwrap()
}

/// The version that `migrate` makes of an empty file.
fn newest(file: &str) -> i64 {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations/sqlite");
    let of_users = |name: &str| name.contains("users");
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| of_users(name) == (file == "users.db")).count() as i64
}

#[tokio::test]
async fn only_the_owner_can_read_the_data() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("data");
    let env = data_dir(&directory);
    assert_eq!(run(["migrate"], &env).await.0, 0);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    for name in ["baton.db", "users.db"] {
        assert_eq!(mode(&directory.join(name)), 0o600, "{name}");
    }
    // As an earlier version left it.
    std::fs::set_permissions(directory.join("users.db"), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(run(["migrate"], &env).await.0, 0);
    assert_eq!(mode(&directory.join("users.db")), 0o640);

    let relay = embedded().start().await;
    relay.send_serial(1).await;
    for entry in std::fs::read_dir(&relay.env["BATON_DATA_DIR"]).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
}

#[tokio::test]
async fn a_clean_stop_leaves_files_that_can_be_copied_alone() {
    let mut relay = embedded().start().await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    relay.api.sigterm().unwrap();
    assert_eq!(relay.api.wait_exit(SOON).await.unwrap().code(), Some(0));
    let directory = Path::new(&relay.env["BATON_DATA_DIR"]);
    for command in [["dlq", "list"], ["tx", "unknown"]] {
        assert_no_logs(directory);
        let (code, output) = run(command, &relay.env).await;
        assert_eq!(code, 0, "{output}");
    }
    assert_no_logs(directory);
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::copy(directory.join("baton.db"), elsewhere.path().join("baton.db")).unwrap();
    let (code, output) = run(["tx", "show", &id], &data_dir(elsewhere.path())).await;
    assert!(code == 0 && output.contains("confirmed"), "{output}");
}

fn assert_no_logs(directory: &Path) {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let logs: Vec<_> = names.filter(|name| name.ends_with("-wal") || name.ends_with("-shm")).collect();
    assert!(logs.is_empty(), "{logs:?}");
}
