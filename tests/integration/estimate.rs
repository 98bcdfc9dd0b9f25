//! `kubefan estimate`: what it predicts for watches of a real apiserver, and what moving them to
//! kubefan really saves. With `KUBEFAN_TEST_SCALE=full` there are 500 watches.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use futures::StreamExt;
use serde_json::Value;
use tokio::task::JoinSet;

use crate::{
    benchmarks::cpu_seconds,
    harness::{
        Test,
        apiserver::{ApiServer, NOBODY, Options},
        is_full_scale,
        kubefan::{Kubefan, run},
        simulated::{Simulated, json},
        tests, wait,
    },
    quiet::{
        Table,
        cluster::{self, kind},
    },
};

pub(crate) const TESTS: &[Test] = tests! {
    apiserver: moving_watches_saves_what_was_predicted, the_right_to_read_metrics_is_named;
    local: a_server_without_the_metrics_of_an_apiserver_is_refused, the_calculator_needs_no_cluster;
};

/// The watched objects. Their number decides only the first list.
const OBJECTS: usize = 100;

struct Scale {
    watches: usize,
    writes_per_second: u32,
    seconds: u64,
}

fn scale() -> Scale {
    match is_full_scale() {
        true => Scale { watches: 500, writes_per_second: 20, seconds: 30 },
        false => Scale { watches: 20, writes_per_second: 10, seconds: 3 },
    }
}

/// Open watches, each over a connection of its own, until they are dropped.
struct Watches {
    // Dropping it ends the tasks.
    _readers: JoinSet<()>,
}

impl Watches {
    /// Opens watches and waits until each has had an event.
    async fn open(count: usize, url: String, client: impl Fn() -> reqwest::Client) -> Watches {
        let mut readers = JoinSet::new();
        let mut received = Vec::new();
        for _ in 0..count {
            let events = Arc::new(AtomicU64::new(0));
            received.push(events.clone());
            let request = client().get(format!("{url}?watch=1&resourceVersion=0"));
            readers.spawn(async move {
                let mut chunks = request.send().await.expect("the watch starts").bytes_stream();
                while let Some(Ok(chunk)) = chunks.next().await {
                    let lines = chunk.iter().filter(|byte| **byte == b'\n').count();
                    events.fetch_add(lines as u64, Ordering::Relaxed);
                }
            });
        }
        wait::until("an event for each watch", wait::SOON * 4, || async {
            received.iter().all(|events| events.load(Ordering::Relaxed) > 0).then_some(())
        })
        .await;
        Watches { _readers: readers }
    }
}

/// What the command reports, and the CPU that the apiserver and kubefan used meanwhile, by the
/// kernel.
struct Observed {
    report: Value,
    cores: f64,
    cores_of_kubefan: f64,
}

impl Observed {
    async fn of(api: &ApiServer, kubefan: Option<&Kubefan>, seconds: u64) -> Observed {
        let kubeconfig = api.kubeconfig();
        let time = format!("{seconds}s");
        let args = ["estimate", "-o", "json", "--replicas=1", "--for", &time, "--kubeconfig"];
        let used = || (cpu_seconds(api.pid()), kubefan.map_or(0.0, |kubefan| cpu_seconds(kubefan.process.pid())));
        let (before, start) = (used(), tokio::time::Instant::now());
        let ran = run(&[&args[..], &[kubeconfig.to_str().unwrap()]].concat()).await;
        let (after, seconds) = (used(), start.elapsed().as_secs_f64());
        let (cores, cores_of_kubefan) = ((after.0 - before.0) / seconds, (after.1 - before.1) / seconds);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
        Observed { report: json(&ran.stdout), cores, cores_of_kubefan }
    }

    /// A figure of the resource.
    fn figure(&self, name: &str) -> f64 {
        let resources = self.report["resources"].as_array().unwrap();
        let found = resources.iter().find(|found| found["resource"] == "configmaps");
        let found = found.unwrap_or_else(|| panic!("no configmaps in {:#}", self.report));
        found[name].as_f64().unwrap_or_else(|| panic!("no {name} in {found:#}"))
    }

    fn total(&self, part: &str, name: &str) -> f64 {
        self.report[part][name].as_f64().unwrap_or_else(|| panic!("no {part}.{name} in {:#}", self.report))
    }
}

async fn watches_of_configmaps(api: &ApiServer) -> f64 {
    let lines = api.metric("apiserver_longrunning_requests").await;
    let ours = lines.lines().filter(|line| line.contains("\"configmaps\"") && line.contains("verb=\"WATCH\""));
    ours.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

async fn moving_watches_saves_what_was_predicted() {
    let Scale { watches, writes_per_second, seconds } = scale();
    let api = ApiServer::start(Options::default()).await;
    let configmaps = kind("configmaps");
    cluster::create(&api, &configmaps, 0..OBJECTS).await;
    let path = configmaps.path_in("default");
    let _writes = cluster::write(&api, writes_per_second, move |tick| format!("{path}/o-{}", tick as usize % OBJECTS));
    let own = watches_of_configmaps(&api).await;

    let direct = {
        let _watches = Watches::open(watches, format!("{}{}", api.url(), configmaps.path()), || api.client()).await;
        Observed::of(&api, None, seconds).await
    };
    let at_most = wait::SOON;
    wait::until("the watches to end", at_most, || async { (watches_of_configmaps(&api).await <= own).then_some(()) })
        .await;
    let kubefan = Kubefan::start(&api, &["--resource=configmaps"]).await;
    let through = {
        let url = format!("http://{}{}", kubefan.grpc_addr, configmaps.path());
        let _watches = Watches::open(watches, url, reqwest::Client::new).await;
        Observed::of(&api, Some(&kubefan), seconds).await
    };

    let mut table = Table::new(
        format!("{watches} watches of {OBJECTS} config maps, {writes_per_second} writes/s, {seconds} s"),
        &["figure", "before", "predicted", "after"],
    );
    for (name, after) in [
        ("watches", "watchesAfter"),
        ("eventsPerSecond", "eventsPerSecondAfter"),
        ("eventBytesPerSecond", "eventBytesPerSecondAfter"),
    ] {
        let figures = [direct.figure(name), direct.figure(after), through.figure(name)].map(|figure| figure.round());
        table.row(&[&name, &figures[0], &figures[1], &figures[2]]);
    }
    let cores = |cores: f64| format!("{cores:.3}");
    let predicted = direct.cores - direct.total("apiserver", "coresSaved");
    table.row(&[&"apiserver, cores", &cores(direct.cores), &cores(predicted), &cores(through.cores)]);
    let (least, most) = (direct.total("kubefan", "coresMin"), direct.total("kubefan", "coresMax"));
    let needs = format!("{} to {}", cores(least), cores(most));
    table.row(&[&"kubefan, cores", &"", &needs, &cores(through.cores_of_kubefan)]);
    println!("{table}");

    // The apiserver itself has some watches, too.
    let (opened, is_one) = (direct.figure("watches") - own, through.figure("watches") - own);
    assert_eq!((opened, is_one), (watches as f64, 1.0), "{:#}", through.report);
    assert_eq!(direct.figure("watchesAfter"), 1.0);
    assert!(direct.total("kubefan", "subscribers") >= watches as f64);
    // All watches get each change before, and one does afterwards.
    let (sent, remaining) = (direct.figure("eventsPerSecond"), through.figure("eventsPerSecond"));
    assert!(remaining * watches as f64 / 4.0 < sent, "{sent} events/s before, {remaining} after");
    assert!(direct.figure("eventsPerSecondAfter") * 4.0 < sent, "{:#}", direct.report);
    assert!(direct.figure("jsonBytes") > 0.0, "{:#}", direct.report);
}

async fn the_right_to_read_metrics_is_named() {
    let api = ApiServer::shared().await;
    let kubeconfig = api.kubeconfig_for(NOBODY);
    let ran = run(&["estimate", "--for=1s", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
    assert!(ran.stderr.contains("grant it { nonResourceURLs: [\"/metrics\"], verbs: [get] }"), "{ran:?}");
    let kubeconfig = api.kubeconfig();
    let ran = run(&["estimate", "--for=1s", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.starts_with("RESOURCE ") && ran.stdout.contains("\nnot known:\n- "), "{}", ran.stdout);
}

async fn a_server_without_the_metrics_of_an_apiserver_is_refused() {
    let simulated = Simulated::start().await;
    let kubeconfig = simulated.kubeconfig();
    let ran = run(&["estimate", "--for=1s", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.lines().count()), (Some(1), "", 1), "{ran:?}");
    let ran = run(&["estimate", "--for=1ms", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
    assert!(ran.stderr.contains("--for 1ms is too short"), "{ran:?}");
}

async fn the_calculator_needs_no_cluster() {
    let figures = ["--nodes=5000", "--pods=150000", "--events-per-second=200", "--subscribers=25000"];
    let ran = run(&[&["estimate"], &figures[..]].concat()).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    assert!(ran.stdout.contains("5.0M/s to 25000 subscribers"), "{}", ran.stdout);
    let ran = run(&[&["estimate", "-o", "json"], &figures[..]].concat()).await;
    let report = json(&ran.stdout);
    assert_eq!(report["deliveriesPerSecond"], 5e6);
    assert!(report["coefficients"].as_array().unwrap().iter().all(|one| one["source"].is_string()), "{report:#}");
    let ran = run(&["estimate", "--events-per-second=-1"]).await;
    assert_eq!(ran.stderr, "error: --events-per-second must not be negative\n", "{ran:?}");
}
