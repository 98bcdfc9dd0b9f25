//! The sources of informers that also read from the apiserver: with the client library's fallback,
//! or with reads that move as those of the Go client's transport do.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use futures::future::BoxFuture;
use kubefan_client::{
    ApiserverStarts, BackoffOptions, BudgetedOptions, ClientError, Fallback, FallbackBudget, ListOptions, ListPage,
    ListerWatcher, WatchEvents, WithFallback,
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::{InformerRecorder, InformerSpec, Observed, http_source};
use crate::{
    history::version,
    http_transport::{RequestOptions, Servers},
    subscriber::ClientSettings,
    world::World,
};

/// Names of counts.
pub(crate) const FALLBACK_STARTS: &str = "lists and watches of the fallback at the apiserver";

/// Use of the apiserver by an informer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApiserverUse {
    Never,
    /// The client library falls back to it.
    FallsBack,
    /// The transport moves its reads.
    Moves,
}

/// Adds the apiserver to a source that reads from kubefan.
pub(super) fn with_fallback(
    kubefan: Arc<dyn ListerWatcher>,
    world: &Arc<World>,
    spec: &InformerSpec,
    settings: &ClientSettings,
    noted_by: &InformerRecorder,
    seed: u64,
) -> Arc<dyn ListerWatcher> {
    let mut random = Pcg64Mcg::seed_from_u64(seed);
    let budget = FallbackBudget { clients: random.random_range(1..20), starts_per_second: 4.0 };
    let backoff = BackoffOptions {
        initial: Duration::from_millis(random.random_range(200..3000)),
        max: Duration::from_secs(random.random_range(3..20)),
        ..BackoffOptions::default()
    };
    let starts = ApiserverStarts::new(BudgetedOptions { budget, backoff, seed: Some(random.random()) });
    let options = RequestOptions { is_http2: false, accepts_gzip: false, servers: Servers::Apiservers };
    let apiserver = http_source(world, spec, settings, &Arc::new(AtomicUsize::new(0)), random.random(), options);
    let noted = |source, window| NotedSource { source, window, world: world.clone(), recorder: noted_by.clone() };
    let window = Duration::from_secs_f64(f64::from(budget.clients) / budget.starts_per_second);
    Arc::new(WithFallback::new(noted(kubefan, None), noted(apiserver, Some(window)), Fallback::Budgeted(starts)))
}

/// Notes the starts at the apiserver, and the versions from which watches are resumed. A version of
/// the apiserver has no places, so an event of such a version may be lost or repeated.
struct NotedSource {
    source: Arc<dyn ListerWatcher>,
    /// For the apiserver: the time that each start must be after the one before.
    window: Option<Duration>,
    world: Arc<World>,
    recorder: InformerRecorder,
}

impl NotedSource {
    fn note_start(&self) {
        let Some(window) = self.window else { return };
        self.world.count(FALLBACK_STARTS, 1);
        self.recorder.note(Observed::ApiserverStart { window });
    }
}

impl ListerWatcher for NotedSource {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        // The later pages belong to the start of the first one.
        if options.continue_token.is_empty() {
            self.note_start();
        }
        self.source.list(options)
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        self.note_start();
        if let Some(from) = version(&options.resource_version).filter(|_| !options.send_initial_events) {
            self.recorder.note(Observed::Resumed(from));
        }
        self.source.watch(options)
    }

    fn supports_watch_list(&self) -> bool {
        self.source.supports_watch_list()
    }

    fn watch_reconnects(&self) -> bool {
        self.source.watch_reconnects()
    }

    fn describe(&self) -> String {
        self.source.describe()
    }
}
