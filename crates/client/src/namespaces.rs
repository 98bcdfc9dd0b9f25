//! Several namespaces as one resource.
//!
//! A program that may not read all namespaces needs one watch for each. Each watch has a version of
//! its own, and a new list of one namespace says nothing of the others. So each namespace gets a
//! reflector of its own, and their changes become one watch:
//!
//! - The first state is complete when every namespace's is, so an informer has synced when all
//!   have.
//! - A later list of one namespace becomes a batch: the new and the changed objects, and a deletion
//!   of unknown final state for each object of that namespace that vanished.
//! - The version is the lowest of all namespaces: up to there every one of them is complete. A
//!   quiet namespace moves it with its bookmarks only.

mod merge;

use std::{collections::BTreeSet, fmt, future::ready, sync::Arc};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};

use self::merge::{Merge, Undecoded};
use crate::{
    error::{ApiStatus, ClientError},
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvents},
    streams::watcher_with,
    version::number,
};

/// The objects of a page, if a namespace is listed in pages.
const PAGE_SIZE: u32 = 500;

/// Reads one resource in several namespaces.
///
/// The watch reconnects by itself, each namespace on its own: an error of one namespace does not
/// interrupt the others. It cannot resume after it was dropped. A watch from a version is expired,
/// and starts over with the complete state.
///
/// ```
/// use kubefan_client::{FakeListWatch, Namespaces, SharedInformer};
/// # let client = |namespace: &str| FakeListWatch::new();
/// // With a real server: `|namespace| ListWatch::new(client.clone(), "pods", namespace, "")`.
/// let pods = Namespaces::new(["default", "web"], |namespace| client(namespace));
/// let informer = SharedInformer::<serde_json::Value>::new(pods);
/// # drop(informer);
/// ```
#[derive(Clone)]
pub struct Namespaces {
    sources: Arc<[Arc<dyn ListerWatcher>]>,
    seed: Option<u64>,
}

impl Namespaces {
    /// Returns the reader of these namespaces. `source` makes the reader of one. A namespace that
    /// is named twice is read once. An empty name means all namespaces, and then the others are not
    /// read apart.
    pub fn new<N, S>(namespaces: impl IntoIterator<Item = N>, source: impl Fn(&str) -> S) -> Self
    where
        N: AsRef<str>,
        S: ListerWatcher,
    {
        let mut names: BTreeSet<String> = namespaces.into_iter().map(|name| name.as_ref().to_owned()).collect();
        if names.contains("") {
            names.retain(String::is_empty);
        }
        let sources = names.iter().map(|name| Arc::new(source(name)) as Arc<dyn ListerWatcher>).collect();
        Self { sources, seed: None }
    }

    /// The seed of the jitter of retries, for simulations. Default: random.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    async fn list_all(&self) -> Result<ListPage, ClientError> {
        let mut all = ListPage::default();
        let mut versions = Vec::new();
        for source in self.sources.iter() {
            let mut options = ListOptions { limit: PAGE_SIZE, ..ListOptions::default() };
            loop {
                let page = source.list(options.clone()).await?;
                all.objects.extend(page.objects);
                if page.continue_token.is_empty() {
                    versions.push(number(&page.resource_version));
                    break;
                }
                options.continue_token = page.continue_token;
            }
        }
        let lowest = versions.into_iter().collect::<Option<Vec<_>>>().and_then(|versions| versions.into_iter().min());
        all.resource_version = lowest.map_or_else(String::new, |version| version.to_string());
        all.objects.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(all)
    }

    fn start_watch(&self) -> WatchEvents {
        let watches = self.sources.iter().enumerate().map(|(index, source)| {
            let seed = self.seed.map(|seed| seed.wrapping_add(index as u64));
            let watch = watcher_with::<Undecoded>(source.clone(), |reflector| match seed {
                Some(seed) => reflector.seed(seed),
                None => reflector,
            });
            watch.map(move |event| (index, event))
        });
        let mut merge = Merge::new(self.sources.len());
        let first = stream::iter(merge.start());
        // Without a namespace there is no event, but the watch must not end.
        let events = stream::select_all(watches).chain(stream::pending());
        let later = events.map(move |(index, event)| stream::iter(merge.accept(index, event))).flatten();
        first.chain(later).map(Ok).boxed()
    }
}

impl ListerWatcher for Namespaces {
    /// Lists all namespaces one after the other, as one page. The version is the lowest.
    fn list(&self, _: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        self.list_all().boxed()
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        if !options.send_initial_events {
            return ready(Err(ApiStatus::new(
                410,
                "Expired",
                "a watch of several namespaces starts with their state, not at a version",
            )
            .into()))
            .boxed();
        }
        let watch = self.start_watch();
        let watch = match options.timeout {
            Some(timeout) => watch.take_until(tokio::time::sleep(timeout)).boxed(),
            None => watch,
        };
        ready(Ok(watch)).boxed()
    }

    fn watch_reconnects(&self) -> bool {
        true
    }

    fn describe(&self) -> String {
        match &*self.sources {
            [] => "no namespaces".to_owned(),
            [source] => source.describe(),
            [source, ..] => format!("{} in {} namespaces", source.describe(), self.sources.len()),
        }
    }
}

impl fmt::Debug for Namespaces {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Namespaces").field("sources", &self.sources.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
