//! A watch of kubefan, with a watch of the apiserver in its place while kubefan is gone.

use std::{
    future::pending,
    ops::ControlFlow::{self, Break, Continue},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use kubefan_common::backoff::Backoff;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep_until};

use super::{
    outage_errors::{Reachability, ends_fallback},
    paced_options::hash,
    servers::Servers,
};
use crate::{
    error::ClientError,
    lister_watcher::{ListOptions, ListerWatcher, WatchEvent, WatchEventKind, WatchEvents},
};

/// Time for which the apiserver's watch continues after the client's next moment. A new watch takes
/// its place at that moment.
const OVERLAP: Duration = Duration::from_secs(60);

/// A watch, or the way to one.
enum Watch {
    Starting(BoxFuture<'static, Result<WatchEvents, ClientError>>),
    Open(WatchEvents),
    Waiting(Instant),
}

enum FallbackEvent {
    /// The wait is over.
    Due,
    Started,
    Event(WatchEvent),
    Ended(Option<ClientError>),
}

impl Watch {
    fn start(source: &Arc<dyn ListerWatcher>, options: ListOptions) -> Self {
        let source = source.clone();
        Self::Starting(async move { source.watch(options).await }.boxed())
    }

    /// Cancel-safe. After [`FallbackEvent::Ended`] it must be replaced.
    async fn step(&mut self) -> FallbackEvent {
        match self {
            Self::Waiting(until) => {
                sleep_until(*until).await;
                FallbackEvent::Due
            }
            Self::Starting(watch) => match watch.await {
                Ok(events) => {
                    *self = Self::Open(events);
                    FallbackEvent::Started
                }
                Err(error) => FallbackEvent::Ended(Some(error)),
            },
            Self::Open(events) => match events.next().await {
                Some(Ok(event)) => FallbackEvent::Event(event),
                Some(Err(error)) => FallbackEvent::Ended(Some(error)),
                None => FallbackEvent::Ended(None),
            },
        }
    }
}

type Item = Option<Result<WatchEvent, ClientError>>;

pub(super) struct Follow {
    servers: Arc<Servers>,
    deadline: Option<Instant>,
    /// Everything up to here was returned. Empty before the first state is complete.
    version: String,
    kubefan: Watch,
    /// The version at which kubefan's watch continues. Behind `version` if the apiserver's was read
    /// meanwhile.
    kubefan_version: String,
    apiserver: Option<Watch>,
    /// Time at which this client may turn to the apiserver. `None` without an outage.
    moment: Option<Instant>,
    backoff: Backoff,
    random: SmallRng,
    ended: bool,
}

impl Follow {
    /// Returns a watch that starts with kubefan's state: `events` begin with a snapshot.
    pub(super) fn with_state(servers: Arc<Servers>, events: WatchEvents, timeout: Option<Duration>) -> Self {
        Self::new(servers, Watch::Open(events), String::new(), timeout)
    }

    /// Returns a watch from a version.
    pub(super) fn resume(servers: Arc<Servers>, options: ListOptions) -> Self {
        let version = options.resource_version.clone();
        let timeout = options.timeout;
        let kubefan = Watch::start(&servers.kubefan, options);
        Self::new(servers, kubefan, version, timeout)
    }

    fn new(servers: Arc<Servers>, kubefan: Watch, version: String, timeout: Option<Duration>) -> Self {
        let now = Instant::now();
        let options = servers.outage.as_ref().map(|outage| outage.options.clone());
        let (backoff, seed) = options.map(|options| (options.backoff, hash(&options.client_id))).unwrap_or_default();
        let moment = servers.outage.as_ref().and_then(|outage| outage.next_moment(now));
        Self {
            servers,
            deadline: timeout.map(|timeout| now + timeout),
            kubefan_version: version.clone(),
            version,
            kubefan,
            apiserver: None,
            moment,
            backoff: Backoff::new(backoff),
            // Different for each client. The jitter needs no more.
            random: SmallRng::seed_from_u64(seed),
            ended: false,
        }
    }

    pub(super) fn into_events(self) -> WatchEvents {
        stream::unfold(self, |mut follow| async move { Some((follow.next().await?, follow)) }).boxed()
    }

    async fn next(&mut self) -> Item {
        if self.ended {
            return None;
        }
        loop {
            let flow = tokio::select! {
                biased;
                step = self.kubefan.step() => self.on_kubefan(step),
                step = step_of(&mut self.apiserver) => self.on_apiserver(step),
                () = until(self.moment) => self.on_moment(),
                () = until(self.deadline) => Break(None),
            };
            if let Break(item) = flow {
                self.ended = !matches!(item, Some(Ok(_)));
                return item;
            }
        }
    }

    fn on_kubefan(&mut self, step: FallbackEvent) -> ControlFlow<Item> {
        match step {
            FallbackEvent::Due => {
                self.start_kubefan();
                Continue(())
            }
            FallbackEvent::Started if self.servers.kubefan.watch_reconnects() => Continue(()),
            FallbackEvent::Started if self.is_away() && self.kubefan_is_back() => {
                Break(Some(Ok(WatchEventKind::Reconnected.into())))
            }
            FallbackEvent::Started => Continue(()),
            FallbackEvent::Event(event) => self.on_kubefan_event(event),
            FallbackEvent::Ended(None) => Break(None),
            FallbackEvent::Ended(Some(error)) => self.on_kubefan_error(error),
        }
    }

    fn on_kubefan_event(&mut self, event: WatchEvent) -> ControlFlow<Item> {
        if let WatchEventKind::Disconnected(error) = &event.kind {
            let reachability = Reachability::of(error);
            self.note(reachability);
            // An answer such as "expired": a snapshot follows, unless a later version is known.
            if (reachability == Reachability::Answered && !self.kubefan_is_back()) || self.apiserver.is_some() {
                return Continue(());
            }
            return Break(Some(Ok(event)));
        }
        if self.is_away() && !self.kubefan_is_back() {
            return Continue(());
        }
        if let Some(version) = &event.resume_version {
            self.version.clone_from(version);
            self.kubefan_version.clone_from(version);
        }
        Break(Some(Ok(event)))
    }

    fn on_kubefan_error(&mut self, error: ClientError) -> ControlFlow<Item> {
        let reachability = Reachability::of(&error);
        self.note(reachability);
        if reachability == Reachability::Answered || self.version.is_empty() {
            // The caller decides, and lists if the version is expired.
            return Break(Some(Err(error)));
        }
        let delay = self.backoff.next_delay(Instant::now(), error.retry_after(), &mut self.random);
        self.kubefan = Watch::Waiting(Instant::now() + delay);
        match self.apiserver {
            Some(_) => Continue(()),
            None => Break(Some(Ok(WatchEventKind::Disconnected(error).into()))),
        }
    }

    fn on_apiserver(&mut self, step: FallbackEvent) -> ControlFlow<Item> {
        let error = match step {
            FallbackEvent::Due => return Continue(()),
            FallbackEvent::Started => return Break(Some(Ok(WatchEventKind::Reconnected.into()))),
            FallbackEvent::Ended(None) => {
                self.apiserver = None;
                return Continue(());
            }
            FallbackEvent::Ended(Some(error))
            | FallbackEvent::Event(WatchEvent { kind: WatchEventKind::Disconnected(error), .. }) => error,
            FallbackEvent::Event(WatchEvent {
                kind: WatchEventKind::SnapshotBegin | WatchEventKind::BatchBegin,
                ..
            }) => {
                let address = self.servers.apiserver.describe();
                ClientError::Protocol { address, message: "a fallback must continue from the version".to_owned() }
            }
            FallbackEvent::Event(event) => {
                if let Some(version) = &event.resume_version {
                    self.version.clone_from(version);
                }
                return Break(Some(Ok(event)));
            }
        };
        self.apiserver = None;
        if ends_fallback(&error) {
            if let Some(outage) = &self.servers.outage {
                outage.stop();
            }
            self.moment = None;
        }
        Break(Some(Ok(WatchEventKind::Disconnected(error).into())))
    }

    fn on_moment(&mut self) -> ControlFlow<Item> {
        let (Some(outage), Some(moment)) = (&self.servers.outage, self.moment) else { return Continue(()) };
        let now = Instant::now();
        self.moment = outage.next_moment(now);
        if outage.admits(moment, now) && !self.version.is_empty() {
            let options = ListOptions {
                resource_version: self.version.clone(),
                timeout: Some(outage.options.spread() + OVERLAP),
                ..ListOptions::default()
            };
            self.apiserver = Some(Watch::start(&self.servers.apiserver, options));
            self.servers.apiserver_watches.fetch_add(1, Ordering::Relaxed);
        }
        Continue(())
    }

    /// Whether kubefan was gone, or this watch has continued without it. Another watch of the same
    /// source may have ended the outage already.
    fn is_away(&self) -> bool {
        self.apiserver.is_some() || self.kubefan_version != self.version || self.is_out()
    }

    fn is_out(&self) -> bool {
        self.servers.outage.as_ref().is_some_and(|outage| outage.since().is_some())
    }

    fn note(&mut self, reachability: Reachability) {
        let Some(outage) = &self.servers.outage else { return };
        outage.note(reachability);
        if reachability == Reachability::Gone {
            // A moment that is set has not been used yet.
            self.moment = self.moment.or_else(|| outage.next_moment(Instant::now()));
        }
    }

    /// Ends the outage and the apiserver's watch. Returns whether kubefan's watch is at the last
    /// version. If not, it starts again from there.
    fn kubefan_is_back(&mut self) -> bool {
        if let Some(outage) = &self.servers.outage {
            outage.end();
        }
        self.moment = None;
        self.apiserver = None;
        let continues = self.kubefan_version == self.version;
        if !continues {
            self.start_kubefan();
        }
        continues
    }

    fn start_kubefan(&mut self) {
        let timeout = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let options = ListOptions { resource_version: self.version.clone(), timeout, ..ListOptions::default() };
        self.kubefan_version.clone_from(&self.version);
        self.kubefan = Watch::start(&self.servers.kubefan, options);
    }
}

async fn step_of(watch: &mut Option<Watch>) -> FallbackEvent {
    match watch {
        Some(watch) => watch.step().await,
        None => pending().await,
    }
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => pending().await,
    }
}
