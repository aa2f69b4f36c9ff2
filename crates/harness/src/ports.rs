//! Ports that a server can leave and take again.
//!
//! The kernel hands out ports from 32768 upwards to outgoing connections, so a server that stops and starts again on
//! such a port may find it taken. These are below, and a lock file per port keeps parallel test processes apart.

use std::{
    fs::File,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Mutex,
    time::{Duration, Instant},
};

use rand::RngExt;
use tokio::net::{TcpListener, TcpSocket};

const LOWEST: u16 = 11_000;
const HIGHEST: u16 = 32_000;

/// Held until the process ends: a port once given out here is given out to nobody else, running or not.
static TAKEN: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// A port on 127.0.0.1 that is free now, and that no other caller of this function will get.
///
/// # Panics
/// When none is left.
pub fn free_port() -> u16 {
    // A random start, so that parallel tests do not all try the same ports first.
    let first = rand::rng().random_range(LOWEST..HIGHEST);
    let found = (first..HIGHEST).chain(LOWEST..first).find(|port| take(*port));
    found.unwrap_or_else(|| panic!("no free port between {LOWEST} and {HIGHEST}"))
}

/// Takes that port for this process, unless somebody has it.
fn take(port: u16) -> bool {
    let folder = std::env::temp_dir().join("baton-harness-ports");
    std::fs::create_dir_all(&folder).expect("the folder for port locks can be made");
    let Ok(lock) = File::create(folder.join(port.to_string())) else { return false };
    let taken = lock.try_lock().is_ok() && is_free(port);
    if taken {
        TAKEN.lock().expect("no holder of this lock panics").push(lock);
    }
    taken
}

/// The first of so many ports in a row, all free now and given to nobody else.
///
/// # Panics
/// When there is no such row.
pub fn free_row(count: u16) -> u16 {
    for _ in LOWEST..HIGHEST {
        // What is taken and not in a row is kept, and so not tried again.
        let first = free_port();
        if (first + 1..first + count).all(take) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}

/// Listens on 127.0.0.1 and that port.
///
/// A process that is being started has, until it runs its own program, a copy of every socket of the one that starts it.
/// A port that was just left is therefore taken for some milliseconds more, and is waited for.
pub(crate) async fn listen(port: u16) -> io::Result<TcpListener> {
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

/// Without listening: a copy of a socket that only looked is in nobody's way.
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
    async fn a_port_that_is_about_to_be_left_is_waited_for() {
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
