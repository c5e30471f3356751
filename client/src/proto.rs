//! Messages, stubs and servers generated from package `sluicegate.v1`.

pub use sluicegate_proto::v1::*;
