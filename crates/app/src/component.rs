//! The parts that the components of this program share.
//!
//! A component is a struct of the parts that only it needs. Its `build` takes [`Shared`] and the
//! handles of the components that it uses, starts its tasks and returns a handle. So the order of
//! the components in [`App::serve`](super::App::serve) follows from their dependencies, and the
//! compiler checks it. [`ending`](super::ending) stops them. A component that has no tasks, or
//! whose start may fail, is built before, from the configuration and the metrics.

use std::{future::Future, sync::Arc};

use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::Upstream;

use super::ending::Stops;
use crate::config::ServeConfig;

/// The parts that every component may use.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    /// The configuration at the start.
    pub(super) config: &'a ServeConfig,
    /// The apiserver.
    pub(super) upstream: &'a Upstream,
    /// The metrics of this kubefan.
    pub(super) metrics: &'a Arc<Metrics>,
    /// The signals that end the tasks.
    pub(super) stops: &'a Stops,
}

impl Shared<'_> {
    /// Spawns a task that is dropped when kubefan stops, after the drain.
    pub(super) fn spawn<F>(&self, task: F)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        tokio::spawn(self.stops.stop.clone().run_until_cancelled_owned(task));
    }
}
