//! Decides how a subscriber continues from a version.
//!
//! A client returns with the last version it received, or a live subscriber falls behind the
//! retained log. There are four ways to continue, from the cheapest to the most expensive: read the
//! log, send a catch-up (each changed object once), send a backfill that was read again from
//! upstream, or start again with a snapshot. The hazard is a way that skips or repeats an event.
//!
//! The decision depends on many inputs (the coverage of the log and the conflated history, gaps,
//! the abilities of the format, the options of the client), so it is one pure function, [`plan`],
//! over plain data. The hub calls it inside its critical section, so history cannot move between
//! the decision and the subscription. Before it plans, `server::reader` waits up to three seconds
//! for a version that the cache has not reached, and refuses a version of another history; a watch
//! over HTTP waits for such a version in silence. If the plan needs something that takes time (a
//! gate permit, a backfill), the hub returns that need instead of a subscription; the caller
//! fetches it without the lock and asks again. The alternative, to look first and to subscribe
//! later, decides twice, and the two decisions can differ.

use kubefan_model::ResourceVersion;

use super::ring::Expired;

/// Reaction to a subscription that has fallen behind the retained events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLag {
    /// The subscription has expired: [`OnExpired`] decides.
    #[default]
    Expire,
    /// The subscription continues with a catch-up.
    Conflate,
}

/// Reaction to a subscription whose version history cannot resume from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnExpired {
    /// The subscription ends.
    #[default]
    Fail,
    /// The subscription starts again with a snapshot.
    Restart,
}

/// The treatment of a subscription whose version the cache has not reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnAhead {
    /// The subscription is refused.
    #[default]
    Refuse,
    /// The subscription waits in silence.
    Wait,
}

/// The part of history that a subscriber continues from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistorySource {
    /// The log of events: every event after the version is retained.
    Log,
    /// A catch-up: the objects changed after the version are known, each once.
    CatchUp,
}

/// Coverage of a history at one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// The version to continue from.
    pub version: ResourceVersion,
    /// The version that the cache has reached.
    pub current: ResourceVersion,
    /// Every event after this version is in the log.
    pub log_floor: ResourceVersion,
    /// The end of the gap in the log that `version` lies inside.
    pub gap_end: Option<ResourceVersion>,
    /// The oldest version, at or after `version`, after which the conflated history knows every
    /// change.
    pub conflated_from: ResourceVersion,
    /// The oldest version after which no event is missing in the log.
    pub exact_from: ResourceVersion,
    /// Whether the subscriber's format can express gaps and catch-ups. Watches over HTTP cannot.
    pub gap_markers: bool,
}

impl Coverage {
    /// Limits the coverage to a view's log that starts only after `log_floor`.
    #[must_use]
    pub fn shortened(self, log_floor: ResourceVersion) -> Self {
        let exact_from = self.exact_from.max(log_floor);
        let log_floor = self.log_floor.max(log_floor);
        Self { log_floor, exact_from, ..self }
    }

    /// The part of history to continue from.
    ///
    /// # Errors
    /// [`Expired`], with the oldest version that could be resumed from.
    pub fn source(&self) -> Result<HistorySource, Expired> {
        let expired = |oldest| Err(Expired { requested: self.version, oldest });
        let source = match self.gap_end {
            // Inside a gap no state is exact, so neither source can start there.
            Some(end) => return expired(end),
            None if self.version >= self.log_floor => HistorySource::Log,
            None if self.version == self.conflated_from => HistorySource::CatchUp,
            None => return expired(self.conflated_from),
        };
        if !self.gap_markers && self.version < self.exact_from {
            return expired(self.exact_from);
        }
        Ok(source)
    }
}

/// State of the backfill for a returning client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackfillState {
    /// None was read yet, or the last one is of another epoch.
    Missing,
    /// One was read. This is the coverage of history at its end.
    EndsAt(Coverage),
    /// Upstream does not have the events either.
    Unavailable,
}

/// The reason of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Situation {
    /// A client returns with a version.
    Returns(BackfillState),
    /// A live subscriber fell behind the log.
    Lags(OnLag),
}

/// Everything that [`plan`] decides from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumeRequest<E> {
    /// Coverage of history at the subscriber's version. An error if no history of this cache can
    /// continue from it: the version is of another history, or the subscriber holds the state of no
    /// version.
    pub position: Result<Coverage, E>,
    /// The reason of the plan.
    pub situation: Situation,
    /// The subscriber's option if history cannot resume.
    pub on_expired: OnExpired,
    /// The subscriber's option if the cache has not reached its version.
    pub on_ahead: OnAhead,
}

/// The way in which a subscriber continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumePlan<E> {
    /// From this part of history.
    Continue(HistorySource),
    /// With the backfill, and then from this part of history.
    Backfill(HistorySource),
    /// Only a backfill can help: read one, and plan again.
    NeedsBackfill,
    /// With the events after this version, which the cache has not reached.
    Wait(ResourceVersion),
    /// With a new snapshot.
    Restart,
    /// Not at all.
    Expired(E),
    /// Not at all: the cache has not reached the version.
    Future {
        /// The requested version.
        requested: ResourceVersion,
        /// The version of the cache.
        current: ResourceVersion,
    },
}

/// The cheapest way to continue that loses, repeats and reorders nothing.
pub fn plan<E: From<Expired>>(request: ResumeRequest<E>) -> ResumePlan<E> {
    let expired = match request.position {
        Err(unresumable) => unresumable,
        Ok(Coverage { version: requested, current, .. }) if requested > current => {
            // The client has all events of its version, of which the cache may have a part.
            let has_part = requested.is_end() && requested.is_at(current);
            return match request.on_ahead {
                OnAhead::Refuse if !has_part => ResumePlan::Future { requested, current },
                OnAhead::Refuse | OnAhead::Wait => ResumePlan::Wait(requested),
            };
        }
        Ok(coverage) => match (coverage.source(), request.situation) {
            (Err(expired), Situation::Lags(_)) => expired.into(),
            (Ok(_), Situation::Lags(OnLag::Expire)) => {
                Expired { requested: coverage.version, oldest: coverage.log_floor }.into()
            }
            (Ok(source), _) => return ResumePlan::Continue(source),
            (Err(expired), Situation::Returns(BackfillState::Unavailable)) => expired.into(),
            (Err(_), Situation::Returns(BackfillState::Missing)) => return ResumePlan::NeedsBackfill,
            (Err(_), Situation::Returns(BackfillState::EndsAt(end))) => {
                // History may have moved past the end of the backfill while it was read.
                return end.source().map_or(ResumePlan::NeedsBackfill, ResumePlan::Backfill);
            }
        },
    };
    match request.on_expired {
        OnExpired::Restart => ResumePlan::Restart,
        OnExpired::Fail => ResumePlan::Expired(expired),
    }
}

#[cfg(test)]
mod tests {
    use super::{BackfillState::*, HistorySource::*, OnExpired::Fail, OnLag::*, Situation::*, *};

    type Plan = ResumePlan<Expired>;
    const RESTART: OnExpired = OnExpired::Restart;

    fn version(number: u64) -> ResourceVersion {
        ResourceVersion::new(number).unwrap()
    }

    /// The cache is at 100. The log starts after 50, has a gap from 60 to 70, and the conflated
    /// history starts after 20 and has a gap from 30 to 40.
    fn at(number: u64) -> Coverage {
        let conflated_from = match number {
            ..20 => 20,
            31..40 => 40,
            _ => number,
        };
        Coverage {
            version: version(number),
            current: version(100),
            log_floor: version(50),
            gap_end: (61..70).contains(&number).then(|| version(70)),
            conflated_from: version(conflated_from),
            exact_from: version(70),
            gap_markers: true,
        }
    }

    /// Coverage up to the end of that version.
    fn whole(number: u64) -> Coverage {
        Coverage { version: version(number).end(), ..at(number) }
    }

    fn http(number: u64) -> Coverage {
        Coverage { gap_markers: false, ..at(number) }
    }

    #[test]
    fn a_version_is_resumed_from_the_log_else_from_the_conflated_history_else_from_a_named_oldest_version() {
        for (coverage, expected) in [
            (at(100), Ok(Log)),
            (at(70), Ok(Log)),
            (at(65), Err(70)),
            (at(60), Ok(Log)),
            (at(50), Ok(Log)),
            (at(49), Ok(CatchUp)),
            (at(40), Ok(CatchUp)),
            (at(35), Err(40)),
            (at(30), Ok(CatchUp)),
            (at(20), Ok(CatchUp)),
            (at(19), Err(20)),
            (http(100), Ok(Log)),
            (http(70), Ok(Log)),
            (http(69), Err(70)),
            (http(60), Err(70)),
            (http(40), Err(70)),
            (http(35), Err(40)),
            (at(80).shortened(version(80)), Ok(Log)),
            (at(79).shortened(version(80)), Ok(CatchUp)),
            (at(65).shortened(version(80)), Err(70)),
            (at(35).shortened(version(80)), Err(40)),
            (at(50).shortened(version(20)), Ok(Log)),
            (http(80).shortened(version(80)), Ok(Log)),
            (http(79).shortened(version(80)), Err(80)),
        ] {
            let found = coverage.source();
            let requested = coverage.version;
            assert_eq!(
                found,
                expected.map_err(|oldest| Expired { requested, oldest: version(oldest) }),
                "{coverage:?}"
            );
        }
    }

    #[test]
    fn each_situation_has_one_plan() {
        let gone = |requested, oldest| Expired { requested: version(requested), oldest: version(oldest) };
        let unresumable = gone(1, 2);
        for (position, situation, on_expired, expected) in [
            // A client returns.
            (Ok(at(100)), Returns(Missing), Fail, Plan::Continue(Log)),
            (Ok(at(49)), Returns(Missing), Fail, Plan::Continue(CatchUp)),
            (Ok(at(49)), Returns(Unavailable), RESTART, Plan::Continue(CatchUp)),
            (Ok(at(49)), Returns(EndsAt(at(50))), RESTART, Plan::Continue(CatchUp)),
            (Ok(at(10)), Returns(Missing), Fail, Plan::NeedsBackfill),
            (Ok(at(10)), Returns(Missing), RESTART, Plan::NeedsBackfill),
            (Ok(at(10)), Returns(EndsAt(at(50))), Fail, Plan::Backfill(Log)),
            (Ok(at(10)), Returns(EndsAt(at(45))), RESTART, Plan::Backfill(CatchUp)),
            (Ok(at(10)), Returns(EndsAt(at(15))), Fail, Plan::NeedsBackfill),
            (Ok(at(10)), Returns(Unavailable), Fail, Plan::Expired(gone(10, 20))),
            (Ok(at(10)), Returns(Unavailable), RESTART, Plan::Restart),
            (Ok(http(60)), Returns(Missing), Fail, Plan::NeedsBackfill),
            (Ok(http(60)), Returns(Unavailable), Fail, Plan::Expired(gone(60, 70))),
            (Ok(at(101)), Returns(Missing), RESTART, Plan::Future { requested: version(101), current: version(100) }),
            (
                Ok(whole(101)),
                Returns(Missing),
                Fail,
                Plan::Future { requested: version(101).end(), current: version(100) },
            ),
            // The cache may have a part of it.
            (Ok(whole(100)), Returns(Missing), Fail, Plan::Wait(version(100).end())),
            (Err(unresumable), Returns(Missing), Fail, Plan::Expired(unresumable)),
            (Err(unresumable), Returns(EndsAt(at(50))), RESTART, Plan::Restart),
            // A subscriber lags.
            (Ok(at(49)), Lags(Conflate), Fail, Plan::Continue(CatchUp)),
            (Ok(at(50)), Lags(Conflate), RESTART, Plan::Continue(Log)),
            (Ok(at(10)), Lags(Conflate), Fail, Plan::Expired(gone(10, 20))),
            (Ok(at(10)), Lags(Conflate), RESTART, Plan::Restart),
            (Ok(at(49)), Lags(Expire), Fail, Plan::Expired(gone(49, 50))),
            (Ok(at(49)), Lags(Expire), RESTART, Plan::Restart),
            (Err(unresumable), Lags(Conflate), Fail, Plan::Expired(unresumable)),
            (Err(unresumable), Lags(Conflate), RESTART, Plan::Restart),
        ] {
            let request = ResumeRequest { position, situation, on_expired, on_ahead: OnAhead::Refuse };
            assert_eq!(plan(request), expected, "{request:?}");
        }
    }

    #[test]
    fn a_subscriber_may_wait_for_a_version_that_the_cache_has_not_reached() {
        for (position, expected) in [
            (whole(101), Plan::Wait(version(101).end())),
            (whole(100), Plan::Wait(version(100).end())),
            (at(100), Plan::Continue(Log)),
            (http(60), Plan::NeedsBackfill),
        ] {
            let situation = Returns(Missing);
            let on_ahead = OnAhead::Wait;
            let request = ResumeRequest { position: Ok(position), situation, on_expired: Fail, on_ahead };
            assert_eq!(plan(request), expected, "{request:?}");
        }
    }
}
