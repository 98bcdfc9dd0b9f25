//! Paged lists: continue tokens, and the snapshots that pages are read from.
//!
//! All pages of a list are read from the snapshot of the first page. A token has the apiserver's
//! form (`storage/continue.go`): it names the version of the snapshot and the key to continue from.
//! So a token whose snapshot was dropped, or that another server made, can be forwarded upstream
//! unchanged.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use kubefan_cache::Store;
use kubefan_common::planted::{self, Bug};
use kubefan_model::{ObjectKey, ResourceVersion};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use kubefan_fanout::{CachePosition, Hub};

/// The most snapshots that are retained for paged lists.
const SNAPSHOTS_MAX: usize = 32;
/// Time for which a snapshot is retained after its last read.
const SNAPSHOT_IDLE_MAX: Duration = Duration::from_secs(120);
/// Maximum age of a snapshot, however often it is read: it retains old versions of changed objects.
/// The apiserver's etcd retains them for about as long.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_secs(300);
/// The only version of tokens.
const TOKEN_VERSION: &str = "meta.k8s.io/v1";

/// A continue token.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContinueToken {
    v: String,
    /// The version of the snapshot; negative for any.
    pub rv: i64,
    /// The key to continue from, relative to the path of the request: the last key that was read,
    /// followed by a NUL.
    start: String,
}

impl ContinueToken {
    /// Returns the token that continues after `last`, in a snapshot of `version`.
    pub fn after(last: &ObjectKey, version: ResourceVersion, namespace: &str, has_slash: bool) -> Self {
        let rv = i64::try_from(version.get()).unwrap_or(-1);
        let slash = if has_slash { "/" } else { "" };
        let start = format!("{slash}{}\0", relative_key(last, namespace));
        Self { v: TOKEN_VERSION.to_owned(), rv, start }
    }

    /// Decodes a token. `None` if it is invalid.
    pub fn decode(text: &str) -> Option<Self> {
        let json = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        let token: Self = serde_json::from_slice(&json).ok()?;
        (token.v == TOKEN_VERSION).then_some(token)
    }

    /// Encodes the token.
    pub fn encode(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }
}

/// The snapshots that are retained for paged lists.
#[derive(Default)]
pub struct PageSnapshots {
    retained: Mutex<Vec<Retained>>,
}

struct Retained {
    hub: Weak<Hub>,
    /// The epoch of the cache's history, in which the version is valid.
    epoch: u64,
    version: ResourceVersion,
    store: Store,
    retained_at: Instant,
    read_at: Instant,
}

impl Retained {
    fn is_live(&self) -> bool {
        self.read_at.elapsed() < SNAPSHOT_IDLE_MAX
            && self.retained_at.elapsed() < SNAPSHOT_AGE_MAX
            && self.hub.strong_count() > 0
    }

    fn is_of(&self, hub: &Arc<Hub>, epoch: u64, version: ResourceVersion) -> bool {
        let is_same = std::ptr::eq(self.hub.as_ptr(), Arc::as_ptr(hub)) || planted::is(Bug::PagesOfAnotherCache);
        is_same && self.epoch == epoch && self.version.is_at(version)
    }
}

impl PageSnapshots {
    /// Returns the retained snapshots, without the expired ones.
    fn live(&self) -> MutexGuard<'_, Vec<Retained>> {
        let mut retained = self.retained.lock().unwrap_or_else(PoisonError::into_inner);
        retained.retain(Retained::is_live);
        retained
    }

    /// Returns the snapshot of a cache at a version, if it is retained.
    pub fn find(&self, hub: &Arc<Hub>, version: i64) -> Option<(Store, ResourceVersion)> {
        let version = ResourceVersion::new(u64::try_from(version).ok()?)?;
        let epoch = hub.position()?.epoch;
        let mut live = self.live();
        let found = live.iter_mut().find(|one| one.is_of(hub, epoch, version))?;
        found.read_at = Instant::now();
        Some((found.store.clone(), version))
    }

    /// Retains a snapshot. The first page of a list starts its age anew. If there are too many, the
    /// one that was not read for the longest time is dropped.
    pub fn retain(self: &Arc<Self>, hub: &Arc<Hub>, version: ResourceVersion, store: &Store, is_first: bool) {
        let Some(CachePosition { epoch, .. }) = hub.position() else { return };
        let mut live = self.live();
        let read_at = Instant::now();
        if let Some(known) = live.iter_mut().find(|one| one.is_of(hub, epoch, version)) {
            known.read_at = read_at;
            // It is the newest state then. A token cannot name a place inside a version.
            if is_first {
                known.retained_at = read_at;
                known.version = version;
                known.store = store.clone();
            }
            return;
        }
        if live.is_empty() {
            tokio::spawn(self.clone().drop_expired());
        }
        if live.len() >= SNAPSHOTS_MAX
            && let Some((oldest, _)) = live.iter().enumerate().min_by_key(|(_, one)| one.read_at)
        {
            live.swap_remove(oldest);
        }
        let hub = Arc::downgrade(hub);
        let store = store.clone();
        live.push(Retained { hub, epoch, version, store, retained_at: read_at, read_at });
    }

    /// Drops expired snapshots until none is left.
    async fn drop_expired(self: Arc<Self>) {
        loop {
            sleep(SNAPSHOT_IDLE_MAX / 8).await;
            if self.live().is_empty() {
                return;
            }
        }
    }
}

/// Returns a key as tokens contain it: without the namespace if the path names that.
fn relative_key<'a>(key: &'a ObjectKey, namespace: &str) -> &'a str {
    if namespace.is_empty() { key.as_str() } else { key.name() }
}

/// Returns the key after which a token continues. `None` if it does not continue after a key of the
/// request's path.
pub fn last_key(token: &ContinueToken, namespace: &str, namespaced: bool) -> Option<ObjectKey> {
    let last = token.start.strip_suffix('\0')?;
    // Tokens from the apiserver's watch cache have a leading slash, tokens from etcd have none.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_the_apiservers_form() {
        let token = ContinueToken { v: TOKEN_VERSION.to_owned(), rv: 4567, start: "web\0".to_owned() };
        let text = token.encode();
        assert_eq!(text, BASE64_URL_SAFE_NO_PAD.encode(r#"{"v":"meta.k8s.io/v1","rv":4567,"start":"web\u0000"}"#));
        let token = ContinueToken::decode(&text).expect("its own");
        assert_eq!(last_key(&token, "default", true), Some(ObjectKey::new("default", "web")));
        assert_eq!(last_key(&token, "", false), Some(ObjectKey::new("", "web")));
        assert_eq!(last_key(&token, "", true), None, "the token belongs to another request");
        for start in ["default/web\0", "/default/web\0"] {
            let everywhere = ContinueToken { start: start.to_owned(), v: TOKEN_VERSION.to_owned(), rv: 1 };
            assert_eq!(last_key(&everywhere, "", true), Some(ObjectKey::new("default", "web")));
            assert_eq!(last_key(&everywhere, "other", true), None, "the token belongs to another request");
        }
        for start in ["", "web", "//web\0", "../web\0", "/\0", "a/./web\0"] {
            let odd = ContinueToken { start: start.to_owned(), v: TOKEN_VERSION.to_owned(), rv: 1 };
            assert_eq!(last_key(&odd, "", true), None, "{start:?}");
        }
        assert_eq!(ContinueToken::decode("%%%"), None);
    }
}
