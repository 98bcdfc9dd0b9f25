//! Objects, changes and a consumer for the tests of the delta queues.

use std::sync::Arc;

use super::delta::Delta;
use crate::{
    object::Object,
    store::{Change, Deleted, Indexer, Replacement},
};

pub(super) fn object(name: &str, value: u32) -> Arc<Object<u32>> {
    Arc::new(Object::new(name.into(), "", "1", value))
}

pub(super) fn added(name: &str, value: u32) -> Change<u32> {
    Change::Added(object(name, value))
}

pub(super) fn updated(name: &str, value: u32) -> Change<u32> {
    Change::Updated(object(name, value))
}

pub(super) fn deleted(name: &str, value: u32) -> Change<u32> {
    Change::Deleted(Deleted::Known(object(name, value)))
}

pub(super) fn deleted_unknown(name: &str, value: u32) -> Change<u32> {
    let last_known = Some(object(name, value));
    Change::Deleted(Deleted::unknown(name.into(), last_known))
}

/// A complete state of these objects.
pub(super) fn state(objects: &[(&str, u32)]) -> Replacement<u32> {
    state_with_undecodable(objects, &[])
}

pub(super) fn state_with_undecodable(objects: &[(&str, u32)], undecodable: &[&str]) -> Replacement<u32> {
    Replacement {
        objects: objects.iter().map(|(name, value)| object(name, *value)).collect(),
        undecodable: undecodable.iter().map(|name| (*name).into()).collect(),
        resource_version: "1".to_owned(),
    }
}

/// A store that has these objects.
pub(super) fn known(objects: &[(&str, u32)]) -> Arc<Indexer<u32>> {
    let indexer = Indexer::new();
    for (name, value) in objects {
        indexer.insert(object(name, *value));
    }
    Arc::new(indexer)
}

/// Applies deltas as an informer does.
pub(super) fn apply(known: &Indexer<u32>, deltas: &[Delta<u32>]) {
    for delta in deltas {
        match delta.live_object() {
            Some(object) => known.insert(object.clone()),
            None => known.remove(delta.key().as_str()),
        };
    }
}

/// The deltas in short: `Added a=1`, `Deleted a=1`, and for an unknown final state `Gone a=1` or
/// `Gone a`.
pub(super) fn text(deltas: &[Delta<u32>]) -> String {
    let texts: Vec<_> = deltas.iter().map(delta_text).collect();
    texts.join(", ")
}

fn delta_text(delta: &Delta<u32>) -> String {
    let kind = match delta {
        Delta::Added(_) => "Added",
        Delta::Updated(_) => "Updated",
        Delta::Replaced(_) => "Replaced",
        Delta::Sync(_) => "Sync",
        Delta::Deleted(Deleted::Known(_)) => "Deleted",
        Delta::Deleted(Deleted::FinalStateUnknown(_)) => "Gone",
    };
    let object = match delta {
        Delta::Deleted(deleted) => deleted.last_known(),
        delta => delta.live_object(),
    };
    let value = object.map(|object| format!("={}", object.value())).unwrap_or_default();
    format!("{kind} {}{value}", delta.key())
}
