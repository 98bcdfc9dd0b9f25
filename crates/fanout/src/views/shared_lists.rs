//! Lists that are compressed once for all their readers.
//!
//! A list is answered from exactly one state. Readers of the same state share a snapshot, and a
//! list of a later state reuses the chunks whose objects are the same. So a list costs its first
//! reader the compression of what has changed since the last one, and the others nothing.

use std::{collections::HashMap, sync::Arc, time::Duration};

use kubefan_cache::{
    Store,
    budget::{Budgets, Share},
    kube_encoding::list::ListEncoder,
};
use kubefan_gzip::{Compressors, Piece};
use kubefan_model::ResourceVersion;
use tokio::time::Instant;

use super::{
    selected_objects::{Page, SelectedObjects},
    shared_snapshot::{SharedSnapshot, TakenChunk},
    view::ViewKey,
};
use crate::send::chunk::{EncodedChunk, ListPieces};

/// The most lists that one cache knows. The pages of 50,000 objects, for clients that read 500 at
/// once, are 100.
const LISTS_MAX: usize = 128;
/// The greatest age of the rows of a Table: they show ages in seconds.
const ROWS_AGE_MAX: Duration = Duration::from_secs(1);

/// Time for which a list is known after its last read.
const LIST_RETAINED: Duration = Duration::from_secs(60);

/// The objects and the form of a list.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ListKey {
    /// The selection and the format.
    pub view: ViewKey,
    /// The page.
    pub page: Page,
}

impl ListKey {
    /// Memory of a key that is retained. That of its selection is counted with the selection.
    fn bytes(&self) -> usize {
        size_of::<(Self, KnownList)>() + self.view.format.projection().heap_bytes()
    }
}

/// A list to be sent as a gzip body.
pub struct ListRequest {
    /// Its objects and form.
    pub key: ListKey,
    /// The state that it is read from.
    pub store: Store,
    /// The version of the state.
    pub version: ResourceVersion,
    /// The encoder of its items.
    pub items: ListEncoder,
}

/// The lists that a cache knows.
#[derive(Default)]
pub struct SharedLists {
    lists: HashMap<ListKey, KnownList>,
    compressors: Arc<Compressors>,
}

struct KnownList {
    snapshot: Arc<SharedSnapshot>,
    encoder: Arc<ListPieces>,
    used_at: Instant,
    _share: Share,
}

/// Lists that are no longer known, and their snapshots. Each has an address for each of its
/// objects, so many take long to drop.
#[must_use = "it is dropped without a lock"]
#[derive(Default)]
pub struct RemovedLists {
    lists: Vec<KnownList>,
    snapshots: Vec<Arc<SharedSnapshot>>,
}

/// A list of one state, for one reader.
pub struct SharedList {
    key: ListKey,
    snapshot: Arc<SharedSnapshot>,
    objects: Arc<SelectedObjects>,
    encoder: Arc<ListPieces>,
}

/// The extent of a list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ListExtent {
    /// Number of chunks.
    pub chunks: usize,
    /// Number of objects.
    pub objects: usize,
}

/// A chunk of a list.
pub struct ListChunk {
    /// The items, as a piece of a gzip body.
    pub piece: Piece,
    /// Number of items.
    pub objects: usize,
    /// Whether the items were compressed for this reader.
    pub is_new: bool,
}

impl SharedLists {
    /// Returns a list for one reader. The lists that make room for it are put into `removed`.
    pub fn list(
        &mut self,
        request: ListRequest,
        budgets: &Budgets,
        now: Instant,
        removed: &mut RemovedLists,
    ) -> SharedList {
        let ListRequest { key, store, version, items } = request;
        let is_time_independent = key.view.format.is_time_independent();
        let known = self.lists.get_mut(&key);
        // Another sample of the objects may have shown another form of them.
        let known = known.filter(|known| known.encoder.items.has_form_of(&items));
        let known = known.filter(|known| is_time_independent || known.snapshot.age(now) < ROWS_AGE_MAX);
        if let Some(known) = known {
            known.used_at = now;
            let encoder = known.encoder.clone();
            if let Some((snapshot, objects)) = known.snapshot.join_at(&store) {
                return SharedList { key, snapshot, objects, encoder };
            }
            let objects = Arc::new(SelectedObjects::new(store, key.page.clone()));
            // The rows of the snapshot before may be older than a second when these are sent.
            let before = Some(&*known.snapshot).filter(|_| is_time_independent);
            let snapshot = Arc::new(SharedSnapshot::new(&objects, version, before, now));
            removed.snapshots.push(std::mem::replace(&mut known.snapshot, snapshot.clone()));
            return SharedList { key, snapshot, objects, encoder };
        }
        let encoder = Arc::new(ListPieces { items, compressors: self.compressors.clone(), budgets: budgets.clone() });
        let objects = Arc::new(SelectedObjects::new(store, key.page.clone()));
        let snapshot = Arc::new(SharedSnapshot::new(&objects, version, None, now));
        self.retain(&key, &snapshot, &encoder, now, removed);
        SharedList { key, snapshot, objects, encoder }
    }

    fn retain(
        &mut self,
        key: &ListKey,
        snapshot: &Arc<SharedSnapshot>,
        encoder: &Arc<ListPieces>,
        now: Instant,
        removed: &mut RemovedLists,
    ) {
        removed.lists.extend(self.lists.remove(key));
        let Some(share) = encoder.budgets.chunks.take(key.bytes()) else { return };
        if self.lists.len() >= LISTS_MAX
            && let Some(oldest) = self.lists.iter().min_by_key(|(_, known)| known.used_at).map(|(key, _)| key.clone())
        {
            removed.lists.extend(self.lists.remove(&oldest));
        }
        let known = KnownList { snapshot: snapshot.clone(), encoder: encoder.clone(), used_at: now, _share: share };
        self.lists.insert(key.clone(), known);
    }

    /// The compressors of the cache's lists and objects.
    pub fn compressors(&self) -> &Arc<Compressors> {
        &self.compressors
    }

    /// Removes the lists without a read for a minute. The caller drops them without a lock.
    pub fn tidy(&mut self, now: Instant) -> RemovedLists {
        let is_old = |_: &ListKey, known: &mut KnownList| now.duration_since(known.used_at) >= LIST_RETAINED;
        let removed = self.lists.extract_if(is_old).map(|(_, known)| known).collect();
        if self.lists.is_empty() {
            self.compressors.forget();
        }
        RemovedLists { lists: removed, ..RemovedLists::default() }
    }

    /// Removes all lists. The caller drops them without a lock.
    pub fn forget(&mut self) -> RemovedLists {
        self.compressors.forget();
        RemovedLists { lists: std::mem::take(&mut self.lists).into_values().collect(), ..RemovedLists::default() }
    }
}

impl SharedList {
    /// Returns the extent; `None` if another slice of the state must be scanned or planned first.
    pub fn extent(&self) -> Option<ListExtent> {
        let chunks = self.snapshot.chunks(&self.objects, &self.key.view.selection)?;
        Some(chunks.iter().fold(ListExtent::default(), |sum, chunk| ListExtent {
            chunks: sum.chunks + 1,
            objects: sum.objects + chunk.objects(),
        }))
    }

    /// Returns the length of the plain items of a chunk, if the head of the list needs it; zero
    /// after the last chunk.
    pub fn items_len(&self, index: usize) -> usize {
        let chunks = self.snapshot.chunks(&self.objects, &self.key.view.selection).unwrap_or_default();
        chunks.get(index).map_or(0, |chunk| chunk.items_len(&self.objects, &*self.encoder))
    }

    /// Returns a chunk, compressed if no other reader has done that; `None` after the last.
    pub fn chunk(&self, index: usize) -> Option<ListChunk> {
        let chunk = self.snapshot.chunks(&self.objects, &self.key.view.selection)?.get(index)?;
        let TakenChunk { encoded, objects, is_new } = chunk.take(&self.objects, &*self.encoder);
        let piece = match encoded {
            EncodedChunk::Piece(piece) => piece,
            EncodedChunk::Message(message) => Piece::stored(message),
        };
        Some(ListChunk { piece, objects, is_new })
    }

    /// The encoder of its items.
    pub fn items(&self) -> &ListEncoder {
        &self.encoder.items
    }
}
