//! Hints between brokers: "look at this queue". They carry no data and may be lost; the store is
//! the truth, and a lost signal costs latency only.

use async_trait::async_trait;
use tokio::sync::broadcast;

use crate::domain::{QueueName, Timestamp};

/// What a signal is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Topic {
    /// Something became eligible, or will at a time a waiting broker may not know.
    Insert,
    /// The queue was created, changed, paused, resumed, purged or deleted.
    Settings,
    /// Another broker's delivery was settled: its consumer may have room again.
    Settle,
}

impl Topic {
    /// The topic as one word: in messages and metrics.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Settings => "settings",
            Self::Settle => "settle",
        }
    }
}

/// A hint about one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signal {
    /// The queue.
    pub queue: QueueName,
    /// What it is about.
    pub topic: Topic,
    /// For inserts: nothing older than this has appeared. `None`: not known. When signals are
    /// coalesced the least counts, and `None` is less than all.
    pub since: Option<Timestamp>,
}

/// What a broker hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// Another broker's signal. One's own are not heard.
    Signal(Signal),
    /// Signals may have been missed (a reconnect): look at everything.
    Missed,
}

/// A way for brokers to hint each other.
#[async_trait]
pub trait Signals: Send + Sync + 'static {
    /// What to call it in logs and on the start-up banner, with no credentials in it.
    fn describe(&self) -> String;

    /// Sends a signal, soon and at best: returns at once, never fails. At most one equal
    /// (queue, topic) goes out per 50 ms: the first at once, what the window swallowed when it closes.
    fn publish(&self, signal: Signal);

    /// Hears the other brokers from now on. A receiver that lags has to take it as [`Notice::Missed`].
    fn subscribe(&self) -> broadcast::Receiver<Notice>;

    /// False while signals can not be sent or heard: deliveries go on, woken by polls.
    fn healthy(&self) -> bool;

    /// Sends what waits and stops the background tasks.
    async fn close(&self);
}
