//! The clients that are compared.

use clap::ValueEnum;

/// A client: its library, its connection and its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    KubeTyped,
    KubeTypedStreaming,
    GrpcTyped,
    GrpcCompactTyped,
    GrpcZstdTyped,
    GrpcDeltaTyped,
    HttpTyped,
    DirectTyped,
    DirectCompactTyped,
    GoTyped,
    KubeSmall,
    GrpcSmall,
    GrpcZstdSmall,
    HttpSmall,
    DirectSmall,
    KubeDynamic,
    GrpcRaw,
    GrpcZstdRaw,
    GrpcDeltaRaw,
    HttpRaw,
    DirectRaw,
    GrpcProjected,
    GrpcZstdProjected,
}

impl Kind {
    /// Name of the kind in the table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::KubeTyped => "kube-rs, Pod",
            Self::KubeTypedStreaming => "kube-rs with streaming lists, Pod",
            Self::GrpcTyped => "gRPC, JSON, Pod",
            Self::GrpcCompactTyped => "gRPC, JSON, compact Pod",
            Self::GrpcZstdTyped => "gRPC, zstd, Pod",
            Self::GrpcDeltaTyped => "gRPC, deltas, Pod",
            Self::HttpTyped => "HTTP from kubefan, Pod",
            Self::DirectTyped => "HTTP from the apiserver, Pod",
            Self::DirectCompactTyped => "HTTP from the apiserver, compact Pod",
            Self::GoTyped => "client-go, Pod",
            Self::KubeSmall => "kube-rs, ten fields",
            Self::GrpcSmall => "gRPC, JSON, ten fields",
            Self::GrpcZstdSmall => "gRPC, zstd, ten fields",
            Self::HttpSmall => "HTTP from kubefan, ten fields",
            Self::DirectSmall => "HTTP from the apiserver, ten fields",
            Self::KubeDynamic => "kube-rs, DynamicObject",
            Self::GrpcRaw => "gRPC, JSON, raw",
            Self::GrpcZstdRaw => "gRPC, zstd, raw",
            Self::GrpcDeltaRaw => "gRPC, deltas, raw",
            Self::HttpRaw => "HTTP from kubefan, raw",
            Self::DirectRaw => "HTTP from the apiserver, raw",
            Self::GrpcProjected => "gRPC, JSON, five projected fields",
            Self::GrpcZstdProjected => "gRPC, zstd, five projected fields",
        }
    }

    /// The client that it is compared with.
    pub(crate) fn baseline(self) -> Self {
        match self {
            Self::KubeSmall | Self::GrpcSmall | Self::GrpcZstdSmall | Self::HttpSmall | Self::DirectSmall => {
                Self::KubeSmall
            }
            _ => Self::KubeTyped,
        }
    }
}
