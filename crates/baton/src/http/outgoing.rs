//! The HTTP client for calls to other services, which reaches only the configured addresses.

use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A client that follows no redirects and ignores the environment's proxies. `idle_timeout` should be below the server's
/// own, so that a request rarely meets a connection that is being closed.
pub fn client(idle_timeout: Duration) -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(idle_timeout)
        .tcp_nodelay(true)
}
