//! Several brokers on one store, where a store can have several.

use super::{Api, Backend, Broker, TestStore, redis_url};

/// Two brokers on MongoDB, one on SQLite, as connections; they live as long as the value.
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

    /// A connection to the broker of this number, counted round and round.
    pub(crate) fn api(&self, number: usize) -> &Api {
        &self.apis[number % self.apis.len()]
    }
}
