//! The steps of history by the values of labels and fields.
//!
//! A view that resumes would test every record since its version, and 5,000 agents that return
//! after minutes would test all of them 5,000 times, inside the hub's lock. With the steps filed by
//! value, a resume looks at the steps of its term. The hazard is an object that leaves a selection:
//! it has another value after the change. So each step is filed under the value before it and the
//! one after it. Then a step that is not filed under a term changes nothing for a selection with
//! that term.
//!
//! Records of the ring are named by their versions, changes of the conflated history by their
//! numbers, because the changes of a gap share a version. A column is filled for the history that
//! exists while history continues: see [`super::column_build`].

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use kubefan_model::{
    ResourceVersion,
    event::WatchEvent,
    object::{Object, ObjectParser},
    selection::Selection,
};

use super::{
    equality_term::{Column, Term, Values},
    ring::HistoryRecord,
};

/// The memory of one value besides its text and steps, in bytes: its entry and two allocations.
const VALUE_BYTES: usize = 160;
/// Entries are swept when there are more than twice as many as steps, and this many.
const SWEPT_ENTRIES_LEAST: usize = 4096;

/// Steps of one value.
#[derive(Default)]
struct Steps {
    /// Versions of records of the ring, oldest first.
    recent: VecDeque<ResourceVersion>,
    /// Numbers of changes of the conflated history, oldest first. Evicted ones may be among them.
    older: VecDeque<u64>,
}

/// The steps of history by their values in one column.
pub struct HistoryColumn {
    column: Column,
    parser: Arc<ObjectParser>,
    values: HashMap<Box<str>, Steps>,
    entries: usize,
    text_bytes: usize,
}

/// The columns of a history.
#[derive(Default)]
pub struct HistoryIndex {
    columns: Vec<HistoryColumn>,
    /// Columns that hold only the steps after their start, until the rest is read.
    filling: Vec<HistoryColumn>,
}

/// The steps of a term.
pub struct HistoryMatches<'a> {
    column: &'a HistoryColumn,
    values: Values<'a>,
}

impl HistoryIndex {
    /// Starts a column. From now on, new steps are filed in it.
    pub fn start(&mut self, column: Column, parser: Arc<ObjectParser>) {
        self.filling.retain(|filling| filling.column != column);
        self.filling.push(HistoryColumn::new(column, parser));
    }

    /// Completes a started column with the steps from before its start.
    pub fn complete(&mut self, mut before: HistoryColumn) {
        if let Some(at) = self.filling.iter().position(|filling| filling.column == before.column) {
            before.append(self.filling.swap_remove(at));
            self.columns.push(before);
        }
    }

    /// Removes a column.
    pub fn remove(&mut self, column: &Column) {
        self.columns.retain(|known| known.column != *column);
        self.filling.retain(|known| known.column != *column);
    }

    /// The columns with their memory, in bytes.
    pub fn sizes(&self) -> impl Iterator<Item = (&Column, usize)> {
        self.columns.iter().chain(&self.filling).map(|column| (&column.column, column.bytes()))
    }

    /// The steps that a selection may see; `None` if they are not indexed.
    pub fn of<'a>(&'a self, selection: &'a Selection) -> Option<HistoryMatches<'a>> {
        if self.columns.is_empty() {
            return None;
        }
        let terms = Term::all(selection).into_iter().filter_map(|Term { column, values }| {
            let column = self.columns.iter().find(|known| known.column == column)?;
            Some(HistoryMatches { column, values })
        });
        terms.min_by_key(|term| term.steps().map(|steps| steps.recent.len() + steps.older.len()).sum::<usize>())
    }

    fn each(&mut self) -> impl Iterator<Item = &mut HistoryColumn> {
        self.columns.iter_mut().chain(&mut self.filling)
    }

    /// Files a new record of the ring.
    pub fn push(&mut self, record: &HistoryRecord) {
        if let HistoryRecord::Event(event) = record {
            for column in self.each() {
                column.file_recent(event);
            }
        }
    }

    /// Forgets a record that the ring has evicted.
    pub fn evicted(&mut self, record: &HistoryRecord) {
        if let HistoryRecord::Event(event) = record {
            for column in self.each() {
                column.pop_recent(event);
            }
        }
    }

    /// Files a change that went into the conflated history under this number.
    pub fn conflated(&mut self, number: u64, event: &WatchEvent) {
        for column in self.each() {
            column.file_event(event, |steps| steps.older.push_back(number));
        }
    }

    /// Removes evicted steps if they are most of it: records up to `floor`, and conflated changes
    /// before the number `first`. History has this many `steps` left.
    pub fn sweep(&mut self, floor: ResourceVersion, first: u64, steps: usize) {
        for column in self.each() {
            // A step has at most two values.
            if column.entries > SWEPT_ENTRIES_LEAST.max(4 * steps) {
                column.sweep(floor, first);
            }
        }
    }
}

impl HistoryColumn {
    /// Without steps.
    pub fn new(column: Column, parser: Arc<ObjectParser>) -> Self {
        Self { column, parser, values: HashMap::new(), entries: 0, text_bytes: 0 }
    }

    fn bytes(&self) -> usize {
        self.values.len() * VALUE_BYTES + self.text_bytes + self.entries * size_of::<ResourceVersion>()
    }

    /// Files the version of a record of the ring that is newer than all filed ones.
    pub fn file_recent(&mut self, event: &WatchEvent) {
        self.file_event(event, |steps| steps.recent.push_back(event.version()));
    }

    /// Files the number of a conflated change that is older than all filed ones, of an object that
    /// was `before` and then `after`.
    pub fn file_oldest(&mut self, number: u64, before: Option<&Arc<Object>>, after: Option<&Arc<Object>>) {
        self.file(before, after, |steps| steps.older.push_front(number));
    }

    /// Calls `file` with the steps of each value that an event has before it or after it.
    fn file_event(&mut self, event: &WatchEvent, file: impl FnMut(&mut Steps)) {
        self.file(Some(&event.object()), event.previous().as_ref(), file);
    }

    /// Calls `file` with the steps of each value of two objects. It adds one step.
    fn file(&mut self, one: Option<&Arc<Object>>, other: Option<&Arc<Object>>, mut file: impl FnMut(&mut Steps)) {
        let Self { column, parser, values, entries, text_bytes } = self;
        each_value(column, parser, one, other, |value| {
            *entries += 1;
            match values.get_mut(value) {
                Some(steps) => file(steps),
                None => {
                    *text_bytes += value.len();
                    file(values.entry(value.into()).or_default());
                }
            }
        });
    }

    fn pop_recent(&mut self, event: &WatchEvent) {
        let Self { column, parser, values, entries, text_bytes } = self;
        each_value(column, parser, Some(&event.object()), event.previous().as_ref(), |value| {
            let Some(steps) = values.get_mut(value) else { return };
            while steps.recent.front().is_some_and(|oldest| *oldest <= event.version()) {
                steps.recent.pop_front();
                *entries -= 1;
            }
            if steps.recent.is_empty() && steps.older.is_empty() {
                values.remove(value);
                *text_bytes -= value.len();
            }
        });
    }

    fn sweep(&mut self, floor: ResourceVersion, first: u64) {
        let entries = &mut self.entries;
        let text_bytes = &mut self.text_bytes;
        self.values.retain(|value, steps| {
            let older = steps.older.partition_point(|number| *number < first);
            let recent = steps.recent.partition_point(|version| *version <= floor);
            steps.older.drain(..older);
            steps.recent.drain(..recent);
            *entries -= older + recent;
            let is_used = !steps.recent.is_empty() || !steps.older.is_empty();
            *text_bytes -= if is_used { 0 } else { value.len() };
            is_used
        });
    }

    /// Appends the steps of a column that started where this one ends.
    fn append(&mut self, later: Self) {
        self.entries += later.entries;
        for (value, mut steps) in later.values {
            match self.values.get_mut(&value) {
                Some(known) => {
                    known.recent.append(&mut steps.recent);
                    known.older.append(&mut steps.older);
                }
                None => {
                    self.text_bytes += value.len();
                    self.values.insert(value, steps);
                }
            }
        }
    }
}

impl HistoryMatches<'_> {
    fn steps(&self) -> impl Iterator<Item = &Steps> {
        self.values.iter().filter_map(|value| self.column.values.get(value))
    }

    /// The versions of the ring's events after a version, oldest first.
    pub fn recent_after(&self, version: ResourceVersion) -> Vec<ResourceVersion> {
        let after = |steps: &Steps| {
            let start = steps.recent.partition_point(|known| *known <= version);
            steps.recent.range(start..).copied().collect::<Vec<_>>()
        };
        let mut versions: Vec<_> = self.steps().flat_map(after).collect();
        versions.sort_unstable();
        versions.dedup();
        versions
    }

    /// The numbers of conflated changes from one number to before another, oldest first.
    pub fn older_within(&self, first: u64, end: u64) -> Vec<u64> {
        let within = |steps: &Steps| {
            let start = steps.older.partition_point(|number| *number < first);
            let end = steps.older.partition_point(|number| *number < end);
            steps.older.range(start..end.max(start)).copied().collect::<Vec<_>>()
        };
        let mut numbers: Vec<_> = self.steps().flat_map(within).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }
}

/// Calls `each` with the value of one object and that of another, once if they are equal.
fn each_value(
    column: &Column,
    parser: &ObjectParser,
    one: Option<&Arc<Object>>,
    other: Option<&Arc<Object>>,
    mut each: impl FnMut(&str),
) {
    let one = one.and_then(|object| column.value(object, parser));
    let other = other.and_then(|object| column.value(object, parser));
    if let Some(value) = &one {
        each(value);
    }
    if let Some(value) = other.filter(|value| one.as_ref() != Some(value)) {
        each(&value);
    }
}
