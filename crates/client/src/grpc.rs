//! kubefan's gRPC API: calls that end by themselves, and a watch that reconnects and resumes.

mod addresses;
mod client;
mod delta_base;
mod grpc_list_watch;
mod projection;
mod watch;

pub use client::{Client, ClientCertificate, ClientOptions, IN_CLUSTER_ADDRESS, ObjectList, ReadOptions};
pub use grpc_list_watch::GrpcListWatch;
pub use kubefan_common::names::Resolve;
pub use projection::{Parts, Projection};
pub use watch::{DELTA_BASE_BYTES_MAX, OnExpired, OnLag, WatchItem, WatchOptions, WatchStream};

pub use kubefan_common::proto::v1alpha1::Object;
