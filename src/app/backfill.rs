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
    fanout::{Ahead, Refusal, Served},
    model::{
        ResourceVersion,
        event::{EventType, WatchEvent},
    },
    planted::{self, Bug},
    telemetry::metrics::WatchPurpose,
    upstream::{
        Reflector, UpstreamError,
        reflector::{ReflectorError, Step, Target},
    },
    watch,
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
/// How often one who asks may be put together with others: each time after the first halves them, so it is enough for more than may ask.
const TRIES_MAX: usize = 20;

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
    /// In which history upstream holds nothing that came after which version.
    expired: Option<(u64, ResourceVersion)>,
    running: Option<Run>,
    next: Option<Next>,
}

/// A read to come.
#[derive(Default)]
struct Next {
    asked: BTreeSet<ResourceVersion>,
    needs_state: bool,
    /// Some of them were in vain before: the oldest of all is not what one can begin with.
    halves: bool,
    outcome: Arc<watch::Sender<Option<Outcome>>>,
}

impl Next {
    /// Where it begins: at the oldest version, or else in the middle of them, so that a few which are too old are told soon from others.
    fn begin(self) -> Option<Run> {
        let Self { asked, needs_state, halves, outcome } = self;
        let (from, to) = (*asked.iter().nth(if halves { asked.len() / 2 } else { 0 })?, *asked.last()?);
        Some(Run { from, to, needs_state, outcome })
    }
}

/// A read under way.
#[derive(Clone)]
struct Run {
    from: ResourceVersion,
    /// Not below this: who asked from here is not told again what came before.
    to: ResourceVersion,
    needs_state: bool,
    outcome: Arc<watch::Sender<Option<Outcome>>>,
}

impl Run {
    fn serves(&self, version: ResourceVersion, needs_state: bool) -> bool {
        self.from <= version && version <= self.to && (self.needs_state || !needs_state)
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
        for tried in 0..TRIES_MAX {
            let sender = match self.join(version, needs_state, tried > 0)? {
                Joined::Served(backfill) => return Ok(backfill),
                Joined::Waits(sender) => sender,
            };
            // It lives as long as it is held here.
            let mut outcome = sender.subscribe();
            let outcome = timeout(2 * BACKFILL_TIMEOUT, outcome.wait_for(Option::is_some)).await;
            match outcome.ok().and_then(Result::ok).and_then(|outcome| outcome.clone()) {
                // Together with an older version, which was too old; ours may not be.
                Some(Err(Refusal::Expired(expired))) if expired.requested < version => {}
                // It began after ours, which may do all the same.
                Some(Ok(backfill)) if version < backfill.ring.floor() => {}
                Some(outcome) => return outcome,
                None => return Err(Refusal::Unavailable("the backfill has failed".to_owned())),
            }
        }
        Err(self.expired(version).into())
    }

    fn expired(&self, requested: ResourceVersion) -> Expired {
        let oldest = self.served.hub.status().oldest.unwrap_or(requested);
        Expired { requested, oldest }
    }

    fn join(self: &Arc<Self>, version: ResourceVersion, needs_state: bool, again: bool) -> Result<Joined, Refusal> {
        let Some(Ahead { epoch, .. }) = self.served.hub.ahead() else {
            return Err(Refusal::Unavailable(format!("{} is not synced", self.served.gvr)));
        };
        let expired = self.expired(version);
        let mut inner = self.inner();
        if inner.expired.is_some_and(|(of, below)| of == epoch && version <= below) {
            return Err(expired.into());
        }
        let good = |backfill: &&Arc<Backfill>| {
            let leads_on = self.served.hub.leads_on(backfill.epoch, backfill.reached);
            backfill.serves(version, needs_state) && leads_on.is_some_and(|(leads_on, _)| leads_on)
        };
        if let Some(latest) = inner.latest.as_ref().filter(good) {
            return Ok(Joined::Served(latest.clone()));
        }
        if let Some(running) = inner.running.as_ref().filter(|running| running.serves(version, needs_state)) {
            return Ok(Joined::Waits(running.outcome.clone()));
        }
        let first = inner.running.is_none() && inner.next.is_none();
        let next = inner.next.get_or_insert_with(Next::default);
        next.asked.insert(version);
        next.needs_state |= needs_state;
        next.halves |= again;
        let outcome = next.outcome.clone();
        drop(inner);
        if first {
            tokio::spawn(self.clone().run());
        }
        Ok(Joined::Waits(outcome))
    }

    /// Does what was asked for, one read after the other, until nobody asks.
    async fn run(self: Arc<Self>) {
        loop {
            sleep(GATHER).await;
            let run = {
                let mut inner = self.inner();
                inner.running = inner.next.take().and_then(Next::begin);
                inner.running.clone()
            };
            let Some(run) = run else { return };
            let outcome = match timeout(BACKFILL_TIMEOUT, self.confirmed((run.from, run.to), run.needs_state)).await {
                Ok(outcome) => outcome.map(Arc::new),
                Err(_) => {
                    let message = format!("no backfill from version {} within {BACKFILL_TIMEOUT:?}", run.from);
                    Err(Refusal::Unavailable(message))
                }
            };
            let resource = &self.served.gvr;
            match &outcome {
                Ok(backfill) => info!(%resource, ?backfill, with_state = run.needs_state, "backfilled"),
                Err(error) => warn!(%resource, from = %run.from, %error, "no backfill"),
            }
            let more = {
                let mut inner = self.inner();
                inner.running = None;
                match &outcome {
                    Ok(backfill) => inner.latest = Some(backfill.clone()),
                    Err(Refusal::Expired(_)) => {
                        inner.expired = self.served.hub.ahead().map(|ahead| (ahead.epoch, run.from));
                    }
                    Err(_) => {}
                }
                inner.next.is_some()
            };
            run.outcome.send_replace(Some(outcome));
            if !more {
                break;
            }
        }
        self.forget_later();
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
    async fn confirmed(
        &self,
        span: (ResourceVersion, ResourceVersion),
        needs_state: bool,
    ) -> Result<Backfill, Refusal> {
        let upstream = &self.shared.upstream;
        let doubt = upstream.doubt();
        let backfill = self.read(span, needs_state).await?;
        upstream.confirm(doubt).await.map_err(|error| Refusal::Unavailable(error.to_string()))?;
        Ok(backfill)
    }

    async fn read(
        &self,
        (from, to): (ResourceVersion, ResourceVersion),
        needs_state: bool,
    ) -> Result<Backfill, Refusal> {
        let Served { gvr, scope, parser, hub, .. } = &self.served;
        let Some(Ahead { epoch, store, .. }) = hub.ahead() else {
            return Err(Refusal::Unavailable(format!("{gvr} is not synced")));
        };
        let target = Target {
            gvr: gvr.clone(),
            kind: hub.resource().kind.clone(),
            namespaced: self.served.namespaced,
            scope: scope.clone(),
            field_selector: self.shared.upstream_field_selector.clone(),
        };
        let counted = hub.clone();
        let open_watch = Arc::new(move || counted.metrics().upstream_watch(WatchPurpose::Backfill));
        let (upstream, options) = (self.shared.upstream.clone(), self.shared.reflector);
        let mut reflector =
            Reflector::new(upstream, target, parser.clone(), options, open_watch, self.shared.generator())
                .backfilling(from, needs_state);
        let mut writer = CacheWriter::sharing(store);
        let mut ring = EventRing::new(LIMITS, from);
        loop {
            let step = reflector.step().await.map_err(|error| self.refusal(from, error))?;
            let Step::Update { update, received } = step else { continue };
            let at = match &update {
                Update::Event(_, object) => Some(object.version()),
                Update::Bookmark(version) => Some(*version),
                Update::ListBegin { .. } | Update::ListItem(_) | Update::ListEnd(_) | Update::WentBack { .. } => None,
            };
            if let Some(at) = at {
                let another = || Refusal::Unavailable(format!("{gvr} is being listed again"));
                let (leads_on, head) = hub.leads_on(epoch, at).ok_or_else(another)?;
                // The cache's own watch will tell this: everything up to where it stands was read here.
                if at > head {
                    return Ok(Backfill { epoch, ring, reached: head, has_state: needs_state });
                }
                let last = ring.last();
                if let Update::Event(_, object) = &update
                    && at <= last
                {
                    let message = format!("upstream sent {} at version {at}, after version {last}", object.key());
                    return Err(Refusal::Unavailable(message));
                }
                if let Some(record) = record(&mut writer, update, needs_state)?
                    && !(leads_on && planted::is(Bug::SpliceDrops))
                {
                    ring.push(record, received);
                    ring.evict(received, 0, 0, 1.0);
                }
                if ring.floor() != from {
                    return Err(self.expired(from).into());
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
                return Err(Refusal::Unavailable(message));
            }
            writer.apply(update).map_err(|error| Refusal::Unavailable(error.to_string()))?;
        }
    }

    fn refusal(&self, from: ResourceVersion, error: ReflectorError) -> Refusal {
        match error.upstream() {
            Some(UpstreamError::Gone { .. }) => self.expired(from).into(),
            _ => Refusal::Unavailable(error.to_string()),
        }
    }
}

enum Joined {
    Served(Arc<Backfill>),
    Waits(Arc<watch::Sender<Option<Outcome>>>),
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
