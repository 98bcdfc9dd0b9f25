//! Lists over HTTP, streamed from a snapshot.
//!
//! The hazard is memory: a list of a large cache must neither be built as a whole, nor pin its
//! snapshot while it waits for the snapshot gate.

use std::{convert::Infallible, ops::ControlFlow, sync::Arc};

use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use futures::{Stream, StreamExt};
use http::Response;
use kubefan_access::{Authorized, Read};
use kubefan_admission::FairPermit;
use kubefan_audit::Notes;
use kubefan_cache::{
    Store,
    kube_encoding::list::{ListEncoder, ListMeta, ListedResource},
    sliced_scan::SLICE_TESTS,
};
use kubefan_common::planted::{self, Bug};
use kubefan_fanout::{ListKey, ListRequest, Page, Served, ViewKey};
use kubefan_model::{Media, ObjectKey, format::ContentCoding, object::Object, selection::Selection};

use super::{
    answer, content_coding,
    found_cache::{FoundCache, Snapshot},
    gzip_list::{COMPRESSED_BYTES_MIN, GzipListing},
    options::{Freshness, ListOptions},
    pages::{ContinueToken, PageSnapshots},
};
use crate::{
    sliced_list::{CHUNK_BYTES, Chunk, SelectedAfter, SlicedList, Visited, chunks},
    target_lookup::Selected,
};

/// The smallest limit of clients that read all pages. A client with a smaller one may want only the
/// first page.
const PAGE_OBJECTS_MIN: usize = 500;

/// The parts that a list is answered from.
pub struct ListParts {
    /// The authorized read.
    pub read: Authorized<Read>,
    /// The cache.
    pub found: FoundCache,
    /// The snapshot of the cache.
    pub snapshot: Snapshot,
    /// The place of the list among all reads.
    pub place: FairPermit,
    /// The notes for its record.
    pub notes: Notes,
}

/// A list that is being sent.
struct Listing {
    served: Served,
    store: Store,
    selection: Selection,
    encoder: ListEncoder,
    /// The last key that was written, or the last key of the previous page.
    last: Option<ObjectKey>,
    /// The most objects that may still be written.
    left: usize,
    started: bool,
    head: Bytes,
    tail: Bytes,
    notes: Notes,
}

/// Answers a list from its snapshot, with its place and a gate permit until the body has ended.
pub async fn list(
    pages: &Arc<PageSnapshots>,
    options: &ListOptions,
    ListParts { read, found, snapshot, place, notes }: ListParts,
) -> Response<Body> {
    let FoundCache { selected: Selected { served, selection }, format } = found;
    let Snapshot { store, version, permit, last } = snapshot;
    let hub = served.hub.clone();
    let spec = read.what().spec();
    let shard = spec.shard().ok().flatten();
    let has_no_selector = spec.is_empty();
    let namespace = &*read.what().target().namespace;
    let ListOptions { freshness, limit, continues, .. } = options;
    // For any state (`resourceVersion=0`), the apiserver's watch cache ignores the limit of a first
    // page, and sends the whole list.
    let ignores_limit = *freshness == Freshness::Any && continues.is_empty() && served.gvr.has_watch_cache();
    let limit = limit.filter(|_| !ignores_limit);
    let shard_selector = shard.map(ToString::to_string).unwrap_or_default();
    let mut meta = ListMeta { version, continues: String::new(), remaining: None, shard_selector };
    let selected = SelectedAfter { store: &store, selection: &selection, last: last.as_ref() };
    let mut left = usize::MAX;
    let mut is_empty = None;
    if let Some(limit) = limit {
        let PageExtent { count, end } = measure_page(selected, limit, has_no_selector).await;
        if let Some(end) = end {
            let has_slash = served.gvr.has_watch_cache();
            meta.continues = ContinueToken::after(&end, version, namespace, has_slash).encode();
            let before = if planted::is(Bug::RemainingCountsThePage) { 0 } else { limit };
            meta.remaining = has_no_selector.then(|| count - before);
            pages.retain(&hub, version, &store, continues.is_empty());
        }
        left = limit;
        is_empty = Some(count == 0);
    }
    let resource = ListedResource {
        gvr: &served.gvr,
        kind: &hub.resource().kind,
        list_kind: &served.list_kind,
        parser: &served.parser,
        sample: store.iter().next().map(|object| &**object),
    };
    let encoder = ListEncoder::new(&resource, format.clone());
    let media = served.parser.media();
    if format.coding() == ContentCoding::Gzip && has_bytes(selected, left, COMPRESSED_BYTES_MIN).await {
        let page = Page { after: last, limit: (left < usize::MAX).then_some(left) };
        let key = ListKey { view: ViewKey { selection, format }, page };
        let list = hub.shared_list(ListRequest { key, store, version, items: encoder });
        let listing = GzipListing::new(served, list, &meta, notes).await;
        return response(media, ContentCoding::Gzip, chunks(listing, (place, permit)));
    }
    let items_len = if encoder.needs_items_len() { items_len(&encoder, selected, left).await } else { 0 };
    let is_empty = match is_empty {
        Some(is_empty) => is_empty,
        None => encoder.depends_on_emptiness() && has_none(selected).await,
    };
    let (head, tail) = encoder.head_and_tail(&meta, items_len, is_empty);
    let listing = Listing { served, store, selection, encoder, last, left, started: false, head, tail, notes };
    response(media, ContentCoding::Identity, chunks(listing, (place, permit)))
}

fn response(media: Media, coding: ContentCoding, chunks: impl Stream<Item = Bytes> + Send + 'static) -> Response<Body> {
    let body = Body::from_stream(chunks.map(Ok::<_, Infallible>));
    let mut response = answer::from_cache(media.content_type(), body);
    content_coding::put_headers(coding, response.headers_mut());
    response
}

/// Whether no object is selected.
async fn has_none(selected: SelectedAfter<'_>) -> bool {
    let mut has_none = true;
    let first = |_: &Arc<Object>| {
        has_none = false;
        ControlFlow::Break(())
    };
    selected.visit(SLICE_TESTS, first).await;
    has_none
}

/// The extent of a page, and of the list after it.
struct PageExtent {
    /// Selected objects from the start of the page on, as far as they were counted.
    count: usize,
    /// The last key of the page; `None` if the list ends with the page.
    end: Option<ObjectKey>,
}

/// Measures a page of at most `limit` objects. Without selectors it counts the rest of the list as
/// well. With selectors the apiserver does not count the rest either.
async fn measure_page(selected: SelectedAfter<'_>, limit: usize, has_no_selector: bool) -> PageExtent {
    let mut count = 0;
    let mut end = None;
    let add = |object: &Arc<Object>| {
        count += 1;
        if count == limit {
            end = Some(object.key().clone());
        }
        if count > limit && !has_no_selector { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    selected.visit(SLICE_TESTS, add).await;
    PageExtent { count, end: end.filter(|_| count > limit) }
}

/// Returns the total length of the first `left` items, in bytes. It inspects every object, so its
/// slices are short.
async fn items_len(encoder: &ListEncoder, selected: SelectedAfter<'_>, mut left: usize) -> usize {
    let mut sum = 0;
    let add = |object: &Arc<Object>| {
        if left == 0 {
            return ControlFlow::Break(());
        }
        sum += encoder.item_len(object);
        left -= 1;
        ControlFlow::Continue(())
    };
    selected.visit(SLICE_TESTS / 8, add).await;
    sum
}

/// Whether a list has at least `bytes_min` bytes of JSON.
pub async fn is_large(store: &Store, selection: &Selection, limit: Option<usize>, bytes_min: usize) -> bool {
    // Clients with the page size of kubectl and client-go, or a larger one, read all pages.
    let left = limit.filter(|limit| *limit < PAGE_OBJECTS_MIN).unwrap_or(usize::MAX);
    has_bytes(SelectedAfter { store, selection, last: None }, left, bytes_min).await
}

/// Whether the first `left` of these objects have at least `bytes_min` bytes of JSON.
async fn has_bytes(selected: SelectedAfter<'_>, mut left: usize, bytes_min: usize) -> bool {
    if selected.store.json_bytes() < bytes_min {
        return false;
    }
    let mut bytes = 0;
    let add = |object: &Arc<Object>| {
        if left == 0 || bytes >= bytes_min {
            return ControlFlow::Break(());
        }
        bytes += object.json_len();
        left -= 1;
        ControlFlow::Continue(())
    };
    selected.visit(SLICE_TESTS, add).await;
    bytes >= bytes_min
}

impl SlicedList for Listing {
    type Content = Bytes;

    async fn next_chunk(&mut self) -> Chunk<Bytes> {
        let mut chunk = BytesMut::with_capacity(CHUNK_BYTES + (CHUNK_BYTES >> 3));
        let mut is_first = !std::mem::replace(&mut self.started, true);
        if is_first {
            chunk.put_slice(&self.head);
        }
        let mut objects = 0;
        let put = |object: &Arc<Object>| {
            self.encoder.put(object, std::mem::take(&mut is_first), &mut chunk);
            self.left -= 1;
            objects += 1;
            let is_full = self.left == 0 || chunk.len() >= CHUNK_BYTES;
            if is_full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let selected = SelectedAfter { store: &self.store, selection: &self.selection, last: self.last.as_ref() };
        let Visited { last, is_complete } = selected.visit(SLICE_TESTS, put).await;
        self.last = last;
        let is_last = is_complete || self.left == 0;
        if is_last {
            chunk.put_slice(&self.tail);
        }
        self.served.hub.metrics().snapshot_sent(objects, chunk.len());
        self.notes.sent(objects, chunk.len());
        Chunk { content: chunk.freeze(), is_last }
    }
}

#[cfg(test)]
mod tests {
    use kubefan_model::{
        GroupVersionResource,
        fields::FieldTable,
        object::ObjectParser,
        selector::{FieldSelector, LabelSelector},
    };

    use super::*;

    #[tokio::test]
    async fn a_list_is_large_by_its_selected_bytes_and_its_limit() {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        let mut store = Store::default();
        for (namespace, count) in [("a", 600), ("b", 400)] {
            for i in 0..count {
                let json = format!(
                    r#"{{"metadata":{{"namespace":"{namespace}","name":"p{i:03}","resourceVersion":"1","annotations":{{"x":"{}"}}}}}}"#,
                    "x".repeat(1000)
                );
                store.insert(Arc::new(parser.parse(json.as_bytes()).unwrap()));
            }
        }
        let is_large = |namespace, limit, bytes_min| {
            let labels = LabelSelector::default();
            let fields = FieldSelector::default();
            let selection = Selection::bind(namespace, "", labels, &fields, &table, parser.clone(), &gvr).unwrap();
            let store = store.clone();
            async move { is_large(&store, &selection, limit, bytes_min).await }
        };
        assert!(is_large("", None, 1_000_000).await && !is_large("", None, 2_000_000).await);
        assert!(is_large("a", None, 600_000).await && !is_large("b", None, 600_000).await);
        assert!(is_large("", Some(500), 1_000_000).await, "pages of kubectl");
        assert!(!is_large("", Some(1), 1_000_000).await, "a client that asks whether there are any");
        assert!(is_large("none", None, 0).await, "with a minimum of 0 every list is large");
    }
}
