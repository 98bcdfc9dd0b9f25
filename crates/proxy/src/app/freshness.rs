//! Proofs of freshness: upstream's word that a cache is not older than a read that asks for consistency.
//!
//! A quiet resource's cache stands at the version of its last change, while every write to anything else moves the cluster's. So what is
//! asked is how far the cluster is (one look-up), and then whether this resource has changed up to there: the cache's own watch tells it
//! where the resource is busy, else a short watch that upstream closes with a bookmark. However many wait, upstream is asked by one at a
//! time and not more than once a second, or 40 times where a look-up is enough; who comes while it is asked waits for the next time,
//! because an answer proves nothing about what was written after the question. A wait for a bookmark that was in vain is remembered for a while:
//! an apiserver that sends none must not cost every reader that wait. An outage is no such thing, and what comes after it is proved again.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};
use tracing::debug;

use super::informer::Shared;
use crate::{
    cache::Update,
    fanout::{CachePosition, Hub, Patience, Phase, Refusal, Served},
    telemetry::metrics::{Proof, WatchPurpose},
    upstream::reflector::Step,
};
use kubefan_common::sync::watch;
use kubefan_model::{GroupVersionResource, ResourceVersion};

/// Upstream is not asked more often, where the last proof took a watch, or was none.
const PROOF_INTERVAL: Duration = Duration::from_secs(1);
/// The same where a look-up was enough: that is an empty list for at least one full one that upstream need not make, and those who have no
/// time are to reach the next question.
const LOOK_UP_INTERVAL: Duration = Duration::from_millis(25);
/// How long the cache's own watch is waited for before upstream is asked for a bookmark: on a busy resource it is a moment behind.
const OWN_WATCH: Duration = Duration::from_millis(50);
/// A resource that has told nothing for so long is a quiet one, which no look-up alone proves: its next change is far off, and upstream answers
/// the look-up itself only when its own watch cache has been asked for progress, which takes up to a tenth of a second.
const BUSY: Duration = Duration::from_millis(100);
/// How long one proof may take. The bookmark comes after one to two seconds and a quarter.
const PROOF_TIMEOUT: Duration = Duration::from_secs(4);
/// How long a watch that is open is waited for: it is asked to last no longer.
const BOOKMARK_TIMEOUT: Duration = Duration::from_secs(3);
/// A watch that has ended only after so long has cost everybody who waited for its bookmark that time, and is remembered; a shorter one costs nobody.
const LONG_WAIT: Duration = Duration::from_secs(1);
/// How long nobody waits for a bookmark after a wait in vain; twice as long each time that the try after it is in vain too. Longer than a try.
const PAUSE: Duration = Duration::from_secs(5);
/// The longest such pause: then one try a minute finds out whether bookmarks come again. A pause that ended so long ago says nothing of now.
const PAUSE_MAX: Duration = Duration::from_secs(60);

impl Patience {
    /// How long a proof is waited for, the one under way included.
    fn timeout(self) -> Duration {
        match self {
            Self::AtOnce => Duration::from_millis(40),
            Self::Bookmark | Self::Insistent => 2 * PROOF_TIMEOUT,
        }
    }
}

/// How it was proved, or why it was not.
type Outcome = Result<Proof, Unproved>;

/// Why a cache was not proved to be fresh; with what is said of that.
#[derive(Debug, Clone)]
enum Unproved {
    /// Upstream could not be asked, or the cache is not watched just now.
    Failed(String),
    /// The cache is behind, and nobody had the time, or the apiserver that was asked is behind too.
    Behind(String),
    /// The same after everybody has waited for a bookmark, which did not come although upstream had answered the look-up and the watch.
    NoBookmark(String),
}

impl Unproved {
    /// As a metric's label.
    fn result(&self) -> Proof {
        match self {
            Self::Failed(_) => Proof::Failed,
            Self::Behind(_) | Self::NoBookmark(_) => Proof::Behind,
        }
    }

    fn why(&self) -> &str {
        let (Self::Failed(why) | Self::Behind(why) | Self::NoBookmark(why)) = self;
        why
    }
}

/// The proofs of one cache.
pub(super) struct Prover {
    shared: Shared,
    served: Served,
    /// Whether anything is proved here.
    proves: bool,
    inner: Mutex<Inner>,
    /// For the informer, which alone moves the cache.
    quiet: Mutex<Option<Quiet>>,
    told: Notify,
}

#[derive(Default)]
struct Inner {
    /// Somebody sees to it that those who wait are served.
    running: bool,
    /// When upstream may be asked again; `None`: at once.
    not_before: Option<Instant>,
    next: Option<Next>,
    bookmarks: Bookmarks,
}

/// Whether it is worth waiting for a bookmark: an apiserver that sends none would cost every reader the whole wait.
#[derive(Default)]
struct Bookmarks {
    /// The last wait in vain; `None` as long as there was none, or that is long ago.
    missed: Option<Missed>,
    /// Until then nobody waits for one; `None`: not known to be in vain.
    paused_until: Option<Instant>,
}

/// A wait in vain.
struct Missed {
    /// The pause that it led to.
    pause: Duration,
    /// When that was over.
    until: Instant,
}

impl Bookmarks {
    /// What is left of the pause; of the try after it, the most that it takes.
    fn pause_left(&self, now: Instant) -> Option<Duration> {
        self.paused_until.map(|until| until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Whether to wait for one now. After a wait in vain only those who are there when a try begins wait with it.
    fn begin(&mut self, now: Instant) -> bool {
        if self.pause_left(now).is_some() {
            return false;
        }
        self.missed.take_if(|missed| now - missed.until > PAUSE_MAX);
        self.paused_until = self.missed.as_ref().map(|missed| now + missed.pause);
        true
    }

    /// What has become of that wait.
    fn end(&mut self, outcome: &Outcome, now: Instant) {
        self.paused_until = None;
        match outcome {
            Ok(Proof::Bookmark) => self.missed = None,
            Err(Unproved::NoBookmark(_)) => {
                let pause = self.missed.take().map_or(PAUSE, |missed| (2 * missed.pause).min(PAUSE_MAX));
                self.missed = Some(Missed { pause, until: now + pause });
                self.paused_until = Some(now + pause);
            }
            // That says nothing of bookmarks.
            _ => {}
        }
    }
}

/// A proof to come.
#[derive(Default)]
struct Next {
    /// Of the most patient who waits.
    patience: Patience,
    outcome: Arc<watch::Sender<Option<Outcome>>>,
}

/// Nothing has changed from one version to another: who knows everything up to the one knows everything up to the other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quiet {
    /// In which history.
    pub(super) epoch: u64,
    /// The last change, or where the look began.
    pub(super) from: ResourceVersion,
    /// The bookmark.
    pub(super) to: ResourceVersion,
    /// When the bookmark was read.
    pub(super) received: Instant,
}

/// Whether upstream has no watch cache of a resource: events may be in an etcd of their own, and are not cached because they are many.
fn is_uncached(gvr: &GroupVersionResource) -> bool {
    gvr.resource == "events" && matches!(gvr.group.as_str(), "" | "events.k8s.io")
}

impl Prover {
    /// Proves nothing where `proves` says so, nor what upstream has no watch cache of.
    pub(super) fn new(shared: Shared, served: Served, proves: bool) -> Arc<Self> {
        let proves = proves && !is_uncached(&served.gvr);
        let (inner, quiet, told) = Default::default();
        Arc::new(Self { shared, served, proves, inner, quiet, told })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a proof that begins after this call.
    pub(super) async fn prove(self: &Arc<Self>, patience: Patience) -> Result<(), Refusal> {
        let resource = &self.served.gvr;
        let unproved = |why: &str| Refusal::Unavailable(format!("{resource} is not proved to be fresh: {why}"));
        if !self.proves {
            return Err(unproved("consistent reads of it are upstream's; with resourceVersion=0 any state is given"));
        }
        let pause = match patience {
            Patience::Bookmark => self.inner().bookmarks.pause_left(Instant::now()),
            Patience::AtOnce | Patience::Insistent => None,
        };
        let patience = pause.map_or(patience, |_| Patience::AtOnce);
        let Some(sender) = self.join(patience) else {
            return Err(match pause {
                Some(left) => unproved(&format!(
                    "the last wait for upstream's bookmark was in vain; it is waited for again in {left:.0?} at the latest"
                )),
                None => unproved("it is too quiet to be proved at once, or upstream was just asked"),
            });
        };
        // It lives as long as it is held here.
        let mut outcome = sender.subscribe();
        let outcome = timeout(patience.timeout(), outcome.wait_for(Option::is_some)).await;
        match outcome.ok().and_then(Result::ok).flatten() {
            Some(Ok(_)) => Ok(()),
            Some(Err(why)) => Err(unproved(why.why())),
            None => Err(unproved("upstream's word took too long")),
        }
    }

    /// A place among those who wait; `None` where it would be in vain.
    fn join(self: &Arc<Self>, patience: Patience) -> Option<Arc<watch::Sender<Option<Outcome>>>> {
        let age = self.served.hub.status().age;
        let mut inner = self.inner();
        let soon = |not_before: Instant| not_before <= Instant::now() + patience.timeout();
        let worth = age.is_some_and(|age| age <= BUSY) && inner.not_before.is_none_or(soon);
        if patience == Patience::AtOnce && !worth {
            return None;
        }
        let next = inner.next.get_or_insert_default();
        next.patience = next.patience.max(patience);
        let outcome = next.outcome.clone();
        if !std::mem::replace(&mut inner.running, true) {
            tokio::spawn(self.clone().run());
        }
        Some(outcome)
    }

    /// Serves those who wait, one proof after the other, until nobody does.
    async fn run(self: Arc<Self>) {
        loop {
            let not_before = self.inner().not_before;
            if let Some(not_before) = not_before {
                sleep_until(not_before).await;
            }
            let begun = Instant::now();
            let (Next { patience, outcome }, is_try) = {
                let mut inner = self.inner();
                // Who waits holds it too; who does not wait any more needs no answer.
                match inner.next.take().filter(|next| Arc::strong_count(&next.outcome) > 1) {
                    Some(next) => {
                        inner.not_before = Some(begun + PROOF_INTERVAL);
                        let is_try = next.patience > Patience::AtOnce && inner.bookmarks.begin(begun);
                        (next, is_try)
                    }
                    None => {
                        inner.running = false;
                        return;
                    }
                }
            };
            let proof = timeout(PROOF_TIMEOUT, self.proof(is_try || patience == Patience::Insistent)).await;
            let proof = proof.unwrap_or_else(|_| Err(Unproved::Failed(format!("nothing within {PROOF_TIMEOUT:?}"))));
            let result = proof.as_ref().map_or_else(Unproved::result, |result| *result);
            self.served.hub.metrics().proof(result, begun.elapsed());
            {
                let mut inner = self.inner();
                if matches!(result, Proof::Held | Proof::CaughtUp) {
                    inner.not_before = Some(begun + LOOK_UP_INTERVAL);
                }
                // Who insists during a pause makes it no longer.
                if is_try || matches!(result, Proof::Bookmark) {
                    inner.bookmarks.end(&proof, Instant::now());
                }
            }
            if let Err(unproved) = &proof {
                let why = unproved.why();
                debug!(resource = %self.served.gvr, scope = self.served.scope.namespace(), why, "not proved");
            }
            outcome.send_replace(Some(proof));
        }
    }

    /// One proof: the cache is at the version that the cluster had when this began, or beyond.
    async fn proof(&self, for_bookmark: bool) -> Outcome {
        let hub = &self.served.hub;
        let failed = Unproved::Failed;
        // While its own watch is down, upstream knows better in any case.
        let synced = *hub.phase().borrow() == Phase::Synced;
        let Some(CachePosition { epoch, version: from, .. }) = hub.position().filter(|_| synced) else {
            return Err(failed("it is not watched just now".to_owned()));
        };
        let asked_at = Instant::now();
        let asked = self.shared.cluster_version(&self.shared.target(&self.served)).await;
        let asked = asked.map_err(failed)?;
        if asked < from {
            return Err(failed(format!("the cluster is at version {asked}, below {from}")));
        }
        let result = if self.reached(epoch)? >= asked {
            Proof::Held
        } else if hub.reached(asked, OWN_WATCH).await.is_ok() {
            Proof::CaughtUp
        } else if !for_bookmark {
            return Err(Unproved::Behind(format!("it is at {}, and the cluster at {asked}", self.reached(epoch)?)));
        } else {
            tokio::select! {
                biased;
                _ = hub.reached(asked, PROOF_TIMEOUT) => Proof::CaughtUp,
                quiet = self.look(epoch, asked) => {
                    self.tell(quiet?);
                    let _ = hub.reached(asked, PROOF_TIMEOUT).await;
                    Proof::Bookmark
                }
            }
        };
        if self.reached(epoch)? < asked {
            return Err(failed("its own watch does not follow".to_owned()));
        }
        hub.proved(asked_at);
        Ok(result)
    }

    /// Looks for changes from where the cache is up to `asked`, and waits until the cache has all that there are.
    async fn look(&self, epoch: u64, asked: ResourceVersion) -> Result<Quiet, Unproved> {
        let upstream = &self.shared.upstream;
        let (doubt, mut from) = (upstream.doubt(), self.reached(epoch)?);
        let mut watch = self.shared.reflector_for(&self.served, WatchPurpose::Probe).backfilling(from, false);
        let without = || format!("upstream sent no bookmark up to version {asked}");
        let mut opened: Option<Instant> = None;
        let (to, received) = loop {
            // Before it is open, the whole proof's limit holds.
            let limit = opened.map_or(PROOF_TIMEOUT, |at| BOOKMARK_TIMEOUT.saturating_sub(at.elapsed()));
            let step = timeout(limit, watch.step()).await.map_err(|_| Unproved::NoBookmark(without()))?;
            match step.map_err(|error| Unproved::Failed(error.to_string()))? {
                Step::Update { update: Update::Event(_, object), .. } => from = from.max(object.version()),
                Step::Update { update: Update::Bookmark(version), received } if version >= asked => {
                    break (version, received);
                }
                Step::Update { .. } => {}
                Step::Watching { .. } => opened = Some(Instant::now()),
                // Another apiserver has answered, which is not that far yet; or none ever will be.
                Step::Ended { .. } => {
                    let is_long = opened.is_some_and(|at| at.elapsed() >= LONG_WAIT);
                    return Err(if is_long { Unproved::NoBookmark(without()) } else { Unproved::Behind(without()) });
                }
            }
        };
        upstream.confirm(doubt).await.map_err(|error| Unproved::Failed(error.to_string()))?;
        let _ = self.served.hub.reached(from, PROOF_TIMEOUT).await;
        Ok(Quiet { epoch, from, to, received })
    }

    /// The version of the cache, as long as it is of the history that this began in.
    fn reached(&self, epoch: u64) -> Result<ResourceVersion, Unproved> {
        let here = self.served.hub.position().filter(|ahead| ahead.epoch == epoch);
        here.map(|ahead| ahead.version).ok_or_else(|| Unproved::Failed("it is being listed again".to_owned()))
    }

    fn tell(&self, quiet: Quiet) {
        *self.quiet.lock().unwrap_or_else(PoisonError::into_inner) = Some(quiet);
        self.told.notify_one();
    }

    /// The next that was found; for the one that moves the cache. Cancel-safe.
    pub(super) async fn quiet(&self) -> Quiet {
        loop {
            if let Some(quiet) = self.quiet.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return quiet;
            }
            self.told.notified().await;
        }
    }
}

impl Quiet {
    /// How far the cache of this hub may be taken to be, where that is further than it is.
    pub(super) fn moves(&self, hub: &Hub) -> Option<ResourceVersion> {
        let CachePosition { epoch, version, .. } = hub.position()?;
        (epoch == self.epoch && (self.from..self.to).contains(&version)).then_some(self.to)
    }
}
