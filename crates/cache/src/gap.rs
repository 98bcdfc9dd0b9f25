//! A gap of history: the difference between two states. The single changes in between are not
//! known.
//!
//! A gap may contain every object of a cache, and it concerns every view. So it is never copied:
//! the ring and all views share it, and each subscriber takes the events of its selection from it.
//! The hazard is the cost of that: a thousand views of one node each would test every event. So the
//! gap's events are indexed by the values of a label or field when the first view with such a term
//! takes them, outside of every lock of the fan-out, and a view tests only its candidates.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use kubefan_common::planted::{self, Bug};
use kubefan_model::{
    ResourceVersion,
    event::{Transition, WatchEvent},
    object::ObjectParser,
    selection::Selection,
};

use super::{
    equality_term::{Column, Term, Values},
    relist_reason::RelistReason,
};

/// With fewer events a test of each is as cheap as an index.
const INDEXED_EVENTS_LEAST: usize = 64;
/// Number of labels and fields that one gap is indexed by. An index costs some bytes per event.
const COLUMNS_MAX: usize = 16;
/// A term with more values is not looked up. To find the next candidate takes a search for each
/// value, and with thousands of values it is much cheaper to test each event.
const VALUES_MAX: usize = 16;

/// A span of history between two exact states.
#[derive(Debug)]
pub struct Gap {
    /// History is exact up to here.
    pub from: ResourceVersion,
    /// History is exact again from here.
    pub to: ResourceVersion,
    /// Reason of the gap.
    pub reason: RelistReason,
    /// The difference between the two states: deletes, then adds and changes in the order of their
    /// versions.
    pub events: Vec<Arc<WatchEvent>>,
    /// Whether events between the two states may be missing. If not, all objects are unchanged but
    /// for their bytes, and no version lies strictly inside the gap.
    pub is_lossy: bool,
    columns: Mutex<HashMap<Column, Arc<OnceLock<Positions>>>>,
}

/// For each value of a column, the events whose object has it, or had it before.
type Positions = HashMap<Box<str>, Vec<u32>>;

impl Gap {
    /// The difference between two lists: changes in between may be missing.
    pub fn new(from: ResourceVersion, to: ResourceVersion, reason: RelistReason, events: Vec<Arc<WatchEvent>>) -> Self {
        Self { from, to, reason, events, is_lossy: true, columns: Mutex::default() }
    }

    /// Objects that have other bytes at the versions that they had, as of the version `to`. An
    /// event at that version itself may be among them. `reached` is the version before.
    pub fn reencoded(
        reached: ResourceVersion,
        to: ResourceVersion,
        reason: RelistReason,
        events: Vec<Arc<WatchEvent>>,
    ) -> Self {
        let from = to.below().map_or(reached, |below| below.end().max(reached));
        Self { is_lossy: false, ..Self::new(from, to, reason, events) }
    }

    /// Whether one of its events only shows a change of one version, as outside of a gap.
    pub fn is_exact(&self, event: &WatchEvent) -> bool {
        !self.is_lossy && event.version() == self.to
    }

    /// Returns the events at `start` and after it that a selection sees: their positions, the
    /// events, and how they change the membership.
    pub fn select<'a>(
        &'a self,
        selection: &'a Selection,
        start: usize,
    ) -> impl Iterator<Item = (usize, &'a Arc<WatchEvent>, Transition)> + 'a {
        self.test_each(selection, start).filter_map(|(position, event, seen)| Some((position, event, seen?)))
    }

    /// As [`Self::select`], for a caller that counts the tests: also returns the events that were
    /// tested and that the selection does not see, with `None`.
    pub fn test_each<'a>(
        &'a self,
        selection: &'a Selection,
        start: usize,
    ) -> impl Iterator<Item = (usize, &'a Arc<WatchEvent>, Option<Transition>)> + 'a {
        let candidates = self.candidates(selection);
        let mut next = start;
        std::iter::from_fn(move || {
            let position = candidates.next(next)?;
            let event = self.events.get(position)?;
            next = position + 1;
            let seen = event.transition(selection);
            Some((position, event, seen.or(planted::is(Bug::GapNotFiltered).then_some(Transition::Change))))
        })
    }

    fn candidates<'a>(&self, selection: &'a Selection) -> Candidates<'a> {
        let is_indexed = self.events.len() >= INDEXED_EVENTS_LEAST;
        let has_few_values = |term: &Term<'_>| !matches!(term.values, Values::Any(values) if values.len() > VALUES_MAX);
        let term = Term::all(selection).into_iter().find(has_few_values).filter(|_| is_indexed);
        let Some(Term { column, values }) = term else { return Candidates::All };
        let cell = {
            let mut columns = self.columns.lock().unwrap_or_else(PoisonError::into_inner);
            if columns.len() == COLUMNS_MAX && !columns.contains_key(&column) {
                return Candidates::All;
            }
            columns.entry(column.clone()).or_default().clone()
        };
        cell.get_or_init(|| self.index(&column, selection.parser()));
        Candidates::Indexed(cell, values)
    }

    fn index(&self, column: &Column, parser: &ObjectParser) -> Positions {
        let mut positions = Positions::new();
        for (position, event) in (0u32..).zip(&self.events) {
            // A selection that the object leaves is found by the object before the event.
            let before = event.previous().filter(|_| !planted::is(Bug::GapIndexIgnoresPrevious));
            for object in [Some(event.object()), before].into_iter().flatten() {
                let Some(value) = column.value(&object, parser) else { continue };
                match positions.get_mut(&*value) {
                    Some(known) if known.last() == Some(&position) => {}
                    Some(known) => known.push(position),
                    None => drop(positions.insert(value.into(), vec![position])),
                }
            }
        }
        positions
    }
}

/// The events that a selection may see.
enum Candidates<'a> {
    All,
    Indexed(Arc<OnceLock<Positions>>, Values<'a>),
}

impl Candidates<'_> {
    /// The position of the first candidate at or after `start`.
    fn next(&self, start: usize) -> Option<usize> {
        let Self::Indexed(positions, values) = self else { return Some(start) };
        let first = |value: &str| {
            let positions = positions.get()?.get(value)?;
            let at = positions.partition_point(|position| (*position as usize) < start);
            positions.get(at).map(|position| *position as usize)
        };
        values.iter().filter_map(first).min()
    }
}

#[cfg(test)]
mod tests {
    use kubefan_model::{
        GroupVersionResource,
        event::EventType,
        fields::FieldTable,
        selector::{FieldSelector, LabelSelector},
    };
    use proptest::prelude::*;

    use super::*;

    const LABELS: [&str; 7] =
        ["", "app=web", "app!=web", "app in (web,db)", "app in (web,a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q)", "app", "!app"];
    const FIELDS: [&str; 3] = ["", "spec.nodeName=n1", "metadata.name=p7"];

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_selection_sees_the_same_events_with_an_index_and_without(
            changes in prop::collection::vec((0..3usize, 0..3usize, 0..2usize, 0..2usize, any::<bool>()), 0..200),
            start in 0..220usize,
        ) {
            let gvr = GroupVersionResource::new("", "v1", "pods");
            let table = FieldTable::new(&gvr, true, &[]);
            let parser = Arc::new(ObjectParser::new(&table));
            let object = |number: usize, app: usize, node: usize| {
                let labels = ["", r#""app":"web""#, r#""app":"db""#][app];
                let json = format!(
                    r#"{{"metadata":{{"namespace":"ns{}","name":"p{number}","uid":"u","resourceVersion":"5","labels":{{{labels}}}}},"spec":{{"nodeName":"n{node}"}}}}"#,
                    number % 2
                );
                Arc::new(parser.parse(json.as_bytes()).unwrap())
            };
            let events = changes.iter().enumerate().map(|(number, (before, after, was, is, deletes))| {
                let kind = if *deletes { EventType::Deleted } else { EventType::Modified };
                let version = ResourceVersion::new(number as u64 + 1).unwrap();
                let previous = object(number, *before, *was);
                Arc::new(WatchEvent::new(kind, version, object(number, *after, *is), Some(previous)))
            });
            let version = |number| ResourceVersion::new(number).unwrap();
            let gap = Gap::new(version(1), version(1000), RelistReason::Expired, events.collect());
            for (labels, fields) in LABELS.into_iter().flat_map(|labels| FIELDS.map(|fields| (labels, fields))) {
                for namespace in ["", "ns1"] {
                    let labels = LabelSelector::parse(labels).unwrap();
                    let fields = FieldSelector::parse(fields).unwrap();
                    let selection = Selection::bind(namespace, "", labels, &fields, &table, parser.clone(), &gvr).unwrap();
                    let all = gap.events.iter().enumerate().skip(start);
                    let expected: Vec<_> =
                        all.filter_map(|(at, event)| Some((at, event.transition(&selection)?))).collect();
                    let found: Vec<_> = gap.select(&selection, start).map(|(at, _, seen)| (at, seen)).collect();
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }
}
