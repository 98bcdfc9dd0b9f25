//! Rebuilds a cache from the parts of a transfer. The whole transfer is refused if any part is
//! missing, duplicated, out of order or altered.
//!
//! The objects go through the writer that will later apply upstream's events, exactly as the
//! objects of a list do. The events are pushed into a history with this replica's own limits. This
//! module checks bytes, order and counts; `informers::warm_start` later compares the result with
//! upstream.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use kubefan_cache::{
    CacheWriter, Commit, Gap, History, HistoryRecord, PriorState, RelistReason, RingLimits, Store, Update, UpdateError,
    writer::Change,
};
use kubefan_common::{
    encoding::chunk,
    planted::{self, Bug},
    proto::v1alpha1::{
        self, PreviousObject, TransferChange, TransferEntry, TransferEvent, TransferGap, TransferHeader,
        TransferResponse, TransferSpan, TransferTrailer, transfer_entry::Entry, transfer_response::Part,
    },
};
use kubefan_model::{
    ObjectKey, ResourceVersion,
    event::{EventType, WatchEvent},
    object::{Object, ObjectParser},
};
use prost::Message;
use tokio::time::Instant;

use super::{encode::TransferCounts, error::PeerError, identity::CacheIdentity};

/// The largest chunk that is accepted, compressed or not, in bytes. It is larger than any object
/// that an apiserver stores.
pub(super) const CHUNK_BYTES_MAX: usize = 32 << 20;

/// A completely received cache.
pub struct ReceivedCache {
    /// State and history, ready to be published.
    pub commit: Commit,
    /// The writer, which continues from that state.
    pub writer: CacheWriter,
    /// The number of received entries.
    pub received: TransferCounts,
    /// Received bytes, uncompressed.
    pub bytes: u64,
}

/// The part of the transfer that is expected next.
enum ExpectedPart {
    Header,
    Objects(Box<ObjectOrder>),
    History(Box<HistoryBuilder>),
}

struct ObjectOrder {
    header: Header,
    last: Option<ObjectKey>,
}

/// The fields of the header that are needed later.
#[derive(Clone, Copy)]
struct Header {
    version: ResourceVersion,
    ring_floor: ResourceVersion,
    conflated_floor: ResourceVersion,
}

struct HistoryBuilder {
    header: Header,
    store: Store,
    history: History,
    /// The last version read.
    reached: ResourceVersion,
    in_ring: bool,
    gap: Option<OpenGap>,
    /// The object after the last event of each key; `None` after a deletion.
    latest: HashMap<ObjectKey, Option<Arc<Object>>>,
}

struct OpenGap {
    from: ResourceVersion,
    to: ResourceVersion,
    reason: RelistReason,
    at: Instant,
    missing: u64,
    events: Vec<Arc<WatchEvent>>,
}

/// Decodes one transfer.
pub struct Decoder {
    wanted: CacheIdentity,
    limits: RingLimits,
    parser: Arc<ObjectParser>,
    bytes_max: u64,
    now: Instant,
    state: ExpectedPart,
    writer: CacheWriter,
    received: TransferCounts,
    bytes: u64,
    digest: crc32fast::Hasher,
    trailer: Option<TransferTrailer>,
}

impl Decoder {
    /// A decoder for one transfer of `wanted`, limited to `bytes_max` uncompressed bytes. `writer`
    /// must be unused. The history obeys `limits`, and ages are subtracted from `now`.
    pub fn new(
        wanted: CacheIdentity,
        limits: RingLimits,
        parser: Arc<ObjectParser>,
        writer: CacheWriter,
        bytes_max: u64,
        now: Instant,
    ) -> Self {
        let received = TransferCounts::default();
        let digest = Default::default();
        let trailer = None;
        let state = ExpectedPart::Header;
        Self { wanted, limits, parser, bytes_max, now, state, writer, received, bytes: 0, digest, trailer }
    }

    /// Accepts the next part.
    ///
    /// # Errors
    /// The part violates the protocol. The decoder must not be used afterwards.
    pub fn take(&mut self, response: TransferResponse) -> Result<(), PeerError> {
        if self.trailer.is_some() {
            return Err(PeerError::broken("data after the trailer"));
        }
        match response.part {
            Some(Part::Header(header)) => self.header(&header),
            Some(Part::Chunk(chunk)) => self.chunk(&chunk),
            Some(Part::Trailer(trailer)) => {
                self.trailer = Some(trailer);
                Ok(())
            }
            None => Err(PeerError::broken("an unknown part")),
        }
    }

    fn header(&mut self, header: &TransferHeader) -> Result<(), PeerError> {
        if !matches!(self.state, ExpectedPart::Header) {
            return Err(PeerError::broken("a second header"));
        }
        self.wanted.agrees_with(&CacheIdentity::of_header(header))?;
        self.digest.update(&header.encode_to_vec());
        let header = Header {
            version: version(&header.resource_version)?,
            ring_floor: version(&header.ring_floor)?,
            conflated_floor: version(&header.residue_floor)?,
        };
        if !(header.conflated_floor <= header.ring_floor && header.ring_floor <= header.version) {
            return Err(PeerError::broken("the versions of its history are not in order"));
        }
        self.writer.apply(Update::ListBegin { reason: RelistReason::WarmStart }).map_err(broken)?;
        self.state = ExpectedPart::Objects(Box::new(ObjectOrder { header, last: None }));
        Ok(())
    }

    fn chunk(&mut self, chunk: &Bytes) -> Result<(), PeerError> {
        if matches!(self.state, ExpectedPart::Header) {
            return Err(PeerError::broken("no header"));
        }
        let content = chunk::decode_content(chunk, CHUNK_BYTES_MAX)?;
        self.bytes += content.len() as u64;
        if self.bytes > self.bytes_max {
            return Err(PeerError::TooLarge(self.bytes_max));
        }
        self.digest.update(&content);
        // Entries are decoded one by one, so that decoding stops at the first invalid entry: a
        // small chunk may claim millions of empty ones.
        let mut content = Bytes::from(content);
        while content.has_remaining() {
            let entry = TransferEntry::decode_length_delimited(&mut content).map_err(PeerError::broken)?;
            self.received.count(&entry);
            match entry.entry {
                Some(Entry::Object(json)) => self.object(&json)?,
                Some(entry) => {
                    let packer = self.writer.packer().clone();
                    let now = self.now;
                    let parser = self.parser.clone();
                    let events = self.events()?;
                    match entry {
                        Entry::Inexact(span) => events.inexact(&span)?,
                        Entry::Change(change) => events.change(&change, &parser)?,
                        Entry::Gap(gap) => events.gap(&gap, now)?,
                        Entry::Event(event) => {
                            let at = before(now, event.age_millis);
                            let event = events.event(event, &parser)?.packing(&packer, None);
                            events.push(Arc::new(event), at, now)?;
                        }
                        Entry::Object(_) => {}
                    }
                }
                None => return Err(PeerError::broken("an unknown entry")),
            }
        }
        Ok(())
    }

    fn object(&mut self, json: &[u8]) -> Result<(), PeerError> {
        let ExpectedPart::Objects(objects) = &mut self.state else {
            return Err(PeerError::broken("an object after the start of the history"));
        };
        let object = self.parser.parse(json)?;
        if objects.last.as_ref().is_some_and(|last| last >= object.key()) || object.version() > objects.header.version {
            return Err(PeerError::broken(format_args!("{} is out of order", object.key())));
        }
        objects.last = Some(object.key().clone());
        self.writer.apply(Update::ListItem(object)).map_err(broken)?;
        Ok(())
    }

    /// The history. The first call completes the objects.
    fn events(&mut self) -> Result<&mut HistoryBuilder, PeerError> {
        if let ExpectedPart::Objects(objects) = &self.state {
            let header = objects.header;
            let commit = self.writer.apply(Update::ListEnd(header.version)).map_err(broken)?;
            let Some(Commit { store, .. }) = commit else {
                return Err(PeerError::broken("an incomplete list of objects"));
            };
            let ring_floor =
                if planted::is(Bug::RestoredRingTooDeep) { header.conflated_floor } else { header.ring_floor };
            self.state = ExpectedPart::History(Box::new(HistoryBuilder {
                header,
                store,
                history: History::to_restore(self.limits, header.conflated_floor, ring_floor, self.parser.clone()),
                reached: header.conflated_floor,
                in_ring: false,
                gap: None,
                latest: HashMap::new(),
            }));
        }
        match &mut self.state {
            ExpectedPart::History(events) => Ok(events),
            ExpectedPart::Header | ExpectedPart::Objects(_) => Err(PeerError::broken("no header")),
        }
    }

    /// Completes the transfer after the last part.
    ///
    /// # Errors
    /// The trailer is missing or does not match the received parts.
    pub fn finish(mut self) -> Result<ReceivedCache, PeerError> {
        let trailer = self.trailer.ok_or_else(|| PeerError::CutOff("it has no trailer".to_owned()))?;
        self.events()?;
        let Self { state: ExpectedPart::History(events), writer, received, bytes, digest, now, .. } = self else {
            return Err(PeerError::broken("no header"));
        };
        let TransferTrailer { objects, changes, events: count, crc32 } = trailer;
        if (TransferCounts { objects, changes, events: count }) != received || crc32 != digest.finalize() {
            return Err(PeerError::broken("its counts or its checksum do not match"));
        }
        let commit = events.finish(now)?;
        Ok(ReceivedCache { commit, writer, received, bytes })
    }
}

impl HistoryBuilder {
    /// Checks that versions ascend and stay within `at_most`. Equal versions are allowed if
    /// `again`.
    fn reach(&mut self, version: ResourceVersion, at_most: ResourceVersion, again: bool) -> Result<(), PeerError> {
        if version < self.reached || (version == self.reached && !again) || version > at_most {
            return Err(PeerError::broken(format_args!("version {version} after version {}", self.reached)));
        }
        self.reached = version;
        Ok(())
    }

    fn inexact(&mut self, span: &TransferSpan) -> Result<(), PeerError> {
        let from = version(&span.from)?;
        let to = version(&span.to)?;
        if self.in_ring || !self.history.conflated().is_empty() || from >= to || to > self.header.ring_floor {
            return Err(PeerError::broken(format_args!("a relist from {from} to {to} is out of order")));
        }
        self.history.conflated_mut().restore_gap(from, to);
        Ok(())
    }

    fn change(&mut self, change: &TransferChange, parser: &Arc<ObjectParser>) -> Result<(), PeerError> {
        let version = version(&change.resource_version)?;
        // All changes of a relist have the same version.
        let again = !self.history.conflated().is_empty();
        self.reach(version, self.header.ring_floor, again)?;
        if self.in_ring {
            return Err(PeerError::broken("a change after the first event"));
        }
        let key = ObjectKey::new(&change.namespace, &change.name);
        let before = if change.before.is_empty() {
            None
        } else {
            Some(Arc::new(parser.parse(&change.before)?).selectable_attributes(parser))
        };
        if before.as_ref().is_some_and(|before| *before.key() != key) {
            return Err(PeerError::broken(format_args!("a change of {key} with another object")));
        }
        self.history.conflated_mut().restore(PriorState { version, key, before });
        Ok(())
    }

    fn enter_ring(&mut self) {
        if !std::mem::replace(&mut self.in_ring, true) {
            self.reached = self.header.ring_floor;
        }
    }

    fn gap(&mut self, gap: &TransferGap, now: Instant) -> Result<(), PeerError> {
        self.enter_ring();
        let from = version(&gap.from)?;
        let to = version(&gap.to)?;
        if self.gap.is_some() || from < self.reached || from >= to {
            return Err(PeerError::broken(format_args!("a relist from {from} to {to} is out of order")));
        }
        self.reach(to, self.header.version, false)?;
        let reason = RelistReason::parse(&gap.reason);
        let at = before(now, gap.age_millis);
        let missing = gap.events;
        self.gap = Some(OpenGap { from, to, reason, at, missing, events: Vec::new() });
        self.close_gap(now);
        Ok(())
    }

    fn event(&mut self, event: TransferEvent, parser: &ObjectParser) -> Result<WatchEvent, PeerError> {
        self.enter_ring();
        let version = version(&event.resource_version)?;
        let key = ObjectKey::new(&event.namespace, &event.name);
        let misfit = |what: &str| PeerError::broken(format_args!("the event of {key} at {version} {what}"));
        let parsed = |json: &Bytes| parser.parse(json).map(Arc::new);
        let object = if event.object.is_empty() {
            self.store.get(key.as_str()).cloned().ok_or_else(|| misfit("has no object"))?
        } else {
            parsed(&event.object)?
        };
        let earlier = self.latest.get(&key).cloned();
        let previous = match event.previous_object() {
            PreviousObject::None => None,
            PreviousObject::Sent => Some(parsed(&event.previous)?),
            PreviousObject::Earlier => Some(
                earlier.clone().flatten().ok_or_else(|| misfit("refers to an earlier event that does not exist"))?,
            ),
            PreviousObject::Same => Some(object.clone()),
            PreviousObject::Unspecified => return Err(misfit("does not specify the previous object")),
        };
        let kind = match event.r#type() {
            v1alpha1::EventType::Added => EventType::Added,
            v1alpha1::EventType::Modified => EventType::Modified,
            v1alpha1::EventType::Deleted => EventType::Deleted,
            v1alpha1::EventType::Unspecified => return Err(misfit("has no type")),
        };
        let sound = match (kind, &previous) {
            (EventType::Added, previous) => previous.is_none() && !matches!(earlier, Some(Some(_))),
            (EventType::Modified, previous) => previous.is_some() && !matches!(earlier, Some(None)),
            (EventType::Deleted, _) => true,
        };
        let same_key = |object: &Arc<Object>| *object.key() == key;
        if !sound || !object.version().is_at(version) || !same_key(&object) || !previous.iter().all(same_key) {
            return Err(misfit("contradicts itself or an earlier event"));
        }
        let remaining = (kind != EventType::Deleted).then(|| object.clone());
        self.latest.insert(key, remaining);
        Ok(WatchEvent::new(kind, version, object, previous))
    }

    fn push(&mut self, event: Arc<WatchEvent>, at: Instant, now: Instant) -> Result<(), PeerError> {
        if let Some(gap) = &mut self.gap {
            if event.version() > gap.to {
                return Err(PeerError::broken("a relist with a later event"));
            }
            gap.missing -= 1;
            gap.events.push(event);
            self.close_gap(now);
            return Ok(());
        }
        self.reach(event.version(), self.header.version, false)?;
        self.record(HistoryRecord::Event(event), at, now);
        Ok(())
    }

    fn close_gap(&mut self, now: Instant) {
        if let Some(OpenGap { from, to, reason, at, events, .. }) = self.gap.take_if(|gap| gap.missing == 0) {
            self.record(HistoryRecord::Gap(Arc::new(Gap::new(from, to, reason, events))), at, now);
        }
    }

    fn record(&mut self, record: HistoryRecord, at: Instant, now: Instant) {
        self.history.push(record, at);
        // This replica's limits may be lower than the sender's.
        self.history.evict(now, self.store.json_bytes(), 1.0);
    }

    /// Checks that the last event of each key agrees with the state.
    fn finish(mut self, now: Instant) -> Result<Commit, PeerError> {
        if self.gap.is_some() {
            return Err(PeerError::broken("a relist with missing events"));
        }
        for (key, latest) in &self.latest {
            let current = self.store.get(key.as_str());
            if current.map(|object| object.version()) != latest.as_ref().map(|object| object.version()) {
                return Err(PeerError::broken(format_args!("the events of {key} do not end at its current object")));
            }
        }
        self.history.restored(now, self.store.json_bytes());
        // The peer may have sent its state between two events of a version.
        let version = self.header.version;
        Ok(Commit { store: self.store, version, change: Change::Restored(Box::new(self.history)) })
    }
}

fn version(text: &str) -> Result<ResourceVersion, PeerError> {
    ResourceVersion::parse_place(text).map_err(PeerError::broken)
}

fn broken(error: UpdateError) -> PeerError {
    PeerError::broken(error)
}

/// `now` minus the age, or `now` if the clock does not reach that far back.
fn before(now: Instant, age_millis: u64) -> Instant {
    now.checked_sub(Duration::from_millis(age_millis)).unwrap_or(now)
}
