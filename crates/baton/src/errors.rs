//! Errors as text, for the log and for `/health`.

use pipeline::sqlite::DatabaseError;

/// An error and its causes, outermost first, joined by colons.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// Why an embedded file cannot be used, in a few words for `/health`, which is public: no path, no host, no user.
pub fn public_reason(error: &DatabaseError) -> &'static str {
    match error {
        DatabaseError::Full => "the disk is full",
        DatabaseError::Busy => "the database is locked by another process",
        DatabaseError::Gone { .. } => "the database file was deleted or replaced",
        DatabaseError::Io { .. } => "the database file cannot be used",
        DatabaseError::Closed => "the database is closed",
        DatabaseError::OutcomeUnknown(_) | DatabaseError::Panicked(_) | DatabaseError::Sqlite(_) => {
            "the database fails; the log says why"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open the store")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn every_cause_is_named() {
        let error = Outer(std::io::Error::other("the disk is full"));
        assert_eq!(chain(&error), "cannot open the store: the disk is full");
        assert_eq!(chain(&std::fmt::Error), std::fmt::Error.to_string());
    }
}
