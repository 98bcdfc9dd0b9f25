//! Builds the index of a column for the state and history that exist, while both continue.
//!
//! The build starts and ends in the hub's critical section and does its work outside of it, in
//! parts. The hazard is a change in between that is filed nowhere. Three parts meet at the version
//! of the start: the postings are made from the state at that version and then follow the objects
//! that have changed since. New steps of history, and steps that move from the ring to the
//! conflated history, are filed from the start on. The steps before it are filed from a copy of
//! history, and put in front of those.

use std::{collections::HashMap, sync::Arc};

use kubefan_model::{
    ObjectKey, ResourceVersion,
    object::{Object, ObjectParser},
};

use super::{
    budget::Budget,
    conflated::PriorState,
    equality_term::Column,
    history::{History, HistoryCopy},
    history_index::HistoryColumn,
    postings::PostingBuilder,
    ring::HistoryRecord,
    store::Store,
};

/// Objects, postings or steps per part of a build. A part takes a few milliseconds. Tests divide
/// small builds into parts too.
const PART: usize = if cfg!(test) { 8 } else { 4096 };
/// Number of changes during the build above which it is given up.
const CHANGES_MAX: usize = 10_000;

/// An index that is being built.
pub struct ColumnBuild {
    column: Column,
    epoch: u64,
    /// The state at the start.
    store: Store,
    version: ResourceVersion,
    /// The number of the first conflated change after the start.
    started: u64,
    stage: Stage,
    /// The last object that was read.
    last: Option<ObjectKey>,
    postings: PostingBuilder,
    /// The history before the start.
    copy: HistoryCopy,
    /// The number of its first conflated change.
    first: u64,
    /// Number of its records and changes that were filed.
    filed: usize,
    /// State of objects after a change that is still to be filed.
    after: HashMap<ObjectKey, Option<Arc<Object>>>,
    steps: HistoryColumn,
    /// The budget that it must fit into.
    indexes: Budget,
    /// Objects, postings or steps per part.
    part: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Objects,
    Postings,
    Copy,
    Records,
    Changes,
    Done,
    TooLarge,
}

/// Needs of the next part of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextPart {
    /// Nothing but [`ColumnBuild::work`].
    Work,
    /// The history of the cache: [`ColumnBuild::copy`].
    History,
    /// The cache: it is complete, or too large.
    Install,
}

impl ColumnBuild {
    /// Starts a build with the cache at `version` of `epoch`, as large as `indexes` has room for.
    pub fn start(
        column: Column,
        parser: &Arc<ObjectParser>,
        epoch: u64,
        version: ResourceVersion,
        store: &Store,
        history: &mut History,
        indexes: &Budget,
    ) -> Self {
        history.steps_mut().start(column.clone(), parser.clone());
        // A namespace is a range of the store.
        let stage = if column == Column::Namespace { Stage::Copy } else { Stage::Objects };
        Self {
            epoch,
            store: store.clone(),
            version,
            started: history.conflated().end(),
            stage,
            last: None,
            postings: PostingBuilder::new(column.clone(), parser.clone()),
            copy: HistoryCopy::of(version),
            first: 0,
            filed: 0,
            after: HashMap::new(),
            steps: HistoryColumn::new(column.clone(), parser.clone()),
            column,
            indexes: indexes.clone(),
            part: PART,
        }
    }

    /// Sets the number of objects, postings or steps per part.
    pub fn in_parts_of(mut self, part: usize) -> Self {
        self.part = part;
        self
    }

    /// The label or field.
    pub fn column(&self) -> &Column {
        &self.column
    }

    /// The history that it is of.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the needs of the next part.
    pub fn next(&self) -> NextPart {
        match self.stage {
            Stage::Copy => NextPart::History,
            Stage::Objects | Stage::Postings | Stage::Records | Stage::Changes => NextPart::Work,
            Stage::Done | Stage::TooLarge => NextPart::Install,
        }
    }

    /// Does a part of the work that needs nothing but its own data.
    pub fn work(&mut self) {
        match self.stage {
            Stage::Objects => {
                let store = self.store.clone();
                let last = self.last.take();
                for object in store.after(last.as_ref()).take(self.part) {
                    self.postings.read(object);
                    self.last = Some(object.key().clone());
                }
                if self.last.is_none() {
                    self.stage = if self.postings.end(self.indexes.room()) { Stage::Postings } else { Stage::TooLarge };
                }
            }
            Stage::Postings if !self.postings.file(self.part) => self.stage = Stage::Copy,
            Stage::Records => self.file_records(),
            Stage::Changes => self.file_changes(),
            Stage::Postings | Stage::Copy | Stage::Done | Stage::TooLarge => {}
        }
    }

    /// Copies a part of the history of the cache.
    pub fn copy(&mut self, history: &History) {
        if !history.copy(&mut self.copy, self.part / 4) {
            let conflated = history.conflated();
            let changes = &self.copy.changes;
            self.first = changes.first().map_or(conflated.end(), |first| conflated.number_at(first.version));
            self.stage = Stage::Records;
        }
    }

    fn file_records(&mut self) {
        let records = &self.copy.records;
        let part = records.iter().skip(self.filed).take(self.part);
        for (record, _) in part {
            if let HistoryRecord::Event(event) = record {
                self.steps.file_recent(event);
            }
            // The state after a change is the state before the next change of the object.
            for event in record.events() {
                self.after.entry(event.object().key().clone()).or_insert_with(|| event.previous());
            }
            self.filed += 1;
        }
        if self.filed == records.len() {
            self.stage = Stage::Changes;
            self.filed = 0;
        }
    }

    fn file_changes(&mut self) {
        let Self { copy, store, after, steps, filed, first, started, part, .. } = self;
        let changes = copy.changes.iter().enumerate().rev();
        for (at, PriorState { key, before, .. }) in changes.skip(*filed).take(*part) {
            let number = *first + at as u64;
            // Steps after the start were filed when they became history.
            if number < *started {
                let current = || store.get(key.as_str()).cloned();
                let after = after.get(key).cloned().unwrap_or_else(current);
                steps.file_oldest(number, before.as_ref(), after.as_ref());
            }
            after.insert(key.clone(), before.clone());
            *filed += 1;
        }
        if *filed == copy.changes.len() {
            self.stage = Stage::Done;
        }
    }

    /// Adds the column to the state and history that have followed from those of the start. Returns
    /// whether it is within the limits, and `None` if too much has changed meanwhile.
    pub fn install(self, store: &mut Store, history: &mut History) -> Option<bool> {
        let is_done = self.stage == Stage::Done;
        let installed = is_done.then(|| self.complete(store, history));
        match installed {
            None => Some(false),
            Some(is_complete) => is_complete.then_some(true),
        }
    }

    fn complete(self, store: &mut Store, history: &mut History) -> bool {
        if self.column != Column::Namespace {
            let mut postings = self.postings.finish();
            let Ok(records) = history.ring().since(self.version) else { return false };
            let mut changes = 0;
            for event in records.flat_map(HistoryRecord::events) {
                changes += 1;
                if changes > CHANGES_MAX {
                    return false;
                }
                let object = event.object();
                let key = object.key().as_str();
                postings.follow(self.store.get(key), store.get(key));
            }
            store.postings_mut().insert(postings);
        }
        history.steps_mut().complete(self.steps);
        true
    }
}

#[cfg(test)]
mod tests;
