//! Ports that a server can leave and take again.
//!
//! The kernel hands out ports from 32768 upwards to outgoing connections, so a server that stops and starts again on
//! such a port may find it taken. These are below, and a lock file per port keeps parallel test processes apart. The port
//! [`SECOND_LISTENER`] above each is left free: a program may listen there for its probes.

use std::{
    fs::File,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Mutex,
    time::{Duration, Instant},
};

use rand::RngExt;
use tokio::net::{TcpListener, TcpSocket};

/// `scripts/services` gives the ports below to servers.
const LOWEST: u16 = 11_000;
const HIGHEST: u16 = 31_700;

/// The distance from a port given out to one that is not.
pub const SECOND_LISTENER: u16 = 1000;

/// Held until the process ends, so that a port is given out only once, whether or not it is in use.
static RESERVED: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// A port on 127.0.0.1 that is free now. No other caller of this function gets it.
///
/// # Panics
/// When none is left.
pub fn free_port() -> u16 {
    // A random start, so that parallel tests do not all try the same ports first.
    let first = rand::rng().random_range(LOWEST..HIGHEST);
    let found = (first..HIGHEST).chain(LOWEST..first).find(|port| has_second(*port) && reserve(*port));
    found.unwrap_or_else(|| panic!("no free port between {LOWEST} and {HIGHEST}"))
}

/// Whether the port above it is left free: every second thousand is given out.
fn has_second(port: u16) -> bool {
    (port / SECOND_LISTENER) % 2 == 1 && is_free(port + SECOND_LISTENER)
}

/// Reserves a port for this process; `false` if it is in use or reserved.
fn reserve(port: u16) -> bool {
    let folder = std::env::temp_dir().join("baton-harness-ports");
    std::fs::create_dir_all(&folder).expect("the folder for port locks can be made");
    let Ok(lock) = File::create(folder.join(port.to_string())) else { return false };
    let reserved = lock.try_lock().is_ok() && is_free(port);
    if reserved {
        RESERVED.lock().expect("no holder of this lock panics").push(lock);
    }
    reserved
}

/// The first of `count` consecutive ports, all reserved.
///
/// # Panics
/// When there is no such row.
pub fn free_row(count: u16) -> u16 {
    for _ in LOWEST..HIGHEST {
        // Reserved ports that are not part of a row stay reserved, and so are not tried again.
        let first = free_port();
        if (first + 1..first + count).all(reserve) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}

/// Listens on 127.0.0.1 and that port.
///
/// Between fork and exec a child process holds a copy of every socket of its parent. A port that was just left can
/// therefore be in use for some milliseconds more; this waits for it.
///
/// # Errors
/// When the port stays in use for 5 s.
pub async fn listen(port: u16) -> io::Result<TcpListener> {
    const PATIENCE: Duration = Duration::from_secs(5);
    let started = Instant::now();
    loop {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            Err(taken) if taken.kind() == io::ErrorKind::AddrInUse && started.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            listening => return listening,
        }
    }
}

/// Binds without listening: a copy of such a socket in a child process blocks nothing.
fn is_free(port: u16) -> bool {
    let bound = TcpSocket::new_v4().and_then(|socket| {
        socket.set_reuseaddr(true)?;
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    });
    bound.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_not_free() {
        let port = free_port();
        assert!(is_free(port));
        let listener = listen(port).await.expect("it is free");
        assert!(!is_free(port));
        drop(listener);
        assert!(is_free(port));
    }

    #[tokio::test]
    async fn listening_waits_for_a_port_that_is_about_to_be_left() {
        let port = free_port();
        let first = listen(port).await.expect("it is free");
        let leave = async move {
            tokio::task::yield_now().await;
            drop(first);
        };
        let (second, ()) = tokio::join!(listen(port), leave);
        second.expect("it was left");
    }
}
