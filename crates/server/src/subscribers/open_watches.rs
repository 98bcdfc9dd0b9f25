//! The entries of the watches that are being sent, and a way to end one.

use std::{
    any::Any,
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use kubefan_access::Caller;
use kubefan_cache::StreamEnd;
use kubefan_fanout::{Observer, OfStream, Served};
use kubefan_model::fields::FieldTable;
use tokio::time::Instant;

use crate::client_info::RequestOrigin;

/// With fewer texts, unused ones are not looked for.
const SWEPT_LEAST: usize = 64;

/// The watches of one kubefan.
#[derive(Default)]
pub struct Subscribers {
    seed: u32,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    entries: HashMap<u32, Arc<Subscriber>>,
    /// The number of the last entry.
    last: u32,
    /// Names and user agents. Many watches have the same.
    texts: HashSet<Arc<str>>,
    /// The number of texts at which those that are gone are removed.
    swept_at: usize,
}

/// One watch.
pub(super) struct Subscriber {
    pub(super) id: u32,
    /// Empty if callers are not distinguished.
    pub(super) user: Arc<str>,
    pub(super) user_agent: Arc<str>,
    /// `None` for a Unix socket.
    pub(super) address: Option<SocketAddr>,
    pub(super) forwarded_for: Option<IpAddr>,
    pub(super) opened_at: Instant,
    pub(super) observer: Observer,
    /// The namespace that is cached; empty for all.
    pub(super) cache_namespace: Arc<str>,
    /// The names of the fields in its selector.
    pub(super) fields: Arc<FieldTable>,
    is_disconnected: AtomicBool,
    stream: OfStream,
}

/// The entry of a watch. Dropping it removes the entry.
pub struct Registered {
    subscriber: Arc<Subscriber>,
    subscribers: Arc<Subscribers>,
    /// The watch reads the cache until it ends.
    _reading: Option<Arc<dyn Any + Send + Sync>>,
}

impl Subscribers {
    /// Without watches yet. `seed` makes the ids differ from those of other replicas: an id that
    /// was listed there ends nothing here.
    pub fn new(seed: u32) -> Arc<Self> {
        Arc::new(Self { seed, known: Mutex::default() })
    }

    /// Enters a watch of a cache; `stream` wakes it.
    pub fn register(
        self: &Arc<Self>,
        caller: &Caller,
        sender: RequestOrigin,
        observer: Observer,
        served: &Served,
        stream: OfStream,
    ) -> Registered {
        let user = match caller {
            Caller::Any => "",
            Caller::Known(known) => &known.identity.user,
        };
        let mut known = self.lock();
        let user = known.text(user);
        let user_agent = known.text(&sender.user_agent);
        let cache_namespace = known.text(served.scope.namespace());
        let id = known.next_id(self.seed);
        let subscriber = Arc::new(Subscriber {
            id,
            user,
            user_agent,
            address: sender.address,
            forwarded_for: sender.forwarded_for,
            opened_at: Instant::now(),
            observer,
            cache_namespace,
            fields: served.fields.clone(),
            is_disconnected: AtomicBool::new(false),
            stream,
        });
        known.entries.insert(id, subscriber.clone());
        Registered { subscriber, subscribers: self.clone(), _reading: served.reading.clone() }
    }

    /// Ends one watch. Returns whether there is one with this id.
    pub fn disconnect(&self, id: &str) -> bool {
        let subscriber = id_of(id).and_then(|id| self.lock().entries.get(&id).cloned());
        let Some(subscriber) = subscriber else { return false };
        subscriber.is_disconnected.store(true, Ordering::Release);
        subscriber.stream.wake();
        true
    }

    pub(super) fn all(&self) -> Vec<Arc<Subscriber>> {
        self.lock().entries.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// Returns the one text that equals this one.
    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return known.clone();
        }
        if self.texts.len() >= self.swept_at.max(SWEPT_LEAST) {
            self.texts.retain(|text| Arc::strong_count(text) > 1);
            self.texts.shrink_to_fit();
            self.swept_at = 2 * self.texts.len();
        }
        let text: Arc<str> = text.into();
        self.texts.insert(text.clone());
        text
    }

    /// An id that no watch has.
    fn next_id(&mut self, seed: u32) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            // An odd factor: each number gives another id, and neighbors look different.
            let id = self.last.wrapping_add(seed).wrapping_mul(0x9E37_79B1);
            if !self.entries.contains_key(&id) {
                return id;
            }
        }
    }
}

impl Registered {
    /// Returns the end of the watch, if an operator has ended it.
    pub fn end(&self) -> Option<StreamEnd> {
        self.subscriber.is_disconnected.load(Ordering::Acquire).then_some(StreamEnd::Disconnected)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.subscribers.lock().entries.remove(&self.subscriber.id);
    }
}

/// An id as operators see it.
pub(super) fn text_of(id: u32) -> String {
    format!("{id:08x}")
}

fn id_of(text: &str) -> Option<u32> {
    let is_id = text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_id.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests;
