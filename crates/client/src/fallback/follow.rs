//! A watch of kubefan, with a watch of the apiserver in its place while kubefan is gone.

use std::{
    future::pending,
    ops::ControlFlow::{self, Break, Continue},
    sync::{Arc, atomic::Ordering},
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use kubefan_common::backoff::Backoff;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep_until};

use super::{
    outage::{Outage, Turn, turn_of},
    outage_errors::{Reachability, ends_fallback},
    servers::Servers,
};
use crate::{
    error::ClientError,
    lister_watcher::{ListOptions, ListerWatcher, WatchEvent, WatchEventKind, WatchEvents},
};

/// A replica that lags reaches the version of another server sooner. A cluster that was restored
/// from a backup may not for a long time, so its client reads a new state.
const AHEAD_IN_A_ROW_MAX: u32 = 10;

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
    /// Requests the first state. A watch that begins before a state is complete uses it again.
    first: ListOptions,
    deadline: Option<Instant>,
    /// Everything up to here was returned. Empty before the first state is complete.
    version: String,
    kubefan: Watch,
    /// The version at which kubefan's watch continues. Behind `version` if the apiserver's was read
    /// meanwhile.
    kubefan_version: String,
    /// The attempts in a row at which kubefan had not reached the version.
    ahead_in_a_row: u32,
    apiserver: Option<Watch>,
    /// Turn of this client at the apiserver. `None` without an outage, and with a budget also while
    /// the apiserver's watch is open.
    turn: Option<Turn>,
    backoff: Backoff,
    random: SmallRng,
    ended: bool,
}

impl Follow {
    /// Returns a watch that starts with kubefan's state: `events` begin with a snapshot.
    pub(super) fn with_state(servers: Arc<Servers>, events: WatchEvents, options: ListOptions) -> Self {
        Self::new(servers, Watch::Open(events), String::new(), options)
    }

    /// Returns a watch that starts with the state of either server.
    pub(super) fn with_any_state(servers: Arc<Servers>, options: ListOptions) -> Self {
        let kubefan = Watch::start(&servers.kubefan, options.clone());
        Self::new(servers, kubefan, String::new(), options)
    }

    /// Returns a watch from a version.
    pub(super) fn resume(servers: Arc<Servers>, options: ListOptions) -> Self {
        let kubefan = Watch::start(&servers.kubefan, options.clone());
        Self::new(servers, kubefan, options.resource_version.clone(), options)
    }

    fn new(servers: Arc<Servers>, kubefan: Watch, version: String, first: ListOptions) -> Self {
        let outage = servers.outage.as_ref();
        let backoff = outage.map(Outage::backoff).unwrap_or_default();
        let seed = outage.map(Outage::jitter_seed).unwrap_or_default();
        let mut follow = Self {
            servers,
            deadline: first.timeout.map(|timeout| Instant::now() + timeout),
            first,
            kubefan_version: version.clone(),
            version,
            kubefan,
            ahead_in_a_row: 0,
            apiserver: None,
            turn: None,
            backoff: Backoff::new(backoff),
            // Different for each client. The jitter needs no more.
            random: SmallRng::seed_from_u64(seed),
            ended: false,
        };
        follow.turn = follow.next_turn();
        follow
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
                () = turn_of(&self.turn) => self.on_turn(),
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
            FallbackEvent::Started if self.has_left_kubefan() && self.kubefan_is_back() => {
                Break(Some(Ok(WatchEventKind::Reconnected.into())))
            }
            FallbackEvent::Started => Continue(()),
            FallbackEvent::Event(event) => self.on_kubefan_event(event),
            // Its timeout has passed, and the apiserver's watch goes on.
            FallbackEvent::Ended(None) if self.apiserver.is_some() => {
                let delay = self.backoff.next_delay(Instant::now(), None, &mut self.random);
                self.kubefan = Watch::Waiting(Instant::now() + delay);
                Continue(())
            }
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
        if self.has_left_kubefan() && !self.kubefan_is_back() {
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
        let is_ahead = error.is_resource_version_too_large();
        self.ahead_in_a_row = if is_ahead { self.ahead_in_a_row + 1 } else { 0 };
        let waits = if self.version.is_empty() {
            self.is_budgeted() && !is_ahead
        } else {
            self.ahead_in_a_row < AHEAD_IN_A_ROW_MAX
        };
        if reachability == Reachability::Answered || !waits {
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
                self.turn = self.turn.take().or_else(|| self.next_turn());
                return Continue(());
            }
            FallbackEvent::Ended(Some(error))
            | FallbackEvent::Event(WatchEvent { kind: WatchEventKind::Disconnected(error), .. }) => error,
            FallbackEvent::Event(WatchEvent {
                kind: WatchEventKind::SnapshotBegin | WatchEventKind::BatchBegin,
                ..
            }) if !self.version.is_empty() => {
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
        let Some(outage) = &self.servers.outage else { return Continue(()) };
        if let Some(starts) = outage.starts() {
            starts.delay(error.retry_after().unwrap_or_default());
            // As for a direct watch, the caller decides, and lists.
            let is_final = !error.is_retryable() || error.is_resource_version_too_large();
            if error.is_expired() || is_final && self.version.is_empty() {
                return Break(Some(Err(error)));
            }
            self.turn = self.next_turn();
        } else if ends_fallback(&error) {
            outage.stop();
            self.turn = None;
        }
        Break(Some(Ok(WatchEventKind::Disconnected(error).into())))
    }

    fn on_turn(&mut self) -> ControlFlow<Item> {
        let (Some(outage), Some(turn)) = (&self.servers.outage, self.turn.take()) else { return Continue(()) };
        let is_admitted = outage.admits(&turn);
        // It no longer waits.
        drop(turn);
        if !self.is_budgeted() {
            self.turn = self.next_turn();
        }
        if is_admitted && (!self.version.is_empty() || self.is_budgeted()) {
            let options = ListOptions { timeout: outage.watch_timeout(), ..self.options() };
            self.apiserver = Some(Watch::start(&self.servers.apiserver, options));
            self.servers.apiserver_starts.fetch_add(1, Ordering::Relaxed);
        }
        Continue(())
    }

    /// The client's next turn at the apiserver; `None` without an outage.
    fn next_turn(&self) -> Option<Turn> {
        let outage = self.servers.outage.as_ref()?;
        outage.next_turn(!self.version.is_empty(), self.servers.kubefan.fallback_budget())
    }

    fn is_budgeted(&self) -> bool {
        self.servers.outage.as_ref().is_some_and(|outage| outage.starts().is_some())
    }

    /// Whether kubefan has failed, or this watch has continued without it. Another watch of the
    /// same source may have ended the outage already.
    fn has_left_kubefan(&self) -> bool {
        let has_failed = self.servers.outage.as_ref().is_some_and(Outage::has_failures);
        self.apiserver.is_some() || self.kubefan_version != self.version || has_failed
    }

    fn has_outage(&self) -> bool {
        self.servers.outage.as_ref().is_some_and(|outage| outage.since().is_some())
    }

    fn note(&mut self, reachability: Reachability) {
        let Some(outage) = &self.servers.outage else { return };
        outage.note(reachability);
        if !self.has_outage() {
            self.turn = None;
        } else if self.apiserver.is_none() {
            // A turn that is set has not been used yet.
            self.turn = self.turn.take().or_else(|| self.next_turn());
        }
    }

    /// Ends the outage and the apiserver's watch. Returns whether kubefan's watch is at the last
    /// version. If not, it starts again from there.
    fn kubefan_is_back(&mut self) -> bool {
        if let Some(outage) = &self.servers.outage {
            outage.end();
        }
        self.ahead_in_a_row = 0;
        self.turn = None;
        self.apiserver = None;
        let continues = self.kubefan_version == self.version;
        if !continues {
            self.start_kubefan();
        }
        continues
    }

    fn start_kubefan(&mut self) {
        let timeout = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let options = ListOptions { timeout, ..self.options() };
        self.kubefan_version.clone_from(&self.version);
        self.kubefan = Watch::start(&self.servers.kubefan, options);
    }

    /// The options of a watch from the last version, or of one that begins with the state.
    fn options(&self) -> ListOptions {
        if self.version.is_empty() {
            return self.first.clone();
        }
        ListOptions { resource_version: self.version.clone(), ..ListOptions::default() }
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
