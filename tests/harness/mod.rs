//! The common part of all tests: brokers and servers as real processes, and short names for the
//! calls.

mod api;
mod broker;
mod brokers;
mod port;
mod proxy;
mod servers;
mod store;

use std::{future::Future, time::Duration};

pub(crate) use api::{
    Api, at, bad_fields, duration, error_reason, new_item, outcomes, payloads, retry_after, text,
};
pub(crate) use broker::{Broker, Launch, binary};
pub(crate) use brokers::Brokers;
pub(crate) use proxy::Proxy;
pub(crate) use servers::{MongoServer, MongoSet, RedisServer, redis_url};
pub(crate) use store::{Backend, TestStore};

/// How long a test waits for something that must happen. Generous, because it is not a measurement.
pub(crate) const LIMIT: Duration = Duration::from_mins(1);

/// Awaits `future`; panics with `what` if it takes longer than [`LIMIT`].
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    let Ok(value) = tokio::time::timeout(LIMIT, future).await else {
        panic!("{what}: nothing within {LIMIT:?}");
    };
    value
}

/// Repeats `ask` until it returns a value. Panics with `what` after [`LIMIT`].
pub(crate) async fn until<T, F>(what: &str, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    within(what, async {
        loop {
            if let Some(value) = ask().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

/// Makes a test of each named `async fn(Backend)` for each backend: `sqlite::name`, `mongodb::name`.
macro_rules! on_both_backends {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name($crate::harness::Backend::Sqlite).await;
                }
            )+
        }
        mod mongodb {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name($crate::harness::Backend::Mongo).await;
                }
            )+
        }
    };
}
pub(crate) use on_both_backends;
