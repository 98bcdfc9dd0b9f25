//! Backfills: what came before a cache began, read again from upstream for subscribers who come back from there.
//!
//! After a restart everybody comes back at once. So one read serves all who ask at about the same time, another one waits for it to end,
//! and what upstream has refused is not asked for again: its cost does not grow with subscribers.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::informer::Shared;
use crate::{
    cache::{Backfill, CacheWriter, EventRing, Expired, Record, RingLimits, Update, writer::Change},
    fanout::{CachePosition, Refusal, Served},
    telemetry::metrics::WatchPurpose,
    upstream::{
        UpstreamError,
        reflector::{ReflectorError, Step},
    },
};
use kubefan_common::planted::{self, Bug};
use kubefan_common::sync::watch;
use kubefan_model::{
    ResourceVersion,
    event::{EventType, WatchEvent},
};

/// How long it is waited for others who come back: the oldest version that they ask for is where it begins.
const GATHER: Duration = Duration::from_millis(300);
/// How long one read may take.
const BACKFILL_TIMEOUT: Duration = Duration::from_secs(30);
/// How much one may hold. Beyond it there is less to send in a snapshot.
const LIMITS: RingLimits = RingLimits {
    ring_bytes_max: Some(64 << 20),
    ring_events_max: 100_000,
    ring_age_max: Duration::MAX,
    residue_bytes_max: Some(0),
};
/// How long one is kept for those who come later, unless the cache no longer leads on from its end.
const KEPT: Duration = Duration::from_secs(60);

type Outcome = Result<Arc<Backfill>, Refusal>;

/// The backfills of one cache.
pub(super) struct Backfiller {
    shared: Shared,
    served: Served,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The last one that succeeded.
    latest: Option<Arc<Backfill>>,
    too_old: TooOld,
    running: Option<(Span, Told)>,
    /// Who waits for the next one: as many as subscribers, each version once.
    next: Option<(BTreeSet<Ask>, Told)>,
}

type Told = Arc<watch::Sender<Option<Outcome>>>;

/// What is asked for: what came after a version.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Ask {
    version: ResourceVersion,
    /// And what was there before each event.
    needs_state: bool,
}

/// What one read is to tell.
#[derive(Clone, Copy)]
struct Span {
    from: ResourceVersion,
    /// Not below this: who asked from here is not told again what came before.
    to: ResourceVersion,
    with_state: bool,
}

impl Span {
    /// What these need, who are in order.
    fn of(asked: &BTreeSet<Ask>) -> Option<Self> {
        let (first, last) = (asked.first()?, asked.last()?);
        let with_state = asked.iter().any(|ask| ask.needs_state);
        Some(Self { from: first.version, to: last.version, with_state })
    }

    fn serves(&self, ask: Ask) -> bool {
        self.from <= ask.version && ask.version <= self.to && (self.with_state || !ask.needs_state)
    }
}

/// What upstream no longer tells, in one history of the cache.
#[derive(Default)]
struct TooOld {
    epoch: u64,
    /// What came after this version or any older one.
    events: Option<ResourceVersion>,
    /// The state at this version or any older one.
    state: Option<ResourceVersion>,
}

impl TooOld {
    fn has(&self, ask: Ask) -> bool {
        let version = Some(ask.version);
        version <= self.events || ask.needs_state && version <= self.state
    }

    fn note(&mut self, epoch: u64, gone: &Gone) {
        if self.epoch != epoch {
            *self = Self { epoch, ..Self::default() };
        }
        match gone {
            Gone::Events(version) => self.events = self.events.max(Some(*version)),
            Gone::State(version) => self.state = self.state.max(Some(*version)),
        }
    }
}

/// What upstream no longer has, at this version and any older one.
enum Gone {
    Events(ResourceVersion),
    State(ResourceVersion),
}

/// Why a read gave nothing.
enum Unread {
    Gone {
        gone: Gone,
        /// Whether upstream said itself how far back it goes.
        exactly: bool,
    },
    Refused(Refusal),
}

impl From<Refusal> for Unread {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Backfiller {
    pub(super) fn new(shared: Shared, served: Served) -> Arc<Self> {
        Arc::new(Self { shared, served, inner: Mutex::default() })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What came after `version`, up to where the cache leads on.
    pub(super) async fn backfill(self: &Arc<Self>, version: ResourceVersion, needs_state: bool) -> Outcome {
        let ask = Ask { version, needs_state };
        timeout(2 * BACKFILL_TIMEOUT, self.ask(ask)).await.unwrap_or_else(|_| Err(self.failed(version)))
    }

    async fn ask(self: &Arc<Self>, ask: Ask) -> Outcome {
        loop {
            let told = match self.join(ask)? {
                Joined::Served(backfill) => return Ok(backfill),
                Joined::Waits(told) => told,
            };
            // Its sender lives as long as it is held here.
            match told.subscribe().wait_for(Option::is_some).await {
                Ok(Some(Ok(backfill))) if backfill.serves(ask.version, ask.needs_state) => return Ok(backfill),
                // Others could be served, or nobody. What is known of this version by now is known to who asks again.
                Ok(Some(Ok(_) | Err(Refusal::Expired(_)))) => {}
                Ok(Some(Err(refusal))) => return Err(refusal),
                Ok(None) | Err(_) => return Err(self.failed(ask.version)),
            }
        }
    }

    fn expired(&self, requested: ResourceVersion) -> Expired {
        let oldest = self.served.hub.status().oldest.unwrap_or(requested);
        Expired { requested, oldest }
    }

    fn failed(&self, version: ResourceVersion) -> Refusal {
        Refusal::Unavailable(format!("no backfill of {} from version {version}", self.served.gvr))
    }

    fn unsynced(&self) -> Refusal {
        Refusal::Unavailable(format!("{} is not synced", self.served.gvr))
    }

    fn join(self: &Arc<Self>, ask: Ask) -> Result<Joined, Refusal> {
        let CachePosition { epoch, .. } = self.served.hub.position().ok_or_else(|| self.unsynced())?;
        let expired = self.expired(ask.version);
        let mut inner = self.inner();
        if inner.too_old.epoch == epoch && inner.too_old.has(ask) {
            return Err(expired.into());
        }
        let good = |backfill: &&Arc<Backfill>| {
            let leads_on = self.served.hub.can_resume_from(backfill.epoch, backfill.reached);
            backfill.serves(ask.version, ask.needs_state) && leads_on.is_some_and(|(leads_on, _)| leads_on)
        };
        if let Some(latest) = inner.latest.as_ref().filter(good) {
            return Ok(Joined::Served(latest.clone()));
        }
        if let Some((_, told)) = inner.running.as_ref().filter(|(span, _)| span.serves(ask)) {
            return Ok(Joined::Waits(told.clone()));
        }
        let first = inner.running.is_none() && inner.next.is_none();
        let (asked, told) = inner.next.get_or_insert_default();
        asked.insert(ask);
        let told = told.clone();
        drop(inner);
        if first {
            tokio::spawn(self.clone().run());
        }
        Ok(Joined::Waits(told))
    }

    /// Does what was asked for, one read after the other, until nobody asks.
    async fn run(self: Arc<Self>) {
        loop {
            sleep(GATHER).await;
            let Some((asked, told)) = self.inner().next.take() else { return };
            let Some(all) = Span::of(&asked) else { return };
            let outcome = timeout(BACKFILL_TIMEOUT, self.search(asked, &told)).await.unwrap_or_else(|_| {
                let message = format!("no backfill from version {} within {BACKFILL_TIMEOUT:?}", all.from);
                Err(Refusal::Unavailable(message))
            });
            let resource = &self.served.gvr;
            match &outcome {
                Ok(backfill) => info!(%resource, ?backfill, with_state = backfill.has_state, "backfilled"),
                Err(error) => warn!(%resource, from = %all.from, %error, "no backfill"),
            }
            let more = {
                let mut inner = self.inner();
                inner.running = None;
                if let Ok(backfill) = &outcome {
                    inner.latest = Some(backfill.clone());
                }
                inner.next.is_some()
            };
            told.send_replace(Some(outcome));
            if !more {
                break;
            }
        }
        self.forget_later();
    }

    /// Reads what serves as many as can be: all of them first. Where upstream does not go back so far, it is read from what it names, or else
    /// from the middle of what is still asked for; where it has the events but not the state, without that. Who is not served then asks
    /// again, without those who were.
    async fn search(&self, mut asked: BTreeSet<Ask>, told: &Told) -> Outcome {
        let _pass = self.served.hub.gate().acquire().await?;
        let CachePosition { epoch, .. } = self.served.hub.position().ok_or_else(|| self.unsynced())?;
        let oldest = asked.first().map(|ask| ask.version);
        while let Some(span) = Span::of(&asked) {
            self.inner().running = Some((span, told.clone()));
            let (gone, exactly) = match self.confirmed(span).await {
                Ok(backfill) => return Ok(Arc::new(backfill)),
                Err(Unread::Gone { gone, exactly }) => (gone, exactly),
                Err(Unread::Refused(refusal)) => return Err(refusal),
            };
            {
                let mut inner = self.inner();
                inner.too_old.note(epoch, &gone);
                asked.retain(|ask| !inner.too_old.has(*ask));
            }
            if matches!(gone, Gone::State(_)) && asked.iter().any(|ask| !ask.needs_state) {
                asked.retain(|ask| !ask.needs_state);
            } else if !exactly && let Some(middle) = asked.iter().nth(asked.len() / 2).copied() {
                asked = asked.split_off(&middle);
            }
        }
        Err(oldest.map_or_else(|| self.unsynced(), |oldest| self.expired(oldest).into()))
    }

    /// Lets go of the last one: who comes later has it read again.
    pub(super) fn forget(&self) {
        self.inner().latest = None;
    }

    /// Lets go of the last one after a while.
    fn forget_later(self: &Arc<Self>) {
        let (weak, latest) = (Arc::downgrade(self), self.inner().latest.as_ref().map(Arc::downgrade));
        tokio::spawn(async move {
            sleep(KEPT).await;
            let Some(backfiller) = weak.upgrade() else { return };
            let mut inner = backfiller.inner();
            let same = |kept: &Arc<Backfill>| latest.as_ref().is_some_and(|of| of.as_ptr() == Arc::as_ptr(kept));
            if inner.latest.as_ref().is_some_and(same) {
                inner.latest = None;
            }
        });
    }

    /// What upstream tells, if it is still the cluster that the cache is of.
    async fn confirmed(&self, span: Span) -> Result<Backfill, Unread> {
        let upstream = &self.shared.upstream;
        let doubt = upstream.doubt();
        let backfill = self.read(span).await?;
        upstream.confirm(doubt).await.map_err(|error| Refusal::Unavailable(error.to_string()))?;
        Ok(backfill)
    }

    async fn read(&self, Span { from, to, with_state: needs_state }: Span) -> Result<Backfill, Unread> {
        let Served { gvr, hub, .. } = &self.served;
        let CachePosition { epoch, store, .. } = hub.position().ok_or_else(|| self.unsynced())?;
        let reflector = self.shared.reflector_for(&self.served, WatchPurpose::Backfill);
        let mut reflector = reflector.backfilling(from, needs_state);
        let mut writer = CacheWriter::sharing(store);
        let mut ring = EventRing::alone(LIMITS, from);
        loop {
            let step = reflector.step().await.map_err(|error| unread(from, &error))?;
            let Step::Update { update, received } = step else { continue };
            let at = match &update {
                Update::Event(_, object) => Some(object.version()),
                Update::Bookmark(version) => Some(*version),
                Update::ListBegin { .. } | Update::ListItem(_) | Update::ListEnd(_) | Update::WentBack { .. } => None,
            };
            if let Some(at) = at {
                let another = || Refusal::Unavailable(format!("{gvr} is being listed again"));
                let (leads_on, head) = hub.can_resume_from(epoch, at).ok_or_else(another)?;
                // The cache's own watch will tell this: everything up to where it stands was read here.
                if at > head {
                    return Ok(Backfill { epoch, ring, reached: head, has_state: needs_state });
                }
                let last = ring.last();
                if let Update::Event(_, object) = &update
                    && at <= last
                {
                    let message = format!("upstream sent {} at version {at}, after version {last}", object.key());
                    return Err(Refusal::Unavailable(message).into());
                }
                if let Some(record) = record(&mut writer, update, needs_state)?
                    && !(leads_on && planted::is(Bug::SpliceDrops))
                {
                    ring.push(record, received);
                    ring.evict(received, 0, 0, 1.0);
                }
                // More than one may hold.
                if ring.floor() != from {
                    return Err(Unread::Gone { gone: Gone::Events(from), exactly: false });
                }
                if leads_on && at >= to {
                    return Ok(Backfill { epoch, ring, reached: at, has_state: needs_state });
                }
                continue;
            }
            if let Update::ListEnd(version) = update
                && version != from
            {
                let message = format!("upstream was asked for the state at version {from} and gave that at {version}");
                return Err(Refusal::Unavailable(message).into());
            }
            writer.apply(update).map_err(|error| Refusal::Unavailable(error.to_string()))?;
        }
    }
}

/// What a failure of a read from `from` means.
fn unread(from: ResourceVersion, error: &ReflectorError) -> Unread {
    let Some(gone @ UpstreamError::Gone { .. }) = error.upstream() else {
        return Refusal::Unavailable(error.to_string()).into();
    };
    // What it names is the oldest that it still has.
    let named = gone.oldest().and_then(ResourceVersion::below).filter(|below| *below >= from);
    let version = named.unwrap_or(from);
    let gone = if matches!(error, ReflectorError::List(_)) { Gone::State(version) } else { Gone::Events(version) };
    Unread::Gone { gone, exactly: named.is_some() }
}

enum Joined {
    Served(Arc<Backfill>),
    Waits(Told),
}

/// The record of a change. Without the state before it, an event says itself whether there was something; what that was is not known, and
/// no selection of the kind that this is for asks.
fn record(writer: &mut CacheWriter, update: Update, has_state: bool) -> Result<Option<Record>, Refusal> {
    if has_state {
        let commit = writer.apply(update).map_err(|error| Refusal::Unavailable(error.to_string()))?;
        return Ok(match commit.map(|commit| commit.change) {
            Some(Change::Record(record)) => Some(record),
            Some(Change::Start { .. } | Change::Restored(_) | Change::Version) | None => None,
        });
    }
    let Update::Event(kind, object) = update else { return Ok(None) };
    let object = Arc::new(object);
    let previous = (kind != EventType::Added).then(|| object.clone());
    Ok(Some(Record::Event(Arc::new(WatchEvent::new(kind, object.version(), object, previous)))))
}
