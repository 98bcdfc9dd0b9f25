//! The form in which a subscriber receives objects: which parts, which changes, and which encoding.
//!
//! Equal formats compare equal, so that subscribers with the same format share views, frames and
//! snapshots.

use bytes::Bytes;
pub use kubefan_common::encoding::Encoding;

pub use super::include_object::IncludeObject;
use super::{media::Media, projection::Projection};
use super::{protobuf, table::Tables};

/// The protocol of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Wire {
    /// Messages of `watch.proto`, over gRPC.
    #[default]
    Grpc,
    /// Events of a Kubernetes watch over HTTP, in this encoding. They have no marker for a gap or a
    /// catch-up, so a subscriber cannot know that only the end of a span is exact.
    Http(Media),
}

/// The content coding of a response over HTTP (RFC 9110, section 8.4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ContentCoding {
    /// None.
    #[default]
    Identity,
    /// One gzip member, made of pieces that responses share.
    Gzip,
}

/// The form in which a subscriber receives objects. The default is the whole object as JSON, over
/// gRPC.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Format {
    projection: Projection,
    only_changes: bool,
    encoding: Encoding,
    wire: Wire,
    /// Used over HTTP only.
    coding: ContentCoding,
    /// Used for Tables only.
    include: IncludeObject,
}

/// The reason why there is no such format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFormat {
    /// `only_changes` was requested for objects that contain the resource version, which changes
    /// with every event.
    #[error(
        "only_changes has no effect on full objects, because every change changes metadata.resourceVersion; choose another \
         projection, or set drop_managed_fields, which leaves out the version too"
    )]
    OnlyChangesNeedsProjection,
    /// Protobuf was requested in a projection that is made from JSON.
    #[error("protobuf objects are sent whole, or as PartialObjectMetadata with the whole metadata")]
    ProtobufIsWhole,
}

impl Format {
    /// The format of a gRPC watch. Deltas are computed from the canonical form, so with
    /// [`Encoding::ZstdDelta`] a full object is sent without its version and managed fields.
    ///
    /// # Errors
    /// If `only_changes` would never suppress anything, because the objects contain their version.
    /// With [`Encoding::Protobuf`] for every projection in canonical form, which is made from JSON.
    pub fn new(projection: Projection, only_changes: bool, encoding: Encoding) -> Result<Self, InvalidFormat> {
        let projection = if encoding == Encoding::ZstdDelta { projection.canonical() } else { projection };
        if encoding == Encoding::Protobuf && !projection.keeps_version() {
            return Err(InvalidFormat::ProtobufIsWhole);
        }
        if only_changes && projection.keeps_version() {
            return Err(InvalidFormat::OnlyChangesNeedsProjection);
        }
        Ok(Self { projection, only_changes, encoding, ..Self::default() })
    }

    /// The format of the Kubernetes API over HTTP, for a cache in this encoding. For protobuf there
    /// are four projections: the whole object and its `PartialObjectMetadata`, each with or without
    /// managed fields.
    pub fn http(media: Media, projection: Projection) -> Self {
        Self { projection, wire: Wire::Http(media), ..Self::default() }
    }

    /// The format of Tables over HTTP, for a cache of rows.
    pub fn table(include: IncludeObject) -> Self {
        Self { include, ..Self::http(Media::Table, Projection::default()) }
    }

    /// Returns this format over HTTP in a content coding.
    pub fn coded(self, coding: ContentCoding) -> Self {
        Self { coding, ..self }
    }

    /// The content coding of the response.
    pub fn coding(&self) -> ContentCoding {
        self.coding
    }

    /// Whether the state at the start of a stream is sent in chunks that subscribers share.
    pub fn compresses_snapshots(&self) -> bool {
        self.encoding.compresses_snapshots() || self.coding == ContentCoding::Gzip
    }

    /// The part of its object that a row contains.
    pub fn include(&self) -> IncludeObject {
        self.include
    }

    /// The encoding of the cache that serves this format.
    pub fn media(&self) -> Media {
        match (self.wire, self.encoding) {
            (Wire::Grpc, Encoding::Protobuf) => Media::Protobuf,
            (Wire::Grpc, Encoding::Json | Encoding::Zstd | Encoding::ZstdDelta) => Media::Json,
            (Wire::Http(media), _) => media,
        }
    }

    /// The protocol of the stream.
    pub fn wire(&self) -> Wire {
        self.wire
    }

    /// Whether the protocol has markers for gaps and catch-ups, in which only the end is exact.
    pub fn has_markers(&self) -> bool {
        self.wire == Wire::Grpc
    }

    /// The parts of each object that are sent.
    pub fn projection(&self) -> &Projection {
        &self.projection
    }

    /// Whether a change is skipped if it leaves the sent bytes unchanged.
    pub fn only_changes(&self) -> bool {
        self.only_changes
    }

    /// Encoding of objects.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The bytes to send for an object. `None` if they are the object's own bytes, which are then
    /// shared. For a row, `tables` fills in the ages as of now.
    pub fn bytes_of(&self, object: &[u8], tables: Option<&Tables>) -> Option<Bytes> {
        match (self.media(), tables) {
            (Media::Table, Some(tables)) => Some(tables.row(object, self.include)),
            _ if self.projection.is_identity() => None,
            // This cannot fail: the object was parsed before it was cached.
            (Media::Protobuf, _) => protobuf::projected(object, &self.projection).ok(),
            _ => Some(self.projection.apply(object)),
        }
    }

    /// Whether the bytes sent for an object never depend on the time. Only Tables contain ages.
    pub fn is_time_independent(&self) -> bool {
        self.media() != Media::Table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::projection::Parts;

    #[test]
    fn only_deltas_use_the_canonical_form_by_default() {
        let json = br#"{"metadata":{"name":"a","resourceVersion":"7","managedFields":[{}]}}"#;
        let of = |encoding| Format::new(Projection::default(), false, encoding).unwrap().bytes_of(json, None);
        assert_eq!(of(Encoding::Json), None);
        assert_eq!(of(Encoding::Zstd), None);
        assert_eq!(of(Encoding::ZstdDelta).unwrap(), br#"{"metadata":{"name":"a"}}"#.as_slice());
    }

    #[test]
    fn only_changes_needs_a_projection_without_the_version() {
        let canonical = Projection::new(Parts::Full, true, false).unwrap();
        let refused = Err(InvalidFormat::OnlyChangesNeedsProjection);
        assert_eq!(Format::new(Projection::default(), true, Encoding::Json), refused);
        assert!(Format::new(canonical.clone(), true, Encoding::Json).is_ok());
        let deltas = Format::new(Projection::default(), true, Encoding::ZstdDelta).unwrap();
        assert_eq!(
            deltas,
            Format::new(canonical, true, Encoding::ZstdDelta).unwrap(),
            "equal bytes need only one view"
        );
    }

    #[test]
    fn protobuf_is_whole_or_partial_metadata_over_both_protocols() {
        let partial = Projection::partial_object_metadata;
        for projection in [Projection::default(), partial()] {
            let format = Format::new(projection.clone(), false, Encoding::Protobuf).unwrap();
            let http = Format::http(Media::Protobuf, projection);
            let object = protobuf::enveloped("v1", "Pod", &[0x0a, 0x03, 0x0a, 0x01, b'a', 0x12, 0x00]);
            assert_eq!((format.media(), format.has_markers()), (Media::Protobuf, true));
            assert_eq!(format.bytes_of(&object, None), http.bytes_of(&object, None));
        }
        let canonical = Projection::new(Parts::Metadata, false, false).unwrap();
        for only_changes in [false, true] {
            let refused = Format::new(canonical.clone(), only_changes, Encoding::Protobuf);
            assert_eq!(refused, Err(InvalidFormat::ProtobufIsWhole));
        }
        let refused = Format::new(partial(), true, Encoding::Protobuf);
        assert_eq!(refused, Err(InvalidFormat::OnlyChangesNeedsProjection));
    }
}
