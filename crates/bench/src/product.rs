//! The binary under test: `baton`, from the same target directory and profile as this benchmark.
//!
//! Under `cargo run` the benchmark first builds it, so that it never measures an older product than the tree holds.
//! Started without cargo, it uses the `baton` beside its own executable. `BATON_BIN` names another one.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// Names a `baton` binary to measure instead, for example an installed one.
const BINARY_VARIABLE: &str = "BATON_BIN";

/// Builds the product if cargo started this process, and checks that the binary exists.
pub fn prepare() -> anyhow::Result<()> {
    let binary = binary()?;
    if std::env::var_os(BINARY_VARIABLE).is_none()
        && let Some(cargo) = std::env::var_os("CARGO")
    {
        build(cargo.as_ref(), &binary)?;
    }
    ensure!(
        binary.is_file(),
        "there is no {}: build it with `{}`, or name another binary in {BINARY_VARIABLE}",
        binary.display(),
        build_command(&binary).join(" ")
    );
    Ok(())
}

/// Path of the product's binary.
pub fn binary() -> anyhow::Result<PathBuf> {
    match std::env::var_os(BINARY_VARIABLE) {
        Some(path) => Ok(path.into()),
        None => {
            let own = std::env::current_exe().context("the path of this executable is unknown")?;
            Ok(own.with_file_name("baton"))
        }
    }
}

fn build(cargo: &Path, binary: &Path) -> anyhow::Result<()> {
    // `target/release/baton` and, with `--target`, `target/x86_64-unknown-linux-gnu/release/baton`.
    let target_dir = binary.ancestors().nth(2).context("this executable is not in a target directory")?;
    let [_, arguments @ ..] = build_command(binary);
    let mut command = Command::new(cargo);
    command.args(arguments).arg("--target-dir").arg(target_dir).current_dir(env!("CARGO_MANIFEST_DIR"));
    let status = command.status().with_context(|| format!("cannot run {}", cargo.display()))?;
    ensure!(status.success(), "building the product failed: {status}");
    Ok(())
}

/// The cargo command whose output is `binary`: cargo names the directory after the profile, but for `dev`.
fn build_command(binary: &Path) -> [&str; 6] {
    let directory = binary.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let profile = directory.filter(|name| *name != "debug").unwrap_or("dev");
    ["cargo", "build", "--package", "baton", "--profile", profile]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_is_that_of_the_directory() {
        let profile = |path| build_command(Path::new(path))[5].to_owned();
        assert_eq!(profile("/src/target/debug/baton"), "dev");
        assert_eq!(profile("/src/target/release/baton"), "release");
        assert_eq!(profile("/src/target/dist/baton"), "dist");
    }
}
