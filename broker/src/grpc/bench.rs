//! The steps that each item of the hot path takes in this module, for benchmarks alone.

use std::time::Duration;

use sluicegate_proto::v1 as pb;

use super::{convert, parse};
use crate::domain::{Delivery, NewItem, ReceiptKeys, Timestamp};

/// Checks and parses a push. Returns `None` if the push is refused.
pub fn parse_push(request: pb::PushRequest) -> Option<Vec<NewItem>> {
    let now = Timestamp(1_790_000_000_000);
    let rules = parse::Rules { max_payload_bytes: 1 << 20, max_lease: Duration::from_mins(1), now };
    let pb::PushRequest { queue, items, producer } = request;
    parse::batch(&queue, items, &producer, &rules).ok().map(|batch| batch.items)
}

/// Returns the message of deliveries.
pub fn convert_deliveries(deliveries: Vec<Delivery>, keys: &ReceiptKeys) -> pb::ConsumeResponse {
    let deliveries = deliveries.into_iter().map(|d| convert::delivery(d, false, keys)).collect();
    pb::ConsumeResponse { deliveries }
}
