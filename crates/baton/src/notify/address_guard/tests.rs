use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;

use super::*;
use crate::notify::lookups::LOOKUPS_PER_OWNER_MAX;

/// The API key of most tests.
const OWNER: &str = "shop";

/// Nothing is allowed but https to public addresses.
const STRICT: AddressPolicy = AddressPolicy { allow_http: false, allow_private: false, ports: Vec::new() };
const WITH_HTTP: AddressPolicy = AddressPolicy { allow_http: true, allow_private: false, ports: Vec::new() };
const WITH_PRIVATE: AddressPolicy = AddressPolicy { allow_http: false, allow_private: true, ports: Vec::new() };

fn check(policy: &AddressPolicy, url: &str) -> Result<Url, UrlRefused> {
    AddressGuard::new(policy.clone()).check_url(url)
}

/// A guard whose DNS answers these addresses, one list after the other; the last one again and again.
fn guard_with_answers(policy: AddressPolicy, answers: &'static [&'static [&'static str]]) -> AddressGuard {
    let calls = AtomicUsize::new(0);
    let resolver = move |_: String, port: u16| -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let call = calls.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1);
        let found = answers[call].iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), port)).collect();
        Box::pin(async move { Ok(found) })
    };
    AddressGuard::with_resolver(policy, Arc::new(resolver))
}

#[test]
fn ordinary_urls_are_accepted() {
    let urls = [
        "https://example.com",
        "https://example.com/hooks/baton?token=a%20b",
        "HTTPS://Example.COM:8443/",
        "https://example.com./",
        "https://bücher.example/hook",
        "https://1.1.1.1/",
        "https://1.1.1.1:8443/",
        "https://[2606:4700:4700::1111]/",
        "https://localhost.example.com/",
        "https://notlocalhost/",
    ];
    for url in urls {
        let checked = check(&STRICT, url).unwrap_or_else(|refused| panic!("{url} {refused}"));
        assert_eq!(checked.scheme(), "https");
    }
}

#[test]
fn malformed_urls_are_refused_with_the_rule() {
    let long = format!("https://example.com/{}", "x".repeat(URL_LENGTH_MAX));
    let cases = [
        ("", "is not a URL"),
        ("example.com/hook", "is not a URL"),
        ("https://", "is not a URL"),
        ("https://exa mple.com/", "spaces"),
        (" https://example.com/", "spaces"),
        ("https://example.com/\n", "control characters"),
        ("https://exam\tple.com/", "spaces"),
        ("https://example.com\\@10.0.0.1/", "backslashes"),
        ("ftp://example.com/", "must start with https:// (or with http://, where the operator allows it)"),
        ("file:///etc/passwd", "must start with https:// (or with http://, where the operator allows it)"),
        ("https:example.com", "must start with https:// (or with http://, where the operator allows it)"),
        ("https:///example.com", "must start with https:// (or with http://, where the operator allows it)"),
        ("https://user@example.com/", "user name or password"),
        ("https://user:password@example.com/", "user name or password"),
        ("https://@example.com/", "user name or password"),
        ("https://example.com@10.0.0.1/", "user name or password"),
        ("https://example.com/#part", "fragment"),
        ("https://example.com:99999/", "is not a URL"),
        ("https://[::1%25lo]/", "is not a URL"),
        (&long, "2048 characters"),
    ];
    for (url, rule) in cases {
        match check(&STRICT, url) {
            Err(UrlRefused::Malformed(text)) => assert!(text.contains(rule), "{url}: {text}"),
            other => panic!("{url}: {other:?}"),
        }
    }
}

/// The length counts characters, so that the limit does not depend on the encoding.
#[test]
fn the_longest_url_is_accepted() {
    let url = format!("https://example.com/{}", "ü".repeat(URL_LENGTH_MAX - 20));
    assert!(check(&STRICT, &url).is_ok());
    assert!(check(&STRICT, &format!("{url}ü")).is_err());
}

#[test]
fn what_the_operator_does_not_allow_is_forbidden_and_names_the_setting() {
    let some_ports = AddressPolicy { ports: vec![443, 8443], ..WITH_HTTP };
    let cases = [
        (&STRICT, "http://example.com/", "must use https (WEBHOOK_ALLOW_HTTP allows http)"),
        (&some_ports, "https://example.com:22/", "must have one of the ports 443, 8443 (WEBHOOK_PORTS sets them)"),
        (&some_ports, "http://example.com/", "must have one of the ports 443, 8443 (WEBHOOK_PORTS sets them)"),
        (&STRICT, "https://10.0.0.1/", "points to an address that is private (WEBHOOK_ALLOW_PRIVATE allows it)"),
        (&WITH_PRIVATE, "https://224.0.0.1/", "points to an address that is multicast"),
    ];
    for (policy, url, text) in cases {
        assert_eq!(check(policy, url), Err(UrlRefused::Forbidden(text.to_owned())), "{url}");
    }
    for url in ["https://example.com/", "https://example.com:8443/", "http://example.com:443/"] {
        assert!(check(&some_ports, url).is_ok(), "{url}");
    }
    assert!(check(&WITH_PRIVATE, "http://10.0.0.1:8080/").is_ok());
}

#[test]
fn no_spelling_of_an_internal_host_is_accepted() {
    let hosts = [
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "0x7f.1",
        "0x7f000001",
        "2130706433",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.1:8080",
        "%31%32%37.0.0.1",
        "１２７.0.0.1",
        "127。0。0。1",
        "127.0.0.1\u{ad}",
        "0",
        "0.0.0.0",
        "169.254.169.254",
        "0xa9fea9fe",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "localhost..",
        "a.localhost",
        "a.b.localhost.",
        "loc%61lhost",
        "ｌocalhost",
        "[::1]",
        "[::]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::10.0.0.1]",
        "[64:ff9b:1::1]",
        "[2002:7f00:1::]",
        "[2001:0:7f00:1::]",
        "[fd00:ec2::254]",
        "[fe80::1]",
    ];
    for host in hosts {
        let refused = check(&WITH_HTTP, &format!("http://{host}/hook"));
        assert!(matches!(refused, Err(UrlRefused::Forbidden(_))), "{host}: {refused:?}");
    }
}

#[test]
fn an_unusual_spelling_of_an_allowed_address_is_malformed() {
    for host in ["1.1", "0x1010101", "16843009", "01.1.1.1", "1.1.1.1.", "%31.1.1.1", "１.1.1.1"] {
        let refused = check(&STRICT, &format!("https://{host}:443/"));
        let Err(UrlRefused::Malformed(text)) = &refused else { panic!("{host}: {refused:?}") };
        assert!(text.contains("four decimal numbers"), "{text}");
    }
    assert!(matches!(check(&WITH_PRIVATE, "http://127.1/"), Err(UrlRefused::Malformed(_))));
    assert!(check(&WITH_PRIVATE, "http://127.0.0.1/").is_ok());
    assert!(check(&WITH_PRIVATE, "http://localhost:3000/").is_ok());
}

#[test]
fn every_class_of_internal_addresses_has_its_limits() {
    // First and last address of each block, and its neighbours on either side that are public.
    let blocks: &[(&str, &[&str], &[&str])] = &[
        (UNSPECIFIED, &["0.0.0.0", "0.255.255.255", "::"], &["1.0.0.0"]),
        (
            PRIVATE,
            &[
                "10.0.0.0",
                "10.255.255.255",
                "172.16.0.0",
                "172.31.255.255",
                "192.168.0.0",
                "192.168.255.255",
                "fc00::",
                "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
            ],
            &["9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0"],
        ),
        (LOOPBACK, &["127.0.0.0", "127.255.255.255", "::1"], &["126.255.255.255", "128.0.0.0"]),
        (LINK_LOCAL, &["169.254.0.0", "169.254.255.255", "fe80::", "febf::1"], &["169.253.255.255", "169.255.0.0"]),
        ("shared by a carrier's customers", &["100.64.0.0", "100.127.255.255"], &["100.63.255.255", "100.128.0.0"]),
        (
            RESERVED,
            &[
                "192.0.0.0",
                "192.0.0.255",
                "192.88.99.1",
                "240.0.0.0",
                "255.255.255.254",
                "2001:1::1",
                "2001:1ff::",
                "100:0:0:1::",
                "4000::",
                "5f00::1",
                "::ffff:0:0:1",
            ],
            &["192.0.1.0", "191.255.255.255", "2001:200::", "2001:4860:4860::8888"],
        ),
        (
            DOCUMENTATION,
            &["192.0.2.1", "198.51.100.1", "203.0.113.255", "2001:db8::1", "3fff::", "3fff:fff:ffff::"],
            &["192.0.3.0", "198.51.101.0", "203.0.114.0", "2001:db7::1", "2001:db9::", "3fff:1000::"],
        ),
        ("reserved for benchmarks", &["198.18.0.0", "198.19.255.255"], &["198.17.255.255", "198.20.0.0"]),
        ("a cloud provider's internal service", &["168.63.129.16"], &["168.63.129.15", "168.63.129.17"]),
        (MULTICAST, &["224.0.0.0", "239.255.255.255", "ff00::", "ff02::1"], &["223.255.255.255"]),
        (BROADCAST, &["255.255.255.255"], &[]),
        ("site-local", &["fec0::1", "feff::1"], &[]),
        ("discarded by routers", &["100::", "100::ffff:ffff:ffff:ffff"], &[]),
        (
            EMBEDDED,
            &["::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::808:808", "64:ff9b:1::", "2002:808:808::1", "2001::1"],
            &["2003::1", "2606:4700:4700::1111", "2000::", "3ffe::1"],
        ),
    ];
    for (class, inside, outside) in blocks {
        for ip in *inside {
            assert_eq!(is_forbidden(ip.parse().unwrap()), Some(*class), "{ip}");
        }
        for ip in *outside {
            assert_eq!(is_forbidden(ip.parse().unwrap()), None, "{ip}");
        }
    }
}

#[test]
fn private_addresses_can_be_allowed_but_not_those_of_no_host() {
    for ip in ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00::1", "::ffff:10.0.0.1", "100.64.0.1"] {
        assert_eq!(WITH_PRIVATE.refused_class(ip.parse().unwrap()), None, "{ip}");
        assert!(STRICT.refused_class(ip.parse().unwrap()).is_some(), "{ip}");
    }
    for ip in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"] {
        assert!(WITH_PRIVATE.refused_class(ip.parse().unwrap()).is_some(), "{ip}");
    }
}

#[tokio::test]
async fn one_forbidden_address_among_several_refuses_the_host() {
    let guard = guard_with_answers(STRICT, &[&["8.8.8.8", "2606:4700:4700::1111", "10.0.0.7"]]);
    let refused = guard.resolve(OWNER, "example.com", 443).await.unwrap_err();
    assert_eq!(refused.to_string(), "the address is private");
    let guard = guard_with_answers(STRICT, &[&["8.8.8.8", "2606:4700:4700::1111"]]);
    assert_eq!(guard.resolve(OWNER, "example.com", 443).await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_literal_address_is_checked_without_dns() {
    let guard = guard_with_answers(STRICT, &[&["8.8.8.8"]]);
    for host in ["127.0.0.1", "[::1]", "::1"] {
        assert!(matches!(guard.resolve(OWNER, host, 443).await, Err(GuardError::Forbidden(LOOPBACK))), "{host}");
    }
    assert_eq!(guard.resolve(OWNER, "1.1.1.1", 443).await.unwrap(), ["1.1.1.1:443".parse().unwrap()]);
}

#[tokio::test]
async fn a_registration_says_whether_the_host_is_unknown_or_forbidden() {
    let url = Url::parse("https://example.com/").unwrap();
    let check = |answers| {
        let (guard, url) = (guard_with_answers(STRICT, answers), url.clone());
        async move { guard.check_resolves(OWNER, &url).await }
    };
    assert_eq!(check(&[&["8.8.8.8"]]).await, Ok(()));
    let unknown = "does not resolve: its host has no address".to_owned();
    assert_eq!(check(&[&[]]).await, Err(UrlRefused::Malformed(unknown)));
    let private = "resolves to an address that is private (WEBHOOK_ALLOW_PRIVATE allows it)".to_owned();
    assert_eq!(check(&[&["192.168.1.1"]]).await, Err(UrlRefused::Forbidden(private)));
}

#[tokio::test]
async fn a_name_that_points_elsewhere_afterwards_is_refused() {
    let guard = guard_with_answers(STRICT, &[&["8.8.8.8"], &["127.0.0.1"]]);
    let url = guard.check_url("https://example.com/").unwrap();
    assert_eq!(guard.check_resolves(OWNER, &url).await, Ok(()));
    assert!(matches!(guard.resolve(OWNER, "example.com", 443).await, Err(GuardError::Forbidden(LOOPBACK))));
}

#[tokio::test]
async fn the_system_resolves_localhost() {
    let found = AddressGuard::new(WITH_PRIVATE).resolve(OWNER, "localhost", 8080).await.unwrap();
    assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 8080), "{found:?}");
    let refused = AddressGuard::new(STRICT).resolve(OWNER, "localhost", 8080).await;
    assert!(matches!(refused, Err(GuardError::Forbidden(LOOPBACK))), "{refused:?}");
}

#[tokio::test]
async fn a_registration_that_is_not_looked_up_does_not_blame_the_url() {
    let silent = Lookups::with_timeout(Arc::new(|_, _| Box::pin(std::future::pending())), Duration::from_millis(500));
    let guard = AddressGuard::with_lookups(STRICT, silent);
    let check = async |number: usize| {
        let url = Url::parse(&format!("https://{number}.example.com/")).unwrap();
        guard.check_resolves(OWNER, &url).await
    };
    let late = UrlRefused::Malformed("did not resolve within 5 s; try again".to_owned());
    let checked = futures::future::join_all((0..LOOKUPS_PER_OWNER_MAX).map(check)).await;
    assert!(checked.iter().all(|refused| *refused == Err(late.clone())), "{checked:?}");
    let busy = "too many lookups of this API key's host names are in progress".to_owned();
    assert_eq!(check(LOOKUPS_PER_OWNER_MAX).await, Err(UrlRefused::Unchecked(busy)));
}
