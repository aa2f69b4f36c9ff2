//! Connections to other services, which reach only the configured addresses: no redirects, no proxy of the environment.
//!
//! A connection is always closed by a reset. What was written and not yet delivered is dropped at that moment, also when
//! the process is killed; a graceful close would leave it to the kernel, which retransmits it for minutes, long after
//! the request was given up. No answer is lost by it: a connection is closed after the answer was read, or because
//! nothing waits for it any more.

use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Uri;
use futures::future::BoxFuture;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tower_service::Service;

use super::transport::RequestBody;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A client whose connections are kept between requests.
pub type HttpClient = Client<Connector, RequestBody>;

/// How connections are kept and given up.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// An idle connection is closed after this. Should be below the server's own limit, so that a request rarely meets a
    /// connection that is being closed.
    pub idle: Duration,
    /// The kernel gives a connection up whose bytes are not acknowledged for this long (`TCP_USER_TIMEOUT`): it ends
    /// retransmissions even while this process is frozen and cannot close the connection itself.
    pub unacknowledged: Option<Duration>,
}

/// A client with these limits.
pub fn client(limits: ConnectionLimits) -> Result<HttpClient, String> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    #[cfg(target_os = "linux")]
    tcp.set_tcp_user_timeout(limits.unacknowledged);
    let tls = HttpsConnectorBuilder::new()
        .with_provider_and_platform_verifier(rustls::crypto::ring::default_provider())
        .map_err(|error| error.to_string())?;
    let connector = Connector(tls.https_or_http().enable_http1().wrap_connector(ResetOnClose(tcp)));
    let mut builder = Client::builder(TokioExecutor::new());
    builder.pool_timer(TokioTimer::new()).pool_idle_timeout(limits.idle);
    Ok(builder.build(connector))
}

/// Connects over TCP or TLS, within 2 s.
#[derive(Clone)]
pub struct Connector(HttpsConnector<ResetOnClose>);

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
            tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.map_err(late)?
        })
    }
}

/// TCP connections that are reset when they are closed.
#[derive(Clone)]
pub struct ResetOnClose(HttpConnector);

impl Service<Uri> for ResetOnClose {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let stream = connecting.await?;
            stream.inner().set_zero_linger()?;
            Ok(stream)
        })
    }
}
