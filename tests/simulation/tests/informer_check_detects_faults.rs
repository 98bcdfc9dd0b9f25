//! Tests that the informers' oracle can fail: histories of real informers are corrupted in one
//! place each, and the oracle must name the broken guarantee.

#![expect(clippy::ptr_arg, reason = "the mistakes share one function type, and some remove entries")]

use std::sync::Arc;

use kubefan_client::{Decode, Deleted, Indexer, Object, RawJson, RawObject, Snapshot, Store};
use libtest_mimic::{Failed, Trial};

use super::oracle_detects_faults::reports;
use crate::{
    informer::{Call, InformerEntry, InformerHistory, Observed, Stored},
    oracle::{self, Guarantee},
    truth::{read_place, version_of},
};

/// Corrupts a history. `None` if the history has no suitable place.
type Corruption = fn(&mut Vec<InformerEntry>) -> Option<()>;

pub(super) fn trials() -> Vec<Trial> {
    use Guarantee::{Atomic, Bookmarkable, Convergent, Ordered, Reliable, Unique};
    let cases: [(&str, &[Guarantee], Corruption); 13] = [
        ("a_lost_call", &[Reliable], lost),
        ("a_call_twice", &[Unique, Reliable], twice),
        ("an_update_from_another_state", &[Reliable], other_old_state),
        ("a_state_with_other_bytes", &[Reliable], other_bytes),
        ("a_deletion_that_did_not_happen", &[Reliable, Unique], made_up_deletion),
        ("an_addition_of_a_known_object", &[Unique], added_again),
        ("a_handler_ahead_of_the_store", &[Reliable], store_behind),
        ("an_index_that_differs", &[Reliable], other_index),
        ("a_store_without_an_object", &[Reliable, Atomic], missing_in_store),
        ("a_store_with_a_ghost", &[Reliable], ghost_in_store),
        ("a_store_ahead_of_its_state", &[Bookmarkable, Reliable], early_version),
        ("a_store_that_goes_back", &[Ordered, Bookmarkable], older_version),
        ("a_store_that_is_not_the_truth_at_the_end", &[Convergent, Reliable, Atomic, Bookmarkable], old_at_the_end),
    ];
    let trial = |(name, expected, corrupt): (&str, &'static [Guarantee], Corruption)| {
        Trial::test(format!("the_informers_oracle_detects::{name}"), move || detects(expected, corrupt))
    };
    cases.into_iter().map(trial).collect()
}

fn detects(expected: &[Guarantee], corrupt: Corruption) -> Result<(), Failed> {
    let mut corrupted = 0;
    // After a restore the oracle permits more.
    for report in reports().iter().filter(|report| report.truth.epochs.len() == 1) {
        for history in &report.informers {
            let mut entries = history.entries.clone();
            if corrupt(&mut entries).is_none() {
                continue;
            }
            corrupted += 1;
            let history = InformerHistory { spec: history.spec.clone(), entries };
            match oracle::judge_informer(&report.truth, &history, true, false) {
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

/// Returns the states of an update that the first handler got, if it changed the version.
fn update(entry: &InformerEntry) -> Option<(&Stored, &Stored)> {
    match &entry.what {
        Observed::Call { handler: 0, call: Call::Update(old, new), .. }
            if old.resource_version() != new.resource_version() =>
        {
            Some((old, new))
        }
        _ => None,
    }
}

/// The index of the first update that the next call for the same object continues.
fn continued(entries: &[InformerEntry]) -> Option<usize> {
    (0..entries.len()).find(|at| {
        let Some((_, new)) = update(&entries[*at]) else { return false };
        let later = entries[at + 1..].iter().take_while(|entry| !matches!(entry.what, Observed::Started));
        let mut later = later.filter_map(update).filter(|(_, later)| later.key() == new.key());
        later.next().is_some_and(|(old, _)| Arc::ptr_eq(old, new))
    })
}

fn changed(object: &Stored, json: &'static [u8]) -> Stored {
    let raw = RawObject { key: object.key().clone(), uid: "".into(), resource_version: "".into(), json: json.into() };
    let value = RawJson::decode(&raw).unwrap();
    Arc::new(Object::new(object.key().clone(), object.uid(), object.resource_version(), value))
}

/// Changes the call at an index.
fn change(entries: &mut [InformerEntry], at: usize, with: impl FnOnce(&mut Call)) {
    if let Observed::Call { call, .. } = &mut entries[at].what {
        with(call);
    }
}

fn lost(entries: &mut Vec<InformerEntry>) -> Option<()> {
    entries.remove(continued(entries)?);
    Some(())
}

fn twice(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = continued(entries)?;
    entries.insert(at, entries[at].clone());
    Some(())
}

fn other_old_state(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = continued(entries)?;
    change(entries, at, |call| {
        if let Call::Update(old, new) = call {
            *old = new.clone();
        }
    });
    Some(())
}

fn other_bytes(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = continued(entries)?;
    change(entries, at, |call| {
        if let Call::Update(_, new) = call {
            *new = changed(new, b"{}");
        }
    });
    Some(())
}

fn made_up_deletion(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = continued(entries)?;
    change(entries, at, |call| {
        if let Call::Update(old, _) = call {
            *call = Call::Delete(Deleted::Known(old.clone()));
        }
    });
    Some(())
}

fn added_again(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = continued(entries)?;
    change(entries, at, |call| {
        if let Call::Update(_, new) = call {
            *call = Call::Add(new.clone());
        }
    });
    Some(())
}

fn store_behind(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = continued(entries)?;
    let before = update(&entries[at])?.0.clone();
    if let Observed::Call { stored, .. } = &mut entries[at].what {
        *stored = Some(before);
    }
    Some(())
}

/// The index of a read of a store in the middle of the history, with an object at least.
fn read(entries: &[InformerEntry]) -> Option<usize> {
    let is_full = |entry: &InformerEntry| matches!(&entry.what, Observed::Read { snapshot, .. } if snapshot.len() > 1);
    let reads: Vec<_> = (0..entries.len()).filter(|at| is_full(&entries[*at])).collect();
    reads.get(reads.len() / 2).copied()
}

/// Replaces the store that was read at an index.
fn change_store(entries: &mut [InformerEntry], at: usize, with: impl FnOnce(&Snapshot<RawJson>, &Indexer<RawJson>)) {
    let Observed::Read { snapshot, .. } = &mut entries[at].what else { return };
    let indexer = Indexer::new();
    for object in snapshot.iter() {
        indexer.insert(object.clone());
    }
    indexer.advance(snapshot.resource_version());
    with(snapshot, &indexer);
    *snapshot = indexer.snapshot();
}

fn other_index(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = read(entries)?;
    if let Observed::Read { index, .. } = &mut entries[at].what {
        *index = Err("it differs".to_owned());
    }
    Some(())
}

/// With fewer objects, a store that lacks one of them soon equals the store of a later version.
const FEW_OBJECTS: usize = 8;

fn missing_in_store(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = read(entries)?;
    let Observed::Read { snapshot, .. } = &entries[at].what else { return None };
    if snapshot.len() < FEW_OBJECTS {
        return None;
    }
    change_store(entries, at, |snapshot, store| {
        // The oldest object has a state that no later write has replaced yet.
        let version = |object: &&Stored| object.resource_version().parse::<u64>().unwrap_or(0);
        if let Some(object) = snapshot.iter().min_by_key(version) {
            store.remove(object.key().as_str());
        }
    });
    Some(())
}

fn ghost_in_store(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = read(entries)?;
    change_store(entries, at, |snapshot, store| {
        let first = snapshot.iter().next().cloned();
        let ghost = first.map(|first| {
            let value = first.value().clone();
            Arc::new(Object::new("team-0/ghost".into(), first.uid(), first.resource_version(), value))
        });
        if let Some(ghost) = ghost {
            store.insert(ghost);
        }
    });
    Some(())
}

/// The store names the version of a later read with another state.
fn early_version(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = read(entries)?;
    let Observed::Read { snapshot: before, .. } = &entries[at].what else { return None };
    let states = |snapshot: &Snapshot<RawJson>| -> Vec<_> {
        snapshot.iter().map(|object| object.resource_version().to_owned()).collect()
    };
    let before = states(before);
    let later = entries[at..].iter().take_while(|entry| !matches!(entry.what, Observed::Started));
    let later = later.filter_map(|entry| match &entry.what {
        Observed::Read { snapshot, .. } if states(snapshot) != before => Some((entry.clone(), snapshot.clone())),
        _ => None,
    });
    let (later, state) = later.into_iter().next()?;
    entries[at] = InformerEntry { what: entries[at].what.clone(), ..later };
    change_store(entries, at, |_, store| store.advance(state.resource_version()));
    Some(())
}

fn older_version(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let at = read(entries)?;
    let again = entries[at].clone();
    entries.insert(at + 1, again);
    change_store(entries, at + 1, |snapshot, store| {
        let version = version_of(read_place(snapshot.resource_version()).expect("a version"));
        store.advance(&(version - 1).to_string());
    });
    Some(())
}

/// The last read finds the state of an earlier one.
fn old_at_the_end(entries: &mut Vec<InformerEntry>) -> Option<()> {
    let last = entries.len() - 1;
    let is_full = |entry: &InformerEntry| matches!(&entry.what, Observed::Read { snapshot, .. } if snapshot.len() > 1);
    if !is_full(&entries[last]) {
        return None;
    }
    change_store(entries, last, |snapshot, store| {
        if let Some(object) = snapshot.iter().last() {
            store.remove(object.key().as_str());
        }
    });
    Some(())
}
