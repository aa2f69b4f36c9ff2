//! The HTTP server's settings and the API keys.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::Service;
use super::vars::Vars;

/// The HTTP server.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// `HOST` and `PORT`: where to listen.
    pub listen: SocketAddr,
    /// `RELAY_API_KEY` and `RELAY_API_KEYS`: who may call.
    pub api_keys: Vec<ApiKey>,
    /// `BODY_BYTES_MAX`: the largest request body.
    pub body_bytes_max: usize,
    /// `REQUEST_TIMEOUT_MS`: how long one request may take.
    pub request_timeout: Duration,
}

/// One named API key, known by its hash only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// For logs and rows.
    pub name: String,
    /// SHA-256 of the key.
    pub sha256: [u8; 32],
}

/// The longest name of an API key that every store can keep with a transaction.
const KEY_NAME_LENGTH_MAX: usize = 255;

impl Vars<'_> {
    pub(super) fn http(&mut self, service: Service) -> HttpConfig {
        let host = self.parsed("HOST", IpAddr::V4(Ipv4Addr::LOCALHOST), "an IP address");
        let port = self.parsed("PORT", service.port(), "a port number from 0 to 65535");
        HttpConfig {
            listen: SocketAddr::new(host, port),
            api_keys: self.api_keys(service.has_api()),
            body_bytes_max: self.count("BODY_BYTES_MAX"),
            request_timeout: self.millis("REQUEST_TIMEOUT_MS"),
        }
    }

    fn api_keys(&mut self, required: bool) -> Vec<ApiKey> {
        let mut keys = Vec::new();
        if let Some(key) = self.text("RELAY_API_KEY") {
            keys.push(ApiKey { name: "default".to_owned(), sha256: Sha256::digest(key.as_bytes()).into() });
        }
        for pair in self.list("RELAY_API_KEYS") {
            let read = pair.split_once(':').and_then(|(name, hash)| {
                let sha256 = hex::decode(hash.trim()).ok()?.try_into().ok()?;
                Some(ApiKey { name: name.trim().to_owned(), sha256 })
                    .filter(|key| (1..=KEY_NAME_LENGTH_MAX).contains(&key.name.chars().count()))
            });
            match read {
                Some(key) => keys.push(key),
                // The pair itself is not shown: somebody may have put the key there instead of its hash.
                None => self.problem(
                    "RELAY_API_KEYS",
                    "must be name:hash pairs separated by commas, each name up to 255 characters long and each hash the \
                     SHA-256 of a key as 64 hex digits",
                ),
            }
        }
        let names: HashSet<_> = keys.iter().map(|key| &key.name).collect();
        if names.len() < keys.len() {
            self.problem("RELAY_API_KEYS", "names a key twice (RELAY_API_KEY is named `default`)");
        }
        if required && keys.is_empty() && self.problems.iter().all(|found| !found.starts_with("RELAY_API_KEYS")) {
            self.problem("RELAY_API_KEY", "is not set: the API needs a key that its clients send as X-API-Key");
        }
        keys
    }
}
