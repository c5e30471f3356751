//! The model passes the test suite of all stores.

use std::sync::Arc;

use sluicegate_broker::{
    domain::{Clock, Timestamp},
    store::{
        Result,
        conformance::{Env, conformance},
    },
};
use sluicegate_sim::store::{Database, Link, ModelStore};

/// A way on which nothing is lost.
struct Safe(Arc<Clock>);

impl Link for Safe {
    async fn request(&self, _call: &'static str) -> Result<()> {
        Ok(())
    }

    async fn answer(&self, _call: &'static str) -> Result<()> {
        Ok(())
    }

    fn is_alive(&self) -> bool {
        true
    }

    fn now(&self) -> Timestamp {
        self.0.now()
    }
}

async fn open() -> Env {
    let (database, clock) = (Database::default(), Arc::new(Clock::system()));
    let broker = |id| {
        let link = Arc::new(Safe(Arc::clone(&clock)));
        Arc::new(ModelStore::new(&database, link, [id; 4]))
    };
    let (store, other) = (broker(1), broker(2));
    let upkeep = {
        let (database, clock) = (database.clone(), Arc::clone(&clock));
        move || {
            database.sweep(clock.now());
            std::future::ready(())
        }
    };
    Env::new(store, other, clock, upkeep, database)
}

conformance!(super::open);
