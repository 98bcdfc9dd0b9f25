//! kubefan behind kubefan over gRPC: guarantees, ages, proofs, identity and authorization hold
//! through both. `equivalence` and `restarts` compare every event.

use std::time::Duration;

use futures::future::join_all;
use kubefan_client::{Client, ClientOptions, Target, WatchItem, WatchOptions};
use kubefan_fanout::{Catalog, Patience};
use kubefan_sim::apiserver::{Fault, FaultRule, Verb};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::{
    freshness::{head, lookups, served, write_configmap},
    harness::{
        apiserver::ApiServer,
        kubefan::Kubefan,
        link::Link,
        objects::{self, version_of},
        pki::{self, Authority},
        rbac::{ServiceAccount, grant},
        record::Watch,
        rig::{GrpcLink, PODS, Rig, Setup, churn, pod, pods, stage, target, versions},
        simulated::Simulated,
        tests, wait,
    },
    peers::small_ring,
    upstream_faults::{relists, status, synced, write},
};

tests! {
    local: another_replica_takes_over_within_seconds_from_one_that_falls_silent;
    apiserver: a_user_and_a_node_that_lose_their_rights_lose_only_what_is_theirs;
    paused: events_are_exact_and_objects_the_apiservers_behind_two_kubefans,
        an_inexact_span_is_a_marked_gap_with_its_reason_behind_two_kubefans, the_age_behind_two_kubefans_is_the_sum,
        reads_behind_many_kubefans_share_the_apiservers_proof,
        behind_a_restarted_kubefan_a_selector_starts_over_and_all_else_resumes,
        a_right_of_the_other_kubefan_is_missed_behind_it_and_comes_back,
        subscribers_notice_nothing_while_the_other_kubefan_is_away,
        a_kubefan_that_starts_while_the_other_one_is_away_lists_at_the_apiserver;
}

/// A synced kubefan, another one behind it, and a subscriber of that with its snapshot.
async fn behind(setup: Setup) -> (Rig, Rig, GrpcLink, Watch) {
    let (front, _, _) = synced(setup).await;
    let (node, link) = Rig::behind(&front, Setup::of(&["pods"]));
    node.ready().await;
    let watch = node.watch_all("pods").await;
    (front, node, link, watch)
}

/// A machine that loses power sends nothing, not even the end of its connections.
async fn another_replica_takes_over_within_seconds_from_one_that_falls_silent() {
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    pki::write_server_files(&authority, simulated.dir.path());
    let file = |name: &str| simulated.dir.path().join(name).display().to_string();
    let tls = [
        format!("--tls-cert-file={}", file("server.pem")),
        format!("--tls-private-key-file={}", file("server-key.pem")),
    ];
    let [cert, key] = tls.each_ref().map(String::as_str);
    let front = simulated.kubefan(&["--resource=pods", cert, key]).await;
    let link = Link::to(front.grpc_addr).await;
    let ca = file("ca.pem");
    let kubeconfig = file("front.kubeconfig");
    let cluster = format!("{{ server: 'https://{}', certificate-authority: {ca} }}", link.addr);
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{ name: c, cluster: {cluster} }}]\n\
         contexts: [{{ name: c, context: {{ cluster: c, user: u }} }}]\nusers: [{{ name: u, user: {{}} }}]\n"
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let over_http = format!("--upstream={kubeconfig}");
    let over_grpc = [format!("--upstream=https://{}", link.addr), format!("--upstream-ca-file={ca}")];
    let [address, trust] = over_grpc.each_ref().map(String::as_str);
    let nodes = [
        simulated.kubefan(&["--resource=pods", &over_http]).await,
        simulated.kubefan(&["--resource=pods", address, trust]).await,
    ];
    let watches = nodes.iter().map(async |node| {
        let client = Client::connect(&node.grpc_addr.to_string(), &ClientOptions::default()).await.unwrap();
        let pods = Target { resource: "pods".to_owned(), ..Target::default() };
        let mut watch = client.watch(pods, WatchOptions::default());
        while !matches!(watch.next().await.unwrap().unwrap(), WatchItem::SnapshotEnd { .. }) {}
        watch
    });
    let watches = join_all(watches).await;
    link.freeze();
    let written = simulated.create("written-meanwhile").to_string();
    let arrived = watches.into_iter().map(async |mut watch| {
        while !matches!(watch.next().await, Some(Ok(WatchItem::Event(event))) if event.resource_version == written) {}
    });
    timeout(wait::SOON, join_all(arrived)).await.expect("the event arrives on another connection, over HTTP and gRPC");
}

async fn events_are_exact_and_objects_the_apiservers_behind_two_kubefans() {
    let (_front, node, link, mut watch) = behind(Setup::of(&["pods"])).await;
    assert_eq!(watch.state, node.truth(PODS).await);
    let mut written = write(&node, "b").to_vec();
    watch.until(written[2]).await;
    link.cut();
    node.readyz_has(" stale: ").await;
    written.extend(write(&node, "missed"));
    link.mend();
    watch.until(written[5]).await;
    assert_eq!((versions(&watch.events), &*watch.gaps), (written, &[][..]));
    assert_eq!(watch.state, node.truth(PODS).await);
    assert_eq!(relists(&node), 1.0, "listed once, at the start");
    assert!(node.asked(PODS).is_empty(), "only the other kubefan is asked for pods");
}

async fn subscribers_notice_nothing_while_the_other_kubefan_is_away() {
    let (front, _, _) = synced(Setup::of(&["pods"])).await;
    let (node, link) = Rig::falling_back(&front, Setup::of(&["pods"]));
    node.ready().await;
    let mut watch = node.watch_all("pods").await;
    let mut written = write(&node, "before").to_vec();
    watch.until(written[2]).await;
    link.cut();
    written.extend(write(&node, "away"));
    watch.until(written[5]).await;
    node.readyz_has("upstream: the apiserver at ").await;
    assert!(node.age() < 5.0, "proved by the apiserver's events: {}", node.age());
    link.mend();
    node.readyz_has("upstream: the kubefan at kubefan.test").await;
    // Each watch returns within a minute.
    sleep(Duration::from_secs(61)).await;
    let asked = node.asked(PODS).len();
    written.extend(write(&node, "after"));
    watch.until(written[8]).await;
    assert_eq!((versions(&watch.events), &*watch.gaps), (written, &[][..]));
    assert_eq!(watch.state, node.truth(PODS).await);
    assert_eq!(relists(&node), 1.0, "listed once, at the start");
    assert_eq!(node.asked(PODS).iter().filter(|request| request.is_watch()).count(), 1, "one watch of the apiserver");
    assert_eq!(node.asked(PODS).len(), asked, "and none after the return");
}

async fn a_kubefan_that_starts_while_the_other_one_is_away_lists_at_the_apiserver() {
    let (front, _, _) = synced(Setup::of(&["pods"])).await;
    let (node, link) = Rig::falling_back(&front, Setup::of(&["pods"]));
    link.cut();
    node.ready().await;
    let mut watch = node.watch_all("pods").await;
    assert_eq!(watch.state, node.truth(PODS).await);
    link.mend();
    node.readyz_has("upstream: the kubefan at kubefan.test").await;
    sleep(Duration::from_secs(61)).await;
    let written = write(&node, "after");
    watch.until(written[2]).await;
    assert_eq!((versions(&watch.events), relists(&node)), (written.to_vec(), 1.0), "it continues at the kubefan");
}

/// A gap of the other kubefan, and a catch-up between the two.
async fn an_inexact_span_is_a_marked_gap_with_its_reason_behind_two_kubefans() {
    for reason in ["expired", "catch_up"] {
        let (front, node, link, mut watch) =
            behind(if reason == "expired" { Setup::of(&["pods"]) } else { small_ring() }).await;
        let last = if reason == "expired" {
            front.sim.drop_connections();
            front.fault(Verb::Watch, Fault::ServiceUnavailable, 2);
            let last = churn(&front.sim, 0, 60);
            front.sim.compact();
            last
        } else {
            link.cut();
            node.readyz_has(" stale: ").await;
            let last = churn(&front.sim, 0, 60);
            front.watch_all("pods").await.until(last).await;
            link.mend();
            last
        };
        watch.until(last).await;
        assert_eq!(watch.gap_reasons, [reason]);
        assert_eq!(watch.state, node.truth(PODS).await, "{reason}");
        assert_eq!(relists(&node), 1.0, "{reason}");
        let after = write(&node, "after");
        watch.until(after[2]).await;
        assert!(versions(&watch.events).ends_with(&after) && watch.gaps.len() == 1, "{reason}: exact after it");
    }
}

async fn the_age_behind_two_kubefans_is_the_sum() {
    let (front, _, _) = synced(Setup::of(&["pods"])).await;
    front.network.refuse(true);
    front.cut().await;
    sleep(Duration::from_secs(100)).await;
    // Its snapshot is new, and the state in it is not.
    let (node, link) = Rig::behind(&front, Setup::of(&["pods"]));
    node.ready().await;
    sleep(Duration::from_secs(1)).await;
    assert!((100.0..130.0).contains(&node.age()), "{}", node.age());
    link.cut();
    sleep(Duration::from_secs(50)).await;
    assert!(node.age() >= 150.0, "{}", node.age());
    link.mend();
    front.network.refuse(false);
    write(&front, "b");
    sleep(Duration::from_secs(30)).await;
    assert!(node.age() < 60.0, "{}", node.age());
}

async fn reads_behind_many_kubefans_share_the_apiservers_proof() {
    let (front, _, _) = synced(Setup::of(&["pods"])).await;
    let nodes: Vec<_> = (0..8).map(|_| Rig::behind(&front, Setup::of(&["pods"]))).collect();
    for (node, _) in &nodes {
        node.ready().await;
    }
    sleep(Duration::from_secs(20)).await;
    let version = write_configmap(&front.sim);
    let before = lookups(&front.network);
    join_all(nodes.iter().map(|(node, _)| async {
        let cache = served(node).await;
        assert!(head(&cache) < version);
        node.catalog.advance(&cache, Patience::Bookmark).await.unwrap();
        assert!(head(&cache) >= version);
    }))
    .await;
    let asked = lookups(&front.network) - before;
    assert!((1..=2).contains(&asked), "{asked} look-ups for {} kubefans", nodes.len());
    assert!(nodes.iter().all(|(node, _)| lookups(&node.network) == 0));
}

async fn behind_a_restarted_kubefan_a_selector_starts_over_and_all_else_resumes() {
    let (front, node, _link, mut watch) = behind(Setup::of(&["pods"])).await;
    let from = watch.resume_version.clone();
    let written = write(&node, "b");
    watch.until(written[2]).await;
    drop(node);
    let (node, _link) = Rig::behind(&front, Setup::of(&["pods"]));
    node.ready().await;
    let mut resumed = node.watch(target("pods"), &from).await.unwrap();
    resumed.until(written[2]).await;
    assert_eq!((versions(&resumed.events), resumed.snapshots), (written.to_vec(), 0));
    let expired = node.watch(stage("new"), &from).await.err().unwrap();
    assert_eq!(expired.code(), Code::OutOfRange, "{expired}");
    assert!(node.asked(PODS).is_empty(), "it costs the apiserver nothing");
}

async fn a_right_of_the_other_kubefan_is_missed_behind_it_and_comes_back() {
    let (front, node, _link, mut watch) = behind(Setup::of(&["pods"])).await;
    for verb in [Verb::Watch, Verb::List] {
        let fault = status(403, "Forbidden", "no longer");
        front.sim.set_fault(FaultRule { fault, verb: Some(verb), resource: Some(pods()), requests: usize::MAX });
    }
    front.sim.drop_connections();
    let status = timeout(Duration::from_secs(300), watch.end()).await.expect("the stream ends");
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(node.list(target("pods")).await.is_err(), "not served from memory either");
    front.sim.clear_faults();
    front.sim.create(&pods(), pod("later", "new")).unwrap();
    node.readyz_has("pods synced").await;
    assert_eq!(node.watch_all("pods").await.state, node.truth(PODS).await);
}

/// A kubefan for the cluster and one for a node behind it, each with an account of its own, and a
/// user with another one.
async fn a_user_and_a_node_that_lose_their_rights_lose_only_what_is_theirs() {
    let api = ApiServer::shared().await;
    let namespaces = [api.namespace("front").await, api.namespace("node").await, api.namespace("user").await];
    let mut accounts = Vec::new();
    for namespace in &namespaces {
        let account = ServiceAccount::create(&api, namespace, "kubefan").await;
        account.may_read_pods().await;
        let rules = json!([{ "apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"] }]);
        grant(&api, Some("kube-system"), &format!("{namespace}-identity"), &rules, &account.subject()).await;
        accounts.push(account);
    }
    accounts[0].may_review().await;
    accounts[1].may_review().await;
    let (cert, key) = api.server_certificate();
    let cert = format!("--tls-cert-file={}", cert.display());
    let key = format!("--tls-private-key-file={}", key.display());
    let common = [
        "--resource=pods",
        "--access=authorized-cache-only",
        "tuning.reauthorizeInterval=1s",
        // A refusal from before a right was given must not count as long as the grace.
        "tuning.authorizationWebhookCacheUnauthorizedTtl=1s",
        &cert,
        &key,
    ];
    let front = Kubefan::spawn(&accounts[0].kubeconfig().await, &common).await;
    front.ready().await;
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, accounts[1].token().await).unwrap();
    let upstream = [
        format!("--upstream=https://{}", front.grpc_addr),
        format!("--upstream-ca-file={}", api.ca_pem_path().display()),
        format!("--upstream-token-file={}", token.display()),
    ];
    let args = [&common[..], &upstream.each_ref().map(String::as_str)].concat();
    let node = Kubefan::spawn(&accounts[1].kubeconfig().await, &args).await;
    node.ready().await;

    let client = async |token: String| {
        let options =
            ClientOptions { ca_file: Some(api.ca_pem_path()), token: Some(token), ..ClientOptions::default() };
        Client::connect(&format!("https://{}", node.grpc_addr), &options).await.unwrap()
    };
    let all = || Target { resource: "pods".to_owned(), ..Target::default() };
    let mut of_user = client(accounts[2].token().await).await.watch(all(), WatchOptions::default());
    let mut of_admin = client(api.admin_token()).await.watch(all(), WatchOptions::default());
    for watch in [&mut of_user, &mut of_admin] {
        while !matches!(watch.next().await.unwrap().unwrap(), WatchItem::SnapshotEnd { .. }) {}
    }
    let base = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
    api.delete(&format!("{base}/{}-reads", namespaces[2])).await;
    let ended = async { while let Some(Ok(_)) = of_user.next().await {} };
    timeout(wait::SOON, ended).await.expect("the user's watch ends");

    api.delete(&format!("{base}/{}-reads", namespaces[1])).await;
    wait::until("the node to be denied", wait::SOON, || async {
        let (_, text) = node.admin("/readyz?verbose").await?;
        text.contains("denies kubefan pods").then_some(())
    })
    .await;
    let name = format!("{}-reads", namespaces[1]);
    let role = json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name });
    let subjects = json!([accounts[1].subject()]);
    api.create(base, &json!({ "metadata": { "name": name }, "roleRef": role, "subjects": subjects })).await;
    let path = format!("/api/v1/namespaces/{}/pods", namespaces[2]);
    let made = api.create(&path, &objects::pod("after")).await;
    let version = version_of(&made).to_string();
    let arrives = async {
        loop {
            match of_admin.next().await.unwrap().unwrap() {
                WatchItem::Event(event) if event.resource_version == version => return,
                WatchItem::Disconnected { error, .. } => panic!("within the grace no stream ends: {error}"),
                _ => {}
            }
        }
    };
    // The node asks again about twice a minute.
    timeout(3 * wait::SOON, arrives).await.expect("the other watch continues");
}
