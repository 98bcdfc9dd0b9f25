//! WATCH: one stream of events, pulled by its connection.
//!
//! A watcher is a position in the collection's window of events. As in kube-apiserver, each watcher
//! encodes events and tests selectors for itself. Nothing is queued for a watcher: if it reads too
//! slowly, its position falls out of the window and it ends.

use std::{
    ops::Bound,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::time::{Instant, sleep_until};

use super::{
    list::scan,
    object::Object,
    options::{self, ListOptions},
    protobuf,
    server::Inner,
    stats::OpenWatch,
    status::Status,
    store::{Collection, Since, Snapshot, StoredEvent},
};
use kubefan_common::sync::watch;
use kubefan_model::{
    ObjectKey,
    selector::{FieldOperator, FieldSelector, LabelSelector},
};

/// Maximum number of events or objects per batch.
const BATCH: usize = 64;
/// The last bookmark is sent this long before the deadline.
const BOOKMARK_BEFORE_DEADLINE: Duration = Duration::from_secs(2);
/// kube-apiserver's timer for due bookmarks fires at intervals between `BOOKMARK_TICK_MIN` and
/// this.
const BOOKMARK_TICK_MAX: Duration = Duration::from_millis(1250);
const BOOKMARK_TICK_MIN: Duration = Duration::from_secs(1);

/// The result of starting a watch.
pub(super) enum Started {
    Stream(Box<Watcher>),
    /// The stream is one ERROR event.
    Error(Box<Status>),
}

/// The objects that a watcher selects.
struct Selection {
    namespace: String,
    name: Option<String>,
    labels: LabelSelector,
    fields: FieldSelector,
    /// `spec.nodeName=…`, if required. kube-apiserver indexes pod watchers by this field, so it
    /// does not test the selectors of watchers of other nodes.
    node: Option<FieldSelector>,
}

pub(super) struct Watcher {
    inner: Arc<Inner>,
    collection: Arc<Collection>,
    changes: watch::Receiver<u64>,
    selection: Selection,
    /// All events up to this version are processed.
    cursor: u64,
    /// Bookmarks at or below this are not sent.
    start: u64,
    /// Events up to this version happened before the watch started.
    live_after: u64,
    initial: Option<(Snapshot, Option<ObjectKey>)>,
    end_bookmark: Option<u64>,
    deadline: Instant,
    bookmark_at: Option<Instant>,
    /// Events are encoded as protobuf and not as JSON.
    pub(super) is_protobuf: bool,
    _open: OpenWatch,
}

impl Watcher {
    /// Starts a watch. Errors that kube-apiserver finds before its watch cache become HTTP error
    /// responses (`Err`); later ones become ERROR events ([`Started::Error`]).
    pub(super) async fn start(
        inner: &Arc<Inner>,
        collection: Arc<Collection>,
        namespace: &str,
        name: Option<&str>,
        options: ListOptions,
    ) -> Result<Started, Status> {
        let requested = options::version(&options.resource_version).map_err(Status::internal)?;
        let open = OpenWatch::new(&inner.counters, &collection.resource.gvr);
        let timeout = match options.timeout_seconds {
            None | Some(0) => inner.options.request_timeout_min.mul_f64(1.0 + inner.random()),
            Some(seconds) => Duration::from_secs(u64::try_from(seconds).unwrap_or(0)),
        };
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or_else(|| now + Duration::from_secs(u64::from(u32::MAX)));
        let unset = options.resource_version.is_empty();
        let initial = match options.send_initial_events {
            Some(send) => send,
            None => requested == 0,
        };
        if unset {
            let revision = inner.store.make_consistent(&collection);
            if initial && let Err(status) = inner.wait_for(&collection, revision).await {
                return Ok(Started::Error(Box::new(status)));
            }
        } else if initial
            && options.send_initial_events.is_some()
            && let Err(status) = inner.wait_for(&collection, requested).await
        {
            return Ok(Started::Error(Box::new(status)));
        }
        let changes = collection.changes();
        let live_after = *changes.borrow();
        let selection = Selection::new(namespace, name.or(options.name()), &options);
        let mut watcher = Self {
            inner: inner.clone(),
            changes,
            selection,
            cursor: requested,
            start: requested.max(live_after),
            live_after,
            initial: None,
            end_bookmark: None,
            deadline,
            bookmark_at: None,
            is_protobuf: false,
            collection,
            _open: open,
        };
        if initial {
            let (objects, version) = inner.cached(&watcher.collection);
            watcher.cursor = version;
            watcher.start = version;
            watcher.live_after = version;
            watcher.initial = Some((objects, None));
            watcher.end_bookmark =
                (options.allow_bookmarks && options.send_initial_events.is_some()).then_some(version);
        } else {
            if requested == 0 {
                watcher.cursor = inner.progress(&watcher.collection);
                watcher.start = watcher.cursor;
            }
            let oldest = watcher.collection.oldest();
            if watcher.cursor < oldest {
                let message = format!("too old resource version: {} ({oldest})", watcher.cursor);
                return Ok(Started::Error(Box::new(Status::expired(message))));
            }
        }
        if options.allow_bookmarks {
            // After initial events the timer fires without waiting for an interval.
            let soon = Some(now + watcher.tick());
            watcher.bookmark_at = if watcher.end_bookmark.is_some() { soon } else { watcher.next_bookmark(now, now) };
        }
        Ok(Started::Stream(Box::new(watcher)))
    }

    /// The next lines of the stream; `None` at its end.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(lines) = self.initial_lines() {
                return Some(lines);
            }
            if let Some(version) = self.end_bookmark.take() {
                return Some(self.bookmark(version, true));
            }
            let now = Instant::now();
            if now >= self.deadline {
                return None;
            }
            // Read before the events: once the events are sent, a bookmark at this version is
            // correct.
            let progress = self.inner.progress(&self.collection);
            let mut held = self.inner.held.subscribe();
            let since = match (self.collection.since(self.cursor, BATCH), *held.borrow()) {
                (Since::Events(mut events), Some(held)) => {
                    events.retain(|event| event.version <= held);
                    if events.is_empty() { Since::UpToDate } else { Since::Events(events) }
                }
                (since, _) => since,
            };
            match since {
                Since::Events(events) => {
                    let lines = self.lines(&events);
                    if !lines.is_empty() {
                        return Some(lines);
                    }
                }
                Since::TooOld => {
                    self.inner.counters.watches_cut.inc();
                    return None;
                }
                Since::Closed => return None,
                Since::UpToDate => {
                    if self.bookmark_at.is_some_and(|at| at <= now) {
                        self.bookmark_at = self.next_bookmark(now, now + BOOKMARK_TICK_MIN);
                        if progress > self.start {
                            return Some(self.bookmark(progress, false));
                        }
                    }
                    let wake = self.bookmark_at.map_or(self.deadline, |at| at.min(self.deadline));
                    tokio::select! {
                        biased;
                        _ = self.changes.changed() => {}
                        _ = held.changed() => {}
                        () = sleep_until(wake) => {}
                    }
                }
            }
        }
    }

    fn initial_lines(&mut self) -> Option<Bytes> {
        let (objects, last) = self.initial.take()?;
        let mut lines = BytesMut::new();
        let mut reached = None;
        {
            let from = last.as_ref().map(ObjectKey::as_str);
            let rest: Box<dyn Iterator<Item = (&ObjectKey, &Arc<Object>)>> = match from {
                None => Box::new(scan(&objects, &self.selection.namespace, "")),
                Some(key) => {
                    let after = objects.range::<_, str>((Bound::Excluded(key), Bound::Unbounded));
                    let namespace = &self.selection.namespace;
                    Box::new(after.take_while(move |(key, _)| namespace.is_empty() || key.namespace() == namespace))
                }
            };
            let mut sent = 0;
            for (key, object) in rest {
                if self.selects(object) {
                    self.inner.counters.objects_encoded.inc();
                    self.put_object(&mut lines, "ADDED", object, None);
                    sent += 1;
                }
                if sent == BATCH {
                    reached = Some(key.clone());
                    break;
                }
            }
        }
        self.initial = reached.map(|key| (objects, Some(key)));
        (!lines.is_empty()).then(|| lines.freeze())
    }

    fn lines(&mut self, events: &[Arc<StoredEvent>]) -> Bytes {
        let mut lines = BytesMut::new();
        for event in events {
            self.cursor = self.cursor.max(event.version);
            let current = event.current.as_ref().filter(|object| self.selects(object));
            let previous = event.previous.as_ref().filter(|object| self.selects(object));
            let objects_encoded = &self.inner.counters.objects_encoded;
            let shared = || event.version > self.live_after && event.encoded.swap(true, Ordering::Relaxed);
            match (current, previous) {
                (Some(object), previous) => {
                    objects_encoded.add(usize::from(!shared()));
                    let kind = if previous.is_some() { "MODIFIED" } else { "ADDED" };
                    self.put_object(&mut lines, kind, object, None);
                }
                (None, Some(previous)) => {
                    let left = event.current.is_some();
                    objects_encoded.add(usize::from(left || !shared()));
                    self.put_object(&mut lines, "DELETED", previous, Some(event.version));
                }
                (None, None) => {}
            }
        }
        lines.freeze()
    }

    fn selects(&self, object: &Object) -> bool {
        let Selection { namespace, name, labels, fields, node } = &self.selection;
        let elsewhere = (!namespace.is_empty() && object.key.namespace() != namespace)
            || name.as_ref().is_some_and(|name| object.key.name() != name)
            || node
                .as_ref()
                .is_some_and(|node| !object.matches(&self.collection.resource, &LabelSelector::default(), node));
        if elsewhere {
            return false;
        }
        self.inner.counters.selector_tests.inc();
        object.matches(&self.collection.resource, labels, fields)
    }

    /// Writes an event. The object is at its own version or at `version`.
    fn put_object(&self, out: &mut BytesMut, kind: &str, object: &Object, version: Option<u64>) {
        if self.is_protobuf {
            self.inner.counters.events_encoded.inc();
            return protobuf::put_event(out, kind, object, version);
        }
        match version {
            None => self.put_event(out, kind, |line| line.put_slice(object.bytes())),
            Some(version) => self.put_event(out, kind, |line| object.put_at_version(version, line)),
        }
    }

    fn put_event(&self, out: &mut BytesMut, kind: &str, object: impl FnOnce(&mut BytesMut)) {
        self.inner.counters.events_encoded.inc();
        put_event(out, kind, object);
    }

    fn bookmark(&self, version: u64, ends_initial: bool) -> Bytes {
        if self.is_protobuf {
            self.inner.counters.events_encoded.inc();
            return protobuf::bookmark(version, ends_initial);
        }
        let resource = &self.collection.resource;
        let kind = &resource.kind;
        let api_version = resource.gvr.api_version();
        let end = r#""annotations":{"k8s.io/initial-events-end":"true"}"#;
        let version = format!(r#""resourceVersion":"{}""#, resource.versions.text(version));
        let metadata = if !ends_initial {
            version
        } else if resource.custom {
            format!("{end},{version}")
        } else {
            format!("{version},{end}")
        };
        let type_meta = if resource.custom {
            format!(r#""apiVersion":"{api_version}","kind":"{kind}""#)
        } else {
            format!(r#""kind":"{kind}","apiVersion":"{api_version}""#)
        };
        let object = format!("{{{type_meta},\"metadata\":{{{metadata}}}{}}}", resource.zero);
        let mut line = BytesMut::new();
        self.put_event(&mut line, "BOOKMARK", |line| line.put_slice(object.as_bytes()));
        line.freeze()
    }

    /// The time of the next bookmark: after about one interval, but before the deadline if there is
    /// time.
    ///
    /// As in kube-apiserver, watchers are grouped by the second in which they are due, and a timer
    /// of a little more than one second checks the groups. So the bookmark before the deadline may
    /// be sent early, and then once more.
    fn next_bookmark(&self, now: Instant, not_before: Instant) -> Option<Instant> {
        let periodic = now + self.inner.options.bookmark_interval;
        let closing = self.deadline.checked_sub(BOOKMARK_BEFORE_DEADLINE)?;
        let due = periodic.min(closing);
        let looked_at = due.checked_sub(Duration::from_secs(1).mul_f64(self.inner.random()))? + self.tick();
        (due > now).then(|| looked_at.max(not_before))
    }

    /// The time until the timer next fires.
    fn tick(&self) -> Duration {
        BOOKMARK_TICK_MAX.mul_f64(self.inner.random())
    }
}

impl Selection {
    fn new(namespace: &str, name: Option<&str>, options: &ListOptions) -> Self {
        let mut terms = options.fields.terms().iter();
        let node = terms.find(|term| &*term.path == "spec.nodeName" && term.op == FieldOperator::Equals);
        let node = node.and_then(|term| FieldSelector::parse(&format!("{}={}", term.path, term.value)).ok());
        Self {
            namespace: namespace.to_owned(),
            name: name.map(str::to_owned),
            labels: options.labels.clone(),
            fields: options.fields.clone(),
            node,
        }
    }
}

/// Writes one line: `{"type":"ADDED","object":…}`.
pub(super) fn put_event(out: &mut BytesMut, kind: &str, object: impl FnOnce(&mut BytesMut)) {
    out.put_slice(br#"{"type":""#);
    out.put_slice(kind.as_bytes());
    out.put_slice(br#"","object":"#);
    object(out);
    out.put_slice(b"}\n");
}
