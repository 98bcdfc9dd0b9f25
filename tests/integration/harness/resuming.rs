//! A subscriber that reconnects by itself, like a client: whenever its stream breaks, it resumes
//! from its last resume version, at the same address or at another replica. Its requests forbid
//! everything that could hide a loss, and it keeps all events.

use std::{net::SocketAddr, time::Duration};

use kubefan_common::proto::v1alpha1::{OnExpired, OnLag, WatchRequest, watch_service_client::WatchServiceClient};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tonic::{Code, Status, transport::Endpoint};
use tonic_types::StatusExt;

use super::record::{Query, Recorded, Watch};

/// Delay before the next attempt while no replica accepts the stream. A client would back off; the
/// tests measure the time until the subscriber is served.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Subscribers are live within seconds. A subscriber that hangs fails the test and does not block
/// the run.
pub(crate) const LIVE_AT_MOST: Duration = Duration::from_secs(300);

/// A subscriber's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The last resume version.
    pub(crate) version: u64,
    /// The version of the last event; bookmarks do not count.
    pub(crate) event: u64,
    /// Number of finished streams.
    pub(crate) streams: usize,
}

/// One subscriber and everything it received.
pub(crate) struct Subscriber {
    pub(crate) query: Query,
    replicas: Vec<SocketAddr>,
    /// Index of the replica that serves the stream.
    at: usize,
    watch: Watch,
    /// The events of all streams.
    pub(crate) events: Vec<Recorded>,
    /// Number of deletes that mean only that the object left the selector.
    pub(crate) left: usize,
    keeps_events: bool,
    progress: watch::Sender<Progress>,
}

impl Subscriber {
    /// Subscribes at replica `at` and receives the snapshot. Each resume uses the next replica.
    pub(crate) async fn begin(query: Query, replicas: Vec<SocketAddr>, at: usize) -> Subscriber {
        let mut watch = open(replicas[at], &query, "").await.unwrap_or_else(|status| panic!("{query:?}: {status}"));
        watch.until_resumable().await;
        watch.snapshot.clear();
        let (progress, _) = watch::channel(Progress::default());
        let events = Vec::new();
        let left = 0;
        let keeps_events = true;
        Subscriber { query, replicas, at, watch, events, left, keeps_events, progress }
    }

    /// From now on, keeps only the progress, and accepts gaps and catch-ups.
    pub(crate) fn keep_only_progress(&mut self) {
        self.keeps_events = false;
    }

    /// A receiver of the subscriber's progress.
    pub(crate) fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Receives until everything up to the version announced by `end` has arrived.
    ///
    /// # Panics If it receives a snapshot, a gap or a catch-up, or a status that forbids resuming.
    pub(crate) async fn run(mut self, mut end: watch::Receiver<u64>) -> Subscriber {
        loop {
            let version = *end.borrow_and_update();
            let reached = self.publish_progress();
            if reached >= version {
                self.collect_events();
                return self;
            }
            let step = tokio::select! {
                step = self.watch.step() => step,
                changed = end.changed() => {
                    changed.expect("the end version is announced");
                    continue;
                }
            };
            match step {
                Ok(Some(_)) => self.assert_exact(),
                Ok(None) => {
                    panic!("{:?}: the stream ended at {} without a status", self.query, self.watch.resume_version)
                }
                Err(status) => {
                    self.assert_retryable(&status);
                    self.resume().await;
                }
            }
        }
    }

    /// Reconnects at the next replica, and retries until that replica serves the stream.
    async fn resume(&mut self) {
        self.collect_events();
        let from = self.watch.resume_version.clone();
        self.at = (self.at + 1) % self.replicas.len();
        loop {
            match open(self.replicas[self.at], &self.query, &from).await {
                Ok(watch) => {
                    self.watch = watch;
                    return;
                }
                Err(status) => self.assert_retryable(&status),
            }
            sleep(RETRY_DELAY).await;
        }
    }

    /// A status from kubefan itself has error details; a broken connection has none.
    fn assert_retryable(&self, status: &Status) {
        let retryable = status.code() == Code::Unavailable || status.get_details_error_info().is_none();
        assert!(retryable, "{:?} cannot resume from {}: {status}", self.query, self.watch.resume_version);
    }

    fn assert_exact(&self) {
        let Watch { snapshots, gaps, catch_ups, resume_version, .. } = &self.watch;
        let first = usize::from(self.progress.borrow().streams == 0);
        assert!(*snapshots <= first, "{:?}: a snapshot after {resume_version}", self.query);
        if !self.keeps_events {
            return;
        }
        assert!(gaps.is_empty(), "{:?}: a gap after {resume_version}: {gaps:?}", self.query);
        assert!(catch_ups.is_empty(), "{:?}: a catch-up after {resume_version}: {catch_ups:?}", self.query);
    }

    fn collect_events(&mut self) {
        self.left += std::mem::take(&mut self.watch.left);
        self.events.append(&mut self.watch.events);
        self.progress.send_modify(|progress| progress.streams += 1);
    }

    /// Publishes the progress. Returns the resume version.
    fn publish_progress(&mut self) -> u64 {
        let version = self.watch.reached();
        let event = self.watch.last_event_version;
        if !self.keeps_events {
            self.watch.events.clear();
            self.watch.state.clear();
        }
        self.progress.send_if_modified(|progress| {
            let changed = progress.version != version || event > progress.event;
            progress.version = version;
            progress.event = progress.event.max(event);
            changed
        });
        version
    }
}

/// Waits until the progress of every subscriber is so.
///
/// # Panics If a subscriber has failed, with its panic, or after [`LIVE_AT_MOST`].
pub(crate) async fn all_are(
    progress: &mut [watch::Receiver<Progress>],
    subscribers: &mut JoinSet<Subscriber>,
    is_so: impl Fn(&Progress) -> bool,
) {
    let all = async {
        for progress in progress {
            if progress.wait_for(&is_so).await.is_ok() {
                continue;
            }
            while let Some(ended) = subscribers.join_next().await {
                if let Err(error) = ended {
                    std::panic::resume_unwind(error.into_panic());
                }
            }
        }
    };
    assert!(timeout(LIVE_AT_MOST, all).await.is_ok(), "not all are live again after {LIVE_AT_MOST:?}");
}

/// Opens a watch on its own connection.
async fn open(address: SocketAddr, query: &Query, resource_version: &str) -> Result<Watch, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address is a URI");
    let channel = endpoint.connect().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut client = WatchServiceClient::new(channel).max_decoding_message_size(64 << 20);
    let request = WatchRequest {
        target: Some(query.target("pods")),
        resource_version: resource_version.to_owned(),
        bookmark_interval: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        // Conflate only if the subscriber lags, and never restart with a new snapshot.
        on_lag: OnLag::Conflate.into(),
        on_expired: OnExpired::Fail.into(),
        ..WatchRequest::default()
    };
    Ok(Watch::over(Box::pin(client.watch(request).await?.into_inner()), resource_version))
}
