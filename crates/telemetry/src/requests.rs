//! Metrics of answered requests, over gRPC and HTTP: count, result and duration.
//!
//! Clients must not be able to create label values, so uncached resources share one label.

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};
use tokio::time::Instant;

/// The label for resources that are not cached and for requests that name no resource.
pub const OTHER: &str = "other";

/// The protocol of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Protocol {
    /// kubefan's gRPC API
    #[default]
    Grpc,
    /// The Kubernetes API
    Http,
}

impl Protocol {
    /// The label in metrics, and the name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
        }
    }

    /// The status code for a request whose caller went away before the answer.
    fn cancelled(self) -> &'static str {
        match self {
            Self::Grpc => "CANCELLED",
            Self::Http => "cancelled",
        }
    }
}

/// The source of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsweredBy {
    /// A cache.
    Cache,
    /// The apiserver: the request was forwarded.
    Upstream,
    /// kubefan, which refused the request.
    Kubefan,
}

impl AnsweredBy {
    fn as_str(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Upstream => "upstream",
            Self::Kubefan => "kubefan",
        }
    }
}

/// The metrics of requests.
#[derive(Clone)]
pub struct RequestMetrics {
    requests: IntCounterVec,
    in_flight: IntGaugeVec,
    duration: HistogramVec,
}

impl RequestMetrics {
    /// Creates and registers the metrics. Fails if the registry already has one of them.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let requests = Opts::new(
            "kubefan_requests_total",
            "Requests answered, by protocol, verb, resource, status code and source of the answer.",
        );
        let in_flight = Opts::new(
            "kubefan_requests_inflight",
            "Requests being answered now, by protocol and verb; a watch counts until it has started.",
        );
        let duration = HistogramOpts::new(
            "kubefan_request_duration_seconds",
            "Time from a request to the end of its answer, except for watches, logs and sessions, by protocol, verb and \
             source of the answer.",
        );
        let buckets =
            vec![0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
        let requests = IntCounterVec::new(requests, &["protocol", "verb", "resource", "code", "answered_by"])?;
        let in_flight = IntGaugeVec::new(in_flight, &["protocol", "verb"])?;
        let duration = HistogramVec::new(duration.buckets(buckets), &["protocol", "verb", "answered_by"])?;
        registry.register(Box::new(requests.clone()))?;
        registry.register(Box::new(in_flight.clone()))?;
        registry.register(Box::new(duration.clone()))?;
        Ok(Self { requests, in_flight, duration })
    }

    /// Counts a request that arrived. It counts as in flight until the guard is dropped. The
    /// duration of a `long_running` request is not recorded.
    pub fn begin(&self, protocol: Protocol, verb: &'static str, long_running: bool) -> RequestGuard {
        let in_flight = self.in_flight.with_label_values(&[protocol.as_str(), verb]);
        in_flight.inc();
        RequestGuard {
            all: self.clone(),
            protocol,
            verb,
            long_running,
            started: Instant::now(),
            in_flight,
            answered_by: None,
        }
    }
}

/// Counts one request. Dropped without an answer, it counts as cancelled.
pub struct RequestGuard {
    all: RequestMetrics,
    protocol: Protocol,
    verb: &'static str,
    long_running: bool,
    started: Instant,
    in_flight: IntGauge,
    answered_by: Option<AnsweredBy>,
}

impl RequestGuard {
    /// Counts the start of the answer.
    pub fn answered(&mut self, resource: &str, code: &str, by: AnsweredBy) {
        self.answered_by = Some(by);
        let labels = [self.protocol.as_str(), self.verb, resource, code, by.as_str()];
        self.all.requests.with_label_values(&labels).inc();
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.in_flight.dec();
        match self.answered_by {
            None => self.answered(OTHER, self.protocol.cancelled(), AnsweredBy::Kubefan),
            Some(by) if !self.long_running => {
                let labels = [self.protocol.as_str(), self.verb, by.as_str()];
                self.all.duration.with_label_values(&labels).observe(self.started.elapsed().as_secs_f64());
            }
            Some(_) => {}
        }
    }
}
