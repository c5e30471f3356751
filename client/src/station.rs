//! Stations of a pipeline: consumers whose handlers say where the item goes next.
//!
//! An item is settled, and it or others made from it are put into the next queue, in one atomic step. So forks, choices and
//! loops are plain code, and no crash loses or duplicates an item on its way.
//!
//! ```no_run
//! use sluicegate_client::{Client, NewItem, Next};
//!
//! # async fn pipeline(client: Client) -> sluicegate_client::Result<()> {
//! client
//!     .station("parcels")
//!     .run(|parcel| async move {
//!         let weight: u32 = parcel.text()?.parse()?;
//!         Ok::<_, Box<dyn std::error::Error + Send + Sync>>(match weight {
//!             0 => Next::done(),
//!             1..=20 => Next::move_to("post").header("class", "small").into(),
//!             _ => Next::fork([("freight", NewItem::new("pallet")), ("bills", NewItem::new("12.50"))]),
//!         })
//!     })
//!     .await?;
//! # Ok(())
//! # }
//! ```

use std::{error::Error as StdError, future::Future, time::Duration};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use crate::{
    client::Client,
    consumer::{Consumer, Decision, Summary},
    error::Result,
    item::{Delivery, NewItem, to_proto_duration},
    proto::{self, MoveRequest, PushEntry},
    retry::Retry,
};

/// Where an item goes after a station.
#[derive(Debug, Clone)]
#[must_use = "it does nothing unless the handler returns it"]
pub struct Next {
    decision: Decision,
}

impl Next {
    /// Finishes the item, which is not forwarded.
    pub fn done() -> Self {
        Self { decision: Decision::Commit }
    }

    /// Moves the item into another queue of the same group; it stays the same item with the same id.
    pub fn move_to(queue: impl Into<String>) -> MoveTo {
        MoveTo { request: MoveRequest { to_queue: queue.into(), ..Default::default() } }
    }

    /// Finishes the item and pushes 1 to 1,000 new items into any queues of any groups, all or none. Without any items, this
    /// is [`Next::done`].
    pub fn fork<Q: Into<String>>(pushes: impl IntoIterator<Item = (Q, NewItem)>) -> Self {
        let pushes: Vec<PushEntry> = pushes
            .into_iter()
            .map(|(queue, item)| PushEntry { queue: queue.into(), item: Some(pushed(item)) })
            .collect();
        if pushes.is_empty() { Self::done() } else { Self { decision: Decision::Fork(pushes) } }
    }

    /// Rolls the item back, to be tried again later; see [`Retry`].
    pub fn retry(retry: Retry) -> Self {
        Self { decision: Decision::Rollback(retry) }
    }
}

/// Returns the message of an item that a handler pushes.
fn pushed(item: NewItem) -> proto::NewItem {
    #[cfg_attr(not(feature = "opentelemetry"), expect(unused_mut))]
    let mut item = item.into_proto();
    #[cfg(feature = "opentelemetry")]
    crate::trace::carry(&mut item.headers);
    item
}

/// The builder of a move; `into()` converts it to a [`Next`].
#[derive(Debug, Clone)]
#[must_use = "it does nothing unless the handler returns it"]
pub struct MoveTo {
    request: MoveRequest,
}

impl MoveTo {
    /// Replaces the payload.
    pub fn payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.request.payload = Some(payload.into());
        self
    }

    /// Replaces the content type.
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.request.content_type = Some(content_type.into());
        self
    }

    /// Adds or replaces one header; the others stay.
    pub fn header(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.headers.insert(key.into(), value.into());
        self
    }

    /// Replaces the priority, 0 to 9.
    pub fn priority(mut self, priority: u8) -> Self {
        self.request.priority = Some(i32::from(priority));
        self
    }

    /// Delivers the item there no earlier than this long from now; at most 10 years.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.request.delay = Some(to_proto_duration(delay));
        self
    }
}

impl From<MoveTo> for Next {
    fn from(to: MoveTo) -> Self {
        Self { decision: Decision::Move(to.request) }
    }
}

/// A consumer whose handler says where the item goes next. [`Client::station`] returns one.
#[derive(Debug, Clone)]
#[must_use = "a station does nothing until it runs"]
pub struct Station {
    consumer: Consumer,
}

impl Client {
    /// Returns a station on `queue`: a consumer whose handler says where the item goes next.
    pub fn station(&self, queue: impl Into<String>) -> Station {
        Station::from_consumer(self.consumer(queue))
    }
}

impl Station {
    /// Returns a station with the settings of `consumer`. It must not be an at-most-once consumer, whose items are finished
    /// before the handler gets them.
    pub fn from_consumer(consumer: Consumer) -> Self {
        Self { consumer }
    }

    /// See [`Consumer::max_in_flight`].
    pub fn max_in_flight(mut self, items: u32) -> Self {
        self.consumer = self.consumer.max_in_flight(items);
        self
    }

    /// See [`Consumer::shutdown`].
    pub fn shutdown(mut self, token: CancellationToken) -> Self {
        self.consumer = self.consumer.shutdown(token);
        self
    }

    /// Runs `handler` for each item until shutdown, and sends the item where the handler says. An error or a panic rolls the
    /// item back, as in [`Consumer::run`]; so does a destination that the broker refuses.
    ///
    /// # Errors
    /// As [`Consumer::run`].
    pub async fn run<H, F, E>(self, handler: H) -> Result<Summary>
    where
        H: Fn(Delivery) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Next, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
    {
        let deciding = move |delivery| {
            let work = handler(delivery);
            async move {
                match work.await {
                    Ok(next) => next.decision,
                    Err(error) => Decision::from_error(error),
                }
            }
        };
        self.consumer.run_deciding(deciding).await
    }
}
