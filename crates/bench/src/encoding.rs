//! The encoding of objects between server and subscribers, over gRPC and over HTTP.

use http::{HeaderMap, HeaderValue, header};
use kubefan_common::encoding;

use super::Protocol;

/// The encoding of objects, and the content coding of bodies over HTTP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Encoding {
    /// Every object as JSON
    #[default]
    Json,
    /// Every object as Kubernetes protobuf
    Protobuf,
    /// gRPC: snapshots in compressed chunks, changes as JSON
    Zstd,
    /// gRPC: snapshots in compressed chunks, changes as deltas
    ZstdDelta,
    /// HTTP: JSON, and the subscribers accept gzip
    Gzip,
    /// HTTP: Kubernetes protobuf, and the subscribers accept gzip
    ProtobufGzip,
}

impl Encoding {
    /// The name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Protobuf => "protobuf",
            Self::Zstd => "zstd",
            Self::ZstdDelta => "zstd-delta",
            Self::Gzip => "gzip",
            Self::ProtobufGzip => "protobuf-gzip",
        }
    }

    /// The protocol without which subscribers cannot ask for it.
    pub fn protocol(self) -> Option<Protocol> {
        match self {
            Self::Json | Self::Protobuf => None,
            Self::Zstd | Self::ZstdDelta => Some(Protocol::Grpc),
            Self::Gzip | Self::ProtobufGzip => Some(Protocol::Http),
        }
    }

    /// The encoding of a watch over gRPC. A server that is measured over HTTP is asked in this one
    /// whether it has synced, so it has the same media type.
    pub(super) fn grpc(self) -> encoding::Encoding {
        match self {
            Self::Json | Self::Gzip => encoding::Encoding::Json,
            Self::Protobuf | Self::ProtobufGzip => encoding::Encoding::Protobuf,
            Self::Zstd => encoding::Encoding::Zstd,
            Self::ZstdDelta => encoding::Encoding::ZstdDelta,
        }
    }

    /// Whether objects over HTTP are protobuf. Encodings of gRPC are JSON there, for an apiserver
    /// beside kubefan.
    pub(super) fn is_protobuf(self) -> bool {
        matches!(self, Self::Protobuf | Self::ProtobufGzip)
    }

    /// Sets the headers of a list over HTTP.
    pub(super) fn accept_list(self, headers: &mut HeaderMap) {
        if self.is_protobuf() {
            headers.insert(header::ACCEPT, HeaderValue::from_static("application/vnd.kubernetes.protobuf"));
        }
        self.accept_coding(headers);
    }

    /// Sets the headers of a watch over HTTP.
    pub(super) fn accept_watch(self, headers: &mut HeaderMap) {
        if self.is_protobuf() {
            let media_type = HeaderValue::from_static("application/vnd.kubernetes.protobuf;stream=watch");
            headers.insert(header::ACCEPT, media_type);
        }
        self.accept_coding(headers);
    }

    fn accept_coding(self, headers: &mut HeaderMap) {
        if matches!(self, Self::Gzip | Self::ProtobufGzip) {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_subscribers_that_accept_gzip_say_so() {
        let coding = |encoding: Encoding| {
            let mut headers = HeaderMap::new();
            encoding.accept_watch(&mut headers);
            let mut of_list = HeaderMap::new();
            encoding.accept_list(&mut of_list);
            let name = header::ACCEPT_ENCODING;
            assert_eq!(headers.get(&name), of_list.get(&name));
            headers.remove(name)
        };
        assert_eq!(coding(Encoding::Json), None);
        assert_eq!(coding(Encoding::Protobuf), None);
        assert_eq!(coding(Encoding::Gzip).unwrap(), "gzip");
        assert_eq!(coding(Encoding::ProtobufGzip).unwrap(), "gzip");
    }
}
