//! The wire contract, generated from `proto/`.

/// `kubefan.v1alpha1`; documented in `proto/kubefan/v1alpha1/watch.proto`, and in `peer.proto` what replicas say to each other.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1alpha1 {
    tonic::include_proto!("kubefan.v1alpha1");
}

/// The file descriptor set of the contract with clients, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kubefan_descriptor.bin"));
