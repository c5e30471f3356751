//! One broker alone: there is nobody to hint, and nothing to hear.

use async_trait::async_trait;
use tokio::sync::broadcast;

use super::{Notice, Signals};
use crate::domain::Signal;

/// Signals of a broker that has its store to itself. Its own consumers are woken directly.
#[derive(Debug)]
pub struct LocalSignals {
    /// Kept so that receivers wait instead of ending.
    silence: broadcast::Sender<Notice>,
}

impl LocalSignals {
    /// Signals to and from nobody.
    pub fn new() -> Self {
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

    fn subscribe(&self) -> broadcast::Receiver<Notice> {
        self.silence.subscribe()
    }

    fn healthy(&self) -> bool {
        true
    }

    async fn close(&self) {}
}
