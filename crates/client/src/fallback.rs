//! Reads from a kubefan and, if that is gone for long and the program asked for it, from an
//! apiserver.
//!
//! The hazard is the fallback itself. kubefan stands between an apiserver and a fleet of clients
//! that the apiserver could not serve. If all of them turn to the apiserver when kubefan fails,
//! they turn one outage into two. So the default is to wait: stores stay readable, and only grow
//! stale. Two policies limit the load. [`Fallback::Budgeted`] spaces the requests of all clients by
//! a budget, so that every client has fresh data soon. [`Fallback::Paced`] is for fleets that the
//! apiserver could hardly carry.
//!
//! # Budgeted
//!
//! Each program starts at most one list or watch at the apiserver in a window, which is the number
//! of clients divided by the rate of the budget. The first start is at a random moment of the first
//! window, and one of a caller that has a state at a random moment of the second. So with 3,000
//! programs and 50 starts per second, programs without a state have one within a minute of their
//! outage, and the others go on within two. Then the apiserver serves all of them until kubefan is
//! back. kubefan names the budget in its answers; the configured one is for programs that have
//! never reached it.
//!
//! # Paced
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

mod apiserver_starts;
mod first_page;
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

pub use self::{
    apiserver_starts::{ApiserverStarts, BudgetedOptions},
    paced_options::PacedOptions,
};
use self::{follow::Follow, outage::Outage, outage_errors::Reachability, servers::Servers};

use crate::{
    budget::FallbackBudget,
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
    /// List and watch at the apiserver instead, within a budget that all clients share.
    Budgeted(ApiserverStarts),
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
/// With [`Fallback::Budgeted`], a client turns to the apiserver when kubefan is unreachable, or
/// answers "try again later" for ten seconds. It watches from its version, or with the state if it
/// has none, and lists if its program lists. Each start waits for the next moment of its
/// [`ApiserverStarts`]. An error of the apiserver leads to another start in the next window, and
/// not before the apiserver wants it. An expired version is an error of the watch, as without
/// kubefan: the informer reads the state again, within the budget. The way back is that of the
/// paced fallback.
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
///
/// All sources of a program share its starts:
///
/// ```no_run
/// use kubefan_client::{ApiserverStarts, BudgetedOptions, Connection, Fallback, FallbackBudget};
/// use kubefan_client::{ListWatch, WithFallback};
/// # fn example(kubefan: Connection, apiserver: Connection) {
/// let budget = FallbackBudget { clients: 3000, starts_per_second: 50.0 };
/// let starts = ApiserverStarts::new(BudgetedOptions { budget, ..BudgetedOptions::default() });
/// let source = |resource: &str| {
///     let of = |connection: &Connection| ListWatch::new(connection.clone(), resource, "", "");
///     WithFallback::new(of(&kubefan), of(&apiserver), Fallback::Budgeted(starts.clone()))
/// };
/// let pods = source("pods");
/// let nodes = source("nodes");
/// # }
/// ```
#[derive(Clone)]
pub struct WithFallback(Arc<Servers>);

impl WithFallback {
    /// Returns the reader of `kubefan`, with `apiserver` as its fallback.
    pub fn new(kubefan: impl ListerWatcher, apiserver: impl ListerWatcher, policy: Fallback) -> Self {
        let outage = match policy {
            Fallback::Never => None,
            Fallback::Paced(options) => Some(Outage::with_moments(options)),
            Fallback::Budgeted(starts) => Some(Outage::with_starts(starts)),
        };
        Self(Arc::new(Servers {
            kubefan: Arc::new(kubefan),
            apiserver: Arc::new(apiserver),
            outage,
            apiserver_starts: AtomicU64::new(0),
        }))
    }

    /// Returns for how long kubefan has been unreachable. `None` if it is reachable, and with
    /// [`Fallback::Never`], which does not observe it.
    pub fn gone_for(&self) -> Option<Duration> {
        let since = self.0.outage.as_ref()?.since()?;
        Some(Instant::now().saturating_duration_since(since))
    }

    /// The number of requests that the apiserver got so far, later pages of lists not counted.
    pub fn apiserver_watches(&self) -> u64 {
        self.0.apiserver_starts.load(Ordering::Relaxed)
    }

    async fn start_watch(&self, options: ListOptions) -> Result<WatchEvents, ClientError> {
        let kubefan = &self.0.kubefan;
        let Some(outage) = &self.0.outage else { return kubefan.watch(options).await };
        let has_version = !options.resource_version.is_empty() && !options.send_initial_events;
        if !has_version && outage.starts().is_some() {
            return Ok(Follow::with_any_state(self.0.clone(), options).into_events());
        }
        if !has_version {
            // Nothing to resume from yet: this client waits for kubefan.
            let events = outage.note_result(kubefan.watch(options.clone()).await, kubefan.watch_reconnects())?;
            return Ok(Follow::with_state(self.0.clone(), events, options).into_events());
        }
        Ok(Follow::resume(self.0.clone(), options).into_events())
    }

    async fn start_list(&self, options: ListOptions) -> Result<ListPage, ClientError> {
        match &self.0.outage {
            None => self.0.kubefan.list(options).await,
            Some(outage) if outage.starts().is_some() => first_page::page(&self.0, outage, options).await,
            Some(outage) => outage.note_result(self.0.kubefan.list(options).await, false),
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
    /// Lists from kubefan, and with a budget from the apiserver while kubefan is gone.
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

    fn fallback_budget(&self) -> Option<FallbackBudget> {
        self.0.kubefan.fallback_budget()
    }

    fn describe(&self) -> String {
        self.0.kubefan.describe()
    }
}

impl fmt::Debug for WithFallback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("WithFallback").field("outage", &self.0.outage).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
