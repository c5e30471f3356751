//! Where the head of a queue is, as far as this broker knows. No I/O: losing any of it costs time, never correctness.

pub(super) mod lease_cache;
pub(super) mod prefetch;
pub(super) mod watermarks;
