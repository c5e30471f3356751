//! The bytes that large requests may take in memory, and the share of each connection in them.
//!
//! A connection may hold three times what it leaves free. So a single connection gets most of the budget, many greedy ones
//! get less each, and whoever comes next always finds room for a request of ordinary size, however long others stall.

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::timeout};

use crate::grpc::status::ApiError;

/// A connection holds at most so many times the bytes that are free.
const PART: usize = 3;
/// The most requests of one connection that wait for room. Nobody reads what arrives of these meanwhile, and all of that
/// counts against the window of their connection. If they filled the window, not even settles would get through.
const MAX_WAITING: usize = 6;
/// How long a request waits for room.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The other end of a connection; `None` in tests.
pub(super) type Connection = Option<SocketAddr>;

#[derive(Debug)]
pub(super) struct Budget {
    bytes: usize,
    shares: Mutex<Shares>,
    /// Notified when bytes become free.
    freed: Notify,
}

#[derive(Debug)]
struct Shares {
    free: usize,
    of_connections: HashMap<Connection, Share>,
}

#[derive(Debug, Default)]
struct Share {
    held: usize,
    waiting: usize,
}

impl Budget {
    pub(super) fn new(bytes: usize) -> Arc<Self> {
        let shares = Mutex::new(Shares { free: bytes, of_connections: HashMap::new() });
        Arc::new(Self { bytes, shares, freed: Notify::new() })
    }

    /// Waits until there is room for a request of so many bytes. A request larger than the share of a single connection
    /// takes all of that share.
    pub(super) async fn take(
        self: &Arc<Self>,
        connection: Connection,
        bytes: usize,
    ) -> Result<Held, ApiError> {
        let bytes = bytes.min(self.bytes - self.bytes / (PART + 1) - 1);
        if let Some(held) = self.try_take(connection, bytes) {
            return Ok(held);
        }
        let _waiting = Waiting::begin(self, connection).ok_or(ApiError::TooManyLargeRequests)?;
        let wait = async {
            loop {
                // It is notified of whatever becomes free from here on.
                let freed = self.freed.notified();
                if let Some(held) = self.try_take(connection, bytes) {
                    return held;
                }
                freed.await;
            }
        };
        timeout(MAX_WAIT, wait).await.map_err(|_| ApiError::TooManyLargeRequests)
    }

    fn try_take(self: &Arc<Self>, connection: Connection, bytes: usize) -> Option<Held> {
        let mut shares = self.shares.lock();
        let left = shares.free.checked_sub(bytes)?;
        let held = shares.of_connections.get(&connection).map_or(0, |share| share.held) + bytes;
        if held > left.saturating_mul(PART) {
            return None;
        }
        shares.free = left;
        shares.of_connections.entry(connection).or_default().held = held;
        Some(Held { budget: Arc::clone(self), connection, bytes })
    }

    /// Changes the share of a connection, which is forgotten when nothing is left of it.
    fn change<T>(
        &self,
        connection: Connection,
        change: impl FnOnce(&mut usize, &mut Share) -> T,
    ) -> T {
        let mut shares = self.shares.lock();
        let Shares { free, of_connections } = &mut *shares;
        let share = of_connections.entry(connection).or_default();
        let changed = change(free, share);
        if share.held == 0 && share.waiting == 0 {
            of_connections.remove(&connection);
        }
        changed
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        let shares = self.shares.lock();
        assert!(shares.free < self.bytes || shares.of_connections.is_empty());
        shares.free
    }
}

/// Bytes of the budget that a request holds.
#[derive(Debug)]
pub(super) struct Held {
    budget: Arc<Budget>,
    connection: Connection,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.change(self.connection, |free, share| {
            *free += self.bytes;
            share.held -= self.bytes;
        });
        self.budget.freed.notify_waiters();
    }
}

/// A request that waits for room.
struct Waiting<'a> {
    budget: &'a Budget,
    connection: Connection,
}

impl<'a> Waiting<'a> {
    /// Returns `None` if too many requests of the connection wait already.
    fn begin(budget: &'a Budget, connection: Connection) -> Option<Self> {
        budget.change(connection, |_, share| {
            let waits = share.waiting < MAX_WAITING;
            share.waiting += usize::from(waits);
            waits.then(|| Self { budget, connection })
        })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.budget.change(self.connection, |_, share| share.waiting -= 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, future::join_all};

    use super::*;

    const MIB: usize = 1 << 20;

    fn connection(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    /// Requests that declare much and send nothing hold up nobody else, whether they come over one connection or many.
    #[tokio::test]
    async fn those_that_stall_leave_room_for_the_requests_of_others() {
        for connections in [1, 16, 100] {
            let budget = Budget::new(256 * MIB);
            let mut stalled = Vec::new();
            for n in 0..16 * connections {
                let take = budget.take(Some(connection(n % connections)), 16 * MIB).now_or_never();
                stalled.extend(take.and_then(Result::ok));
            }
            assert!(stalled.len() >= 12, "a few greedy ones get most of it: {}", stalled.len());
            let take = budget.take(Some(connection(9_999)), 100 << 10).now_or_never();
            take.expect("another connection does not wait").unwrap();
            drop(stalled);
            assert_eq!(budget.free(), 256 * MIB);
        }
    }

    /// What waits is not read. So few requests of a connection wait, and none of them for long.
    #[tokio::test(start_paused = true)]
    async fn few_requests_of_a_connection_wait_and_not_for_ever() {
        let budget = Budget::new(16 * MIB);
        let held = budget.take(None, 12 * MIB - 4).await.unwrap();
        let mut waiting: Vec<_> =
            (0..MAX_WAITING).map(|_| Box::pin(budget.take(None, MIB))).collect();
        for wait in &mut waiting {
            assert!(wait.now_or_never().is_none());
        }
        let refused = budget.take(None, MIB).now_or_never().unwrap().unwrap_err();
        assert!(matches!(refused, ApiError::TooManyLargeRequests), "{refused}");
        for refused in join_all(waiting).await {
            assert!(matches!(refused, Err(ApiError::TooManyLargeRequests)), "{refused:?}");
        }
        let mut next = Box::pin(budget.take(None, MIB));
        assert!((&mut next).now_or_never().is_none());
        drop(held);
        drop(next.await.unwrap());
        assert_eq!(budget.free(), 16 * MIB);
    }
}
