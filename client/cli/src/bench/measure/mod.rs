//! What is measured: which item arrived how often (`tracker`), counts and latencies (`figures`), the printed `report`.

pub(crate) mod figures;
pub(crate) mod report;
pub(crate) mod tracker;
