//! The services around Baton in tests, and the means to break them. Tests only: nothing here ships.
//!
//! * [`relayer`]: an OpenZeppelin Relayer that records what it accepted and misbehaves on request
//! * [`sink`]: a webhook receiver that records everything and answers as configured
//! * [`proxy`]: a TCP link that can be cut, refused, delayed or silenced
//! * [`process`]: a real binary under test: start, kill, freeze, restart
//! * [`engine`]: the database and queue that the product runs on
//! * [`servers`]: private databases and brokers: kill, restart, freeze
//! * [`chain`]: a real Ethereum chain: keys, contracts, signed requests
//! * [`ledger`]: accepted requests compared with their effects at the relayers
//! * [`ports`], [`wait`]: ports that survive a restart, and waiting for a condition
//!
//! No code is shared with the product, on purpose: a mistake in shared code would hide itself. (The relayer comes from
//! `relayer-sim`, which also knows nothing of the product.)

pub mod chain;
pub mod engine;
pub mod ledger;
pub mod process;
pub mod proxy;
pub mod relayer;
pub mod servers;
pub mod sink;
pub mod wait;

pub use relayer_sim::server::ports;

/// The base URL of a service's probes and metrics, from the base URL of its API: the port is 1000 above.
///
/// # Panics
/// When the URL has no port.
pub fn admin_url(base: &str) -> String {
    let (host, port) = base.rsplit_once(':').expect("a base URL ends with its port");
    let port: u16 = port.parse().expect("a port is a number");
    format!("{host}:{}", port + ports::SECOND_LISTENER)
}

/// An HTTP client with the one TLS provider of this workspace installed.
///
/// # Panics
/// When the client cannot be built, which would be an error of the build and not of a test.
pub fn http_client() -> reqwest::Client {
    // A second installation is refused, which is fine: the first one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().build().expect("a client with default settings can be built")
}
