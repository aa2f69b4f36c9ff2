//! The binary: parse, then call one command. Everything else is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    baton::cli::main()
}
