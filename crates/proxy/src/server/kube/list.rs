//! Lists over HTTP, streamed from a snapshot.
//!
//! The hazard is memory: a list of a large cache must neither be built as a whole, nor pin its
//! snapshot while it waits for the snapshot gate.

use std::sync::Arc;

use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use http::Response;
use tokio::task::yield_now;

use super::{
    answer,
    cache_reads::{CacheReads, ResolvedRead},
    options::{Freshness, ListOptions},
    pages::{ContinueToken, PageSnapshots, last_key},
    read_error::ReadError,
    status::Failure,
};
use crate::{
    cache::Store,
    fanout::{Catalog, Hub, Patience, Place, Served},
    kube_encoding::list::{ListEncoder, ListMeta, ListedResource},
    server::select::Selected,
};
use kubefan_common::{
    planted::{self, Bug},
    when_planted,
};
use kubefan_model::{ObjectKey, object::Object, selection::Selection};

/// The approximate size of a chunk of the body, in bytes.
const CHUNK_BYTES: usize = 256 << 10;
/// A client with a smaller limit may want only the first page.
const PAGE_OBJECTS_MIN: usize = 500;

/// A list that is being sent.
struct Listing {
    served: Served,
    store: Store,
    selection: Selection,
    encoder: ListEncoder,
    /// The last key that was written, or that the previous page ended with.
    last: Option<ObjectKey>,
    /// The most objects that may still be written.
    left: usize,
    started: bool,
    head: Bytes,
    tail: Bytes,
}

/// Answers a list. `place` is kept until the body has ended.
///
/// # Errors
/// Why the list is not answered from the cache.
pub async fn list<C: Catalog>(
    reads: &CacheReads<C>,
    pages: &Arc<PageSnapshots>,
    ResolvedRead { path, selected, format, arrived_at }: ResolvedRead<'_>,
    options: ListOptions,
    place: Place,
) -> Result<Response<Body>, ReadError> {
    let has_no_selector = options.label_selector.is_empty() && options.field_selector.is_empty();
    let ListOptions { freshness, limit, continues, .. } = options;
    let Selected { served, selection } = selected;
    let hub = served.hub.clone();
    hub.index_for(&selection).await;
    let gate_permit;
    let mut last = None;
    let (store, version) = match continues.is_empty() {
        true => {
            let patience = match freshness {
                Freshness::Consistent if !reads.has_upstream => reads.patience(),
                Freshness::Consistent => {
                    let is_whole = has_no_selector && path.namespace.is_empty();
                    patience(&hub, (&selection, is_whole), limit, reads.consistent_list_bytes_min)
                }
                _ => Patience::AtOnce,
            };
            let fresh = reads.wait_until_fresh(&served, freshness, patience, arrived_at).await?;
            // The snapshot is taken after the gate, so that a waiting list pins none (or a small
            // one, if it was proved itself).
            gate_permit = hub.gate().acquire(place.holder()).await?;
            let (store, version) = hub.snapshot_of(&fresh)?;
            if matches!(freshness, Freshness::Exact(exact) if exact != version && !planted::is(Bug::ExactIsNewest)) {
                return Err(ReadError::Upstream(Failure::list_expired()));
            }
            (store, version)
        }
        false => {
            let expired = || ReadError::Upstream(Failure::list_expired());
            let invalid = || Failure::bad_request("invalid continue token: continue key is not valid".to_owned());
            let token = ContinueToken::decode(&continues).ok_or_else(|| ReadError::Upstream(invalid()))?;
            last = Some(last_key(&token, &path.namespace, served.namespaced).ok_or_else(expired)?);
            gate_permit = hub.gate().acquire(place.holder()).await?;
            let (mut store, version) = pages.find(&hub, token.rv).ok_or_else(expired)?;
            when_planted!(PagesOfTheNewestState => store = hub.snapshot()?.0);
            (store, version)
        }
    };
    // The apiserver's watch cache ignores the limit of a first page of any state.
    let limit = limit.filter(|_| freshness != Freshness::Any || !continues.is_empty() || !is_cached_upstream(&served));
    let count = || store.select(&selection, last.as_ref()).count();
    let (mut left, mut meta) = (usize::MAX, ListMeta { version, continues: String::new(), remaining: None });
    if let Some(limit) = limit {
        let page = store.select(&selection, last.as_ref()).take(limit).last();
        let has_more = page.is_some_and(|page| store.select(&selection, Some(page.key())).next().is_some());
        if let Some(last) = page.filter(|_| has_more) {
            let has_slash = is_cached_upstream(&served);
            meta.continues = ContinueToken::after(last.key(), version, &path.namespace, has_slash).encode();
            // The apiserver does not count the rest of a list with selectors either.
            meta.remaining = has_no_selector
                .then(|| if planted::is(Bug::RemainingCountsThePage) { count() } else { count() - limit });
            pages.retain(&hub, version, &store);
        }
        left = limit;
    }
    let resource = ListedResource {
        gvr: &served.gvr,
        kind: &hub.resource().kind,
        list_kind: &served.list_kind,
        parser: &served.parser,
        sample: store.iter().next().map(|object| &**object),
    };
    let encoder = ListEncoder::new(&resource, format);
    let items_len = match encoder.needs_items_len() {
        true => items_len(&encoder, store.select(&selection, last.as_ref()).take(left)).await,
        false => 0,
    };
    let is_empty = store.select(&selection, last.as_ref()).next().is_none();
    let (head, tail) = encoder.head_and_tail(&meta, items_len, is_empty);
    let listing = Listing { served, store, selection, encoder, last, left, started: false, head, tail };
    let media = listing.served.parser.media();
    let chunks = stream::unfold(Some(listing), move |listing| {
        let _until_the_end = (&place, &gate_permit);
        std::future::ready(listing.map(|mut listing| {
            let (chunk, complete) = listing.next();
            (Ok::<_, std::convert::Infallible>(chunk), (!complete).then_some(listing))
        }))
    });
    Ok(answer::from_cache(media.content_type(), Body::from_stream(chunks)))
}

/// The total length of the items, in bytes. It inspects every object, so it yields in between.
async fn items_len(encoder: &ListEncoder, objects: impl Iterator<Item = &Arc<Object>>) -> usize {
    let mut sum = 0;
    for (number, object) in objects.enumerate() {
        sum += encoder.item_len(object);
        if number % 1024 == 1023 {
            yield_now().await;
        }
    }
    sum
}

/// How long a consistent list waits for a freshness proof: until the next bookmark if the list
/// would cost upstream a lot, and for a list of metadata if it would read as many objects.
/// `is_whole`: it selects all objects.
fn patience(hub: &Hub, (selection, is_whole): (&Selection, bool), limit: Option<usize>, bytes_min: usize) -> Patience {
    match hub.state() {
        Some((store, _)) if is_large(&store, selection, limit, bytes_min) => Patience::Bookmark,
        Some((store, _)) if is_whole && limit.is_none_or(|limit| limit >= store.len()) => Patience::Comparison,
        _ => Patience::AtOnce,
    }
}

/// Whether a list has at least `bytes_min` bytes of JSON.
fn is_large(store: &Store, selection: &Selection, limit: Option<usize>, bytes_min: usize) -> bool {
    if store.json_bytes() < bytes_min {
        return false;
    }
    // Clients with the page size of kubectl and client-go, or a larger one, read all pages.
    let objects_max = limit.filter(|limit| *limit < PAGE_OBJECTS_MIN).unwrap_or(usize::MAX);
    let mut bytes = 0;
    let mut objects = store.select(selection, None).take(objects_max);
    while bytes < bytes_min {
        let Some(object) = objects.next() else { return false };
        bytes += object.json_len();
    }
    true
}

/// Whether the apiserver has a watch cache for the resource. It has none for events and reads etcd.
fn is_cached_upstream(served: &Served) -> bool {
    served.gvr.resource != "events" || !matches!(&*served.gvr.group, "" | "events.k8s.io")
}

impl Listing {
    /// The next chunk of the body, and whether it was the last.
    fn next(&mut self) -> (Bytes, bool) {
        let mut chunk = BytesMut::with_capacity(CHUNK_BYTES + (CHUNK_BYTES >> 3));
        let mut is_first = !std::mem::replace(&mut self.started, true);
        if is_first {
            chunk.put_slice(&self.head);
        }
        let (mut objects, mut complete, mut last) = (0, true, None);
        for object in self.store.select(&self.selection, self.last.as_ref()) {
            if self.left == 0 {
                break;
            }
            if chunk.len() >= CHUNK_BYTES {
                complete = false;
                break;
            }
            self.encoder.put(object, std::mem::take(&mut is_first), &mut chunk);
            self.left -= 1;
            objects += 1;
            last = Some(object.key().clone());
        }
        self.last = last.or(self.last.take());
        if complete {
            chunk.put_slice(&self.tail);
        }
        self.served.hub.metrics().snapshot_sent(objects, chunk.len());
        (chunk.freeze(), complete)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubefan_model::{
        GroupVersionResource,
        fields::FieldTable,
        object::ObjectParser,
        selector::{FieldSelector, LabelSelector},
    };

    #[test]
    fn a_list_is_large_by_what_it_selects_and_reads() {
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
            let (labels, fields) = (LabelSelector::default(), FieldSelector::default());
            let selection = Selection::bind(namespace, "", labels, &fields, &table, parser.clone(), &gvr).unwrap();
            is_large(&store, &selection, limit, bytes_min)
        };
        assert!(is_large("", None, 1_000_000) && !is_large("", None, 2_000_000));
        assert!(is_large("a", None, 600_000) && !is_large("b", None, 600_000));
        assert!(is_large("", Some(500), 1_000_000), "pages of kubectl");
        assert!(!is_large("", Some(1), 1_000_000), "a client that asks whether there are any");
        assert!(is_large("none", None, 0), "with a minimum of 0 every list is large");
    }
}
