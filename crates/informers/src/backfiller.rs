//! Backfills: events from before a cache's history, read again from upstream for subscribers that
//! resume from there.
//!
//! After a restart a cache has a state but no history, and all subscribers of the previous process
//! resume at once, each from its own version. Upstream still has the events in its watch cache. One
//! watch per subscriber would move the load of the fan-out to upstream, so a cache runs one read at
//! a time: it first waits a moment for more requests, then reads from the oldest requested version
//! up to a version that the cache's own history can resume from. The result serves every request in
//! its range. Upstream's answer that a version is too old is remembered, so the cost does not grow
//! with the number of subscribers. A subscriber that requests older and older versions would cause
//! one read after the other, so [`ReadLimit`] bounds the rate of reads; further requests are
//! refused with a retry delay.

mod read_range;
mod upstream_read;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kubefan_cache::{Backfill, Expired, Refusal};
use kubefan_common::sync::watch;
use kubefan_fanout::{CachePosition, Served};
use kubefan_model::ResourceVersion;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use self::{
    read_range::{ReadRange, Request},
    upstream_read::{BACKFILL_TIMEOUT, ReadError, UpstreamExpired, UpstreamRead, no_backfill, unsynced},
};
use super::{
    read_limit::{READS_MAX, ReadLimit},
    upstream_context::CacheContext,
};

/// Wait of a read for more requests. The read starts at the oldest requested version.
const GATHER_TIME: Duration = Duration::from_millis(300);
/// Time for which a backfill is stored for later requests. It ends earlier if the cache's history
/// no longer continues from the backfill's end.
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

impl Backfiller {
    pub(super) fn new(context: CacheContext, served: Served) -> Arc<Self> {
        Arc::new(Self { context, served, inner: Mutex::default() })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the events after `version`, up to a version that the cache's own history can resume
    /// from.
    pub(super) async fn backfill(self: &Arc<Self>, version: ResourceVersion, needs_state: bool) -> BackfillResult {
        let request = Request { version, needs_state };
        // The read that runs already, and the next one.
        timeout(2 * (BACKFILL_TIMEOUT + GATHER_TIME), self.wait_for(request))
            .await
            .unwrap_or_else(|_| Err(no_backfill(&self.served, version)))
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
                Ok(None) | Err(_) => return Err(no_backfill(&self.served, request.version)),
            }
        }
    }

    /// Returns the refusal of a version. It names the oldest version that history or a backfill can
    /// resume from.
    fn expired(&self, epoch: u64, requested: ResourceVersion) -> Expired {
        let oldest = self.served.hub.status().oldest.unwrap_or(requested);
        let upstreams = Some(&self.inner().expired).filter(|expired| expired.epoch == epoch).and_then(|it| it.oldest);
        // Upstream may have named it for an older request, or have the events but not the state.
        Expired { requested, oldest }.or_after(upstreams)
    }

    fn too_many(&self, wait: Duration) -> Refusal {
        let message = format!(
            "{} was read {READS_MAX} times in a row for subscribers that resume; the next read may start in {wait:.0?}",
            self.served.gvr
        );
        Refusal::RateLimited { message, retry_after: wait }
    }

    fn join(self: &Arc<Self>, request: Request) -> Result<Joined, Refusal> {
        let CachePosition { epoch, .. } = self.served.hub.position().ok_or_else(|| unsynced(&self.served))?;
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
            let (requests, sender, all) = {
                let mut inner = self.inner();
                let Some((requests, sender)) = inner.next.take() else { return };
                let Some(all) = ReadRange::of(&requests) else { return };
                // From here on, not only from the first request upstream: the search may wait.
                inner.running = Some((all, sender.clone()));
                (requests, sender, all)
            };
            let result = timeout(BACKFILL_TIMEOUT, self.search(requests, &sender)).await.unwrap_or_else(|_| {
                let message = format!("no backfill from version {} within {BACKFILL_TIMEOUT:?}", all.from.whole());
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
    /// requests that need state. The requests that are not served ask again, without the served
    /// ones.
    async fn search(&self, mut requests: BTreeSet<Request>, sender: &ResultSender) -> BackfillResult {
        let _pass = self.served.hub.gate().acquire(None).await?;
        let CachePosition { epoch, .. } = self.served.hub.position().ok_or_else(|| unsynced(&self.served))?;
        let oldest = requests.first().map(|request| request.version);
        let read = UpstreamRead { context: &self.context, served: &self.served };
        while let Some(range) = ReadRange::of(&requests) {
            self.inner().running = Some((range, sender.clone()));
            let (expired, named) = match read.confirmed(range).await {
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
        Err(oldest.map_or_else(|| unsynced(&self.served), |oldest| self.expired(epoch, oldest).into()))
    }

    /// Drops the latest backfill, to save memory. Later requests read it again.
    pub(super) fn forget(&self) {
        self.inner().latest = None;
    }

    /// Drops the latest backfill after its retention time.
    fn forget_later(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        let latest = self.inner().latest.as_ref().map(Arc::downgrade);
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
}

enum Joined {
    Served(Arc<Backfill>),
    Waits(ResultSender),
}
