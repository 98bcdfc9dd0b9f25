//! The gRPC API of the data port: `kubefan.v1alpha1.WatchService`, and `grpc.health.v1.Health`.

pub mod audited;
pub mod call;
pub mod health;
pub mod request;
pub mod service;
pub mod status;
