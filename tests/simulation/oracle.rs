//! The oracle: compares a subscriber's history with the truth and names the guarantee of
//! docs/architecture.md that it breaks.
//!
//! A subscriber's position is an epoch of the truth and a version. After a restore from a backup
//! the same versions have two meanings, and the received events must fit one of them. The oracle
//! follows every possible position and drops those that do not fit. Outside of marked spans every
//! event must be the truth's next event. Inside a marked span only the end state counts, and each
//! key appears once.

mod exact;
mod form;
mod freshness;
mod informer;
mod needs;
mod span;

use std::{fmt, time::Duration};

pub(crate) use informer::judge_informer;
pub(crate) use needs::Facts;

use super::{
    history::{Encoding, Entry, Freshness, History, Interface, Observation, ReceivedEvent, Spec},
    truth::{Epoch, Truth, first_place, last_place, read_place, version_of},
};

/// The guarantees, by etcd's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Guarantee {
    /// Versions never decrease.
    Ordered,
    /// No event is sent twice.
    Unique,
    /// No event is missing, no object is a ghost, no bytes differ.
    Reliable,
    /// The events of one version come in the order of their places, without another version between
    /// them.
    Atomic,
    /// A resume from any resume version continues with the events of an unbroken watch.
    Resumable,
    /// After a bookmark, nothing at or below its version is still to come.
    Bookmarkable,
    /// Exactly the selector's enters, changes and leaves.
    Filtered,
    /// The state equals the truth after a marked span, and once every fault has healed.
    Convergent,
    /// The apiserver's cost stays bounded: it is not asked again before it wants to be.
    Bounded,
}

/// A guarantee that was broken.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) guarantee: Guarantee,
    pub(crate) text: String,
    /// The index of the history's entry that breaks it.
    pub(crate) entry: usize,
    /// The subscriber has not received something. More time might have helped.
    pub(crate) at_end: bool,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} violated: {}", self.guarantee, self.text)
    }
}

/// The reasons with which kubefan may end a stream here. The resource exists and may be read in
/// every simulated world. Any other reason is wrong.
const REASONS: [&str; 8] = [
    "DRAINING",
    "HISTORY_REWRITTEN",
    "LIMIT_REACHED",
    "NOT_SYNCED",
    "RESOURCE_VERSION_TOO_LARGE",
    "RESOURCE_VERSION_TOO_OLD",
    "SNAPSHOT_STALLED",
    "UPSTREAM_UNAVAILABLE",
];

/// A broken guarantee, and how it was broken.
type Breach = (Guarantee, String);

/// The last place that the start of a span or of a snapshot may mean: it names a version alone.
fn latest_place(named: u64) -> u64 {
    let version = version_of(named);
    if named == first_place(version) { last_place(version) } else { named }
}

/// One possible position of a subscriber: it has received everything up to the place `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    epoch: usize,
    at: u64,
    /// The subscriber resumed with a version of a history that a restore undid, and the replica
    /// could not know. Its state is a mix of both histories, as for any client of a restored
    /// cluster.
    mixed: bool,
}

enum Phase {
    /// There is no stream.
    Closed,
    /// A stream that has not sent anything yet.
    Opened { from: Option<u64> },
    /// A snapshot is being received.
    Snapshot { version: u64, received: Vec<ReceivedEvent> },
    /// A gap or a catch-up is being received.
    Span { received: Vec<ReceivedEvent> },
    /// Outside of marked spans.
    Exact,
}

/// Phase of a resumed stream. Backfilled events end with a bookmark, and a catch-up may follow
/// directly, with any `on_lag`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResumePhase {
    /// Only events, or nothing yet.
    Events,
    /// Events and then a bookmark.
    Bookmark,
    Over,
}

struct Walk<'a> {
    truth: &'a Truth,
    facts: &'a Facts,
    spec: &'a Spec,
    positions: Vec<Position>,
    phase: Phase,
    /// The last resume version.
    resume: Option<u64>,
    /// No later version may be lower than this one.
    floor: Option<u64>,
    /// While this is not `Over`, the replica may still be sending a backfill.
    resume_phase: ResumePhase,
    /// The last read over HTTP that asked for a state, with the epoch and the revision at which it
    /// was sent.
    asked: Option<(Freshness, usize, u64)>,
}

/// Judges one history. `ended`: every fault has healed and there was enough time, so the subscriber
/// must have received everything.
pub(crate) fn judge(truth: &Truth, facts: &Facts, history: &History, ended: bool) -> Result<(), Violation> {
    let positions = Vec::new();
    let mut walk = Walk {
        truth,
        facts,
        spec: &history.spec,
        positions,
        phase: Phase::Closed,
        resume: None,
        floor: None,
        resume_phase: ResumePhase::Over,
        asked: None,
    };
    let violation = |(guarantee, text): Breach, entry, at_end| {
        let text = format!("{} {text}", history.spec);
        Violation { guarantee, text, entry, at_end }
    };
    for (i, entry) in history.entries.iter().enumerate() {
        walk.step(entry).map_err(|broken| violation(broken, i, false))?;
    }
    if ended {
        walk.end().map_err(|broken| violation(broken, history.entries.len().saturating_sub(1), true))
    } else {
        Ok(())
    }
}

impl Walk<'_> {
    fn epoch(&self, position: Position) -> &Epoch {
        &self.truth.epochs[position.epoch]
    }

    fn is_http(&self) -> bool {
        matches!(self.spec.interface, Interface::Http(_))
    }

    /// The places that a stream may mean by a version. Over HTTP a version has no places: a stream
    /// resumes from behind the replica's part of it, as at the apiserver.
    fn places_of(&self, epoch: usize, named: u64) -> Vec<u64> {
        if !self.is_http() {
            return vec![named];
        }
        let writes = self.truth.epochs[epoch].writes_of(version_of(named));
        writes.iter().map(|write| write.place).chain([named]).collect()
    }

    /// The cluster's revision when this entry was recorded. An epoch that had not started then has
    /// not gone further than the epoch of that time.
    fn reached(&self, epoch: usize, entry: &Entry) -> u64 {
        if epoch >= entry.epoch { entry.revision } else { self.truth.epochs[epoch].revision }
    }

    /// The place of the next event that the subscriber must get after a position.
    fn next_after(&self, position: Position) -> Option<u64> {
        let epoch = self.epoch(position);
        let rest = &epoch.writes[epoch.after(position.at)..];
        rest.iter().find(|write| self.event(write).is_some()).map(|write| write.place)
    }

    /// All positions, and the positions of later epochs that are equal to them because the restore
    /// went back to a later version.
    fn possible_positions(&self) -> Vec<Position> {
        let mut all = self.positions.clone();
        for position in &self.positions {
            for epoch in position.epoch + 1..self.truth.epochs.len() {
                if self.truth.epochs[epoch].base < position.at {
                    break;
                }
                if all.iter().all(|other| other.epoch != epoch) {
                    all.push(Position { epoch, ..*position });
                }
            }
        }
        all
    }

    /// Keeps the positions that an observation fits, moved as it says. If none fits, the error is
    /// that of the first position, the one where the subscriber was known to be.
    fn retain_fitting(&mut self, fits: impl Fn(&Self, Position) -> Result<Position, Breach>) -> Result<(), Breach> {
        let mut kept = Vec::new();
        let mut why = None;
        for position in self.possible_positions() {
            match fits(self, position) {
                Ok(position) => kept.push(position),
                Err(broken) => why = why.or(Some(broken)),
            }
        }
        self.positions = kept;
        let without_state = || (Guarantee::Reliable, "got a message without a state to start from".to_owned());
        if self.positions.is_empty() { Err(why.unwrap_or_else(without_state)) } else { Ok(()) }
    }

    fn step(&mut self, entry: &Entry) -> Result<(), Breach> {
        let in_span = matches!(self.phase, Phase::Snapshot { .. } | Phase::Span { .. });
        match &entry.what {
            Observation::Asked(freshness) => {
                self.asked = Some((*freshness, entry.epoch, entry.revision));
                return Ok(());
            }
            Observation::Opened { from, .. } => return self.opened(*from),
            Observation::Ended { code, reason, message } => return self.ended(code, reason, message, entry.at),
            Observation::Undecodable(why) => {
                self.phase = Phase::Closed;
                // With another schema the replica may have other bytes at the client's version.
                let has_bases = self.spec.encoding == Encoding::Deltas;
                let other_bases = self.truth.schemas > 1;
                return self.retain_fitting(|_, position| {
                    // The client said that it had kept the state, which was not true after the
                    // restore.
                    if has_bases && (position.mixed || other_bases) {
                        return Ok(position);
                    }
                    Err((Guarantee::Reliable, format!("got a message that cannot be decoded: {why}")))
                });
            }
            Observation::StartsOver { goes_on } => {
                self.resume = None;
                self.positions.clear();
                self.floor = self.floor.filter(|_| *goes_on);
                return Ok(());
            }
            Observation::SnapshotBegin { version, restarted_from } => {
                self.snapshot_begin(*version, *restarted_from, entry)?
            }
            Observation::GapBegin { from, .. } => {
                self.check_need("a gap", *from, entry.at)?;
                self.span_begin(*from, false)?;
            }
            Observation::CatchUpBegin { from } => {
                self.check_need("a catch-up", *from, entry.at)?;
                self.span_begin(*from, true)?;
            }
            Observation::Event(received) => match &mut self.phase {
                Phase::Snapshot { received: all, .. } | Phase::Span { received: all, .. } => all.push(received.clone()),
                _ => self.exact_event(received, entry.resume)?,
            },
            Observation::SnapshotEnd { objects } => self.snapshot_end(*objects, entry)?,
            Observation::GapEnd => self.span_end(false, entry)?,
            Observation::CatchUpEnd => self.span_end(true, entry)?,
            Observation::Bookmark => {
                if in_span {
                    return Err((Guarantee::Bookmarkable, "got a bookmark inside a marked span".to_owned()));
                }
                self.phase = Phase::Exact;
                if let Some(version) = entry.resume {
                    self.check_resume_version(version, entry, Guarantee::Bookmarkable)?;
                }
            }
        }
        let begins = matches!(
            entry.what,
            Observation::SnapshotBegin { .. } | Observation::GapBegin { .. } | Observation::CatchUpBegin { .. }
        );
        if let Some(version) =
            entry.resume.filter(|_| begins || matches!(self.phase, Phase::Snapshot { .. } | Phase::Span { .. }))
        {
            return Err((Guarantee::Atomic, format!("got resume version {version} inside a marked span")));
        }
        self.resume_phase = match (self.resume_phase, &entry.what) {
            (ResumePhase::Events, Observation::Event(_)) => ResumePhase::Events,
            (ResumePhase::Events, Observation::Bookmark) => ResumePhase::Bookmark,
            _ => ResumePhase::Over,
        };
        if entry.resume.is_some() {
            self.resume = entry.resume;
            self.floor = entry.resume;
        }
        Ok(())
    }

    /// Checks a resume version: nothing at or below it may still be to come.
    fn check_resume_version(&mut self, version: u64, entry: &Entry, guarantee: Guarantee) -> Result<(), Breach> {
        self.retain_fitting(|walk, position| {
            if version < position.at {
                return Err((
                    Guarantee::Ordered,
                    format!("got resume version {version} after version {}", position.at),
                ));
            }
            let version = version.max(position.at);
            let revision = walk.reached(position.epoch, entry);
            if version > revision {
                return Err((
                    guarantee,
                    format!("got resume version {version}, and the cluster had only reached {revision}"),
                ));
            }
            match walk.next_after(position) {
                // Over HTTP it may be one between two events of its version.
                Some(next) if walk.is_http() && next > first_place(version_of(version)) && next <= version => {
                    Ok(position)
                }
                Some(next) if next <= version => {
                    Err((guarantee, format!("got resume version {version} before the event at {next}")))
                }
                _ => Ok(Position { at: version, ..position }),
            }
        })
    }

    fn opened(&mut self, from: Option<u64>) -> Result<(), Breach> {
        if from != self.resume {
            let resume = self.resume;
            return Err((
                Guarantee::Resumable,
                format!("resumed from {from:?} after resume version {resume:?}: a mistake of the client"),
            ));
        }
        let first = self.positions.iter().map(|position| position.epoch).min().unwrap_or(0);
        self.positions = match from {
            None => Vec::new(),
            // A version is only a number. A replica that saw a restore cannot tell that the version
            // is from before it. A replica that has not seen it yet continues the history that it
            // undid, if both have the version.
            Some(at) => {
                let is_shared = |epoch: &usize| at <= self.truth.epochs[epoch + 1].base;
                let oldest = (0..first).rev().take_while(is_shared).last().unwrap_or(first);
                let was_in = |epoch| self.positions.iter().any(|position| position.epoch == epoch && !position.mixed);
                let is_mixed = |epoch: usize| epoch >= first && !was_in(epoch) && at > self.truth.epochs[epoch].base;
                let position = |epoch, at| Position { epoch, at, mixed: is_mixed(epoch) };
                let places = |epoch| self.places_of(epoch, at).into_iter().map(move |at| position(epoch, at));
                (oldest..self.truth.epochs.len()).flat_map(places).collect()
            }
        };
        self.phase = Phase::Opened { from };
        self.resume_phase = if from.is_some() { ResumePhase::Events } else { ResumePhase::Over };
        Ok(())
    }

    fn ended(&mut self, code: &str, reason: &str, message: &str, now: Duration) -> Result<(), Breach> {
        self.phase = Phase::Closed;
        if matches!(self.spec.interface, Interface::Http(_)) {
            return self.http_ended(code, reason, message, now);
        }
        match reason {
            // The network broke the stream, or it ended cleanly.
            "" => {}
            _ if !REASONS.contains(&reason) => {
                let text = format!("ended with {code} ({reason}), which cannot happen here: {message}");
                return Err((Guarantee::Resumable, text));
            }
            "HISTORY_REWRITTEN" if self.truth.epochs.len() == 1 => {
                let text = format!("ended as of another history, and the cluster has only one: {message}");
                return Err((Guarantee::Resumable, text));
            }
            "HISTORY_REWRITTEN" => self.floor = None,
            "RESOURCE_VERSION_TOO_OLD" => {
                if self.spec.restarts {
                    return Err((Guarantee::Resumable, format!("asked for RESTART, and got an end: {message}")));
                }
                let numbers = message.rsplit_once(": ").and_then(|(_, numbers)| numbers.split_once(' '));
                let numbers = numbers.and_then(|(asked, oldest)| {
                    Some((version_of(read_place(asked)?), read_place(oldest.trim_matches(['(', ')']))?))
                });
                // The version in the message may be beyond the last resume version, but never below
                // it.
                let is_right = |(asked, oldest): (u64, u64)| {
                    first_place(asked) <= oldest && self.resume.is_none_or(|at| at <= last_place(asked))
                };
                if !numbers.is_some_and(is_right) {
                    let resume = self.resume;
                    return Err((
                        Guarantee::Resumable,
                        format!("got resume version {resume:?}, and was refused: {message}"),
                    ));
                }
                self.check_need("a refusal", self.resume.unwrap_or(0), now)?;
            }
            "LIMIT_REACHED" | "NOT_SYNCED" | "UPSTREAM_UNAVAILABLE" => self.check_refusal(reason, message, now)?,
            _ => {}
        }
        Ok(())
    }

    /// Checks that the subscriber has received everything, after every fault has healed.
    fn end(&self) -> Result<(), Breach> {
        let last = self.truth.epochs.len() - 1;
        let mut why = format!("is not in the cluster's current history (possible positions: {:?})", self.positions);
        for position in self.possible_positions().into_iter().filter(|position| position.epoch == last) {
            match self.next_after(position) {
                None if !matches!(self.phase, Phase::Snapshot { .. } | Phase::Span { .. }) => return Ok(()),
                None => why = "is inside a marked span".to_owned(),
                Some(next) => why = format!("is at {} and did not get the event at {next}", position.at),
            }
        }
        Err((Guarantee::Convergent, format!("{why}, although all faults have healed")))
    }
}
