//! The state of an informer between two steps of its reflector.
//!
//! The reflector decides which request comes next. The informer decides the needs of that request:
//! a permit of the scheduler, a check of the cluster, a planned relist beside the watch. Each of
//! these depends on earlier events, and a forgotten flag is a list without a permit, or an update
//! of another cluster in the cache. So all of it is one value, and [`InformerState::after`] is the
//! only function that changes it. It does no I/O.
//!
//! | state | the informer |
//! |---|---|
//! | `Starting` | may ask peers for their state |
//! | `CheckDue` | checks the cluster until it is confirmed |
//! | `ListDue` | waits for a permit, and lets the reflector request a list or a page of it |
//! | `Delivering` | applies updates that have arrived, of a list or a watch, or reads the rest of a list |
//! | `WatchDue` | lets the reflector open a watch |
//! | `Watching` | reads the watch; a proof may advance the cache, and a planned relist may begin |
//! | `Rereading` | the same, and reads a list for the new schema beside the watch |

use kubefan_cache::{RelistReason, Update};
use kubefan_common::planted::{self, Bug};
use kubefan_model::ResourceVersion;
use kubefan_upstream::reflector::NextStep;
use tokio::time::Instant;

/// The state of an informer between two steps of its reflector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InformerState {
    /// No request was made yet. With `asks_peers`, a peer is asked for its state first.
    Starting { asks_peers: bool },
    /// The last check of the cluster failed. The next check comes before any request, and
    /// everything received since the last commit is discarded.
    CheckDue { denied_since: Option<Instant> },
    /// The next step requests a list, or a page of one.
    ListDue(List, Answers),
    /// The next step returns an update that has arrived, of a list or a watch, or reads a list.
    Delivering(List, Answers),
    /// Everything up to a version was received. The next step opens a watch from there.
    WatchDue(Answers),
    /// A watch is open.
    Watching(Answers),
    /// A watch is open, and the objects are listed again beside it.
    Rereading(List, Answers),
}

/// A list, from the wait for its permit to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct List {
    /// `None` before upstream answers. If a list fails, its begin stays until the next one.
    pub(super) begin: Option<ListBegin>,
    /// Time at which the list was given its permit, or last received something. `None` without a
    /// permit.
    pub(super) progress: Option<Instant>,
}

/// The begin of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ListBegin {
    pub(super) reason: RelistReason,
    pub(super) requested_at: Instant,
}

/// The conclusions from upstream's answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Answers {
    /// Whether they come from the cluster of the cache. If not, a connection may have broken or
    /// changed, and the next update counts once the cluster is confirmed.
    pub(super) is_confirmed: bool,
    /// Time since which upstream denies the resource. `None` if the last failure was another one,
    /// or if a watch was opened since.
    pub(super) denied_since: Option<Instant>,
}

/// An event that changes the state of an informer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event {
    /// The informer has started: with the state of a peer, or without a state.
    Started,
    /// A list was given a permit, also one that was planned beside a watch.
    PermitAcquired(Instant),
    /// A list has received nothing for too long, so its permit is returned. The request continues.
    Stalled,
    /// A check has confirmed the cluster.
    Confirmed,
    /// A check failed, and everything received since the last commit is discarded. With
    /// `checks_first`, the next check does not wait for an answer to a request.
    Unconfirmed { checks_first: bool },
    /// A list has begun.
    ListBegun { begin: ListBegin, at: Instant },
    /// An object of a list was received.
    ItemReceived(Instant),
    /// A list is complete and applied.
    ListEnded,
    /// Another update, or a proof.
    Updated,
    /// A watch was opened, or a watch-list has sent all objects.
    WatchOpened,
    /// A watch has ended without a failure.
    WatchEnded,
    /// A step failed. `denied_at` is the time if upstream denies the resource.
    Failed { denied_at: Option<Instant> },
    /// The known state is useless, or may not be kept. A wait and a list follow.
    Relisted,
}

/// The state that is left after a failed check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Discard {
    /// The state at this version. The watch continues from there.
    Resume(ResourceVersion),
    /// The state at this version, and the list for the schema has to be planned again.
    ResumeAndReread(ResourceVersion),
    /// No state. A list follows.
    Relist(RelistReason),
}

impl InformerState {
    /// Returns the state after an event. `next` is the reflector's next step then.
    pub(super) fn after(self, event: Event, next: NextStep) -> Self {
        let list = self.list();
        let answers = self.answers();
        match event {
            Event::Started | Event::Updated => Self::before(next, list, answers),
            Event::PermitAcquired(at) => Self::before(next, List { progress: Some(at), ..list }, answers),
            Event::Stalled => Self::before(next, List { progress: None, ..list }, answers),
            Event::Confirmed => {
                let answers = Answers { is_confirmed: true, ..answers };
                match self {
                    Self::Starting { .. } | Self::CheckDue { .. } => Self::before(next, list, answers),
                    // The checked update is not applied yet.
                    Self::ListDue(..) => Self::ListDue(list, answers),
                    Self::Delivering(..) => Self::Delivering(list, answers),
                    Self::WatchDue(_) => Self::WatchDue(answers),
                    Self::Watching(_) => Self::Watching(answers),
                    Self::Rereading(..) => Self::Rereading(list, answers),
                }
            }
            Event::Unconfirmed { checks_first: true } => Self::CheckDue { denied_since: answers.denied_since },
            Event::Unconfirmed { checks_first: false } => {
                Self::before(next, List::default(), Answers { is_confirmed: false, ..answers })
            }
            Event::ListBegun { begin, at } => Self::before(next, list.received(at).begun(begin), answers),
            Event::ItemReceived(at) => Self::before(next, list.received(at), answers),
            Event::ListEnded => Self::before(next, List::default(), answers),
            Event::WatchOpened => {
                // A new request may use another connection than the list. A watch-list is the same
                // request, and its end is confirmed.
                let is_confirmed = answers.is_confirmed && next != NextStep::ReadWatch;
                Self::before(next, list, Answers { is_confirmed, denied_since: None })
            }
            Event::WatchEnded => {
                Self::before(next, list.if_requested(next), Answers { is_confirmed: false, ..answers })
            }
            Event::Failed { denied_at } => {
                let denied_since = denied_at.map(|at| answers.denied_since.unwrap_or(at));
                let answers = Answers { is_confirmed: false, denied_since };
                Self::before(next, list.if_requested(next).during_wait(), answers)
            }
            Event::Relisted => Self::before(next, List { begin: None, ..list }.during_wait(), answers),
        }
    }

    /// Returns the state before this step.
    fn before(next: NextStep, list: List, answers: Answers) -> Self {
        match next {
            NextStep::RequestList => Self::ListDue(list, answers),
            NextStep::ReturnUpdate | NextStep::ReadList => Self::Delivering(list, answers),
            NextStep::OpenWatch => Self::WatchDue(answers),
            NextStep::ReadWatch if list.begin.is_some() => Self::Rereading(list, answers),
            NextStep::ReadWatch => Self::Watching(answers),
        }
    }

    fn list(self) -> List {
        match self {
            Self::ListDue(list, _) | Self::Delivering(list, _) | Self::Rereading(list, _) => list,
            Self::Starting { .. } | Self::CheckDue { .. } | Self::WatchDue(_) | Self::Watching(_) => List::default(),
        }
    }

    fn answers(self) -> Answers {
        match self {
            Self::Starting { .. } => Answers::default(),
            Self::CheckDue { denied_since } => Answers { is_confirmed: false, denied_since },
            Self::ListDue(_, answers)
            | Self::Delivering(_, answers)
            | Self::WatchDue(answers)
            | Self::Watching(answers)
            | Self::Rereading(_, answers) => answers,
        }
    }

    /// Returns reason and time of the list in progress, or of the list that has just failed.
    pub(super) fn list_begin(self) -> Option<ListBegin> {
        self.list().begin
    }

    /// Returns the time at which the list with a permit was given it, or last received something.
    pub(super) fn list_progress(self) -> Option<Instant> {
        self.list().progress
    }

    /// Whether the next step needs a permit of the scheduler first.
    pub(super) fn needs_permit(self) -> bool {
        matches!(self, Self::ListDue(List { progress: None, .. }, _))
    }

    /// Whether a watch is open and the next step reads from it.
    pub(super) fn has_watch(self) -> bool {
        matches!(self, Self::Watching(_) | Self::Rereading(..))
    }

    /// Whether the cluster must be confirmed before the next step. `is_doubted` if it answered for
    /// another cluster when it was last asked for any cache.
    pub(super) fn checks_first(self, is_doubted: bool) -> bool {
        match self {
            Self::CheckDue { .. } => true,
            Self::Watching(_) | Self::Rereading(..) => false,
            Self::Starting { .. } | Self::ListDue(..) | Self::Delivering(..) | Self::WatchDue(_) => is_doubted,
        }
    }

    /// Whether updates count without another check.
    pub(super) fn is_confirmed(self) -> bool {
        self.answers().is_confirmed
    }

    /// Whether the cluster must be confirmed before an update is applied. Pages may come over
    /// several connections, so the end of a list is always confirmed, and with it the objects.
    pub(super) fn must_confirm(self, update: &Update) -> bool {
        match update {
            Update::ListItem(_) => false,
            Update::ListEnd(_) => true,
            _ => !self.is_confirmed(),
        }
    }

    /// Returns the time since which upstream denies the resource.
    pub(super) fn denied_since(self) -> Option<Instant> {
        self.answers().denied_since
    }

    /// Whether a list for the schema is given up if `next` is the step that follows.
    pub(super) fn gives_up_reread(self, next: NextStep) -> bool {
        let list = self.list();
        let is_reread = |begin: ListBegin| begin.reason == RelistReason::SchemaChanged;
        list.begin.is_some_and(is_reread) && list.if_requested(next).begin.is_none()
    }

    /// Decides which state is left after a failed check. `begins` is the reason of a list whose
    /// begin is discarded. `version` is the version of the cache.
    pub(super) fn discard(self, begins: Option<RelistReason>, version: Option<ResourceVersion>) -> Discard {
        match (begins.or(self.list().begin.map(|begin| begin.reason)), version) {
            (None, Some(version)) => Discard::Resume(version),
            (Some(RelistReason::SchemaChanged), Some(version)) => Discard::ResumeAndReread(version),
            (reason, _) => Discard::Relist(reason.unwrap_or(RelistReason::Initial)),
        }
    }
}

impl List {
    fn begun(self, begin: ListBegin) -> Self {
        Self { begin: Some(begin), ..self }
    }

    fn received(self, at: Instant) -> Self {
        Self { progress: self.progress.map(|_| at), ..self }
    }

    /// Returns this list if the next step requests it again. Otherwise it has ended.
    fn if_requested(self, next: NextStep) -> Self {
        if next == NextStep::RequestList { self } else { Self::default() }
    }

    /// Returns the list during the wait after a failure, in which other caches may list.
    fn during_wait(self) -> Self {
        if planted::is(Bug::BackoffKeepsThePermit) { self } else { Self { progress: None, ..self } }
    }
}

#[cfg(test)]
mod tests;
