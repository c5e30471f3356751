//! Hints between brokers that a queue has changed. Signals carry no items and may be lost. The
//! truth is in the store, so that a lost signal costs latency only.

mod coalesce;
#[cfg(test)]
mod fuzz;
mod local;
mod message;
mod mongo;
mod redis;
mod relay;
#[cfg(feature = "simulation")]
mod simulated;

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::broadcast;

pub(crate) use self::coalesce::WINDOW;
pub(crate) use self::local::LocalSignals;
#[cfg(feature = "simulation")]
pub use self::simulated::Wire;
use self::{mongo::Mongo, redis::Redis, relay::Relay};
#[cfg(doc)]
use crate::domain::Topic;
use crate::{
    config::SignalsUri,
    domain::{ItemId, QueueName, Signal, Timestamp},
    metrics::Metrics,
};

/// What a broker receives from others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A signal of another broker. A broker does not receive its own signals.
    Signal(Signal),
    /// Signals may have been missed (a reconnect): scan all queues.
    Missed,
}

/// A way for brokers to notify each other.
#[async_trait]
pub(crate) trait Signals: Send + Sync + 'static {
    /// Returns the name for logs and the start-up banner, without credentials.
    fn describe(&self) -> String;

    /// Queues a signal, which is sent soon if it can be sent at all. Returns immediately and never
    /// fails. Of signals with equal queue and topic at most one is sent per 50 ms: the first
    /// immediately, and the others merged at the end of the 50 ms. [`Topic::Wanted`] is sent each time. It
    /// ends the 50 ms of the queue's inserts at all brokers that receive it, if they have merged inserts that its sender has not found.
    fn publish(&self, signal: Signal);

    /// Returns true if another broker waits for the queue's next insert: if [`Topic::Wanted`] was received, and no insert has been
    /// announced since.
    fn awaits(&self, queue: &QueueName) -> bool;

    /// Signals an insert that is not stored yet, of items that are eligible from `since` on, if another broker [waits](Self::awaits) for
    /// one. If it is one `item`, the other broker may claim it by its id. It has to be signalled again when it is stored, or when that
    /// is not known, because the other broker may look for it too early.
    fn announce(&self, queue: &QueueName, since: Timestamp, item: Option<ItemId>);

    /// Receives the signals of other brokers from now on. A receiver that lags has to treat this as [`Notice::Missed`].
    fn subscribe(&self) -> broadcast::Receiver<Notice>;

    /// Returns false while signals cannot be sent or received. Deliveries continue by fallback
    /// polls.
    fn healthy(&self) -> bool;

    /// Sends the queued signals and stops the background tasks.
    async fn close(&self);
}

/// Signals cannot work with the given settings.
#[derive(Debug, thiserror::Error)]
#[error("signals over {signals}: {reason}")]
pub(crate) struct OpenError {
    signals: String,
    reason: String,
}

/// Opens signals between the brokers that share `database`, within 3 s. A server that cannot be reached is no error: this
/// is logged, `healthy` returns false, and connecting is tried again until `close`.
pub(crate) async fn open(
    signals: &SignalsUri,
    broker: [u8; 4],
    database: &str,
    metrics: Arc<Metrics>,
) -> Result<Arc<dyn Signals>, OpenError> {
    let wrong = |reason: String| OpenError { signals: signals.to_string(), reason };
    let description = signals.to_string();
    match signals {
        SignalsUri::Local => Ok(Arc::new(LocalSignals::new())),
        SignalsUri::Redis { uri } => {
            let redis = Redis::new(uri, broker, database, description)
                .map_err(|error| wrong(error.to_string()))?;
            Ok(Arc::new(Relay::start(redis, broker, metrics).await))
        }
        SignalsUri::Mongo { uri } => {
            let mongo = Mongo::new(uri, broker, database, description)
                .await
                .map_err(|error| wrong(error.to_string()))?;
            Ok(Arc::new(Relay::start(mongo, broker, metrics).await))
        }
    }
}

/// Opens signals over the way that a simulation provides.
#[cfg(feature = "simulation")]
pub(crate) async fn open_simulated(
    wire: Arc<dyn Wire>,
    broker: [u8; 4],
    metrics: Arc<Metrics>,
) -> Arc<dyn Signals> {
    let transport = simulated::Simulated { wire, broker };
    Arc::new(Relay::start(transport, broker, metrics).await)
}

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod test_servers;
