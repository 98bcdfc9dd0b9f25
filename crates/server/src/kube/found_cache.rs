//! The cache that a read is answered from, and its snapshot.

use kubefan_admission::GatePermit;
use kubefan_cache::Store;
use kubefan_model::{ObjectKey, ResourceVersion, format::Format};

use crate::target_lookup::Selected;

/// A cache that was found, and the format that it is read in.
pub struct FoundCache {
    /// The cache, and the objects in it.
    pub selected: Selected,
    /// The format of the response.
    pub format: Format,
}

/// The snapshot that a get or a list is answered from.
pub struct Snapshot {
    /// The objects.
    pub store: Store,
    /// Version of the objects.
    pub version: ResourceVersion,
    /// The permit to pin them while a list is sent.
    pub permit: Option<GatePermit>,
    /// The last key of the page before; `None` except for later pages.
    pub last: Option<ObjectKey>,
}

impl Snapshot {
    /// A state that nothing has to pin.
    pub fn new(store: Store, version: ResourceVersion) -> Self {
        Self { store, version, permit: None, last: None }
    }
}
