//! Reads over HTTP: whether a state is as fresh as demanded, and whether a refusal may happen here.

use std::time::Duration;

use super::{Breach, Guarantee, Position, Walk};
use crate::{
    history::{Entry, Freshness},
    truth::version_of,
};

impl Walk<'_> {
    /// Checks that a state is as fresh as the read demanded.
    pub(super) fn check_freshness(&mut self, entry: &Entry) -> Result<(), Breach> {
        let Some((freshness, epoch, revision)) = self.asked.take() else { return Ok(()) };
        self.retain_fitting(|walk, position| {
            let at = position.at;
            let stale = |what: String| Err((Guarantee::Reliable, format!("asked for {what}, and got a state at {at}")));
            match freshness {
                Freshness::Any => Ok(position),
                Freshness::Exact(version) if version_of(at) != version => stale(format!("exactly {version}")),
                Freshness::NotOlderThan(version) if version_of(at) < version => stale(format!("{version} or newer")),
                Freshness::Exact(_) | Freshness::NotOlderThan(_) => Ok(position),
                Freshness::Consistent if walk.is_current(position, epoch, revision, entry) => Ok(position),
                Freshness::Consistent => stale(format!("a consistent state when the cluster was at {revision}")),
            }
        })
    }

    /// Whether a state shows every write that was complete when the cluster was at `revision`: it
    /// is the state at some version from then until it was received.
    fn is_current(&self, position: Position, epoch: usize, revision: u64, entry: &Entry) -> bool {
        // As at the apiserver, a state may be one between two writes of the version.
        let is_reached = version_of(position.at) >= version_of(revision);
        if is_reached || position.epoch < epoch {
            // A state of an undone history is no older than the result of a look-up of the version.
            return is_reached;
        }
        let truth = self.epoch(position);
        let selected = |place: u64| {
            truth.at(place).iter().filter(|(_, object)| self.spec.selection.has(object)).map(|(_, object)| object)
        };
        let until = self.reached(position.epoch, entry);
        let missed = &truth.writes[truth.after(position.at)..truth.after(until)];
        if missed.iter().all(|write| write.seen_by(self.spec.selection).is_none()) {
            return true;
        }
        // An object that came and went leaves no trace.
        let mut places = vec![revision];
        places.extend(missed.iter().map(|write| write.place).filter(|place| *place > revision));
        places.into_iter().any(|place| selected(position.at).eq(selected(place)))
    }

    /// Judges the end of a read over HTTP. Only these refusals can happen here.
    pub(super) fn http_ended(&mut self, code: &str, reason: &str, message: &str, now: Duration) -> Result<(), Breach> {
        if code == "ERROR 410"
            && let Some(resume) = self.resume
        {
            self.check_need("a 410", resume, now)?;
        }
        if matches!(code, "503" | "429" | "ERROR 503" | "ERROR 429") && !reason.is_empty() {
            self.check_refusal(code, message, now)?;
        }
        let is_possible = match (code, reason) {
            // The network broke the stream, or it ended cleanly.
            (_, "") => true,
            // A version that is no longer held, by a list and by a watch.
            ("410" | "ERROR 410", "Expired" | "Gone") => true,
            // A version that the cluster has not reached.
            ("504" | "ERROR 504", "Timeout") => true,
            // Not synced, not proved to be fresh, overloaded or draining.
            ("503" | "429", "ServiceUnavailable" | "TooManyRequests") => true,
            _ => false,
        };
        if is_possible {
            return Ok(());
        }
        Err((Guarantee::Resumable, format!("was refused with {code} ({reason}), which cannot happen here: {message}")))
    }
}
