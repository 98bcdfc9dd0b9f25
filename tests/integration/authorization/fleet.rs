//! The pods of three DaemonSets, each with a token of its own, come back: after kubefan restarts,
//! while the apiserver is down, and to a kubefan that has never reviewed them.
//!
//! `KUBEFAN_TEST_SCALE=full` runs it with 3,000 pods and prints the cost.

use std::{net::SocketAddr, path::Path, time::Duration};

use futures::{StreamExt, stream};
use kubefan_common::proto::v1alpha1::{Target, WatchRequest, WatchResponse, watch_service_client::WatchServiceClient};
use reqwest::{Method, StatusCode};
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tonic::{
    Code, Request, Status, Streaming,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};

use crate::harness::{
    apiserver::{ApiServer, Options},
    is_full_scale,
    kubefan::Kubefan,
    process::free_port,
    rbac::{ServiceAccount, grant},
    tests, wait,
};

tests! {
    apiserver slow_faults: a_fleet_of_daemonsets_returns_after_restarts_and_through_an_outage;
}

const DAEMONSETS: usize = 3;
/// Pods that are created at a time.
const CREATED_AT_ONCE: usize = 16;
const STREAMS_PER_CONNECTION: usize = 30;
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Reviews are limited to 200 per second, and debug builds are slow.
const LIVE_AT_MOST: Duration = Duration::from_secs(120);
/// The extras that tell the tokens of a service account apart, and give no right here.
const IGNORED: &str = "tuning.authorizationIgnoreExtra=[authentication.kubernetes.io/pod-name, \
    authentication.kubernetes.io/pod-uid, authentication.kubernetes.io/node-name, \
    authentication.kubernetes.io/node-uid, authentication.kubernetes.io/credential-id]";

/// A pod with its token.
#[derive(Clone)]
struct Agent {
    node: String,
    token: String,
}

struct Fleet {
    api: ApiServer,
    agents: Vec<Agent>,
    ca: String,
}

/// The agents whose watches are open.
struct Live {
    /// Time that each agent took, sorted.
    took: Vec<Duration>,
    /// Attempts that were refused, to be tried again.
    refused: usize,
    _open: Vec<(Channel, Streaming<WatchResponse>)>,
}

impl Fleet {
    async fn create(pods: usize) -> Fleet {
        let api = ApiServer::start(Options::default()).await;
        let namespace = api.namespace("fleet").await;
        let group = json!({
            "kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": format!("system:serviceaccounts:{namespace}"),
        });
        let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"] }]);
        grant(&api, None, "fleet", &rules, &group).await;
        let mut all = Vec::new();
        for number in 0..DAEMONSETS {
            let account = format!("agent-{number}");
            ServiceAccount::create(&api, &namespace, &account).await;
            all.extend((0..pods).map(|pod| (account.clone(), pod)));
        }
        let created = stream::iter(all).map(|(account, pod)| agent(&api, &namespace, account, pod));
        let agents: Vec<Agent> = created.buffer_unordered(CREATED_AT_ONCE).collect().await;
        let client = api.client_with_token(&agents[0].token);
        let url = format!("{}/api/v1/pods?limit=1", api.url());
        wait::until("the role to apply", wait::SOON, || async {
            (client.get(&url).send().await.unwrap().status() == StatusCode::OK).then_some(())
        })
        .await;
        let ca = std::fs::read_to_string(api.ca_pem_path()).unwrap();
        Fleet { api, agents, ca }
    }

    async fn kubefan(&self, kubeconfig: &Path, listen: &str, args: &[&str]) -> Kubefan {
        let (cert, key) = self.api.server_certificate();
        let tls = ["--tls-cert-file", cert.to_str().unwrap(), "--tls-private-key-file", key.to_str().unwrap()];
        let fixed = ["--resource=pods", "--access=authorized-cache-only"];
        Kubefan::spawn_at(kubeconfig, listen, &[&fixed[..], &tls, args].concat()).await
    }

    async fn channel(&self, addr: SocketAddr) -> Channel {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.ca));
        let endpoint = Endpoint::from_shared(format!("https://{addr}")).unwrap().tls_config(tls).unwrap();
        endpoint.connect_lazy()
    }

    /// Each agent watches the pods of its node, and tries again while it is asked to.
    async fn go_live(&self, addr: SocketAddr) -> Live {
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for agents in self.agents.chunks(STREAMS_PER_CONNECTION) {
            let channel = self.channel(addr).await;
            for (number, agent) in agents.iter().enumerate() {
                let channel = channel.clone();
                let agent = agent.clone();
                tasks.spawn(async move {
                    let mut backoff = Duration::from_millis(50 + number as u64);
                    let mut refused = 0;
                    loop {
                        match watch(channel.clone(), &agent).await {
                            Ok(open) => return (start.elapsed(), refused, (channel, open)),
                            Err(status) => {
                                assert!(is_later(&status), "{status:?}");
                                refused += 1;
                                sleep(backoff).await;
                                backoff = BACKOFF_MAX.min(backoff * 2);
                            }
                        }
                    }
                });
            }
        }
        let mut took = Vec::new();
        let mut refused = 0;
        let mut open = Vec::new();
        let all = async {
            while let Some(one) = tasks.join_next().await {
                let (after, times, stream) = one.expect("an agent");
                took.push(after);
                refused += times;
                open.push(stream);
            }
        };
        let is_live = tokio::time::timeout(LIVE_AT_MOST, all).await.is_ok();
        assert!(is_live, "{} of {} agents are live", took.len(), self.agents.len());
        took.sort_unstable();
        Live { took, refused, _open: open }
    }

    /// Returns the number of agents that a kubefan serves at their first attempt; all others are
    /// asked to retry.
    async fn served_at_once(&self, addr: SocketAddr) -> usize {
        let channel = self.channel(addr).await;
        let attempts = stream::iter(&self.agents).map(|agent| watch(channel.clone(), agent));
        let attempts: Vec<_> = attempts.buffer_unordered(STREAMS_PER_CONNECTION).collect().await;
        for status in attempts.iter().filter_map(|attempt| attempt.as_ref().err()) {
            assert!(is_later(status) && status.message().contains("kubefan cannot ask the apiserver"), "{status:?}");
        }
        attempts.iter().filter(|attempt| attempt.is_ok()).count()
    }
}

fn is_later(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::ResourceExhausted)
}

/// Creates a pod, and returns it with a token that is bound to it.
async fn agent(api: &ApiServer, namespace: &str, account: String, number: usize) -> Agent {
    let name = format!("{account}-{number}");
    let node = format!("node-{number}");
    let spec =
        json!({ "serviceAccountName": account, "nodeName": node, "containers": [{ "name": "c", "image": "i" }] });
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let pod = api.create(&pods, &json!({ "metadata": { "name": name }, "spec": spec })).await;
    let bound = json!({ "kind": "Pod", "apiVersion": "v1", "name": name, "uid": pod["metadata"]["uid"] });
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": { "boundObjectRef": bound, "expirationSeconds": 3600 },
    });
    let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
    let (status, answer) = api.request(Method::POST, &path, Some(("application/json", &request))).await;
    assert!(status.is_success(), "{answer}");
    Agent { node, token: answer["status"]["token"].as_str().unwrap().to_owned() }
}

/// Watches the pods of the agent's node until their state is there.
async fn watch(channel: Channel, agent: &Agent) -> Result<Streaming<WatchResponse>, Status> {
    let field_selector = format!("spec.nodeName={}", agent.node);
    let target = Some(Target { resource: "pods".to_owned(), field_selector, ..Target::default() });
    let mut request = Request::new(WatchRequest { target, ..WatchRequest::default() });
    request.metadata_mut().insert("authorization", format!("Bearer {}", agent.token).parse().unwrap());
    let mut watch = WatchServiceClient::new(channel).watch(request).await?.into_inner();
    loop {
        let message = watch.message().await?.ok_or_else(|| Status::unavailable("the watch has ended"))?;
        if !message.resume_version.is_empty() {
            return Ok(watch);
        }
    }
}

/// TokenReviews and SubjectAccessReviews so far.
async fn reviews(kubefan: &Kubefan) -> [f64; 2] {
    let count = async |kind: &str| {
        kubefan.metric(&format!("kubefan_delegated_{kind}_request_total{{result=\"ok\"}}")).await.unwrap_or(0.0)
    };
    [count("authn").await, count("authz").await]
}

fn print(what: &str, live: &Live, reviews: [f64; 2]) {
    let seconds = |percent: usize| live.took[(live.took.len() * percent / 100).min(live.took.len() - 1)].as_secs_f64();
    let [tokens, rights] = reviews;
    println!(
        "{what}: {} live, all after {:.2} s, p50 {:.2} s, p99 {:.2} s, {} attempts refused, {tokens} TokenReviews, \
         {rights} SubjectAccessReviews",
        live.took.len(),
        seconds(100),
        seconds(50),
        seconds(99),
        live.refused
    );
}

async fn a_fleet_of_daemonsets_returns_after_restarts_and_through_an_outage() {
    let fleet = Fleet::create(if is_full_scale() { 1000 } else { 5 }).await;
    let all = fleet.agents.len() as f64;
    let namespace = fleet.api.namespace("kubefan").await;
    let account = ServiceAccount::create(&fleet.api, &namespace, "proxy").await;
    account.may_read_pods().await;
    account.may_review().await;
    let kubeconfig = account.kubeconfig().await;

    // With the extras that differ from pod to pod, each pod's right is reviewed. Without them, one
    // review serves a DaemonSet.
    for (what, args, rights_max) in
        [("each pod's right", &[][..], all), ("extras ignored", &[IGNORED], DAEMONSETS as f64)]
    {
        let kubefan = fleet.kubefan(&kubeconfig, "127.0.0.1:0", args).await;
        kubefan.ready().await;
        let live = fleet.go_live(kubefan.grpc_addr).await;
        let count = reviews(&kubefan).await;
        print(&format!("{what}, first start"), &live, count);
        assert_eq!(count, [all, rights_max], "{what}");
    }

    let listen = format!("127.0.0.1:{}", free_port());
    let kubefan = fleet.kubefan(&kubeconfig, &listen, &[]).await;
    kubefan.ready().await;
    let addr = kubefan.grpc_addr;
    drop(fleet.go_live(addr).await);
    drop(kubefan);
    let kubefan = fleet.kubefan(&kubeconfig, &listen, &[]).await;
    let live = fleet.go_live(addr).await;
    print("after kubefan's restart", &live, reviews(&kubefan).await);
    drop(live);

    fleet.api.kill9();
    let before = reviews(&kubefan).await;
    let live = fleet.go_live(addr).await;
    print("with the apiserver down", &live, [0.0; 2]);
    assert_eq!((live.refused, reviews(&kubefan).await), (0, before), "known agents are served");
    drop(live);
    drop(kubefan);

    let kubefan = fleet.kubefan(&kubeconfig, &listen, &[]).await;
    assert_eq!(fleet.served_at_once(addr).await, 0, "no agent is known");
    let (live, ()) = tokio::join!(fleet.go_live(addr), fleet.api.restart());
    print("restarted while the apiserver is down, from its restart on", &live, reviews(&kubefan).await);
}
