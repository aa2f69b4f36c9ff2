//! Refuses requests for other hosts than this one, for `dev`: its API key is known, its probes need none, and a web page may
//! point a name of its own at this machine and call both from the browser of a user (DNS rebinding).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;

use super::problem::Problem;

/// Middleware that lets a request through if it is for one of these names, with any port.
pub async fn require_host(
    State(hosts): State<Arc<[String]>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let header = request.headers().get(header::HOST).and_then(|value| value.to_str().ok());
    let name = authority.or(header).map(|asked| without_port(asked).to_lowercase());
    match name {
        Some(name) if hosts.contains(&name) => Ok(next.run(request).await),
        _ => Err(Problem::wrong_host()),
    }
}

/// The name in `name:port`; an IPv6 address keeps its brackets.
fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => authority,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_not_part_of_the_name() {
        for (authority, name) in
            [("localhost:3000", "localhost"), ("localhost", "localhost"), ("[::1]:3000", "[::1]"), ("[::1]", "[::1]")]
        {
            assert_eq!(without_port(authority), name);
        }
    }
}
