//! A client's connection that is reset when the client does not read its answer.
//!
//! Hyper limits how long a request's head may take, and the handlers how long its body may; neither limits how long an
//! answer waits to be read. Progress means that the kernel took bytes: it reports a full socket as writable only once a
//! third of it is free, so a client that reads a byte now and then makes no progress.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use metrics::counter;
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::open_connections::Activity;

/// A connection with a limit on how long a write may stall.
pub struct TimedStream {
    io: TokioIo<TcpStream>,
    write_timeout: Duration,
    /// Runs while a write waits for the client.
    stalled: Option<Pin<Box<Sleep>>>,
    activity: Arc<Activity>,
}

impl TimedStream {
    /// Wraps a connection.
    pub fn new(stream: TcpStream, write_timeout: Duration, activity: Arc<Activity>) -> Self {
        Self { io: TokioIo::new(stream), write_timeout, stalled: None, activity }
    }

    fn timed(&mut self, context: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            self.activity.touch();
            return written;
        }
        let write_timeout = self.write_timeout;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(write_timeout)));
        if stalled.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        counter!("baton_connections_reset_total", "reason" => "write_timeout").increment(1);
        // Otherwise the kernel would keep the unread bytes for minutes after the close.
        self.io.inner().set_zero_linger().ok();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client did not read its answer in time")))
    }
}

impl Drop for TimedStream {
    fn drop(&mut self) {
        // As above: what its client has not read is dropped with it.
        if self.activity.is_reset() {
            self.io.inner().set_zero_linger().ok();
        }
    }
}

impl Read for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_ready() {
            self.activity.touch();
        }
        read
    }
}

impl Write for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.timed(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, pieces);
        self.timed(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
