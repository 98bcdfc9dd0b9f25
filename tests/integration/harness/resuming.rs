//! A subscriber that comes back by itself, as a client would: whenever its stream breaks it resumes from its last resume version, on the
//! same address or on another replica's. It asks for everything to be refused that could hide a loss, and keeps what it was told.

use std::{net::SocketAddr, time::Duration};

use kubefan_common::proto::v1alpha1::{OnExpired, OnLag, WatchRequest, watch_service_client::WatchServiceClient};
use tokio::{sync::watch, time::sleep};
use tonic::{Code, Status, transport::Endpoint};
use tonic_types::StatusExt;

use super::record::{Query, Recorded, Watch};

/// Before it tries again where nobody answers. A client would wait longer each time; here the time until it is served is of interest.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// How far a subscriber is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The last resume version.
    pub(crate) version: u64,
    /// The version of the last event, bookmarks left out.
    pub(crate) event: u64,
    /// Streams that were opened.
    pub(crate) streams: usize,
}

/// One subscriber and all that it was told.
pub(crate) struct Subscriber {
    pub(crate) query: Query,
    replicas: Vec<SocketAddr>,
    /// The replica that served it last.
    at: usize,
    watch: Watch,
    /// The events of all streams.
    pub(crate) events: Vec<Recorded>,
    /// Deletes of objects that only left the selector.
    pub(crate) left: usize,
    keeps_events: bool,
    progress: watch::Sender<Progress>,
}

impl Subscriber {
    /// Subscribes at one of the replicas and takes the snapshot. Every resume will be on the next replica, where there are several.
    pub(crate) async fn begin(query: Query, replicas: Vec<SocketAddr>, at: usize) -> Subscriber {
        let mut watch = open(replicas[at], &query, "").await.unwrap_or_else(|status| panic!("{query:?}: {status}"));
        watch.until_resumable().await;
        watch.snapshot.clear();
        let (progress, _) = watch::channel(Progress::default());
        let (events, left, keeps_events) = (Vec::new(), 0, true);
        Subscriber { query, replicas, at, watch, events, left, keeps_events, progress }
    }

    /// From here on it keeps only how far it is, and takes gaps and catch-ups as they come.
    pub(crate) fn keep_only_progress(&mut self) {
        self.keeps_events = false;
    }

    /// Tells how far it is.
    pub(crate) fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Receives until everything up to the version that `end` will tell is there.
    ///
    /// # Panics
    /// When it is told anything but events and bookmarks: a snapshot, a gap, a catch-up, or that it cannot go on.
    pub(crate) async fn run(mut self, mut end: watch::Receiver<u64>) -> Subscriber {
        loop {
            let version = *end.borrow_and_update();
            let reached = self.note();
            if reached >= version {
                self.keep();
                return self;
            }
            let step = tokio::select! {
                step = self.watch.step() => step,
                changed = end.changed() => {
                    changed.expect("the end is told");
                    continue;
                }
            };
            match step {
                Ok(Some(_)) => self.assert_exact(),
                Ok(None) => {
                    panic!("{:?}: the stream ended at {} without a word", self.query, self.watch.resume_version)
                }
                Err(status) => {
                    self.passes(&status);
                    self.resume().await;
                }
            }
        }
    }

    /// Comes back, on the next replica, until that one serves it.
    async fn resume(&mut self) {
        self.keep();
        let from = self.watch.resume_version.clone();
        self.at = (self.at + 1) % self.replicas.len();
        loop {
            match open(self.replicas[self.at], &self.query, &from).await {
                Ok(watch) => {
                    self.watch = watch;
                    return;
                }
                Err(status) => self.passes(&status),
            }
            sleep(RETRY_DELAY).await;
        }
    }

    /// What kubefan says itself has a reason; a connection that breaks has none.
    fn passes(&self, status: &Status) {
        let passes = status.code() == Code::Unavailable || status.get_details_error_info().is_none();
        assert!(passes, "{:?} cannot go on from {}: {status}", self.query, self.watch.resume_version);
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

    fn keep(&mut self) {
        self.left += std::mem::take(&mut self.watch.left);
        self.events.append(&mut self.watch.events);
        self.progress.send_modify(|progress| progress.streams += 1);
    }

    /// Publishes how far it is.
    fn note(&mut self) -> u64 {
        let version = self.watch.resume_version.parse().unwrap_or(0);
        let event = self.watch.last_event_version;
        if !self.keeps_events {
            self.watch.events.clear();
            self.watch.state.clear();
        }
        self.progress.send_if_modified(|progress| {
            let changed = progress.version != version || event > progress.event;
            (progress.version, progress.event) = (version, progress.event.max(event));
            changed
        });
        version
    }
}

/// Opens a watch over a connection of its own.
async fn open(address: SocketAddr, query: &Query, resource_version: &str) -> Result<Watch, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address is a URI");
    let channel = endpoint.connect().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let mut client = WatchServiceClient::new(channel).max_decoding_message_size(64 << 20);
    let request = WatchRequest {
        target: Some(query.target("pods")),
        resource_version: resource_version.to_owned(),
        bookmark_interval: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        // Conflated only where it lags, and never started over unseen.
        on_lag: OnLag::Conflate.into(),
        on_expired: OnExpired::Fail.into(),
        ..WatchRequest::default()
    };
    Ok(Watch::over(Box::pin(client.watch(request).await?.into_inner()), resource_version))
}
