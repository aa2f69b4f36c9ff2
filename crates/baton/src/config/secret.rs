//! Keys, passwords, and URLs that may hold them.

use std::fmt;

use reqwest::Url;

/// Text that never appears in a log, an error or a metric: it prints as `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the call that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<Url> for Secret {
    fn from(url: Url) -> Self {
        Self(url.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
