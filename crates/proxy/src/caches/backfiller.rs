//! Backfills: events from before a cache's history, read again from upstream for subscribers that
//! resume from there.
//!
//! After a restart a cache has a state but no history, and all subscribers of the previous process
//! resume at once, each from its own version. Upstream still has the events in its watch cache. One
//! watch per subscriber would move the load of the fan-out to upstream, so a cache runs one read at
//! a time: it first waits a moment for more requests, then reads from the oldest requested version
//! up to a version that the cache's own history can resume from. The result serves every request in
//! its range. Upstream's answer that a version is too old is remembered, so the cost does not grow
//! with the number of subscribers. A subscriber that comes with ever older versions would cause one
//! read after the other, so a cache may start only so many of them in a time; the others are
//! refused with a retry delay.

mod read_range;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use self::read_range::{ReadRange, Request};
use super::{
    context::CacheContext,
    list_scheduler::ListPriority,
    read_limit::{READS_MAX, ReadLimit},
};
use crate::{
    cache::{Backfill, CacheWriter, EventRing, Expired, Record, RingLimits, Update, writer::Change},
    fanout::{CachePosition, Continuation, Refusal, Served},
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

/// How long a read waits for more requests. It starts at the oldest requested version.
const GATHER_TIME: Duration = Duration::from_millis(300);
/// How long a read waits for more events of the version at which the cache was listed. An open
/// watch brings the events of one version together, and nothing need follow them in a quiet
/// cluster. A cached resource has a bookmark in this time (`bookmarkFrequency` of the apiserver's
/// cacher: 2 seconds before a watch ends).
const SAME_VERSION_WAIT: Duration = Duration::from_millis(1_500);
/// The time limit of one read.
const BACKFILL_TIMEOUT: Duration = Duration::from_secs(30);
/// The size limits of one backfill. A larger one would cost more to send than a snapshot. All that
/// are held are within a budget of the process.
const LIMITS: RingLimits = RingLimits {
    ring_bytes_max: Some(64 << 20),
    ring_events_max: 100_000,
    ring_age_max: Duration::MAX,
    residue_bytes_max: Some(0),
};
/// How long a backfill is stored for later requests. It ends earlier if the cache's history no
/// longer continues from the backfill's end.
const RETENTION: Duration = Duration::from_secs(60);

type BackfillResult = Result<Arc<Backfill>, Refusal>;

/// The backfills of one cache.
pub(super) struct Backfiller {
    context: CacheContext,
    served: Served,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    reads: ReadLimit,
    /// The last backfill that succeeded.
    latest: Option<Arc<Backfill>>,
    expired: ExpiredVersions,
    running: Option<(ReadRange, ResultSender)>,
    /// The requests for the next read. Subscribers with equal requests share one.
    next: Option<(BTreeSet<Request>, ResultSender)>,
}

type ResultSender = Arc<watch::Sender<Option<BackfillResult>>>;

/// The versions that upstream no longer has, within one epoch of the cache.
#[derive(Default)]
struct ExpiredVersions {
    epoch: u64,
    /// Upstream cannot send the events after this version or any older one.
    events: Option<ResourceVersion>,
    /// Upstream cannot list the state at this version or any older one.
    state: Option<ResourceVersion>,
    /// The oldest version that upstream named: it has all events after it.
    oldest: Option<ResourceVersion>,
}

impl ExpiredVersions {
    fn contain(&self, request: Request) -> bool {
        let version = Some(request.version);
        version <= self.events || request.needs_state && version <= self.state
    }

    fn add(&mut self, epoch: u64, expired: &UpstreamExpired, oldest: Option<ResourceVersion>) {
        if self.epoch != epoch {
            *self = Self { epoch, ..Self::default() };
        }
        self.oldest = oldest.or(self.oldest);
        match expired {
            UpstreamExpired::Events(version) => self.events = self.events.max(Some(*version)),
            UpstreamExpired::State(version) => self.state = self.state.max(Some(*version)),
        }
    }
}

/// What upstream no longer has, at this version and any older one.
enum UpstreamExpired {
    Events(ResourceVersion),
    State(ResourceVersion),
}

/// Why a read failed.
enum ReadError {
    Expired {
        expired: UpstreamExpired,
        /// The oldest version that upstream still has, if it named that.
        oldest: Option<ResourceVersion>,
    },
    Refused(Refusal),
}

impl From<Refusal> for ReadError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Backfiller {
    pub(super) fn new(context: CacheContext, served: Served) -> Arc<Self> {
        Arc::new(Self { context, served, inner: Mutex::default() })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events after `version`, up to a version that the cache's own history can resume from.
    pub(super) async fn backfill(self: &Arc<Self>, version: ResourceVersion, needs_state: bool) -> BackfillResult {
        let request = Request { version, needs_state };
        timeout(2 * BACKFILL_TIMEOUT, self.wait_for(request)).await.unwrap_or_else(|_| Err(self.failed(version)))
    }

    async fn wait_for(self: &Arc<Self>, request: Request) -> BackfillResult {
        loop {
            let sender = match self.join(request)? {
                Joined::Served(backfill) => return Ok(backfill),
                Joined::Waits(sender) => sender,
            };
            // `sender` is alive until the end of this wait.
            match sender.subscribe().wait_for(Option::is_some).await {
                Ok(Some(Ok(backfill))) if backfill.serves(request.version, request.needs_state) => {
                    return Ok(backfill);
                }
                // The read served only other requests, or expired. The next `join` knows whether
                // this version has expired too.
                Ok(Some(Ok(_) | Err(Refusal::Expired(_)))) => {}
                Ok(Some(Err(refusal))) => return Err(refusal),
                Ok(None) | Err(_) => return Err(self.failed(request.version)),
            }
        }
    }

    /// The refusal of a version. It names the oldest version that history or a backfill can resume
    /// from.
    fn expired(&self, epoch: u64, requested: ResourceVersion) -> Expired {
        let oldest = self.served.hub.status().oldest.unwrap_or(requested);
        let upstreams = Some(&self.inner().expired).filter(|expired| expired.epoch == epoch).and_then(|it| it.oldest);
        // Upstream may have named it for an older request, or have the events but not the state.
        Expired { requested, oldest }.or_after(upstreams)
    }

    fn failed(&self, version: ResourceVersion) -> Refusal {
        Refusal::Unavailable(format!("no backfill of {} from version {version}", self.served.gvr))
    }

    fn too_many(&self, wait: Duration) -> Refusal {
        let message = format!(
            "{} was read {READS_MAX} times in a row for subscribers that resume; the next read may start in {wait:.0?}",
            self.served.gvr
        );
        Refusal::RateLimited { message, retry_after: wait }
    }

    fn unsynced(&self) -> Refusal {
        Refusal::Unavailable(format!("{} is not synced", self.served.gvr))
    }

    fn join(self: &Arc<Self>, request: Request) -> Result<Joined, Refusal> {
        let CachePosition { epoch, .. } = self.served.hub.position().ok_or_else(|| self.unsynced())?;
        let expired = self.expired(epoch, request.version);
        let mut inner = self.inner();
        if inner.expired.epoch == epoch && inner.expired.contain(request) {
            return Err(expired.into());
        }
        let good = |backfill: &&Arc<Backfill>| {
            let continues = self.served.hub.continues_from(backfill.epoch, backfill.reached);
            backfill.serves(request.version, request.needs_state)
                && continues.is_some_and(|continuation| continuation.can_resume)
        };
        if let Some(latest) = inner.latest.as_ref().filter(good) {
            return Ok(Joined::Served(latest.clone()));
        }
        if let Some((_, sender)) = inner.running.as_ref().filter(|(range, _)| range.serves(request)) {
            return Ok(Joined::Waits(sender.clone()));
        }
        let first = inner.running.is_none() && inner.next.is_none();
        if inner.next.is_none() {
            inner.reads.take(Instant::now()).map_err(|wait| self.too_many(wait))?;
        }
        let (requests, sender) = inner.next.get_or_insert_default();
        requests.insert(request);
        let sender = sender.clone();
        drop(inner);
        if first {
            tokio::spawn(self.clone().run());
        }
        Ok(Joined::Waits(sender))
    }

    /// Runs one read after the other until there are no more requests.
    async fn run(self: Arc<Self>) {
        loop {
            sleep(GATHER_TIME).await;
            let Some((requests, sender)) = self.inner().next.take() else { return };
            let Some(all) = ReadRange::of(&requests) else { return };
            let result = timeout(BACKFILL_TIMEOUT, self.search(requests, &sender)).await.unwrap_or_else(|_| {
                let message = format!("no backfill from version {} within {BACKFILL_TIMEOUT:?}", all.from);
                Err(Refusal::Unavailable(message))
            });
            let resource = &self.served.gvr;
            match &result {
                Ok(backfill) => info!(%resource, ?backfill, with_state = backfill.has_state, "backfilled"),
                Err(error) => warn!(%resource, from = %all.from, %error, "no backfill"),
            }
            let more = {
                let mut inner = self.inner();
                inner.running = None;
                if let Ok(backfill) = &result {
                    inner.latest = Some(backfill.clone());
                }
                inner.next.is_some()
            };
            sender.send_replace(Some(result));
            if !more {
                break;
            }
        }
        self.forget_later();
    }

    /// Reads a backfill that serves as many requests as possible.
    ///
    /// The first attempt covers all requests. If upstream no longer has the events, the next
    /// attempt drops the requests below the oldest version that upstream named, or the older half
    /// if it named none. If upstream has the events but not the state, the next attempt drops the
    /// requests that need state. Requests that are not served ask again, without those that were.
    async fn search(&self, mut requests: BTreeSet<Request>, sender: &ResultSender) -> BackfillResult {
        let _pass = self.served.hub.gate().acquire(None).await?;
        let CachePosition { epoch, .. } = self.served.hub.position().ok_or_else(|| self.unsynced())?;
        let oldest = requests.first().map(|request| request.version);
        while let Some(range) = ReadRange::of(&requests) {
            self.inner().running = Some((range, sender.clone()));
            let (expired, named) = match self.read_confirmed(range).await {
                Ok(backfill) => return Ok(Arc::new(backfill)),
                Err(ReadError::Expired { expired, oldest }) => (expired, oldest),
                Err(ReadError::Refused(refusal)) => return Err(refusal),
            };
            {
                let mut inner = self.inner();
                inner.expired.add(epoch, &expired, named);
                requests.retain(|request| !inner.expired.contain(*request));
            }
            if matches!(expired, UpstreamExpired::State(_)) && requests.iter().any(|request| !request.needs_state) {
                requests.retain(|request| !request.needs_state);
            } else if named.is_none()
                && let Some(median) = requests.iter().nth(requests.len() / 2).copied()
            {
                requests = requests.split_off(&median);
            }
        }
        Err(oldest.map_or_else(|| self.unsynced(), |oldest| self.expired(epoch, oldest).into()))
    }

    /// Drops the latest backfill, to save memory. Later requests read it again.
    pub(super) fn forget(&self) {
        self.inner().latest = None;
    }

    /// Drops the latest backfill after its retention time.
    fn forget_later(self: &Arc<Self>) {
        let (weak, latest) = (Arc::downgrade(self), self.inner().latest.as_ref().map(Arc::downgrade));
        tokio::spawn(async move {
            sleep(RETENTION).await;
            let Some(backfiller) = weak.upgrade() else { return };
            let mut inner = backfiller.inner();
            let same = |stored: &Arc<Backfill>| latest.as_ref().is_some_and(|of| of.as_ptr() == Arc::as_ptr(stored));
            if inner.latest.as_ref().is_some_and(same) {
                inner.latest = None;
            }
        });
    }

    /// Reads a backfill, and confirms that upstream is still the cluster of this cache.
    async fn read_confirmed(&self, range: ReadRange) -> Result<Backfill, ReadError> {
        let source = &self.context.source;
        let backfill = self.read(range).await?;
        source.confirm().await.map_err(|error| Refusal::Unavailable(error.to_string()))?;
        Ok(backfill)
    }

    async fn read(&self, ReadRange { from, to, with_state }: ReadRange) -> Result<Backfill, ReadError> {
        let Served { gvr, hub, .. } = &self.served;
        let CachePosition { epoch, store, .. } = hub.position().ok_or_else(|| self.unsynced())?;
        let mut place = match with_state {
            true => Some(self.context.lists.acquire(ListPriority::Backfill).await),
            false => None,
        };
        let reflector = self.context.reflector_for(&self.served, WatchPurpose::Backfill);
        // Upstream sends whole versions. What comes up to `from` is read for the state alone.
        let start = from.read_from();
        let mut reflector = reflector.for_backfill(start, with_state);
        let mut writer = CacheWriter::sharing(store);
        let mut ring = EventRing::alone(LIMITS, from);
        let mut reached = start;
        // The events of the last version that a new watch sends once more.
        let (mut last_is_event, mut again) = (false, 0);
        // Whether the last version is reached, of which the cache has a list, and whether the watch
        // that is open has brought it.
        let (mut is_last, mut is_brought) = (false, false);
        let mut share = hub.budgets().backfills.share();
        loop {
            let wait = if is_last && is_brought { SAME_VERSION_WAIT } else { BACKFILL_TIMEOUT };
            let step = match timeout(wait, reflector.step()).await {
                // A watch that breaks or ends here may have brought a part of the version.
                Err(_) if is_last && is_brought => {
                    return Ok(Backfill { epoch, ring, reached, has_state: with_state, share });
                }
                Err(_) => return Err(self.failed(from).into()),
                Ok(Err(error)) if reflector.is_within_list() => {
                    sleep(error.page_retry_delay()).await;
                    continue;
                }
                Ok(step) => step.map_err(|error| read_error(from, &error))?,
            };
            let (update, received) = match step {
                Step::Update { update, received } => (update, received),
                Step::Watching { .. } => {
                    again = if last_is_event { reached.sub() + 1 } else { 0 };
                    continue;
                }
                Step::Ended { .. } => {
                    is_brought = false;
                    continue;
                }
                Step::Proved { .. } => continue,
            };
            last_is_event = matches!(update, Update::Event(..));
            is_brought = last_is_event;
            if let Update::Event(_, object) = &update
                && again > 0
                && object.version().is_at(reached)
            {
                again -= 1;
                is_brought = again == 0;
                continue;
            }
            let at = match &update {
                Update::Event(_, object) => {
                    let message = || {
                        format!(
                            "upstream sent {} at version {}, after version {reached}",
                            object.key(),
                            object.version()
                        )
                    };
                    let next = reached.followed_by(object.version());
                    reached = next.ok_or_else(|| Refusal::Unavailable(message()))?;
                    Some(reached)
                }
                Update::Bookmark(version) => Some(*version),
                Update::ListBegin { .. }
                | Update::ListItem(_)
                | Update::ListEnd(_)
                | Update::Conflated { .. }
                | Update::WentBack { .. } => None,
            };
            if let Some(at) = at {
                let another = || Refusal::Unavailable(format!("{gvr} is being listed again"));
                let Continuation { can_resume, is_listed, head } = hub.continues_from(epoch, at).ok_or_else(another)?;
                // A list has all events of its version, of which upstream may send more.
                let is_within_list = is_listed && matches!(update, Update::Event(..));
                // The cache has not received this event yet. Everything up to the cache's version
                // was read, so the backfill is complete.
                if at > head && !is_within_list {
                    return Ok(Backfill { epoch, ring, reached: head, has_state: with_state, share });
                }
                if let Some(record) = record(&mut writer, update, (at, with_state))?
                    && at > from
                    && !(can_resume && planted::is(Bug::SpliceDrops))
                {
                    ring.push(record, received);
                    ring.evict(received, 0, 1.0, 1.0);
                    share.set(ring.bytes());
                    if share.budget().is_over() {
                        return Err(Refusal::Unavailable(format!("no room for a backfill of {gvr}")).into());
                    }
                }
                // An eviction means that the backfill exceeds its limits.
                if ring.floor() != from {
                    return Err(ReadError::Expired { expired: UpstreamExpired::Events(from), oldest: None });
                }
                let is_reached = can_resume && (at >= to || to.is_end() && to.is_at(at));
                is_last = is_reached && is_within_list;
                if is_reached && !is_within_list {
                    return Ok(Backfill { epoch, ring, reached: at, has_state: with_state, share });
                }
                continue;
            }
            if let Update::ListEnd(version) = update {
                drop(place.take());
                if version != start {
                    let message =
                        format!("upstream answered a list at version {start} with the state at version {version}");
                    return Err(Refusal::Unavailable(message).into());
                }
            }
            writer.apply(update).map_err(|error| Refusal::Unavailable(error.to_string()))?;
        }
    }
}

/// Classifies the failure of a read from version `from`.
fn read_error(from: ResourceVersion, error: &ReflectorError) -> ReadError {
    let Some(gone @ UpstreamError::Gone { .. }) = error.upstream() else {
        return Refusal::Unavailable(error.to_string()).into();
    };
    // Upstream may name the oldest version that it still has. A client that knows places needs the
    // one before.
    let oldest = gone.oldest().map(|oldest| if from.is_end() { oldest } else { oldest.above() });
    let oldest = oldest.filter(|oldest| *oldest > from);
    // Upstream was asked for the whole version of a place.
    let version = oldest.and_then(ResourceVersion::below).unwrap_or(from).max(from);
    let expired = match error {
        ReflectorError::List(_) => UpstreamExpired::State(version),
        _ => UpstreamExpired::Events(version),
    };
    ReadError::Expired { expired, oldest }
}

enum Joined {
    Served(Arc<Backfill>),
    Waits(ResultSender),
}

/// The history record of an update. `None` for an update without an event.
///
/// Without state, the event's type says whether there was a previous object, but not its content.
/// The new object stands in for it, because requests without state do not look at the previous
/// object.
fn record(
    writer: &mut CacheWriter,
    update: Update,
    (at, has_state): (ResourceVersion, bool),
) -> Result<Option<Record>, Refusal> {
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
    Ok(Some(Record::Event(Arc::new(WatchEvent::new(kind, at, object, previous)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_version_is_not_asked_for_again_by_one_of_its_places() {
        for (from, named, expired) in
            [("218.1", 218, "218.1"), ("218", 218, "218"), ("218.1", 300, "300"), ("5", 0, "5")]
        {
            let from = ResourceVersion::parse_place(from).unwrap();
            let gone = UpstreamError::Gone { message: format!("too old resource version: 217 ({named})") };
            let ReadError::Expired { expired: UpstreamExpired::Events(version), .. } =
                read_error(from, &ReflectorError::Watch(gone))
            else {
                panic!("{from} is expired");
            };
            assert_eq!(version.to_string(), expired, "{from}");
        }
    }
}
