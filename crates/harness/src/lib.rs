//! The neighbours that Baton is tested against, and the means to hurt them. Tests only: nothing here ships.
//!
//! * [`relayer`]: an OpenZeppelin Relayer that counts what it accepted and misbehaves on request
//! * [`sink`]: a webhook receiver that remembers everything and answers as told
//! * [`proxy`]: a TCP link that can be cut, refused, delayed or silenced
//! * [`process`]: a real binary under test: start, kill, freeze, restart
//! * [`engine`]: which database and queue the product runs on
//! * [`servers`]: databases and brokers of a test's own: kill, restart, freeze
//! * [`chain`]: a real Ethereum chain: keys, contracts, signed requests
//! * [`ledger`]: what was accepted against what really happened
//! * [`ports`], [`wait`]: ports that survive a restart, and waiting for a condition
//!
//! Nothing is shared with the product, on purpose: a mistake made in both places would hide itself.

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

/// An HTTP client with the one TLS provider of this workspace installed.
///
/// # Panics
/// When the client cannot be built, which would be a fault of the build and not of a test.
pub fn http_client() -> reqwest::Client {
    // A second installation is refused, and that is fine: the first one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().build().expect("a client with default settings can be built")
}
