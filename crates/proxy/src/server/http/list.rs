//! Lists and single objects over HTTP.
//!
//! Pages of a list are read from the state that the first of them was taken from. A token says its version and where it goes on, as the
//! apiserver's does (`storage/continue.go`), so that one which is not held here any more, or was given by another, goes upstream as it is.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use axum::body::Body;
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use http::Response;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::OwnedSemaphorePermit,
    task::yield_now,
    time::{Instant, sleep},
};

use super::{
    Front, Otherwise, Read,
    items::{self, Items, ListMeta},
    options::{Freshness, ListOptions},
    status::Failure,
};
use crate::{
    cache::Store,
    fanout::{CachePosition, Catalog, Hub, Patience, Served},
    server::request::Selected,
};
use kubefan_model::{Media, ObjectKey, ResourceVersion, object::Object, selection::Selection};

/// About how much is written at a time, in bytes.
const CHUNK_BYTES: usize = 256 << 10;
/// States that are kept for whoever reads them in pages.
const STATES_MAX: usize = 32;
/// Each for so long after it was last read. (The apiserver keeps them for about five minutes.)
const STATE_AGE_MAX: Duration = Duration::from_secs(120);
/// Who wants fewer objects at a time may want no more than these.
const PAGE_OBJECTS_MIN: usize = 500;
/// Of the only kind of token that there is.
const TOKEN_VERSION: &str = "meta.k8s.io/v1";

/// Where the next page begins.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Token {
    v: String,
    /// The state's version; below zero: whatever is held.
    rv: i64,
    /// The first key that was not read, below what the path names.
    start: String,
}

impl Token {
    fn decode(text: &str) -> Option<Self> {
        let json = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        let token: Self = serde_json::from_slice(&json).ok()?;
        (token.v == TOKEN_VERSION).then_some(token)
    }

    fn encode(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }
}

/// The states that pages are read from.
#[derive(Default)]
pub struct Pages {
    held: Mutex<Vec<Held>>,
}

struct Held {
    hub: Weak<Hub>,
    /// Versions mean something in one history.
    epoch: u64,
    version: ResourceVersion,
    store: Store,
    read_at: Instant,
}

impl Held {
    fn is_of(&self, hub: &Arc<Hub>, epoch: u64, version: ResourceVersion) -> bool {
        std::ptr::eq(self.hub.as_ptr(), Arc::as_ptr(hub)) && self.epoch == epoch && self.version == version
    }
}

impl Pages {
    fn held(&self) -> MutexGuard<'_, Vec<Held>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|held| held.read_at.elapsed() < STATE_AGE_MAX && held.hub.strong_count() > 0);
        held
    }

    fn find(&self, hub: &Arc<Hub>, version: i64) -> Option<(Store, ResourceVersion)> {
        let version = ResourceVersion::new(u64::try_from(version).ok()?)?;
        let epoch = hub.position()?.epoch;
        let mut held = self.held();
        let found = held.iter_mut().find(|held| held.is_of(hub, epoch, version))?;
        found.read_at = Instant::now();
        Some((found.store.clone(), version))
    }

    fn keep(self: &Arc<Self>, hub: &Arc<Hub>, version: ResourceVersion, store: &Store) {
        let Some(CachePosition { epoch, .. }) = hub.position() else { return };
        let mut held = self.held();
        let read_at = Instant::now();
        if let Some(known) = held.iter_mut().find(|held| held.is_of(hub, epoch, version)) {
            known.read_at = read_at;
            return;
        }
        if held.is_empty() {
            tokio::spawn(self.clone().tidy());
        }
        if held.len() >= STATES_MAX
            && let Some((longest, _)) = held.iter().enumerate().min_by_key(|(_, held)| held.read_at)
        {
            held.swap_remove(longest);
        }
        held.push(Held { hub: Arc::downgrade(hub), epoch, version, store: store.clone(), read_at });
    }

    /// Lets go of what nobody reads any more, until there is nothing.
    async fn tidy(self: Arc<Self>) {
        loop {
            sleep(STATE_AGE_MAX / 8).await;
            if self.held().is_empty() {
                return;
            }
        }
    }
}

/// What a list is written from.
struct Listing {
    served: Served,
    store: Store,
    selection: Selection,
    items: Items,
    /// Where it goes on.
    last: Option<ObjectKey>,
    /// How many objects are still to be written.
    left: usize,
    begun: bool,
    /// What stands around the items.
    head: Bytes,
    tail: Bytes,
}

impl<C: Catalog> Front<C> {
    pub(super) async fn list(
        &self,
        Read { path, selected, format }: Read<'_>,
        options: ListOptions,
        place: Option<OwnedSemaphorePermit>,
    ) -> Result<Response<Body>, Otherwise> {
        let is_whole = options.label_selector.is_empty() && options.field_selector.is_empty();
        let ListOptions { freshness, limit, continues, .. } = options;
        let Selected { served, selection } = selected;
        let hub = served.hub.clone();
        let pass;
        let mut last = None;
        let (store, version) = match continues.is_empty() {
            true => {
                let patience = match freshness {
                    Freshness::Consistent if self.proxy.is_none() => self.patience(),
                    Freshness::Consistent => patience(&hub, &selection, limit, self.options.consistent_list_bytes_min),
                    _ => Patience::AtOnce,
                };
                self.freshen(&served, freshness, patience).await?;
                // Who waits for leave to be sent a state pins none meanwhile.
                pass = hub.gate().acquire().await?;
                let (store, version) = hub.snapshot()?;
                if matches!(freshness, Freshness::Exact(exact) if exact != version) {
                    return Err(Otherwise::Upstream(Failure::list_expired()));
                }
                (store, version)
            }
            false => {
                let not_held = || Otherwise::Upstream(Failure::list_expired());
                let no_token = || Failure::bad_request("invalid continue token: continue key is not valid".to_owned());
                let token = Token::decode(&continues).ok_or_else(|| Otherwise::Upstream(no_token()))?;
                last = Some(before(&token, &path.namespace, served.namespaced).ok_or_else(not_held)?);
                pass = hub.gate().acquire().await?;
                self.pages.find(&hub, token.rv).ok_or_else(not_held)?
            }
        };
        // Any state is given whole where upstream has it cached.
        let limit =
            limit.filter(|_| freshness != Freshness::Any || !continues.is_empty() || !is_cached_upstream(&served));
        let count = || store.select(&selection, last.as_ref()).count();
        let (mut left, mut meta) = (usize::MAX, ListMeta { version, continues: String::new(), remaining: None });
        if let Some(limit) = limit {
            let page = store.select(&selection, last.as_ref()).take(limit).last();
            let more = page.is_some_and(|page| store.select(&selection, Some(page.key())).next().is_some());
            if let Some(page) = page.filter(|_| more) {
                let rv = i64::try_from(version.get()).unwrap_or(-1);
                let slash = if is_cached_upstream(&served) { "/" } else { "" };
                let start = format!("{slash}{}\0", below(page.key(), &path.namespace));
                meta.continues = Token { v: TOKEN_VERSION.to_owned(), rv, start }.encode();
                // Selected ones are not counted upstream either, whatever selects them.
                meta.remaining = is_whole.then(|| count() - limit);
                self.pages.keep(&hub, version, &store);
            }
            left = limit;
        }
        let items = Items::of(&served, &store, format);
        let items_len = match items.are_measured() {
            true => measure(&items, store.select(&selection, last.as_ref()).take(left)).await,
            false => 0,
        };
        let is_empty = store.select(&selection, last.as_ref()).next().is_none();
        let (head, tail) = items.around(&meta, items_len, is_empty);
        let listing = Listing { served, store, selection, items, last, left, begun: false, head, tail };
        let media = listing.served.parser.media();
        let chunks = stream::unfold(Some(listing), move |listing| {
            let _held = (&place, &pass);
            std::future::ready(listing.map(|mut listing| {
                let (chunk, complete) = listing.next();
                (Ok::<_, std::convert::Infallible>(chunk), (!complete).then_some(listing))
            }))
        });
        Ok(super::response(media.content_type(), Body::from_stream(chunks)))
    }

    pub(super) async fn get(
        &self,
        Read { path, selected, format }: Read<'_>,
        freshness: Freshness,
    ) -> Result<Response<Body>, Otherwise> {
        self.freshen(&selected.served, freshness, self.patience()).await?;
        let (store, _) = selected.served.hub.snapshot()?;
        let key = ObjectKey::new(&path.namespace, &path.name);
        let Some(object) = store.get(key.as_str()) else {
            return Err(self.not_held(&selected.served.gvr, path).into());
        };
        let (bytes, media) = (object.bytes(), selected.served.parser.media());
        let bytes = format.bytes_of(&bytes, selected.served.parser.tables().map(|tables| &**tables)).unwrap_or(bytes);
        let body = match media {
            Media::Json => [&bytes, b"\n".as_slice()].concat().into(),
            Media::Protobuf => bytes,
            Media::Table => items::table_of(&selected.served.parser, object.version(), &bytes),
        };
        Ok(super::response(media.content_type(), Body::from(body)))
    }
}

/// What these take in a list, in all. It looks at every one, so it lets others go on in between.
async fn measure(items: &Items, objects: impl Iterator<Item = &Arc<Object>>) -> usize {
    let mut sum = 0;
    for (number, object) in objects.enumerate() {
        sum += items.len(object);
        if number % 1024 == 1023 {
            yield_now().await;
        }
    }
    sum
}

/// How long a consistent list waits to be read from the cache: for a proof by bookmark where it would cost upstream a lot.
fn patience(hub: &Hub, selection: &Selection, limit: Option<usize>, bytes_min: usize) -> Patience {
    match hub.state() {
        Some((store, _)) if is_large(&store, selection, limit, bytes_min) => Patience::Bookmark,
        _ => Patience::AtOnce,
    }
}

/// Whether a list has at least so many bytes of JSON.
fn is_large(store: &Store, selection: &Selection, limit: Option<usize>, bytes_min: usize) -> bool {
    if store.json_bytes() < bytes_min {
        return false;
    }
    // Who reads in the pages of kubectl and client-go, or in larger ones, reads them all.
    let objects_max = limit.filter(|limit| *limit < PAGE_OBJECTS_MIN).unwrap_or(usize::MAX);
    let mut bytes = 0;
    let mut objects = store.select(selection, None).take(objects_max);
    while bytes < bytes_min {
        let Some(object) = objects.next() else { return false };
        bytes += object.json_len();
    }
    true
}

/// A key as tokens write it: below the namespace that the path names.
fn below<'a>(key: &'a ObjectKey, namespace: &str) -> &'a str {
    if namespace.is_empty() { key.as_str() } else { key.name() }
}

/// The key that a token goes on after; `None` where it does not go on after one.
fn before(token: &Token, namespace: &str, namespaced: bool) -> Option<ObjectKey> {
    let last = token.start.strip_suffix('\0')?;
    // With a slash from upstream's cache, without one from its etcd.
    let names: Vec<_> = last.strip_prefix('/').unwrap_or(last).split('/').collect();
    if names.iter().any(|name| matches!(*name, "" | "." | "..")) {
        return None;
    }
    match *names {
        [name] if !namespaced || !namespace.is_empty() => Some(ObjectKey::new(namespace, name)),
        [namespace_of, name] if namespaced && namespace.is_empty() => Some(ObjectKey::new(namespace_of, name)),
        _ => None,
    }
}

/// Whether the apiserver has a watch cache for it: of events it has none, and reads etcd.
fn is_cached_upstream(served: &Served) -> bool {
    served.gvr.resource != "events" || !matches!(&*served.gvr.group, "" | "events.k8s.io")
}

impl Listing {
    /// The next part of the body, and whether that was all.
    fn next(&mut self) -> (Bytes, bool) {
        let mut chunk = BytesMut::with_capacity(CHUNK_BYTES + (CHUNK_BYTES >> 3));
        let mut is_first = !std::mem::replace(&mut self.begun, true);
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
            self.items.put(object, std::mem::take(&mut is_first), &mut chunk);
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
    fn what_a_list_waits_for_depends_on_what_is_selected_and_read() {
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
        assert!(!is_large("", Some(1), 1_000_000), "who asks whether there are any");
        assert!(is_large("none", None, 0), "all wait");
    }

    #[test]
    fn a_token_says_what_the_apiservers_would() {
        let token = Token { v: TOKEN_VERSION.to_owned(), rv: 4567, start: "web\0".to_owned() };
        let text = token.encode();
        assert_eq!(text, BASE64_URL_SAFE_NO_PAD.encode(r#"{"v":"meta.k8s.io/v1","rv":4567,"start":"web\u0000"}"#));
        let token = Token::decode(&text).expect("its own");
        assert_eq!(before(&token, "default", true), Some(ObjectKey::new("default", "web")));
        assert_eq!(before(&token, "", false), Some(ObjectKey::new("", "web")));
        assert_eq!(before(&token, "", true), None, "of another request");
        for start in ["default/web\0", "/default/web\0"] {
            let everywhere = Token { start: start.to_owned(), v: TOKEN_VERSION.to_owned(), rv: 1 };
            assert_eq!(before(&everywhere, "", true), Some(ObjectKey::new("default", "web")));
            assert_eq!(before(&everywhere, "other", true), None, "of another request");
        }
        for start in ["", "web", "//web\0", "../web\0", "/\0", "a/./web\0"] {
            let odd = Token { start: start.to_owned(), v: TOKEN_VERSION.to_owned(), rv: 1 };
            assert_eq!(before(&odd, "", true), None, "{start:?}");
        }
        assert_eq!(Token::decode("%%%"), None);
    }
}
