//! An HTTP server whose connections can be cut from inside a handler, and all at once from outside.
//!
//! axum answers every request it has read; a broken server does not. So the socket is wrapped: once a connection is
//! cut, reads and writes fail, hyper gives up, and the peer sees the connection end without an answer.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

/// A listening server. Dropping it stops it.
pub struct CuttableServer {
    stop: CancellationToken,
    /// Counts the open connections.
    connections: TaskTracker,
    task: Option<JoinHandle<()>>,
}

impl CuttableServer {
    /// Listens on 127.0.0.1 and the given port.
    ///
    /// # Errors
    /// When the port is taken.
    pub async fn start(port: u16, router: Router) -> io::Result<Self> {
        let stop = CancellationToken::new();
        let connections = TaskTracker::new();
        let tcp = super::ports::listen(port).await?;
        let listener = CuttableListener { tcp, stop: stop.clone(), connections: connections.clone() };
        let serve = axum::serve(listener, router.into_make_service_with_connect_info::<Connection>()).into_future();
        let until = stop.clone();
        let task = tokio::spawn(async move {
            // Dropping the future closes the listening socket; the open connections are cut by the same token.
            let _ = until.run_until_cancelled(serve).await;
        });
        Ok(Self { stop, connections, task: Some(task) })
    }

    /// Stops listening and cuts every connection. The port is free afterwards.
    pub async fn stop(mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            // It is never aborted and does not panic.
            let _ = task.await;
        }
        // No request of before is still acted upon afterwards, unless its handler outlives this wait.
        self.connections.close();
        let _ = tokio::time::timeout(Duration::from_secs(2), self.connections.wait()).await;
    }
}

impl Drop for CuttableServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// One connection, as a handler sees it (`ConnectInfo<Connection>`).
#[derive(Clone)]
pub struct Connection(CancellationToken);

impl Connection {
    /// Stops reading and writing: the peer gets no answer, only the end of the connection.
    pub fn cut(&self) {
        self.0.cancel();
    }

    /// Returns when the connection was cut or the server stopped.
    pub async fn is_cut(&self) {
        self.0.cancelled().await;
    }
}

impl Connected<IncomingStream<'_, CuttableListener>> for Connection {
    fn connect_info(stream: IncomingStream<'_, CuttableListener>) -> Self {
        stream.io().connection.clone()
    }
}

struct CuttableListener {
    tcp: TcpListener,
    stop: CancellationToken,
    connections: TaskTracker,
}

impl Listener for CuttableListener {
    type Io = CuttableStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (tcp, peer) = Listener::accept(&mut self.tcp).await;
        // Small answers must not wait for an acknowledgement. Without it they are only slower.
        let _ = tcp.set_nodelay(true);
        let connection = Connection(self.stop.child_token());
        let cut = Box::pin(connection.0.clone().cancelled_owned());
        (CuttableStream { tcp, cut, connection, _open: self.connections.token() }, peer)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.tcp.local_addr()
    }
}

struct CuttableStream {
    tcp: TcpStream,
    connection: Connection,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _open: TaskTrackerToken,
}

impl CuttableStream {
    /// Also registers the task, so that an idle connection wakes up to be cut.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.connection.0.is_cancelled() || self.cut.as_mut().poll(cx).is_ready() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }
}

impl AsyncRead for CuttableStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for CuttableStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
