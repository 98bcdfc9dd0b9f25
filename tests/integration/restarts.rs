//! kubefan is killed and restarted under constant writes. Subscribers resume with their last resume
//! version. They miss nothing and get nothing twice, whatever they select, and the apiserver gets
//! hardly any requests.
//!
//! `KUBEFAN_TEST_SCALE=full` runs it with 200 subscribers and 200 updates a second; the default is
//! smaller.

use std::{collections::HashMap, net::SocketAddr};

use tokio::{sync::watch, task::JoinSet, time::Instant};

use crate::harness::{
    apiserver::ApiServer,
    audit::Audit,
    churn::{Churn, Writer},
    is_full_scale,
    kubefan::{Kubefan, value_of},
    objects::version_of,
    process::free_port,
    record::{Query, Recorded, assert_equal, query, upstream_recording},
    resuming::{Progress, Subscriber, all_are},
    tests, wait,
};

tests! {
    apiserver slow_faults: a_killed_kubefan_loses_and_repeats_nothing_after_its_restart,
        replicas_restarted_in_turn_continue_each_others_streams,
        nothing_is_lost_or_repeated_behind_two_kubefans_of_which_either_is_killed,
        nothing_is_lost_or_repeated_behind_two_kubefans_over_grpc;
}

/// Requests for a whole state that one process may send, whatever its subscribers request: its own
/// list, and one for each read of a burst (`READS_MAX` of `informers/read_limit.rs`). Subscribers
/// that return together share a read. A subscriber that gets no CPU at that moment comes later with
/// an older version, and needs another.
const STATES_MAX: usize = 1 + 4;

struct Scale {
    pods: usize,
    subscribers: usize,
    updates_per_second: u32,
    /// Updates during each outage, with one restart per outage.
    outages: &'static [usize],
    /// Seconds in which the apiserver's own watch must send the rest.
    seconds: u32,
}

fn scale() -> Scale {
    if is_full_scale() {
        let outages = &[0, 200, 2_000, 50];
        return Scale { pods: 1_000, subscribers: 200, updates_per_second: 200, outages, seconds: 30 };
    }
    Scale { pods: 80, subscribers: 24, updates_per_second: 60, outages: &[0, 80], seconds: 5 }
}

/// Half of the subscribers use these queries.
const PLAIN: [Query; 3] = [query("", "", ""), query("team-0", "", ""), query("team-1", "", "")];
/// The other half have selectors that objects enter and leave all the time.
const CHANGING: [Query; 12] = [
    query("", "stage=on", ""),
    query("", "app in (web-1,web-2),stage", ""),
    query("", "stage!=on,!canary", ""),
    query("team-0", "canary", ""),
    query("", "", "spec.nodeName=node-1"),
    query("", "", "spec.nodeName="),
    query("team-1", "", "status.phase=Running"),
    query("", "app=web-3", "status.phase!=Pending"),
    query("", "", "spec.nodeName!=node-2,status.phase!=Succeeded"),
    query("", "", "metadata.name=p0-0"),
    query("", "app notin (web-0),stage=off", "spec.nodeName=node-0"),
    query("team-2", "nobody=has-it", ""),
];

async fn a_killed_kubefan_loses_and_repeats_nothing_after_its_restart() {
    let scale = scale();
    let mut experiment = Experiment::begin(&scale, 1, None).await;
    for outage in scale.outages {
        let streams = experiment.streams();
        experiment.kill(0);
        experiment.churn.more(*outage).await;
        let asked = experiment.asked();
        experiment.start(0).await;
        experiment.all_are_live().await;
        let resumed = experiment.streams() - streams;
        assert!(resumed >= scale.subscribers, "not all subscribers came back: {resumed} streams");
        // A request is logged before it is answered, and counted after it.
        let counted = &experiment;
        wait::until("its metrics to count what the apiserver's audit log has", wait::SOON, || async move {
            let own = counted.nothing_was_sent_again(0).await;
            let audited = counted.asked_for_few_states(asked).await;
            assert!(own.answered <= audited, "answered {}, but {audited} are logged", own.answered);
            (audited <= own.answered + own.unanswered).then_some(())
        })
        .await;
    }
    experiment.end().await;
}

async fn replicas_restarted_in_turn_continue_each_others_streams() {
    let scale = scale();
    let mut experiment = Experiment::begin(&scale, 2, None).await;
    for (round, outage) in scale.outages.iter().enumerate() {
        let victim = round % 2;
        let asked = experiment.asked();
        experiment.kill(victim);
        experiment.churn.more(*outage).await;
        experiment.all_are_live().await;
        // The next replica is killed as soon as this one listens, so subscribers meet a cache that
        // is younger than their versions.
        experiment.start(victim).await;
        experiment.kill(1 - victim);
        experiment.all_are_live().await;
        experiment.asked_for_few_states(asked).await;
        experiment.nothing_was_sent_again(victim).await;
        experiment.start(1 - victim).await;
        experiment.is_ready(1 - victim).await;
    }
    experiment.end().await;
}

async fn nothing_is_lost_or_repeated_behind_two_kubefans_of_which_either_is_killed() {
    kill_either_of_two(false).await;
}

/// Over gRPC the lower kubefan cannot read the state of before its start, so only subscribers
/// without a selector resume when it is killed. Those with one start over, which `two_tiers` shows.
async fn nothing_is_lost_or_repeated_behind_two_kubefans_over_grpc() {
    kill_either_of_two(true).await;
}

async fn kill_either_of_two(over_grpc: bool) {
    let scale = scale();
    let mut experiment = Experiment::begin(&scale, 1, Some(over_grpc)).await;
    for outage in scale.outages {
        let asked = experiment.asked();
        experiment.kill(0);
        experiment.churn.more(*outage).await;
        experiment.start(0).await;
        experiment.all_are_live().await;
        experiment.nothing_was_sent_again(0).await;
        // No more than for the first state of a backfill, which the other kubefan passes on.
        experiment.asked_for_few_states(asked).await;

        let asked = experiment.asked();
        experiment.kill_the_source();
        experiment.churn.more(*outage).await;
        experiment.start_the_source().await;
        experiment.all_are_live().await;
        experiment.nothing_was_sent_again(0).await;
        experiment.asked_for_few_states(asked).await;
    }
    experiment.end().await;
}

/// The lists and watches that a process counts. One without an answer may never have reached the
/// apiserver: a busy machine refuses connections.
struct Requests {
    answered: usize,
    unanswered: usize,
}

/// A kubefan that the replicas list and watch at.
struct SourceKubefan {
    address: SocketAddr,
    kubefan: Option<Kubefan>,
    /// The value of the replicas' `--upstream`.
    upstream: String,
    is_grpc: bool,
}

impl SourceKubefan {
    async fn start(api: &ApiServer, is_grpc: bool) -> SourceKubefan {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let kubefan = spawn(api, address, None).await;
        kubefan.ready().await;
        let kubeconfig = api.kubeconfig_to(&format!("http://{address}"));
        let upstream = if is_grpc { address.to_string() } else { kubeconfig.display().to_string() };
        SourceKubefan { address, kubefan: Some(kubefan), upstream, is_grpc }
    }
}

/// An apiserver whose pods change, kubefan in front of it, subscribers, and the apiserver's own
/// watches of the same selections.
struct Experiment {
    api: ApiServer,
    audit: Audit,
    churn: Churn,
    addresses: Vec<SocketAddr>,
    source: Option<SourceKubefan>,
    replicas: Vec<Option<Kubefan>>,
    progress: Vec<watch::Receiver<Progress>>,
    subscribers: JoinSet<Subscriber>,
    recordings: JoinSet<(Query, Vec<Recorded>)>,
    end_sender: watch::Sender<u64>,
    began: Instant,
}

impl Experiment {
    /// If the replicas list and watch at another kubefan, `over_grpc` says how.
    async fn begin(scale: &Scale, replicas: usize, over_grpc: Option<bool>) -> Experiment {
        let audit = Audit::new();
        let api = ApiServer::start(audit.options()).await;
        let source = match over_grpc {
            Some(is_grpc) => Some(SourceKubefan::start(&api, is_grpc).await),
            None => None,
        };
        let writers: Vec<Writer> = Churn::populate(&api, scale.pods).await;
        let mut addresses = Vec::new();
        let mut running = Vec::new();
        for _ in 0..replicas {
            let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
            let kubefan = spawn(&api, address, source.as_ref()).await;
            kubefan.ready().await;
            addresses.push(address);
            running.push(Some(kubefan));
        }
        let start = version_of(&api.get_json("/api/v1/pods?limit=1").await);
        let (end_sender, end) = watch::channel(u64::MAX);
        let mut progress = Vec::new();
        let mut subscribers = JoinSet::new();
        let mut recordings = JoinSet::new();
        let mut recorded: Vec<&Query> = Vec::new();
        for number in 0..scale.subscribers {
            let has_selector = number % 2 != 0 && !source.as_ref().is_some_and(|source| source.is_grpc);
            let query = if has_selector { &CHANGING[number / 2 % 12] } else { &PLAIN[number / 2 % 3] };
            let subscriber = Subscriber::begin(query.clone(), addresses.clone(), number / 2 % replicas).await;
            progress.push(subscriber.progress());
            subscribers.spawn(subscriber.run(end.clone()));
            if !recorded.contains(&query) {
                recorded.push(query);
                let api = api.handle();
                let query = query.clone();
                let end = end.clone();
                let seconds = scale.seconds;
                recordings.spawn(async move {
                    let history = upstream_recording(api, query.clone(), start, end, seconds).await;
                    (query, history)
                });
            }
        }
        let began = Instant::now();
        let mut churn = Churn::begin(writers, scale.updates_per_second);
        churn.more(scale.pods / 2).await;
        let replicas = running;
        Experiment {
            api,
            audit,
            churn,
            addresses,
            source,
            replicas,
            progress,
            subscribers,
            recordings,
            end_sender,
            began,
        }
    }

    fn kill(&mut self, replica: usize) {
        let mut kubefan = self.replicas[replica].take().expect("the replica does not run");
        kubefan.process.kill9();
    }

    /// Starts a replica again and waits until it listens, but not until it is ready.
    async fn start(&mut self, replica: usize) {
        self.replicas[replica] = Some(spawn(&self.api, self.addresses[replica], self.source.as_ref()).await);
    }

    fn kill_the_source(&mut self) {
        let source = self.source.as_mut().expect("there is another kubefan");
        source.kubefan.take().expect("it does not run").process.kill9();
    }

    async fn start_the_source(&mut self) {
        let source = self.source.as_mut().expect("there is another kubefan");
        source.kubefan = Some(spawn(&self.api, source.address, None).await);
    }

    async fn is_ready(&self, replica: usize) {
        self.replicas[replica].as_ref().expect("the replica does not run").ready().await;
    }

    /// Waits until every subscriber has everything up to a new write.
    async fn all_are_live(&mut self) {
        let version = self.churn.more(1).await;
        all_are(&mut self.progress, &mut self.subscribers, |progress| progress.version >= version).await;
    }

    /// The number of streams of all subscribers, without the first stream of each.
    fn streams(&self) -> usize {
        self.progress.iter().map(|progress| progress.borrow().streams).sum()
    }

    /// The number of lists and watches of all replicas so far.
    fn asked(&self) -> usize {
        self.audit.requests("kubefan/").len()
    }

    /// Checks that few of the requests since `before` asked for a whole state. Returns the number
    /// of these requests.
    async fn asked_for_few_states(&self, before: usize) -> usize {
        let asked = self.audit.requests("kubefan/").split_off(before);
        let states = asked.iter().filter(|request| request.requests_full_state()).count();
        let interrupted = self.interrupted_lists().await;
        // A list that the apiserver broke off is requested again.
        assert!(states <= STATES_MAX + interrupted, "{interrupted} lists were interrupted: {asked:#?}");
        asked.len()
    }

    /// The first lists that the running kubefans had to repeat.
    async fn interrupted_lists(&self) -> usize {
        let source = self.source.as_ref().and_then(|source| source.kubefan.as_ref());
        let mut interrupted = 0;
        for kubefan in self.replicas.iter().flatten().chain(source) {
            interrupted += kubefan.interrupted_lists().await;
        }
        interrupted
    }

    /// Checks by the replica's own metrics that it sent no snapshot and started no list but its
    /// first. Returns its counts of requests.
    async fn nothing_was_sent_again(&self, replica: usize) -> Requests {
        let kubefan = self.replicas[replica].as_ref().expect("the replica does not run");
        assert_eq!(count(kubefan, "kubefan_snapshot_objects_sent_total", "").await, 0);
        let lists = kubefan.metric_lines("kubefan_relists_total").await.expect("metrics are served");
        assert!(!lists.is_empty() && lists.iter().all(|line| line.contains(r#"reason="initial""#)), "{lists:#?}");
        let mut answered = 0;
        let mut unanswered = 0;
        for line in kubefan.metric_lines("kubefan_upstream_requests_total").await.expect("metrics are served") {
            if !line.contains(r#"verb="list""#) && !line.contains(r#"verb="watch""#) {
                continue;
            }
            let requests = value_of(&line) as usize;
            if line.contains(r#"code="error""#) { unanswered += requests } else { answered += requests }
        }
        Requests { answered, unanswered }
    }

    async fn end(self) {
        let written = self.churn.end().await;
        let elapsed = self.began.elapsed().as_secs_f64();
        self.end_sender.send_replace(written.version);
        let subscribers = self.subscribers.join_all().await;
        let expected: HashMap<Query, Vec<Recorded>> = self.recordings.join_all().await.into_iter().collect();
        let mut events = 0;
        let mut left = 0;
        for subscriber in &subscribers {
            assert_equal(&format!("{:?}", subscriber.query), &subscriber.events, &expected[&subscriber.query]);
            events += subscriber.events.len();
            left += subscriber.left;
        }
        assert!(left > 0 || self.source.is_some_and(|source| source.is_grpc), "no object left a selector");
        let count = subscribers.len();
        println!(
            "{count} subscribers, {} updates in {elapsed:.0} s, {events} events compared, {left} of them objects that left",
            written.count
        );
    }
}

/// Returns the sum of a metric's lines that contain `label`. All of them are counts.
async fn count(kubefan: &Kubefan, metric: &str, label: &str) -> usize {
    kubefan.metric_sum(metric, label).await.expect("metrics are served") as usize
}

async fn spawn(api: &ApiServer, address: SocketAddr, source: Option<&SourceKubefan>) -> Kubefan {
    let source = source.map(|source| format!("--upstream={}", source.upstream));
    let args: Vec<&str> = ["--resource=pods"].into_iter().chain(source.as_deref()).collect();
    Kubefan::spawn_at(&api.kubeconfig(), &address.to_string(), &args).await
}
