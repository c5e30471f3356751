//! The messages to a consumer, on Consume and ConsumeStream.

use std::{
    collections::VecDeque,
    future,
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use sluicegate_proto::v1 as pb;
use tokio::time::sleep;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Api, convert, status::ApiError};
use crate::{
    access::{Caller, Refused},
    domain::Action,
    engine::{Engine, EngineError, Received, Retirement, Revoked, Subscription},
    traces::{Operation, Traces},
};

/// Most time that a consumer gets to settle its items when its stream has reached its maximum age.
const LONGEST_FAREWELL: Duration = Duration::from_mins(1);

/// Retires a stream after `age`, and ends it after another `grace`, in which its consumer settles
/// the items it holds.
async fn grow_old(retirement: Retirement, age: Duration, grace: Duration) {
    sleep(age).await;
    retirement.begin();
    sleep(grace).await;
    retirement.end();
}

/// The outgoing messages of a subscription, of a size that every client can receive. Each message
/// is taken from the subscription when the connection is ready for it, because that counts as sent.
pub(super) struct DeliveryStream {
    subscription: Subscription,
    auto_commit: bool,
    engine: Arc<Engine>,
    traces: Traces,
    shutdown: CancellationToken,
    /// Done when the caller may no longer consume from the queue.
    refused: Pin<Box<dyn Future<Output = Refused> + Send>>,
    /// Revocations taken from the subscription, to be sent one by one.
    revoked: VecDeque<Revoked>,
    /// Watches the age of the stream until it is dropped.
    _aging: Option<DropGuard>,
}

/// One message to the consumer.
pub(super) enum Message {
    /// Items for the consumer.
    Deliveries(pb::ConsumeResponse),
    /// An item that the consumer no longer holds.
    Revoked(pb::Revoked),
}

impl DeliveryStream {
    pub(super) fn new(
        subscription: Subscription,
        auto_commit: bool,
        api: &Api,
        caller: Caller,
    ) -> Self {
        let queue = subscription.queue().to_string();
        let refused = Box::pin(caller.lost(Action::Consume, queue));
        let aging = api.stream_age().map(|age| {
            // The age is watched in a task of its own, because a stream whose client does not read
            // is not polled.
            let stop = api.shutdown.child_token();
            let grace = subscription.lease().min(LONGEST_FAREWELL);
            let grow_old = grow_old(subscription.retirement(), age, grace);
            let stopped = stop.clone();
            api.tasks.spawn(async move { stopped.run_until_cancelled(grow_old).await });
            stop.drop_guard()
        });
        let shutdown = api.shutdown.clone();
        let revoked = VecDeque::new();
        let (engine, traces) = (Arc::clone(&api.engine), api.traces.clone());
        Self {
            subscription,
            auto_commit,
            engine,
            traces,
            shutdown,
            refused,
            revoked,
            _aging: aging,
        }
    }

    /// Returns the next message, or an error when the stream has to end. Cancel-safe: the future
    /// may be dropped and the method called again without a loss.
    pub(super) async fn next(&mut self) -> Result<Message, ApiError> {
        loop {
            if let Some(revoked) = self.revoked.pop_front() {
                return Ok(Message::Revoked(convert::revoked(
                    &revoked,
                    &self.engine.receipt_keys(),
                )));
            }
            let received = tokio::select! {
                biased;
                received = self.subscription.next() => received?,
                () = self.shutdown.cancelled() => return Err(EngineError::ShuttingDown.into()),
                refused = &mut self.refused => {
                    // What is read after this is refused as well.
                    self.refused = Box::pin(future::ready(refused.clone()));
                    return Err(refused.into());
                }
            };
            match received {
                Received::Deliveries(deliveries) => {
                    self.traces.delivered(
                        Operation::Deliver,
                        None,
                        self.subscription.queue().as_str(),
                        SystemTime::now(),
                        deliveries.iter().map(|d| (d.item.id, &d.item.headers)),
                    );
                    let keys = self.engine.receipt_keys();
                    let deliver = |delivery| convert::delivery(delivery, self.auto_commit, &keys);
                    let deliveries = deliveries.into_iter().map(deliver).collect();
                    return Ok(Message::Deliveries(pb::ConsumeResponse { deliveries }));
                }
                Received::Revoked(revoked) => self.revoked.extend(revoked),
            }
        }
    }

    /// Returns the next deliveries of a subscription that does not ask for revocations.
    pub(super) async fn deliveries(&mut self) -> Result<pb::ConsumeResponse, ApiError> {
        loop {
            if let Message::Deliveries(deliveries) = self.next().await? {
                return Ok(deliveries);
            }
        }
    }
}
