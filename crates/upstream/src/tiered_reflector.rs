//! The reflector of a cache that may move between two servers of the same cluster: the kubefan at
//! `--upstream`, and the apiserver while that kubefan is away.
//!
//! Both servers have the cluster's own versions, so a watch continues at the other server from the
//! version that it has reached. Nothing is listed again or sent twice, unless the other server no
//! longer has the version.
//!
//! | now at | the kubefan is | the cache |
//! |---|---|---|
//! | the kubefan | away | waits for its turn, then starts at the apiserver. A watch that is still open is read until then |
//! | the apiserver | away | stays. After a failure it waits for its turn again |
//! | the apiserver | back | moves at a random moment within a minute, or with its next request |
//!
//! A watch moves only when the other server has opened one: until then, and if it refuses, the old
//! one is read. If the apiserver denies the resource to kubefan, the cache stays at the kubefan for
//! some minutes, as it would without a fallback.

use std::{
    future::{Future, ready},
    mem,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use kubefan_cache::{RelistReason, warnings::Warnings};
use kubefan_model::{ResourceVersion, object::ObjectParser};
use kubefan_telemetry::metrics::UpstreamWatchGuard;
use rand::{SeedableRng, rngs::StdRng};
use tokio::time::{Instant, timeout};

use super::{
    direct_apiserver::DirectApiserver,
    error::UpstreamError,
    fallback::{Attempt, Fallback, Verdict},
    reflector::{NextStep, ReflectorError, ReflectorEvent, ReflectorOptions, Target},
    source::Source,
    source_reflector::SourceReflector,
};

/// The time before the next attempt, after the kubefan did not take over a watch.
const RETURN_RETRY: Duration = Duration::from_secs(30);

/// The longest time for which an open watch is not read because the other server is asked.
const MOVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time for which a denial counts: an apiserver that has just started denies everything until
/// its authorizer has loaded its rules.
const DENIED_FOR: Duration = Duration::from_secs(5 * 60);

/// A list and watch of one target.
pub struct TieredReflector {
    active: SourceReflector,
    /// The server that the active reflector reads from.
    source: Source,
    tier: Option<Tier>,
}

/// The position of a reflector before a step.
struct Before {
    reached: Option<ResourceVersion>,
    relist_reason: RelistReason,
}

/// The apiserver does not let kubefan read a resource.
struct Denial {
    /// The outage in which it was found.
    epoch: u64,
    at: Instant,
}

/// Waits for the moment of a move.
type Due = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The way to the other server.
struct Tier {
    direct: DirectApiserver,
    /// The reflector at the other server, without a state.
    idle: SourceReflector,
    idle_source: Source,
    is_at_apiserver: bool,
    /// Whether the cache had its turn, so that it may send requests to the apiserver.
    may_start: bool,
    /// The newest version that the cache had. A list of the kubefan may be older.
    newest: Option<ResourceVersion>,
    /// Begun with the last request to the kubefan. Notes the end of its body.
    requested: Option<Attempt>,
    /// The last denial of the resource by the apiserver.
    denied: Option<Denial>,
    /// Kept between two steps, so that a step that is dropped keeps its turn.
    due: Option<Due>,
}

impl Tier {
    fn fallback(&self) -> &Fallback {
        self.direct.fallback()
    }

    /// Whether the cache belongs at the other server.
    fn is_misplaced(&self) -> bool {
        self.fallback().is_away() != self.is_at_apiserver && !self.is_denied()
    }

    /// Whether the apiserver has denied the resource in this outage, not long ago.
    fn is_denied(&self) -> bool {
        let denied = self.denied.as_ref();
        denied.is_some_and(|denied| denied.at.elapsed() < DENIED_FOR && denied.epoch == self.fallback().epoch())
    }

    /// Returns the wait for the moment at which an open watch moves.
    fn due(&mut self) -> &mut Due {
        let fallback = self.direct.fallback();
        let is_at_apiserver = self.is_at_apiserver;
        self.due.get_or_insert_with(|| {
            if is_at_apiserver { returns(fallback, Duration::ZERO) } else { starts(fallback, true) }
        })
    }
}

fn starts(fallback: &Fallback, has_state: bool) -> Due {
    let fallback = fallback.clone();
    Box::pin(async move { fallback.until_start(has_state).await })
}

fn returns(fallback: &Fallback, at_least: Duration) -> Due {
    let fallback = fallback.clone();
    Box::pin(async move { fallback.until_return(at_least).await })
}

impl TieredReflector {
    /// Returns a reflector of a target, at the servers of a source. `open_watch` counts a watch
    /// until its guard is dropped.
    pub fn new(
        source: &Source,
        target: Target,
        parser: Arc<ObjectParser>,
        options: ReflectorOptions,
        open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
        mut random: StdRng,
    ) -> Self {
        let reflector = |source: &Source, random| {
            source.reflector(target.clone(), parser.clone(), options, open_watch.clone(), random)
        };
        let own = source.own();
        let tier = source.direct().map(|direct| {
            direct.fallback().note_target(&target);
            let apiserver = Source::apiserver(direct.upstream().clone());
            Tier {
                direct: direct.clone(),
                idle: reflector(&apiserver, StdRng::from_rng(&mut random)),
                idle_source: apiserver,
                is_at_apiserver: false,
                may_start: false,
                newest: None,
                requested: None,
                denied: None,
                due: None,
            }
        });
        Self { active: reflector(&own, random), source: own, tier }
    }

    /// Returns the server that the last step has read from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Chooses the server of the next request, and waits until it may be sent there. `has_state` if
    /// the cache has a state to serve meanwhile.
    ///
    /// Cancel-safe.
    pub async fn choose_server(&mut self, has_state: bool) {
        loop {
            let Some(tier) = &mut self.tier else { return };
            if !matches!(self.active.next_step(), NextStep::RequestList | NextStep::OpenWatch) {
                return;
            }
            if !tier.fallback().is_away() || tier.is_denied() {
                if tier.is_at_apiserver {
                    self.switch();
                }
                return;
            }
            if tier.is_at_apiserver && tier.may_start {
                return;
            }
            let fallback = tier.direct.fallback();
            let due = tier.due.get_or_insert_with(|| starts(fallback, has_state));
            tokio::select! {
                biased;
                () = fallback.until(false) => continue,
                // Kept until the server is checked, because this may be dropped meanwhile.
                () = due => tier.due = Some(Box::pin(ready(()))),
            }
            let may_be_read = tier.direct.may_be_read().await;
            tier.due = None;
            if !may_be_read {
                continue;
            }
            tier.fallback().started();
            if tier.is_at_apiserver {
                tier.may_start = true;
            } else {
                self.switch();
            }
            return;
        }
    }

    /// Completes when the next request belongs to another server than the last one.
    pub fn until_misplaced(&self) -> impl Future<Output = ()> + Send + use<> {
        let tier = self.tier.as_ref().filter(|tier| !tier.is_denied());
        let other_side = tier.map(|tier| (tier.fallback().clone(), !tier.is_at_apiserver));
        async move {
            match other_side {
                Some((fallback, is_away)) => fallback.until(is_away).await,
                None => std::future::pending().await,
            }
        }
    }

    /// See [`SourceReflector::step`]. An open watch may move to the other server.
    ///
    /// # Errors
    /// The failure of the request or stream.
    pub async fn step(&mut self) -> Result<ReflectorEvent, ReflectorError> {
        loop {
            let Some(tier) = self.tier.as_mut() else { return self.active.step().await };
            let before = Before { reached: self.active.reached(), relist_reason: self.active.relist_reason() };
            let next_step = self.active.next_step();
            let is_open = next_step == NextStep::ReadWatch && before.reached.is_some();
            if !tier.is_at_apiserver && matches!(next_step, NextStep::RequestList | NextStep::OpenWatch) {
                tier.requested = Some(tier.fallback().attempt());
            }
            if !is_open || tier.is_denied() {
                let step = self.active.step().await;
                return self.noted(before, step);
            }
            tokio::select! {
                biased;
                step = self.active.step() => return self.noted(before, step),
                () = tier.due() => tier.due = None,
            }
            match timeout(MOVE_TIMEOUT, self.try_to_move()).await {
                Ok(Some(event)) => return Ok(event),
                Ok(None) => {}
                Err(_) => self.give_up_move(),
            }
        }
    }

    /// Opens a watch at the other server, and moves there if that succeeds.
    ///
    /// Cancel-safe: the next attempt starts over.
    async fn try_to_move(&mut self) -> Option<ReflectorEvent> {
        let tier = self.tier.as_mut()?;
        if !tier.is_misplaced() {
            return None;
        }
        let version = self.active.reached()?;
        if !tier.is_at_apiserver {
            if !tier.direct.may_be_read().await {
                return None;
            }
            tier.fallback().started();
        }
        if tier.is_at_apiserver {
            tier.requested = Some(tier.fallback().attempt());
        }
        tier.idle.resume_from(version);
        let error = match tier.idle.step().await {
            Ok(event @ ReflectorEvent::Watching { .. }) => {
                self.swap();
                return Some(event);
            }
            // The other server is not where the cluster is. If the cluster went back, this watch
            // finds that out itself.
            Ok(_) => None,
            Err(error) => Some(error),
        };
        tracing::debug!(?error, to = tier.idle_source.name(), "a watch could not move");
        if let Some(error) = error.filter(is_denial).filter(|_| !tier.is_at_apiserver) {
            tier.deny(&error);
        }
        self.give_up_move();
        None
    }

    /// Leaves the watch where it is, until the next attempt.
    fn give_up_move(&mut self) {
        let Some(tier) = &mut self.tier else { return };
        tier.idle.relist(RelistReason::Initial);
        if tier.is_at_apiserver {
            tier.due = Some(returns(tier.fallback(), RETURN_RETRY));
        }
    }

    /// Continues at the other server from where this one has come.
    fn switch(&mut self) {
        let Some(tier) = &mut self.tier else { return };
        match self.active.reached() {
            Some(version) => tier.idle.resume_from(version),
            None => tier.idle.relist_above(self.active.relist_reason(), tier.newest),
        }
        self.swap();
    }

    /// Makes the other reflector the active one.
    fn swap(&mut self) {
        let Some(tier) = &mut self.tier else { return };
        mem::swap(&mut self.active, &mut tier.idle);
        mem::swap(&mut self.source, &mut tier.idle_source);
        tier.is_at_apiserver = !tier.is_at_apiserver;
        tier.may_start = tier.is_at_apiserver;
        tier.due = None;
        // It drops the open watch, and what was received and not emitted.
        tier.idle.relist(RelistReason::Initial);
    }

    /// Notes the result of a step.
    fn noted(
        &mut self,
        before: Before,
        step: Result<ReflectorEvent, ReflectorError>,
    ) -> Result<ReflectorEvent, ReflectorError> {
        let (Some(tier), Err(error)) = (&mut self.tier, &step) else { return step };
        tier.newest = tier.newest.max(before.reached);
        if !tier.is_at_apiserver {
            // The clients note requests, but over HTTP not the end of a body.
            let broke = matches!(error.upstream(), Some(UpstreamError::Reset { .. } | UpstreamError::Truncated { .. }));
            if broke
                && !self.source.is_grpc()
                && let Some(requested) = &tier.requested
            {
                requested.note(Verdict::Lost);
            }
            return step;
        }
        tier.may_start = false;
        tier.due = None;
        if !is_denial(error) {
            return step;
        }
        // Without a fallback the caches would serve their last state, so they do here.
        tier.deny(error);
        let server = tier.idle_source.name().to_owned();
        let message = format!("it is away, and instead of it {error}");
        match before.reached {
            Some(version) => self.active.resume_from(version),
            None => self.active.relist(before.relist_reason),
        }
        self.switch();
        Err(ReflectorError::Watch(UpstreamError::Unreachable { server, message }))
    }

    /// See [`SourceReflector::relist`].
    pub fn relist(&mut self, reason: RelistReason) {
        if let Some(tier) = &mut self.tier {
            tier.newest = tier.newest.max(self.active.reached());
        }
        self.active.relist(reason);
    }

    /// See [`SourceReflector::resume_from`].
    pub fn resume_from(&mut self, version: ResourceVersion) {
        self.active.resume_from(version);
    }

    /// See [`SourceReflector::reread`].
    pub fn reread(&mut self, reason: RelistReason) {
        if let Some(tier) = &mut self.tier {
            tier.newest = tier.newest.max(self.active.reached());
        }
        self.active.reread(reason);
    }

    /// See [`SourceReflector::advance_to`].
    pub fn advance_to(&mut self, reached: ResourceVersion) {
        self.active.advance_to(reached);
    }

    /// See [`SourceReflector::next_step`].
    pub fn next_step(&self) -> NextStep {
        self.active.next_step()
    }

    /// See [`SourceReflector::warnings`].
    pub fn warnings(&self) -> Warnings {
        self.active.warnings()
    }
}

impl Tier {
    /// Leaves the cache at the kubefan for [`DENIED_FOR`], or until the next outage.
    fn deny(&mut self, error: &ReflectorError) {
        self.denied = Some(Denial { epoch: self.fallback().epoch(), at: Instant::now() });
        self.due = None;
        self.fallback().denied(error.to_string());
    }
}

/// Whether the apiserver does not let kubefan read the resource.
fn is_denial(error: &ReflectorError) -> bool {
    use UpstreamError::{Auth, Credentials, Forbidden, Tls};
    matches!(error.upstream(), Some(Forbidden { .. } | Auth { .. } | Credentials { .. } | Tls { .. }))
}

#[cfg(test)]
mod tests;
