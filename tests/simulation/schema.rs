//! Changes of the schema: the apiserver gives every pod other bytes, at the version that it has.
//!
//! The bytes of each pod name the number of the schema that they were written with, in an
//! annotation. Received objects are compared with the truth without it, because a subscriber may
//! have any of the bytes that an object had at its version. In the end every stream that was never
//! resumed must have those of the last schema: [`judge`].

use std::{borrow::Cow, collections::BTreeMap};

use bytes::Bytes;
use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::SimApiserver;

use super::{
    concurrent_lists,
    history::{History, Observation},
    oracle::{Guarantee, Violation},
    reader::wire::{self, Pod},
    truth::Kind,
    world::World,
};

/// The annotation with the number of the schema, one digit.
pub(crate) const SCHEMA: &str = "schema";
/// The annotation up to the digit, in JSON and in protobuf.
const BEFORE: [&[u8]; 2] = [br#""schema":""#, b"\x0a\x06schema\x12\x01"];

/// Gives every pod the bytes of this schema.
pub(crate) fn change(sim: &SimApiserver, number: u8) {
    let pods = GroupVersionResource::new("", "v1", "pods");
    sim.change_schema(&pods, |pod| pod["metadata"]["annotations"][SCHEMA] = number.to_string().into()).unwrap();
}

/// The bytes with the first schema's number, and the number that they had. `None` if they do not
/// have the annotation.
pub(crate) fn without_number(bytes: &[u8]) -> (Cow<'_, [u8]>, Option<u8>) {
    let place = |before: &&[u8]| Some(bytes.windows(before.len()).position(|at| at == *before)? + before.len());
    let Some(place) = BEFORE.iter().find_map(place) else { return (Cow::Borrowed(bytes), None) };
    let Some(number) = bytes.get(place).map(|digit| digit.wrapping_sub(b'0')) else { return (bytes.into(), None) };
    if number == 0 {
        return (Cow::Borrowed(bytes), Some(0));
    }
    let mut first = bytes.to_vec();
    first[place] = b'0';
    (Cow::Owned(first), Some(number))
}

/// As [`without_number`], for bytes that are kept.
pub(crate) fn split(bytes: Bytes) -> (Bytes, Option<u8>) {
    match without_number(&bytes) {
        (Cow::Owned(first), number) => (first.into(), number),
        (Cow::Borrowed(_), number) => (bytes.clone(), number),
    }
}

/// Judges which schema the objects in the caches of a replica are of, long after the last change.
pub(crate) async fn judge_replica(world: &World, node: usize, current: u8) -> Result<(), Violation> {
    for accept in ["application/json", "application/vnd.kubernetes.protobuf"] {
        let body = concurrent_lists::list(world, node, "/api/v1/pods?resourceVersion=0", accept).await.unwrap();
        // A replica need not have a cache of this form.
        let Ok(page) = wire::page(&body) else { continue };
        for Pod { key, bytes, .. } in page.items {
            if let Some(old) = split(bytes).1.filter(|number| *number != current) {
                let text = format!(
                    "kubefan {node} has {key} in the bytes of schema {old} as {accept}, and the schema is {current}"
                );
                return Err(Violation { guarantee: Guarantee::Convergent, text, entry: 0, at_end: true });
            }
        }
    }
    Ok(())
}

/// Judges which schema the objects are of that a subscriber has at the end, long after the last
/// change. A stream that was resumed may have come from a replica that had not read them again, and
/// no client of the apiserver itself is sent them again.
pub(crate) fn judge(history: &History, current: u8) -> Result<(), Violation> {
    let mut held = BTreeMap::new();
    let mut is_resumed = false;
    for entry in &history.entries {
        match &entry.what {
            Observation::Opened { from, .. } => is_resumed = from.is_some(),
            Observation::SnapshotBegin { .. } => {
                held.clear();
                is_resumed = false;
            }
            Observation::Event(event) if matches!(event.kind, Kind::Added | Kind::Modified) => {
                held.insert(&event.key, event.schema);
            }
            Observation::Event(event) => drop(held.remove(&event.key)),
            _ => {}
        }
    }
    let old = held.iter().find_map(|(key, schema)| schema.filter(|number| *number != current).map(|old| (key, old)));
    match old.filter(|_| !is_resumed) {
        None => Ok(()),
        Some((key, old)) => Err(Violation {
            guarantee: Guarantee::Convergent,
            text: format!("{} has {key} in the bytes of schema {old}, and the schema is {current}", history.spec),
            entry: history.entries.len().saturating_sub(1),
            at_end: true,
        }),
    }
}
