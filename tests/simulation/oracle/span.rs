//! Marked spans: gaps and catch-ups. A span starts where the stream was exact and must end in the
//! truth's state. Inside, each changed key appears once, or twice if its object was deleted and
//! another was created under its name.

use std::collections::BTreeMap;

use super::{Breach, Guarantee, Phase, Position, ResumePhase, Walk, latest_place};
use crate::{
    history::{Entry, ReceivedEvent},
    truth::{Kind, State},
};

impl Walk<'_> {
    pub(super) fn span_begin(&mut self, from: u64, catch_up: bool) -> Result<(), Breach> {
        let name = if catch_up { "catch-up" } else { "gap" };
        match self.phase {
            Phase::Opened { from: Some(_) } => {}
            Phase::Exact if catch_up && !self.spec.conflates && self.resume_phase == ResumePhase::Over => {
                return Err((Guarantee::Reliable, format!("got a catch-up from {from}, and had asked for EXPIRE")));
            }
            Phase::Exact => {}
            _ => return Err((Guarantee::Reliable, format!("got an unexpected {name} from {from}"))),
        }
        self.phase = Phase::Span { received: Vec::new() };
        self.retain_fitting(|walk, position| match walk.next_after(position) {
            _ if latest_place(from) < position.at => {
                Err((Guarantee::Ordered, format!("got a {name} from {from}, after version {}", position.at)))
            }
            Some(next) if next <= from => {
                Err((Guarantee::Reliable, format!("got a {name} from {from} without the event at {next}")))
            }
            _ => Ok(Position { at: from.max(position.at), ..position }),
        })
    }

    pub(super) fn span_end(&mut self, catch_up: bool, entry: &Entry) -> Result<(), Breach> {
        let name = if catch_up { "catch-up" } else { "gap" };
        let Phase::Span { received } = std::mem::replace(&mut self.phase, Phase::Exact) else {
            return Err((Guarantee::Reliable, format!("got the end of a {name} that had not started")));
        };
        let Some(to) = entry.resume else {
            return Err((Guarantee::Resumable, format!("got the end of a {name} without a resume version")));
        };
        self.retain_fitting(|walk, position| {
            let reached = walk.reached(position.epoch, entry);
            if to < position.at || to > reached {
                let text = format!("got a {name} from {} to {to}, and the cluster had reached {reached}", position.at);
                return Err((Guarantee::Ordered, text));
            }
            let mut end = None;
            let mut why = None;
            for at in walk.places_of(position.epoch, to).into_iter().filter(|at| *at >= position.at) {
                match walk.check_span(position, at, &received, catch_up) {
                    Ok(()) => end = end.or(Some(at)),
                    Err(breach) => why = why.or(Some(breach)),
                }
            }
            match (end, why) {
                (None, Some((guarantee, text))) => {
                    Err((guarantee, format!("got a {name} from {} to {to} in which {text}", position.at)))
                }
                (end, _) => Ok(Position { at: end.unwrap_or(to), ..position }),
            }
        })
    }

    /// The selected part of a state.
    fn selected<'s>(&self, state: &'s State) -> State
    where
        Self: 's,
    {
        let selected = state.iter().filter(|(_, object)| self.spec.selection.has(object));
        selected.map(|(key, object)| (key.clone(), object.clone())).collect()
    }

    /// Checks that the events of a span turn the state before it into the state after it.
    fn check_span(
        &self,
        position: Position,
        to: u64,
        received: &[ReceivedEvent],
        catch_up: bool,
    ) -> Result<(), Breach> {
        let epoch = self.epoch(position);
        let mut held = self.selected(epoch.at(position.at));
        let after = self.selected(epoch.at(to));
        let before = held.clone();
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        let mut last_kept: Option<&str> = None;
        for event in received {
            let ReceivedEvent { kind, key, uid, version, bytes, .. } = event;
            let count = times.entry(key).or_default();
            *count += 1;
            let remade = before.get(key).zip(after.get(key)).is_some_and(|(before, after)| before.uid != after.uid);
            if *count > if remade { 2 } else { 1 } {
                return Err((Guarantee::Unique, format!("{key} appears {count} times")));
            }
            if kind.removes() {
                if catch_up && last_kept.is_some() {
                    return Err((Guarantee::Ordered, format!("the delete of {key} comes after an object that exists")));
                }
                let Some(object) = held.remove(key) else {
                    return Err((Guarantee::Filtered, format!("{key} is {kind:?}, and did not exist before")));
                };
                let exists = epoch.at(to).get(key).is_some_and(|now| now.uid == object.uid);
                if exists != (*kind == Kind::Left) || *kind == Kind::Deleted {
                    return Err((
                        Guarantee::Filtered,
                        format!(
                            "{key} is {kind:?}, and {} at the end",
                            if exists { "exists" } else { "does not exist" }
                        ),
                    ));
                }
                let is_right =
                    self.has_bytes(&object, *version, bytes) || (catch_up && self.has_attributes(&object, bytes));
                if object.uid != *uid || !is_right {
                    return Err((
                        Guarantee::Reliable,
                        format!("{key} is {kind:?} as it never was: {}", String::from_utf8_lossy(bytes)),
                    ));
                }
                continue;
            }
            if catch_up && last_kept.is_some_and(|last| last >= key.as_str()) {
                return Err((Guarantee::Ordered, format!("{key} is not in key order")));
            }
            last_kept = Some(key);
            let Some(object) = after.get(key) else {
                return Err((Guarantee::Convergent, format!("{key} is {kind:?}, and does not exist at the end")));
            };
            let right = if held.contains_key(key) { Kind::Modified } else { Kind::Added };
            if *kind != right {
                return Err((Guarantee::Filtered, format!("{key} is {kind:?}, and should be {right:?}")));
            }
            if held.get(key).is_some_and(|held| held.uid != object.uid) {
                return Err((
                    Guarantee::Reliable,
                    format!("{key} is another object, and the one before was not deleted"),
                ));
            }
            // With another schema an object has other bytes at the same version.
            if held.get(key).is_some_and(|held| held.version == object.version) && self.truth.schemas == 1 {
                return Err((Guarantee::Unique, format!("{key} appears, and has not changed")));
            }
            if object.uid != *uid || object.version != *version || !self.has_bytes(object, *version, bytes) {
                return Err((
                    Guarantee::Convergent,
                    format!("{key} is sent as of {version}, and was last written at {}", object.version),
                ));
            }
            held.insert(key.clone(), object.clone());
        }
        // Changes that the projection hides need not be sent.
        for (key, object) in &after {
            if held.get(key).is_some_and(|held| held.uid == object.uid && self.hides(held, object)) {
                held.insert(key.clone(), object.clone());
            }
        }
        if held != after {
            let ghosts: Vec<_> = held.iter().filter(|(key, _)| !after.contains_key(*key)).map(|(key, _)| key).collect();
            let missing: Vec<_> =
                after.iter().filter(|(key, object)| held.get(*key) != Some(object)).map(|(key, _)| key).collect();
            return Err((
                Guarantee::Convergent,
                format!("the state is not the truth's: ghosts {ghosts:?}, missing or old {missing:?}"),
            ));
        }
        Ok(())
    }
}
