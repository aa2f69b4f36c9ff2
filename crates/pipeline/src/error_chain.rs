//! Shows an error with all its causes on one line, for logs and for errors that are passed on as text.

use std::error::Error;
use std::fmt;

/// Displays the error, then each cause after a colon. A cause that the text already ends with is not repeated.
pub(crate) struct ErrorChain<'a>(pub(crate) &'a (dyn Error + 'static));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = self.0.to_string();
        f.write_str(&last)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            if !last.ends_with(&text) {
                write!(f, ": {text}")?;
                last = text;
            }
            next = cause.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        source: Option<Box<Link>>,
    }

    #[test]
    fn causes_follow_the_error_and_are_not_repeated() {
        let refused = Link { text: "connection refused", source: None };
        let dispatch = Link { text: "dispatch failure: connection refused", source: Some(Box::new(refused)) };
        let unavailable = Link { text: "the queue is unavailable", source: Some(Box::new(dispatch)) };
        let text = ErrorChain(&unavailable).to_string();
        assert_eq!(text, "the queue is unavailable: dispatch failure: connection refused");
    }
}
