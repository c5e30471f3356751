//! Keeps a stream of deliveries open: opens it, and opens another one when it breaks.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use super::options::Options;
use crate::{
    client::Client,
    error::{Error, is_too_old},
    pool::Address,
    proto,
};

/// What the two kinds of feed have in common.
pub(super) struct Feed {
    pub(super) client: Client,
    pub(super) options: Arc<Options>,
    pub(super) events: mpsc::Sender<Event>,
    /// Cancelled when no more deliveries are wanted.
    pub(super) halt: CancellationToken,
}

/// What a feed reports to the runner.
pub(super) enum Event {
    /// The lease in force is known.
    Lease(Duration),
    /// Items to work on.
    Deliveries(Vec<proto::Delivery>),
    /// The broker has revoked this reservation.
    Revoked(String),
    /// No delivery will follow: the broker has confirmed the halt, or there is no stream.
    Halted,
    /// The stream broke. The broker rolls back what it had delivered, unless the stream asked it to keep the leases.
    Lost,
    /// The broker refuses the consumer, or was unreachable for too long.
    Failed(Error),
}

/// When to open the next stream, and when to give up.
pub(super) struct Attempts {
    tries: u32,
    failing_since: Option<Instant>,
    address: Option<Arc<Address>>,
}

impl Attempts {
    pub(super) fn new() -> Self {
        Self { tries: 0, failing_since: None, address: None }
    }

    pub(super) fn begin(&mut self, feed: &Feed) {
        feed.client.rotate();
        self.address = Some(feed.client.address_in_use());
        self.failing_since.get_or_insert_with(Instant::now);
    }

    /// Records that the stream works.
    pub(super) fn succeeded(&mut self) {
        self.tries = 0;
        self.failing_since = None;
    }

    /// Reports to the runner that the stream broke, and waits before the next one. Returns false if there is to be none.
    pub(super) async fn failed(&mut self, feed: &Feed, status: Status) -> bool {
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        let too_long = feed.options.give_up_after.is_some_and(|limit| since.elapsed() >= limit);
        if is_fatal(&status) || too_long {
            // The runner may have ended already.
            let _ = feed.events.send(Event::Failed(Error::from(status))).await;
            return false;
        }
        if is_too_old(&status) {
            feed.client.go_on();
        } else if let Some(address) = &self.address {
            feed.client.fail_over(address);
        }
        let _ = feed.events.send(Event::Lost).await;
        let delay = feed.options.backoff.delay(self.tries, Some(&status));
        tracing::info!(queue = feed.options.queue, ?delay, %status, "consume stream ended, connecting again");
        self.tries += 1;
        let pause = tokio::time::sleep(delay);
        feed.halt.run_until_cancelled(pause).await.is_some()
    }
}

/// Returns true if the broker would refuse the consumer at each further try.
fn is_fatal(status: &tonic::Status) -> bool {
    use tonic::Code;
    matches!(
        status.code(),
        Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
            | Code::FailedPrecondition
            | Code::OutOfRange
    )
}

/// A stream that lives longer than this counts as one that works, whether it delivers or not.
const STABLE: Duration = Duration::from_secs(5);

/// Feeds from `Consume` until the feed is dropped. Such a feed cannot halt deliveries: its stream has to stay open until
/// all items are settled, and the broker fills each slot that a settle frees.
pub(super) async fn run_unary(feed: Feed) {
    let mut attempts = Attempts::new();
    loop {
        attempts.begin(&feed);
        let Err(status) = consume(&feed, &mut attempts).await else {
            return;
        };
        if !attempts.failed(&feed, status).await {
            return;
        }
    }
}

/// Serves one stream until it breaks, which is an error, or the runner is gone.
async fn consume(feed: &Feed, attempts: &mut Attempts) -> Result<(), Status> {
    let request = Request::new(feed.options.open_request());
    let mut stream = feed.client.queue_service().consume(request).await?.into_inner();
    let opened = Instant::now();
    loop {
        let message = match stream.message().await {
            Ok(Some(message)) => message,
            ended => {
                if opened.elapsed() > STABLE {
                    attempts.succeeded();
                }
                ended?;
                return Err(Status::unavailable("the broker ended the stream"));
            }
        };
        attempts.succeeded();
        if feed.events.send(Event::Deliveries(message.deliveries)).await.is_err() {
            return Ok(());
        }
    }
}
