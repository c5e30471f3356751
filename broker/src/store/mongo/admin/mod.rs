//! Operations of administrators: items listed, read, deleted, purged, replayed and redriven; statistics.

pub(super) mod items;
pub(super) mod listing;
pub(super) mod purge;
pub(super) mod redrive;
pub(super) mod replay;
pub(super) mod stats;
