//! The places of connections, and which connection is closed or has to wait for the sake of others.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::access::{Slowdown, Usage};

/// How many connections of an address may be ended in a minute because of what came over them, before its next ones wait.
const FORGIVEN: u32 = 1;
/// The most connections of an address that wait. When their wait is over, all of them may do their worst.
pub(super) const MOST_WAITING: usize = 32;

/// The connections that may be open at a time.
pub(super) struct Places {
    pub(super) free: Arc<Semaphore>,
    silent: Mutex<Silent>,
    /// How often connections of an address were ended because of what came over them.
    pub(super) ended: Slowdown,
}

/// The connections that may be closed for others, those that have been silent the longest first.
#[derive(Default)]
struct Silent {
    connections: BTreeMap<u64, (CancellationToken, Option<Arc<Usage>>)>,
    /// How many signs of life there have been so far.
    signs: u64,
}

impl Places {
    pub(super) fn new(most: usize) -> Self {
        let free = Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
        Self { free, silent: Mutex::default(), ended: Slowdown::new(FORGIVEN) }
    }

    /// Closes the connection that has been silent the longest, if there is one that may be closed.
    pub(super) fn close_most_silent(&self) {
        if let Some((_, (closing, _))) = self.silent.lock().connections.pop_first() {
            closing.cancel();
        }
    }

    /// Does the same among the connections of one peer. Returns false if there is none.
    pub(super) fn close_most_silent_of(&self, peer: &Arc<Usage>) -> bool {
        let mut silent = self.silent.lock();
        let is_of_peer =
            |usage: &Option<Arc<Usage>>| usage.as_ref().is_some_and(|u| Arc::ptr_eq(u, peer));
        let found = silent.connections.iter().find(|(_, (_, usage))| is_of_peer(usage));
        let Some(number) = found.map(|(number, _)| *number) else { return false };
        if let Some((closing, _)) = silent.connections.remove(&number) {
            closing.cancel();
        }
        true
    }
}

/// The place of one connection. Dropping it makes room for another.
pub(super) struct Place {
    places: Arc<Places>,
    /// The number of its last sign of life, if it may be closed for others.
    silent_since: Option<u64>,
    pub(super) closing: CancellationToken,
    /// Where the connection is counted, once there is one.
    pub(super) usage: Option<Arc<Usage>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Place {
    pub(super) async fn take(places: &Arc<Places>) -> Self {
        let permit = Arc::clone(&places.free).acquire_owned().await.ok(); // never closed
        let places = Arc::clone(places);
        let closing = CancellationToken::new();
        Self { places, silent_since: None, closing, usage: None, _permit: permit }
    }

    /// Puts the connection behind all others that may be closed.
    pub(super) fn sign_of_life(&mut self) {
        let mut silent = self.places.silent.lock();
        if let Some(since) = self.silent_since
            && silent.connections.remove(&since).is_none()
        {
            return; // the connection is being closed
        }
        silent.signs += 1;
        let signs = silent.signs;
        silent.connections.insert(signs, (self.closing.clone(), self.usage.clone()));
        self.silent_since = Some(signs);
    }

    /// Counts that the connection was ended because of what came over it from this network.
    pub(super) fn count_end(&self, network: IpAddr) {
        self.places.ended.failed(network);
    }

    /// Exempts the connection from being closed for others from now on.
    pub(super) fn keep(&mut self) {
        if let Some(since) = self.silent_since.take() {
            self.places.silent.lock().connections.remove(&since);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.keep();
        if let Some(usage) = &self.usage {
            usage.connections.release();
        }
    }
}

/// The wait of one connection before it is served. Dropping it lets another one wait.
pub(super) struct Wait {
    pub(super) delay: Duration,
    usage: Arc<Usage>,
}

impl Wait {
    /// Returns `None` if as many connections of this peer wait as may.
    pub(super) fn begin(usage: &Arc<Usage>, delay: Duration) -> Option<Self> {
        let waits = usage.waiting.take(MOST_WAITING);
        waits.then(|| Self { delay, usage: Arc::clone(usage) })
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.usage.waiting.release();
    }
}
