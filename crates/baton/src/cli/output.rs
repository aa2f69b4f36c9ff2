//! What commands print. A reader that goes away (`| head -1`) ends a command quietly; output that cannot be written is an
//! error. `println!` and `eprintln!` panic in both cases.

use std::fmt;
use std::io::{self, Write};

/// Standard output could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the output")]
pub struct OutputError(#[source] io::Error);

impl OutputError {
    /// Whether the reader has seen enough and closed its end.
    pub fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Writes to standard output.
pub fn print(text: fmt::Arguments<'_>) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(OutputError)
}

/// Writes a line to standard error. Without a reader it is lost, and the command goes on.
pub fn complain(text: fmt::Arguments<'_>) {
    writeln!(io::stderr().lock(), "{text}").ok();
}

/// Text from outside on one line: control characters, which a terminal would obey, are escaped.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        match char.is_control() {
            true => shown.extend(char.escape_default()),
            false => shown.push(char),
        }
    }
    shown
}

/// Prints a line of a command's answer, or returns from the function with the error.
macro_rules! say {
    () => { $crate::cli::output::print(format_args!("\n"))? };
    ($format:literal $($rest:tt)*) => {
        $crate::cli::output::print(format_args!("{}\n", format_args!($format $($rest)*)))?
    };
}
pub(crate) use say;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_stays_on_one_line() {
        assert_eq!(printable("Grüße\n\u{1b}[2J \"ok\""), "Grüße\\n\\u{1b}[2J \"ok\"");
    }
}
