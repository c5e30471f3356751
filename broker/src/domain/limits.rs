//! The limits of what users may ask for, each in one place. The comments of the proto and `docs/SEMANTICS.md` state them
//! too; a test of the gRPC services compares.
//!
//! The limits that a deployment chooses are settings: `max_payload_bytes`, `max_lease` and the default limits of a queue.

use std::time::Duration;

/// The most bytes of a name: of a queue, a group, a consumer or a schedule.
pub const MAX_NAME_BYTES: usize = 128;

/// The most items or receipts in one request, and the most items that one call may ask for.
pub const MAX_BATCH: usize = 1_000;
/// The most entries of a page; a larger number is taken as this one.
pub const MAX_PAGE: usize = 1_000;
/// The most unsettled items that one stream may hold.
pub const MAX_IN_FLIGHT: usize = 10_000;
/// The longest that a call may wait for items.
pub const MAX_WAIT: Duration = Duration::from_mins(10);

/// The most bytes to which `max_payload_bytes` may be set: what MongoDB's limit of 16 MiB per document leaves.
pub const LARGEST_MAX_PAYLOAD_BYTES: usize = 15 << 20;
/// The most bytes of a message with items, including their envelopes, unless the message holds a single item that is
/// larger. Most gRPC libraries by default refuse messages over 4 MiB.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// The most bytes of a content type.
pub const MAX_CONTENT_TYPE_BYTES: usize = 255;
/// The most entries in an item's headers.
pub const MAX_HEADERS: usize = 64;
/// The most bytes of all header keys and values together.
pub const MAX_HEADER_BYTES: usize = 16 << 10;
/// The most bytes of an ordering key.
pub const MAX_ORDERING_KEY_BYTES: usize = 255;
/// The most bytes of a deduplication id.
pub const MAX_DEDUP_ID_BYTES: usize = 255;
/// The most bytes of a failure's reason that are kept.
pub const MAX_REASON_BYTES: usize = 1_024;
/// The number of priorities, from 0 on.
pub const PRIORITIES: u8 = 10;

/// The longest delay, time to live and retention: ten years.
pub const MAX_SPAN: Duration = Duration::from_hours(87_672);
/// The shortest lease. The longest is the setting `max_lease`.
pub const MIN_LEASE: Duration = Duration::from_millis(100);
/// The longest lease to which `max_lease` may be set.
pub const LARGEST_MAX_LEASE: Duration = Duration::from_hours(30 * 24);
/// The longest delay of a retry policy.
pub const MAX_RETRY_DELAY: Duration = Duration::from_hours(30 * 24);
/// The largest factor from one delay of a retry policy to the next.
pub const MAX_RETRY_MULTIPLIER: f64 = 1_000.0;
/// The longest that a deduplication id is remembered.
pub const MAX_DEDUP_WINDOW: Duration = Duration::from_hours(30 * 24);

/// The most bytes of the id of a request.
pub const MAX_REQUEST_ID_BYTES: usize = 64;

/// The most schedules. A broker reads all of them for each tick.
pub const MAX_SCHEDULES: usize = 10_000;

/// The most templates of queues.
pub const MAX_TEMPLATES: usize = 100;

/// The most labels of a queue.
pub const MAX_LABELS: usize = 64;
/// The most bytes of a label's key.
pub const MAX_LABEL_KEY_BYTES: usize = 63;
/// The most bytes of a label's value.
pub const MAX_LABEL_VALUE_BYTES: usize = 255;
