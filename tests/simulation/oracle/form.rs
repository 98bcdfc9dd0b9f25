//! The form in which a subscriber gets objects: whether received bytes are those of an object of
//! the truth, and the changes that its projection hides.

use super::Walk;
use crate::{
    history::{Encoding, Interface},
    reader::wire,
    truth::{Kind, Object, Write},
};

impl Walk<'_> {
    /// Whether the subscriber would get the object at `version` as these bytes.
    pub(super) fn has_bytes(&self, object: &Object, version: u64, bytes: &[u8]) -> bool {
        match &self.spec.interface {
            // A program that prefers protobuf takes JSON, too.
            Interface::Http(_) if !bytes.starts_with(b"{") => wire::is_same(object.value(), version, bytes),
            _ if self.spec.projected.is_canonical() => self.spec.projected.is(object.value(), bytes),
            _ => object.bytes_at(version, self.spec.encoding == Encoding::Deltas) == bytes,
        }
    }

    /// Whether the bytes name the attributes of a deleted object, as far as the projection keeps
    /// them.
    pub(super) fn has_attributes(&self, object: &Object, bytes: &[u8]) -> bool {
        self.spec.projected.is_canonical() || object.has_attributes_in(bytes)
    }

    /// The event of a write for the subscriber, and the object to send.
    pub(super) fn event<'w>(&self, write: &'w Write) -> Option<(Kind, &'w std::sync::Arc<Object>)> {
        let hides = |write: &Write| {
            write.before.as_ref().zip(write.after.as_ref()).is_some_and(|(before, after)| self.hides(before, after))
        };
        write.seen_by(self.spec.selection).filter(|(kind, _)| *kind != Kind::Modified || !hides(write))
    }

    /// Whether the subscriber gets no event for this change of an object.
    pub(super) fn hides(&self, before: &Object, after: &Object) -> bool {
        let projected = &self.spec.projected;
        projected.only_changes && projected.of(before.value()) == projected.of(after.value())
    }

    /// Whether an event is of the right kind. HTTP does not say why an object is gone.
    pub(super) fn is_kind(&self, received: Kind, right: Kind) -> bool {
        received == right
            || (matches!(self.spec.interface, Interface::Http(_)) && received == Kind::Deleted && right == Kind::Left)
    }
}
