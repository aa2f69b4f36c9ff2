//! The host names for which a development relayer answers. Its key is known and it may sign, and a web page may point a name
//! of its own at this machine and call it from the browser of a user (DNS rebinding).

use axum::http::{header, request};

/// Whether the request is for one of these names, with any port. Without names it may be for any.
pub(crate) fn is_for_one_of(hosts: &[String], head: &request::Parts) -> bool {
    let authority = head.uri.authority().map(|authority| authority.as_str());
    let header = head.headers.get(header::HOST).and_then(|value| value.to_str().ok());
    let name = authority.or(header).map(|asked| without_port(asked).to_lowercase());
    hosts.is_empty() || name.is_some_and(|name| hosts.contains(&name))
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
    use axum::http::Request;

    use super::*;

    #[test]
    fn a_name_is_compared_without_its_port_and_without_case() {
        let hosts = ["localhost", "[::1]"].map(str::to_owned);
        let ask = |uri: &str, host: Option<&str>| {
            let mut request = Request::builder().uri(uri);
            if let Some(host) = host {
                request = request.header("host", host);
            }
            request.body(()).unwrap().into_parts().0
        };
        for (uri, host, wanted) in [
            ("/", Some("localhost:3081"), true),
            ("/", Some("LocalHost"), true),
            ("/", Some("[::1]:3081"), true),
            ("/", Some("attacker.example:3081"), false),
            ("/", Some("localhost.attacker.example"), false),
            ("/", Some("localhost:attacker.example"), false),
            ("/", None, false),
            ("http://attacker.example/", Some("localhost"), false),
        ] {
            assert_eq!(is_for_one_of(&hosts, &ask(uri, host)), wanted, "{uri} {host:?}");
        }
        assert!(is_for_one_of(&[], &ask("/", Some("attacker.example"))), "no names: any");
    }
}
