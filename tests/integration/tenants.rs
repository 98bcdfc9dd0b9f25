//! Tenants of one kubefan: whatever one takes, another keeps its own. An attacker with few rights
//! comes and goes, and an honest caller keeps its cache, its place and its watches meanwhile.
//!
//! Each test prints how long the honest caller's requests took alone, while the attacker uses
//! another kubefan, and beside the attacker. On either kubefan, the attacker also takes processor
//! time of the machine and of the apiserver. So the ratio of the last two is the cost of sharing a
//! kubefan with it. The figures depend on the machine, and are no promise.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use futures::{
    FutureExt, StreamExt,
    future::{LocalBoxFuture, join_all},
    stream,
};
use reqwest::{Client, Response, StatusCode};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    apiserver::{ApiServer, Options, READER},
    is_full_scale,
    kubefan::Kubefan,
    rbac::{ServiceAccount, grant},
    servers::{bearer, is_cached},
    tests, wait,
};

tests! {
    apiserver slow_faults alone: an_administrator_of_a_namespace_leaves_others_their_caches_and_places,
        a_user_with_all_forwarded_watches_it_can_get_leaves_others_theirs,
        lists_with_long_selectors_leave_others_their_time,
        reviews_of_long_selectors_leave_room_for_those_of_others;
}

/// The time between two requests of the honest caller.
const PAUSE: Duration = Duration::from_millis(10);
/// Streams that the attacker holds on one connection.
const STREAMS: usize = 50;

/// The number of rounds, and the length of each of their three parts.
fn rounds() -> (usize, Duration) {
    if is_full_scale() { (7, Duration::from_secs(4)) } else { (2, Duration::from_secs(1)) }
}

/// A kubefan over TLS that knows its callers, with an attacker and an honest caller.
struct Tenants {
    api: ApiServer,
    kubefan: Kubefan,
    /// A kubefan with the same flags that the honest caller does not use.
    other: Kubefan,
    /// Tokens of the service accounts that administer one namespace.
    attackers: Vec<String>,
    /// The namespace of the attackers.
    namespace: String,
}

impl Tenants {
    async fn start(args: &[&str]) -> Tenants {
        let api = ApiServer::start(Options::default()).await;
        let namespace = api.namespace("greedy").await;
        let all = json!([{ "apiGroups": ["*"], "resources": ["*"], "verbs": ["*"] }]);
        let mut attackers = Vec::new();
        for name in ["first", "second", "third"] {
            let account = ServiceAccount::create(&api, &namespace, name).await;
            grant(&api, Some(&namespace), name, &all, &account.subject()).await;
            attackers.push(account.token().await);
        }
        let reader = json!({ "kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": READER });
        let reads = json!([{ "apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["list", "watch"] }]);
        grant(&api, None, "honest", &reads, &reader).await;
        for number in 0..200 {
            let pod = json!({
                "metadata": { "name": format!("p-{number}") },
                "spec": { "containers": [{ "name": "c", "image": "i" }] },
            });
            api.create("/api/v1/namespaces/default/pods", &pod).await;
        }
        let kubefan = Kubefan::spawn_over_tls(&api, &api.kubeconfig(), args).await;
        let other = Kubefan::spawn_over_tls(&api, &api.kubeconfig(), args).await;
        kubefan.ready().await;
        other.ready().await;
        Tenants { api, kubefan, other, attackers, namespace }
    }

    /// A client from this address of loopback.
    fn client(&self, token: &str, last_byte: u8) -> Client {
        let ca = std::fs::read(self.api.ca_pem_path()).expect("the CA is written");
        let ca = reqwest::Certificate::from_pem(&ca).expect("the CA is PEM");
        let builder = Client::builder().tls_certs_only([ca]).no_proxy().default_headers(bearer(token));
        builder.local_address(IpAddr::from([127, 0, 0, last_byte])).build().expect("a client is built")
    }

    fn honest(&self) -> Client {
        self.client(&format!("token-of-{READER}"), 1)
    }

    fn url(&self, path: &str) -> String {
        url_of(&self.kubefan, path)
    }

    /// Clients of the attackers, from two addresses.
    fn of_attackers(&self, count: usize) -> Vec<Client> {
        let tokens = self.attackers.iter().cycle().take(count);
        tokens.enumerate().map(|(number, token)| self.client(token, 2 + number as u8 % 2)).collect()
    }
}

fn url_of(kubefan: &Kubefan, path: &str) -> String {
    format!("https://{}{path}", kubefan.grpc_addr)
}

/// An attacker on a thread of its own, so that it does not delay the honest caller in this process.
struct Attacker {
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Attacker {
    fn start(attack: impl FnOnce() -> LocalBoxFuture<'static, ()> + Send + 'static) -> Attacker {
        let stop = CancellationToken::new();
        let stopping = stop.clone();
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
            runtime.block_on(stopping.run_until_cancelled(attack()));
        };
        Attacker { stop, thread: Some(std::thread::spawn(run)) }
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        self.stop.cancel();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking(), "the attacker panicked");
    }
}

/// Sends requests of the honest caller, one after the other, for this long. Returns how long each
/// took.
async fn ask(duration: Duration, request: &impl AsyncFn()) -> Vec<Duration> {
    let start = Instant::now();
    let mut took = Vec::new();
    while start.elapsed() < duration {
        let asked = Instant::now();
        request().await;
        took.push(asked.elapsed());
        sleep(PAUSE).await;
    }
    took.sort_unstable();
    took
}

fn p99(sorted: &[Duration]) -> f64 {
    sorted[(sorted.len() * 99 / 100).min(sorted.len() - 1)].as_secs_f64() * 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The honest caller's requests of each round, by where the attacker is.
#[derive(Default)]
struct Rounds {
    alone: Vec<Vec<Duration>>,
    elsewhere: Vec<Vec<Duration>>,
    beside: Vec<Vec<Duration>>,
}

/// Makes the requests of the honest caller without an attacker, with one that uses another kubefan,
/// and with one that uses the same, in turns, and prints how the 99th percentiles compare.
async fn compare(what: &str, tenants: &Tenants, request: impl AsyncFn(), attacker: impl Fn(&Kubefan) -> Attacker) {
    let (rounds, duration) = rounds();
    let mut took = Rounds::default();
    ask(duration, &request).await;
    for _ in 0..rounds {
        took.alone.push(ask(duration, &request).await);
        let elsewhere = attacker(&tenants.other);
        took.elsewhere.push(ask(duration, &request).await);
        drop(elsewhere);
        let beside = attacker(&tenants.kubefan);
        took.beside.push(ask(duration, &request).await);
        drop(beside);
    }
    let of = |rounds: &[Vec<Duration>]| median(rounds.iter().map(|took| p99(took)).collect());
    let ratio = |rounds: &[Vec<Duration>], than: &[Vec<Duration>]| {
        median(rounds.iter().zip(than).map(|(took, than)| p99(took) / p99(than)).collect())
    };
    println!(
        "{what}: p99 {:.1} ms alone, {:.1} ms while the attacker uses another kubefan, {:.1} ms beside it; \
         medians of ratios: beside to alone {:.2}, beside to elsewhere {:.2}",
        of(&took.alone),
        of(&took.elsewhere),
        of(&took.beside),
        ratio(&took.beside, &took.alone),
        ratio(&took.beside, &took.elsewhere),
    );
}

/// Sends a request and reads its answer. Asserts that it is from a cache.
async fn from_cache(client: &Client, url: &str) {
    let response = client.get(url).send().await.expect("an answer");
    let found = (response.status(), is_cached(&response));
    let text = response.text().await.expect("a whole answer");
    assert_eq!(found, (StatusCode::OK, true), "{url}: {text:.300}");
}

/// Resources of a namespace, more than there are places.
const RESOURCES: [&str; 20] = [
    "api/v1/configmaps",
    "api/v1/services",
    "api/v1/endpoints",
    "api/v1/events",
    "api/v1/limitranges",
    "api/v1/persistentvolumeclaims",
    "api/v1/podtemplates",
    "api/v1/replicationcontrollers",
    "api/v1/resourcequotas",
    "api/v1/serviceaccounts",
    "apis/apps/v1/deployments",
    "apis/apps/v1/daemonsets",
    "apis/apps/v1/statefulsets",
    "apis/apps/v1/replicasets",
    "apis/apps/v1/controllerrevisions",
    "apis/batch/v1/jobs",
    "apis/batch/v1/cronjobs",
    "apis/networking.k8s.io/v1/networkpolicies",
    "apis/networking.k8s.io/v1/ingresses",
    "apis/coordination.k8s.io/v1/leases",
];

/// The path of a resource such as `api/v1/pods` in a namespace.
fn path_in(namespace: &str, resource: &str) -> String {
    let (group, name) = resource.rsplit_once('/').expect("a resource has a group");
    format!("/{group}/namespaces/{namespace}/{name}")
}

/// Watches a resource, and opens the watch again when it ends.
async fn keep_watching(client: Client, url: String) {
    loop {
        if let Ok(mut open) = client.get(&url).send().await {
            while let Ok(Some(_)) = open.chunk().await {}
        }
        sleep(PAUSE).await;
    }
}

/// Makes and deletes ConfigMaps of 1 MB in turns, more than the caches on demand may hold.
async fn fill(client: Client, url: String) {
    const COUNT: usize = 24;
    loop {
        for number in 0..COUNT {
            let object =
                json!({ "metadata": { "name": format!("c-{number}") }, "data": { "x": "x".repeat(1_000_000) } });
            let sent = client.post(&url).header("content-type", "application/json").body(object.to_string()).send();
            let _answer = sent.await;
        }
        let _answer = client.delete(&url).send().await;
    }
}

async fn an_administrator_of_a_namespace_leaves_others_their_caches_and_places() {
    let tenants = Tenants::start(&["--on-demand", "limits.onDemandBytesMax=16Mi"]).await;
    let honest = tenants.honest();
    let pods = tenants.url("/api/v1/pods?resourceVersion=0");
    let mut watch = honest.get(tenants.url("/api/v1/pods?watch=1")).send().await.expect("a watch");
    assert!(is_cached(&watch), "{watch:?}");
    let attacker = |kubefan: &Kubefan| {
        let clients = tenants.of_attackers(6);
        let urls: Vec<String> = RESOURCES
            .iter()
            .map(|resource| url_of(kubefan, &format!("{}?watch=1", path_in(&tenants.namespace, resource))))
            .collect();
        let configmaps = format!("{}{}", tenants.api.url(), path_in(&tenants.namespace, RESOURCES[0]));
        let writer = tenants.client(&tenants.attackers[0], 2);
        Attacker::start(move || {
            async move {
                let watches = urls.into_iter().zip(clients.iter().cycle().cloned());
                let watches = watches.map(|(url, client)| keep_watching(client, url));
                tokio::join!(join_all(watches), fill(writer, configmaps));
            }
            .boxed_local()
        })
    };
    compare("places and bytes on demand", &tenants, async || from_cache(&honest, &pods).await, &attacker).await;

    // Another resource gets a place while the attacker holds all.
    let attacker = attacker(&tenants.kubefan);
    let held = "kubefan_subscribers";
    wait::until("the attacker to hold most places", wait::SOON, || async {
        let lines = tenants.kubefan.metric_lines(held).await?;
        (lines.iter().filter(|line| !line.ends_with(" 0")).count() >= 12).then_some(())
    })
    .await;
    let nodes = tenants.url("/api/v1/nodes?resourceVersion=0");
    wait::until("a place for nodes", wait::SOON, || async {
        let response = honest.get(&nodes).send().await.ok()?;
        is_cached(&response).then_some(())
    })
    .await;
    from_cache(&honest, &pods).await;
    drop(attacker);
    let ended = loop {
        match timeout(Duration::ZERO, watch.chunk()).await {
            Ok(Ok(Some(_))) => {}
            Ok(end) => break Some(end),
            Err(_) => break None,
        }
    };
    assert!(ended.is_none(), "the honest caller's watch ended: {ended:?}");
}

/// The query of a watch whose selector has one term more than kubefan takes, so it is forwarded.
fn forwarded_query(number: usize) -> String {
    let terms: Vec<String> = (0..101).map(|term| format!("!a{number}-{term}")).collect();
    format!("watch=1&labelSelector={}", terms.join(","))
}

/// Holds a watch, and asks again each second while it is refused.
async fn hold(client: Client, url: String, refused: Arc<AtomicUsize>) {
    loop {
        if let Ok(mut open) = client.get(&url).send().await {
            let is_refused = open.status() == StatusCode::TOO_MANY_REQUESTS;
            refused.fetch_add(usize::from(is_refused), Ordering::Relaxed);
            while let Ok(Some(_)) = open.chunk().await {}
        }
        sleep(Duration::from_secs(1)).await;
    }
}

async fn a_user_with_all_forwarded_watches_it_can_get_leaves_others_theirs() {
    let max = if is_full_scale() { "limits.passthroughMax=1000" } else { "limits.passthroughMax=100" };
    let tenants = Tenants::start(&["--resource=pods", max]).await;
    let honest = tenants.honest();
    let refused = Arc::<AtomicUsize>::default();
    let attacker = |kubefan: &Kubefan| {
        let clients = tenants.of_attackers(20);
        let refused = refused.clone();
        let base = url_of(kubefan, &path_in(&tenants.namespace, "api/v1/pods"));
        Attacker::start(move || {
            let hold = move |number: usize| {
                let client = clients[number % clients.len()].clone();
                let url = format!("{base}?{}", forwarded_query(number));
                hold(client, url, refused.clone())
            };
            join_all((0..20 * STREAMS).map(hold)).map(drop).boxed_local()
        })
    };
    let url = tenants.url(&format!("/api/v1/pods?{}", forwarded_query(0)));
    // The caller's share is one place. kubefan must first notice that its last watch was closed.
    let open = async || {
        wait::until("the honest user to get a watch", wait::SOON, || async {
            let answer: Response = honest.get(&url).send().await.expect("an answer");
            let status = answer.status();
            let is_expected = matches!(status, StatusCode::OK | StatusCode::TOO_MANY_REQUESTS) && !is_cached(&answer);
            assert!(is_expected, "{status}: {:?}", answer.text().await);
            (status == StatusCode::OK).then_some(())
        })
        .await;
    };
    compare("forwarded watches", &tenants, open, &attacker).await;
    let attacker = attacker(&tenants.kubefan);
    let before = refused.load(Ordering::Relaxed);
    wait::until("the attacker to be refused", wait::SOON, || async {
        (refused.load(Ordering::Relaxed) > before).then_some(())
    })
    .await;
    open().await;
    drop(attacker);
    println!("the attacker was refused {} watches", refused.load(Ordering::Relaxed));
}

/// The number of SubjectAccessReviews that the apiserver has answered.
const REVIEWS: &str = r#"kubefan_delegated_authz_request_total{result="ok"}"#;

/// Compares lists of the honest caller, each of another namespace, beside lists of the attacker
/// with long selectors. Returns how many lists of each were answered.
async fn compare_lists(what: &str, tenants: &Tenants) -> (usize, usize) {
    /// Requests of the attacker at a time.
    const AT_ONCE: usize = 32;
    let honest = tenants.honest();
    let next = Arc::<AtomicUsize>::default();
    let answers = Arc::<Mutex<BTreeMap<u16, usize>>>::default();
    let attacker = |kubefan: &Kubefan| {
        let clients = tenants.of_attackers(4);
        let next = next.clone();
        let answers = answers.clone();
        let base = url_of(kubefan, &path_in(&tenants.namespace, "api/v1/pods"));
        Attacker::start(move || {
            let numbers = std::iter::repeat_with(move || next.fetch_add(1, Ordering::Relaxed));
            let ask = move |number: usize| {
                let url = format!("{base}?resourceVersion=0&labelSelector={}", long_selector(number));
                let client = clients[number % clients.len()].clone();
                let answers = answers.clone();
                async move {
                    let Ok(answer) = client.get(url).send().await else { return };
                    *answers.lock().unwrap().entry(answer.status().as_u16()).or_default() += 1;
                    let _text = answer.text().await;
                }
            };
            stream::iter(numbers).map(ask).buffer_unordered(AT_ONCE).for_each(async |()| {}).boxed_local()
        })
    };
    let asked = AtomicUsize::new(0);
    let list = async || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        asked.fetch_add(1, Ordering::Relaxed);
        from_cache(&honest, &tenants.url(&format!("/api/v1/namespaces/n-{number}/pods?resourceVersion=0"))).await;
    };
    compare(what, tenants, list, attacker).await;
    let answers = answers.lock().unwrap();
    println!("the attacker was answered {answers:?}");
    let lists = answers.get(&200).copied().unwrap_or_default();
    assert!(lists > 0, "no list of the attacker was answered: {answers:?}");
    (asked.into_inner(), lists)
}

/// The broad rights of both are known, so nothing is reviewed and no limit slows the attacker down:
/// its lists take processor time only.
async fn lists_with_long_selectors_leave_others_their_time() {
    let tenants = Tenants::start(&["--resource=pods"]).await;
    compare_lists("long selectors", &tenants).await;
}

/// kubefan asks for exactly the requested read, so each list needs a review of its own. Each
/// kubefan has the same limit for large ones, so the attacker gets as many of them at either
/// kubefan.
async fn reviews_of_long_selectors_leave_room_for_those_of_others() {
    let tenants = Tenants::start(&["--resource=pods", "tuning.authorizationBroadFirst=false"]).await;
    let (honest, long) = compare_lists("reviews", &tenants).await;
    let mut reviews = 0;
    for kubefan in [&tenants.kubefan, &tenants.other] {
        reviews += kubefan.metric(REVIEWS).await.expect("metrics are served") as usize;
    }
    assert!(reviews >= honest + long, "{reviews} reviews of {honest} lists and {long} with long selectors");
}

/// 13 kB of values that no other selector has.
fn long_selector(number: usize) -> String {
    let values: Vec<String> = (0..1100).map(|value| format!("v{number:06}{value:04}")).collect();
    format!("app+in+({})", values.join(","))
}
