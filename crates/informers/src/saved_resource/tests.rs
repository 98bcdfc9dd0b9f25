//! Restarts of a registry with saved states, in front of a simulated apiserver that is away, comes
//! back, has gone on, or is another one.

use std::{
    io,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use kubefan_admission::GateLimits;
use kubefan_cache::{Phase, RetainedLimits, RingLimits, writer::Change};
use kubefan_fanout::SavedAge;
use kubefan_model::{GroupVersionResource, Scope};
use kubefan_peer::saved::{StateDir, StateKey, StateName};
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb};
use kubefan_telemetry::{metrics::Metrics, series};
use kubefan_upstream::{
    Source, Upstream,
    client::{HttpService, UpstreamBody, UpstreamOptions},
    discovery::{Discovery, DiscoveryOptions},
    reflector::ReflectorOptions,
};
use serde_json::json;
use tempfile::TempDir;
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::{BoxError, service_fn};

use super::*;
use crate::{
    ConfiguredResource, ListScheduler, Registry, RegistryOptions, SaveLimits, SavedStates, StateSaver,
    cache_entry::{Cache, CacheId},
};

/// Time of the first process.
fn first_process() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)
}

/// A minute later.
fn second_process() -> SystemTime {
    first_process() + Duration::from_secs(60)
}

/// A clock that was turned back.
fn earlier() -> SystemTime {
    first_process() - Duration::from_secs(60)
}

/// The way to an apiserver. `None`: nothing answers.
#[derive(Clone, Default)]
struct Network(Arc<Mutex<Option<SimApiserver>>>);

impl Network {
    fn to(sim: &SimApiserver) -> Self {
        Self(Arc::new(Mutex::new(Some(sim.clone()))))
    }

    fn connect(&self, sim: &SimApiserver) {
        *self.0.lock().unwrap() = Some(sim.clone());
    }

    fn upstream(&self, base: &'static str) -> Upstream {
        let network = self.clone();
        let service = service_fn(move |request| network.clone().send(request));
        Upstream::from_service(HttpService::new(service), &http::Uri::from_static(base), UpstreamOptions::default())
    }

    async fn send(self, request: http::Request<Bytes>) -> Result<http::Response<UpstreamBody>, BoxError> {
        let sim = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(sim) = sim else { return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into()) };
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        tokio::spawn(sim.serve_connection(theirs));
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(ours)).await?;
        tokio::spawn(connection);
        let (mut parts, body) = request.into_parts();
        parts.uri = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default().parse()?;
        parts.headers.insert(http::header::HOST, http::HeaderValue::from_static("apiserver.test"));
        let response = sender.send_request(http::Request::from_parts(parts, Full::new(body))).await?;
        Ok(response.map(|body| body.map_err(BoxError::from).boxed_unsync()))
    }
}

const ADDRESS: &str = "http://apiserver.test";

/// The caches of one process.
struct Process {
    registry: Arc<Registry>,
    /// Metrics of the process, as text.
    metrics: Arc<Metrics>,
    _stop: DropGuard,
    _task: JoinHandle<()>,
}

/// The facts by which processes differ.
struct Setup<'a> {
    network: &'a Network,
    dir: &'a TempDir,
    address: &'static str,
    clock: fn() -> SystemTime,
    resource: &'static str,
    key: Option<StateKey>,
}

impl<'a> Setup<'a> {
    fn new(network: &'a Network, dir: &'a TempDir) -> Self {
        Self { network, dir, address: ADDRESS, clock: second_process, resource: "pods", key: None }
    }

    fn start(self) -> Process {
        let Self { network, dir, address, clock, resource, key } = self;
        let metrics = Arc::new(Metrics::new(prometheus::Registry::new()).unwrap());
        let upstream = network.upstream(address);
        let dir = StateDir::open(dir.path(), key, || [9; 16]).unwrap();
        let context = CacheContext {
            upstream: upstream.clone(),
            source: Source::apiserver(upstream.clone()),
            discovery: Arc::new(Discovery::new(upstream, DiscoveryOptions::default())),
            lists: ListScheduler::new(8, metrics.lists()),
            reflector: ReflectorOptions {
                page_size: 500,
                watch_list: true,
                upstream_idle_timeout: Duration::from_secs(90),
                line_bytes_max: 16 << 20,
            },
            upstream_field_selector: String::new(),
            schema_check_interval: Duration::from_secs(24 * 3600),
            cache_compression: false,
            peers: None,
            saved: Some(Arc::new(SavedStates::new(dir, 1 << 30, clock))),
            seed: Some(1),
        };
        let options = RegistryOptions {
            resources: resource.split(',').map(|name| ConfiguredResource::parse(name).unwrap()).collect(),
            namespaces: Vec::new(),
            ring: RingLimits {
                ring_bytes_max: None,
                ring_events_max: 100_000,
                ring_age_max: Duration::from_secs(24 * 3600),
                conflated_bytes_max: None,
            },
            coalesce_max: Duration::ZERO,
            gate: GateLimits { snapshots_max: 256, snapshot_queue_timeout: Duration::from_secs(10) },
            on_demand: None,
            protobuf: None,
            tables: None,
            staleness_max: None,
            proves: true,
            self_check_interval: None,
            retained: RetainedLimits::default(),
        };
        let stop = CancellationToken::new();
        let registry = Registry::new(context, options, metrics.clone(), stop.clone());
        let task = tokio::spawn(registry.clone().run());
        Process { registry, metrics, _stop: stop.drop_guard(), _task: task }
    }
}

impl Process {
    fn cache(&self) -> Option<Arc<Cache>> {
        self.cache_of(pods())
    }

    fn cache_of(&self, gvr: GroupVersionResource) -> Option<Arc<Cache>> {
        self.registry.caches.get(&CacheId { gvr, scope: Scope::Cluster, media: kubefan_model::Media::Json })
    }

    fn served(&self) -> Served {
        self.cache().unwrap().served.clone()
    }

    /// Waits until the cache of pods fulfils a condition.
    async fn until(&self, what: &str, is_so: impl Fn(&Served) -> bool) -> Served {
        self.until_of(pods(), what, is_so).await
    }

    async fn until_of(&self, gvr: GroupVersionResource, what: &str, is_so: impl Fn(&Served) -> bool) -> Served {
        let waiting = async {
            loop {
                if let Some(cache) = self.cache_of(gvr.clone()).filter(|cache| is_so(&cache.served)) {
                    return cache.served.clone();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(600), waiting).await.unwrap_or_else(|_| panic!("never {what}"))
    }

    async fn in_phase(&self, phase: Phase) -> Served {
        self.until(phase.as_str(), is_in(phase)).await
    }

    /// Saves everything and ends.
    async fn end(self) {
        self.save().await;
        drop(self);
        // Its tasks end, and with the last one the lock of the directory.
        tokio::time::sleep(Duration::from_secs(1)).await;
    }

    async fn save(&self) {
        let limits = SaveLimits { interval: Duration::from_secs(30), bytes_per_minute: 1 << 30 };
        let last = CancellationToken::new();
        last.cancel();
        StateSaver::new(&self.registry, limits).unwrap().run(last).await;
    }

    fn saved_bytes(&self) -> u64 {
        let families = self.metrics.registry().gather();
        series::total(&families, "kubefan_saved_bytes_total") as u64
    }

    fn starts(&self, result: &str) -> u64 {
        let families = self.metrics.registry().gather();
        let starts = series::metrics(&families, "kubefan_saved_starts_total");
        starts.iter().filter(|metric| series::label(metric, "result") == result).map(series::value).sum::<f64>() as u64
    }
}

fn pods() -> GroupVersionResource {
    GroupVersionResource::new("", "v1", "pods")
}

fn nodes() -> GroupVersionResource {
    GroupVersionResource::new("", "v1", "nodes")
}

fn is_in(phase: Phase) -> impl Fn(&Served) -> bool {
    move |served| *served.hub.phase().borrow() == phase
}

fn has_file(dir: &TempDir, gvr: &GroupVersionResource) -> bool {
    dir.path().join("kubefan").join(StateName::of(gvr, &Scope::Cluster).unwrap().as_str()).exists()
}

/// Waits until the file of pods is removed.
async fn until_removed(dir: &TempDir) {
    let waiting = async {
        while has_file(dir, &pods()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(600), waiting).await.expect("the file is never removed");
}

fn create(sim: &SimApiserver, name: &str) {
    let pod = json!({"metadata": {"name": name, "namespace": "default"}, "spec": {"containers": []}});
    sim.create(&pods(), pod).unwrap();
}

fn names(served: &Served) -> Vec<String> {
    let (store, _) = served.hub.state().unwrap();
    store.iter().map(|object| object.key().name().to_owned()).collect()
}

fn sim(seed: u64) -> SimApiserver {
    let sim = SimApiserver::new(SimOptions { seed, ..SimOptions::default() });
    for name in ["a", "b"] {
        create(&sim, name);
    }
    sim
}

/// Runs a first process that saves two pods. Returns the version that it has reached.
async fn saved(sim: &SimApiserver, dir: &TempDir) -> ResourceVersion {
    let network = Network::to(sim);
    let first = Setup { clock: first_process, ..Setup::new(&network, dir) }.start();
    let served = first.in_phase(Phase::Synced).await;
    assert_eq!(names(&served), ["a", "b"]);
    create(sim, "c");
    first.until("c", |served| names(served).len() == 3).await;
    sim.delete(&pods(), "default", "c").unwrap();
    first.until("without c", |served| names(served).len() == 2).await;
    let (_, version) = first.served().hub.state().unwrap();
    first.end().await;
    version
}

#[tokio::test(start_paused = true)]
async fn a_state_is_served_as_stale_until_the_apiserver_confirms_it_and_its_history_continues() {
    let sim = sim(1);
    let dir = TempDir::new().unwrap();
    let version = saved(&sim, &dir).await;
    let network = Network::default();
    let second = Setup::new(&network, &dir).start();
    let served = second.in_phase(Phase::Stale).await;
    let hub = &served.hub;
    assert_eq!(names(&served), ["a", "b"]);
    assert!(hub.is_unconfirmed() && hub.cluster().is_some(), "the cluster of the file");
    let age = hub.unconfirmed_age().unwrap().0.unwrap();
    assert!((60..70).contains(&age.as_secs()), "{age:?}");
    let epoch = hub.position().unwrap().epoch;
    let before = version.before().unwrap_or(version);
    assert!(hub.continues_from(epoch, before).is_some_and(|continuation| continuation.head >= version));

    create(&sim, "d");
    network.connect(&sim);
    let served = second.in_phase(Phase::Synced).await;
    second.until("d", |served| names(served) == ["a", "b", "d"]).await;
    assert!(!served.hub.is_unconfirmed() && served.hub.unconfirmed_age().is_none());
    let position = served.hub.position().unwrap();
    assert_eq!(position.epoch, epoch, "the same history");
    assert!(served.hub.continues_from(epoch, version.end()).unwrap().can_resume_after);
    assert_eq!(["served", "confirmed", "unconfirmed", "refused"].map(|result| second.starts(result)), [1, 1, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_start_in_front_of_an_apiserver_that_answers_is_a_warm_start() {
    let sim = sim(1);
    let dir = TempDir::new().unwrap();
    let version = saved(&sim, &dir).await;
    create(&sim, "d");
    let network = Network::to(&sim);
    let second = Setup::new(&network, &dir).start();
    let served = second.in_phase(Phase::Synced).await;
    second.until("d", |served| names(served) == ["a", "b", "d"]).await;
    let epoch = served.hub.position().unwrap().epoch;
    assert!(served.hub.continues_from(epoch, version.end()).unwrap().can_resume_after);
    assert_eq!(["served", "confirmed"].map(|result| second.starts(result)), [0, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_state_that_is_too_old_to_be_confirmed_continues_after_a_list() {
    let sim = sim(1);
    let dir = TempDir::new().unwrap();
    saved(&sim, &dir).await;
    let network = Network::default();
    let second = Setup::new(&network, &dir).start();
    let served = second.in_phase(Phase::Stale).await;
    let epoch = served.hub.position().unwrap().epoch;
    sim.delete(&pods(), "default", "a").unwrap();
    create(&sim, "d");
    sim.compact();
    sim.compact_etcd();
    network.connect(&sim);
    second.in_phase(Phase::Synced).await;
    let served = second.until("listed again", |served| names(served) == ["b", "d"]).await;
    assert_eq!(served.hub.position().unwrap().epoch, epoch, "a marked gap of the same history");
    assert_eq!(second.starts("unconfirmed"), 1);
}

#[tokio::test(start_paused = true)]
async fn nothing_of_another_cluster_joins_a_saved_state() {
    let first = sim(1);
    let dir = TempDir::new().unwrap();
    saved(&first, &dir).await;
    let other = sim(2);
    create(&other, "other");
    let network = Network::default();
    let second = Setup::new(&network, &dir).start();
    let cluster = second.in_phase(Phase::Stale).await.hub.cluster().unwrap();
    network.connect(&other);
    let served = second.in_phase(Phase::Synced).await;
    assert_eq!(names(&served), ["a", "b", "other"]);
    assert_ne!(served.hub.cluster().unwrap(), cluster);
    let (_, version) = served.hub.state().unwrap();
    let epoch = served.hub.position().unwrap().epoch;
    let before = ResourceVersion::new(version.get() - 1).unwrap();
    assert!(!served.hub.continues_from(epoch, before).unwrap().can_resume, "the history is new");
    assert_eq!(second.starts("confirmed"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_state_of_another_address_is_not_served_without_the_apiserver() {
    let sim = sim(1);
    let dir = TempDir::new().unwrap();
    saved(&sim, &dir).await;
    let network = Network::default();
    let second = Setup { address: "http://another.test", ..Setup::new(&network, &dir) }.start();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(second.cache().is_none(), "it waits for the apiserver");
    network.connect(&sim);
    second.in_phase(Phase::Synced).await;
    assert_eq!(second.starts("confirmed"), 1, "the cluster itself proves it");
}

#[tokio::test(start_paused = true)]
async fn an_age_in_the_future_is_unknown_and_no_unconfirmed_state_is_saved() {
    let sim = sim(1);
    let dir = TempDir::new().unwrap();
    saved(&sim, &dir).await;
    let file = dir.path().join("kubefan").join(StateName::of(&pods(), &Scope::Cluster).unwrap().as_str());
    let before = std::fs::read(&file).unwrap();
    let network = Network::default();
    let second = Setup { clock: earlier, ..Setup::new(&network, &dir) }.start();
    let served = second.in_phase(Phase::Stale).await;
    assert_eq!(served.hub.unconfirmed_age(), Some(SavedAge(None)));
    second.save().await;
    assert_eq!(std::fs::read(&file).unwrap(), before);
    served.hub.limit_staleness(Some(Duration::from_secs(3600)));
    assert!(served.hub.refusal().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_state_is_encrypted_with_a_key_and_removed_if_it_is_not_configured() {
    let sim = sim(1);
    let network = Network::to(&sim);
    let dir = TempDir::new().unwrap();
    let key_file = dir.path().join("key");
    std::fs::write(&key_file, "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=").unwrap();
    let key = || Some(StateKey::read(&key_file).unwrap());
    let first = Setup { key: key(), ..Setup::new(&network, &dir) }.start();
    first.in_phase(Phase::Synced).await;
    first.end().await;
    let opened = |key| StateDir::open(dir.path(), key, || [0; 16]).unwrap();
    let name = StateName::of(&pods(), &Scope::Cluster).unwrap();
    assert!(matches!(opened(None).peek(&name), Err(SavedError::Encrypted)));
    assert!(opened(key()).peek(&name).is_ok());
    let other = Setup { key: key(), resource: "nodes", ..Setup::new(&network, &dir) }.start();
    other.until_of(nodes(), "synced", is_in(Phase::Synced)).await;
    other.end().await;
    assert!(matches!(opened(key()).peek(&name), Err(SavedError::Absent)));
    assert!(has_file(&dir, &nodes()));
}

#[tokio::test(start_paused = true)]
async fn a_state_that_etcd_has_lost_is_dropped_with_its_file() {
    for diverges in [false, true] {
        let sim = sim(1);
        let backup = sim.backup();
        let dir = TempDir::new().unwrap();
        saved(&sim, &dir).await;
        let network = Network::default();
        let second = Setup::new(&network, &dir).start();
        let epoch = second.in_phase(Phase::Stale).await.hub.position().unwrap().epoch;
        sim.restore(&backup);
        let mut expected = vec!["a", "b"];
        if diverges {
            // The versions of the lost history again, and more.
            expected.extend(["x", "y", "z"]);
            expected[2..].iter().for_each(|name| create(&sim, name));
        }
        network.connect(&sim);
        let served = second.until("new", |served| names(served) == expected && is_in(Phase::Synced)(served)).await;
        assert_ne!(served.hub.position().unwrap().epoch, epoch, "no stream continues");
        assert_eq!(["confirmed", "unconfirmed"].map(|result| second.starts(result)), [0, 1]);
        assert!(!has_file(&dir, &pods()), "a restart must not serve it again");
    }
}

#[tokio::test(start_paused = true)]
async fn no_file_is_left_of_a_resource_that_kubefan_may_not_read_or_that_is_gone() {
    for is_denied in [true, false] {
        let sim = sim(1);
        let dir = TempDir::new().unwrap();
        saved(&sim, &dir).await;
        assert!(has_file(&dir, &pods()));
        let network = Network::to(&sim);
        let second = Setup::new(&network, &dir).start();
        second.in_phase(Phase::Synced).await;
        if is_denied {
            for verb in [Verb::List, Verb::Watch] {
                let resource = Some(pods());
                sim.set_fault(FaultRule { fault: Fault::Forbidden, verb: Some(verb), resource, requests: usize::MAX });
            }
        } else {
            sim.remove_resource(&pods());
        }
        sim.restart();
        until_removed(&dir).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_state_is_served_while_the_apiserver_answers_discovery_and_nothing_else() {
    let sim = sim(1);
    let dir = TempDir::new().unwrap();
    saved(&sim, &dir).await;
    for verb in [Verb::List, Verb::Watch, Verb::Get] {
        let fault = Fault::ServiceUnavailable;
        sim.set_fault(FaultRule { fault, verb: Some(verb), resource: None, requests: usize::MAX });
    }
    let network = Network::to(&sim);
    let second = Setup::new(&network, &dir).start();
    let served = second.in_phase(Phase::Stale).await;
    assert!(served.hub.is_unconfirmed());
    let epoch = served.hub.position().unwrap().epoch;
    sim.clear_faults();
    let served = second.in_phase(Phase::Synced).await;
    assert_eq!(served.hub.position().unwrap().epoch, epoch);
    assert_eq!(["served", "confirmed", "unconfirmed"].map(|result| second.starts(result)), [1, 1, 0]);
}

#[tokio::test(start_paused = true)]
async fn all_states_are_dropped_if_another_cluster_answers_and_none_is_served_again() {
    let first = sim(1);
    let dir = TempDir::new().unwrap();
    let network = Network::to(&first);
    let resource = "pods,nodes";
    let before = Setup { clock: first_process, resource, ..Setup::new(&network, &dir) }.start();
    before.in_phase(Phase::Synced).await;
    before.until_of(nodes(), "synced", is_in(Phase::Synced)).await;
    before.end().await;
    assert!(has_file(&dir, &pods()) && has_file(&dir, &nodes()));

    let network = Network::default();
    let second = Setup { resource, ..Setup::new(&network, &dir) }.start();
    let old = [second.in_phase(Phase::Stale).await, second.until_of(nodes(), "stale", is_in(Phase::Stale)).await]
        .map(|served| served.hub.cluster().unwrap());
    assert_eq!(old[0], old[1]);
    let other = sim(2);
    create(&other, "other");
    network.connect(&other);
    let served = [second.in_phase(Phase::Synced).await, second.until_of(nodes(), "synced", is_in(Phase::Synced)).await];
    assert_eq!(names(&served[0]), ["a", "b", "other"]);
    assert!(served.iter().all(|served| served.hub.cluster().unwrap() != old[0]));
    assert_eq!(second.starts("confirmed"), 0);
    assert!(!has_file(&dir, &pods()) && !has_file(&dir, &nodes()), "a restart must not serve them again");
    let states = second.registry.context.saved.clone().unwrap();
    let upstream = network.upstream(ADDRESS);
    let commit = Commit {
        store: Store::default(),
        version: ResourceVersion::new(1).unwrap(),
        change: Change::Start { because: String::new() },
    };
    let late = SavedState { commit, proven_at: None, message: String::new() };
    assert!(!states.serve(&upstream, "uid", &served[0].hub, late), "a file that was read too late is not served");
}

#[tokio::test(start_paused = true)]
async fn a_damaged_file_is_a_cold_start() {
    let sim = sim(1);
    let dir = TempDir::new().unwrap();
    let version = saved(&sim, &dir).await;
    let file = dir.path().join("kubefan").join(StateName::of(&pods(), &Scope::Cluster).unwrap().as_str());
    let whole = std::fs::read(&file).unwrap();
    let mut damaged: Vec<_> = (0..whole.len()).step_by(whole.len() / 8).map(|cut| whole[..cut].to_vec()).collect();
    for at in [3, 9, whole.len() / 2, whole.len() - 2] {
        // The magic number, the format, a record, and a checksum.
        let mut altered = whole.clone();
        altered[at] ^= 1;
        damaged.push(altered);
    }
    for content in damaged {
        std::fs::write(&file, &content).unwrap();
        let network = Network::default();
        let second = Setup::new(&network, &dir).start();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(second.cache().is_none(), "{} bytes: nothing is served", content.len());
        network.connect(&sim);
        let served = second.in_phase(Phase::Synced).await;
        assert_eq!(names(&served), ["a", "b"]);
        let epoch = served.hub.position().unwrap().epoch;
        let before = version.before().unwrap_or(version);
        assert!(!served.hub.continues_from(epoch, before).unwrap().can_resume, "no history");
        assert_eq!(["served", "confirmed"].map(|result| second.starts(result)), [0, 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn saving_keeps_the_limit_of_bytes_with_changes_and_for_proofs_alone() {
    const LIMIT: u64 = 500;
    const MINUTES: u64 = 60;
    for changes in [true, false] {
        let sim = sim(1);
        let dir = TempDir::new().unwrap();
        let network = Network::to(&sim);
        let process = Setup { resource: "pods,nodes", ..Setup::new(&network, &dir) }.start();
        process.in_phase(Phase::Synced).await;
        process.until_of(nodes(), "synced", is_in(Phase::Synced)).await;
        let limits = SaveLimits { interval: Duration::from_secs(30), bytes_per_minute: LIMIT };
        let saver = StateSaver::new(&process.registry, limits).unwrap();
        let saving = tokio::spawn(saver.run(CancellationToken::new()));
        for minute in 0..MINUTES {
            if changes {
                create(&sim, &format!("p{minute}"));
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        saving.abort();
        let name = StateName::of(&pods(), &Scope::Cluster).unwrap();
        let largest = std::fs::metadata(dir.path().join("kubefan").join(name.as_str())).unwrap().len();
        let first = process.saved_bytes().min(2 * largest);
        let share = if changes { LIMIT } else { LIMIT / 10 };
        let written = process.saved_bytes();
        assert!(written > largest && written <= first + MINUTES * share + largest, "{written} with {largest}");
    }
}
