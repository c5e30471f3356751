//! The bound on what waits in the queues, which makes "as fast as possible" mean in as well as out.

use std::{sync::Arc, time::Instant};

use tokio::sync::Semaphore;

/// Room for items that were pushed and are not delivered yet. Producers take it and wait while there is none;
/// consumers give it back.
#[derive(Debug, Clone)]
pub(super) struct Room(Option<Arc<Semaphore>>);

impl Room {
    /// For `n` items; `None`: no bound.
    pub(super) fn new(n: Option<u32>) -> Self {
        Self(n.map(|n| Arc::new(Semaphore::new(n as usize))))
    }

    /// Waits for room for `n` items; false if there was none by `until`.
    pub(super) async fn take(&self, n: u32, until: Option<Instant>) -> bool {
        let Some(room) = &self.0 else { return true };
        let taking = room.acquire_many(n);
        let taken = match until {
            Some(until) => tokio::time::timeout_at(until.into(), taking).await.ok(),
            None => Some(taking.await),
        };
        match taken {
            Some(Ok(permits)) => {
                permits.forget();
                true
            }
            _ => false,
        }
    }

    /// Gives room for `n` items back.
    pub(super) fn give(&self, n: usize) {
        if let Some(room) = &self.0 {
            room.add_permits(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn producers_wait_until_something_is_delivered() {
        let room = Room::new(Some(3));
        assert!(room.take(2, None).await);
        let soon = Instant::now() + Duration::from_millis(10);
        assert!(!room.take(2, Some(soon)).await);
        room.give(1);
        assert!(room.take(2, None).await);
    }
}
