//! Where the head of a queue is, as far as this broker knows. No I/O. Losing any of it costs time, never correctness.

pub(super) mod cursors;
pub(super) mod lease_cache;
pub(super) mod lease_deadlines;
pub(super) mod open_claims;
pub(super) mod prefetch;
pub(super) mod watermarks;

/// The lowest watermark.
pub(crate) const START: i64 = 0;
