//! Ports that a server can leave and take again.
//!
//! The kernel hands out ports from 32768 upwards to outgoing connections, so a server that stops and starts again on
//! such a port may find it taken. These are below, and a lock file per port keeps parallel test processes apart.

use std::{
    fs::File,
    net::{Ipv4Addr, TcpListener},
    sync::Mutex,
};

use rand::RngExt;

const LOWEST: u16 = 11_000;
const HIGHEST: u16 = 32_000;

/// Held until the process ends: a port once given out here is given out to nobody else, running or not.
static TAKEN: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// A port on 127.0.0.1 that is free now, and that no other caller of this function will get.
///
/// # Panics
/// When none is left.
pub fn free_port() -> u16 {
    let folder = std::env::temp_dir().join("baton-harness-ports");
    std::fs::create_dir_all(&folder).expect("the folder for port locks can be made");
    // A random start, so that parallel tests do not all try the same ports first.
    let first = rand::rng().random_range(LOWEST..HIGHEST);
    for port in (first..HIGHEST).chain(LOWEST..first) {
        let Ok(lock) = File::create(folder.join(port.to_string())) else { continue };
        if lock.try_lock().is_err() {
            continue;
        }
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            TAKEN.lock().expect("no holder of this lock panics").push(lock);
            return port;
        }
    }
    panic!("no free port between {LOWEST} and {HIGHEST}");
}
