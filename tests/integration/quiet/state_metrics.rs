//! What copies of a real program cost the apiserver: kube-state-metrics, which watches 28
//! resources, straight and through kubefan. At the end every copy must serve the same metrics, so
//! each has the same objects.

use std::{collections::BTreeSet, path::Path, process::Command, time::Duration};

use tokio::time::{Instant, sleep};

use super::{
    Table,
    cluster::{self, KINDS},
    directory, seconds,
    upstream_requests::{APART, KUBEFAN, UpstreamRequests, most_frequent_gets, objects_sent, requests_by_agent},
};
use crate::{
    clients::Both,
    harness::{
        apiserver::{self, ApiServer},
        assets,
        audit::Audit,
        kubefan,
        process::{Process, free_port},
        tests, wait,
    },
};

tests! {
    apiserver large: copies_of_kube_state_metrics_see_the_same_and_share_their_requests;
}

const COPIES: [usize; 3] = [1, 3, 30];
const OBJECTS: usize = 400;
const READY_AT_MOST: Duration = Duration::from_secs(180);
/// How long the copies run after they are ready.
const STEADY: Duration = Duration::from_secs(30);
/// Metrics that are equal after this long no longer change.
const SETTLED: Duration = Duration::from_secs(5);
const AGENT: &str = "kube-state-metrics";

async fn copies_of_kube_state_metrics_see_the_same_and_share_their_requests() {
    let program = assets::kube_state_metrics();
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options()).await;
    let created = cluster::populate(&api, OBJECTS).await;
    let _leases = cluster::write_leases(&api, 10).await;
    let directory = directory();
    let expected = reference(&program, &api, directory.path()).await;
    let columns = [
        "copies",
        "through",
        "all ready after s",
        "same metrics",
        "LIST",
        "of them versions only",
        "WATCH",
        "LIST + WATCH",
        "objects sent by the apiserver",
        APART,
    ];
    let mut table = Table::new(
        format!(
            "kube-state-metrics: {} informers, {created} objects, for {} s after readiness",
            KINDS.len(),
            STEADY.as_secs()
        ),
        &columns,
    );
    let (mut wrong, mut agents_seen, mut media) = (Vec::new(), Vec::new(), Vec::new());
    for copies in COPIES {
        for setting in settings().await {
            let at = audit.requests("").len();
            let sent = objects_sent(&api, None).await;
            let both = match &setting.flags {
                Some(flags) => {
                    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
                    Some(Both::start(api.handle(), &flags).await)
                }
                None => None,
            };
            let kubeconfig = both.as_ref().map_or_else(|| api.kubeconfig(), |both| both.servers[1].kubeconfig.clone());
            let start = Instant::now();
            let running: Vec<Copy> =
                (0..copies).map(|_| Copy::start(&program, &kubeconfig, directory.path())).collect();
            let ready = wait::try_until(READY_AT_MOST, || all_have(&running, &expected)).await;
            let took = ready.map(|at| (at - start).as_secs_f64());
            sleep(STEADY).await;
            let mut same = 0;
            for copy in &running {
                same += usize::from(copy.metrics().await.as_ref() == Some(&expected));
            }
            let sent = objects_sent(&api, None).await - sent;
            let requests = audit.requests("").split_off(at);
            let counts = UpstreamRequests::of(&requests, &[KUBEFAN, AGENT]);
            table.row(&[
                &copies,
                &setting.name,
                &seconds(took, READY_AT_MOST),
                &format!("{same} of {copies}"),
                &counts.lists,
                &counts.version_lookups,
                &counts.watches,
                &counts.lists_and_watches(),
                &sent,
                &counts.apart(),
            ]);
            if same < copies {
                wrong.push(format!("{} through {}: {same} of {copies}", AGENT, setting.name));
            }
            agents_seen.push(format!("{copies} copies, {}: {:?}", setting.name, requests_by_agent(&requests)));
            let gets = most_frequent_gets(&requests, KUBEFAN, 4);
            println!("kubefan's most frequent gets: {gets:?}");
            if let Some(both) = &both {
                media.push(format!("{copies} copies, {}: {:?}", setting.name, watches_by_media(both).await));
            }
        }
    }
    println!("{table}");
    println!("Requests by User-Agent and verb:\n{}\n", agents_seen.join("\n"));
    println!("Watches that kubefan served, by encoding:\n{}\n", media.join("\n"));
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// How the copies reach the apiserver.
struct Setting {
    name: String,
    /// kubefan's flags; `None` without kubefan.
    flags: Option<Vec<String>>,
}

async fn settings() -> Vec<Setting> {
    let names: Vec<String> = KINDS.iter().map(|kind| kind.full_name()).collect();
    let configured = |suffix: &str| {
        let names: Vec<String> = names.iter().map(|name| format!("{name}{suffix}")).collect();
        Some(vec!["--resource".to_owned(), names.join(",")])
    };
    let on_demand = Some(vec!["--on-demand-resources-max".to_owned(), "64".to_owned()]);
    let mut settings = vec![
        Setting { name: "straight".to_owned(), flags: None },
        Setting { name: "kubefan, on demand, default limits".to_owned(), flags: Some(Vec::new()) },
        Setting { name: "kubefan, on demand, 64 places".to_owned(), flags: on_demand },
        Setting { name: "kubefan, --resource NAMES".to_owned(), flags: configured("") },
    ];
    // Not every version of kubefan lets the operator choose the encodings.
    if kubefan::run(&["serve", "--help"]).await.stdout.contains("=protobuf") {
        settings
            .push(Setting { name: "kubefan, --resource NAMES=protobuf".to_owned(), flags: configured("=protobuf") });
    }
    settings
}

/// What a copy serves straight from the apiserver, when it no longer changes.
async fn reference(program: &Path, api: &ApiServer, directory: &Path) -> BTreeSet<String> {
    let copy = Copy::start(program, &api.kubeconfig_for(apiserver::ADMIN), directory);
    let mut last = BTreeSet::new();
    for _ in 0..READY_AT_MOST.as_secs() / SETTLED.as_secs() {
        sleep(SETTLED).await;
        let now = copy.metrics().await.unwrap_or_default();
        if now == last && now.len() > OBJECTS {
            return now;
        }
        last = now;
    }
    panic!("the metrics still change, or are too few: {} lines", last.len());
}

/// Whether all copies serve what is expected.
async fn all_have(copies: &[Copy], expected: &BTreeSet<String>) -> Option<Instant> {
    for copy in copies {
        if copy.metrics().await.as_ref() != Some(expected) {
            return None;
        }
    }
    Some(Instant::now())
}

/// One running kube-state-metrics.
struct Copy {
    _process: Process,
    port: u16,
}

impl Copy {
    fn start(program: &Path, kubeconfig: &Path, directory: &Path) -> Copy {
        let (port, own) = (free_port(), free_port());
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(kubeconfig);
        command.args(["--host=127.0.0.1", "--telemetry-host=127.0.0.1"]);
        command.args([format!("--port={port}"), format!("--telemetry-port={own}")]);
        let log = directory.join(format!("state-metrics-{port}"));
        Copy { _process: Process::spawn("kube-state-metrics", &mut command, &log), port }
    }

    /// The lines of its metrics, except those of leases, which change all the time.
    async fn metrics(&self) -> Option<BTreeSet<String>> {
        let response = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.port)).await.ok()?;
        let text = response.text().await.ok()?;
        let ours = |line: &&str| line.starts_with("kube_") && !line.starts_with("kube_lease_");
        Some(text.lines().filter(ours).map(str::to_owned).collect())
    }
}

/// The watches that kubefan served from its caches, by encoding.
async fn watches_by_media(both: &Both) -> Vec<(&'static str, f64)> {
    let (_, lines) = both.metric("kubefan_subscriptions_started_total").await;
    let count = |media: &str| {
        let ours = lines.lines().filter(|line| line.contains(&format!(r#"media="{media}""#)));
        ours.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    ["json", "protobuf", "table"].map(|media| (media, count(media))).to_vec()
}
