//! A consumer: its settings, and how it is started.

use std::{error::Error as StdError, future::Future, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use super::{
    decision::Decision,
    options::{Options, Renewal},
    runner::{self, Runner},
    settle::Summary,
};
use crate::{client::Client, error::Result, item::Delivery, retry::Backoff};

/// Takes items of one queue and runs a handler for each. Made by [`Client::consumer`].
#[derive(Debug, Clone)]
#[must_use = "a consumer does nothing until it runs"]
pub struct Consumer {
    client: Client,
    options: Options,
}

impl Client {
    /// Returns a consumer of `queue`, at the next address.
    pub fn consumer(&self, queue: impl Into<String>) -> Consumer {
        Consumer::new(self.elsewhere(), queue.into())
    }
}

impl Consumer {
    fn new(client: Client, queue: String) -> Self {
        Self {
            client,
            options: Options {
                queue,
                name: String::new(),
                max_in_flight: 32,
                max_in_flight_bytes: 0,
                concurrency: None,
                lease: None,
                renewal: Renewal::default(),
                auto_commit: false,
                streaming: true,
                shutdown: CancellationToken::new(),
                grace: Duration::from_secs(30),
                backoff: Backoff::default(),
                give_up_after: None,
                limit: None,
                idle_exit: None,
            },
        }
    }

    /// Name of the consumer, shown with each item. Formed like a queue name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = name.into();
        self
    }

    /// How many items may be held unsettled at a time: 1 to 10,000. Default 32.
    pub fn max_in_flight(mut self, items: u32) -> Self {
        self.options.max_in_flight = items.clamp(1, 10_000);
        self
    }

    /// How many payload bytes may be held unsettled at a time; 0, the default: no limit.
    pub fn max_in_flight_bytes(mut self, bytes: u64) -> Self {
        self.options.max_in_flight_bytes = bytes;
        self
    }

    /// How many handlers may run at a time. Default: as many as items may be held. Fewer means that
    /// items are fetched ahead.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.options.concurrency = Some(handlers);
        self
    }

    /// Lease of each item, 100 ms to the broker's `max_lease`. Default: the queue's.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = Some(lease);
        self
    }

    /// Who prolongs leases. Default: the broker.
    pub fn renewal(mut self, renewal: Renewal) -> Self {
        self.options.renewal = renewal;
        self
    }

    /// Has each item committed as it is delivered: at most once. Whether the handler succeeds changes nothing.
    pub fn at_most_once(mut self) -> Self {
        self.options.auto_commit = true;
        self
    }

    /// Delivers by `Consume` and settles by unary calls, for proxies that do not pass streams both ways. By default all goes over
    /// one `ConsumeStream`: with higher throughput, the broker telling at once when an item is [no longer
    /// held](Delivery::lease_lost), and at shutdown deliveries stop before the items not started are given back.
    pub fn unary(mut self) -> Self {
        self.options.streaming = false;
        self
    }

    /// Shuts down when `token` is cancelled: takes no more items, lets running handlers finish, settles, and ends.
    pub fn shutdown(mut self, token: CancellationToken) -> Self {
        self.options.shutdown = token;
        self
    }

    /// How long running handlers may take after shutdown was asked for; then they are dropped and their items
    /// given back, without counting a failed attempt. Default 30 s.
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.options.grace = grace;
        self
    }

    /// How connecting and settling are repeated. A settle is repeated for `give_up_after`, connecting for ever
    /// unless [`Consumer::give_up_after`] is set.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.options.backoff = backoff;
        self
    }

    /// Ends with an error when no broker could be reached for this long. Default: never.
    pub fn give_up_after(mut self, time: Duration) -> Self {
        self.options.give_up_after = Some(time);
        self
    }

    /// Starts handlers for this many items, then shuts down. It is handed no more than these; a
    /// [unary](Consumer::unary) consumer gives back what it is handed beyond them.
    pub fn limit(mut self, items: u64) -> Self {
        self.options.limit = Some(items);
        let most = u32::try_from(items.max(1)).unwrap_or(u32::MAX);
        self.options.max_in_flight = self.options.max_in_flight.min(most);
        self
    }

    /// Shuts down when there was nothing to do for this long.
    pub fn idle_exit(mut self, time: Duration) -> Self {
        self.options.idle_exit = Some(time);
        self
    }

    /// Runs `handler` for each item until shutdown. `Ok` commits the item; an error gives it back with the error's
    /// text as reason, as a [`Retry`](crate::Retry) in it says, else by the queue's retry policy. A panic
    /// is a failed attempt and nothing more. Connections that break are made anew; their unfinished handlers go on,
    /// and settle if their items were not handed out anew meanwhile.
    ///
    /// # Errors
    /// [`Error::Status`] if the broker refuses the consumer (bad name, no such queue, not allowed), or
    /// could not be reached for [`Consumer::give_up_after`].
    pub async fn run<H, F, E>(self, handler: H) -> Result<Summary>
    where
        H: Fn(Delivery) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
    {
        self.run_deciding(move |delivery| {
            let work = handler(delivery);
            async move {
                match work.await {
                    Ok(()) => Decision::Commit,
                    Err(error) => Decision::from_error(error),
                }
            }
        })
        .await
    }

    /// As [`Consumer::run`], shutting down when `until` is ready; for example `tokio::signal::ctrl_c()`.
    ///
    /// # Errors
    /// As [`Consumer::run`].
    pub async fn run_until<U, H, F, E>(mut self, until: U, handler: H) -> Result<Summary>
    where
        U: Future,
        H: Fn(Delivery) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
    {
        let token = self.options.shutdown.child_token();
        self.options.shutdown = token.clone();
        let running = self.run(handler);
        tokio::pin!(running);
        tokio::select! {
            ended = &mut running => return ended,
            _ = until => token.cancel(),
        }
        running.await
    }

    /// What `run` and a station have in common: the handler decides how its item is settled.
    pub(crate) async fn run_deciding<H, F>(mut self, handler: H) -> Result<Summary>
    where
        H: Fn(Delivery) -> F + Send + Sync + 'static,
        F: Future<Output = Decision> + Send + 'static,
    {
        if self.options.renewal == Renewal::Client && self.options.lease.is_none() {
            self.options.lease = Some(Duration::from_secs(30));
        }
        if self.options.limit == Some(0) {
            return Ok(Summary::default());
        }
        let handler = Arc::new(move |delivery| -> runner::Work { Box::pin(handler(delivery)) });
        Runner::new(self.client, Arc::new(self.options), handler).run().await
    }
}
