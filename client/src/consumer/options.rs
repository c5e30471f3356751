//! The settings of a consumer.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{item::to_proto_duration, proto, retry::Backoff};

/// Who renews the leases of items whose handlers are still running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Renewal {
    /// The broker, as long as the stream lives, up to the broker's `max_lease`. When the stream breaks, the consumer renews
    /// the leases of the items it still holds, if it still has them (see [`Consumer::run`](crate::Consumer::run)). The
    /// default.
    #[default]
    Broker,
    /// The consumer, three times per lease. A consumer without a lease of its own asks for 30 s.
    Client,
    /// No one: a handler that takes longer than the lease loses the item.
    Off,
}

/// Settings that the parts of a consumer share.
#[derive(Debug, Clone)]
pub(super) struct Options {
    pub(super) queue: String,
    pub(super) name: String,
    pub(super) max_in_flight: u32,
    pub(super) max_in_flight_bytes: u64,
    pub(super) concurrency: Option<usize>,
    pub(super) lease: Option<Duration>,
    pub(super) renewal: Renewal,
    pub(super) auto_commit: bool,
    pub(super) streaming: bool,
    pub(super) shutdown: CancellationToken,
    pub(super) grace: Duration,
    pub(super) backoff: Backoff,
    pub(super) give_up_after: Option<Duration>,
    pub(super) limit: Option<u64>,
    pub(super) idle_exit: Option<Duration>,
}

impl Options {
    pub(super) fn concurrency(&self) -> usize {
        self.concurrency.unwrap_or(self.max_in_flight as usize).max(1)
    }

    /// Handlers continue when a stream breaks, so that their items stay leased. A stream that cannot be halted is sent items
    /// until its end. Those that come too late are rolled back by the broker.
    fn on_disconnect(&self) -> proto::OnDisconnect {
        if self.streaming {
            proto::OnDisconnect::KeepLease
        } else {
            proto::OnDisconnect::Unspecified
        }
    }

    pub(super) fn open_request(&self) -> proto::ConsumeRequest {
        proto::ConsumeRequest {
            queue: self.queue.clone(),
            max_in_flight: self.max_in_flight.try_into().unwrap_or(i32::MAX),
            max_in_flight_bytes: self.max_in_flight_bytes.try_into().unwrap_or(i64::MAX),
            lease: self.lease.map(to_proto_duration),
            consumer: self.name.clone(),
            auto_commit: self.auto_commit,
            renew: self.renewal == Renewal::Broker && !self.auto_commit,
            on_disconnect: self.on_disconnect().into(),
        }
    }
}
