//! Tests that the oracle can fail: an oracle that never fails proves nothing. Real histories are
//! corrupted in one place each, as a defect would, and the oracle must name the broken guarantee.

#![expect(clippy::ptr_arg, reason = "all functions have one type, and some remove entries")]

use std::sync::OnceLock;

use libtest_mimic::{Failed, Trial};

use crate::{
    history::{Entry, Freshness, History, Interface, Observation, ReceivedEvent, Spec},
    oracle::{self, Guarantee},
    seed::{Options, Report, run_seed},
    truth::{Kind, last_place, version_of},
};

/// Corrupts a history. `None` if the history has no suitable place.
type Corruption = fn(&mut Vec<Entry>) -> Option<()>;

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [(&str, &[Guarantee], Corruption); 25] = [
        ("a_lost_event", &[Guarantee::Reliable], lost),
        ("an_event_sent_twice", &[Guarantee::Unique], twice),
        ("two_events_swapped", &[Guarantee::Reliable], swapped),
        ("an_event_with_other_bytes", &[Guarantee::Reliable], other_bytes),
        ("a_leave_sent_as_a_delete", &[Guarantee::Filtered], wrong_reason),
        ("an_event_of_another_key", &[Guarantee::Reliable], other_key),
        ("a_bookmark_too_early", &[Guarantee::Bookmarkable], early_bookmark),
        ("a_bookmark_beyond_the_cluster", &[Guarantee::Bookmarkable], future_bookmark),
        ("a_resume_version_too_early", &[Guarantee::Resumable], early_resume),
        ("a_resume_version_inside_a_span", &[Guarantee::Atomic], resume_in_span),
        ("an_object_missing_in_a_snapshot", &[Guarantee::Reliable], short_snapshot),
        ("a_delete_missing_in_a_span", &[Guarantee::Convergent], delete_lost_in_span),
        ("a_key_twice_in_a_span", &[Guarantee::Unique], twice_in_span),
        ("the_last_event_missing", &[Guarantee::Convergent], lost_at_the_end),
        ("an_event_at_an_older_version", &[Guarantee::Ordered], event_from_before),
        ("a_bookmark_at_an_older_version", &[Guarantee::Ordered], bookmark_from_before),
        ("a_span_that_ends_before_it_began", &[Guarantee::Ordered], span_from_before),
        ("another_event_at_one_version", &[Guarantee::Atomic, Guarantee::Reliable], two_at_one_version),
        ("an_event_of_another_uid", &[Guarantee::Reliable], other_uid),
        ("a_ghost_in_a_snapshot", &[Guarantee::Reliable], ghost_in_snapshot),
        ("an_old_object_in_a_snapshot", &[Guarantee::Reliable], old_in_snapshot),
        ("other_bytes_in_a_span", &[Guarantee::Convergent], other_bytes_in_span),
        ("an_end_with_an_impossible_reason", &[Guarantee::Resumable], made_up_end),
        ("a_list_at_another_version_than_exactly_asked_for", &[Guarantee::Reliable], other_version_than_asked),
        ("a_list_older_than_asked_for", &[Guarantee::Reliable], older_than_asked),
    ];
    let trial = |(name, expected, corrupt): (&str, &'static [Guarantee], Corruption)| {
        Trial::test(format!("the_oracle_detects::{name}"), move || detects(expected, corrupt, |_| true))
    };
    // A projection may leave nothing of a deleted object.
    let removed = Trial::test("the_oracle_detects::other_bytes_in_a_delete_inside_a_span", || {
        detects(&[Guarantee::Reliable], other_bytes_removed_in_span, |spec| !spec.projected.is_canonical())
    });
    let refused = Trial::test("the_oracle_detects::a_refusal_in_a_quiet_time", detects_a_refusal);
    cases.into_iter().map(trial).chain([removed, refused]).collect()
}

/// Refuses a request of each subscriber in the quiet time of its seed.
fn detects_a_refusal() -> Result<(), Failed> {
    let mut refused = 0;
    for report in reports() {
        let Some(quiet) = report.facts.quiet.clone() else { continue };
        for history in &report.histories {
            let mut history = history.clone();
            let before = |entry: &Entry| entry.at < quiet.start;
            history.entries.truncate(history.entries.partition_point(before));
            let Some(last) = history.entries.last() else { continue };
            let (code, reason) = match history.spec.interface {
                Interface::Http(_) => ("503", "ServiceUnavailable"),
                _ => ("Unavailable", "UPSTREAM_UNAVAILABLE"),
            };
            let [code, reason] = [code, reason].map(str::to_owned);
            let what = Observation::Ended { code, reason, message: String::new() };
            history.entries.push(Entry { at: quiet.start, what, resume: None, ..last.clone() });
            refused += 1;
            match oracle::judge(&report.truth, &report.facts, &history, false) {
                Err(violation) if violation.guarantee == Guarantee::Resumable => {}
                judged => return Err(format!("a needless refusal gave {judged:?}").into()),
            }
        }
    }
    if refused == 0 { Err("no seed has a quiet time".into()) } else { Ok(()) }
}

/// Histories of a few seeds that contain every place the corruptions need.
pub(super) fn reports() -> &'static [Report] {
    static REPORTS: OnceLock<Vec<Report>> = OnceLock::new();
    // After a restore a broken history is named by the first of several possible ones.
    let options = Options { rewinds: 0, ..Options::default() };
    REPORTS.get_or_init(|| (101..105).map(|seed| run_seed(seed, &options)).collect())
}

/// Corrupts the histories of the subscribers that `concerns` selects.
fn detects(expected: &[Guarantee], corrupt: Corruption, concerns: impl Fn(&Spec) -> bool) -> Result<(), Failed> {
    let mut corrupted = 0;
    for report in reports() {
        for history in report.histories.iter().filter(|history| concerns(&history.spec)) {
            let mut entries = history.entries.clone();
            if corrupt(&mut entries).is_none() {
                continue;
            }
            corrupted += 1;
            let history = History { spec: history.spec.clone(), entries };
            match oracle::judge(&report.truth, &report.facts, &history, true) {
                Err(violation) if expected.contains(&violation.guarantee) => {}
                Err(violation) => return Err(format!("expected {expected:?}, and got: {violation}").into()),
                Ok(()) => {
                    return Err(format!("no violation was found in seed {}, {}", report.seed, history.spec).into());
                }
            }
        }
    }
    if corrupted == 0 { Err("no history could be corrupted like that".into()) } else { Ok(()) }
}

/// The index of an exact event, near the middle, that is followed by another exact event.
fn exact(entries: &[Entry]) -> Option<usize> {
    let is_exact = |entry: &Entry| matches!(entry.what, Observation::Event(_)) && entry.resume.is_some();
    let pairs = entries.windows(2).enumerate().filter(|(_, pair)| pair.iter().all(is_exact));
    let indices: Vec<_> = pairs.map(|(at, _)| at).collect();
    indices.get(indices.len() / 2).copied()
}

fn event_of(entry: &Entry) -> Option<&ReceivedEvent> {
    match &entry.what {
        Observation::Event(event) => Some(event),
        _ => None,
    }
}

fn event_of_mut(entry: &mut Entry) -> Option<&mut ReceivedEvent> {
    match &mut entry.what {
        Observation::Event(event) => Some(event),
        _ => None,
    }
}

/// The events of completed gaps and catch-ups whose keys appear only once there.
fn in_spans(entries: &[Entry]) -> Vec<usize> {
    let mut span = None;
    let mut indices = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        match (&entry.what, &mut span) {
            (Observation::GapBegin { .. } | Observation::CatchUpBegin { .. }, _) => span = Some(Vec::new()),
            (Observation::GapEnd | Observation::CatchUpEnd, Some(events)) => {
                let key = |at: &usize| event_of(&entries[*at]).map(|event| &event.key);
                let once = |at: &&usize| events.iter().filter(|other| key(other) == key(at)).count() == 1;
                indices.extend(events.iter().filter(once));
                span = None;
            }
            (Observation::Event(_), Some(events)) => events.push(at),
            (_, _) => span = None,
        }
    }
    indices
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
    event_of_mut(&mut entries[at])?.bytes = "{}".into();
    Some(())
}

fn wrong_reason(entries: &mut Vec<Entry>) -> Option<()> {
    let mut exact = entries.iter_mut().filter(|entry| entry.resume.is_some()).filter_map(event_of_mut);
    exact.find(|event| event.kind == Kind::Left)?.kind = Kind::Deleted;
    Some(())
}

fn other_key(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    event_of_mut(&mut entries[at])?.key.push('x');
    Some(())
}

/// A bookmark at the version of the next event, before that event.
fn early_bookmark(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let bookmark = Entry { what: Observation::Bookmark, ..entries[at + 1].clone() };
    entries.insert(at + 1, bookmark);
    Some(())
}

/// A bookmark at a version that the cluster had not reached.
fn future_bookmark(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    entries.truncate(at + 1);
    let last = entries.last_mut()?;
    last.revision = last.resume?;
    let bookmark = Entry { what: Observation::Bookmark, resume: Some(last.revision + 1), ..last.clone() };
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
    let is_end = |entry: &Entry| matches!(entry.what, Observation::SnapshotEnd { objects } if objects > 0);
    let end = entries.iter().position(is_end)?;
    entries.remove(end - 1);
    let Observation::SnapshotEnd { objects } = &mut entries[end - 1].what else { return None };
    *objects -= 1;
    Some(())
}

fn delete_lost_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    let removes = |at: &usize| event_of(&entries[*at]).is_some_and(|event| event.kind.removes());
    let at = in_spans(entries).into_iter().find(removes)?;
    entries.remove(at);
    Some(())
}

fn twice_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    let modified = |at: &usize| event_of(&entries[*at]).is_some_and(|event| event.kind == Kind::Modified);
    let at = in_spans(entries).into_iter().find(modified)?;
    entries.insert(at, entries[at].clone());
    Some(())
}

/// An event at a version at which nothing can have happened any more.
fn event_from_before(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    event_of_mut(&mut entries[at])?.version = 1;
    Some(())
}

fn bookmark_from_before(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let resume = entries[at].resume.map(|place| last_place(version_of(place) - 1));
    let bookmark = Entry { what: Observation::Bookmark, resume, ..entries[at].clone() };
    entries.insert(at + 1, bookmark);
    Some(())
}

fn span_from_before(entries: &mut Vec<Entry>) -> Option<()> {
    let ends = |entry: &&mut Entry| matches!(entry.what, Observation::GapEnd | Observation::CatchUpEnd);
    entries.iter_mut().find(ends)?.resume = Some(1);
    Some(())
}

fn two_at_one_version(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let mut other = entries[at].clone();
    event_of_mut(&mut other)?.key.push('x');
    entries.insert(at + 1, other);
    Some(())
}

fn other_uid(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    event_of_mut(&mut entries[at])?.uid.push('x');
    Some(())
}

/// The index of the last object of the first snapshot that is not empty.
fn last_in_snapshot(entries: &[Entry]) -> Option<usize> {
    let is_end = |entry: &Entry| matches!(entry.what, Observation::SnapshotEnd { objects } if objects > 0);
    Some(entries.iter().position(is_end)? - 1)
}

fn ghost_in_snapshot(entries: &mut Vec<Entry>) -> Option<()> {
    let at = last_in_snapshot(entries)?;
    let mut ghost = entries[at].clone();
    event_of_mut(&mut ghost)?.key.push('x');
    entries.insert(at + 1, ghost);
    let Observation::SnapshotEnd { objects } = &mut entries[at + 2].what else { return None };
    *objects += 1;
    Some(())
}

fn old_in_snapshot(entries: &mut Vec<Entry>) -> Option<()> {
    let at = last_in_snapshot(entries)?;
    event_of_mut(&mut entries[at])?.version -= 1;
    Some(())
}

fn corrupt_bytes_in_span(entries: &mut [Entry], removed: bool) -> Option<()> {
    let fits = |at: &usize| event_of(&entries[*at]).is_some_and(|event| event.kind.removes() == removed);
    let at = in_spans(entries).into_iter().find(fits)?;
    event_of_mut(&mut entries[at])?.bytes = "{}".into();
    Some(())
}

fn other_bytes_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    corrupt_bytes_in_span(entries, false)
}

fn other_bytes_removed_in_span(entries: &mut Vec<Entry>) -> Option<()> {
    corrupt_bytes_in_span(entries, true)
}

/// A refusal of a resource that exists.
fn made_up_end(entries: &mut Vec<Entry>) -> Option<()> {
    let at = exact(entries)?;
    let code = "NotFound".to_owned();
    let reason = "RESOURCE_NOT_FOUND".to_owned();
    entries[at].what = Observation::Ended { code, reason, message: String::new() };
    Some(())
}

/// Drops the last event and everything after it.
fn lost_at_the_end(entries: &mut Vec<Entry>) -> Option<()> {
    let last = entries.iter().rposition(|entry| event_of(entry).is_some() && entry.resume.is_some())?;
    entries.truncate(last);
    Some(())
}

/// Changes the request of the first read over HTTP that got a state, by the version that it got.
fn asked(entries: &mut [Entry], freshness: impl Fn(u64) -> Freshness) -> Option<()> {
    let at = entries.windows(3).position(|three| {
        matches!(
            [&three[0].what, &three[1].what, &three[2].what],
            [Observation::Asked(_), Observation::Opened { .. }, Observation::SnapshotBegin { .. }]
        )
    })?;
    let Observation::SnapshotBegin { version, .. } = entries[at + 2].what else { return None };
    entries[at].what = Observation::Asked(freshness(version_of(version)));
    Some(())
}

fn other_version_than_asked(entries: &mut Vec<Entry>) -> Option<()> {
    asked(entries, |version| Freshness::Exact(version - 1))
}

fn older_than_asked(entries: &mut Vec<Entry>) -> Option<()> {
    asked(entries, |version| Freshness::NotOlderThan(version + 1))
}
