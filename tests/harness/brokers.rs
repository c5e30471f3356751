//! Several brokers on one store, if the store supports several.

use super::{Api, Backend, Broker, TestStore, redis_url};

/// Connections to two brokers on MongoDB, or to one on SQLite. The brokers live as long as the
/// value.
pub(crate) struct Brokers {
    apis: Vec<Api>,
    _running: Vec<Broker>,
    _store: TestStore,
}

impl Brokers {
    pub(crate) async fn start(backend: Backend) -> Self {
        let store = backend.store();
        let (launch, count) = match backend {
            Backend::Mongo => (store.launch().signals(&redis_url()), 2),
            Backend::Sqlite => (store.launch(), 1),
        };
        let (mut running, mut apis) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let broker = launch.start().await;
            apis.push(broker.api().await);
            running.push(broker);
        }
        Self { apis, _running: running, _store: store }
    }

    /// Returns a connection to broker `number`, modulo the number of brokers.
    pub(crate) fn api(&self, number: usize) -> &Api {
        &self.apis[number % self.apis.len()]
    }
}
