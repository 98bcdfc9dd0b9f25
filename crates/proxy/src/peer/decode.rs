//! The parts of a transfer as a cache, or an error: whatever is missing, doubled, out of order or not what was sent is refused as a whole.
//!
//! The objects go the way of a list, through the writer that will go on from there; events are pushed into a history with this replica's
//! own limits. Nothing is believed for having arrived: bytes, order and counts are checked here, and the result against upstream later.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use prost::Message;
use tokio::time::Instant;

use super::{CHUNK_BYTES_MAX, CacheIdentity, PeerError, encode::Sent};
use crate::cache::{
    CacheWriter, Commit, Gap, History, PriorState, Record, RingLimits, Store, Update, UpdateError, writer::Change,
};
use kubefan_common::{
    encoding::chunk,
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

/// Why a relist may have been; what a newer peer may call it otherwise is not known here.
const REASONS: [&str; 12] = [
    "broken_object",
    "continue_expired",
    "expired",
    "forbidden",
    "initial",
    "interrupted",
    "line_too_long",
    "not_found",
    "out_of_order",
    "rewritten",
    "schema_changed",
    "self_check",
];

/// A cache that was received whole.
pub struct Restored {
    /// State and history, to be published.
    pub commit: Commit,
    /// The writer that goes on from there.
    pub writer: CacheWriter,
    /// What was received.
    pub received: Sent,
    /// Bytes of content.
    pub bytes: u64,
}

/// What is expected next.
enum Stage {
    Header,
    Objects(Box<Objects>),
    History(Box<Events>),
}

struct Objects {
    header: Header,
    last: Option<ObjectKey>,
}

/// What of the header is needed later.
#[derive(Clone, Copy)]
struct Header {
    version: ResourceVersion,
    ring_floor: ResourceVersion,
    residue_floor: ResourceVersion,
}

struct Events {
    header: Header,
    store: Store,
    history: History,
    /// Up to here changes or records were read.
    reached: ResourceVersion,
    in_ring: bool,
    gap: Option<OpenGap>,
    /// What the last event of each key has brought in; `None` where it has deleted it.
    brought: HashMap<ObjectKey, Option<Arc<Object>>>,
}

struct OpenGap {
    from: ResourceVersion,
    to: ResourceVersion,
    reason: &'static str,
    at: Instant,
    missing: u64,
    events: Vec<Arc<WatchEvent>>,
}

/// Takes the parts of one transfer.
pub struct Decoder {
    wanted: CacheIdentity,
    limits: RingLimits,
    parser: Arc<ObjectParser>,
    bytes_max: u64,
    now: Instant,
    stage: Stage,
    writer: CacheWriter,
    received: Sent,
    bytes: u64,
    digest: crc32fast::Hasher,
    trailer: Option<TransferTrailer>,
}

impl Decoder {
    /// A decoder of one transfer of `wanted`, which takes at most `bytes_max` of content. `writer` has not begun; the history will keep to
    /// `limits`, and ages are counted back from `now`.
    pub fn new(
        wanted: CacheIdentity,
        limits: RingLimits,
        parser: Arc<ObjectParser>,
        writer: CacheWriter,
        bytes_max: u64,
        now: Instant,
    ) -> Self {
        let (received, digest, trailer, stage) = (Sent::default(), Default::default(), None, Stage::Header);
        Self { wanted, limits, parser, bytes_max, now, stage, writer, received, bytes: 0, digest, trailer }
    }

    /// Takes the next part.
    ///
    /// # Errors
    /// Whatever is not as the contract says. The decoder is of no more use then.
    pub fn take(&mut self, response: TransferResponse) -> Result<(), PeerError> {
        if self.trailer.is_some() {
            return Err(PeerError::broken("something after its end"));
        }
        match response.part {
            Some(Part::Header(header)) => self.header(&header),
            Some(Part::Chunk(chunk)) => self.chunk(&chunk),
            Some(Part::Trailer(trailer)) => {
                self.trailer = Some(trailer);
                Ok(())
            }
            None => Err(PeerError::broken("a part of no known kind")),
        }
    }

    fn header(&mut self, header: &TransferHeader) -> Result<(), PeerError> {
        if !matches!(self.stage, Stage::Header) {
            return Err(PeerError::broken("a second header"));
        }
        self.wanted.agrees_with(&CacheIdentity::of_header(header))?;
        self.digest.update(&header.encode_to_vec());
        let header = Header {
            version: version(&header.resource_version)?,
            ring_floor: version(&header.ring_floor)?,
            residue_floor: version(&header.residue_floor)?,
        };
        if !(header.residue_floor <= header.ring_floor && header.ring_floor <= header.version) {
            return Err(PeerError::broken("its history ends before it begins"));
        }
        self.writer.apply(Update::ListBegin { reason: "warm_start" }).map_err(broken)?;
        self.stage = Stage::Objects(Box::new(Objects { header, last: None }));
        Ok(())
    }

    fn chunk(&mut self, chunk: &Bytes) -> Result<(), PeerError> {
        if matches!(self.stage, Stage::Header) {
            return Err(PeerError::broken("no header"));
        }
        let content = chunk::decode_content(chunk, CHUNK_BYTES_MAX)?;
        self.bytes += content.len() as u64;
        if self.bytes > self.bytes_max {
            return Err(PeerError::TooLarge(self.bytes_max));
        }
        self.digest.update(&content);
        // One by one: a small frame may hold millions of empty entries, of which no more than the first is to be read.
        let mut content = Bytes::from(content);
        while content.has_remaining() {
            let entry = TransferEntry::decode_length_delimited(&mut content).map_err(PeerError::broken)?;
            self.received.count(&entry);
            match entry.entry {
                Some(Entry::Object(json)) => self.object(&json)?,
                Some(entry) => {
                    let (packer, now) = (self.writer.packer().clone(), self.now);
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
                None => return Err(PeerError::broken("an entry of no known kind")),
            }
        }
        Ok(())
    }

    fn object(&mut self, json: &[u8]) -> Result<(), PeerError> {
        let Stage::Objects(objects) = &mut self.stage else {
            return Err(PeerError::broken("an object after the history has begun"));
        };
        let object = self.parser.parse(json)?;
        if objects.last.as_ref().is_some_and(|last| last >= object.key()) || object.version() > objects.header.version {
            return Err(PeerError::broken(format_args!("{} is not in its place", object.key())));
        }
        objects.last = Some(object.key().clone());
        self.writer.apply(Update::ListItem(object)).map_err(broken)?;
        Ok(())
    }

    /// The history; where it begins, the objects are complete.
    fn events(&mut self) -> Result<&mut Events, PeerError> {
        if let Stage::Objects(objects) = &self.stage {
            let header = objects.header;
            let commit = self.writer.apply(Update::ListEnd(header.version)).map_err(broken)?;
            let Some(Commit { store, .. }) = commit else { return Err(PeerError::broken("no state")) };
            let floors = (header.residue_floor, header.ring_floor);
            self.stage = Stage::History(Box::new(Events {
                header,
                store,
                history: History::to_restore(self.limits, floors, self.parser.clone()),
                reached: header.residue_floor,
                in_ring: false,
                gap: None,
                brought: HashMap::new(),
            }));
        }
        match &mut self.stage {
            Stage::History(events) => Ok(events),
            Stage::Header | Stage::Objects(_) => Err(PeerError::broken("no header")),
        }
    }

    /// There are no more parts.
    ///
    /// # Errors
    /// Where the trailer is missing, or does not fit what has arrived.
    pub fn finish(mut self) -> Result<Restored, PeerError> {
        let trailer = self.trailer.ok_or_else(|| PeerError::CutOff("it has no end".to_owned()))?;
        self.events()?;
        let Self { stage: Stage::History(events), writer, received, bytes, digest, now, .. } = self else {
            return Err(PeerError::broken("no header"));
        };
        let TransferTrailer { objects, changes, events: count, crc32 } = trailer;
        if (Sent { objects, changes, events: count }) != received || crc32 != digest.finalize() {
            return Err(PeerError::broken("what arrived is not what was sent"));
        }
        let (version, store, history) = events.finish(now)?;
        let commit = Commit { store, version, change: Change::Restored(Box::new(history)) };
        Ok(Restored { commit, writer, received, bytes })
    }
}

impl Events {
    /// Versions go up, and stay below what they are to lead to.
    fn reach(&mut self, version: ResourceVersion, at_most: ResourceVersion, again: bool) -> Result<(), PeerError> {
        if version < self.reached || (version == self.reached && !again) || version > at_most {
            return Err(PeerError::broken(format_args!("version {version} after {}", self.reached)));
        }
        self.reached = version;
        Ok(())
    }

    fn inexact(&mut self, span: &TransferSpan) -> Result<(), PeerError> {
        let (from, to) = (version(&span.from)?, version(&span.to)?);
        if self.in_ring || !self.history.conflated().is_empty() || from >= to || to > self.header.ring_floor {
            return Err(PeerError::broken(format_args!("a relist from {from} to {to} is not in its place")));
        }
        self.history.conflated_mut().restore_gap(from, to);
        Ok(())
    }

    fn change(&mut self, change: &TransferChange, parser: &Arc<ObjectParser>) -> Result<(), PeerError> {
        let version = version(&change.resource_version)?;
        // A relist's changes share one version.
        let again = !self.history.conflated().is_empty();
        self.reach(version, self.header.ring_floor, again)?;
        if self.in_ring {
            return Err(PeerError::broken("a change after the first event"));
        }
        let key = ObjectKey::new(&change.namespace, &change.name);
        let before = match change.before.is_empty() {
            true => None,
            false => Some(Arc::new(parser.parse(&change.before)?).remnant(parser)),
        };
        if before.as_ref().is_some_and(|before| *before.key() != key) {
            return Err(PeerError::broken(format_args!("a change of {key} that is another's")));
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
        let (from, to) = (version(&gap.from)?, version(&gap.to)?);
        if self.gap.is_some() || from < self.reached || from >= to {
            return Err(PeerError::broken(format_args!("a relist from {from} to {to} is not in its place")));
        }
        self.reach(to, self.header.version, false)?;
        let reason = REASONS.iter().find(|reason| **reason == gap.reason).copied().unwrap_or("other");
        let (at, missing) = (before(now, gap.age_millis), gap.events);
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
        let object = match event.object.is_empty() {
            true => self.store.get(key.as_str()).cloned().ok_or_else(|| misfit("has no object"))?,
            false => parsed(&event.object)?,
        };
        let earlier = self.brought.get(&key).cloned();
        let previous = match event.previous_object() {
            PreviousObject::None => None,
            PreviousObject::Sent => Some(parsed(&event.previous)?),
            PreviousObject::Earlier => Some(earlier.clone().flatten().ok_or_else(|| misfit("follows none"))?),
            PreviousObject::Same => Some(object.clone()),
            PreviousObject::Unspecified => return Err(misfit("does not tell what was before")),
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
        if !sound || object.version() != version || !same_key(&object) || !previous.iter().all(same_key) {
            return Err(misfit("contradicts itself or the one before"));
        }
        let stays = (kind != EventType::Deleted).then(|| object.clone());
        self.brought.insert(key, stays);
        Ok(WatchEvent::new(kind, version, object, previous))
    }

    fn push(&mut self, event: Arc<WatchEvent>, at: Instant, now: Instant) -> Result<(), PeerError> {
        if let Some(gap) = &mut self.gap {
            if event.version() > gap.to {
                return Err(PeerError::broken("a relist with an event from after it"));
            }
            gap.missing -= 1;
            gap.events.push(event);
            self.close_gap(now);
            return Ok(());
        }
        self.reach(event.version(), self.header.version, false)?;
        self.record(Record::Event(event), at, now);
        Ok(())
    }

    fn close_gap(&mut self, now: Instant) {
        if let Some(OpenGap { from, to, reason, at, events, .. }) = self.gap.take_if(|gap| gap.missing == 0) {
            self.record(Record::Gap(Arc::new(Gap { from, to, reason, events })), at, now);
        }
    }

    fn record(&mut self, record: Record, at: Instant, now: Instant) {
        self.history.push(record, at);
        // What is over the limits here is let go of at once.
        self.history.evict(now, self.store.json_bytes(), 0);
    }

    /// The events must lead to the state: what the last one of each key has left is what is there.
    fn finish(mut self, now: Instant) -> Result<(ResourceVersion, Store, History), PeerError> {
        if self.gap.is_some() {
            return Err(PeerError::broken("a relist of which events are missing"));
        }
        for (key, brought) in &self.brought {
            let current = self.store.get(key.as_str());
            if current.map(|object| object.version()) != brought.as_ref().map(|object| object.version()) {
                return Err(PeerError::broken(format_args!("the events of {key} do not lead to what is there")));
            }
        }
        self.history.restored(now, self.store.json_bytes());
        Ok((self.header.version, self.store, self.history))
    }
}

fn version(text: &str) -> Result<ResourceVersion, PeerError> {
    text.parse().map_err(PeerError::broken)
}

fn broken(error: UpdateError) -> PeerError {
    PeerError::broken(error)
}

/// So long ago, or as long as the clock has run.
fn before(now: Instant, age_millis: u64) -> Instant {
    now.checked_sub(Duration::from_millis(age_millis)).unwrap_or(now)
}
