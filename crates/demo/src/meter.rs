//! Converts the counters into rates while the demo runs: once per second for the numbers, more
//! often for the sparkline.

use std::{collections::VecDeque, sync::Arc};

use kubefan_sim::apiserver::SimApiserver;
use kubefan_telemetry::process::resident_bytes;
use prometheus::Registry;
use tokio::time::{Duration, Instant};

use super::{
    counts::Counts,
    lag::Quantiles,
    load::pod_watches,
    options::DemoOptions,
    progress::{Activity, Phase, Progress, Route},
};

/// Interval at which callers should call [`Meter::read`].
pub const METER_INTERVAL: Duration = Duration::from_millis(250);
/// Numbers that change more often than once per second are hard to read.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Number of sparkline values retained.
const HISTORY_MAX: usize = 240;

/// Measurements of one second on one route.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Watches on pods open at the apiserver.
    pub pod_watches: u64,
    /// Changes per second.
    pub changes: f64,
    /// Events per second that the apiserver sends.
    pub events: f64,
    /// Bytes per second that the apiserver sends.
    pub bytes: f64,
    /// Changes per second that subscribers receive.
    pub deliveries: f64,
    /// Lag from write to receipt; `None` if nothing was received.
    pub lag: Option<Quantiles>,
    /// Resident memory of this process in bytes: apiserver, kubefan and subscribers together.
    pub resident_bytes: Option<u64>,
}

/// The counters at a time.
#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    counts: Counts,
}

/// Measures a demo.
pub struct Meter {
    options: DemoOptions,
    progress: Arc<Progress>,
    sim: SimApiserver,
    kubefan: Registry,
    route: Route,
    activity: Activity,
    read: Reading,
    sampled: Reading,
    samples: [Option<Sample>; 2],
    history: VecDeque<(Route, u64)>,
}

impl Meter {
    pub(super) fn new(options: DemoOptions, progress: Arc<Progress>, sim: SimApiserver, kubefan: Registry) -> Self {
        let now = Reading { at: Instant::now(), counts: Counts::default() };
        Self {
            options,
            progress,
            sim,
            kubefan,
            route: Route::Direct,
            activity: Activity::Filling,
            read: now,
            sampled: now,
            samples: [None; 2],
            history: VecDeque::with_capacity(HISTORY_MAX),
        }
    }

    /// Reads the counters. Returns true if a new sample is available.
    pub fn read(&mut self) -> bool {
        let counts = Counts::read(&self.sim.stats(), &self.kubefan, &self.progress);
        let now = Reading { at: Instant::now(), counts };
        let Phase { route, activity, .. } = self.phase();
        let seconds = (now.at - self.read.at).as_secs_f64();
        if activity != Activity::Filling && seconds > 0.0 {
            if self.history.len() == HISTORY_MAX {
                self.history.pop_front();
            }
            let deliveries = (now.counts - self.read.counts).deliveries;
            self.history.push_back((route, (deliveries as f64 / seconds) as u64));
        }
        self.read = now;
        if self.route != route || self.activity != activity {
            // A sample must not mix two phases, so the current one is discarded.
            self.route = route;
            self.activity = activity;
            self.sampled = now;
            self.progress.lags.take();
            return false;
        }
        if now.at - self.sampled.at < SAMPLE_INTERVAL {
            return false;
        }
        let sample = self.sample(now);
        self.sampled = now;
        // A route's last sample should show its churn, not its end.
        if matches!(activity, Activity::Connecting | Activity::Churning) {
            self.samples[route as usize] = Some(sample);
        }
        true
    }

    fn sample(&self, now: Reading) -> Sample {
        let seconds = (now.at - self.sampled.at).as_secs_f64();
        let counts = now.counts - self.sampled.counts;
        let rate = |count: u64| count as f64 / seconds;
        Sample {
            pod_watches: pod_watches(&self.sim),
            changes: rate(counts.changes),
            events: rate(counts.events),
            bytes: rate(counts.bytes),
            deliveries: rate(counts.deliveries),
            lag: self.progress.lags.take(),
            resident_bytes: resident_bytes(),
        }
    }

    /// The options of the demo.
    pub fn options(&self) -> &DemoOptions {
        &self.options
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        self.progress.phase()
    }

    /// Number of subscribers of the current route whose initial state is complete.
    pub fn ready(&self) -> usize {
        self.progress.ready()
    }

    /// The latest sample of a route; `None` if there is none yet.
    pub fn sample_of(&self, route: Route) -> Option<&Sample> {
        self.samples[route as usize].as_ref()
    }

    /// Deliveries per second, oldest first.
    pub fn history(&self) -> impl DoubleEndedIterator<Item = (Route, u64)> + ExactSizeIterator + '_ {
        self.history.iter().copied()
    }
}
