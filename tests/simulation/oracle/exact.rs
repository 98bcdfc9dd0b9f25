//! Outside of marked spans: each event must be the next event of an unbroken watch of the truth.

use super::{Breach, Guarantee, Phase, Position, Walk, latest_place};
use crate::{
    history::{Entry, ReceivedEvent},
    truth::{Write, version_of},
};

impl Walk<'_> {
    pub(super) fn exact_event(&mut self, received: &ReceivedEvent, resume: Option<u64>) -> Result<(), Breach> {
        match self.phase {
            Phase::Opened { from: None } | Phase::Closed => {
                return Err((
                    Guarantee::Reliable,
                    format!("got {} at {} without a snapshot", received.key, received.version),
                ));
            }
            _ => self.phase = Phase::Exact,
        }
        self.retain_fitting(|walk, position| walk.check_next(position, received))?;
        let Some(resume) = resume else { return Ok(()) };
        if self.is_http() {
            // It does not say that its version has no other event.
            if version_of(resume) == received.version {
                return Ok(());
            }
            let text = format!("got resume version {} with the event at {}", version_of(resume), received.version);
            return Err((Guarantee::Resumable, text));
        }
        self.retain_fitting(|walk, position| match walk.next_after(position) {
            _ if resume < position.at => {
                Err((Guarantee::Ordered, format!("got resume version {resume} with the event at {}", position.at)))
            }
            Some(next) if next <= resume => Err((
                Guarantee::Resumable,
                format!(
                    "got resume version {resume} with the event at {}, before the event at {next}",
                    received.version
                ),
            )),
            _ => Ok(Position { at: resume, ..position }),
        })
    }

    /// The position after an event, if the event is the right one.
    fn check_next(&self, position: Position, received: &ReceivedEvent) -> Result<Position, Breach> {
        let ReceivedEvent { kind, key, uid, version, bytes, .. } = received;
        let name = format!("{kind:?} {key} at {version}");
        let epoch = self.epoch(position);
        let expected = self.next_after(position);
        let of_version = epoch.writes_of(*version);
        let Some(write) = of_version.iter().find(|write| write.key() == key) else {
            let other = of_version.first().map(Write::key);
            return Err(match other {
                Some(other) if *version <= version_of(position.at) => {
                    (Guarantee::Atomic, format!("got {name} after {other} at the same version"))
                }
                Some(other) => (Guarantee::Reliable, format!("got {name}, and {other} was written at that version")),
                None if *version <= version_of(position.at) => {
                    (Guarantee::Ordered, format!("got {name}, after version {}", version_of(position.at)))
                }
                None => (Guarantee::Reliable, format!("got {name}, and nothing happened at that version")),
            });
        };
        if write.place <= position.at {
            return Err(match self.event(write) {
                Some(_) => (Guarantee::Unique, format!("got {name} a second time")),
                None => (Guarantee::Ordered, format!("got {name}, after version {}", version_of(position.at))),
            });
        }
        if let Some(missed) = expected.filter(|expected| *expected < write.place) {
            let missed = version_of(missed);
            return Err((Guarantee::Reliable, format!("got {name} without the event at {missed}")));
        }
        // With another schema the projection of any change is another one.
        let event = self.event(write).or_else(|| write.seen_by(self.spec.selection).filter(|_| self.truth.schemas > 1));
        let Some((right, object)) = event else {
            return Err((Guarantee::Filtered, format!("got {name}, and its selector has no event at that version")));
        };
        if !self.is_kind(*kind, right) {
            return Err((Guarantee::Filtered, format!("got {name}, which is {right:?} for its selector")));
        }
        if object.uid != *uid {
            return Err((Guarantee::Reliable, format!("got {name} with uid {uid}, and it was {}", object.uid)));
        }
        if !self.has_bytes(object, *version, bytes) {
            let right = object.bytes_at(*version, false);
            let right = String::from_utf8_lossy(&right);
            let bytes = String::from_utf8_lossy(bytes);
            return Err((Guarantee::Reliable, format!("got {name} as\n    {bytes}\n  and it was\n    {right}")));
        }
        Ok(Position { at: write.place, ..position })
    }

    pub(super) fn snapshot_begin(
        &mut self,
        version: u64,
        restarted_from: Option<u64>,
        entry: &Entry,
    ) -> Result<(), Breach> {
        let resumable = |text: String| Err((Guarantee::Resumable, text));
        // The version may go back if a restore undid its history since.
        let known = self.positions.iter().map(|position| position.epoch).min().unwrap_or(0);
        let is_undone = |version: u64| {
            self.truth.epochs.iter().take(entry.epoch + 1).skip(known + 1).any(|epoch| epoch.base < version)
        };
        // A replica that has all events of a version need not know it.
        let is_before = |other: u64| version_of(version) < version_of(other);
        if restarted_from.is_some_and(|restarted| is_before(restarted) && is_undone(restarted)) {
            self.floor = None;
        }
        match (&self.phase, restarted_from) {
            (Phase::Opened { from: None }, None) => {}
            // This may also happen inside a span: the snapshot replaces the messages of the span.
            (Phase::Opened { from: Some(_) } | Phase::Exact | Phase::Span { .. }, Some(restarted)) => {
                if !self.spec.restarts {
                    return resumable(format!("was restarted from {restarted}, and had asked for FAIL"));
                }
                if is_before(restarted) && !is_undone(restarted)
                    || self.resume.is_some_and(|resume| latest_place(restarted) < resume)
                {
                    let text =
                        format!("was restarted from {restarted} with a snapshot at {version}, after {:?}", self.resume);
                    return Err((Guarantee::Ordered, text));
                }
            }
            (Phase::Opened { from: Some(from) }, None) => {
                return resumable(format!("resumed from {from}, and got a snapshot without restarted_from"));
            }
            _ => return resumable(format!("got an unexpected snapshot at {version}")),
        }
        if let Some(restarted) = restarted_from {
            self.check_need("a snapshot", restarted, entry.at)?;
        }
        if let Some(floor) = self.floor.filter(|floor| is_before(*floor)) {
            return Err((Guarantee::Ordered, format!("got a snapshot at {version}, after version {floor}")));
        }
        self.phase = Phase::Snapshot { version, received: Vec::new() };
        Ok(())
    }

    pub(super) fn snapshot_end(&mut self, objects: i64, entry: &Entry) -> Result<(), Breach> {
        let Phase::Snapshot { version, received } = std::mem::replace(&mut self.phase, Phase::Exact) else {
            return Err((Guarantee::Reliable, "got the end of a snapshot that had not started".to_owned()));
        };
        if objects != received.len() as i64 {
            let got = received.len();
            return Err((Guarantee::Reliable, format!("got {got} objects of a snapshot of {objects}")));
        }
        let Some(version) = entry.resume.filter(|resume| version_of(*resume) == version_of(version)) else {
            let resume = entry.resume;
            return Err((Guarantee::Resumable, format!("got a snapshot at {version} with resume version {resume:?}")));
        };
        // Every epoch that had reached the snapshot's version when the snapshot came is possible.
        let first = self.positions.iter().map(|position| position.epoch).min().unwrap_or(0);
        let reached = |epoch: &usize| *epoch <= entry.epoch && version <= self.reached(*epoch, entry);
        let epochs = (first..self.truth.epochs.len()).filter(reached);
        let places = |epoch| {
            let places = self.places_of(epoch, version);
            places.into_iter().map(move |at| Position { epoch, at, mixed: false })
        };
        self.positions = epochs.flat_map(places).collect();
        self.retain_fitting(|walk, position| walk.is_state(position, &received).map(|()| position))?;
        self.check_freshness(entry)
    }

    /// Checks that a snapshot equals the truth's state.
    fn is_state(&self, position: Position, received: &[ReceivedEvent]) -> Result<(), Breach> {
        let at = position.at;
        let state = self.epoch(position).at(at);
        let mut right = state.values().filter(|object| self.spec.selection.has(object));
        let mut received = received.iter();
        loop {
            let (received, right) = match (received.next(), right.next()) {
                (None, None) => return Ok(()),
                (Some(received), Some(right)) if received.key == right.key => (received, right),
                (Some(received), Some(right)) if received.key > right.key => {
                    return Err((Guarantee::Reliable, format!("got a snapshot at {at} without {}", right.key)));
                }
                (None, Some(right)) => {
                    return Err((Guarantee::Reliable, format!("got a snapshot at {at} without {}", right.key)));
                }
                (Some(received), _) => {
                    return Err(match state.get(&received.key) {
                        Some(object) if !self.spec.selection.has(object) => (
                            Guarantee::Filtered,
                            format!("got {} in a snapshot at {at}, which it does not select", received.key),
                        ),
                        Some(_) => {
                            (Guarantee::Ordered, format!("got {} out of order in a snapshot at {at}", received.key))
                        }
                        None => (Guarantee::Reliable, format!("got the ghost {} in a snapshot at {at}", received.key)),
                    });
                }
            };
            let fits = received.kind == super::super::truth::Kind::Added
                && received.uid == right.uid
                && received.version == right.version
                && self.has_bytes(right, right.version, &received.bytes);
            if !fits {
                let text = format!(
                    "got {} in a snapshot at {at} as it was at {}, not at {}",
                    received.key, received.version, right.version
                );
                return Err((Guarantee::Reliable, text));
            }
        }
    }
}
