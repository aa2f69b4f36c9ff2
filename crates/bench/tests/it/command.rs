//! Runs the benchmark's binary and reads its report.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Once;

use serde_json::Value;

/// The benchmark with a data directory inside `data`, JSON output and an otherwise empty environment.
pub fn bench(data: &tempfile::TempDir, args: &[&str]) -> Command {
    build_product();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(args).arg("--json").arg("--data-dir").arg(data.path().join("bench")).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// `cargo test --workspace` builds the binary of `baton` for the product's own tests; `cargo test -p bench` does not.
fn build_product() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let own = Path::new(env!("CARGO_BIN_EXE_bench"));
        let profile_directory = own.parent().unwrap();
        if own.with_file_name("baton").is_file() {
            return;
        }
        let mut command = Command::new(env!("CARGO"));
        command.args(["build", "--package", "baton", "--target-dir"]).arg(profile_directory.parent().unwrap());
        if profile_directory.ends_with("release") {
            command.arg("--release");
        }
        assert!(command.status().unwrap().success(), "building the product failed");
    });
}

pub async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap()
}

/// The report has this figure, its value is positive, and there is a target.
pub fn assert_figure(output: &Output, name: &str) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let found = figures.iter().find(|figure| figure["name"] == name).unwrap_or_else(|| panic!("{report:#}"));
    assert!(found["value"].as_f64().unwrap() > 0.0, "{report:#}");
    assert!(!report["targets"].as_array().unwrap().is_empty());
}
