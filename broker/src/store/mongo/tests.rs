//! The suite on a real MongoDB, and what only this store promises.

use super::*;
use crate::store::conformance::{Env, conformance};

/// Names the server the tests run on.
const VARIABLE: &str = "SLUICEGATE_TEST_MONGODB_URI";

fn uri() -> String {
    std::env::var(VARIABLE).unwrap_or_else(|_| {
        panic!(
            "{VARIABLE} is not set: these tests need a MongoDB replica set, for example \
             mongodb://127.0.0.1:27017/?replicaSet=rs0"
        )
    })
}

/// A database of its own, dropped at the end.
struct Scratch {
    uri: String,
    name: String,
}

impl Scratch {
    fn new() -> Self {
        Self { uri: uri(), name: format!("sluicegate_test_{:016x}", rand::random::<u64>()) }
    }

    async fn open(&self, clock: &Arc<Clock>) -> MongoStore {
        let options = MongoOptions { clock: clock.clone(), discipline: false, pool_size: 16 };
        MongoStore::connect(&self.uri, &self.name, options).await.expect("a store")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let (uri, name) = (self.uri.clone(), self.name.clone());
        // The test's runtime may be gone by now.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let client = Client::with_uri_str(&uri).await?;
                client.database(&name).drop().await
            })
        });
        if let Ok(Err(error)) = dropping.join() {
            eprintln!("the test's database stays: {error}");
        }
    }
}

async fn open() -> Env {
    let scratch = Scratch::new();
    let clock = Arc::new(Clock::system());
    let store = Arc::new(scratch.open(&clock).await);
    let other = Arc::new(scratch.open(&clock).await);
    Env::new(store, other, clock, scratch)
}

conformance!(super::open);
