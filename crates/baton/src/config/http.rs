//! The HTTP server's settings and the API keys.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::Service;
use super::definition::Kind;
use super::reader::Vars;

/// The HTTP server and the clients that it admits.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// `HOST` and `PORT`: the address to listen on.
    pub listen: SocketAddr,
    /// `HOST` and `ADMIN_PORT`: the address of probes and metrics.
    pub admin_listen: SocketAddr,
    /// Whether `ADMIN_PORT` is set. If it is not and its port is in use, the service runs without that listener.
    pub admin_port_set: bool,
    /// How many connections clients may hold, and for how long.
    pub connections: ConnectionLimits,
    /// `RELAY_API_KEY` and `RELAY_API_KEYS`: the keys that clients may send as `X-API-Key`.
    pub api_keys: Vec<ApiKey>,
    /// Maximum size of a request body.
    pub body_bytes_max: usize,
    /// `REQUEST_TIMEOUT_MS`: maximum duration of one request, from its first byte to the answer.
    pub request_timeout: Duration,
    /// The names for which requests are answered, in lower case; empty: any. Only `dev` has some.
    pub hosts: Vec<String>,
}

/// An address to listen on, given as such or as a name of this machine.
struct Host(IpAddr);

impl FromStr for Host {
    type Err = io::Error;

    fn from_str(text: &str) -> Result<Self, io::Error> {
        if let Ok(address) = text.parse() {
            return Ok(Self(address));
        }
        let found: Vec<IpAddr> = (text, 0).to_socket_addrs()?.map(|address| address.ip()).collect();
        // Most names have an IPv4 address, and clients try it too.
        let chosen = found.iter().find(|address| address.is_ipv4()).or(found.first());
        chosen.copied().map(Self).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }
}

/// Limits of the connections that clients open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// `CONNECTIONS_MAX`: open connections; a further one replaces a silent one, or is refused.
    pub connections_max: usize,
    /// `CONNECTIONS_PER_ADDRESS_MAX`: open connections from one address.
    pub per_address_max: usize,
    /// `IDLE_TIMEOUT_MS`: longest time without a whole request head.
    pub idle_timeout: Duration,
    /// `WRITE_TIMEOUT_MS`: longest time without any progress of an answer.
    pub write_timeout: Duration,
}

/// A named API key. Only its hash is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Names the client in logs and rows.
    pub name: String,
    /// SHA-256 of the key.
    pub sha256: [u8; 32],
    /// A shorter text is not taken for the key, although the hash may be its own.
    pub length_min: usize,
}

impl ApiKey {
    /// The shortest key of a service: it cannot be guessed. `dev` has a shorter one, which is no secret.
    pub const LENGTH_MIN: usize = 32;
}

/// Maximum size of a request body. Nodes accept transactions of up to 128 KiB, which are twice as long in hex, so a
/// larger body could not be executed.
const BODY_BYTES_MAX: usize = 256 * 1024;

/// The longest name of an API key that every store can keep with a transaction.
const KEY_NAME_LENGTH_MAX: usize = 255;

impl Vars<'_> {
    pub(super) fn http(&mut self, service: Service) -> HttpConfig {
        let port = match self.text("PORT") {
            Some(_) => self.parsed("PORT"),
            None => service.port(),
        };
        let admin_port = match self.text("ADMIN_PORT") {
            Some(text) => text.parse().unwrap_or_else(|_| {
                self.problem("ADMIN_PORT", &Kind::Port.rule());
                0
            }),
            None => admin_port(port),
        };
        let host = self.parsed::<Host>("HOST").0;
        HttpConfig {
            listen: SocketAddr::new(host, port),
            admin_listen: SocketAddr::new(host, admin_port),
            admin_port_set: self.text("ADMIN_PORT").is_some(),
            connections: ConnectionLimits {
                connections_max: self.count("CONNECTIONS_MAX"),
                per_address_max: self.count("CONNECTIONS_PER_ADDRESS_MAX"),
                idle_timeout: self.millis("IDLE_TIMEOUT_MS"),
                write_timeout: self.millis("WRITE_TIMEOUT_MS"),
            },
            api_keys: self.api_keys(service.has_api()),
            body_bytes_max: BODY_BYTES_MAX,
            request_timeout: self.millis("REQUEST_TIMEOUT_MS"),
            hosts: Vec::new(),
        }
    }

    fn api_keys(&mut self, required: bool) -> Vec<ApiKey> {
        let mut keys = Vec::new();
        let length_min = if self.short_keys { 1 } else { ApiKey::LENGTH_MIN };
        if let Some(key) = self.text("RELAY_API_KEY") {
            if key.len() < length_min {
                let rule = format!("is too short: a key has at least {length_min} characters (openssl rand -hex 32)");
                self.problem("RELAY_API_KEY", &rule);
            }
            keys.push(ApiKey { name: "default".to_owned(), sha256: Sha256::digest(key.as_bytes()).into(), length_min });
        }
        let of_nothing: [u8; 32] = Sha256::digest(b"").into();
        for pair in self.list("RELAY_API_KEYS") {
            match parse_named_key(&pair, length_min) {
                Some(key) if key.sha256 == of_nothing => {
                    self.problem("RELAY_API_KEYS", "has the hash of an empty key: was the key's variable set?");
                }
                Some(key) => keys.push(key),
                // The message does not quote the pair: it may hold the key itself instead of its hash.
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
        if required && keys.is_empty() && !self.has_problem("RELAY_API_KEYS") {
            self.problem("RELAY_API_KEY", "is not set: the API needs a key that its clients send as X-API-Key");
        }
        keys
    }
}

/// The port of probes and metrics if none is set: 1000 above the service's own, so that services on one machine differ.
fn admin_port(port: u16) -> u16 {
    const DISTANCE: u16 = 1000;
    if port == 0 { 0 } else { port.checked_add(DISTANCE).unwrap_or(port - DISTANCE) }
}

fn parse_named_key(pair: &str, length_min: usize) -> Option<ApiKey> {
    let (name, hash) = pair.split_once(':')?;
    let name = name.trim().to_owned();
    let sha256 = hex::decode(hash.trim()).ok()?.try_into().ok()?;
    (1..=KEY_NAME_LENGTH_MAX).contains(&name.chars().count()).then_some(ApiKey { name, sha256, length_min })
}
