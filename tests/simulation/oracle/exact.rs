//! Outside of marked spans: each event must be the next event of an unbroken watch of the truth.

use super::{Broken, Guarantee, Phase, Stand, Walk};
use crate::history::{Entry, Told};

impl Walk<'_> {
    pub(super) fn exact_event(&mut self, told: &Told, resume: Option<u64>) -> Result<(), Broken> {
        match self.phase {
            Phase::Opened { from: None } | Phase::Closed => {
                return Err((Guarantee::Reliable, format!("got {} at {} without a snapshot", told.key, told.version)));
            }
            _ => self.phase = Phase::Exact,
        }
        self.keep(|walk, stand| walk.next(stand, told))?;
        let Some(resume) = resume else { return Ok(()) };
        self.keep(|walk, stand| match walk.next_after(stand) {
            _ if resume < stand.at => Err((
                Guarantee::Ordered,
                format!("was given version {resume} to resume from, with the event at {}", stand.at),
            )),
            Some(next) if next <= resume => Err((
                Guarantee::Resumable,
                format!(
                    "was given version {resume} with the event at {}, and the one at {next} is still to come",
                    told.version
                ),
            )),
            _ => Ok(Stand { at: resume, ..stand }),
        })
    }

    /// The position after an event, if the event is the right one.
    fn next(&self, stand: Stand, told: &Told) -> Result<Stand, Broken> {
        let Told { kind, key, uid, version, bytes } = told;
        let name = format!("{kind:?} {key} at {version}");
        let epoch = self.epoch(stand);
        let expected = self.next_after(stand);
        if *version <= stand.at {
            let before = epoch.writes[..epoch.after(stand.at)].iter().rev().find(|write| write.version == *version);
            let again = before.and_then(|write| write.seen_by(self.spec.selection));
            return Err(match again {
                Some((_, object)) if object.key == *key => (Guarantee::Unique, format!("got {name} a second time")),
                Some((_, object)) => {
                    (Guarantee::Atomic, format!("got {name}, and {} had been told at that version", object.key))
                }
                None => (Guarantee::Ordered, format!("got {name}, after version {}", stand.at)),
            });
        }
        if let Some(missed) = expected.filter(|expected| expected < version) {
            return Err((Guarantee::Reliable, format!("got {name}, and was not told of the event at {missed}")));
        }
        let write = epoch.writes[epoch.after(stand.at)..].iter().find(|write| write.version == *version);
        let Some(write) = write else {
            return Err((Guarantee::Reliable, format!("got {name}, and nothing happened at that version")));
        };
        let Some((right, object)) = write.seen_by(self.spec.selection) else {
            return Err((Guarantee::Filtered, format!("got {name}, and its selector sees nothing at that version")));
        };
        if object.key != *key {
            return Err((Guarantee::Reliable, format!("got {name}, and {} was written at that version", object.key)));
        }
        if *kind != right {
            return Err((Guarantee::Filtered, format!("got {name}, which is {right:?} for its selector")));
        }
        if object.uid != *uid {
            return Err((Guarantee::Reliable, format!("got {name} with uid {uid}, and it was {}", object.uid)));
        }
        let right = object.bytes_at(*version, self.canonical());
        if right != *bytes {
            let (right, bytes) = (String::from_utf8_lossy(&right), String::from_utf8_lossy(bytes));
            return Err((Guarantee::Reliable, format!("got {name} as\n    {bytes}\n  and it was\n    {right}")));
        }
        Ok(Stand { at: *version, ..stand })
    }

    pub(super) fn snapshot_begin(
        &mut self,
        version: u64,
        restarted_from: Option<u64>,
        entry: &Entry,
    ) -> Result<(), Broken> {
        let resumable = |text: String| Err((Guarantee::Resumable, text));
        // The version may go back if a restore undid its history since.
        let known = self.stands.iter().map(|stand| stand.epoch).min().unwrap_or(0);
        let is_undone = |version: u64| {
            self.truth.epochs.iter().take(entry.epoch + 1).skip(known + 1).any(|epoch| epoch.base < version)
        };
        if restarted_from.is_some_and(|restarted| version < restarted && is_undone(restarted)) {
            self.floor = None;
        }
        match (&self.phase, restarted_from) {
            (Phase::Opened { from: None }, None) => {}
            // This may also happen inside a span: the snapshot replaces what the span has sent.
            (Phase::Opened { from: Some(_) } | Phase::Exact | Phase::Span { .. }, Some(restarted)) => {
                if !self.spec.restarts {
                    return resumable(format!("was started over from {restarted}, and had asked for FAIL"));
                }
                if version < restarted && !is_undone(restarted) || self.resume.is_some_and(|resume| restarted < resume)
                {
                    let text = format!(
                        "was started over from {restarted} with a snapshot at {version}, after {:?}",
                        self.resume
                    );
                    return Err((Guarantee::Ordered, text));
                }
            }
            (Phase::Opened { from: Some(from) }, None) => {
                return resumable(format!(
                    "asked from {from}, and got a snapshot that does not say that it starts over"
                ));
            }
            _ => return resumable(format!("got a snapshot at {version} where none was to come")),
        }
        if let Some(floor) = self.floor.filter(|floor| version < *floor) {
            return Err((Guarantee::Ordered, format!("got a snapshot at {version}, after version {floor}")));
        }
        self.phase = Phase::Snapshot { version, told: Vec::new() };
        Ok(())
    }

    pub(super) fn snapshot_end(&mut self, objects: i64, entry: &Entry) -> Result<(), Broken> {
        let Phase::Snapshot { version, told } = std::mem::replace(&mut self.phase, Phase::Exact) else {
            return Err((Guarantee::Reliable, "got the end of a snapshot that had not begun".to_owned()));
        };
        if objects != told.len() as i64 {
            let got = told.len();
            return Err((Guarantee::Reliable, format!("got {got} objects of a snapshot of {objects}")));
        }
        if entry.resume != Some(version) {
            let resume = entry.resume;
            return Err((Guarantee::Resumable, format!("got a snapshot at {version} that is resumed from {resume:?}")));
        }
        // Every epoch that had reached the snapshot's version by then is possible.
        let first = self.stands.iter().map(|stand| stand.epoch).min().unwrap_or(0);
        let reached = |epoch: &usize| *epoch <= entry.epoch && version <= self.reached(*epoch, entry);
        let epochs = (first..self.truth.epochs.len()).filter(reached);
        self.stands = epochs.map(|epoch| Stand { epoch, at: version, mixed: false }).collect();
        self.keep(|walk, stand| walk.is_state(stand, &told).map(|()| stand))
    }

    /// Checks that a snapshot equals the truth's state.
    fn is_state(&self, stand: Stand, told: &[Told]) -> Result<(), Broken> {
        let at = stand.at;
        let state = self.epoch(stand).at(at);
        let mut right = state.values().filter(|object| self.spec.selection.has(object));
        let mut told = told.iter();
        loop {
            let (told, right) = match (told.next(), right.next()) {
                (None, None) => return Ok(()),
                (Some(told), Some(right)) if told.key == right.key => (told, right),
                (Some(told), Some(right)) if told.key > right.key => {
                    return Err((Guarantee::Reliable, format!("got a snapshot at {at} without {}", right.key)));
                }
                (None, Some(right)) => {
                    return Err((Guarantee::Reliable, format!("got a snapshot at {at} without {}", right.key)));
                }
                (Some(told), _) => {
                    return Err(match state.get(&told.key) {
                        Some(object) if !self.spec.selection.has(object) => (
                            Guarantee::Filtered,
                            format!("got {} in a snapshot at {at}, which it does not select", told.key),
                        ),
                        Some(_) => (Guarantee::Ordered, format!("got {} out of order in a snapshot at {at}", told.key)),
                        None => (Guarantee::Reliable, format!("got the ghost {} in a snapshot at {at}", told.key)),
                    });
                }
            };
            let fits = told.kind == super::super::truth::Kind::Added
                && told.uid == right.uid
                && told.version == right.version
                && told.bytes == right.bytes_at(right.version, self.canonical());
            if !fits {
                let text = format!(
                    "got {} in a snapshot at {at} as it was at {}, not at {}",
                    told.key, told.version, right.version
                );
                return Err((Guarantee::Reliable, text));
            }
        }
    }
}
