//! What is measured: which item arrived how often (`tracker`), counts and latencies (`figures`), the
//! `processor` time of servers, the printed `report`.

pub(crate) mod figures;
pub(crate) mod processor;
pub(crate) mod report;
pub(crate) mod tracker;
