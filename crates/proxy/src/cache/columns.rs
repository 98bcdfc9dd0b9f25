//! Which labels and fields a cache is indexed by: those that selections use, and no others.
//!
//! An index costs memory and a part of each commit. So a column is indexed when selections have
//! used it more than once, and dropped when none has for a while. Clients choose the columns, so
//! their number is limited; what is not indexed is scanned.

use std::time::Duration;

use tokio::time::Instant;

use super::term::{Column, Term};
use kubefan_model::selection::Selection;

/// The number of columns of one cache.
pub const COLUMNS_MAX: usize = 8;
/// A column is indexed when this many selections have used it.
pub const COLUMN_USES_LEAST: u32 = 2;
/// A column that no selection has used for so long is dropped. It is longer than the default age of
/// the ring's records.
pub const COLUMN_UNUSED_MAX: Duration = Duration::from_secs(20 * 60);

/// The time after which the index of a column is tried again that found no room.
pub const TOO_LARGE_RETRY: Duration = COLUMN_UNUSED_MAX;

/// The columns that selections have used.
#[derive(Default)]
pub struct Columns {
    used: Vec<UsedColumn>,
    is_closed: bool,
}

struct UsedColumn {
    column: Column,
    uses: u32,
    used_at: Instant,
    /// Since when the state is what it is.
    since: Instant,
    state: ColumnState,
}

/// What there is of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnState {
    /// No index.
    Wanted,
    /// An index is being built.
    Building,
    /// An index.
    Indexed,
    /// No index, because the budget had no room for it.
    TooLarge,
}

impl Columns {
    /// Counts a use of a column. Returns the column if its index is to be built now.
    pub fn used(&mut self, column: Column, now: Instant) -> Option<Column> {
        let at = self.used.iter().position(|used| used.column == column).or_else(|| self.add(column, now))?;
        let used = &mut self.used[at];
        used.uses = used.uses.saturating_add(1);
        used.used_at = now;
        // The budget may have room again.
        if used.state == ColumnState::TooLarge && now.saturating_duration_since(used.since) > TOO_LARGE_RETRY {
            used.state = ColumnState::Wanted;
        }
        let is_due = used.state == ColumnState::Wanted && used.uses >= COLUMN_USES_LEAST && !self.is_closed;
        is_due.then(|| {
            used.state = ColumnState::Building;
            used.column.clone()
        })
    }

    /// Adds a column, in place of the one that was not used for the longest time and is not
    /// indexed.
    fn add(&mut self, column: Column, used_at: Instant) -> Option<usize> {
        let added = UsedColumn { column, uses: 0, used_at, since: used_at, state: ColumnState::Wanted };
        if self.used.len() < COLUMNS_MAX {
            self.used.push(added);
            return Some(self.used.len() - 1);
        }
        let wanted = self.used.iter().enumerate().filter(|(_, used)| used.state == ColumnState::Wanted);
        let (oldest, _) = wanted.min_by_key(|(_, used)| used.used_at)?;
        self.used[oldest] = added;
        Some(oldest)
    }

    /// Records that a standing selection still uses its column.
    pub fn retain(&mut self, selection: &Selection, now: Instant) {
        for term in Term::all(selection) {
            if let Some(used) = self.used.iter_mut().find(|used| used.column == term.column) {
                used.used_at = now;
            }
        }
    }

    /// Records what there is of a column.
    pub fn set(&mut self, column: &Column, state: ColumnState, now: Instant) {
        if let Some(used) = self.used.iter_mut().find(|used| used.column == *column) {
            (used.state, used.since) = (state, now);
        }
    }

    /// Records that no complete index is left, and returns the columns that had one.
    pub fn lose(&mut self) -> Vec<Column> {
        let indexed = self.used.iter_mut().filter(|used| used.state == ColumnState::Indexed);
        let lost = indexed.map(|used| {
            used.state = ColumnState::Wanted;
            used.column.clone()
        });
        lost.collect()
    }

    /// Records that another history has started, without indexes.
    pub fn reset(&mut self) {
        self.used.iter_mut().for_each(|used| used.state = ColumnState::Wanted);
    }

    /// Whether columns may be indexed.
    pub fn is_open(&self) -> bool {
        !self.is_closed
    }

    /// Allows that columns are indexed, or forbids it.
    pub fn open(&mut self, open: bool) {
        self.is_closed = !open;
    }

    /// Forgets the columns that were not used for long, and returns them.
    pub fn forget_unused(&mut self, now: Instant) -> Vec<Column> {
        let is_unused = |used: &mut UsedColumn| now.saturating_duration_since(used.used_at) > COLUMN_UNUSED_MAX;
        self.used.extract_if(.., is_unused).map(|used| used.column).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use kubefan_model::{
        GroupVersionResource,
        fields::FieldTable,
        object::ObjectParser,
        selector::{FieldSelector, LabelSelector},
    };

    fn select(labels: &str) -> Selection {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let (labels, parser) = (LabelSelector::parse(labels).unwrap(), Arc::new(ObjectParser::new(&table)));
        Selection::bind("", "", labels, &FieldSelector::default(), &table, parser, &gvr).unwrap()
    }

    fn column_of(labels: &str) -> Column {
        Term::of(&select(labels)).unwrap().column
    }

    #[tokio::test(start_paused = true)]
    async fn a_column_is_indexed_when_it_is_used_again_and_dropped_when_it_is_not() {
        let (mut columns, now, web) = (Columns::default(), Instant::now(), select("app=web"));
        assert_eq!(columns.used(column_of("app=web"), now), None, "one scan is cheaper than an index");
        let column = columns.used(column_of("app=db"), now).unwrap();
        assert_eq!(columns.used(column_of("app=web"), now), None, "it is being built");
        columns.set(&column, ColumnState::Indexed, now);
        assert_eq!(columns.used(column_of("app=web"), now), None);
        columns.retain(&web, now + COLUMN_UNUSED_MAX);
        assert!(columns.forget_unused(now + COLUMN_UNUSED_MAX * 2).is_empty(), "a standing selection retains it");
        assert_eq!(columns.forget_unused(now + COLUMN_UNUSED_MAX * 2 + Duration::from_secs(1)), [column]);
        assert_eq!(columns.used(column_of("app=web"), now), None, "it is new again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_column_that_found_no_room_is_tried_again_later() {
        let (mut columns, now) = (Columns::default(), Instant::now());
        columns.used(column_of("app=web"), now);
        let column = columns.used(column_of("app=web"), now).unwrap();
        columns.set(&column, ColumnState::TooLarge, now);
        assert_eq!(columns.used(column_of("app=web"), now + TOO_LARGE_RETRY), None);
        assert_eq!(columns.used(column_of("app=web"), now + TOO_LARGE_RETRY + Duration::from_secs(1)), Some(column));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_columns_is_limited_and_indexed_ones_stay() {
        let (mut columns, now) = (Columns::default(), Instant::now());
        for key in 0..COLUMNS_MAX {
            let wanted = column_of(&format!("key-{key}=x"));
            columns.used(wanted.clone(), now);
            let column = columns.used(wanted, now).unwrap();
            columns.set(&column, ColumnState::Indexed, now);
        }
        columns.used(column_of("other=x"), now);
        assert_eq!(columns.used(column_of("other=x"), now), None, "there is no room");
        columns.reset();
        columns.used(column_of("other=x"), now);
        assert!(columns.used(column_of("other=x"), now).is_some());
        columns.open(false);
        assert_eq!(columns.used(column_of("key-1=x"), now), None, "memory is short");
    }
}
