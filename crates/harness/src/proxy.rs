//! A TCP proxy with faults: placed between a client and a server, it cuts, refuses, delays or silences their connection.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{oneshot, watch},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::ports::free_port;

/// What the proxy does with connections and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Pass everything on.
    Forward,
    /// Pass everything on, each piece this much later, in both directions.
    Delay(Duration),
    /// Accept connections and hold every byte back until the mode changes.
    BlackHole,
    /// Pass requests on and drop the answers: the server acts, the client receives nothing. Dropped bytes stay dropped.
    SwallowAnswers,
    /// Accept connections and close them at once; open ones end too.
    Cut,
    /// Do not listen (connection refused); open connections end too.
    Refuse,
}

/// A running proxy. Stops when dropped.
pub struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
    /// Cancelled and replaced to end the connections that are open.
    open: watch::Sender<Generation>,
    orders: tokio::sync::mpsc::Sender<Order>,
    connections: Arc<AtomicUsize>,
    bytes_to_server: Arc<AtomicU64>,
    _stop: DropGuard,
}

/// Whether to listen, and a sender to confirm it.
type Order = (bool, oneshot::Sender<()>);

/// The connections between two cuts.
#[derive(Clone, Default)]
struct Generation {
    end: CancellationToken,
    tasks: TaskTracker,
}

struct Link {
    target: String,
    mode: watch::Receiver<Mode>,
    open: watch::Receiver<Generation>,
    connections: Arc<AtomicUsize>,
    bytes_to_server: Arc<AtomicU64>,
}

impl Proxy {
    /// A proxy on a free port to `target` (`host:port`).
    ///
    /// # Panics
    /// When it cannot listen.
    pub async fn start(target: impl Into<String>) -> Self {
        let port = free_port();
        let (mode, mode_seen) = watch::channel(Mode::Forward);
        let (open, open_seen) = watch::channel(Generation::default());
        let (orders, incoming) = tokio::sync::mpsc::channel(1);
        let connections = Arc::new(AtomicUsize::new(0));
        let bytes_to_server = Arc::new(AtomicU64::new(0));
        let stop = CancellationToken::new();
        let listener = crate::ports::listen(port).await.expect("the proxy's port is free");
        let link = Link {
            target: target.into(),
            mode: mode_seen,
            open: open_seen,
            connections: Arc::clone(&connections),
            bytes_to_server: Arc::clone(&bytes_to_server),
        };
        let until = stop.clone();
        tokio::spawn(async move {
            until.run_until_cancelled(accept(listener, port, Arc::new(link), incoming, until.clone())).await;
        });
        Self { port, mode, open, orders, connections, bytes_to_server, _stop: stop.drop_guard() }
    }

    /// `127.0.0.1:PORT`, for clients to connect to.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The port that clients connect to; it stays the same after [`Mode::Refuse`].
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    /// Number of connections accepted so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Bytes passed on to the server so far.
    pub fn bytes_to_server(&self) -> u64 {
        self.bytes_to_server.load(Ordering::SeqCst)
    }

    /// Changes the mode. When this returns, it applies to new connections and bytes.
    ///
    /// # Panics
    /// When the port is in use after [`Mode::Refuse`].
    pub async fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
        let (done, seen) = oneshot::channel();
        self.orders.send((mode != Mode::Refuse, done)).await.expect("the proxy's task is running");
        seen.await.expect("the proxy could listen again on its port");
        if matches!(mode, Mode::Cut | Mode::Refuse) {
            self.cut().await;
        }
    }

    /// Ends every open connection, once; new ones are served by the mode.
    pub async fn cut(&self) {
        let old = self.open.send_replace(Generation::default());
        old.end.cancel();
        old.tasks.close();
        old.tasks.wait().await;
    }
}

async fn accept(
    listener: TcpListener,
    port: u16,
    link: Arc<Link>,
    mut orders: tokio::sync::mpsc::Receiver<Order>,
    stop: CancellationToken,
) {
    let mut listener = Some(listener);
    loop {
        let next = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            order = orders.recv() => {
                let Some((listen, done)) = order else { return };
                if !listen {
                    listener = None;
                } else if listener.is_none() {
                    listener = crate::ports::listen(port).await.ok();
                    if listener.is_none() { return }
                }
                // An error means that the caller no longer waits.
                let _ = done.send(());
            }
            accepted = next => {
                let Ok((near, _)) = accepted else { continue };
                link.connections.fetch_add(1, Ordering::SeqCst);
                let open = link.open.borrow().clone();
                let (link, stop, tasks) = (Arc::clone(&link), stop.clone(), open.tasks.clone());
                tasks.spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = open.end.cancelled() => {}
                        () = link.carry(near) => {}
                    }
                });
            }
        }
    }
}

impl Link {
    async fn carry(&self, near: TcpStream) {
        let mut mode = self.mode.clone();
        // In a black hole not even an empty connection reaches the server.
        if mode.wait_for(|mode| *mode != Mode::BlackHole).await.is_err() || *self.mode.borrow() == Mode::Cut {
            return;
        }
        let Ok(far) = TcpStream::connect(&self.target).await else { return };
        let _ = (near.set_nodelay(true), far.set_nodelay(true));
        let (near_read, near_write) = near.into_split();
        let (far_read, far_write) = far.into_split();
        tokio::join!(self.pump(near_read, far_write, false), self.pump(far_read, near_write, true));
    }

    async fn pump(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, answers: bool) {
        let mut mode = self.mode.clone();
        let mut piece = vec![0; 16 * 1024];
        while let Ok(size @ 1..) = from.read(&mut piece).await {
            if mode.wait_for(|mode| *mode != Mode::BlackHole).await.is_err() {
                return;
            }
            let now = *mode.borrow();
            match now {
                Mode::SwallowAnswers if answers => continue,
                Mode::Delay(delay) => tokio::time::sleep(delay).await,
                _ => {}
            }
            if to.write_all(&piece[..size]).await.is_err() {
                return;
            }
            if !answers {
                self.bytes_to_server.fetch_add(size as u64, Ordering::SeqCst);
            }
        }
        // The end of one direction is passed on; the other direction may still carry data.
        let _ = to.shutdown().await;
    }
}
