//! Errors as text for the log.

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
