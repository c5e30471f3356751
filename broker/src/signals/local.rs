//! Signals of a single broker, which has no other brokers to notify.

use async_trait::async_trait;
use tokio::sync::broadcast;

use super::{Notice, Signals};
use crate::domain::{ItemId, QueueName, Signal, Timestamp};

/// Signals of a broker that has its store to itself. The broker notifies its own consumers directly.
#[derive(Debug)]
pub(crate) struct LocalSignals {
    /// Kept open so that receivers wait instead of ending.
    silence: broadcast::Sender<Notice>,
}

impl LocalSignals {
    /// Returns signals without other brokers.
    pub(crate) fn new() -> Self {
        Self { silence: broadcast::Sender::new(1) }
    }
}

impl Default for LocalSignals {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Signals for LocalSignals {
    fn describe(&self) -> String {
        "local".to_owned()
    }

    fn publish(&self, _: Signal) {}

    fn awaits(&self, _: &QueueName) -> bool {
        false
    }

    fn announce(&self, _: &QueueName, _: Timestamp, _: Option<ItemId>) {}

    fn subscribe(&self) -> broadcast::Receiver<Notice> {
        self.silence.subscribe()
    }

    fn healthy(&self) -> bool {
        true
    }

    async fn close(&self) {}
}
