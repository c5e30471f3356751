//! Messages, clients and servers generated from `sluicegate/v1/*.proto`, and from KEDA's protocol for scalers.
//!
//! The proto files beside this one are the API's documentation and its source. `build.rs` generates
//! everything here from them, but for what both ends of a connection share: [`backoff`], [`codec`], [`encoder`], [`deadline`],
//! [`gathered`].

pub mod backoff;
pub mod codec;
pub mod deadline;
pub mod encoder;
pub mod gathered;
mod reason;

/// Package `sluicegate.v1`.
#[allow(clippy::all, clippy::pedantic)] // generated
pub mod v1 {
    tonic::include_proto!("sluicegate.v1");
}

/// Package `externalscaler`, by which KEDA asks how many consumers a queue needs.
#[allow(clippy::all, clippy::pedantic)] // generated
pub mod externalscaler {
    tonic::include_proto!("externalscaler");
}

/// The encoded descriptors of all files, for gRPC server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/sluicegate_descriptor.bin"));
