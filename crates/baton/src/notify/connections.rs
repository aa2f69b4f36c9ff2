//! The connections of attempts: only to addresses that [`super::address_guard`] has checked, within a time limit, and
//! counted.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::http::Uri;
use axum::http::uri::Scheme;
use futures::future::BoxFuture;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

use super::address_guard::{AddressGuard, GuardError};
use super::host_breaker::HostState;

/// Limit of a connection: DNS, TCP and TLS together.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of the part of an error that other libraries word; TLS errors list names of the certificate.
const CAUSE_LENGTH_MAX: usize = 300;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("refused: {0}")]
    Refused(GuardError),
    #[error("no connection: {0}")]
    Unresolved(GuardError),
    #[error("no connection: {0}")]
    Tcp(io::Error),
    #[error("no TLS connection: {0}")]
    Tls(String),
    #[error("no connection within {}", shown(CONNECT_TIMEOUT))]
    TimedOut,
}

impl ConnectError {
    /// What it shows of the host. A refusal of our own shows nothing.
    pub fn host(&self) -> HostState {
        match self {
            Self::Refused(_) => HostState::Unclear,
            Self::Unresolved(error) if error.is_ours() => HostState::Unclear,
            Self::Unresolved(_) | Self::Tcp(_) | Self::Tls(_) | Self::TimedOut => HostState::Unreachable,
        }
    }
}

impl From<GuardError> for ConnectError {
    fn from(error: GuardError) -> Self {
        match error {
            GuardError::Forbidden(_) => Self::Refused(error),
            GuardError::Unresolved(_) | GuardError::NoAddress => Self::Unresolved(error),
        }
    }
}

/// Connects over TCP or TLS within [`CONNECT_TIMEOUT`].
#[derive(Debug, Clone)]
pub(super) struct Connector(pub HttpsConnector<CheckedTcp>);

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<CountedStream>;
    type Error = ConnectError;
    type Future = BoxFuture<'static, Result<Self::Response, ConnectError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
            connected.map_err(|_| ConnectError::TimedOut)?.map_err(|error| match error.downcast::<ConnectError>() {
                Ok(own) => *own,
                Err(other) => ConnectError::Tls(root(&*other)),
            })
        })
    }
}

/// TCP connections to the addresses that the guard has checked, and to no others.
#[derive(Debug, Clone)]
pub(super) struct CheckedTcp {
    pub guard: AddressGuard,
    pub owner: Arc<str>,
    pub open: OpenConnections,
}

impl Service<Uri> for CheckedTcp {
    type Response = CountedStream;
    type Error = ConnectError;
    type Future = BoxFuture<'static, Result<Self::Response, ConnectError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (CheckedTcp { guard, owner, open }, deadline) = (self.clone(), Instant::now() + CONNECT_TIMEOUT);
        Box::pin(async move {
            let default_port = if uri.scheme() == Some(&Scheme::HTTP) { 80 } else { 443 };
            let port = uri.port_u16().unwrap_or(default_port);
            let addresses = guard.resolve(&owner, uri.host().unwrap_or_default(), port).await?;
            let stream = connect_to_one(&addresses, deadline).await?;
            stream.set_nodelay(true).map_err(ConnectError::Tcp)?;
            Ok(open.counted(stream))
        })
    }
}

/// Tries the addresses in their order. Each gets its share of the time that is left, so that one that does not respond
/// leaves time for the others.
async fn connect_to_one(addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream, ConnectError> {
    let mut last = ConnectError::TimedOut;
    for (left, address) in (1..=addresses.len()).rev().zip(addresses) {
        let share = deadline.saturating_duration_since(Instant::now()) / u32::try_from(left).unwrap_or(u32::MAX);
        match tokio::time::timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = ConnectError::Tcp(error),
            Err(_) => last = ConnectError::TimedOut,
        }
    }
    Err(last)
}

/// The number of open connections.
#[derive(Debug, Clone, Default)]
pub(super) struct OpenConnections(Arc<AtomicUsize>);

impl OpenConnections {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn counted(&self, stream: TcpStream) -> CountedStream {
        self.0.fetch_add(1, Ordering::Relaxed);
        CountedStream { stream: TokioIo::new(stream), open: self.clone() }
    }
}

/// A connection that counts as open until it is dropped.
#[derive(Debug)]
pub(super) struct CountedStream {
    stream: TokioIo<TcpStream>,
    open: OpenConnections,
}

impl Drop for CountedStream {
    fn drop(&mut self) {
        self.open.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection for CountedStream {
    fn connected(&self) -> Connected {
        self.stream.connected()
    }
}

impl Read for CountedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl Write for CountedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }
}

/// The innermost cause: the outer ones only name the step that failed.
pub(super) fn root(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string().chars().take(CAUSE_LENGTH_MAX).collect()
}

pub(super) fn shown(limit: Duration) -> String {
    if limit.subsec_millis() == 0 { format!("{} s", limit.as_secs()) } else { format!("{} ms", limit.as_millis()) }
}
