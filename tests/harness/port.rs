//! Ports for the servers of tests.

use std::{
    net::TcpListener,
    process,
    sync::atomic::{AtomicU32, Ordering},
};

/// Returns a port that no process listens on at the moment. It is none of those that connections get, so that it is still
/// free when the server begins to listen, and when one that was killed wants it again.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = process::id().wrapping_mul(97);
    loop {
        let next = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(first);
        let port = 10_000 + (next % 22_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
