//! The background tasks of a registry.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::{configured::keep_configured, on_demand::drop_idle, registry::Registry, self_check::check_all};

impl Registry {
    /// Keeps every configured resource cached, drops idle caches and runs self-checks, until the
    /// registry is stopped.
    pub async fn run(self: Arc<Self>) {
        let mut tasks = JoinSet::new();
        let discovery = self.context.discovery.clone();
        tasks.spawn(async move { discovery.keep_fresh().await });
        tasks.spawn(keep_configured(self.clone()));
        if let Some(idle_timeout) = self.idle_timeout() {
            tasks.spawn(drop_idle(self.clone(), idle_timeout));
        }
        if let Some(interval) = self.options.self_check_interval {
            tasks.spawn(check_all(self.clone(), interval));
        }
        tokio::select! {
            biased;
            () = self.stop.cancelled() => {}
            () = async { while tasks.join_next().await.is_some() {} } => self.stop.cancelled().await,
        }
    }
}
