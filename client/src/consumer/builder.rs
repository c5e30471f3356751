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

/// Takes items of one queue and runs a handler for each. [`Client::consumer`] returns one.
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

    /// Sets the name of the consumer, which is shown with each item. The rules of queue names apply.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = name.into();
        self
    }

    /// Sets how many items may be held unsettled at a time, without those whose commits are being written: 1 to 10,000. Default 32.
    pub fn max_in_flight(mut self, items: u32) -> Self {
        self.options.max_in_flight = items.clamp(1, 10_000);
        self
    }

    /// Sets how many payload bytes may be held unsettled at a time, without those whose commits are being written; 0, the default: no limit.
    pub fn max_in_flight_bytes(mut self, bytes: u64) -> Self {
        self.options.max_in_flight_bytes = bytes;
        self
    }

    /// Sets how many handlers may run at a time. Default: as many as items may be held. With fewer, items are
    /// prefetched.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.options.concurrency = Some(handlers);
        self
    }

    /// Sets the lease of each item, 100 ms to the broker's `max_lease`. Default: the queue's.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = Some(lease);
        self
    }

    /// Sets who renews leases. Default: the broker.
    pub fn renewal(mut self, renewal: Renewal) -> Self {
        self.options.renewal = renewal;
        self
    }

    /// Lets the broker commit each item as it is delivered: at-most-once delivery. A handler that fails changes nothing.
    pub fn at_most_once(mut self) -> Self {
        self.options.auto_commit = true;
        self
    }

    /// Receives deliveries over `Consume` and settles by unary calls, for proxies that do not support bidirectional streams.
    ///
    /// By default both go over one `ConsumeStream`. That has the higher throughput, the broker reports immediately when an item
    /// is [no longer held](Delivery::lease_lost), at shutdown deliveries stop before unstarted items are rolled back, and running
    /// handlers keep their items when a connection breaks.
    pub fn unary(mut self) -> Self {
        self.options.streaming = false;
        self
    }

    /// Shuts down when `token` is cancelled: the consumer takes no more items, lets running handlers finish, settles
    /// their items, and ends.
    pub fn shutdown(mut self, token: CancellationToken) -> Self {
        self.options.shutdown = token;
        self
    }

    /// Sets how long handlers may run on after shutdown was requested. Then they are dropped, and their items are rolled
    /// back without counting a failed attempt. Default 30 s.
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.options.grace = grace;
        self
    }

    /// Sets the pauses between tries to connect and to settle. A settle is repeated for [`Backoff::give_up_after`]; tries to
    /// connect end only after [`Consumer::give_up_after`].
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.options.backoff = backoff;
        self
    }

    /// Ends the consumer with an error when no broker could be reached for this long. Default: never.
    pub fn give_up_after(mut self, time: Duration) -> Self {
        self.options.give_up_after = Some(time);
        self
    }

    /// Starts handlers for this many items, then shuts down. The broker delivers no more than these; a
    /// [unary](Consumer::unary) consumer rolls back what is delivered beyond them.
    pub fn limit(mut self, items: u64) -> Self {
        self.options.limit = Some(items);
        let most = u32::try_from(items.max(1)).unwrap_or(u32::MAX);
        self.options.max_in_flight = self.options.max_in_flight.min(most);
        self
    }

    /// Shuts down when there has been no work for this long.
    pub fn idle_exit(mut self, time: Duration) -> Self {
        self.options.idle_exit = Some(time);
        self
    }

    /// Runs `handler` for each item until shutdown.
    ///
    /// `Ok` commits the item. An error rolls it back with the error's text as reason: as the [`Retry`](crate::Retry) inside
    /// the error says if there is one, else by the queue's retry policy. A panic counts as a failed attempt.
    ///
    /// When a connection breaks, the consumer connects again. Running handlers keep their items, whose leases the consumer
    /// renews and which it settles. With [`Consumer::unary`] the broker rolls these items back instead, without a failed
    /// attempt, when it notices the break; and so does a broker that shuts down, for all its consumers. Then the handlers
    /// continue, [learn of it](Delivery::lease_lost), and their settles have no effect.
    ///
    /// A consumer that is killed or dropped does not roll its items back. They are delivered again when their leases have
    /// ended, which counts as a failed attempt, and so is an item that was on its way when the connection broke. Use
    /// [`Consumer::shutdown`] to end a consumer.
    ///
    /// # Errors
    /// [`Error::Status`](crate::Error::Status) if the broker refuses the consumer (bad name, no such queue, not allowed), or
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

    /// Does as [`Consumer::run`], and shuts down when `until` is ready, for example `tokio::signal::ctrl_c()`.
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

    /// Runs a handler that decides how its item is settled; common to consumers and stations.
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
        #[cfg(feature = "opentelemetry")]
        let handler = {
            let queue = self.options.queue.clone();
            move |delivery| crate::trace::run(&queue, delivery, &handler)
        };
        let handler = Arc::new(move |delivery| -> runner::Work { Box::pin(handler(delivery)) });
        Runner::new(self.client, Arc::new(self.options), handler).run().await
    }
}
