//! The cost of a restart: the time from a kill until every subscriber has an event that was written
//! after it, and the load on the apiserver. The same experiment runs for subscribers of kubefan and
//! for as many client-go informers that watch the apiserver directly.
//!
//! `KUBEFAN_TEST_SCALE=full` runs it with 200 and with 1,000 subscribers; `-- --nocapture` shows
//! the table. The values depend on the machine, so only facts that hold on every machine are
//! checked.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use kubefan_sim::workload::{Workload, WorkloadOptions};
use serde_json::json;
use tokio::{sync::watch, task::JoinSet, time::Instant};

use crate::harness::{
    apiserver::{ApiServer, Options},
    is_full_scale,
    kubefan::{Kubefan, value_of},
    load,
    objects::{pod, version_of},
    process::{Process, free_port},
    record::Query,
    resuming::{LIVE_AT_MOST, Progress, Subscriber, all_are},
    tests, tools, wait,
};

tests! {
    apiserver slow_faults: a_restart_costs_the_apiserver_less_than_a_fleet_without_kubefan;
}

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fleet");
const MARKER: &str = "/api/v1/namespaces/default/pods/marker";
/// Lists, and watches with initial events, that one kubefan process may send: its own, and one for
/// each read of a burst (`READS_MAX` of `informers/read_limit.rs`), because a subscriber that gets
/// no CPU when the others return comes later with an older version.
const STATES_MAX: f64 = 1.0 + 4.0;
/// The number of subscribers that connect at the same time.
const CONNECTING_MAX: usize = 32;

struct Scale {
    pods: usize,
    fleets: &'static [usize],
}

fn scale() -> Scale {
    if is_full_scale() {
        return Scale { pods: 500, fleets: &[200, 1_000] };
    }
    Scale { pods: 30, fleets: &[12] }
}

async fn a_restart_costs_the_apiserver_less_than_a_fleet_without_kubefan() {
    let scale = scale();
    let fleet = tools::go_program("fleet", Path::new(DIR));
    let mut experiment = Experiment::begin(scale.pods).await;
    let alone = experiment.apiserver_killed("none", 0, &mut ()).await;
    let mut rows = vec![alone];
    for subscribers in scale.fleets.iter().copied() {
        let mut through = KubefanSubscribers::begin(&experiment.api, subscribers).await;
        let kubefan_killed = experiment.killed("kubefan", "kubefan", subscribers, &mut through).await;
        let kubefan = through.kubefan.as_ref().expect("no kubefan runs");
        let states = kubefan_killed.cost.states();
        let interrupted = kubefan.interrupted_lists().await as f64;
        // A list that the apiserver broke off, because it gets too little CPU, is requested again.
        assert!(states <= STATES_MAX + interrupted, "{interrupted} lists were interrupted: {kubefan_killed:?}");
        rows.push(kubefan_killed);
        rows.push(experiment.apiserver_killed("kubefan", subscribers, &mut through).await);
        drop(through);
        let mut direct = DirectInformers::begin(&experiment.api, &fleet, subscribers).await;
        let fleet_killed = experiment.killed("client-go", "fleet", subscribers, &mut direct).await;
        assert!(fleet_killed.cost.states() >= subscribers as f64, "{fleet_killed:?}");
        rows.push(fleet_killed);
        rows.push(experiment.apiserver_killed("client-go", subscribers, &mut direct).await);
    }
    println!("{}", table(scale.pods, &rows));
}

/// A group of subscribers, with or without kubefan.
trait Fleet {
    /// Kills the kubefan in front of them, or the subscribers themselves, and starts it again at
    /// once.
    async fn restart(&mut self, api: &ApiServer);
    /// Waits until all subscribers have a mark, given by number and version. Returns when the last
    /// one had it.
    async fn have(&mut self, mark: u64, version: u64) -> Instant;
}

/// An apiserver with pods. One of them is the marker, which gets a new mark again and again.
struct Experiment {
    api: ApiServer,
    marks: u64,
}

impl Experiment {
    async fn begin(pods: usize) -> Experiment {
        let api = ApiServer::start(Options::default()).await;
        let mut workload = Workload::new(7, WorkloadOptions { objects: pods, ..WorkloadOptions::default() });
        load::populate(&api, &mut workload).await;
        api.create("/api/v1/namespaces/default/pods", &pod("marker")).await;
        Experiment { api, marks: 0 }
    }

    async fn mark(&mut self) -> (u64, u64) {
        self.marks += 1;
        let patch = json!({ "metadata": { "labels": { "mark": self.marks.to_string() } } });
        (self.marks, version_of(&self.api.patch(MARKER, &patch).await))
    }

    /// Restarts the subscribers, or the kubefan in front of them.
    async fn killed(
        &mut self,
        clients: &'static str,
        killed: &'static str,
        count: usize,
        fleet: &mut impl Fleet,
    ) -> Row {
        let (mark, version) = self.mark().await;
        fleet.have(mark, version).await;
        let before = Cost::read(&self.api).await;
        let start = Instant::now();
        fleet.restart(&self.api).await;
        let (mark, version) = self.mark().await;
        let live = fleet.have(mark, version).await;
        let cost = Cost::read(&self.api).await.since(&before);
        Row { clients, killed, count, live: live - start, away: None, cost }
    }

    /// Restarts the apiserver. Its metrics start at zero then.
    async fn apiserver_killed(&mut self, clients: &'static str, count: usize, fleet: &mut impl Fleet) -> Row {
        let (mark, version) = self.mark().await;
        fleet.have(mark, version).await;
        let start = Instant::now();
        self.api.kill9();
        self.api.restart().await;
        let away = start.elapsed();
        let (mark, version) = self.mark().await;
        let live = fleet.have(mark, version).await;
        let cost = Cost::read(&self.api).await;
        Row { clients, killed: "apiserver", count, live: live - start, away: Some(away), cost }
    }
}

/// No subscribers at all.
impl Fleet for () {
    async fn restart(&mut self, _: &ApiServer) {}

    async fn have(&mut self, _: u64, _: u64) -> Instant {
        Instant::now()
    }
}

/// Subscribers of kubefan, each with its own connection.
struct KubefanSubscribers {
    kubefan: Option<Kubefan>,
    address: SocketAddr,
    progress: Vec<watch::Receiver<Progress>>,
    subscribers: JoinSet<Subscriber>,
    _end_sender: watch::Sender<u64>,
}

impl KubefanSubscribers {
    async fn begin(api: &ApiServer, count: usize) -> KubefanSubscribers {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let kubefan = Kubefan::spawn_at(&api.kubeconfig(), &address.to_string(), &["--resource", "pods"]).await;
        kubefan.ready().await;
        let (end_sender, end) = watch::channel(u64::MAX);
        let mut progress = Vec::new();
        let mut subscribers = JoinSet::new();
        while progress.len() < count {
            let connecting = (progress.len()..count).take(CONNECTING_MAX);
            let begin = connecting.map(|_| Subscriber::begin(Query::default(), vec![address], 0));
            for mut subscriber in futures::future::join_all(begin).await {
                subscriber.keep_only_progress();
                progress.push(subscriber.progress());
                subscribers.spawn(subscriber.run(end.clone()));
            }
        }
        KubefanSubscribers { kubefan: Some(kubefan), address, progress, subscribers, _end_sender: end_sender }
    }
}

impl Fleet for KubefanSubscribers {
    async fn restart(&mut self, api: &ApiServer) {
        self.kubefan.take().expect("no kubefan runs").process.kill9();
        let address = self.address.to_string();
        self.kubefan = Some(Kubefan::spawn_at(&api.kubeconfig(), &address, &["--resource", "pods"]).await);
    }

    async fn have(&mut self, _: u64, version: u64) -> Instant {
        all_are(&mut self.progress, &mut self.subscribers, |progress| progress.event >= version).await;
        Instant::now()
    }
}

/// Informers that watch the apiserver directly, in their own process.
struct DirectInformers {
    process: Process,
    program: PathBuf,
    kubeconfig: PathBuf,
    count: usize,
    directory: tempfile::TempDir,
}

impl DirectInformers {
    async fn begin(api: &ApiServer, program: &Path, count: usize) -> DirectInformers {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let program = program.to_owned();
        let kubeconfig = api.kubeconfig();
        let process = DirectInformers::spawn(&program, &kubeconfig, count, directory.path());
        DirectInformers { process, program, kubeconfig, count, directory }
    }

    fn spawn(program: &Path, kubeconfig: &Path, count: usize, directory: &Path) -> Process {
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(kubeconfig).args(["--informers", &count.to_string()]);
        Process::spawn("the fleet", &mut command, &directory.join("log"))
    }
}

impl Fleet for DirectInformers {
    async fn restart(&mut self, _: &ApiServer) {
        self.process.kill9();
        self.process = DirectInformers::spawn(&self.program, &self.kubeconfig, self.count, self.directory.path());
    }

    async fn have(&mut self, mark: u64, _: u64) -> Instant {
        wait::until("the mark to reach all informers", LIVE_AT_MOST, || {
            let log = self.process.log();
            async move {
                let mut reached = log.lines().filter_map(|line| line.strip_prefix("reached ")?.parse::<u64>().ok());
                reached.any(|reached| reached >= mark).then_some(())
            }
        })
        .await;
        Instant::now()
    }
}

/// The load on an apiserver, from its metrics.
#[derive(Clone, Copy, Debug)]
struct Cost {
    lists: f64,
    /// Started watches, whether they have ended or not.
    watches: f64,
    /// Watches with initial events.
    watch_lists: f64,
    /// Events sent to watches, with the initial events.
    events: f64,
    cpu_seconds: f64,
}

impl Cost {
    /// Reads the metrics for pods. The CPU time is that of the whole process.
    async fn read(api: &ApiServer) -> Cost {
        let requests = api.metric("apiserver_request_total").await;
        let open = api.metric("apiserver_longrunning_requests").await;
        Cost {
            lists: sum(&requests, &[r#"resource="pods""#, r#"verb="LIST""#]),
            // A watch is counted as a request when it ends.
            watches: sum(&requests, &[r#"resource="pods""#, r#"verb="WATCH""#])
                + sum(&open, &[r#"resource="pods""#, r#"verb="WATCH""#]),
            watch_lists: sum(&api.metric("apiserver_watch_list_duration_seconds_count").await, &[r#"resource="pods""#]),
            events: sum(&api.metric("apiserver_watch_events_total").await, &[r#"resource="pods""#]),
            cpu_seconds: sum(&api.metric("process_cpu_seconds_total").await, &[]),
        }
    }

    fn since(&self, before: &Cost) -> Cost {
        Cost {
            lists: self.lists - before.lists,
            watches: self.watches - before.watches,
            watch_lists: self.watch_lists - before.watch_lists,
            events: self.events - before.events,
            cpu_seconds: self.cpu_seconds - before.cpu_seconds,
        }
    }

    /// Number of times that the apiserver sent the whole state.
    fn states(&self) -> f64 {
        self.lists + self.watch_lists
    }
}

/// The sum of the metric's lines that have all of these labels.
fn sum(text: &str, labels: &[&str]) -> f64 {
    let ours = text.lines().filter(|line| labels.iter().all(|label| line.contains(label)));
    ours.map(value_of).fold(0.0, |sum, value| sum + value)
}

#[derive(Debug)]
struct Row {
    clients: &'static str,
    killed: &'static str,
    count: usize,
    /// Time until all subscribers are live again.
    live: Duration,
    /// Time until the apiserver was ready again.
    away: Option<Duration>,
    cost: Cost,
}

fn table(pods: usize, rows: &[Row]) -> String {
    let mut text = format!(
        "{pods} pods\n\
         | subscribers | of | killed | all live after s | of it without apiserver s | LIST | WATCH | with state | watch events | apiserver CPU s |\n\
         |---:|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
    );
    for Row { clients, killed, count, live, away, cost } in rows {
        let away = away.map_or("-".to_owned(), |away| format!("{:.1}", away.as_secs_f64()));
        let Cost { lists, watches, watch_lists, events, cpu_seconds } = cost;
        text.push_str(&format!(
            "| {count} | {clients} | {killed} | {:.2} | {away} | {lists} | {watches} | {watch_lists} | {events} | {cpu_seconds:.2} |\n",
            live.as_secs_f64()
        ));
    }
    text
}
