//! Replicas that come, go and even out under subscribers and writes: a scale-up, a rolling restart,
//! a kill, and a roll from the release before to this one and back. No subscriber may lose an event
//! or get one twice, no new replica may list upstream, and after each step the replica with the
//! most watches has at most 1.15 times the mean.
//!
//! `KUBEFAN_TEST_SCALE=full` runs it with 3,000 subscribers over gRPC and 1,000 over HTTP;
//! `--release -- --nocapture --test-threads 1 rollout` shows the tables. Times depend on the
//! machine, so only counts are checked.

use std::{
    collections::BTreeMap,
    fmt::Display,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use kubefan_client::{Client, ClientOptions};
use serde_json::json;
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep},
};

use self::{
    authorized::nothing_moves_while_callers_cannot_be_authorized,
    findings::{Differences, Phase, differences, latency},
    replicas::{Release, Replicas},
    service::Balancer,
    subscribers::{Change, History, micros},
};
use crate::{
    harness::{apiserver::ApiServer, assets, audit::Audit, is_full_scale, objects::version_of, tests, wait},
    quiet::{
        Table,
        upstream_requests::{KUBEFAN, UpstreamRequests},
    },
};

mod authorized;
mod findings;
mod replicas;
mod service;
mod subscribers;

tests! {
    apiserver slow_faults: replicas_behind_a_balancer_even_out_and_lose_nothing,
        nothing_moves_while_callers_cannot_be_authorized;
    apiserver large: replicas_of_a_name_even_out_and_lose_nothing, an_upgrade_and_its_way_back_lose_nothing;
}

/// The configuration of all replicas.
#[derive(Clone)]
struct Setup {
    by: By,
    namespace: String,
    /// The replicas' way to the apiserver.
    kubeconfig: PathBuf,
    /// More flags of this release.
    flags: Vec<String>,
    rebalance_percent: u32,
    /// Time that a cluster needs to take a replica out of its Service.
    withdrawn_after: Duration,
}

#[derive(Clone)]
struct Scale {
    grpc: usize,
    http: usize,
    objects: usize,
    writes_per_second: u32,
    rebalance_percent: u32,
    withdrawn_after: Duration,
    /// Time for which the replicas must have been even.
    even_for: Duration,
}

fn scale() -> Scale {
    if is_full_scale() {
        Scale {
            grpc: 3_000,
            http: 1_000,
            objects: 50,
            writes_per_second: 4,
            rebalance_percent: 1,
            withdrawn_after: Duration::from_secs(1),
            even_for: Duration::from_secs(10),
        }
    } else {
        Scale {
            grpc: 60,
            http: 20,
            objects: 5,
            writes_per_second: 20,
            rebalance_percent: 10,
            withdrawn_after: Duration::from_millis(100),
            even_for: Duration::ZERO,
        }
    }
}

/// The way in which clients find a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// A balancer picks a replica at random.
    Balancer,
    /// A name has the addresses of all ready replicas.
    Name,
}

/// The name that has the addresses of all ready replicas.
const NAME: &str = "kubefan.test";

/// The most that a replica has, as a multiple of the mean, once replicas are even.
const EVEN: f64 = 1.15;
const EVEN_AT_MOST: Duration = Duration::from_secs(120);
/// An informer of client-go, and the client library as it does, waits up to a minute between two
/// attempts.
const BACK_AT_MOST: Duration = Duration::from_secs(300);
const OPEN_AT_MOST: Duration = Duration::from_secs(120);
const FINISHED_AT_MOST: Duration = Duration::from_secs(120);
/// Subscribers that connect in a second.
const CONNECTS_PER_SECOND: u32 = 400;
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

async fn replicas_behind_a_balancer_even_out_and_lose_nothing() {
    scale_restart_kill(By::Balancer).await;
}

async fn replicas_of_a_name_even_out_and_lose_nothing() {
    scale_restart_kill(By::Name).await;
}

async fn scale_restart_kill(by: By) {
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options()).await;
    let mut experiment = Experiment::begin(&api, &audit, by, scale(), 2, Release::This).await;
    experiment.step("2 replicas", false, async |_| {}).await;
    experiment.step("scaled to 3", true, async |replicas| replicas.start(2, &Release::This).await).await;
    let restarts = async |replicas: &mut Replicas| {
        for place in 0..3 {
            replicas.stop(place).await;
            replicas.start(place, &Release::This).await;
        }
    };
    experiment.step("restarted one by one", true, restarts).await;
    let kill = async |replicas: &mut Replicas| {
        replicas.kill(1).await;
        replicas.start(1, &Release::This).await;
    };
    experiment.step("one killed", true, kill).await;
    experiment.end(&format!("By {by:?}")).await;
}

async fn an_upgrade_and_its_way_back_lose_nothing() {
    let audit = Audit::of_reads();
    let before = Release::Before(assets::kubefan_before());
    let api = ApiServer::start(audit.options()).await;
    let scale = Scale { grpc: 2_250, http: 750, ..scale() };
    let mut experiment = Experiment::begin(&api, &audit, By::Balancer, scale, 3, before.clone()).await;
    experiment.step("3 replicas of the release before", false, async |_| {}).await;
    let roll = async |replicas: &mut Replicas, release: &Release| {
        for place in 0..3 {
            replicas.stop(place).await;
            replicas.start(place, release).await;
        }
    };
    experiment.step("upgraded one by one", true, async |replicas| roll(replicas, &Release::This).await).await;
    experiment.step("rolled back one by one", false, async |replicas| roll(replicas, &before).await).await;
    experiment.end("From the release before to this one, and back").await;
}

/// Replicas, subscribers, a writer, and the apiserver's own watch.
struct Experiment<'a> {
    by: By,
    scale: Scale,
    audit: &'a Audit,
    replicas: Replicas,
    /// In front of the replicas; it lives as long as the subscribers.
    _balancer: Balancer,
    test: subscribers::Test,
    end: watch::Sender<u64>,
    grpc: JoinSet<History>,
    http: JoinSet<History>,
    truth: JoinHandle<History>,
    writer: Writer,
    phases: Vec<(Phase, Vec<String>)>,
}

impl<'a> Experiment<'a> {
    async fn begin(
        api: &'a ApiServer,
        audit: &'a Audit,
        by: By,
        scale: Scale,
        replicas: usize,
        release: Release,
    ) -> Experiment<'a> {
        let namespace = api.namespace("rollout").await;
        let rebalance_percent = scale.rebalance_percent;
        let withdrawn_after = scale.withdrawn_after;
        let setup = Setup {
            by,
            namespace: namespace.clone(),
            kubeconfig: api.kubeconfig(),
            // Without TLS, a name that is no Service's must be allowed.
            flags: vec![format!("--allowed-hosts={NAME}")],
            rebalance_percent,
            withdrawn_after,
        };
        let mut all = Replicas::new(setup, 3).await;
        for place in 0..replicas {
            all.start(place, &release).await;
        }
        let balancer = Balancer::to(all.endpoints.clone()).await;
        let (end, ended) = watch::channel(u64::MAX);
        let test =
            subscribers::Test { namespace: namespace.clone(), start: Instant::now(), open: Arc::default(), end: ended };
        let truth = tokio::spawn(subscribers::http(api.client(), api.url().to_owned(), test.clone(), u64::MAX));
        let opened = |count: usize| {
            let open = test.open.clone();
            wait::until("the subscribers to have the state", OPEN_AT_MOST, move || {
                let open = open.load(Ordering::Relaxed);
                async move { (open == count).then_some(()) }
            })
        };
        opened(1).await;
        let writer = Writer::begin(api, &namespace, scale.objects, scale.writes_per_second, test.start);
        let (address, options, plain) = match by {
            By::Balancer => (balancer.addr.to_string(), ClientOptions::default(), reqwest::Client::builder()),
            By::Name => {
                let resolver = Some(Arc::new(all.endpoints.clone()) as Arc<dyn kubefan_client::Resolve>);
                let options = ClientOptions { resolver, ..ClientOptions::default() };
                let plain = reqwest::Client::builder().dns_resolver(Arc::new(all.endpoints.clone()));
                (NAME.to_owned(), options, plain)
            }
        };
        let plain = plain.no_proxy().build().expect("a client is built");
        let url = format!("http://{address}");
        let mut grpc = JoinSet::new();
        let mut http = JoinSet::new();
        let mut ticks = interval(Duration::from_secs(1) / CONNECTS_PER_SECOND);
        for number in 0..scale.grpc + scale.http {
            ticks.tick().await;
            // Both kinds connect all the time.
            if number * scale.http / (scale.grpc + scale.http) < (number + 1) * scale.http / (scale.grpc + scale.http) {
                http.spawn(subscribers::http(plain.clone(), url.clone(), test.clone(), number as u64));
            } else {
                let client = Client::connect_lazy(&address, &options).await.expect("the address is valid");
                grpc.spawn(subscribers::grpc(client, test.clone()));
            }
        }
        opened(1 + scale.grpc + scale.http).await;
        let phases = Vec::new();
        Experiment {
            by,
            scale,
            audit,
            replicas: all,
            _balancer: balancer,
            test,
            end,
            grpc,
            http,
            truth,
            writer,
            phases,
        }
    }

    /// Does something to the replicas, and waits until they are even if they should be.
    async fn step(&mut self, name: &'static str, evens: bool, act: impl AsyncFnOnce(&mut Replicas)) {
        let from = micros(self.test.start);
        let asked = self.replicas.endpoints.asked();
        let requests = self.audit.requests("").len();
        act(&mut self.replicas).await;
        let acted = Instant::now();
        let mut watches = self.replicas.watches().await;
        let before = largest(&watches);
        let mut even_since = None::<Instant>;
        println!("{name}: the largest is {before:.2} of the mean");
        while evens || acted.elapsed() < self.scale.even_for {
            sleep(LOOK_INTERVAL).await;
            watches = self.replicas.watches().await;
            let spread = largest(&watches);
            if spread > EVEN {
                even_since = None;
                assert!(
                    acted.elapsed() < EVEN_AT_MOST,
                    "{name}: the largest still is {spread:.2} of the mean: {watches:?}\n{}",
                    self.replicas.logs()
                );
                continue;
            }
            let since = *even_since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.scale.even_for {
                continue;
            }
            // The next step must not hit those that wait before they come back.
            if watches.iter().sum::<f64>() >= (self.grpc.len() + self.http.len()) as f64 {
                break;
            }
            assert!(acted.elapsed() < BACK_AT_MOST, "{name}: subscribers are away: {watches:?}");
        }
        let upstream = UpstreamRequests::of(&self.audit.requests("")[requests..], &[KUBEFAN]);
        let (lists, warm_starts) = self.replicas.starts().await;
        let connects = self.replicas.endpoints.asked() - asked;
        let phase = Phase { name, from, until: micros(self.test.start) };
        let even =
            even_since.map_or("-".to_owned(), |since| format!("{:.0}", since.duration_since(acted).as_secs_f64()));
        let cells = vec![
            format!("{:.0}", (phase.until - phase.from) as f64 / 1e6),
            format!("{before:.2}"),
            even,
            format!("{:.2}", largest(&watches)),
            format!("{watches:?}"),
            connects.to_string(),
            warm_starts.to_string(),
            lists.to_string(),
            format!("{} / {} / {}", upstream.lists, upstream.self_checks, upstream.watches),
        ];
        println!("{name}: {}", cells.join(" | "));
        self.phases.push((phase, cells));
    }

    async fn end(self, title: &str) {
        println!("{}", self.replicas.logs());
        let (last, written) = self.writer.end().await;
        self.end.send_replace(last);
        let Experiment { grpc, http, truth, .. } = self;
        let finished = tokio::time::timeout(FINISHED_AT_MOST, async {
            (grpc.join_all().await, http.join_all().await, truth.await.expect("the apiserver's watch"))
        });
        let Ok((grpc, http, truth)) = finished.await else {
            panic!("not all subscribers have the last event: {:?}", self.replicas.watches().await);
        };
        let title = format!(
            "{title}: {} subscribers over gRPC, {} over HTTP, {} writes ({} a second)",
            grpc.len(),
            http.len(),
            written.len(),
            self.scale.writes_per_second
        );
        let columns = [
            "step",
            "s",
            "largest before",
            "even after s",
            "largest at the end",
            "watches",
            "connects",
            "warm starts",
            "lists of objects",
            "LIST / of the check / WATCH upstream",
            "p50 ms",
            "p99 ms",
            "longest ms",
            "p99 ms straight",
        ];
        let mut table = Table::new(title, &columns);
        for (phase, cells) in &self.phases {
            let ours = latency(phase, &written, grpc.iter().chain(&http));
            let straight = latency(phase, &written, [&truth].into_iter());
            let ms = [ours.p50, ours.p99, ours.longest, straight.p99].map(|ms| format!("{ms:.1}"));
            let mut row: Vec<&dyn Display> = vec![&phase.name];
            row.extend(cells.iter().chain(&ms).map(|cell| cell as &dyn Display));
            table.row(&row);
        }
        println!("{table}");
        let changes: Vec<Change> = truth.events.iter().map(|(change, _)| *change).collect();
        for (what, histories) in [("gRPC", &grpc), ("HTTP", &http)] {
            let differences = differences(&changes, histories, last);
            let sum = |value: fn(&History) -> usize| histories.iter().map(value).sum::<usize>();
            let events = sum(|history| history.events.len());
            let failures = sum(|history| history.failures);
            let restarts = sum(|history| history.restarts);
            println!("{what}: {events} events, {differences:?}, {failures} failures, {restarts} restarts");
            assert_eq!(differences, Differences::default(), "{what}");
            assert_eq!(restarts, 0, "{what}");
        }
        let lists: Vec<_> = self.phases.iter().skip(1).map(|(_, cells)| cells[7].as_str()).collect();
        assert!(lists.iter().all(|lists| *lists == "0"), "lists upstream after the first step: {lists:?}");
        println!("clients find replicas by {:?}", self.by);
    }
}

/// The largest number of watches, as a multiple of the mean. A watch that is moving counts where it
/// was or not at all.
fn largest(watches: &[f64]) -> f64 {
    let mean = watches.iter().sum::<f64>() / watches.len() as f64;
    watches.iter().copied().fold(0.0, f64::max) / mean.max(1.0)
}

/// Writes at a fixed rate: an object is changed, sometimes deleted, and then created again.
struct Writer {
    stop: watch::Sender<bool>,
    task: JoinHandle<u64>,
    /// Time of the request for each version, in microseconds.
    written: Arc<Mutex<BTreeMap<u64, u64>>>,
}

impl Writer {
    fn begin(api: &ApiServer, namespace: &str, objects: usize, per_second: u32, start: Instant) -> Writer {
        let (stop, stopped) = watch::channel(false);
        let api = api.handle();
        let written = Arc::<Mutex<BTreeMap<u64, u64>>>::default();
        let path = format!("/api/v1/namespaces/{namespace}/configmaps");
        let times = written.clone();
        let task = tokio::spawn(async move {
            let mut ticks = interval(Duration::from_secs(1) / per_second);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut last = 0;
            // The last write is one whose answer has a version.
            for tick in 0_usize.. {
                ticks.tick().await;
                let name = format!("o-{}", tick % objects);
                let round = tick / objects;
                let asked = micros(start);
                let answer = match round % 4 {
                    0 => api.create(&path, &json!({ "metadata": { "name": name } })).await,
                    3 => {
                        api.delete(&format!("{path}/{name}")).await;
                        continue;
                    }
                    _ => {
                        let patch = json!({ "data": { "tick": tick.to_string() } });
                        api.patch(&format!("{path}/{name}"), &patch).await
                    }
                };
                last = version_of(&answer);
                times.lock().unwrap().insert(last, asked);
                if *stopped.borrow() {
                    break;
                }
            }
            last
        });
        Writer { stop, task, written }
    }

    /// Returns the last version, and when each was asked for.
    async fn end(self) -> (u64, BTreeMap<u64, u64>) {
        self.stop.send_replace(true);
        let last = self.task.await.expect("the writer has no failure");
        (last, self.written.lock().unwrap().clone())
    }
}
