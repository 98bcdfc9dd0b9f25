//! Reads the objects of a list in slices, and sends them in chunks.
//!
//! The hazard is a list of a large cache, or one with a selector of many terms: it must neither be
//! built as a whole, nor hold up the other tasks of its thread.

use std::{future::Future, ops::ControlFlow, sync::Arc};

use futures::{Stream, stream};
use kubefan_cache::Store;
use kubefan_model::{ObjectKey, object::Object, selection::Selection};
use tokio::task::yield_now;

/// The approximate size of a chunk, in bytes.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;

/// The selected objects of a state after a key.
#[derive(Clone, Copy)]
pub(crate) struct SelectedAfter<'a> {
    /// The state.
    pub(crate) store: &'a Store,
    /// The selection.
    pub(crate) selection: &'a Selection,
    /// The key; `None` for all selected objects.
    pub(crate) last: Option<&'a ObjectKey>,
}

/// The objects that a visit has reached.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Visited {
    /// The last object that was tested. The next visit starts after it.
    pub(crate) last: Option<ObjectKey>,
    /// Whether no object is left.
    pub(crate) is_complete: bool,
}

impl SelectedAfter<'_> {
    /// Calls `each` for the objects, in key order, until it breaks. Other tasks run after each
    /// slice of `tests` tests.
    pub(crate) async fn visit(self, tests: usize, mut each: impl FnMut(&Arc<Object>) -> ControlFlow<()>) -> Visited {
        let Self { store, selection, last } = self;
        let mut last = last.cloned();
        loop {
            let (reached, is_over, is_complete) = {
                let mut scan = store.scan(selection, last.as_ref(), tests);
                let is_over = scan.by_ref().any(|object| each(object).is_break()) || scan.is_complete();
                (scan.tested().cloned(), is_over, scan.is_complete())
            };
            last = reached.or(last);
            if is_over {
                return Visited { last, is_complete };
            }
            yield_now().await;
        }
    }
}

/// A chunk of a list.
pub(crate) struct Chunk<T> {
    /// Its content.
    pub(crate) content: T,
    /// Whether the list ends with it.
    pub(crate) is_last: bool,
}

/// A list that is sent in chunks.
pub(crate) trait SlicedList: Send {
    /// The content of a chunk.
    type Content;

    /// Makes the next chunk.
    fn next_chunk(&mut self) -> impl Future<Output = Chunk<Self::Content>> + Send;
}

/// Returns the chunks of a list. The stream keeps `held` until it is dropped.
pub(crate) fn chunks<L: SlicedList>(list: L, held: impl Send) -> impl Stream<Item = L::Content> + Send {
    stream::unfold(Some(list), move |list| {
        let _until_the_end = &held;
        async {
            let mut list = list?;
            let Chunk { content, is_last } = list.next_chunk().await;
            Some((content, (!is_last).then_some(list)))
        }
    })
}

#[cfg(test)]
mod tests {
    use kubefan_model::{
        GroupVersionResource,
        fields::FieldTable,
        object::ObjectParser,
        selector::{FieldSelector, LabelSelector},
    };

    use super::*;

    #[tokio::test]
    async fn a_visit_continues_after_the_last_tested_object_of_the_visit_before() {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        let mut store = Store::default();
        for name in ["a", "b", "c"] {
            let json = format!(r#"{{"metadata":{{"namespace":"x","name":"{name}","resourceVersion":"1"}}}}"#);
            store.insert(Arc::new(parser.parse(json.as_bytes()).unwrap()));
        }
        let labels = LabelSelector::default();
        let selection = Selection::bind("", "", labels, &FieldSelector::default(), &table, parser, &gvr).unwrap();
        let mut visits = Vec::new();
        let mut last = None;
        loop {
            let mut names = Vec::new();
            let put = |object: &Arc<Object>| {
                names.push(object.key().name().to_owned());
                if names.len() < 2 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            let selected = SelectedAfter { store: &store, selection: &selection, last: last.as_ref() };
            // A slice is shorter than a chunk.
            let visited = selected.visit(1, put).await;
            last = visited.last;
            visits.push(names);
            if visited.is_complete {
                break;
            }
        }
        assert_eq!(visits, [vec!["a", "b"], vec!["c"]]);
        assert_eq!(last, Some(ObjectKey::new("x", "c")));
    }
}
