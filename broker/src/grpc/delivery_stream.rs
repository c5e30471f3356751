//! What goes out to a consumer, on Consume and on ConsumeStream alike.

use std::{collections::VecDeque, pin::Pin, time::Duration};

use rand::Rng;
use sluicegate_proto::v1 as pb;
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::{Api, convert};
use crate::engine::{EngineError, Received, Revoked, Subscription};

/// How long a consumer may at most take to settle what it holds when its stream is old.
const LONGEST_FAREWELL: Duration = Duration::from_mins(1);

/// Waits for the time; for ever if there is none.
async fn passed(time: &mut Option<Pin<Box<Sleep>>>) {
    match time {
        Some(time) => time.await,
        None => std::future::pending().await,
    }
}

/// What goes out on a subscription: messages that every client can receive, each taken from the
/// subscription when the connection is ready for it, as that counts as sent.
pub(super) struct DeliveryStream {
    subscription: Subscription,
    auto_commit: bool,
    shutdown: CancellationToken,
    /// When it retires, then when it ends; `None`: when the client likes.
    age: Option<Pin<Box<Sleep>>>,
    retiring: bool,
    /// Taken from the subscription, to be told one by one.
    revoked: VecDeque<Revoked>,
}

/// One message.
pub(super) enum Message {
    /// Items for the consumer.
    Deliveries(pb::ConsumeResponse),
    /// An item that it no longer holds.
    Revoked(pb::Revoked),
}

impl DeliveryStream {
    pub(super) fn new(subscription: Subscription, auto_commit: bool, api: &Api) -> Self {
        let age = api.max_connection_age;
        // Later than any connection is told to end: the next stream is on another connection.
        let age = (!age.is_zero()).then(|| age.mul_f64(rand::rng().random_range(1.1..=1.2)));
        Self {
            subscription,
            auto_commit,
            shutdown: api.shutdown.clone(),
            age: age.map(|age| Box::pin(sleep(age))),
            retiring: false,
            revoked: VecDeque::new(),
        }
    }

    /// The stream is old: its consumer settles what it holds, for as long as one lease, and then opens another one.
    fn grow_old(&mut self) -> Result<(), EngineError> {
        if self.retiring {
            return Err(EngineError::StreamTooOld);
        }
        self.retiring = true;
        self.subscription.retire();
        let grace = self.subscription.lease().min(LONGEST_FAREWELL);
        self.age = Some(Box::pin(sleep(grace)));
        Ok(())
    }

    /// The next message; an error when the stream has to end. May be dropped and called again at
    /// any time: nothing is lost.
    pub(super) async fn next(&mut self) -> Result<Message, EngineError> {
        loop {
            if let Some(revoked) = self.revoked.pop_front() {
                return Ok(Message::Revoked(convert::revoked(&revoked)));
            }
            let received = tokio::select! {
                biased;
                () = passed(&mut self.age) => {
                    self.grow_old()?;
                    continue;
                }
                received = self.subscription.next() => received?,
                () = self.shutdown.cancelled() => return Err(EngineError::ShuttingDown),
            };
            match received {
                Received::Deliveries(deliveries) => {
                    let deliver = |delivery| convert::delivery(delivery, self.auto_commit);
                    let deliveries = deliveries.into_iter().map(deliver).collect();
                    return Ok(Message::Deliveries(pb::ConsumeResponse { deliveries }));
                }
                Received::Revoked(revoked) => self.revoked.extend(revoked),
            }
        }
    }

    /// The next deliveries, of a subscription that does not ask for what is revoked.
    pub(super) async fn deliveries(&mut self) -> Result<pb::ConsumeResponse, EngineError> {
        loop {
            if let Message::Deliveries(deliveries) = self.next().await? {
                return Ok(deliveries);
            }
        }
    }
}
