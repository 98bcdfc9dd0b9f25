//! Encodes a cache as the parts of a transfer. Parts are built one by one while they are sent, so
//! that a transfer needs little memory beyond the cache itself.
//!
//! Two kinds of objects are not repeated: an event's object if it is the current one, and a
//! previous object if an earlier event in the transfer contains it. Both are recognized by pointer
//! equality, because the ring shares these objects. A missed match therefore costs bytes, never
//! correctness.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use kubefan_cache::{HistoryCopy, HistoryRecord, PriorState, Store};
use kubefan_common::{
    encoding::{FrameError, chunk},
    proto::v1alpha1::{
        self, PreviousObject, TransferChange, TransferEntry, TransferEvent, TransferGap, TransferHeader,
        TransferResponse, TransferSpan, TransferTrailer, transfer_entry::Entry, transfer_response::Part,
    },
};
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::{EventType, WatchEvent},
    object::Object,
};
use prost::Message;
use tokio::time::Instant;

use super::{error::PeerError, identity::CacheIdentity};

/// The content of a chunk before compression, in bytes. One entry may be larger.
const CHUNK_BYTES: usize = 256 << 10;

/// The number of entries in a transfer, for the trailer and for logs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransferCounts {
    /// Objects.
    pub objects: u64,
    /// Entries of the conflated history.
    pub changes: u64,
    /// Events, including those of relists.
    pub events: u64,
}

/// An iterator over the parts of a transfer. It ends after the trailer or after an error.
pub struct Encoder {
    header: Option<TransferHeader>,
    chunk_bytes: usize,
    entries: Box<dyn Iterator<Item = TransferEntry> + Send>,
    sent: TransferCounts,
    content_bytes: u64,
    digest: crc32fast::Hasher,
    done: bool,
}

impl Encoder {
    /// Encodes `store` and `history`. Ages are relative to `now`.
    pub fn new(identity: &CacheIdentity, store: Store, history: HistoryCopy, now: Instant) -> Self {
        let CacheIdentity { cluster, gvr, scope, upstream_field_selector, schema } = identity.clone();
        let header = TransferHeader {
            cluster,
            group: gvr.group,
            version: gvr.version,
            resource: gvr.resource,
            namespace: scope.namespace().to_owned(),
            upstream_field_selector,
            schema,
            resource_version: history.version.to_string(),
            ring_floor: history.ring_floor.to_string(),
            residue_floor: history.conflated_floor.to_string(),
        };
        let HistoryCopy { changes, inexact, records, .. } = history;
        let mut last: Option<ObjectKey> = None;
        let objects = store.clone();
        let objects = std::iter::from_fn(move || {
            let object = objects.after(last.as_ref()).next()?.clone();
            last = Some(object.key().clone());
            Some(Entry::Object(object.bytes()))
        });
        let span = |(from, to): (ResourceVersion, ResourceVersion)| {
            Entry::Inexact(TransferSpan { from: from.to_string(), to: to.to_string() })
        };
        let mut events = EventEncoder { store, latest: HashMap::new() };
        let records = records.into_iter().flat_map(move |(record, at)| {
            events.entries(&record, u64::try_from(now.saturating_duration_since(at).as_millis()).unwrap_or(u64::MAX))
        });
        let entries =
            objects.chain(inexact.into_iter().map(span)).chain(changes.into_iter().map(change)).chain(records);
        let entries = Box::new(entries.map(|entry| TransferEntry { entry: Some(entry) }));
        let sent = TransferCounts::default();
        let digest = crc32fast::Hasher::new();
        let chunk_bytes = CHUNK_BYTES;
        Self { header: Some(header), chunk_bytes, entries, sent, content_bytes: 0, digest, done: false }
    }

    /// Sets the size of a chunk.
    #[cfg(test)]
    pub(super) fn in_chunks_of(self, chunk_bytes: usize) -> Self {
        Self { chunk_bytes, ..self }
    }

    /// The number of entries encoded so far.
    pub fn sent(&self) -> TransferCounts {
        self.sent
    }

    /// The parts, up to the first that no decoder with this limit would accept.
    pub fn limited_to(mut self, bytes_max: u64) -> impl Iterator<Item = Result<TransferResponse, PeerError>> {
        std::iter::from_fn(move || {
            let part = self.next()?;
            let is_too_large = self.content_bytes > bytes_max;
            Some(if is_too_large { Err(PeerError::TooLarge(bytes_max)) } else { part.map_err(PeerError::from) })
        })
    }

    /// The next chunk, or the trailer.
    fn part(&mut self) -> Result<Part, FrameError> {
        let mut content = Vec::new();
        while content.len() < self.chunk_bytes
            && let Some(entry) = self.entries.next()
        {
            self.sent.count(&entry);
            content.extend_from_slice(&entry.encode_length_delimited_to_vec());
        }
        if content.is_empty() {
            self.done = true;
            let TransferCounts { objects, changes, events } = self.sent;
            let crc32 = self.digest.clone().finalize();
            return Ok(Part::Trailer(TransferTrailer { objects, changes, events, crc32 }));
        }
        self.content_bytes += content.len() as u64;
        self.digest.update(&content);
        chunk::encode_content(&content).map(Part::Chunk)
    }
}

impl Iterator for Encoder {
    type Item = Result<TransferResponse, FrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let part = match self.header.take() {
            Some(header) => {
                self.digest.update(&header.encode_to_vec());
                Ok(Part::Header(header))
            }
            None => self.part(),
        };
        // After a failure there is no trailer, so the receiver cannot mistake the transfer for a
        // complete one.
        self.done |= part.is_err();
        Some(part.map(|part| TransferResponse { part: Some(part) }))
    }
}

impl TransferCounts {
    pub(super) fn count(&mut self, entry: &TransferEntry) {
        match &entry.entry {
            Some(Entry::Object(_)) => self.objects += 1,
            Some(Entry::Change(_)) => self.changes += 1,
            Some(Entry::Event(_)) => self.events += 1,
            Some(Entry::Inexact(_) | Entry::Gap(_)) | None => {}
        }
    }
}

fn change(PriorState { version, key, before }: PriorState) -> Entry {
    Entry::Change(TransferChange {
        resource_version: version.to_string(),
        namespace: key.namespace().to_owned(),
        name: key.name().to_owned(),
        before: before.map(|before| before.bytes()).unwrap_or_default(),
    })
}

/// Encodes events, and remembers which objects earlier events contain.
struct EventEncoder {
    store: Store,
    latest: HashMap<ObjectKey, Arc<Object>>,
}

impl EventEncoder {
    fn entries(&mut self, record: &HistoryRecord, age_millis: u64) -> Vec<Entry> {
        let mut entries = Vec::with_capacity(1);
        if let HistoryRecord::Gap(gap) = record {
            entries.push(Entry::Gap(TransferGap {
                from: gap.from.to_string(),
                to: gap.to.to_string(),
                reason: gap.reason.as_str().to_owned(),
                events: gap.events.len() as u64,
                age_millis,
            }));
        }
        entries.extend(record.events().iter().map(|event| Entry::Event(self.event(event, age_millis))));
        entries
    }

    fn event(&mut self, event: &WatchEvent, age_millis: u64) -> TransferEvent {
        let object = event.object();
        let previous = event.previous();
        let key = object.key().clone();
        let current = self.store.get(key.as_str()).is_some_and(|current| Arc::ptr_eq(current, &object));
        let earlier = match event.kind() {
            EventType::Deleted => self.latest.remove(&key),
            EventType::Added | EventType::Modified => self.latest.insert(key.clone(), object.clone()),
        };
        let (previous_object, previous) = match previous {
            None => (PreviousObject::None, Bytes::new()),
            Some(previous) if Arc::ptr_eq(&previous, &object) => (PreviousObject::Same, Bytes::new()),
            Some(previous) if earlier.is_some_and(|earlier| Arc::ptr_eq(&earlier, &previous)) => {
                (PreviousObject::Earlier, Bytes::new())
            }
            Some(previous) => (PreviousObject::Sent, previous.bytes()),
        };
        let kind = match event.kind() {
            EventType::Added => v1alpha1::EventType::Added,
            EventType::Modified => v1alpha1::EventType::Modified,
            EventType::Deleted => v1alpha1::EventType::Deleted,
        };
        TransferEvent {
            r#type: kind.into(),
            resource_version: event.version().to_string(),
            namespace: key.namespace().to_owned(),
            name: key.name().to_owned(),
            object: if current { Bytes::new() } else { object.bytes() },
            previous_object: previous_object.into(),
            previous,
            age_millis,
        }
    }
}
