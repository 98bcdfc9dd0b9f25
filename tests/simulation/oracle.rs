//! The judge: walks a subscriber's history beside the truth, and names the guarantee of docs/architecture.md that it breaks.
//!
//! Where a subscriber stands is an epoch of the truth and a version. After a restore from a backup versions mean two things, and what
//! the subscriber is told must fit one of them: each possibility is a stand, and those that do not fit are dropped. Outside marked
//! spans every event must be the truth's next; inside only the end counts, and that each key comes once.

mod exact;
mod span;

use std::fmt;

use super::{
    history::{Encoding, Entry, History, Spec, Told, What},
    truth::{Epoch, Truth},
};

/// What is promised, by etcd's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Guarantee {
    /// Versions never go back.
    Ordered,
    /// No event twice.
    Unique,
    /// No gap, no ghost, no other bytes.
    Reliable,
    /// One version is never split over two positions.
    Atomic,
    /// From any version given out, to the same events as an unbroken watch.
    Resumable,
    /// A bookmark says that nothing at or below it is still to come.
    Bookmarkable,
    /// Exactly the selector's enter, change and leave.
    Filtered,
    /// After a marked span, and once all is quiet, the state is the truth's.
    Convergent,
}

/// A guarantee that was broken.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) guarantee: Guarantee,
    pub(crate) text: String,
    /// Which entry of the history it is.
    pub(crate) entry: usize,
    /// It is not in what was told, but in what was not: more time might have helped.
    pub(crate) at_end: bool,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} violated: {}", self.guarantee, self.text)
    }
}

/// What kubefan may say where a stream ends. The resource is there and allowed in every world, and there are more places for snapshots than
/// subscribers: any other reason is made up.
const REASONS: [&str; 7] = [
    "DRAINING",
    "HISTORY_REWRITTEN",
    "NOT_SYNCED",
    "RESOURCE_VERSION_TOO_LARGE",
    "RESOURCE_VERSION_TOO_OLD",
    "SNAPSHOT_STALLED",
    "UPSTREAM_UNAVAILABLE",
];

/// A guarantee, and how it is broken.
type Broken = (Guarantee, String);

/// One possibility of where a subscriber stands: everything up to `at` was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stand {
    epoch: usize,
    at: u64,
    /// It came back with a version of a history that was undone, and the replica that it came to could not know: what it holds is from
    /// both histories. So it is with any client of a restored cluster.
    mixed: bool,
}

enum Phase {
    /// No stream.
    Closed,
    /// A stream that has said nothing yet.
    Opened { from: Option<u64> },
    /// The state, being received.
    Snapshot { version: u64, told: Vec<Told> },
    /// A gap or a catch-up.
    Span { told: Vec<Told> },
    /// Outside of marked spans.
    Exact,
}

/// How a resumed stream has begun. Events that were read again from upstream end with a bookmark, and a catch-up may follow right there,
/// whatever is to happen on lag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Youth {
    /// With events, or with nothing yet.
    Events,
    /// With events, and then a bookmark.
    Bookmark,
    Over,
}

struct Walk<'a> {
    truth: &'a Truth,
    spec: &'a Spec,
    stands: Vec<Stand>,
    phase: Phase,
    /// The last version that may be resumed from.
    resume: Option<u64>,
    /// Time may not go back behind this.
    floor: Option<u64>,
    /// What has come since it resumed: it may still be being led to where the replica goes on by itself.
    youth: Youth,
}

/// Judges one history. `ended`: the world was healed and had time, so the subscriber must have everything.
pub(crate) fn judge(truth: &Truth, history: &History, ended: bool) -> Result<(), Violation> {
    let stands = Vec::new();
    let mut walk = Walk {
        truth,
        spec: &history.spec,
        stands,
        phase: Phase::Closed,
        resume: None,
        floor: None,
        youth: Youth::Over,
    };
    let violation = |(guarantee, text): Broken, entry, at_end| {
        let text = format!("{} {text}", history.spec);
        Violation { guarantee, text, entry, at_end }
    };
    for (i, entry) in history.entries.iter().enumerate() {
        walk.step(entry).map_err(|broken| violation(broken, i, false))?;
    }
    match ended {
        true => walk.end().map_err(|broken| violation(broken, history.entries.len().saturating_sub(1), true)),
        false => Ok(()),
    }
}

impl Walk<'_> {
    fn epoch(&self, stand: Stand) -> &Epoch {
        &self.truth.epochs[stand.epoch]
    }

    /// How far the cluster had come when this was told: an epoch that had not begun is no further than the one of then.
    fn reached(&self, epoch: usize, entry: &Entry) -> u64 {
        if epoch >= entry.epoch { entry.revision } else { self.truth.epochs[epoch].revision }
    }

    /// The first version after a stand that the subscriber has to be told of.
    fn next_after(&self, stand: Stand) -> Option<u64> {
        let epoch = self.epoch(stand);
        let rest = &epoch.writes[epoch.after(stand.at)..];
        rest.iter().find(|write| write.seen_by(self.spec.selection).is_some()).map(|write| write.version)
    }

    fn canonical(&self) -> bool {
        self.spec.encoding == Encoding::Deltas
    }

    /// The stands, and those of later epochs that are the same: from before a restore to a later version.
    fn possible(&self) -> Vec<Stand> {
        let mut all = self.stands.clone();
        for stand in &self.stands {
            for epoch in stand.epoch + 1..self.truth.epochs.len() {
                if self.truth.epochs[epoch].base < stand.at {
                    break;
                }
                if all.iter().all(|other| other.epoch != epoch) {
                    all.push(Stand { epoch, ..*stand });
                }
            }
        }
        all
    }

    /// Keeps the stands that an observation fits, as it moves them; broken where it fits none, and told as it is from where the subscriber
    /// was known to stand.
    fn keep(&mut self, fits: impl Fn(&Self, Stand) -> Result<Stand, Broken>) -> Result<(), Broken> {
        let (mut kept, mut why) = (Vec::new(), None);
        for stand in self.possible() {
            match fits(self, stand) {
                Ok(stand) => kept.push(stand),
                Err(broken) => why = why.or(Some(broken)),
            }
        }
        self.stands = kept;
        let without_state = || (Guarantee::Reliable, "was told something without a state to start from".to_owned());
        if self.stands.is_empty() { Err(why.unwrap_or_else(without_state)) } else { Ok(()) }
    }

    fn step(&mut self, entry: &Entry) -> Result<(), Broken> {
        let in_span = matches!(self.phase, Phase::Snapshot { .. } | Phase::Span { .. });
        match &entry.what {
            What::Opened { from, .. } => return self.opened(*from),
            What::Ended { code, reason, message } => return self.ended(code, reason, message),
            What::Undecodable(why) => {
                self.phase = Phase::Closed;
                return self.keep(|_, stand| match stand.mixed {
                    // It said that it had kept the state, and was wrong about it.
                    true => Ok(stand),
                    false => Err((Guarantee::Reliable, format!("was sent what cannot be decoded: {why}"))),
                });
            }
            What::StartsOver { goes_on } => {
                self.resume = None;
                self.stands.clear();
                self.floor = self.floor.filter(|_| *goes_on);
                return Ok(());
            }
            What::SnapshotBegin { version, restarted_from } => self.snapshot_begin(*version, *restarted_from, entry)?,
            What::GapBegin { from, .. } => self.span_begin(*from, false)?,
            What::CatchUpBegin { from } => self.span_begin(*from, true)?,
            What::Event(told) => match &mut self.phase {
                Phase::Snapshot { told: all, .. } | Phase::Span { told: all, .. } => all.push(told.clone()),
                _ => self.exact_event(told, entry.resume)?,
            },
            What::SnapshotEnd { objects } => self.snapshot_end(*objects, entry)?,
            What::GapEnd => self.span_end(false, entry)?,
            What::CatchUpEnd => self.span_end(true, entry)?,
            What::Bookmark => {
                if in_span {
                    return Err((Guarantee::Bookmarkable, "got a bookmark inside a marked span".to_owned()));
                }
                self.phase = Phase::Exact;
                if let Some(version) = entry.resume {
                    self.given(version, entry, Guarantee::Bookmarkable)?;
                }
            }
        }
        let begins =
            matches!(entry.what, What::SnapshotBegin { .. } | What::GapBegin { .. } | What::CatchUpBegin { .. });
        if let Some(version) =
            entry.resume.filter(|_| begins || matches!(self.phase, Phase::Snapshot { .. } | Phase::Span { .. }))
        {
            return Err((Guarantee::Atomic, format!("got resume version {version} inside a marked span")));
        }
        self.youth = match (self.youth, &entry.what) {
            (Youth::Events, What::Event(_)) => Youth::Events,
            (Youth::Events, What::Bookmark) => Youth::Bookmark,
            _ => Youth::Over,
        };
        if entry.resume.is_some() {
            self.resume = entry.resume;
            self.floor = entry.resume;
        }
        Ok(())
    }

    /// A version was given out as one to resume from: nothing at or below it may still be to come.
    fn given(&mut self, version: u64, entry: &Entry, guarantee: Guarantee) -> Result<(), Broken> {
        self.keep(|walk, stand| {
            if version < stand.at {
                return Err((
                    Guarantee::Ordered,
                    format!("was given version {version} to resume from, after {}", stand.at),
                ));
            }
            let revision = walk.reached(stand.epoch, entry);
            if version > revision {
                return Err((
                    guarantee,
                    format!("was given version {version}, and the cluster had only reached {revision}"),
                ));
            }
            match walk.next_after(stand) {
                Some(next) if next <= version => {
                    Err((guarantee, format!("was given version {version}, and the event at {next} is still to come")))
                }
                _ => Ok(Stand { at: version, ..stand }),
            }
        })
    }

    fn opened(&mut self, from: Option<u64>) -> Result<(), Broken> {
        if from != self.resume {
            let resume = self.resume;
            return Err((
                Guarantee::Resumable,
                format!("asked from {from:?} and had been given {resume:?}: the client's fault"),
            ));
        }
        let first = self.stands.iter().map(|stand| stand.epoch).min().unwrap_or(0);
        self.stands = match from {
            None => Vec::new(),
            // A version is only a number: a replica that has seen a restore since then cannot tell that it is from before.
            Some(at) => {
                let stood = |epoch| self.stands.iter().any(|stand| stand.epoch == epoch && !stand.mixed);
                let stand = |epoch| Stand { epoch, at, mixed: !stood(epoch) && at > self.truth.epochs[epoch].base };
                (first..self.truth.epochs.len()).map(stand).collect()
            }
        };
        self.phase = Phase::Opened { from };
        self.youth = if from.is_some() { Youth::Events } else { Youth::Over };
        Ok(())
    }

    fn ended(&mut self, code: &str, reason: &str, message: &str) -> Result<(), Broken> {
        self.phase = Phase::Closed;
        match reason {
            // The network's, or a clean end.
            "" => {}
            _ if !REASONS.contains(&reason) => {
                let text = format!("was ended with {code} ({reason}), for which there is no reason here: {message}");
                return Err((Guarantee::Resumable, text));
            }
            "HISTORY_REWRITTEN" => self.floor = None,
            "RESOURCE_VERSION_TOO_OLD" => {
                if self.spec.restarts {
                    return Err((Guarantee::Resumable, format!("asked for RESTART, and got an end: {message}")));
                }
                let numbers = message.rsplit_once(": ").and_then(|(_, numbers)| numbers.split_once(' '));
                let numbers = numbers.and_then(|(asked, oldest)| {
                    Some((asked.parse::<u64>().ok()?, oldest.trim_matches(['(', ')']).parse::<u64>().ok()?))
                });
                // What it says it stood at may be beyond the last version that was given out, never behind it.
                if !numbers.is_some_and(|(asked, oldest)| asked < oldest && self.resume.is_none_or(|at| at <= asked)) {
                    let resume = self.resume;
                    return Err((
                        Guarantee::Resumable,
                        format!("had been given {resume:?}, and was refused: {message}"),
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Once all is quiet: nothing is left to be told.
    fn end(&self) -> Result<(), Broken> {
        let last = self.truth.epochs.len() - 1;
        let mut why = format!("is not in the cluster's history of now (its stands: {:?})", self.stands);
        for stand in self.possible().into_iter().filter(|stand| stand.epoch == last) {
            match self.next_after(stand) {
                None if !matches!(self.phase, Phase::Snapshot { .. } | Phase::Span { .. }) => return Ok(()),
                None => why = "is inside a marked span".to_owned(),
                Some(next) => why = format!("stands at {} and was not told of the event at {next}", stand.at),
            }
        }
        Err((Guarantee::Convergent, format!("{why}, although all is quiet")))
    }
}
