//! Bounds what streams are assigned and not sent, as clients that read nothing leave it.

use std::{cmp::Reverse, sync::Arc, time::Duration};

use super::Engine;

/// A stream that is read is polled within this time after it was assigned items.
const PATIENCE: Duration = Duration::from_millis(100);

impl Engine {
    /// Takes items back from streams that leave them, whenever there are too many bytes of these.
    pub(super) async fn bound_unsent(self: Arc<Self>) {
        loop {
            self.unsent.until_over().await;
            self.take_back_unsent();
            tokio::time::sleep(PATIENCE).await;
        }
    }

    /// Takes back what was left for the longest, until the rest is not too much.
    fn take_back_unsent(self: &Arc<Self>) {
        let of = |dispatcher| move |left| (left, Arc::clone(dispatcher));
        let all = self.all_dispatchers();
        let mut left: Vec<_> =
            all.iter().flat_map(|one| one.left(PATIENCE).into_iter().map(of(one))).collect();
        left.sort_unstable_by_key(|(left, _)| Reverse(left.since));
        let mut count = 0;
        while self.unsent.is_over()
            && let Some((left, dispatcher)) = left.pop()
        {
            dispatcher.take_back(self, left.stream);
            count += 1;
        }
        if count > 0 {
            tracing::debug!(count, "items were taken back from streams that nobody reads");
        }
    }
}
