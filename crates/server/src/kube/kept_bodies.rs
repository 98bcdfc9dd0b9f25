//! The memory of the bodies that are kept while they are sent, so that they can be sent again.
//!
//! The hazard is a caller with many slow uploads: so this memory is shared fairly, and without room
//! a body is sent once.

use std::sync::Arc;

use http_body::Body;

use kubefan_admission::{FairPermit, FairPool, Holder};

/// The memory of all bodies that are kept, in KiB.
const ALL_KIB: usize = 32 << 10;
/// The longest body that is kept, in bytes. kube-apiserver takes 3 MiB.
const BODY_BYTES_MAX: u64 = 4 << 20;
/// Bytes that are kept of a body of unknown length.
const OF_UNKNOWN_BYTES: u64 = 64 << 10;

/// The bodies that are kept: a place for each KiB.
pub(super) struct KeptBodies(Arc<FairPool>);

/// The room for a body that may be kept.
pub(super) struct Kept {
    /// The bytes; 0 if there is no room.
    pub(super) bytes_max: usize,
    /// Permits for these bytes.
    pub(super) place: Option<FairPermit>,
}

impl Default for KeptBodies {
    fn default() -> Self {
        Self(FairPool::new(ALL_KIB))
    }
}

impl KeptBodies {
    /// Whether so little is free that shares may decide about the rest.
    pub(super) fn is_scarce(&self) -> bool {
        self.0.is_scarce()
    }

    /// Makes room for a body, if there is any.
    pub(super) fn keep(&self, body: &impl Body, holder: Holder) -> Kept {
        let bytes = body.size_hint().exact().unwrap_or(OF_UNKNOWN_BYTES);
        if bytes == 0 || bytes > BODY_BYTES_MAX {
            return Kept { bytes_max: 0, place: None };
        }
        let place = self.0.try_take_many(Some(holder), bytes.div_ceil(1 << 10) as usize);
        Kept { bytes_max: if place.is_some() { bytes as usize } else { 0 }, place }
    }

    /// Leaves no room.
    #[cfg(test)]
    pub(super) fn fill(&self) -> Option<FairPermit> {
        self.0.try_take_many(None, ALL_KIB)
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn one_caller_leaves_room_for_the_bodies_of_others() {
        let bodies = KeptBodies::default();
        let large = Body::from(vec![0; BODY_BYTES_MAX as usize]);
        let of = |user: &str, connection| Holder::new(connection, None).identified(user, None);
        let greedy: Vec<_> = (0..10).map(|number| bodies.keep(&large, of("greedy", number))).collect();
        let kept = greedy.iter().filter(|kept| kept.place.is_some());
        assert_eq!(kept.count(), 7);
        assert!(bodies.is_scarce());
        let small = Body::from("x");
        assert_eq!(bodies.keep(&small, of("honest", 20)).bytes_max, 1);
    }
}
