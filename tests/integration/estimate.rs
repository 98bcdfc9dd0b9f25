//! `kubefan estimate`: its predictions for watches of a real apiserver and from given figures,
//! compared with the real savings and costs of moving the watches to kubefan. With
//! `KUBEFAN_TEST_SCALE=full` there are 500 watches.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt, future::join_all};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::{
    benchmarks::cpu_seconds,
    harness::{
        apiserver::{ADMIN, ApiServer, NOBODY, Options},
        is_full_scale,
        kubefan::{Kubefan, run},
        objects::version_of,
        simulated::{Simulated, json},
        tests, wait,
    },
    quiet::{
        Table,
        cluster::{self, kind},
    },
};

tests! {
    apiserver slow_soaks alone: moving_watches_saves_what_was_predicted_and_costs_what_was_calculated;
    apiserver slow_programs: the_right_to_read_metrics_is_named;
    local: what_cannot_be_estimated_is_refused, the_calculator_needs_no_cluster;
}

/// The watched resources.
const WATCHED: [&str; 2] = ["configmaps", "pods"];
/// Encodings that the clients request, in turns: kubectl and most languages, and client-go's typed
/// clients.
const ENCODINGS: [&str; 2] = ["application/json", "application/vnd.kubernetes.protobuf,application/json"];

struct Scale {
    watches: usize,
    /// Objects of each resource.
    objects: usize,
    /// Writes to both resources together.
    writes_per_second: u32,
    seconds: u64,
}

fn scale() -> Scale {
    if is_full_scale() {
        return Scale { watches: 500, objects: 5_000, writes_per_second: 40, seconds: 30 };
    }
    Scale { watches: 20, objects: 20, writes_per_second: 10, seconds: 3 }
}

/// Open watches, each over a connection of its own with TLS, until they are dropped.
struct Watches {
    // Dropping it ends the tasks.
    _readers: JoinSet<()>,
}

impl Watches {
    /// Opens watches of the resources in turns, half of each in either encoding, from the present
    /// version. Waits until each has had an event.
    async fn open(api: &ApiServer, count: usize, server: &str) -> Watches {
        let mut readers = JoinSet::new();
        let mut received = Vec::new();
        let kinds = WATCHED.map(kind);
        let paths = join_all(kinds.iter().map(async |kind| {
            let list = api.get_json(&format!("{}?limit=1", kind.path())).await;
            format!("{server}{}?watch=1&resourceVersion={}", kind.path(), version_of(&list))
        }))
        .await;
        for number in 0..count {
            let bytes = Arc::new(AtomicU64::new(0));
            received.push(bytes.clone());
            let client = api.client_as(ADMIN);
            let accept = ENCODINGS[number / WATCHED.len() % ENCODINGS.len()];
            let request = client.get(&paths[number % WATCHED.len()]).header("accept", accept);
            readers.spawn(async move {
                let mut chunks = request.send().await.expect("the watch starts").bytes_stream();
                while let Some(Ok(chunk)) = chunks.next().await {
                    bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                }
            });
        }
        wait::until("an event for each watch", wait::SOON * 6, || async {
            received.iter().all(|bytes| bytes.load(Ordering::Relaxed) > 0).then_some(())
        })
        .await;
        Watches { _readers: readers }
    }
}

/// kubefan with TLS, and a cache of each encoding.
async fn kubefan_of(api: &ApiServer) -> Kubefan {
    let (certificate, key) = api.server_certificate();
    let resources = WATCHED.map(|name| format!("{name}=json+protobuf")).join(",");
    let files =
        [format!("--tls-cert-file={}", certificate.display()), format!("--tls-private-key-file={}", key.display())];
    Kubefan::start(api, &["--resource", &resources, &files[0], &files[1]]).await
}

/// Writes to the objects of both resources in turns.
fn write(api: &ApiServer, scale: &Scale) -> cluster::Background {
    let paths = WATCHED.map(|name| kind(name).path_in("default"));
    let objects = scale.objects;
    cluster::write(api, scale.writes_per_second, move |tick| {
        let tick = tick as usize;
        format!("{}/o-{}", paths[tick % paths.len()], tick / paths.len() % objects)
    })
}

/// Report of the command, and the CPU that the apiserver and kubefan used meanwhile, by the kernel.
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
        let before = used();
        let start = tokio::time::Instant::now();
        let ran = run(&[&args[..], &[kubeconfig.to_str().unwrap()]].concat()).await;
        let after = used();
        let seconds = start.elapsed().as_secs_f64();
        let cores = (after.0 - before.0) / seconds;
        let cores_of_kubefan = (after.1 - before.1) / seconds;
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
        Observed { report: json(&ran.stdout), cores, cores_of_kubefan }
    }

    /// A figure of both resources together.
    fn figure(&self, name: &str) -> f64 {
        let resources = self.report["resources"].as_array().unwrap();
        let found = resources.iter().filter(|found| WATCHED.iter().any(|watched| found["resource"] == *watched));
        found.map(|found| found[name].as_f64().unwrap_or_else(|| panic!("no {name} in {found:#}"))).sum()
    }

    fn total(&self, part: &str, name: &str) -> f64 {
        self.report[part][name].as_f64().unwrap_or_else(|| panic!("no {part}.{name} in {:#}", self.report))
    }
}

/// The open watches of both resources at the apiserver.
async fn open_watches(api: &ApiServer) -> f64 {
    let lines = api.metric("apiserver_longrunning_requests").await;
    let ours = lines.lines().filter(|line| {
        WATCHED.iter().any(|name| line.contains(&format!("resource=\"{name}\""))) && line.contains("verb=\"WATCH\"")
    });
    ours.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// The apiserver's own watches, once their number stays the same: it starts them one by one.
async fn own_watches(api: &ApiServer) -> f64 {
    wait::until("the apiserver's own watches", wait::SOON, || async {
        let before = open_watches(api).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        (open_watches(api).await == before).then_some(before)
    })
    .await
}

/// Waits until this many watches are open: a watch that has ended is followed by another.
async fn watches_become(api: &ApiServer, count: f64) {
    let what = format!("{count} watches");
    wait::until(&what, wait::SOON, || async { (open_watches(api).await == count).then_some(()) }).await;
}

async fn moving_watches_saves_what_was_predicted_and_costs_what_was_calculated() {
    let scale = scale();
    let api = ApiServer::start(Options::default()).await;
    for name in WATCHED {
        cluster::create(&api, &kind(name), scale.objects).await;
    }
    let _writes = write(&api, &scale);
    let own = own_watches(&api).await;
    let idle = Observed::of(&api, None, scale.seconds).await;

    let direct = {
        let _watches = Watches::open(&api, scale.watches, api.url()).await;
        watches_become(&api, own + scale.watches as f64).await;
        Observed::of(&api, None, scale.seconds).await
    };
    let at_most = wait::SOON;
    wait::until("the watches to end", at_most, || async { (open_watches(&api).await <= own).then_some(()) }).await;
    let kubefan = kubefan_of(&api).await;
    let empty = resident_bytes(&kubefan).await;
    // One of each resource in each encoding.
    let each = (WATCHED.len() * ENCODINGS.len()) as f64;
    let _watches = Watches::open(&api, scale.watches, &format!("https://{}", kubefan.grpc_addr)).await;
    watches_become(&api, own + each).await;
    let through = Observed::of(&api, Some(&kubefan), scale.seconds).await;
    let resident = resident_bytes(&kubefan).await;
    println!("{}", saved(&scale, &idle, &direct, &through));
    assert_calculated(&api, &scale, &through, empty, resident).await;

    // The apiserver itself has some watches, too.
    let opened = direct.figure("watches") - own;
    let is_one = through.figure("watches") - own;
    assert_eq!((opened, is_one), (scale.watches as f64, each), "{:#}", through.report);
    assert_eq!(direct.figure("watchesAfter"), WATCHED.len() as f64);
    assert!(direct.total("kubefan", "subscribers") >= scale.watches as f64);
    // Each watch of a resource gets each change before, and one in each encoding does afterwards.
    let sent = direct.figure("eventsPerSecond");
    let remaining = through.figure("eventsPerSecond");
    let fewer = scale.watches as f64 / WATCHED.len() as f64 / ENCODINGS.len() as f64;
    assert!(remaining * fewer / 4.0 < sent, "{sent} events/s before, {remaining} after");
    assert!(direct.figure("eventsPerSecondAfter") * 2.0 < sent, "{:#}", direct.report);
    assert!(direct.figure("jsonBytes") > 0.0, "{:#}", direct.report);
    // A write of these resources wakes ten watches or more, and one afterwards.
    let seats = &direct.report["apiserver"]["seats"];
    assert!(seats["ofWrites"].as_f64().is_some_and(|seats| seats > 0.0), "{seats}");
    assert_eq!(seats["ofWritesAfter"], 0.0, "{seats}");
    assert!(seats["ofAllStarts"].as_f64() > seats["ofAllStartsAfter"].as_f64(), "{seats}");
}

/// The resident memory, by the kernel.
async fn resident_bytes(kubefan: &Kubefan) -> f64 {
    kubefan.metric("process_resident_memory_bytes").await.expect("kubefan measures its memory")
}

fn megabytes(bytes: f64) -> String {
    format!("{:.1} MB", bytes / 1e6)
}

/// Compares the apiserver's work with the prediction.
fn saved(scale: &Scale, idle: &Observed, direct: &Observed, through: &Observed) -> Table {
    let Scale { watches, objects, writes_per_second, seconds } = scale;
    let objects = objects * WATCHED.len();
    let mut table = Table::new(
        format!("{watches} watches, half in protobuf; {objects} objects, {writes_per_second} writes/s, {seconds} s"),
        &["apiserver", "without watches", "before", "predicted", "after"],
    );
    for (name, after) in [
        ("watches", "watchesAfter"),
        ("eventsPerSecond", "eventsPerSecondAfter"),
        ("eventBytesPerSecond", "eventBytesPerSecondAfter"),
    ] {
        let figures = [idle.figure(name), direct.figure(name), direct.figure(after), through.figure(name)];
        let [none, before, predicted, after] = figures.map(|figure| figure.round());
        table.row(&[&name, &none, &before, &predicted, &after]);
    }
    let predicted = direct.cores - direct.total("apiserver", "coresSaved");
    let row = [idle.cores, direct.cores, predicted, through.cores].map(|cores| format!("{cores:.3}"));
    table.row(&[&"cores", &row[0], &row[1], &row[2], &row[3]]);
    let row = [idle, direct, through].map(|observed| megabytes(observed.total("apiserver", "residentBytes")));
    table.row(&[&"memory", &row[0], &row[1], &"", &row[2]]);
    table
}

/// Prints the estimate of `kubefan estimate --objects …` for the run, and its figures.
async fn assert_calculated(api: &ApiServer, scale: &Scale, through: &Observed, empty: f64, resident: f64) {
    // A cache in protobuf counts as one in JSON: it has as many objects, which are smaller.
    let kinds = WATCHED.map(kind);
    let lists = join_all(kinds.iter().map(async |kind| api.get_json(&kind.path()).await.to_string().len())).await;
    let object_bytes = lists.iter().sum::<usize>() / (scale.objects * WATCHED.len());
    let cached = scale.objects * WATCHED.len() * ENCODINGS.len();
    let figures = [
        format!("--objects={cached}"),
        format!("--object-bytes={object_bytes}"),
        format!("--subscribers={}", scale.watches),
        // Each subscriber watches one of the resources.
        format!("--events-per-second={}", scale.writes_per_second as usize / WATCHED.len()),
    ];
    let mut args = vec!["estimate", "-o", "json", "--replicas=1"];
    args.extend(figures.iter().map(String::as_str));
    let calculated = json(&run(&args).await.stdout);
    let of = |path: &str| calculated.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {path}"));
    let mut table = Table::new(figures.join(" "), &["kubefan", "calculated", "measured"]);
    let caches = of("/memoryPerReplica/process") + of("/memoryPerReplica/caches");
    table.row(&[&"memory without subscribers", &megabytes(caches), &megabytes(empty)]);
    table.row(&[&"memory", &megabytes(of("/memoryPerReplica/bytes")), &megabytes(resident)]);
    let cores = format!("{:.3} to {:.3}", of("/coresMin"), of("/coresMax"));
    table.row(&[&"cores", &cores, &format!("{:.3}", through.cores_of_kubefan)]);
    println!("{table}");
    // A model of a distributed build on a quiet machine: elsewhere it is right within a factor.
    assert!(resident < of("/memoryPerReplica/bytes") * 4.0 + 100e6, "{table}");
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

async fn what_cannot_be_estimated_is_refused() {
    let simulated = Simulated::start().await;
    let kubeconfig = simulated.kubeconfig();
    let ran = run(&["estimate", "--for=1s", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.lines().count()), (Some(1), "", 1), "{ran:?}");
    let ran = run(&["estimate", "--for=1ms", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
    assert!(ran.stderr.contains("--for 1ms is too short"), "{ran:?}");
    let ran = run(&["estimate", "--events-per-second=-1"]).await;
    assert_eq!(ran.stderr, "error: --events-per-second must not be negative\n", "{ran:?}");
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
}
