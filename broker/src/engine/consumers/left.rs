//! Streams that leave what they were assigned: they are not polled, because their clients do not read.

use std::time::Duration;

use tokio::time::Instant;

use super::{ConsumerId, Consumers, EngineError};
use crate::domain::Timestamp;

/// A stream that leaves items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct Left {
    pub(in crate::engine) stream: ConsumerId,
    /// Since when.
    pub(in crate::engine) since: Instant,
}

impl Consumers {
    /// Returns the streams that have left items for at least so long.
    pub(in crate::engine) fn left(&self, time: Duration) -> impl Iterator<Item = Left> {
        let all = self.streams.iter();
        let left =
            all.filter_map(|(&stream, one)| Some(Left { stream, since: one.inbox.left_since()? }));
        left.filter(move |left| left.since.elapsed() >= time)
    }

    /// Takes back what a stream was assigned and not sent. It is assigned nothing more before it is polled. If its items are committed
    /// already, they are lost, as they are when such a stream breaks, and it ends.
    pub(in crate::engine) fn take_back(&mut self, id: ConsumerId, now: Timestamp) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.hungry = false;
        if stream.settings.auto_commit {
            stream.inbox.clear();
            stream.end.get_or_insert(EngineError::NotRead);
            stream.wake.notify_one();
            return;
        }
        let back = stream.take_unsent();
        stream.taken_back += u64::from(!back.is_empty());
        self.give_back(back, now);
    }
}
