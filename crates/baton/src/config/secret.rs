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

    /// Scheme, host and port of a URL, which hold no secret; `***` if it is none.
    pub fn address(&self) -> String {
        let address = Url::parse(&self.0).ok().and_then(|url| {
            let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
            Some(format!("{}://{}{port}", url.scheme(), url.host_str()?))
        });
        address.unwrap_or_else(|| "***".to_owned())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_no_credentials() {
        let address = |url: &str| Secret::new(url).address();
        assert_eq!(address("mysql://me:s3cret@db:3307/baton?ssl-mode=REQUIRED"), "mysql://db:3307");
        assert_eq!(address("redis://:s3cret@[::1]/0"), "redis://[::1]");
        assert_eq!(address("s3cret"), "***");
    }
}
