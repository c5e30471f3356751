//! What goes out to a consumer, on Consume and on ConsumeStream alike.

use std::{collections::VecDeque, time::Duration};

use sluicegate_proto::v1 as pb;
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Api, convert};
use crate::engine::{EngineError, Received, Retirement, Revoked, Subscription};

/// How long a consumer may at most take to settle what it holds when its stream is old.
const LONGEST_FAREWELL: Duration = Duration::from_mins(1);

/// Of a stream that is old its consumer settles what it holds, for so long, and then opens another one.
async fn grow_old(retirement: Retirement, age: Duration, grace: Duration) {
    sleep(age).await;
    retirement.begin();
    sleep(grace).await;
    retirement.end();
}

/// What goes out on a subscription: messages that every client can receive, each taken from the
/// subscription when the connection is ready for it, as that counts as sent.
pub(super) struct DeliveryStream {
    subscription: Subscription,
    auto_commit: bool,
    shutdown: CancellationToken,
    /// Taken from the subscription, to be told one by one.
    revoked: VecDeque<Revoked>,
    /// Its age is watched until it is dropped.
    _aging: Option<DropGuard>,
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
        let aging = api.stream_age().map(|age| {
            // In a task of its own: a stream whose client does not read is not polled.
            let stop = api.shutdown.child_token();
            let grace = subscription.lease().min(LONGEST_FAREWELL);
            let grow_old = grow_old(subscription.retirement(), age, grace);
            let stopped = stop.clone();
            api.tasks.spawn(async move { stopped.run_until_cancelled(grow_old).await });
            stop.drop_guard()
        });
        let shutdown = api.shutdown.clone();
        Self { subscription, auto_commit, shutdown, revoked: VecDeque::new(), _aging: aging }
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
