//! Tests that the oracle can fail: an oracle that never fails proves nothing. Real histories are
//! corrupted in one place each, as a defect would, and the oracle must name the broken guarantee.

#![expect(clippy::ptr_arg, reason = "all have one type, and some take entries out")]

use std::sync::OnceLock;

use libtest_mimic::{Failed, Trial};

use crate::{
    history::{Entry, History, Told, What},
    oracle::{self, Guarantee},
    seed::{Options, Report, run_seed},
    truth::Kind,
};

/// Corrupts a history. `None` if the history has no suitable place.
type Spoil = fn(&mut Vec<Entry>) -> Option<()>;

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [(&str, &[Guarantee], Spoil); 24] = [
        ("a_lost_event", &[Guarantee::Reliable], lost),
        ("an_event_told_twice", &[Guarantee::Unique], twice),
        ("two_events_swapped", &[Guarantee::Reliable], swapped),
        ("other_bytes", &[Guarantee::Reliable], other_bytes),
        ("a_leave_told_as_a_delete", &[Guarantee::Filtered], wrong_reason),
        ("an_event_of_another_key", &[Guarantee::Reliable], other_key),
        ("a_bookmark_too_early", &[Guarantee::Bookmarkable], early_bookmark),
        ("a_bookmark_from_the_future", &[Guarantee::Bookmarkable], future_bookmark),
        ("a_version_to_resume_from_too_early", &[Guarantee::Resumable], early_resume),
        ("a_version_to_resume_from_inside_a_span", &[Guarantee::Atomic], resume_in_span),
        ("an_object_missing_in_a_snapshot", &[Guarantee::Reliable], short_snapshot),
        ("a_delete_missing_in_a_span", &[Guarantee::Convergent], delete_lost_in_span),
        ("a_key_twice_in_a_span", &[Guarantee::Unique], twice_in_span),
        ("the_last_event_missing", &[Guarantee::Convergent], lost_at_the_end),
        ("an_event_from_before", &[Guarantee::Ordered], event_from_before),
        ("a_bookmark_from_before", &[Guarantee::Ordered], bookmark_from_before),
        ("a_span_that_ends_before_it_began", &[Guarantee::Ordered], span_from_before),
        ("two_events_at_one_version", &[Guarantee::Atomic], two_at_one_version),
        ("an_event_of_another_uid", &[Guarantee::Reliable], other_uid),
        ("a_ghost_in_a_snapshot", &[Guarantee::Reliable], ghost_in_snapshot),
        ("an_old_object_in_a_snapshot", &[Guarantee::Reliable], old_in_snapshot),
        ("other_bytes_in_a_span", &[Guarantee::Convergent], other_bytes_in_span),
        ("other_bytes_of_what_a_span_removes", &[Guarantee::Reliable], other_bytes_removed_in_span),
        ("an_end_without_a_reason_in_the_world", &[Guarantee::Resumable], made_up_end),
    ];
    let trial = |(name, expected, spoil): (&str, &'static [Guarantee], Spoil)| {
        Trial::test(format!("the_oracle_sees::{name}"), move || sees(expected, spoil))
    };
    cases.into_iter().map(trial).collect()
}

/// Histories of a few seeds that contain every place the corruptions need.
fn reports() -> &'static [Report] {
    static REPORTS: OnceLock<Vec<Report>> = OnceLock::new();
    REPORTS.get_or_init(|| (101..105).map(|seed| run_seed(seed, &Options::default())).collect())
}

fn sees(expected: &[Guarantee], spoil: Spoil) -> Result<(), Failed> {
    let mut spoiled = 0;
    for report in reports() {
        for history in &report.histories {
            let mut entries = history.entries.clone();
            if spoil(&mut entries).is_none() {
                continue;
            }
            spoiled += 1;
            let history = History { spec: history.spec.clone(), entries };
            match oracle::judge(&report.truth, &history, true) {
                Err(violation) if expected.contains(&violation.guarantee) => {}
                Err(violation) => return Err(format!("expected {expected:?}, and got: {violation}").into()),
                Ok(()) => return Err(format!("nothing was found in seed {}, {}", report.seed, history.spec).into()),
            }
        }
    }
    if spoiled == 0 { Err("no history could be spoiled like that".into()) } else { Ok(()) }
}

/// The index of an exact event, near the middle, that is followed by another exact event.
fn exact(entries: &[Entry]) -> Option<usize> {
    let is_exact = |entry: &Entry| matches!(entry.what, What::Event(_)) && entry.resume.is_some();
    let pairs = entries.windows(2).enumerate().filter(|(_, pair)| pair.iter().all(is_exact));
    let places: Vec<_> = pairs.map(|(at, _)| at).collect();
    places.get(places.len() / 2).copied()
}

fn told(entry: &Entry) -> Option<&Told> {
    match &entry.what {
        What::Event(told) => Some(told),
        _ => None,
    }
}

fn told_mut(entry: &mut Entry) -> Option<&mut Told> {
    match &mut entry.what {
        What::Event(told) => Some(told),
        _ => None,
    }
}

/// The events of completed gaps and catch-ups whose keys appear only once there.
fn in_spans(entries: &[Entry]) -> Vec<usize> {
    let (mut span, mut places) = (None, Vec::new());
    for (at, entry) in entries.iter().enumerate() {
        match (&entry.what, &mut span) {
            (What::GapBegin { .. } | What::CatchUpBegin { .. }, _) => span = Some(Vec::new()),
            (What::GapEnd | What::CatchUpEnd, Some(events)) => {
                let key = |at: &usize| told(&entries[*at]).map(|told| &told.key);
                let once = |at: &&usize| events.iter().filter(|other| key(other) == key(at)).count() == 1;
                places.extend(events.iter().filter(once));
                span = None;
            }
            (What::Event(_), Some(events)) => events.push(at),
            (_, _) => span = None,
        }
    }
    places
}

fn lost(entries: &mut Vec<Entry>) -> Option<()> {
    entries.remove(exact(entries)?);
    Some(())
}

fn twice(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    entries.insert(at, entries[at].clone());
    Some(())
}

fn swapped(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    entries.swap(at, at + 1);
    Some(())
}

fn other_bytes(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    told_mut(&mut entries[at])?.bytes = "{}".into();
    Some(())
}

fn wrong_reason(entries: &mut Vec<Entry>) -> Option<()> {
    let mut exact = entries.iter_mut().filter(|entry| entry.resume.is_some()).filter_map(told_mut);
    exact.find(|told| told.kind == Kind::Left)?.kind = Kind::Deleted;
    Some(())
}

fn other_key(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    told_mut(&mut entries[at])?.key.push('x');
    Some(())
}

/// A bookmark at the version of the next event, before that event.
fn early_bookmark(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let bookmark = Entry { what: What::Bookmark, ..entries[at + 1].clone() };
    entries.insert(at + 1, bookmark);
    Some(())
}

/// A bookmark at a version that the cluster had not reached.
fn future_bookmark(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    entries.truncate(at + 1);
    let last = entries.last_mut()?;
    last.revision = last.resume?;
    let bookmark = Entry { what: What::Bookmark, resume: Some(last.revision + 1), ..last.clone() };
    entries.push(bookmark);
    Some(())
}

fn early_resume(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    entries[at].resume = entries[at + 1].resume;
    Some(())
}

fn resume_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    let at = *in_spans(entries).first()?;
    entries[at].resume = Some(entries[at].revision);
    Some(())
}

fn short_snapshot(entries: &mut Vec<Entry>) -> Option<()> {
    let is_end = |entry: &Entry| matches!(entry.what, What::SnapshotEnd { objects } if objects > 0);
    let end = entries.iter().position(is_end)?;
    entries.remove(end - 1);
    let What::SnapshotEnd { objects } = &mut entries[end - 1].what else { return None };
    *objects -= 1;
    Some(())
}

fn delete_lost_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    let removes = |at: &usize| told(&entries[*at]).is_some_and(|told| told.kind.removes());
    let at = in_spans(entries).into_iter().find(removes)?;
    entries.remove(at);
    Some(())
}

fn twice_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    let modified = |at: &usize| told(&entries[*at]).is_some_and(|told| told.kind == Kind::Modified);
    let at = in_spans(entries).into_iter().find(modified)?;
    entries.insert(at, entries[at].clone());
    Some(())
}

/// An event at a version at which nothing can have happened any more.
fn event_from_before(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    told_mut(&mut entries[at])?.version = 1;
    Some(())
}

fn bookmark_from_before(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let resume = entries[at].resume.map(|version| version - 1);
    let bookmark = Entry { what: What::Bookmark, resume, ..entries[at].clone() };
    entries.insert(at + 1, bookmark);
    Some(())
}

fn span_from_before(entries: &mut Vec<Entry>) -> Option<()> {
    let ends = |entry: &&mut Entry| matches!(entry.what, What::GapEnd | What::CatchUpEnd);
    entries.iter_mut().find(ends)?.resume = Some(1);
    Some(())
}

fn two_at_one_version(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let mut other = entries[at].clone();
    told_mut(&mut other)?.key.push('x');
    entries.insert(at + 1, other);
    Some(())
}

fn other_uid(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    told_mut(&mut entries[at])?.uid.push('x');
    Some(())
}

/// The index of the last object of the first snapshot that is not empty.
fn last_in_snapshot(entries: &[Entry]) -> Option<usize> {
    let is_end = |entry: &Entry| matches!(entry.what, What::SnapshotEnd { objects } if objects > 0);
    Some(entries.iter().position(is_end)? - 1)
}

fn ghost_in_snapshot(entries: &mut Vec<Entry>) -> Option<()> {
    let at = last_in_snapshot(entries)?;
    let mut ghost = entries[at].clone();
    told_mut(&mut ghost)?.key.push('x');
    entries.insert(at + 1, ghost);
    let What::SnapshotEnd { objects } = &mut entries[at + 2].what else { return None };
    *objects += 1;
    Some(())
}

fn old_in_snapshot(entries: &mut Vec<Entry>) -> Option<()> {
    let at = last_in_snapshot(entries)?;
    told_mut(&mut entries[at])?.version -= 1;
    Some(())
}

fn spoil_bytes_in_span(entries: &mut [Entry], removed: bool) -> Option<()> {
    let fits = |at: &usize| told(&entries[*at]).is_some_and(|told| told.kind.removes() == removed);
    let at = in_spans(entries).into_iter().find(fits)?;
    told_mut(&mut entries[at])?.bytes = "{}".into();
    Some(())
}

fn other_bytes_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    spoil_bytes_in_span(entries, false)
}

fn other_bytes_removed_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    spoil_bytes_in_span(entries, true)
}

/// A refusal of a resource that exists.
fn made_up_end(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let (code, reason) = ("NotFound".to_owned(), "RESOURCE_NOT_FOUND".to_owned());
    entries[at].what = What::Ended { code, reason, message: String::new() };
    Some(())
}

/// Drops the last event and everything after it.
fn lost_at_the_end(entries: &mut Vec<Entry>) -> Option<()> {
    let last = entries.iter().rposition(|entry| told(entry).is_some() && entry.resume.is_some())?;
    entries.truncate(last);
    Some(())
}
