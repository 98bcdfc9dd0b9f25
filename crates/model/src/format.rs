//! How a subscriber wants objects: what of them, when, and in which encoding. Equal formats compare equal, so that their subscribers
//! share views, frames and snapshots.

use bytes::Bytes;
pub use kubefan_common::encoding::Encoding;

use super::{media::Media, projection::Projection};
use super::{protobuf, table::Tables};

/// How much of its object a row has downstream (`includeObject` of `metav1.TableOptions`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Include {
    /// Nothing.
    None,
    /// Its metadata.
    #[default]
    Metadata,
    /// All.
    Object,
}

impl Include {
    /// As a query has it; `None` where the apiserver would refuse it.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "None" => Some(Self::None),
            "" | "Metadata" => Some(Self::Metadata),
            "Object" => Some(Self::Object),
            _ => None,
        }
    }
}

/// How messages are laid out, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Wire {
    /// Messages of the contract, as gRPC frames them.
    #[default]
    Grpc,
    /// Events of a Kubernetes watch over HTTP, in an encoding. They know no marks: a span in which only the end is exact cannot be told.
    Http(Media),
}

/// The form in which a subscriber is sent objects. The default is the object as it came, as JSON, over gRPC.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Format {
    projection: Projection,
    only_changes: bool,
    encoding: Encoding,
    wire: Wire,
    /// Of tables.
    include: Include,
}

/// `only_changes` with bytes that hold the version: they change with every change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "every change of a full object is one, because it changes metadata.resourceVersion; choose another projection or set \
     drop_managed_fields, which leaves out both"
)]
pub struct ChangesEverything;

impl Format {
    /// A format. Deltas are made from the canonical form: with them a full object comes without its version and managed fields.
    pub fn new(projection: Projection, only_changes: bool, encoding: Encoding) -> Result<Self, ChangesEverything> {
        let projection = if encoding == Encoding::ZstdDelta { projection.canonical() } else { projection };
        if only_changes && projection.is_identity() {
            return Err(ChangesEverything);
        }
        Ok(Self { projection, only_changes, encoding, ..Self::default() })
    }

    /// The form of the Kubernetes API over HTTP, for a cache of this encoding. Of protobuf there are two projections: all of an object, and
    /// its `PartialObjectMetadata`.
    pub fn http(media: Media, projection: Projection) -> Self {
        Self { projection, wire: Wire::Http(media), ..Self::default() }
    }

    /// The form of tables over HTTP, for a cache of rows.
    pub fn table(include: Include) -> Self {
        Self { include, ..Self::http(Media::Table, Projection::default()) }
    }

    /// How much of its object a row has.
    pub fn include(&self) -> Include {
        self.include
    }

    /// The encoding of the cache that it is made from.
    pub fn media(&self) -> Media {
        match self.wire {
            Wire::Grpc => Media::Json,
            Wire::Http(media) => media,
        }
    }

    /// How messages are laid out.
    pub fn wire(&self) -> Wire {
        self.wire
    }

    /// Whether spans in which only the end is exact can be told, as marked.
    pub fn has_marks(&self) -> bool {
        self.wire == Wire::Grpc
    }

    /// What of each object is sent.
    pub fn projection(&self) -> &Projection {
        &self.projection
    }

    /// Whether a change that leaves the sent bytes as they were is not sent.
    pub fn only_changes(&self) -> bool {
        self.only_changes
    }

    /// How it is encoded.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The bytes that go out for an object with these; `None` where they are the object's own, which are then shared. A row goes out as
    /// its `tables` write it now.
    pub fn bytes_of(&self, object: &[u8], tables: Option<&Tables>) -> Option<Bytes> {
        match (self.wire, tables) {
            (Wire::Http(Media::Table), Some(tables)) => Some(tables.row(object, self.include)),
            _ if self.projection.is_identity() => None,
            // It was read before it was cached.
            (Wire::Http(Media::Protobuf), _) => protobuf::partial_metadata(object).ok(),
            _ => Some(self.projection.apply(object)),
        }
    }

    /// Whether what goes out for an object is the same at all times.
    pub fn is_timeless(&self) -> bool {
        self.media() != Media::Table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::projection::Parts;

    #[test]
    fn deltas_are_made_of_the_canonical_form_and_of_nothing_else() {
        let json = br#"{"metadata":{"name":"a","resourceVersion":"7","managedFields":[{}]}}"#;
        let of = |encoding| Format::new(Projection::default(), false, encoding).unwrap().bytes_of(json, None);
        assert_eq!(of(Encoding::Json), None);
        assert_eq!(of(Encoding::Zstd), None);
        assert_eq!(of(Encoding::ZstdDelta).unwrap(), br#"{"metadata":{"name":"a"}}"#.as_slice());
    }

    #[test]
    fn only_changes_needs_bytes_that_can_stay_as_they_were() {
        let canonical = Projection::new(Parts::Full, true, false).unwrap();
        assert_eq!(Format::new(Projection::default(), true, Encoding::Json), Err(ChangesEverything));
        assert!(Format::new(canonical.clone(), true, Encoding::Json).is_ok());
        let deltas = Format::new(Projection::default(), true, Encoding::ZstdDelta).unwrap();
        assert_eq!(deltas, Format::new(canonical, true, Encoding::ZstdDelta).unwrap(), "the same bytes, the same view");
    }
}
