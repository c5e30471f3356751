//! Operations of administrators: items listed, read, deleted, replayed and redriven; statistics.

pub(super) mod items;
pub(super) mod listing;
pub(super) mod redrive;
pub(super) mod replay;
pub(super) mod stats;
