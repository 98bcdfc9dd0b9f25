//! Rebalancing over TLS, of callers whose rights the apiserver reviews.
//!
//! The other replica does not know a moved caller. While the apiserver is away, no replica could
//! ask who it is, so nothing may move.

use std::{sync::atomic::Ordering, time::Duration};

use kubefan_client::{Client, ClientOptions};
use serde_json::json;
use tokio::{sync::watch, task::JoinSet, time::Instant};

use super::{
    BACK_AT_MOST, By, EVEN, FINISHED_AT_MOST, OPEN_AT_MOST, Setup, Writer,
    findings::{Differences, differences},
    largest,
    replicas::{Release, Replicas},
    service::Balancer,
    subscribers,
};
use crate::harness::{
    apiserver::ApiServer,
    link::Link,
    rbac::{ServiceAccount, grant},
    wait,
};

/// The log line of a replica that may move nothing.
const STOPS: &str = "rebalancing stops";
const SUBSCRIBERS: usize = 40;
const WRITES_PER_SECOND: u32 = 20;
/// Writes in the time in which the replicas compare themselves at least twice.
const WRITES_IN_TWO_ROUNDS: usize = 6 * WRITES_PER_SECOND as usize;

pub(super) async fn nothing_moves_while_callers_cannot_be_authorized() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("rollout").await;
    // An administrator would need no review.
    let account = ServiceAccount::create(&api, &namespace, "reader").await;
    let rules = json!([{ "apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"] }]);
    grant(&api, Some(&namespace), "reader", &rules, &account.subject()).await;
    let link = Link::to(api.addr()).await;
    let (certificate, key) = api.server_certificate();
    let flags = vec![
        format!("--tls-cert-file={}", certificate.display()),
        format!("--tls-private-key-file={}", key.display()),
        "--access=authorized-cache-only".to_owned(),
        "tuning.reauthorizeInterval=2s".to_owned(),
        "tuning.authenticationTokenWebhookCacheTtl=1s".to_owned(),
        "tuning.authorizationWebhookCacheAuthorizedTtl=1s".to_owned(),
    ];
    let setup = Setup {
        by: By::Balancer,
        namespace: namespace.clone(),
        kubeconfig: api.kubeconfig_to(&format!("https://{}", link.addr)),
        flags,
        rebalance_percent: 10,
        withdrawn_after: Duration::ZERO,
    };
    let mut replicas = Replicas::new(setup, 2).await;
    replicas.start(0, &Release::This).await;
    let balancer = Balancer::to(replicas.endpoints.clone()).await;

    let (end, ended) = watch::channel(u64::MAX);
    let test =
        subscribers::Test { namespace: namespace.clone(), start: Instant::now(), open: Default::default(), end: ended };
    let truth = tokio::spawn(subscribers::http(api.client(), api.url().to_owned(), test.clone(), u64::MAX));
    let address = format!("https://{}", balancer.addr);
    let options = ClientOptions {
        ca_file: Some(api.ca_pem_path()),
        token: Some(account.token().await),
        ..ClientOptions::default()
    };
    let mut histories = JoinSet::new();
    for _ in 0..SUBSCRIBERS {
        let client = Client::connect_lazy(&address, &options).await.expect("the address is valid");
        histories.spawn(subscribers::grpc(client, test.clone()));
    }
    let open = test.open.clone();
    wait::until("the subscribers to have the state", OPEN_AT_MOST, || async {
        (open.load(Ordering::Relaxed) == 1 + SUBSCRIBERS).then_some(())
    })
    .await;
    let writer = Writer::begin(&api, &namespace, 5, WRITES_PER_SECOND, test.start);

    replicas.start(1, &Release::This).await;
    replicas.says("rebalancing begins").await;
    // It may have stopped for a moment before.
    let stopped = replicas.logs().matches(STOPS).count();
    link.cut();
    let stops = || async { (replicas.logs().matches(STOPS).count() > stopped).then_some(()) };
    wait::until("rebalancing to stop", OPEN_AT_MOST, stops).await;
    let moved = replicas.moved().await;
    let written = writer.written.lock().unwrap().len();
    wait::until("writes during the outage", OPEN_AT_MOST, || async {
        (writer.written.lock().unwrap().len() >= written + WRITES_IN_TWO_ROUNDS).then_some(())
    })
    .await;
    assert_eq!(replicas.moved().await, moved, "watches moved while the apiserver was away");

    link.mend();
    let is_even = wait::try_until(BACK_AT_MOST, || async {
        let watches = replicas.watches().await;
        let is_even = watches.iter().sum::<f64>() == SUBSCRIBERS as f64 && largest(&watches) <= EVEN;
        is_even.then_some(watches)
    })
    .await;
    let Some(watches) = is_even else {
        panic!("the replicas do not even out: {:?}\n{}", replicas.watches().await, replicas.logs());
    };
    println!("moved before the outage {moved:?}, at the end {:?}; watches {watches:?}", replicas.moved().await);

    assert_eq!(replicas.refused_peers().await, [0.0, 0.0], "replicas are no strangers to each other and to themselves");

    let (last, _) = writer.end().await;
    end.send_replace(last);
    let finished = tokio::time::timeout(FINISHED_AT_MOST, async {
        (histories.join_all().await, truth.await.expect("the apiserver's watch"))
    });
    let Ok((histories, truth)) = finished.await else {
        panic!("not all subscribers have the last event:\n{}", replicas.logs());
    };
    let changes: Vec<_> = truth.events.iter().map(|(change, _)| *change).collect();
    assert_eq!(differences(&changes, &histories, last), Differences::default());
    assert!(histories.iter().all(|history| history.restarts == 0), "all resume exactly");
}
