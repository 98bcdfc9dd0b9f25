//! The wire contract, generated from `proto/`.

/// `kubefan.v1alpha1`: `watch.proto` documents the service for clients, and `peer.proto` the
/// transfers between replicas.
#[allow(missing_docs, clippy::all, unreachable_pub)]
#[rustfmt::skip]
#[path = "generated/kubefan.v1alpha1.rs"]
pub mod v1alpha1;

/// The file descriptor set of the contract with clients, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("generated/kubefan_descriptor.bin");

/// The path of a watch in HTTP/2.
pub const WATCH_PATH: &str = "/kubefan.v1alpha1.WatchService/Watch";
