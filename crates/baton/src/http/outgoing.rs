//! How this service calls others: at the address that it was given and nowhere else.

use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A client that follows no redirect and no proxy of the environment. `idle_timeout`: how long an idle connection is kept,
/// less than the other side keeps it, so that a request seldom meets a closing one.
pub fn client(idle_timeout: Duration) -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(idle_timeout)
        .tcp_nodelay(true)
}
