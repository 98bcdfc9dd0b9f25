//! The metrics: `docs/metrics.md` lists exactly the metrics that are served, names follow the
//! Prometheus rules, and the values are right.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kubefan_common::proto::v1alpha1::{OnExpired, Target, WatchRequest};
use kubefan_sim::apiserver::{Fault, Verb};
use tokio::time::sleep;

use crate::harness::{
    network::Network,
    record::{Watch, connect},
    rig::{Rig, Setup, pod, pods, target},
    simulated::Simulated,
    tests, wait,
};

tests! {
    local: served_metrics_are_documented_and_follow_prometheus_rules;
    paused: traffic_is_counted_exactly, every_end_of_a_stream_is_counted_by_its_reason,
        every_result_of_a_resume_is_counted, requests_without_an_answer_are_counted,
        there_is_at_most_one_standing_watch, subscribers_add_no_time_series;
}

/// The type, labels and help text of a metric.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Metric {
    kind: String,
    labels: BTreeSet<String>,
    help: String,
}

/// Parses the Prometheus text format.
fn served(text: &str) -> BTreeMap<String, Metric> {
    let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap_or((help, ""));
            metrics.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            metrics.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else if !line.is_empty() {
            let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap());
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let name = base.filter(|base| metrics.get(*base).is_some_and(|m| m.kind == "histogram")).unwrap_or(name);
            let labels = rest.strip_prefix('{').and_then(|rest| rest.rsplit_once('}')).map_or("", |(labels, _)| labels);
            let names = labels.split("\",").filter_map(|label| label.split_once('=')).map(|(name, _)| name.to_owned());
            let metric = metrics.get_mut(name).unwrap_or_else(|| panic!("{name} has no type"));
            metric.labels.extend(names.filter(|name| name != "le"));
        }
    }
    metrics
}

/// Parses the tables of the documentation.
pub(crate) fn documented() -> BTreeMap<String, Metric> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap();
    let quoted = |cell: &str| cell.trim().trim_matches('`').to_owned();
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let metrics = rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let [name, kind, labels, help] = cells.as_slice() else { panic!("four cells in {row}") };
        let labels = labels.split(',').map(quoted).filter(|label| !label.is_empty()).collect();
        (quoted(name), Metric { kind: quoted(kind), labels, help: help.trim().to_owned() })
    });
    let all: Vec<_> = metrics.collect();
    let count = all.len();
    let metrics: BTreeMap<_, _> = all.into_iter().collect();
    assert_eq!(metrics.len(), count, "each metric is documented once");
    metrics
}

/// The metrics that kubefan serves after traffic of every kind.
async fn after_traffic() -> BTreeMap<String, Metric> {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
    let version = simulated.create("later");
    watch.until(version).await;
    reqwest::get(format!("http://{}/version", kubefan.grpc_addr)).await.unwrap();
    simulated.sim.drop_connections();
    wait::until("a restart of the watch", wait::SOON, || async {
        let (_, text) = kubefan.admin("/metrics").await?;
        text.contains("kubefan_upstream_watch_restarts_total{").then_some(())
    })
    .await;
    served(&kubefan.admin("/metrics").await.unwrap().1)
}

async fn served_metrics_are_documented_and_follow_prometheus_rules() {
    let served = after_traffic().await;
    let documented = documented();
    assert_names_follow_prometheus_rules(&served);
    let names = |metrics: &BTreeMap<String, Metric>| metrics.keys().cloned().collect::<BTreeSet<_>>();
    let in_served = names(&served);
    let in_documented = names(&documented);
    assert_eq!(in_served.difference(&in_documented).collect::<Vec<_>>(), Vec::<&String>::new(), "not documented");
    assert_eq!(in_documented.difference(&in_served).collect::<Vec<_>>(), Vec::<&String>::new(), "not served");
    for (name, served) in served {
        let documented = &documented[&name];
        assert_eq!((&served.kind, &served.labels), (&documented.kind, &documented.labels), "{name}");
        // The documentation may say more than the help text.
        let start = served.help.split(['.', ',', ';']).next().unwrap();
        assert!(documented.help.starts_with(start), "{name}: {:?} and {:?}", served.help, documented.help);
    }
}

fn assert_names_follow_prometheus_rules(served: &BTreeMap<String, Metric>) {
    let reserved = ["_count", "_sum", "_bucket", "_info", "_created"];
    for (name, Metric { kind, labels, help }) in served {
        let snake = |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        assert!(snake(name) && labels.iter().all(|label| snake(label)), "{name} {labels:?}");
        assert!(name.starts_with("kubefan_") || name.starts_with("process_"), "{name}");
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
        assert!(kind == "gauge" || kind == "counter" || kind == "histogram", "{name} is a {kind}");
        assert!(help.len() > 10 && help.ends_with('.'), "{name}: {help:?}");
        let stem = name.trim_end_matches("_total");
        assert!(!reserved.iter().any(|end| stem.ends_with(end)) || name == "kubefan_build_info", "{name}");
        // Names use base units and never contain the type.
        let units = ["milliseconds", "ms", "minutes", "hours", "kilobytes", "megabytes", "mib", "percent"];
        let types = ["gauge", "counter", "histogram"];
        assert!(!name.split('_').any(|word| units.contains(&word) || types.contains(&word)), "{name}");
        assert!(!stem.contains("_bytes_") && !stem.contains("_seconds_"), "{name}: the unit is last");
        assert!(kind != "histogram" || name.ends_with("_seconds") || name.ends_with("_bytes"), "{name}");
    }
}

const CACHE: &str = r#"{group="",media="json",namespace="",resource="pods"}"#;

fn with(label: &str) -> String {
    let mut labels = [r#"group="""#, r#"media="json""#, r#"namespace="""#, r#"resource="pods""#, label];
    labels.sort_unstable();
    format!("{{{}}}", labels.join(","))
}

async fn three_pods(setup: Setup) -> Rig {
    let sim = setup.sim();
    for name in ["a", "b", "c"] {
        sim.create(&pods(), pod(name, "new")).unwrap();
    }
    Rig::synced(sim, setup).await
}

async fn traffic_is_counted_exactly() {
    let rig = three_pods(Setup::of(&["pods"])).await;
    let value = |name: &str| rig.metric(&format!("{name}{CACHE}"));
    let received =
        |kind: &str| rig.metric(&format!("kubefan_events_received_total{}", with(&format!("type=\"{kind}\""))));
    let mut all = rig.watch_all("pods").await;
    let mut same = rig.watch_all("pods").await;
    let mut some = rig.watch(Target { label_selector: "stage=old".into(), ..target("pods") }, "").await.unwrap();
    some.until_resumable().await;
    assert_eq!(
        value("kubefan_snapshot_objects_sent_total"),
        6.0,
        "three for each of two subscribers, none for the third"
    );
    assert_eq!((value("kubefan_subscribers"), value("kubefan_views")), (3.0, 2.0));
    assert_eq!(value("kubefan_subscriptions_started_total"), 3.0);
    let bytes = value("kubefan_sent_bytes_total");
    assert!(bytes > 6.0 * 300.0, "{bytes}");
    rig.list(target("pods")).await.unwrap();
    assert_eq!(value("kubefan_snapshot_objects_sent_total"), 9.0);

    rig.sim.create(&pods(), pod("d", "new")).unwrap();
    rig.sim.update(&pods(), pod("d", "old")).unwrap();
    let last = rig.sim.delete(&pods(), "default", "d").unwrap();
    for watch in [&mut all, &mut same, &mut some] {
        watch.until(last).await;
    }
    assert_eq!(["ADDED", "MODIFIED", "DELETED"].map(received), [1.0, 1.0, 1.0]);
    assert_eq!(value("kubefan_events_dispatched_total"), 3.0 + 2.0, "once per view that gets it");
    assert_eq!(value("kubefan_deliveries_total"), 3.0 + 3.0 + 2.0, "once per subscriber");
    assert!(value("kubefan_dispatch_latency_seconds_count") >= 3.0);
    assert_eq!(value("kubefan_cached_objects"), 3.0);
    let held: usize = all.state.values().map(String::len).sum();
    assert_eq!(value("kubefan_cached_object_bytes"), held as f64);
    assert_eq!(value("kubefan_resource_version"), last as f64);
    assert_eq!((value("kubefan_ring_events"), value("kubefan_synced")), (3.0, 1.0));
    assert!(value("kubefan_ring_bytes") > 0.0);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(value("kubefan_ring_oldest_age_seconds").floor(), 10.0);
}

fn finished_line(reason: &str) -> String {
    format!("kubefan_subscriptions_finished_total{}", with(&format!("reason=\"{reason}\"")))
}

fn finished(rig: &Rig, reason: &str) -> f64 {
    rig.metric(&finished_line(reason))
}

async fn every_end_of_a_stream_is_counted_by_its_reason() {
    let rig = three_pods(Setup::of(&["pods"])).await;
    drop(rig.watch_all("pods").await);
    rig.metric_becomes(&finished_line("cancelled"), 1.0).await;
    assert_eq!(finished(&rig, "timeout"), 0.0);
    let mut short = rig.watch_for(target("pods"), 5).await;
    while short.step().await.unwrap().is_some() {}
    drop(short);
    assert_eq!((finished(&rig, "cancelled"), finished(&rig, "timeout")), (1.0, 1.0));
    let mut denied = rig.watch_all("pods").await;
    rig.fault(Verb::Watch, Fault::Forbidden, 1000);
    rig.cut().await;
    while denied.step().await.is_ok() {}
    drop(denied);
    assert_eq!(finished(&rig, "forbidden"), 1.0);
    let started = rig.metric(&format!("kubefan_subscriptions_started_total{CACHE}"));
    assert_eq!(started, 3.0, "as many as have finished");
}

async fn every_result_of_a_resume_is_counted() {
    let mut setup = Setup::of(&["pods"]);
    setup.registry.ring.ring_events_max = 2;
    let sim = setup.sim();
    let ancient = sim.revision().to_string();
    let before = sim.create(&pods(), pod("a", "0")).unwrap().to_string();
    sim.create(&pods(), pod("b", "0")).unwrap();
    let rig = Rig::synced(sim, setup).await;
    let resumes = |result: &str| rig.metric(&format!("kubefan_resumes_total{}", with(&format!("result=\"{result}\""))));
    let mut watch = rig.watch_all("pods").await;
    let old = watch.resume_version.clone();
    for stage in ["1", "2", "3", "4"] {
        let version = rig.sim.update(&pods(), pod("a", stage)).unwrap();
        watch.until(version).await;
    }
    let ways = ["ring", "residue", "backfill", "restart", "expired", "future"];
    assert_eq!(ways.map(resumes), [0.0; 6]);
    for version in [&watch.resume_version, &old, &before] {
        rig.watch(target("pods"), version).await.unwrap();
    }
    // Upstream neither proves the cache nor confirms that the cluster has never reached the
    // version, so this replica may lag.
    rig.fault(Verb::List, Fault::Forbidden, 2);
    assert!(rig.watch(target("pods"), "999999").await.is_err());
    rig.sim.compact();
    assert!(rig.watch(target("pods"), &ancient).await.is_err());
    let on_expired = OnExpired::Restart.into();
    rig.send(WatchRequest { on_expired, ..rig.request(target("pods"), &ancient) }).await.unwrap();
    assert_eq!(ways.map(resumes), [1.0; 6]);
}

async fn requests_without_an_answer_are_counted() {
    let setup = Setup::of(&["pods"]).by_list();
    let sim = setup.sim();
    let rig = Rig::over(Network::to(sim.clone()), sim, setup);
    let requests = |verb: &str, code: &str| {
        rig.metric(&format!(r#"kubefan_upstream_requests_total{{code="{code}",verb="{verb}"}}"#))
    };
    // One request is never answered, one is cut off, and one is refused with a code.
    for fault in [Fault::Silence, Fault::Disconnect, Fault::InternalError] {
        rig.fault(Verb::List, fault, 1);
    }
    rig.ready().await;
    rig.readyz_has("pods synced").await;
    rig.watch_all("pods").await;
    // The list, and the look-up after its watch.
    assert_eq!((requests("list", "error"), requests("list", "500"), requests("list", "200")), (2.0, 1.0, 2.0));
    let counted =
        requests("list", "error") + requests("list", "500") + requests("list", "200") + requests("watch", "200");
    let recorded = |path| rig.network.recorded_requests(path).len();
    let asked = recorded(crate::harness::rig::PODS) + recorded("/api/v1/namespaces/default/pods");
    assert_eq!(counted, asked as f64, "every request is counted once");
}

async fn there_is_at_most_one_standing_watch() {
    let rig = three_pods(Setup::of(&["pods"])).await;
    let open = || rig.metric(&format!("kubefan_upstream_watches{}", with(r#"purpose="standing""#)));
    let started = || rig.metric(&format!("kubefan_upstream_watches_started_total{}", with(r#"purpose="standing""#)));
    let mut watches = Vec::new();
    for n in 0..50 {
        let selector = format!("stage!=s{n}");
        watches.push(rig.watch(Target { label_selector: selector, ..target("pods") }, "").await.unwrap());
    }
    assert_eq!((open(), started(), rig.sim.stats().open_watches[&pods()]), (1.0, 1.0, 1));
    for n in 2..6 {
        rig.cut().await;
        assert_eq!(open(), 0.0, "a watch that is down is not counted");
        rig.readyz_has("pods synced").await;
        assert_eq!((open(), started(), rig.sim.stats().open_watches[&pods()]), (1.0, f64::from(n), 1));
    }
}

async fn subscribers_add_no_time_series() {
    let rig = three_pods(Setup::of(&["pods"])).await;
    let series = |rig: &Rig| {
        rig.registry.refresh_gauges();
        let families = rig.metrics.registry().gather();
        families.iter().map(|family| family.get_metric().len()).sum::<usize>()
    };
    let mut watch = rig.watch_all("pods").await;
    let version = rig.sim.update(&pods(), pod("a", "x")).unwrap();
    watch.until(version).await;
    assert!(rig.watch(target("nope"), "").await.is_err());
    let before = series(&rig);
    let mut watches = Vec::new();
    for n in 0..100 {
        let target = Target { label_selector: format!("stage!=s{n}"), name: format!("n{n}"), ..target("pods") };
        watches.push(rig.watch(target, "").await.unwrap());
        assert!(rig.watch(Target { resource: format!("nope{n}"), ..Target::default() }, "").await.is_err());
    }
    assert_eq!(series(&rig), before, "a hundred subscribers and a hundred misspelt names add nothing");
}
