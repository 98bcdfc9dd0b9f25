//! The end of serving: on a signal, or because a port has failed.
//!
//! The hazard is a failure of one port that cuts the streams of another: their clients would see a
//! broken connection, and all of them would connect again at once. So every end drains the data
//! port. The waits after that are one list, in order ([`ShutdownSteps`]).

use std::{
    convert::Infallible,
    future::{Future, pending},
    pin::pin,
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::failure::{AppError, server_error};

/// A port that is served.
pub(super) type ServerTask = JoinHandle<Result<(), String>>;

/// Waits until `shutdown` completes or a port fails, and then until the streams of the data port
/// have ended, or `drain_timeout` has passed.
///
/// # Errors
/// The failure of a port.
pub(super) async fn until_drained(
    shutdown: impl Future<Output = ()> + Send,
    data: &mut ServerTask,
    admin: &mut ServerTask,
    drain: &CancellationToken,
    drain_timeout: Duration,
) -> Result<(), AppError> {
    let mut shutdown = pin!(shutdown.fuse());
    let ended = tokio::select! {
        () = &mut shutdown => Ok(()),
        result = &mut *data => Err(server_error("the data port", result)),
        result = &mut *admin => Err(server_error("the admin server", result)),
    };
    if let Err(error) = &ended {
        warn!(%error, "stopping");
    }
    drain.cancel();
    if data.is_finished() {
        return ended;
    }
    info!(timeout = ?drain_timeout, "draining");
    // A signal after a failure starts no second drain, but the next one may end the process.
    let signals = async {
        shutdown.await;
        pending::<Infallible>().await
    };
    let is_drained = tokio::select! {
        drained = timeout(drain_timeout, &mut *data) => drained.is_ok(),
        never = signals => match never {},
    };
    if !is_drained {
        warn!("some connections did not end within the drain timeout");
        data.abort();
        // Its requests, and so their records, end with it.
        let _ = data.await;
    }
    ended
}

/// The signals that end the tasks of all components. Dropping it gives both.
#[derive(Default)]
pub(super) struct Stops {
    /// The end of the streams and of the rebalancing that moves them. The data port ends with the
    /// last of them.
    pub(super) drain: CancellationToken,
    /// The end of everything else, after the drain.
    pub(super) stop: CancellationToken,
}

impl Drop for Stops {
    fn drop(&mut self) {
        self.stop.cancel();
        self.drain.cancel();
    }
}

/// The waits after the drain, in this order.
#[derive(Default)]
pub(super) struct ShutdownSteps(Vec<ShutdownStep>);

struct ShutdownStep {
    /// Name of the step in the log.
    name: &'static str,
    ended: BoxFuture<'static, ()>,
    /// The longest wait. `None` if the step has a limit of its own.
    limit: Option<Duration>,
}

impl ShutdownSteps {
    /// Adds a step that has a limit of its own: those of the audit log are in
    /// `kubefan_audit::AuditWriter::finish`.
    pub(super) fn then(mut self, name: &'static str, ended: impl Future<Output = ()> + Send + 'static) -> Self {
        self.0.push(ShutdownStep { name, ended: Box::pin(ended), limit: None });
        self
    }

    /// Adds a step whose wait ends after `limit`.
    pub(super) fn then_within(
        mut self,
        limit: Duration,
        name: &'static str,
        ended: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        self.0.push(ShutdownStep { name, ended: Box::pin(ended), limit: Some(limit) });
        self
    }

    /// Waits for each step in turn.
    pub(super) async fn run(self) {
        for ShutdownStep { name, ended, limit } in self.0 {
            let Some(limit) = limit else {
                ended.await;
                continue;
            };
            if timeout(limit, ended).await.is_err() {
                debug!(name, "did not end in time");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_steps_of_a_shutdown_follow_each_other_and_some_are_left_behind() {
        let first = CancellationToken::new();
        let second = CancellationToken::new();
        let done = first.clone();
        let first_done = first.clone();
        let last = second.clone();
        let start = Instant::now();
        let steps = ShutdownSteps::default()
            .then("the first", async move {
                sleep(Duration::from_secs(60)).await;
                done.cancel();
            })
            .then_within(Duration::from_secs(2), "one that hangs", pending())
            .then("the last", async move {
                assert!(first_done.is_cancelled());
                last.cancel();
            });
        steps.run().await;
        assert!(first.is_cancelled() && second.is_cancelled());
        assert_eq!(start.elapsed(), Duration::from_secs(62));
    }

    #[test]
    fn all_tasks_end_however_serving_returns() {
        let stops = Stops::default();
        let drain = stops.drain.clone();
        let stop = stops.stop.clone();
        drop(stops);
        assert!(drain.is_cancelled() && stop.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_of_the_admin_port_ends_the_process_after_the_streams_of_the_data_port() {
        let drain = CancellationToken::new();
        let drained = CancellationToken::new();
        let draining = drain.clone();
        let streams_ended = drained.clone();
        let mut data: ServerTask = tokio::spawn(async move {
            draining.cancelled().await;
            tokio::time::sleep(Duration::from_secs(5)).await;
            streams_ended.cancel();
            Ok(())
        });
        let mut admin: ServerTask = tokio::spawn(async { Err("no file descriptors".to_owned()) });
        let ended = until_drained(pending(), &mut data, &mut admin, &drain, Duration::from_secs(25)).await;
        assert!(matches!(ended, Err(AppError::Server { what: "the admin server", .. })), "{ended:?}");
        assert!(drained.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_of_the_data_port_ends_the_process_at_once() {
        let mut data: ServerTask = tokio::spawn(async { Err("no file descriptors".to_owned()) });
        let mut admin: ServerTask = tokio::spawn(pending());
        let drain = CancellationToken::new();
        let limit = Duration::from_secs(25);
        let ended = until_drained(pending(), &mut data, &mut admin, &drain, limit).await;
        assert!(matches!(ended, Err(AppError::Server { what: "the data port", .. })), "{ended:?}");
        assert!(drain.is_cancelled(), "the parts that only a drain stops");
    }

    #[tokio::test(start_paused = true)]
    async fn streams_that_do_not_end_are_cut_after_the_drain_timeout() {
        let mut data: ServerTask = tokio::spawn(pending());
        let mut admin: ServerTask = tokio::spawn(pending());
        let drain = CancellationToken::new();
        let limit = Duration::from_secs(25);
        let ended = until_drained(async {}, &mut data, &mut admin, &drain, limit).await;
        assert!(ended.is_ok() && data.is_finished());
    }
}
