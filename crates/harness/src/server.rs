//! An HTTP server whose connections can be cut from inside a handler, and all at once from outside.
//!
//! axum answers every request it has read; a broken neighbour does not. So the socket is wrapped: once its line is
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
pub(crate) struct Server {
    stop: CancellationToken,
    /// Counts the open connections.
    lines: TaskTracker,
    task: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on 127.0.0.1 and the given port.
    pub(crate) async fn start(port: u16, router: Router) -> io::Result<Self> {
        let stop = CancellationToken::new();
        let lines = TaskTracker::new();
        let tcp = crate::ports::listen(port).await?;
        let listener = Lines { tcp, stop: stop.clone(), lines: lines.clone() };
        let serve = axum::serve(listener, router.into_make_service_with_connect_info::<Line>()).into_future();
        let until = stop.clone();
        let task = tokio::spawn(async move {
            // Dropping the future closes the listening socket; the open connections are cut by the same token.
            let _ = until.run_until_cancelled(serve).await;
        });
        Ok(Self { stop, lines, task: Some(task) })
    }

    /// Stops listening and cuts every connection. The port is free afterwards.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            // It cannot fail: it is not aborted and does not panic.
            let _ = task.await;
        }
        // So that nothing of before is still acted upon afterwards; a handler that clings to its connection may.
        self.lines.close();
        let _ = tokio::time::timeout(Duration::from_secs(2), self.lines.wait()).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// One connection, as a handler sees it (`ConnectInfo<Line>`).
#[derive(Clone)]
pub(crate) struct Line(CancellationToken);

impl Line {
    /// From now on nothing more is read or written: the peer gets no answer, only the end of the connection.
    pub(crate) fn cut(&self) {
        self.0.cancel();
    }

    /// Ends when the connection was cut or the server stopped.
    pub(crate) async fn is_cut(&self) {
        self.0.cancelled().await;
    }
}

impl Connected<IncomingStream<'_, Lines>> for Line {
    fn connect_info(stream: IncomingStream<'_, Lines>) -> Self {
        stream.io().line.clone()
    }
}

struct Lines {
    tcp: TcpListener,
    stop: CancellationToken,
    lines: TaskTracker,
}

impl Listener for Lines {
    type Io = LineStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (tcp, peer) = Listener::accept(&mut self.tcp).await;
        // Small answers must not wait for an acknowledgement.
        let _ = tcp.set_nodelay(true);
        let line = Line(self.stop.child_token());
        let cut = Box::pin(line.0.clone().cancelled_owned());
        (LineStream { tcp, cut, line, _open: self.lines.token() }, peer)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.tcp.local_addr()
    }
}

struct LineStream {
    tcp: TcpStream,
    line: Line,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _open: TaskTrackerToken,
}

impl LineStream {
    /// Also registers the task, so that an idle connection wakes up to be cut.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.line.0.is_cancelled() || self.cut.as_mut().poll(cx).is_ready() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }
}

impl AsyncRead for LineStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for LineStream {
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
