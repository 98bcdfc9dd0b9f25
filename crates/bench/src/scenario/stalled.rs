//! `stalled`: some subscribers stop reading under load, which must not affect the others. First all
//! subscribers read. Then some stop for the same time. Then they resume, and their objects are
//! compared with the apiserver's.
//!
//! The server's history is kept short, so that the stalled subscribers fall behind it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use http::Method;
use tokio::time::{Instant, interval};

use super::{Sample, Variant};
use crate::{
    BenchError, ServerKind,
    counters::Counters,
    figures::{Figure, Figures},
    load::{Load, Trigger, drive},
    process::Meter,
    rest::{Endpoint, RestClient},
    server_process::{READY_TIMEOUT, Run, Selection, Server, settled_memory},
    source::{Source, pods_path},
    stalled_subscribers::StalledSubscribers,
};
use kubefan_common::proto::v1alpha1::{OnExpired, OnLag, Target, WatchRequest};

/// Page size of the list that the subscribers' objects are compared with.
const PAGE_OBJECTS: usize = 500;
/// Minimum length of the history, so that a subscriber that is merely slow does not fall behind it.
const RING_EVENTS_MIN: u32 = 64;
/// Memory limit of kubefan apart from objects, in bytes: a base, and a part per subscriber.
const MEMORY_BYTES_BASE: u64 = 64 << 20;
const MEMORY_BYTES_PER_SUBSCRIBER: u64 = 48 << 10;
/// Memory limit per object and per change in history, in bytes, if the options do not set the size
/// of pods.
const OBJECT_BYTES: usize = 6 << 10;
/// Interval at which memory is sampled.
const MEMORY_INTERVAL: Duration = Duration::from_millis(500);
/// The figures that show the effect on the subscribers that keep reading.
const SHOWN: [Figure; 6] = [
    Figure::DeliveriesPerSecond,
    Figure::SlowestSubscriberShare,
    Figure::LatencyP50,
    Figure::LatencyP99,
    Figure::LatencyMax,
    Figure::LatencySlowestSubscriber,
];

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    if matches!(run.spec.kind, ServerKind::Apiserver { .. }) {
        // kube-apiserver has no catch-ups: a client that falls behind must relist.
        return Ok(Vec::new());
    }
    let subscribers = run.options.subscribers;
    let duration = run.options.duration;
    let stalled_count = run.options.stalled().min(subscribers.saturating_sub(1));
    let others = subscribers - stalled_count;
    let rate = run.options.paced_rate();
    let history = ((f64::from(rate) * duration.as_secs_f64() / 2.0) as u32).max(RING_EVENTS_MIN);
    let budget = memory_budget(run, source, history);
    let flags = [format!("limits.ringEventsMax={history}"), format!("--memory-max={budget}")];
    let mut server = run.start_server_with(source, &flags).await?;

    let mut stalled = StalledSubscribers::start(&server.connector, &request(source), stalled_count);
    stalled.wait_for_version(1, READY_TIMEOUT).await?;
    let counters = Arc::new(Counters::new(others, true));
    let _receivers = run.subscribe(&server, source, &counters, Some(server.version(source)), |_| Selection::default());
    counters.all_ready(READY_TIMEOUT).await?;

    let load = Load::Paced { rate };
    let each = others as u64;
    drive(load, Trigger::Source(source), &mut server.meter, &counters, each, run.options.warm_up()).await?;
    let mut rows = Vec::new();
    for reading in [true, false] {
        stalled.set_reading(reading);
        let meter = server.new_meter();
        let driving = drive(load, Trigger::Source(source), &mut server.meter, &counters, each, duration);
        let (load_result, memory) = with_memory_samples(&meter, driving).await?;
        let all = load_result.figures();
        let mut figures = memory;
        check_memory(budget, &figures)?;
        for figure in SHOWN {
            figures.set(figure, all.get(figure).unwrap_or(f64::NAN));
        }
        rows.push(figures);
    }
    let p99 = |figures: &Figures| figures.get(Figure::LatencyP99).unwrap_or(f64::NAN);
    let ratio = p99(&rows[1]) / p99(&rows[0]);
    rows[1].set(Figure::LatencyP99Ratio, ratio);
    rows.push(catch_up(&mut stalled, &server, source).await?);
    let names = ["all read", "some stalled", "caught up"];
    let variant = |name| Variant { name, subscribers, batch: None };
    Ok(names.into_iter().map(variant).zip(rows).collect())
}

/// The server's `--memory-max`, however many subscribers stall.
fn memory_budget(run: &Run<'_>, source: &Source, history: u32) -> u64 {
    let objects = source.objects() as u64 + u64::from(history);
    let object_bytes = run.options.object_bytes.unwrap_or(OBJECT_BYTES) as u64;
    MEMORY_BYTES_BASE + MEMORY_BYTES_PER_SUBSCRIBER * run.options.subscribers as u64 + objects * object_bytes
}

/// Fails if the server used more memory than its limit.
fn check_memory(budget: u64, figures: &Figures) -> Result<(), BenchError> {
    match figures.get(Figure::RssMax) {
        Some(used) if used > budget as f64 => Err(BenchError::Memory { used: used as u64, budget }),
        _ => Ok(()),
    }
}

/// Lets the stalled subscribers resume, waits until they are up to date, and compares their
/// objects.
async fn catch_up(stalled: &mut StalledSubscribers, server: &Server, source: &Source) -> Result<Figures, BenchError> {
    let start = Instant::now();
    stalled.set_reading(true);
    stalled.wait_for_version(source.version(), READY_TIMEOUT).await?;
    let mut figures = Figures::default();
    figures.set(Figure::Seconds, start.elapsed().as_secs_f64());
    stalled.check(&listed_versions(source).await?)?;
    let (catch_ups, resumes) = stalled.catch_ups_and_resumes();
    figures.set(Figure::CatchUps, catch_ups as f64);
    figures.set(Figure::Resumes, resumes as f64);
    figures.set(Figure::RssEnd, settled_memory(&server.meter).await? as f64);
    Ok(figures)
}

/// The watch of a stalled subscriber: it accepts catch-ups, and fails instead of receiving a new
/// snapshot.
fn request(source: &Source) -> WatchRequest {
    let target = Target { resource: "pods".to_owned(), namespace: source.namespace().to_owned(), ..Target::default() };
    WatchRequest {
        target: Some(target),
        on_lag: OnLag::Conflate.into(),
        on_expired: OnExpired::Fail.into(),
        bookmark_interval: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..WatchRequest::default()
    }
}

/// Samples a process's memory while `work` runs.
async fn with_memory_samples<T>(
    meter: &Meter,
    work: impl Future<Output = Result<T, BenchError>>,
) -> Result<(T, Figures), BenchError> {
    let mut work = std::pin::pin!(work);
    let mut ticks = interval(MEMORY_INTERVAL);
    let mut largest = 0;
    let done = loop {
        tokio::select! {
            done = &mut work => break done?,
            _ = ticks.tick() => largest = largest.max(meter.resident_bytes()?),
        }
    };
    let last = meter.resident_bytes()?;
    let mut figures = Figures::default();
    figures.set(Figure::RssMax, largest.max(last) as f64);
    figures.set(Figure::RssEnd, last as f64);
    Ok((done, figures))
}

/// The resource versions of the pods in the apiserver's own list, by namespace and name.
async fn listed_versions(source: &Source) -> Result<HashMap<String, String>, BenchError> {
    let client = RestClient::connect(Endpoint::read(source.kubeconfig()).await?).await?;
    let collection = pods_path(source.namespace());
    let mut objects = HashMap::new();
    let mut token = String::new();
    loop {
        let path = format!("{collection}?limit={PAGE_OBJECTS}&continue={token}");
        let page = client.call(Method::GET, &path, "application/json", None).await?;
        for item in page["items"].as_array().into_iter().flatten() {
            let text = |field: &str| item["metadata"][field].as_str().unwrap_or_default();
            objects.insert(format!("{}/{}", text("namespace"), text("name")), text("resourceVersion").to_owned());
        }
        token = page["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        if token.is_empty() {
            return Ok(objects);
        }
    }
}
