//! The bound on what waits in the queues: it makes "as fast as possible" mean pushes as well as deliveries.

use std::{sync::Arc, time::Instant};

use tokio::sync::Semaphore;

/// Bounds the items that are pushed and not delivered yet. Producers acquire capacity and wait while there is none;
/// consumers release it.
#[derive(Debug, Clone)]
pub(crate) struct BacklogLimit(Option<Arc<Semaphore>>);

impl BacklogLimit {
    /// A limit of `n` items; `None`: no limit.
    pub(crate) fn new(n: Option<u32>) -> Self {
        Self(n.map(|n| Arc::new(Semaphore::new(n as usize))))
    }

    /// Waits for capacity for `n` items. Returns false if there was none by `until`.
    pub(crate) async fn acquire(&self, n: u32, until: Option<Instant>) -> bool {
        let Some(permits) = &self.0 else { return true };
        let acquiring = permits.acquire_many(n);
        let acquired = match until {
            Some(until) => tokio::time::timeout_at(until.into(), acquiring).await.ok(),
            None => Some(acquiring.await),
        };
        match acquired {
            Some(Ok(permits)) => {
                permits.forget();
                true
            }
            _ => false,
        }
    }

    /// Releases capacity for `n` items.
    pub(crate) fn release(&self, n: usize) {
        if let Some(permits) = &self.0 {
            permits.add_permits(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn producers_wait_until_something_is_delivered() {
        let limit = BacklogLimit::new(Some(3));
        assert!(limit.acquire(2, None).await);
        let soon = Instant::now() + Duration::from_millis(10);
        assert!(!limit.acquire(2, Some(soon)).await);
        limit.release(1);
        assert!(limit.acquire(2, None).await);
    }
}
