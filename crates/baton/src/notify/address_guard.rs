//! Which addresses deliveries may reach: clients choose the URLs, so a URL must not lead into the operator's own network
//! (server-side request forgery).
//!
//! A URL is checked at registration ([`AddressGuard::check_url`], [`AddressGuard::check_resolves`]) and again by each
//! connection ([`AddressGuard::resolve`], called by [`super::sender`]). A connection resolves its host once and connects
//! to exactly the addresses that were checked: a DNS server that changes its answer in between (DNS rebinding) gains
//! nothing.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::http::Uri;
use reqwest::Url;

use super::lookups::{LOOKUP_TIMEOUT, LookupError, Lookups, Resolver};
use crate::config::NotifyConfig;

/// Maximum length of a URL, in characters.
const URL_LENGTH_MAX: usize = 2048;

const UNSPECIFIED: &str = "unspecified";
const LOOPBACK: &str = "loopback";
const MULTICAST: &str = "multicast";
const BROADCAST: &str = "broadcast";
const PRIVATE: &str = "private";
const LINK_LOCAL: &str = "link-local";
const RESERVED: &str = "reserved";
const DOCUMENTATION: &str = "reserved for documentation";
const EMBEDDED: &str = "an IPv4 address inside an IPv6 address";
/// No receiver can have such an address: refused even where private addresses are allowed.
const NEVER_ALLOWED: [&str; 3] = [UNSPECIFIED, MULTICAST, BROADCAST];

/// Which URLs and addresses the operator allows.
#[derive(Debug, Clone)]
pub struct AddressPolicy {
    /// Plain http is allowed.
    pub allow_http: bool,
    /// Private, loopback and other internal addresses are allowed, and plain http.
    pub allow_private: bool,
    /// Ports that URLs may have; empty: any.
    pub ports: Vec<u16>,
}

impl From<&NotifyConfig> for AddressPolicy {
    fn from(config: &NotifyConfig) -> Self {
        Self { allow_http: config.allow_http, allow_private: config.allow_private, ports: config.ports.clone() }
    }
}

impl AddressPolicy {
    /// The class of the address if this policy refuses it.
    fn refused_class(&self, ip: IpAddr) -> Option<&'static str> {
        is_forbidden(ip).filter(|class| !self.allow_private || NEVER_ALLOWED.contains(class))
    }
}

/// Why a URL cannot be registered or called. The texts follow the name of the field, `url`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlRefused {
    /// Not a URL that can be called.
    #[error("{0}")]
    Malformed(String),
    /// A URL that the operator does not allow.
    #[error("{0}")]
    Forbidden(String),
    /// The URL is not at fault: it cannot be checked now.
    #[error("cannot be checked now: {0}")]
    Unchecked(String),
}

/// Why a host has no address to connect to. The texts contain neither the host nor an address.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// One of the host's addresses belongs to this class.
    #[error("the address is {0}")]
    Forbidden(&'static str),
    /// The host name has no address, or was not looked up.
    #[error(transparent)]
    Unresolved(#[from] LookupError),
    /// The answer of DNS is empty.
    #[error("the host name does not resolve")]
    NoAddress,
}

impl GuardError {
    /// Whether Baton did not look the name up, for want of a free place.
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Unresolved(LookupError::OwnerBusy | LookupError::Busy))
    }
}

/// An [`AddressPolicy`] with the resolver that it is applied to.
#[derive(Clone)]
pub struct AddressGuard {
    policy: AddressPolicy,
    lookups: Arc<Lookups>,
}

impl fmt::Debug for AddressGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressGuard").field("policy", &self.policy).finish_non_exhaustive()
    }
}

/// What is said of a URL with another scheme, or without one.
const SCHEME_RULE: &str = "must start with https:// (or with http://, where the operator allows it)";

impl AddressGuard {
    /// Applies a policy to what the system's resolver answers.
    pub fn new(policy: AddressPolicy) -> Self {
        Self::with_lookups(policy, Lookups::of_system())
    }

    /// Applies a policy to what another resolver answers.
    pub fn with_resolver(policy: AddressPolicy, resolver: Resolver) -> Self {
        Self::with_lookups(policy, Lookups::new(resolver))
    }

    pub(super) fn with_lookups(policy: AddressPolicy, lookups: Lookups) -> Self {
        Self { policy, lookups: Arc::new(lookups) }
    }

    /// Checks everything about a URL that needs no DNS.
    pub fn check_url(&self, text: &str) -> Result<Url, UrlRefused> {
        if text.chars().count() > URL_LENGTH_MAX {
            return Err(malformed(format!("must have at most {URL_LENGTH_MAX} characters")));
        }
        // The URL parser silently removes or converts these; then we would check another text than the client sees.
        if text.chars().any(|letter| letter.is_whitespace() || letter.is_control() || letter == '\\') {
            return Err(malformed("must not contain spaces, control characters or backslashes"));
        }
        let url = Url::parse(text).map_err(|error| malformed(format!("is not a URL: {error}")))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(malformed(SCHEME_RULE));
        }
        let authority = written_authority(text, url.scheme()).ok_or_else(|| malformed(SCHEME_RULE))?;
        if authority.contains('@') {
            return Err(malformed("must not contain a user name or password"));
        }
        if url.fragment().is_some() {
            return Err(malformed("must not contain a fragment (#)"));
        }
        if url.scheme() == "http" && !self.policy.allow_http && !self.policy.allow_private {
            return Err(UrlRefused::Forbidden("must use https (WEBHOOK_ALLOW_HTTP allows http)".to_owned()));
        }
        self.check_port(&url)?;
        self.check_host(&url, authority)?;
        // What the HTTP client cannot call, and what it would read in another way than the URL parser.
        let uri = Uri::try_from(url.as_str()).ok();
        if uri.and_then(|uri| uri.host().map(str::to_owned)).as_deref() != url.host_str() {
            return Err(malformed("contains characters that HTTP does not allow; percent-encode them"));
        }
        Ok(url)
    }

    /// Checks that the URL's host has addresses, all of them allowed: for a registration, whose client can still correct
    /// the URL. Each connection checks again.
    pub async fn check_resolves(&self, owner: &str, url: &Url) -> Result<(), UrlRefused> {
        let host = url.host_str().ok_or_else(|| malformed("must contain a host"))?;
        match self.resolve(owner, host, url.port_or_known_default().unwrap_or(443)).await {
            Ok(_) => Ok(()),
            Err(GuardError::Forbidden(class)) => Err(forbidden_address("resolves to", class)),
            Err(GuardError::Unresolved(busy @ (LookupError::OwnerBusy | LookupError::Busy))) => {
                Err(UrlRefused::Unchecked(busy.to_string()))
            }
            Err(GuardError::Unresolved(LookupError::Late)) => {
                Err(malformed(format!("did not resolve within {} s; try again", LOOKUP_TIMEOUT.as_secs())))
            }
            Err(GuardError::Unresolved(LookupError::Failed(_)) | GuardError::NoAddress) => {
                Err(malformed("does not resolve: its host has no address"))
            }
        }
    }

    /// The addresses of a host, resolved once; an error if any of them is forbidden, because the DNS server decides which
    /// one comes first. The caller connects to these addresses and does not resolve the name again. The lookup counts
    /// among those of the owner, an API key.
    pub async fn resolve(&self, owner: &str, host: &str, port: u16) -> Result<Vec<SocketAddr>, GuardError> {
        let found = match unbracketed(host).parse() {
            Ok(ip) => vec![SocketAddr::new(ip, port)],
            Err(_) => self.lookups.look_up(owner, host, port).await?,
        };
        if found.is_empty() {
            return Err(GuardError::NoAddress);
        }
        match found.iter().find_map(|address| self.policy.refused_class(address.ip())) {
            Some(class) => Err(GuardError::Forbidden(class)),
            None => Ok(found),
        }
    }

    fn check_port(&self, url: &Url) -> Result<(), UrlRefused> {
        let ports = &self.policy.ports;
        if ports.is_empty() || url.port_or_known_default().is_some_and(|port| ports.contains(&port)) {
            return Ok(());
        }
        let listed = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
        Err(UrlRefused::Forbidden(format!("must have one of the ports {listed} (WEBHOOK_PORTS sets them)")))
    }

    fn check_host(&self, url: &Url, authority: &str) -> Result<(), UrlRefused> {
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| malformed("must contain a host"))?;
        let literal = unbracketed(host).parse::<IpAddr>().ok();
        let name = host.trim_end_matches('.');
        let is_localhost = name == "localhost" || name.ends_with(".localhost");
        let ip = literal.or(is_localhost.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        if let Some(class) = ip.and_then(|ip| self.policy.refused_class(ip)) {
            return Err(forbidden_address("points to", class));
        }
        // `0x7f.1`, `2130706433`, `0177.0.0.1` and others are IPv4 addresses, too. Programs disagree on which ones, and a
        // filter between us and the receiver may read another address than we have checked.
        let written = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        if literal.is_some_and(|ip| ip.is_ipv4()) && written != host {
            return Err(malformed("must write its IPv4 address as four decimal numbers"));
        }
        Ok(())
    }
}

/// The class of an address that is not a public one; `None` for a public address. IPv6 forms with an IPv4 address inside
/// are refused whatever that address is: no receiver needs them, and which host they reach depends on the network.
pub fn is_forbidden(ip: IpAddr) -> Option<&'static str> {
    match ip {
        IpAddr::V4(ip) => forbidden_v4(ip),
        IpAddr::V6(ip) => forbidden_v6(ip),
    }
}

fn forbidden_v4(ip: Ipv4Addr) -> Option<&'static str> {
    match ip.octets() {
        [0, ..] => Some(UNSPECIFIED),
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => Some(PRIVATE),
        [127, ..] => Some(LOOPBACK),
        // The metadata services of clouds are here.
        [169, 254, ..] => Some(LINK_LOCAL),
        [100, 64..=127, ..] => Some("shared by a carrier's customers"),
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => Some(DOCUMENTATION),
        // Protocol assignments, and the anycast address of 6to4 relays.
        [192, 0, 0, _] | [192, 88, 99, _] => Some(RESERVED),
        [198, 18..=19, ..] => Some("reserved for benchmarks"),
        // Azure's virtual machines reach their host here. The address is public, but no other network has it.
        [168, 63, 129, 16] => Some("a cloud provider's internal service"),
        [224..=239, ..] => Some(MULTICAST),
        [255, 255, 255, 255] => Some(BROADCAST),
        [240..=255, ..] => Some(RESERVED),
        _ => None,
    }
}

fn forbidden_v6(ip: Ipv6Addr) -> Option<&'static str> {
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some(UNSPECIFIED),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some(LOOPBACK),
        // IPv4-compatible and IPv4-mapped.
        [0, 0, 0, 0, 0, 0 | 0xffff, ..] => Some(EMBEDDED),
        // NAT64.
        [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0x64, 0xff9b, 1, ..] => Some(EMBEDDED),
        // Teredo and 6to4.
        [0x2001, 0, ..] | [0x2002, ..] => Some(EMBEDDED),
        [0x100, 0, 0, 0, ..] => Some("discarded by routers"),
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0x0fff, ..] => Some(DOCUMENTATION),
        // Protocol assignments.
        [0x2001, 0..=0x01ff, ..] => Some(RESERVED),
        [0xfc00..=0xfdff, ..] => Some(PRIVATE),
        [0xfe80..=0xfebf, ..] => Some(LINK_LOCAL),
        [0xfec0..=0xfeff, ..] => Some("site-local"),
        [0xff00..=0xffff, ..] => Some(MULTICAST),
        // Public addresses are assigned from this block only.
        [0x2000..=0x3fff, ..] => None,
        _ => Some(RESERVED),
    }
}

/// The part between `://` and the path, as the client wrote it.
fn written_authority<'a>(text: &'a str, scheme: &str) -> Option<&'a str> {
    let rest = text.get(scheme.len()..)?.strip_prefix("://")?;
    rest.split(['/', '?', '#']).next().filter(|authority| !authority.is_empty())
}

/// The host of a URL without the brackets of an IPv6 address.
fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn malformed(rule: impl Into<String>) -> UrlRefused {
    UrlRefused::Malformed(rule.into())
}

fn forbidden_address(how: &str, class: &'static str) -> UrlRefused {
    let fix = if NEVER_ALLOWED.contains(&class) { "" } else { " (WEBHOOK_ALLOW_PRIVATE allows it)" };
    UrlRefused::Forbidden(format!("{how} an address that is {class}{fix}"))
}

#[cfg(test)]
mod tests;
