//! The apiserver in place of a kubefan at `--upstream` that is away.
//!
//! One value for all caches and clients of a process. Clients of the kubefan note what their
//! requests have found; `side` concludes from that whether the kubefan is away, and `pace` when a
//! cache may start a list or a watch at the apiserver then. The reflector of a cache
//! ([`TieredReflector`](crate::TieredReflector)) asks both. While the kubefan is away,
//! [`Source::keep_probing`](crate::Source::keep_probing) probes it. Nothing here sends a request.

mod budget;
mod pace;
mod side;
mod verdict;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use http::{HeaderMap, StatusCode};
use kubefan_client::FallbackBudget;
use kubefan_common::sync::watch;
use kubefan_telemetry::metrics::FallbackMetrics;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::{Instant, sleep};
pub(crate) use verdict::{Verdict, is_through_kubefan};

use self::{pace::Pace, side::SideMachine, verdict::is_of_cache};
use crate::reflector::Target;

/// Header of kubefan's answers with the budget of its clients.
const BUDGET_HEADER: &str = "kubefan-fallback";

/// The time limit of a probe of a kubefan that is away.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// The mean time between two probes of a kubefan that is away.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// The time before the first probe. Another replica often takes over at once.
const FIRST_PROBE: Duration = Duration::from_millis(250);
/// The time for which a lower number of clients is not lowered further: a kubefan that has just
/// started does not know all of them yet, and each cache hears it.
const LOWERED_FOR: Duration = Duration::from_secs(60);
/// The time over which the watches of a process return to the kubefan, at random moments.
const RETURN_SPREAD: Duration = Duration::from_secs(60);

/// The parts that a fallback is made of.
pub struct FallbackOptions {
    /// The address of the apiserver, for messages.
    pub apiserver: String,
    /// The address of the kubefan, for messages.
    pub kubefan: String,
    /// The budget until the kubefan tells another one. Of that, too, the clients are at least
    /// these, and the rate is at most this.
    pub budget: FallbackBudget,
    /// The metrics.
    pub metrics: FallbackMetrics,
    /// The generator of random moments.
    pub random: StdRng,
}

/// The fallback of one process. A clone is cheap.
#[derive(Clone)]
pub struct Fallback(Arc<Inner>);

struct Inner {
    apiserver: String,
    kubefan: String,
    machine: Mutex<SideMachine>,
    /// Whether the kubefan is away, and since when it is or is not.
    away: watch::Sender<Away>,
    configured: FallbackBudget,
    /// Time at which the number of clients was lowered last.
    lowered_at: Mutex<Option<Instant>>,
    pace: Pace,
    obstacles: Mutex<Obstacles>,
    /// The last outage in which the apiserver was found to be that of the kubefan. 0 if none, or if
    /// it was found to be another one since.
    confirmed_in: AtomicU64,
    /// A target to probe the kubefan with.
    target: Mutex<Option<Target>>,
    metrics: FallbackMetrics,
    random: Mutex<StdRng>,
}

/// The reason why the apiserver may not be read.
pub(crate) struct Obstacle {
    pub(crate) message: String,
    /// Whether its answer says so. Without an answer, it may still be the right one.
    pub(crate) is_of_server: bool,
}

/// The reasons why the apiserver cannot be read instead, in the last outage.
#[derive(Debug, Clone, Default)]
struct Obstacles {
    /// The server, or the cluster behind it.
    server: Option<String>,
    /// The first resource that it has denied.
    denial: Option<String>,
}

#[derive(Debug, Clone, Copy)]
struct Away {
    is_away: bool,
    since: Instant,
}

/// A request to the kubefan, to note its result.
pub(crate) struct Attempt {
    fallback: Fallback,
    epoch: u64,
}

impl Attempt {
    pub(crate) fn note(&self, verdict: Verdict) {
        self.fallback.note(self.epoch, verdict);
    }

    /// Notes the head of an answer. `is_read` if it is of a list or a watch: other requests are
    /// often passed on, so they do not tell whether the kubefan is busy.
    pub(crate) fn answered(&self, status: StatusCode, headers: &HeaderMap, is_read: bool) {
        match Verdict::of_response(status, headers) {
            Verdict::Answered | Verdict::Busy if !is_read => {}
            verdict => self.note(verdict),
        }
        if is_of_cache(headers) {
            self.fallback.take_budget(headers);
        }
    }
}

impl Fallback {
    /// Creates a fallback. The kubefan counts as healthy.
    pub fn new(options: FallbackOptions) -> Self {
        let FallbackOptions { apiserver, kubefan, budget, metrics, mut random } = options;
        let pace = Pace::new(budget, StdRng::from_rng(&mut random));
        Self(Arc::new(Inner {
            apiserver,
            kubefan,
            machine: Mutex::default(),
            away: watch::Sender::new(Away { is_away: false, since: Instant::now() }),
            configured: budget,
            lowered_at: Mutex::default(),
            pace,
            obstacles: Mutex::default(),
            confirmed_in: AtomicU64::default(),
            target: Mutex::default(),
            metrics,
            random: Mutex::new(random),
        }))
    }

    /// Whether the kubefan is away.
    pub fn is_away(&self) -> bool {
        self.0.away.borrow().is_away
    }

    /// Whether the kubefan is away, and the apiserver was found to be that behind it since.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_away() && self.0.confirmed_in.load(Ordering::Acquire) == self.epoch()
    }

    /// Describes the server of lists and watches, for people.
    pub fn status(&self) -> String {
        let Inner { apiserver, kubefan, .. } = &*self.0;
        let Away { is_away, since } = *self.0.away.borrow();
        let Obstacles { server, denial } = locked(&self.0.obstacles).clone();
        let without = server.as_ref().map(|server| format!("; without a fallback: {server}"));
        let denial = denial.map(|denial| format!("; without a fallback for some: {denial}")).unwrap_or_default();
        if !is_away {
            return format!("upstream: the kubefan at {kubefan}{}", without.unwrap_or(denial));
        }
        let away = format!("the kubefan at {kubefan} is away since {}s", since.elapsed().as_secs());
        match without {
            Some(without) => format!("upstream: {away}{without}"),
            None => format!("upstream: the apiserver at {apiserver}; {away}{denial}"),
        }
    }

    /// Begins a request to the kubefan.
    pub(crate) fn attempt(&self) -> Attempt {
        Attempt { fallback: self.clone(), epoch: self.epoch() }
    }

    pub(crate) fn epoch(&self) -> u64 {
        locked(&self.0.machine).epoch()
    }

    /// Notes the result of a request that was sent in an epoch.
    fn note(&self, epoch: u64, verdict: Verdict) {
        let now = Instant::now();
        self.step(|machine| match verdict {
            Verdict::Answered => machine.answered(),
            Verdict::Busy => machine.busy(epoch, now),
            Verdict::Lost => machine.failed(epoch, now),
            Verdict::Unknown => {}
        });
    }

    /// Takes the budget that a kubefan names in the headers of an answer.
    fn take_budget(&self, headers: &HeaderMap) {
        if let Some(budget) = headers.get(BUDGET_HEADER) {
            self.take_budget_text(budget.to_str().unwrap_or_default());
        }
    }

    /// Takes the budget that a kubefan names.
    pub(crate) fn take_budget_text(&self, text: &str) {
        let Some(told) = FallbackBudget::parse(text) else { return };
        let last = self.0.pace.budget();
        let mut budget = budget::after(budget::bounded_by(told, self.0.configured), last);
        if budget.clients < last.clients {
            let mut lowered_at = locked(&self.0.lowered_at);
            if lowered_at.is_some_and(|at| at.elapsed() < LOWERED_FOR) {
                budget.clients = last.clients;
            } else {
                *lowered_at = Some(Instant::now());
            }
        }
        if budget != last {
            self.0.pace.set_budget(budget);
        }
    }

    /// Notes a target that a cache reads.
    pub(crate) fn note_target(&self, target: &Target) {
        locked(&self.0.target).get_or_insert_with(|| target.clone());
    }

    /// Returns a target that a cache reads.
    pub(crate) fn target(&self) -> Option<Target> {
        locked(&self.0.target).clone()
    }

    /// Notes the result of a probe.
    pub(crate) fn probed(&self, is_healthy: bool) {
        let now = Instant::now();
        self.step(|machine| machine.probed(is_healthy, now));
    }

    /// Returns the time before a probe.
    pub(crate) fn probe_delay(&self, is_first: bool) -> Duration {
        let delay = if is_first { FIRST_PROBE } else { PROBE_INTERVAL };
        delay.mul_f64(locked(&self.0.random).random_range(0.75..1.25))
    }

    /// Notes that a cache starts a list or a watch at the apiserver.
    pub(crate) fn started(&self) {
        self.step(SideMachine::started);
        self.0.metrics.started();
    }

    /// Lets the machine take a step, and makes a change known.
    fn step(&self, step: impl FnOnce(&mut SideMachine)) {
        let mut machine = locked(&self.0.machine);
        let before = machine.is_away();
        step(&mut machine);
        let is_away = machine.is_away();
        if before == is_away {
            return;
        }
        // Under the lock, so that changes become known in their order.
        self.0.away.send_replace(Away { is_away, since: Instant::now() });
        self.0.metrics.changed(is_away);
        let Inner { apiserver, kubefan, .. } = &*self.0;
        if is_away {
            *locked(&self.0.obstacles) = Obstacles::default();
            tracing::warn!(
                kubefan,
                apiserver,
                "the kubefan at --upstream is away; caches start at the apiserver, each at its turn"
            );
        } else {
            tracing::info!(kubefan, "the kubefan at --upstream is back; caches return to it");
        }
    }

    /// Completes while the kubefan is away, or not, as `is_away` says.
    pub(crate) async fn until(&self, is_away: bool) {
        let mut changes = self.0.away.subscribe();
        if changes.wait_for(|away| away.is_away == is_away).await.is_err() {
            std::future::pending().await
        }
    }

    /// Waits until a cache may start at the apiserver, because the kubefan is away.
    pub(crate) async fn until_start(&self, has_state: bool) {
        loop {
            self.until(true).await;
            tokio::select! {
                biased;
                () = self.until(false) => {}
                () = self.0.pace.start(has_state) => return,
            }
        }
    }

    /// Waits until a cache may return to the kubefan, because that is back. After an attempt that
    /// failed, waits `at_least`.
    pub(crate) async fn until_return(&self, at_least: Duration) {
        sleep(at_least).await;
        loop {
            self.until(false).await;
            let delay = RETURN_SPREAD.mul_f64(locked(&self.0.random).random());
            tokio::select! {
                biased;
                () = self.until(true) => {}
                () = sleep(delay) => return,
            }
        }
    }

    /// Notes whether the apiserver may be read in this outage, which was asked in `epoch`: the
    /// reason if not. Logs each reason once in a row.
    pub(crate) fn checked(&self, epoch: u64, obstacle: Option<Obstacle>) {
        match &obstacle {
            // A check of an earlier outage says nothing about this one.
            None => drop(self.0.confirmed_in.fetch_max(epoch, Ordering::AcqRel)),
            Some(Obstacle { is_of_server: true, .. }) => self.0.confirmed_in.store(0, Ordering::Release),
            Some(_) => {}
        }
        let obstacle = obstacle.map(|obstacle| obstacle.message);
        let mut obstacles = locked(&self.0.obstacles);
        if obstacles.server == obstacle {
            return;
        }
        if let Some(obstacle) = &obstacle {
            self.log(obstacle);
        }
        obstacles.server = obstacle;
    }

    /// Notes that the apiserver does not let kubefan read a resource. Logs the first one of an
    /// outage.
    pub(crate) fn denied(&self, denial: String) {
        let mut obstacles = locked(&self.0.obstacles);
        if obstacles.denial.is_none() {
            self.log(&denial);
            obstacles.denial = Some(denial);
        }
    }

    fn log(&self, reason: &str) {
        let Inner { apiserver, kubefan, .. } = &*self.0;
        tracing::warn!(
            kubefan,
            apiserver,
            reason,
            "the kubefan at --upstream is away, and the apiserver cannot be read instead"
        );
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
