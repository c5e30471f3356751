//! Hints between brokers: "look at this queue". They carry no data and may be lost; the store is
//! the truth, and a lost signal costs latency only.

mod coalesce;
mod local;
mod message;
mod mongo;
mod redis;
mod relay;

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::broadcast;

pub(crate) use self::coalesce::WINDOW;
pub use self::local::LocalSignals;
use self::{mongo::Mongo, redis::Redis, relay::Relay};
use crate::{config::SignalsUri, domain::Signal, metrics::Metrics};

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

/// Signals can not work at all with what was configured.
#[derive(Debug, thiserror::Error)]
#[error("signals over {signals}: {reason}")]
pub struct OpenError {
    signals: String,
    reason: String,
}

/// Opens signals between the brokers that share `database`. A server that is not there is no error:
/// that is logged, `healthy` is false, and it is tried again until `close`. Takes up to 3 s.
pub async fn open(
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

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod test_servers;
