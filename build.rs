//! Compiles the proto files without `protoc`: protox parses them, tonic-prost-build writes the Rust.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const FILES: &[&str] = &[
    "sluicegate/v1/item.proto",
    "sluicegate/v1/queue.proto",
    "sluicegate/v1/broker.proto",
    "sluicegate/v1/error.proto",
    "sluicegate/v1/queue_service.proto",
    "sluicegate/v1/admin_service.proto",
    "sluicegate/v1/schedule_service.proto",
    "sluicegate/v1/operation_service.proto",
    "sluicegate/v1/template_service.proto",
    "externalscaler/externalscaler.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    // `compile_fds` does not write the set for reflection, so it is encoded here.
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("sluicegate_descriptor.bin"), descriptors.encode_to_vec())?;
    let mut config = tonic_prost_build::Config::new();
    config.enable_type_names(); // by which the codec knows requests
    tonic_prost_build::configure()
        .build_transport(false)
        .codec_path("crate::codec::CountingCodec")
        .bytes(".sluicegate.v1")
        .extern_path(".google.rpc.Status", "::tonic_types::Status")
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}
