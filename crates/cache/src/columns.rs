//! The labels and fields (columns) that a cache is indexed by: those that selections use, and no
//! others.
//!
//! An index costs memory and a part of each commit. So a column is indexed when selections have
//! used it more than once, and dropped when none has for a while. Clients choose the columns, so
//! their number is limited; other columns are scanned.
//!
//! A tenant that uses one label after the other could take all places. All others would scan, and a
//! scan takes time from every caller. So each column is charged to one tenant: to one with few
//! columns, if several use it. If all places are taken, the tenant with the most columns loses one
//! to any tenant with at least two fewer.

use std::{cmp::Reverse, time::Duration};

use kubefan_model::selection::Selection;
use tokio::time::Instant;

use super::{
    equality_term::{Column, Term},
    tenant_bytes::Tenant,
};

/// The most columns of one cache that have a place: their index exists, is being built, or found no
/// room.
pub const COLUMNS_MAX: usize = 8;
/// The most columns without a place. Only their uses are counted.
pub const WANTED_MAX: usize = 24;
/// A column is indexed when this many selections have used it.
pub const COLUMN_USES_LEAST: u32 = 2;
/// Time without use after which a column is dropped. It is longer than the default age of the
/// ring's records.
pub const COLUMN_UNUSED_MAX: Duration = Duration::from_secs(20 * 60);

/// Time after which a column is tried again whose index found no room.
pub const TOO_LARGE_RETRY: Duration = COLUMN_UNUSED_MAX;

/// The columns that selections have used: up to [`COLUMNS_MAX`] with a place, and others.
#[derive(Default)]
pub struct Columns {
    used: Vec<UsedColumn>,
    is_closed: bool,
}

struct UsedColumn {
    column: Column,
    uses: u32,
    used_at: Instant,
    /// Start of the current state.
    since: Instant,
    state: ColumnState,
    /// The tenant that it is charged to.
    tenant: Tenant,
    /// Time of the last use by that tenant.
    tenant_used_at: Instant,
}

/// A column whose index is to be built now.
#[derive(Debug, PartialEq, Eq)]
pub struct DueColumn {
    /// The label or field.
    pub column: Column,
    /// The column that it replaces, whose index is to be dropped.
    pub replaced: Option<Column>,
}

/// The state of a column's index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnState {
    /// No index, and no place for one.
    Wanted,
    /// An index is being built.
    Building,
    /// An index.
    Indexed,
    /// No index, because the budget had no room for it.
    TooLarge,
}

impl UsedColumn {
    /// Whether it is one of the [`COLUMNS_MAX`], also if its index found no room.
    fn has_place(&self) -> bool {
        self.state != ColumnState::Wanted
    }
}

impl Columns {
    /// Counts a use of a column by a tenant. Returns the column if its index is to be built now.
    pub fn used(&mut self, column: Column, tenant: Tenant, now: Instant) -> Option<DueColumn> {
        let known = self.used.iter().position(|used| used.column == column);
        let at = known.or_else(|| self.add(column, tenant, now))?;
        let used = &mut self.used[at];
        used.uses = used.uses.saturating_add(1);
        used.used_at = now;
        // The budget may have room again.
        if used.state == ColumnState::TooLarge && now.saturating_duration_since(used.since) > TOO_LARGE_RETRY {
            used.state = ColumnState::Wanted;
        }
        self.charge_to(at, tenant, now);
        if self.used[at].has_place() || self.used[at].uses < COLUMN_USES_LEAST || self.is_closed {
            return None;
        }
        let is_full = self.used.iter().filter(|used| used.has_place()).count() >= COLUMNS_MAX;
        let replaced = if is_full { Some(self.take_place(self.used[at].tenant)?) } else { None };
        let used = &mut self.used[at];
        used.state = ColumnState::Building;
        Some(DueColumn { column: used.column.clone(), replaced })
    }

    /// Adds a column without a place. If there are too many of these, the tenant with the most of
    /// them loses the one that was not used for the longest time.
    fn add(&mut self, column: Column, tenant: Tenant, now: Instant) -> Option<usize> {
        let added = UsedColumn {
            column,
            uses: 0,
            used_at: now,
            since: now,
            state: ColumnState::Wanted,
            tenant,
            tenant_used_at: now,
        };
        if self.used.len() < COLUMNS_MAX + WANTED_MAX {
            self.used.push(added);
            return Some(self.used.len() - 1);
        }
        let at = self.oldest_of_largest_tenant(|used| !used.has_place())?;
        self.used[at] = added;
        Some(at)
    }

    /// Charges a column to the tenant that uses it, if that tenant then still has fewer columns
    /// than the one before, or if the one before has not used it for long. Columns with a place and
    /// those without one are counted apart.
    fn charge_to(&mut self, at: usize, tenant: Tenant, now: Instant) {
        let UsedColumn { tenant: charged, tenant_used_at, .. } = &self.used[at];
        let has_place = self.used[at].has_place();
        let count = |tenant: Tenant| self.count(tenant, |used| used.has_place() == has_place);
        let moves =
            count(tenant) + 1 < count(*charged) || now.saturating_duration_since(*tenant_used_at) > COLUMN_UNUSED_MAX;
        if moves || tenant == *charged {
            self.used[at].tenant = tenant;
            self.used[at].tenant_used_at = now;
        }
    }

    /// Counts these columns of a tenant.
    fn count(&self, tenant: Tenant, these: impl Fn(&UsedColumn) -> bool) -> usize {
        self.used.iter().filter(|used| used.tenant == tenant && these(used)).count()
    }

    /// Finds the tenant with the most of these columns, and the one of its columns that was not
    /// used for the longest time.
    fn oldest_of_largest_tenant(&self, these: impl Fn(&UsedColumn) -> bool) -> Option<usize> {
        let found = self.used.iter().enumerate().filter(|(_, used)| these(used));
        let oldest = found.max_by_key(|(_, used)| (self.count(used.tenant, &these), Reverse(used.used_at)));
        oldest.map(|(at, _)| at)
    }

    /// Takes a place for a tenant from the tenant with the most. Returns the column that had it.
    /// `None` if the tenant with the most would then have fewer than the other.
    fn take_place(&mut self, tenant: Tenant) -> Option<Column> {
        // A build that is under way is completed: others wait for it.
        let can_be_taken = |used: &UsedColumn| used.has_place() && used.state != ColumnState::Building;
        let at = self.oldest_of_largest_tenant(can_be_taken)?;
        let count = |tenant: Tenant| self.count(tenant, UsedColumn::has_place);
        // The one gets a place more and the other has one less.
        if count(tenant) + 2 > count(self.used[at].tenant) {
            return None;
        }
        let used = &mut self.used[at];
        used.state = ColumnState::Wanted;
        Some(used.column.clone())
    }

    /// Finds the column whose index is dropped if the budget is exceeded: the largest of the tenant
    /// with the most bytes. `indexes` are the parts of all indexes, with their bytes.
    ///
    /// A column whose index is being built is never chosen, because its build is not cancelled. If
    /// the column got a second build meanwhile, the first one would complete the index of the
    /// second, and the steps between their starts would be missing.
    pub fn to_drop<'a>(&self, indexes: impl Iterator<Item = (&'a Column, usize)>) -> Option<Column> {
        let mut sizes: Vec<(&UsedColumn, usize)> = self.used.iter().map(|used| (used, 0)).collect();
        // The index of a column has one part in the state and one in history.
        for (column, bytes) in indexes {
            if let Some((_, size)) = sizes.iter_mut().find(|(used, _)| used.column == *column) {
                *size += bytes;
            }
        }
        let tenant_bytes = |tenant: Tenant| {
            let of_tenant = sizes.iter().filter(|(used, _)| used.tenant == tenant);
            of_tenant.map(|(_, bytes)| bytes).sum::<usize>()
        };
        let is_built = |used: &UsedColumn| used.state != ColumnState::Building;
        let built = sizes.iter().filter(|(used, bytes)| *bytes > 0 && is_built(used));
        let largest = built.max_by_key(|(used, bytes)| (tenant_bytes(used.tenant), *bytes));
        largest.map(|(used, _)| used.column.clone())
    }

    /// Records that a standing selection still uses its column.
    pub fn retain(&mut self, selection: &Selection, now: Instant) {
        for term in Term::all(selection) {
            if let Some(used) = self.used.iter_mut().find(|used| used.column == term.column) {
                used.used_at = now;
            }
        }
    }

    /// Records how far a column is indexed.
    pub fn set(&mut self, column: &Column, state: ColumnState, now: Instant) {
        if let Some(used) = self.used.iter_mut().find(|used| used.column == *column) {
            used.state = state;
            used.since = now;
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
        for used in &mut self.used {
            used.state = ColumnState::Wanted;
        }
    }

    /// Whether columns may be indexed.
    pub fn is_open(&self) -> bool {
        !self.is_closed
    }

    /// Allows or forbids indexes of columns.
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
    use std::{num::NonZeroU64, sync::Arc};

    use kubefan_model::{
        GroupVersionResource,
        fields::FieldTable,
        object::ObjectParser,
        selector::{FieldSelector, LabelSelector},
    };

    use super::*;

    fn select(labels: &str) -> Selection {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let labels = LabelSelector::parse(labels).unwrap();
        let parser = Arc::new(ObjectParser::new(&table));
        Selection::bind("", "", labels, &FieldSelector::default(), &table, parser, &gvr).unwrap()
    }

    fn column_of(labels: &str) -> Column {
        Term::all(&select(labels)).remove(0).column
    }

    fn use_twice(columns: &mut Columns, labels: &str, tenant: Tenant, now: Instant) -> Option<DueColumn> {
        let first = columns.used(column_of(labels), tenant, now);
        columns.used(column_of(labels), tenant, now).or(first)
    }

    /// A column of a tenant in each place, the first one used before the others.
    fn fill(columns: &mut Columns, tenant: Tenant, now: Instant) {
        for key in 0..COLUMNS_MAX {
            let used_at = now + Duration::from_secs(key as u64);
            let due = use_twice(columns, &format!("key-{key}=x"), tenant, used_at).unwrap();
            columns.set(&due.column, ColumnState::Indexed, used_at);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_column_is_indexed_when_it_is_used_again_and_dropped_when_it_is_not() {
        let mut columns = Columns::default();
        let now = Instant::now();
        let web = select("app=web");
        assert_eq!(columns.used(column_of("app=web"), None, now), None, "one scan is cheaper than an index");
        let column = columns.used(column_of("app=db"), None, now).unwrap().column;
        assert_eq!(columns.used(column_of("app=web"), None, now), None, "it is being built");
        columns.set(&column, ColumnState::Indexed, now);
        assert_eq!(columns.used(column_of("app=web"), None, now), None);
        columns.retain(&web, now + COLUMN_UNUSED_MAX);
        assert!(columns.forget_unused(now + COLUMN_UNUSED_MAX * 2).is_empty(), "a standing selection retains it");
        assert_eq!(columns.forget_unused(now + COLUMN_UNUSED_MAX * 2 + Duration::from_secs(1)), [column]);
        assert_eq!(columns.used(column_of("app=web"), None, now), None, "it is new again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_column_that_found_no_room_is_tried_again_later() {
        let mut columns = Columns::default();
        let now = Instant::now();
        let due = use_twice(&mut columns, "app=web", None, now).unwrap();
        columns.set(&due.column, ColumnState::TooLarge, now);
        let mut used = |now| columns.used(column_of("app=web"), None, now);
        assert_eq!(used(now + TOO_LARGE_RETRY), None);
        assert_eq!(used(now + TOO_LARGE_RETRY + Duration::from_secs(1)), Some(due));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_columns_is_limited_and_indexed_ones_stay() {
        let mut columns = Columns::default();
        let now = Instant::now();
        fill(&mut columns, None, now);
        assert_eq!(use_twice(&mut columns, "other=x", None, now), None, "there is no room");
        columns.reset();
        assert!(columns.used(column_of("other=x"), None, now).is_some());
        columns.open(false);
        assert_eq!(columns.used(column_of("key-1=x"), None, now), None, "memory is short");
    }

    #[tokio::test(start_paused = true)]
    async fn the_tenant_with_the_most_columns_loses_some_to_one_that_has_fewer() {
        let mut columns = Columns::default();
        let now = Instant::now();
        let [greedy, honest, third] = [1, 2, 3].map(NonZeroU64::new);
        fill(&mut columns, greedy, now);
        assert_eq!(columns.used(column_of("a=x"), honest, now), None, "one scan is cheaper than an index");
        for (at, labels) in ["a=x", "b=x", "c=x", "d=x"].into_iter().enumerate() {
            let due = use_twice(&mut columns, labels, honest, now).unwrap();
            assert_eq!(due.replaced, Some(column_of(&format!("key-{at}=x"))), "the oldest");
            columns.set(&due.column, ColumnState::Indexed, now);
        }
        assert_eq!(use_twice(&mut columns, "e=x", honest, now), None, "each has four");
        assert_eq!(use_twice(&mut columns, "key-0=x", greedy, now), None);
        assert!(use_twice(&mut columns, "f=x", third, now).is_some(), "of one of them");
    }

    #[tokio::test(start_paused = true)]
    async fn a_column_that_a_tenant_with_few_uses_too_is_charged_to_it_while_it_does() {
        let mut columns = Columns::default();
        let now = Instant::now();
        let [greedy, honest, third] = [1, 2, 3].map(NonZeroU64::new);
        fill(&mut columns, greedy, now);
        columns.used(column_of("key-0=x"), honest, now);
        columns.used(column_of("key-0=x"), greedy, now);
        let due = use_twice(&mut columns, "a=x", third, now).unwrap();
        assert_eq!(due.replaced, Some(column_of("key-1=x")), "the oldest of those that only one tenant uses");
        columns.set(&due.column, ColumnState::Indexed, now);
        let later = now + COLUMN_UNUSED_MAX + Duration::from_secs(1);
        columns.used(column_of("key-0=x"), greedy, later);
        assert_eq!(columns.count(honest, UsedColumn::has_place), 0, "it has gone");
        assert_eq!(columns.count(greedy, UsedColumn::has_place), COLUMNS_MAX - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn many_columns_of_one_tenant_do_not_make_those_of_others_forgotten() {
        let mut columns = Columns::default();
        let now = Instant::now();
        let [greedy, honest] = [1, 2].map(NonZeroU64::new);
        fill(&mut columns, greedy, now);
        columns.used(column_of("app=web"), honest, now);
        for key in 0..10 * WANTED_MAX {
            columns.used(column_of(&format!("once-{key}=x")), greedy, now + Duration::from_secs(key as u64));
        }
        assert_eq!(columns.used.len(), COLUMNS_MAX + WANTED_MAX);
        assert!(columns.used(column_of("app=web"), honest, now).is_some(), "its first use was not forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn the_largest_index_of_the_tenant_with_the_most_bytes_makes_room() {
        let mut columns = Columns::default();
        let now = Instant::now();
        let [greedy, honest] = [1, 2].map(NonZeroU64::new);
        for (labels, tenant) in [("a=x", greedy), ("b=x", greedy), ("c=x", honest)] {
            columns.used(column_of(labels), tenant, now);
        }
        let [a, b, c] = ["a=x", "b=x", "c=x"].map(column_of);
        let largest = |bytes: [usize; 4]| columns.to_drop([&a, &b, &c, &a].into_iter().zip(bytes));
        assert_eq!(largest([40, 50, 100, 20]), Some(a.clone()), "its parts have 60, and both of its tenant 110");
        assert_eq!(largest([20, 50, 100, 20]), Some(c.clone()));
        assert_eq!(largest([0; 4]), None);
    }

    /// Otherwise its build could complete the index of a later one, in which steps are missing.
    #[tokio::test(start_paused = true)]
    async fn a_column_that_is_being_built_makes_no_room() {
        let mut columns = Columns::default();
        let now = Instant::now();
        let due = use_twice(&mut columns, "a=x", None, now).unwrap();
        let index = (&due.column, 100);
        assert_eq!(columns.to_drop(std::iter::once(index)), None);
        columns.set(&due.column, ColumnState::Indexed, now);
        assert_eq!(columns.to_drop(std::iter::once(index)).as_ref(), Some(&due.column));
    }
}
