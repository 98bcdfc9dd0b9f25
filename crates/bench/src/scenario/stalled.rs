//! `stalled`: some subscribers stop reading under load, and the others must not notice. First everyone reads; then some stop for as long;
//! then they go on, and what they hold in the end is compared with what the apiserver holds.
//!
//! History is kept short, so that who was stalled has fallen behind it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use http::Method;
use tokio::time::{Instant, interval};

use super::{Sample, Variant};
use crate::{
    BenchError, ContenderKind,
    board::Board,
    figures::{Figure, Figures},
    laggards::Laggards,
    load::{Load, Trigger, drive},
    process::Meter,
    rest::{Endpoint, Rest},
    source::Source,
    stage::{READY_TIMEOUT, Selection, Server, Stage, settled},
};
use kubefan_common::proto::v1alpha1::{OnExpired, OnLag, Target, WatchRequest};

/// Of a page of the list that all is compared with.
const PAGE_OBJECTS: usize = 500;
/// Changes that history keeps at least: who only reads slowly has not fallen behind it.
const RING_EVENTS_MIN: u32 = 64;
/// What kubefan may take beside objects, in bytes: of its own, and for each subscriber.
const MEMORY_BYTES_BASE: u64 = 64 << 20;
const MEMORY_BYTES_PER_SUBSCRIBER: u64 = 48 << 10;
/// What it may take for each object and each change of its history, in bytes, where the options do not say how large pods are.
const OBJECT_BYTES: usize = 6 << 10;
/// How often memory is looked at.
const MEMORY_INTERVAL: Duration = Duration::from_millis(500);
/// What of a load's figures says how the others fare.
const SHOWN: [Figure; 6] = [
    Figure::DeliveriesPerSecond,
    Figure::SlowestSubscriberShare,
    Figure::LatencyP50,
    Figure::LatencyP99,
    Figure::LatencyMax,
    Figure::LatencySlowestSubscriber,
];

pub(super) async fn run(stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    if matches!(stage.contender.kind, ContenderKind::Apiserver { .. }) {
        // It has no catch-ups: who falls behind lists again.
        return Ok(Vec::new());
    }
    let (subscribers, duration) = (stage.options.subscribers, stage.options.duration);
    let stalled = stage.options.stalled().min(subscribers.saturating_sub(1));
    let others = subscribers - stalled;
    let rate = stage.options.rate_of_paced();
    let history = ((f64::from(rate) * duration.as_secs_f64() / 2.0) as u32).max(RING_EVENTS_MIN);
    let budget = memory_budget(stage, source, history);
    let flags = [format!("--ring-events-max={history}"), format!("--memory-max={budget}")];
    let mut server = stage.server_with(source, &flags).await?;

    let mut laggards = Laggards::start(&server.connector, &request(source), stalled);
    laggards.until(1, READY_TIMEOUT).await?;
    let board = Arc::new(Board::new(others, true));
    let _receivers = stage.subscribe(&server, source, &board, Some(server.version(source)), |_| Selection::default());
    board.all_ready(READY_TIMEOUT).await?;

    let load = Load::Paced { rate };
    let each = others as u64;
    drive(load, Trigger::Source(source), &mut server.meter, &board, each, stage.options.warm_up()).await?;
    let mut rows = Vec::new();
    for reads in [true, false] {
        laggards.read(reads);
        let meter = server.meter_again();
        let driving = drive(load, Trigger::Source(source), &mut server.meter, &board, each, duration);
        let (driven, memory) = with_memory(&meter, driving).await?;
        let (all, mut figures) = (driven.figures(), memory);
        within(budget, &figures)?;
        for figure in SHOWN {
            figures.set(figure, all.get(figure).unwrap_or(f64::NAN));
        }
        rows.push(figures);
    }
    let p99 = |figures: &Figures| figures.get(Figure::LatencyP99).unwrap_or(f64::NAN);
    let ratio = p99(&rows[1]) / p99(&rows[0]);
    rows[1].set(Figure::LatencyP99Ratio, ratio);
    rows.push(caught_up(&mut laggards, &server, source).await?);
    let names = ["all read", "some stalled", "caught up"];
    let variant = |name| Variant { name, subscribers, batch: None };
    Ok(names.into_iter().map(variant).zip(rows).collect())
}

/// What kubefan is told that it may take, whoever stalls.
fn memory_budget(stage: &Stage<'_>, source: &Source, history: u32) -> u64 {
    let objects = source.objects() as u64 + u64::from(history);
    let object_bytes = stage.options.object_bytes.unwrap_or(OBJECT_BYTES) as u64;
    MEMORY_BYTES_BASE + MEMORY_BYTES_PER_SUBSCRIBER * stage.options.subscribers as u64 + objects * object_bytes
}

/// Fails where more was taken than was allowed.
fn within(budget: u64, figures: &Figures) -> Result<(), BenchError> {
    match figures.get(Figure::RssMax) {
        Some(taken) if taken > budget as f64 => Err(BenchError::Memory { taken: taken as u64, budget }),
        _ => Ok(()),
    }
}

/// Lets the stalled go on, until they hold what there is.
async fn caught_up(laggards: &mut Laggards, server: &Server, source: &Source) -> Result<Figures, BenchError> {
    let began = Instant::now();
    laggards.read(true);
    laggards.until(source.version(), READY_TIMEOUT).await?;
    let mut figures = Figures::default();
    figures.set(Figure::Seconds, began.elapsed().as_secs_f64());
    laggards.check(&truth(source).await?)?;
    let (catch_ups, resumes) = laggards.catch_ups_and_resumes();
    figures.set(Figure::CatchUps, catch_ups as f64);
    figures.set(Figure::Resumes, resumes as f64);
    figures.set(Figure::RssEnd, settled(&server.meter).await? as f64);
    Ok(figures)
}

/// What a stalled subscriber asks for: to be caught up, and never to be started over.
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

/// Looks at a process's memory while something goes on.
async fn with_memory<T>(
    meter: &Meter,
    work: impl Future<Output = Result<T, BenchError>>,
) -> Result<(T, Figures), BenchError> {
    let (mut work, mut ticks) = (std::pin::pin!(work), interval(MEMORY_INTERVAL));
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

/// The versions of the pods that the apiserver itself lists, by namespace and name.
async fn truth(source: &Source) -> Result<HashMap<String, String>, BenchError> {
    let rest = Rest::connect(Endpoint::read(source.kubeconfig()).await?).await?;
    let collection = match source.namespace() {
        "" => "/api/v1/pods".to_owned(),
        namespace => format!("/api/v1/namespaces/{namespace}/pods"),
    };
    let (mut objects, mut token) = (HashMap::new(), String::new());
    loop {
        let path = format!("{collection}?limit={PAGE_OBJECTS}&continue={token}");
        let page = rest.call(Method::GET, &path, "application/json", None).await?;
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
