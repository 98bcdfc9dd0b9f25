//! One read of a backfill: a watch from the oldest requested version, and before it a list of that
//! state if a request needs it.

use std::{collections::HashSet, sync::Arc, time::Duration};

use kubefan_cache::{
    Backfill, CacheWriter, EventRing, HistoryRecord, Refusal, RingLimits, SAME_VERSION_WAIT, Update, writer::Change,
};
use kubefan_common::planted::{self, Bug};
use kubefan_fanout::{CachePosition, Continuation, Served};
use kubefan_model::{
    ResourceVersion,
    event::{EventType, WatchEvent},
};
use kubefan_telemetry::metrics::WatchPurpose;
use kubefan_upstream::{
    Source, UpstreamError,
    identity::IdentityError,
    reflector::{ReflectorError, ReflectorEvent},
};
use tokio::time::{sleep, timeout};

use super::read_range::ReadRange;
use crate::{list_scheduler::ListPriority, upstream_context::CacheContext};

/// The time limit of a backfill: its wait, and all its reads upstream.
pub(super) const BACKFILL_TIMEOUT: Duration = Duration::from_secs(30);
/// The size limits of one backfill. A larger one would cost more to send than a snapshot. A budget
/// of the process limits all stored backfills.
const LIMITS: RingLimits = RingLimits {
    ring_bytes_max: Some(64 << 20),
    ring_events_max: 100_000,
    ring_age_max: Duration::MAX,
    conflated_bytes_max: Some(0),
};

/// The part of history that upstream no longer has, at this version and any older one.
pub(super) enum UpstreamExpired {
    Events(ResourceVersion),
    State(ResourceVersion),
}

/// The reason why a read failed.
pub(super) enum ReadError {
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

/// A read for one cache.
pub(super) struct UpstreamRead<'a> {
    pub(super) context: &'a CacheContext,
    pub(super) served: &'a Served,
}

impl UpstreamRead<'_> {
    /// Reads a backfill, and confirms that upstream is still the cluster of this cache.
    pub(super) async fn confirmed(&self, range: ReadRange) -> Result<Backfill, ReadError> {
        if range.with_state && self.context.source.is_fallen_back() {
            // Each kubefan behind the one that is away would cost the apiserver a list.
            return Err(ReadError::Expired { expired: UpstreamExpired::State(range.from), oldest: None });
        }
        let source = self.context.source.current();
        let unconfirmed = |error: IdentityError| Refusal::Unavailable(error.to_string());
        source.confirm_if_doubted().await.map_err(unconfirmed)?;
        let backfill = self.read(&source, range).await?;
        source.confirm().await.map_err(unconfirmed)?;
        Ok(backfill)
    }

    async fn read(&self, source: &Source, range: ReadRange) -> Result<Backfill, ReadError> {
        let ReadRange { from, to, with_state } = range;
        let Served { gvr, hub, .. } = self.served;
        let CachePosition { epoch, store, .. } = hub.position().ok_or_else(|| unsynced(self.served))?;
        let mut permit = None;
        if with_state {
            permit = Some(self.context.lists.acquire(ListPriority::Backfill).await);
        }
        let reflector = self.context.reflector_for(source, self.served, WatchPurpose::Backfill);
        // Upstream sends whole versions. Events up to `from` are read only for the state.
        let start = from.read_from();
        let mut reflector = reflector.for_backfill(start, with_state);
        let mut writer = CacheWriter::sharing(store);
        let mut ring = EventRing::alone(LIMITS, from);
        let mut reached = start;
        // The objects with an event of the last version: a new watch sends it once more.
        let mut keys_at_last_version = HashSet::new();
        // Whether the version at which the cache was listed is reached: upstream may send more
        // events of it.
        let mut awaits_rest_of_version = false;
        // Whether the open watch has delivered the version that is reached.
        let mut is_delivered_by_watch = false;
        let mut share = hub.budgets().backfills.share();
        let end = loop {
            let may_be_complete = awaits_rest_of_version && is_delivered_by_watch;
            let wait = if may_be_complete { SAME_VERSION_WAIT } else { BACKFILL_TIMEOUT };
            let step = match timeout(wait, reflector.step()).await {
                // A watch that breaks or ends here may have delivered a part of the version.
                Err(_) if may_be_complete => break reached.end(),
                Err(_) => return Err(no_backfill(self.served, from).into()),
                Ok(Err(error)) if reflector.is_within_list() => {
                    sleep(error.page_retry_delay()).await;
                    continue;
                }
                Ok(step) => step.map_err(|error| read_error(from, &error))?,
            };
            let (update, received) = match step {
                ReflectorEvent::Update { update, received } => (update, received),
                ReflectorEvent::Ended { .. } => {
                    is_delivered_by_watch = false;
                    continue;
                }
                ReflectorEvent::Watching { .. } | ReflectorEvent::Proved { .. } => continue,
            };
            if let Update::Event(_, object) = &update {
                is_delivered_by_watch = true;
                if !object.version().is_at(reached) {
                    keys_at_last_version.clear();
                }
                if !keys_at_last_version.insert(object.key().clone()) {
                    continue;
                }
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
                let Continuation { can_resume, can_resume_after, head } =
                    hub.continues_from(epoch, at).ok_or_else(another)?;
                // The cache has not received this event yet. Everything up to the cache's version
                // was read, so the backfill is complete.
                if at > head {
                    break head;
                }
                if let Some(record) = record(&mut writer, update, at, with_state)?
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
                let is_requested = at >= to || to.is_end() && to.is_at(at);
                if is_requested && can_resume {
                    break at;
                }
                awaits_rest_of_version = is_requested && can_resume_after;
                continue;
            }
            if let Update::ListEnd(version) = update {
                drop(permit.take());
                if !version.is_at(start) {
                    let message =
                        format!("upstream answered a list at version {start} with the state at version {version}");
                    return Err(Refusal::Unavailable(message).into());
                }
            }
            writer.apply(update).map_err(|error| Refusal::Unavailable(error.to_string()))?;
        };
        Ok(Backfill { epoch, ring, reached: end, has_state: with_state, share })
    }
}

/// Refuses a version from which no backfill could be read.
pub(super) fn no_backfill(served: &Served, version: ResourceVersion) -> Refusal {
    Refusal::Unavailable(format!("no backfill of {} from version {}", served.gvr, version.whole()))
}

/// Refuses reads of a cache without a state.
pub(super) fn unsynced(served: &Served) -> Refusal {
    Refusal::Unavailable(format!("{} is not synced", served.gvr))
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

/// Returns the history record of an update. `None` for an update without an event.
///
/// Without state, the event's type says whether there was a previous object, but not its content.
/// The new object stands in for it, because requests without state do not look at the previous
/// object.
fn record(
    writer: &mut CacheWriter,
    update: Update,
    at: ResourceVersion,
    has_state: bool,
) -> Result<Option<HistoryRecord>, Refusal> {
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
    Ok(Some(HistoryRecord::Event(Arc::new(WatchEvent::new(kind, at, object, previous)))))
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
