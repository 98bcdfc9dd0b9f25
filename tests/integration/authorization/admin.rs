//! The admin port: the callers that may see its view of the cluster, and its answers to an
//! operator.

use std::process::Command;

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::{
    identities::Who::{self, Anonymous, Cert, Invalid, Lister, Own, Stranger},
    world::World,
};
use crate::harness::{
    apiserver::{ApiServer, NOBODY},
    kubefan::{Kubefan, run},
    process::Process,
    rbac::{ServiceAccount, grant},
    tests, wait,
};

tests! {
    apiserver slow_faults: the_admin_port_shows_details_to_callers_with_the_right_to_the_path,
        without_authorization_of_its_own_the_admin_port_shows_no_details,
        a_browser_sees_the_status_page_with_the_operators_token, an_operator_learns_why_a_caller_is_denied,
        a_certificate_is_checked_against_the_name_that_is_given;
}

/// A kubefan whose admin port authorizes its callers, with a service account that may use it.
async fn authorized(world: &World) -> (Kubefan, String) {
    let (cert, key) = world.api.server_certificate();
    let args = [
        "--resource=pods,configmaps",
        "--admin-authorization",
        "tuning.authorizationWebhookCacheUnauthorizedTtl=1s",
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
    ];
    let operator = ServiceAccount::create(&world.api, &world.own, "operator").await;
    let rules =
        json!([{ "nonResourceURLs": ["/", "/metrics", "/can-i", "/status", "/subscribers"], "verbs": ["get"] }]);
    grant(&world.api, None, &format!("{}-operator", world.own), &rules, &operator.subject()).await;
    (Kubefan::spawn_as_given(&world.api.kubeconfig(), &args).await, operator.token().await)
}

async fn the_admin_port_shows_details_to_callers_with_the_right_to_the_path() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let (kubefan, token) = authorized(&world).await;
    let url = |path: &str| format!("https://{}{path}", kubefan.admin_addr);
    let ask = |client: reqwest::Client, path: &str| {
        let request = client.get(url(path));
        async move {
            let answer = request.send().await.unwrap();
            (answer.status(), answer.text().await.unwrap())
        }
    };
    let anonymous = world.client(Anonymous);
    let operator = world.api.client_with_token(&token);
    wait::until("readiness", wait::SOON, || async {
        (ask(anonymous.clone(), "/readyz").await.0 == StatusCode::OK).then_some(())
    })
    .await;
    wait::until("the CAs of clients", wait::SOON, || async {
        (ask(world.client(Cert), "/metrics").await.0 == StatusCode::FORBIDDEN).then_some(())
    })
    .await;
    let can_i = format!("/can-i?verb=list&resource=pods&user={}", NOBODY);
    for path in ["/", "/metrics", &can_i, "/status", "/subscribers"] {
        for (who, expected) in [
            (Anonymous, StatusCode::UNAUTHORIZED),
            (Invalid, StatusCode::UNAUTHORIZED),
            (Stranger, StatusCode::FORBIDDEN),
            (Lister, StatusCode::FORBIDDEN),
            (Cert, StatusCode::FORBIDDEN),
        ] {
            let (status, text) = ask(world.client(who), path).await;
            assert_eq!(status, expected, "{who:?} {path}: {text}");
            assert!(!text.contains("configmaps") && !text.contains("kubefan_"), "{who:?} {path}: {text}");
        }
        wait::until(&format!("the operator to see {path}"), wait::SOON, || async {
            (ask(operator.clone(), path).await.0 == StatusCode::OK).then_some(())
        })
        .await;
    }
    // Probes have no credentials.
    for path in ["/livez", "/healthz", "/readyz"] {
        assert_eq!(ask(anonymous.clone(), path).await, (StatusCode::OK, "ok".to_owned()), "{path}");
    }
    for who in [Anonymous, Stranger, Lister] {
        let (status, text) = ask(world.client(who), "/readyz?verbose").await;
        assert!(status == StatusCode::OK && !text.contains("configmaps"), "{who:?}: {text}");
    }
    assert!(ask(operator.clone(), "/readyz?verbose").await.1.contains("configmaps"));
    assert!(ask(operator.clone(), "/status").await.1.contains("configmaps"));
    // The right to see a stream does not include the right to end it.
    let end = async || {
        let answer = operator.delete(url("/subscribers/00000000")).send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    };
    let (status, text) = end().await;
    assert!(status == StatusCode::FORBIDDEN && text.contains("cannot delete path"), "{status} {text}");
    let account = json!({ "kind": "ServiceAccount", "name": "operator", "namespace": world.own });
    let rules = json!([{ "nonResourceURLs": ["/subscribers/*"], "verbs": ["delete"] }]);
    grant(&world.api, None, &format!("{}-steers", world.own), &rules, &account).await;
    wait::until("the right to end streams", wait::SOON, async || {
        let (status, text) = end().await;
        (status == StatusCode::NOT_FOUND && text.contains("there is no subscriber")).then_some(())
    })
    .await;
    let as_admin = operator.get(url("/metrics")).header("impersonate-user", "admin").send().await.unwrap();
    assert_eq!(as_admin.status(), StatusCode::FORBIDDEN);
    let plain = reqwest::get(format!("http://{}/metrics", kubefan.admin_addr)).await.unwrap();
    assert_eq!(plain.status(), StatusCode::BAD_REQUEST, "a client without TLS reads why");
}

async fn without_authorization_of_its_own_the_admin_port_shows_no_details() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let answer = async |path: &str| world.kubefan.admin(path).await.unwrap();
    for path in ["/", "/can-i?verb=list&resource=pods&user=x", "/status", "/subscribers"] {
        let (status, text) = answer(path).await;
        assert!(status == StatusCode::FORBIDDEN && text.contains("--admin-authorization"), "{path}: {text}");
    }
    for path in ["/metrics", "/livez", "/readyz"] {
        assert_eq!(answer(path).await.0, StatusCode::OK, "{path}");
    }
}

/// As through a port-forward, where the address is not a name of the certificate.
async fn a_certificate_is_checked_against_the_name_that_is_given() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let (kubefan, _) = authorized(&world).await;
    let admin = format!("--admin=https://{}", kubefan.admin_addr);
    let ca = world.api.ca_pem_path();
    let ca = format!("--ca-file={}", ca.display());
    let ask = async |name| run(&["subscribers", &admin, &ca, "--tls-server-name", name]).await;
    let known = ask("localhost").await;
    assert!(known.stderr.contains("answers 401"), "it was reached, without a token: {known:?}");
    let other = ask("kubefan.example").await;
    assert!(other.code == Some(1) && other.stderr.contains("--ca-file names the CA"), "{other:?}");
    let plain = run(&["subscribers", "--admin=127.0.0.1:7444", "--tls-server-name=localhost"]).await;
    assert!(plain.stderr.contains("write https://"), "{plain:?}");
    let server = format!("--server=https://{}", kubefan.grpc_addr);
    let read = async |name| run(&["get", "pods", &server, &ca, "--tls-server-name", name]).await;
    let known = read("localhost").await;
    assert!(known.stderr.contains("(Unauthorized)"), "it was reached, without a token: {known:?}");
    let other = read("kubefan.example").await;
    assert!(other.code == Some(1) && other.stderr.contains("certificate"), "{other:?}");
    let no_port = run(&["subscribers", "--admin=127.0.0.1"]).await;
    assert_eq!(no_port.stderr, "error: --admin 127.0.0.1: it has no port, as in 127.0.0.1:7444\n");
    let plaintext = run(&["subscribers", "--admin", &kubefan.admin_addr.to_string()]).await;
    assert!(plaintext.stderr.contains(&format!("--admin https://{}", kubefan.admin_addr)), "{plaintext:?}");
}

/// A browser has no token: `kubefan status-page` adds it, for pages of its own address alone.
async fn a_browser_sees_the_status_page_with_the_operators_token() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let (kubefan, token) = authorized(&world).await;
    let url = format!("https://{}/readyz", kubefan.admin_addr);
    let operator = world.api.client_with_token(&token);
    wait::until("readiness", wait::SOON, || async {
        (operator.get(&url).send().await.ok()?.status() == StatusCode::OK).then_some(())
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command.args(["status-page", "--port=0", "--token", &token]);
    command.arg(format!("--admin=https://{}", kubefan.admin_addr));
    command.arg(format!("--ca-file={}", world.api.ca_pem_path().display()));
    let _page = Process::spawn_apart("kubefan status-page", &mut command, dir.path());
    let address = wait::until("the address of the page", wait::SOON, || async {
        let printed = std::fs::read_to_string(dir.path().join("stdout")).ok()?;
        Some(printed.split_once(' ')?.0.to_owned())
    })
    .await;
    let client = reqwest::Client::new();
    let ask = async |request: reqwest::RequestBuilder| {
        let answer = request.send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    };
    let (status, page) = ask(client.get(&address)).await;
    assert!(status == StatusCode::OK && page.starts_with("<!"), "{status}: {page}");
    let (status, state) = ask(client.get(format!("{address}status"))).await;
    assert!(status == StatusCode::OK && state.contains("\"pods\""), "{status}: {state}");
    let (status, why) = ask(client.get(&address).header("host", "evil.example")).await;
    assert!(status == StatusCode::FORBIDDEN && why.contains(&address), "{status}: {why}");
    let delete = client.delete(format!("{address}subscribers/1"));
    assert_eq!(ask(delete).await.0, StatusCode::METHOD_NOT_ALLOWED);
    let elsewhere = format!("{}/evil.example/", address);
    assert_eq!(ask(client.get(elsewhere)).await.0, StatusCode::BAD_GATEWAY);
    let no_token = run(&["status-page", "--port=0", "--admin", &format!("https://{}", kubefan.admin_addr)]).await;
    assert!(no_token.code == Some(1) && no_token.stdout.is_empty(), "{no_token:?}");
}

async fn an_operator_learns_why_a_caller_is_denied() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let (kubefan, token) = authorized(&world).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, &token).unwrap();
    let connection = [
        format!("--admin=https://{}", kubefan.admin_addr),
        format!("--ca-file={}", world.api.ca_pem_path().display()),
        format!("--token-file={}", file.display()),
    ];
    let ask = |args: &[&str]| {
        let args: Vec<String> = ["auth", "can-i"].iter().chain(args).map(ToString::to_string).collect();
        let args = [args, connection.to_vec()].concat();
        async move { run(&args.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    let account = |name: &str| format!("--as=system:serviceaccount:{}:{name}", world.own);
    let namespace = format!("--namespace={}", world.own);
    // Until the apiserver's authorizer has read the role of the operator.
    let yes = wait::until("the operator to be answered", wait::SOON, || async {
        let ran = ask(&["list", "po", "-A", &account("lister")]).await;
        (ran.code != Some(2)).then_some(ran)
    })
    .await;
    assert!(yes.code == Some(0) && yes.stdout.starts_with("yes - RBAC: allowed by ClusterRoleBinding"), "{yes:?}");
    let part = ask(&["watch", "pods", &namespace, &account("own")]).await;
    assert_eq!(part.code, Some(0), "{part:?}");
    let asked: Vec<_> = part.stdout.lines().skip(2).map(|line| line.split("  ").next().unwrap()).collect();
    assert_eq!(asked, ["watch pods -A".to_owned(), format!("watch pods -n {}", world.own)], "{part:?}");
    let no = ask(&["get", "configmap/two", &namespace, &account("named")]).await;
    assert!(no.code == Some(1) && no.stdout.starts_with("no"), "{no:?}");
    assert!(no.stdout.contains(&format!("get configmaps two -n {}", world.own)), "{no:?}");
    let again = ask(&["list", "po", "-A", &account("lister")]).await;
    let cells: Vec<_> = again.stdout.lines().last().unwrap().split("  ").filter(|cell| !cell.is_empty()).collect();
    assert_eq!(
        cells[..3].iter().map(|cell| cell.trim()).collect::<Vec<_>>(),
        ["list pods -A", "yes", "yes"],
        "{again:?}"
    );
    let quiet = ask(&["get", "configmap/two", &namespace, &account("named"), "-q"]).await;
    assert_eq!((quiet.code, &*quiet.stdout, &*quiet.stderr), (Some(1), "", ""));
    // As the data port decides.
    let client = world.client(Who::Named);
    let base = format!("https://{}/api/v1/namespaces/{}/configmaps", kubefan.grpc_addr, world.own);
    for (name, expected) in [("one", Some(0)), ("two", Some(1))] {
        let ran = ask(&["get", &format!("configmaps/{name}"), &namespace, &account("named")]).await;
        assert_eq!(ran.code, expected, "{ran:?}");
        let status = client.get(format!("{base}/{name}?resourceVersion=0")).send().await.unwrap().status();
        assert_eq!(status == StatusCode::OK, expected == Some(0), "{name}: {status}");
    }
    let undetermined = run(&["auth", "can-i", "list", "pods", "--as=x", &connection[0], &connection[1]]).await;
    assert!(undetermined.code == Some(2) && undetermined.stderr.contains(" answers 401: "), "{undetermined:?}");
    let answer = world.api.client_with_token(world.token(Own).unwrap());
    let answer = answer.get(format!("https://{}/can-i?verb=list", kubefan.admin_addr)).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::FORBIDDEN, "before anything else is looked at");
    let answer = world.api.client_with_token(&token);
    let url = format!("https://{}/can-i?verb=list&resource=pods&user=x", kubefan.admin_addr);
    let answer: Value = serde_json::from_str(&answer.get(url).send().await.unwrap().text().await.unwrap()).unwrap();
    assert_eq!(answer["allowed"], false, "{answer}");
}
