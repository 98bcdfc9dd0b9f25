//! Counts the events of a seed, for the table of a sweep.

use std::collections::BTreeMap;

use super::{
    history::{Freshness, History, HttpReads, Interface, Observation},
    informer::{InformerHistory, Observed},
    projection::Projected,
};

pub(crate) fn tally_informers(histories: &[InformerHistory]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for history in histories {
        let by = format!("{:?}", history.spec.protocol);
        for entry in &history.entries {
            let name = match &entry.what {
                Observed::Started => "starts",
                Observed::HandlerAdded(_) | Observed::Resumed(_) | Observed::ApiserverStart { .. } => continue,
                Observed::Complete(_) => "complete states",
                Observed::Batch => "gaps and catch-ups",
                Observed::Failed(_) => "failures",
                Observed::Undecodable(_) => "bodies that cannot be decoded",
                Observed::Call { .. } => "calls of handlers",
                Observed::Read { .. } => "reads of the store",
            };
            *counts.entry(format!("informers over {by}: {name}")).or_default() += 1;
        }
    }
    counts
}

pub(crate) fn tally(histories: &[History]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for history in histories {
        if let Interface::Http(reads) = &history.spec.interface {
            tally_reads(history, reads, &mut counts);
            continue;
        }
        if history.spec.projected != Projected::default() {
            let only = if history.spec.projected.only_changes { ", only changes" } else { "" };
            let events = history.entries.iter().filter(|entry| matches!(entry.what, Observation::Event(_)));
            *counts.entry(format!("deliveries with a projection{only}")).or_default() += events.count() as u64;
        }
        let mut opened = false;
        for entry in &history.entries {
            let name = match &entry.what {
                Observation::Opened { from: Some(_), .. } => "streams resumed",
                Observation::Opened { from: None, .. } => "streams from a snapshot",
                Observation::SnapshotBegin { restarted_from: Some(_), .. } => "restarts in the stream",
                Observation::SnapshotBegin { .. } => "snapshots",
                Observation::GapBegin { .. } => "gaps",
                Observation::CatchUpBegin { .. } if opened => "catch-ups at the start",
                Observation::CatchUpBegin { .. } => "catch-ups on lag",
                Observation::Event(_) => "deliveries",
                Observation::Bookmark => "bookmarks",
                Observation::Ended { reason, .. } if reason == "HISTORY_REWRITTEN" => {
                    "streams ended: history rewritten"
                }
                Observation::Ended { reason, .. } if reason == "RESOURCE_VERSION_TOO_OLD" => "streams ended: too old",
                Observation::Ended { code, reason, .. } => {
                    let why = if reason.is_empty() { code } else { reason };
                    *counts.entry(format!("streams ended: {why}")).or_default() += 1;
                    opened = false;
                    continue;
                }
                _ => "other",
            };
            *counts.entry(name.to_owned()).or_default() += 1;
            opened = matches!(entry.what, Observation::Opened { .. });
        }
    }
    counts.remove("other");
    counts
}

/// Counts a program's reads over HTTP.
fn tally_reads(history: &History, reads: &HttpReads, counts: &mut BTreeMap<String, u64>) {
    let media = if reads.is_protobuf { "protobuf" } else { "JSON" };
    let mut asked = "";
    for entry in &history.entries {
        let name = match &entry.what {
            Observation::Asked(freshness) => {
                asked = match freshness {
                    Freshness::Consistent => "consistent",
                    Freshness::Any => "of any version",
                    Freshness::NotOlderThan(_) => "not older than",
                    Freshness::Exact(_) => "exactly at",
                };
                continue;
            }
            Observation::SnapshotEnd { .. } => format!("reads over HTTP: states {asked}"),
            Observation::Opened { from: Some(_), .. } => format!("reads over HTTP: watches in {media}"),
            Observation::Event(_) => format!("reads over HTTP: objects in {media}"),
            Observation::Bookmark => "reads over HTTP: bookmarks".to_owned(),
            Observation::Ended { code, reason, .. } if !reason.is_empty() => {
                format!("reads over HTTP: {code} {reason}")
            }
            _ => continue,
        };
        *counts.entry(name).or_default() += 1;
    }
}

/// Returns the requests that the programs of a seed would have sent straight to the apiserver, by
/// class. A stream over gRPC stands for a program that lists and watches, or resumes its watch.
pub(crate) fn straight(histories: &[History], informers: &[InformerHistory]) -> BTreeMap<String, u64> {
    let mut states = 0;
    let mut watches = 0;
    for entry in histories.iter().flat_map(|history| &history.entries) {
        match &entry.what {
            Observation::Opened { from: None, .. } => states += 1,
            Observation::Opened { from: Some(_), .. } => watches += 1,
            _ => {}
        }
    }
    for entry in informers.iter().flat_map(|history| &history.entries) {
        match &entry.what {
            Observed::Complete(_) => states += 1,
            Observed::Failed(_) => watches += 1,
            _ => {}
        }
    }
    [(STRAIGHT_STATES, states), (STRAIGHT_WATCHES, watches)].map(|(name, count)| (name.to_owned(), count)).into()
}

/// The names of the counts of [`straight`].
pub(crate) const STRAIGHT_STATES: &str = "requests straight: states";
pub(crate) const STRAIGHT_WATCHES: &str = "requests straight: watches";
