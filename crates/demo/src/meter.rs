//! Turns the counters into rates while the demo runs: once a second into numbers, more often into the heights of a sparkline.

use std::{collections::VecDeque, sync::Arc};

use prometheus::Registry;
use tokio::time::{Duration, Instant};

use super::{
    DemoOptions,
    board::{Activity, Board, Route, Stage},
    counts::Counts,
    lag::Quantiles,
    load::pod_watches,
};
use kubefan_proxy::telemetry::process::resident_bytes;
use kubefan_sim::apiserver::SimApiserver;

/// How often a meter is to be read.
pub const METER_INTERVAL: Duration = Duration::from_millis(250);
/// Numbers that change more often than once a second cannot be read.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// The widest sparkline.
const HISTORY_MAX: usize = 240;

/// One second of one route.
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
    /// From write to receipt; `None` where nothing was received.
    pub lag: Option<Quantiles>,
    /// Resident memory of the process: apiserver, kubefan and subscribers together.
    pub resident_bytes: Option<u64>,
}

/// Measures a demo.
pub struct Meter {
    options: DemoOptions,
    board: Arc<Board>,
    sim: SimApiserver,
    kubefan: Registry,
    stage: (Route, Activity),
    read: (Instant, Counts),
    sampled: (Instant, Counts),
    samples: [Option<Sample>; 2],
    history: VecDeque<(Route, u64)>,
}

impl Meter {
    pub(super) fn new(options: DemoOptions, board: Arc<Board>, sim: SimApiserver, kubefan: Registry) -> Self {
        let now = (Instant::now(), Counts::default());
        let history = VecDeque::with_capacity(HISTORY_MAX);
        let stage = (Route::Direct, Activity::Filling);
        Self { options, board, sim, kubefan, stage, read: now, sampled: now, samples: [None; 2], history }
    }

    /// Reads the counters; true where that made a new sample.
    pub fn read(&mut self) -> bool {
        let now = (Instant::now(), Counts::read(&self.sim.stats(), &self.kubefan, &self.board));
        let Stage { route, activity, .. } = self.stage();
        let seconds = (now.0 - self.read.0).as_secs_f64();
        if activity != Activity::Filling && seconds > 0.0 {
            if self.history.len() == HISTORY_MAX {
                self.history.pop_front();
            }
            let deliveries = (now.1 - self.read.1).deliveries;
            self.history.push_back((route, (deliveries as f64 / seconds) as u64));
        }
        self.read = now;
        if self.stage != (route, activity) {
            // A second that is half one thing and half another would be neither.
            self.stage = (route, activity);
            self.sampled = now;
            self.board.lags.take();
            return false;
        }
        if now.0 - self.sampled.0 < SAMPLE_INTERVAL {
            return false;
        }
        let sample = self.sample(now);
        self.sampled = now;
        // What is seen last of a route is its churn, not its end.
        if matches!(activity, Activity::Connecting | Activity::Churning) {
            self.samples[route as usize] = Some(sample);
        }
        true
    }

    fn sample(&self, (at, counts): (Instant, Counts)) -> Sample {
        let (seconds, counts) = ((at - self.sampled.0).as_secs_f64(), counts - self.sampled.1);
        let rate = |count: u64| count as f64 / seconds;
        Sample {
            pod_watches: pod_watches(&self.sim),
            changes: rate(counts.changes),
            events: rate(counts.events),
            bytes: rate(counts.bytes),
            deliveries: rate(counts.deliveries),
            lag: self.board.lags.take(),
            resident_bytes: resident_bytes(),
        }
    }

    /// What is measured.
    pub fn options(&self) -> &DemoOptions {
        &self.options
    }

    /// Where the demo stands.
    pub fn stage(&self) -> Stage {
        self.board.stage()
    }

    /// Subscribers of the present route whose initial state is complete.
    pub fn ready(&self) -> usize {
        self.board.ready()
    }

    /// The last second of a route, as far as there was one.
    pub fn sample_of(&self, route: Route) -> Option<&Sample> {
        self.samples[route as usize].as_ref()
    }

    /// Deliveries per second, oldest first.
    pub fn history(&self) -> impl DoubleEndedIterator<Item = (Route, u64)> + ExactSizeIterator + '_ {
        self.history.iter().copied()
    }
}
