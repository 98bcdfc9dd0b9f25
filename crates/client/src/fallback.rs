//! Reads from a kubefan and, if that is gone for long and the program asked for it, from an
//! apiserver.
//!
//! The hazard is the fallback itself. kubefan stands between an apiserver and a fleet of clients
//! that the apiserver could not serve. If all of them turn to the apiserver when kubefan fails,
//! they turn one outage into two. So the default is to wait: stores stay readable, and only grow
//! stale.
//!
//! The cost of the paced fallback for an apiserver: with 3,000 clients, 15 watches start each
//! minute, after ten minutes 150 are open, and after 200 minutes all 3,000, each with its share of
//! the events. There is never a list. A fleet that the apiserver could not carry in the end must
//! not use it: the first clients have fresh data, and an apiserver without priority and fairness,
//! which answers 429 in time, may fail all the same.
//!
//! The limit: each client has one moment in every 200 minutes. A hash of its id decides how long
//! after the start of its outage that is. The client makes at most one request to the apiserver
//! then, and none at any other time. Clients notice an outage at different times, but the hash does
//! not depend on those. So 0.5 % of the clients are expected in any minute, and with 3,000 clients
//! the worst minute stays below 1 %.

mod follow;
mod outage;
mod outage_errors;
mod paced_options;
mod servers;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::time::Instant;

use self::{follow::Follow, outage::Outage, outage_errors::Reachability, servers::Servers};
pub use paced_options::PacedOptions;

use crate::{
    error::ClientError,
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvents},
};

/// Behaviour while kubefan cannot be reached.
#[derive(Debug, Clone, Default)]
pub enum Fallback {
    /// Wait until it is back. The apiserver gets no request.
    #[default]
    Never,
    /// Watch the apiserver instead, each client at its own moment.
    Paced(PacedOptions),
}

/// Reads one resource from a kubefan, and by choice from an apiserver while the kubefan is gone.
///
/// With [`Fallback::Paced`], a client that has a version and whose kubefan was unreachable for
/// [`PacedOptions::after`] watches the apiserver from that version at its moment. It never lists
/// there: a client without a version waits for kubefan. An error of the apiserver ends its watch
/// until the client's next moment. A 429, any answer that asks for a delay, and an expired version
/// end it for the rest of the outage. Meanwhile kubefan is tried with a backoff. When it answers,
/// the apiserver's watch is dropped, and kubefan's continues from the last version.
///
/// Unreachable means: no connection, or an error of something in between. A credential that cannot
/// be read, so that nothing is sent, counts as no connection. A kubefan that answers with its own
/// errors, such as "not synced", is not gone: its apiserver may be the one in trouble.
///
/// Both servers must serve the same cluster, and select the same objects.
///
/// ```no_run
/// use kubefan_client::{Connection, Fallback, ListWatch, PacedOptions, SharedInformer, WithFallback};
/// # fn example(kubefan: Connection, apiserver: Connection) {
/// let pods = |connection: Connection| ListWatch::new(connection, "pods", "", "");
/// let paced = Fallback::Paced(PacedOptions::new("node-17"));
/// let source = WithFallback::new(pods(kubefan), pods(apiserver), paced);
/// let informer = SharedInformer::<serde_json::Value>::new(source);
/// # }
/// ```
#[derive(Clone)]
pub struct WithFallback(Arc<Servers>);

impl WithFallback {
    /// Returns the reader of `kubefan`, with `apiserver` as its fallback.
    pub fn new(kubefan: impl ListerWatcher, apiserver: impl ListerWatcher, policy: Fallback) -> Self {
        let outage = match policy {
            Fallback::Never => None,
            Fallback::Paced(options) => Some(Outage::new(options)),
        };
        Self(Arc::new(Servers {
            kubefan: Arc::new(kubefan),
            apiserver: Arc::new(apiserver),
            outage,
            apiserver_watches: AtomicU64::new(0),
        }))
    }

    /// Returns for how long kubefan has been unreachable. `None` if it is reachable, and with
    /// [`Fallback::Never`], which does not observe it.
    pub fn gone_for(&self) -> Option<Duration> {
        let since = self.0.outage.as_ref()?.since()?;
        Some(Instant::now().saturating_duration_since(since))
    }

    /// The number of requests that the apiserver got so far.
    pub fn apiserver_watches(&self) -> u64 {
        self.0.apiserver_watches.load(Ordering::Relaxed)
    }

    async fn start_watch(&self, options: ListOptions) -> Result<WatchEvents, ClientError> {
        let kubefan = &self.0.kubefan;
        let Some(outage) = &self.0.outage else { return kubefan.watch(options).await };
        if options.resource_version.is_empty() || options.send_initial_events {
            // Nothing to resume from yet: this client waits for kubefan.
            let timeout = options.timeout;
            let events = outage.note_result(kubefan.watch(options).await, kubefan.watch_reconnects())?;
            return Ok(Follow::with_state(self.0.clone(), events, timeout).into_events());
        }
        Ok(Follow::resume(self.0.clone(), options).into_events())
    }

    async fn start_list(&self, options: ListOptions) -> Result<ListPage, ClientError> {
        let page = self.0.kubefan.list(options).await;
        match &self.0.outage {
            Some(outage) => outage.note_result(page, false),
            None => page,
        }
    }
}

impl Outage {
    /// Notes the state of kubefan by the result of a request. A `pending` success says nothing.
    fn note_result<T>(&self, result: Result<T, ClientError>, pending: bool) -> Result<T, ClientError> {
        match &result {
            Ok(_) if pending => {}
            Ok(_) => self.end(),
            Err(error) => self.note(Reachability::of(error)),
        }
        result
    }
}

impl ListerWatcher for WithFallback {
    /// Lists from kubefan, always.
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        self.start_list(options).boxed()
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        self.start_watch(options).boxed()
    }

    fn supports_watch_list(&self) -> bool {
        self.0.kubefan.supports_watch_list()
    }

    fn watch_reconnects(&self) -> bool {
        self.0.outage.is_some() || self.0.kubefan.watch_reconnects()
    }

    fn describe(&self) -> String {
        self.0.kubefan.describe()
    }
}

impl fmt::Debug for WithFallback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paced = self.0.outage.is_some();
        formatter.debug_struct("WithFallback").field("paced", &paced).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
