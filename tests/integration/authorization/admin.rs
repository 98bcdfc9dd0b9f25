//! The admin port: who sees what it tells of the cluster, and what it tells an operator.

use std::process::Command;

use reqwest::{Client, RequestBuilder, StatusCode};
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
    apiserver full: the_admin_port_shows_details_to_callers_with_the_right_to_the_path,
        a_browser_sees_the_status_page_with_the_operators_token, an_operator_learns_why_a_caller_is_denied,
        a_certificate_is_checked_against_the_name_that_is_given;
}

/// A kubefan whose admin port authorizes its callers, beside the one of the world, whose port does
/// not.
struct AdminPort {
    world: World,
    kubefan: Kubefan,
    /// The token of an operator, who may read every path.
    token: String,
}

impl AdminPort {
    async fn start() -> AdminPort {
        let world = World::start(ApiServer::shared().await, &[]).await;
        let args = [
            "--resource=pods,configmaps",
            "--admin-authorization",
            "--authorization-webhook-cache-unauthorized-ttl=1s",
        ];
        let operator = ServiceAccount::create(&world.api, &world.own, "operator").await;
        let paths = ["/", "/metrics", "/can-i", "/status", "/subscribers"];
        let rules = json!([{ "nonResourceURLs": paths, "verbs": ["get"] }]);
        grant(&world.api, None, &format!("{}-operator", world.own), &rules, &operator.subject()).await;
        let token = operator.token().await;
        let kubefan = Kubefan::spawn_over_tls(&world.api, &world.api.kubeconfig(), &args).await;
        let port = AdminPort { world, kubefan, token };
        wait::until("readiness", wait::SOON, || async {
            (port.ask(&port.world.client(Anonymous), "/readyz").await.0 == StatusCode::OK).then_some(())
        })
        .await;
        port
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.kubefan.admin_addr)
    }

    fn operator(&self) -> Client {
        self.world.api.client_with_token(&self.token)
    }

    async fn ask(&self, client: &Client, path: &str) -> (StatusCode, String) {
        answer(client.get(self.url(path))).await
    }

    /// The flags of commands that read the port.
    fn flags(&self) -> [String; 2] {
        [format!("--admin={}", self.url("")), format!("--ca-file={}", self.world.api.ca_pem_path().display())]
    }
}

async fn answer(request: RequestBuilder) -> (StatusCode, String) {
    let answer = request.send().await.unwrap();
    (answer.status(), answer.text().await.unwrap())
}

async fn the_admin_port_shows_details_to_callers_with_the_right_to_the_path() {
    let port = AdminPort::start().await;
    let (world, operator) = (&port.world, port.operator());
    wait::until("the CAs of clients", wait::SOON, || async {
        (port.ask(&world.client(Cert), "/metrics").await.0 == StatusCode::FORBIDDEN).then_some(())
    })
    .await;
    let can_i = format!("/can-i?verb=list&resource=pods&user={NOBODY}");
    for path in ["/", "/metrics", &can_i, "/status", "/subscribers"] {
        for (who, expected) in [
            (Anonymous, StatusCode::UNAUTHORIZED),
            (Invalid, StatusCode::UNAUTHORIZED),
            (Stranger, StatusCode::FORBIDDEN),
            (Lister, StatusCode::FORBIDDEN),
            (Cert, StatusCode::FORBIDDEN),
        ] {
            let (status, text) = port.ask(&world.client(who), path).await;
            assert_eq!(status, expected, "{who:?} {path}: {text}");
            assert!(!text.contains("configmaps") && !text.contains("kubefan_"), "{who:?} {path}: {text}");
        }
        assert_eq!(port.ask(&operator, path).await.0, StatusCode::OK, "{path}");
    }
    // Probes have no credentials.
    for path in ["/livez", "/healthz", "/readyz"] {
        assert_eq!(port.ask(&world.client(Anonymous), path).await, (StatusCode::OK, "ok".to_owned()), "{path}");
    }
    for who in [Anonymous, Stranger, Lister] {
        let (status, text) = port.ask(&world.client(who), "/readyz?verbose").await;
        assert!(status == StatusCode::OK && !text.contains("configmaps"), "{who:?}: {text}");
    }
    for path in ["/readyz?verbose", "/status"] {
        assert!(port.ask(&operator, path).await.1.contains("configmaps"), "{path}");
    }
    // Who sees a stream need not have the right to end it.
    let end = async || answer(operator.delete(port.url("/subscribers/00000000"))).await;
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
    let as_admin = answer(operator.get(port.url("/metrics")).header("impersonate-user", "admin")).await;
    assert_eq!(as_admin.0, StatusCode::FORBIDDEN);
    let plain = reqwest::get(format!("http://{}/metrics", port.kubefan.admin_addr)).await.unwrap();
    assert_eq!(plain.status(), StatusCode::BAD_REQUEST, "a client without TLS reads why");

    // Without authorization of its own, a port shows no details to anyone.
    let open = async |path: &str| world.kubefan.admin(path).await.unwrap();
    for path in ["/", &can_i, "/status", "/subscribers"] {
        let (status, text) = open(path).await;
        assert!(status == StatusCode::FORBIDDEN && text.contains("--admin-authorization"), "{path}: {text}");
    }
    for path in ["/metrics", "/livez", "/readyz"] {
        assert_eq!(open(path).await.0, StatusCode::OK, "{path}");
    }
}

/// As through a port-forward, where the address is not a name of the certificate.
async fn a_certificate_is_checked_against_the_name_that_is_given() {
    let port = AdminPort::start().await;
    let ([admin, ca], kubefan) = (port.flags(), &port.kubefan);
    let server = format!("--server=https://{}", kubefan.grpc_addr);
    let commands: [(&[&str], &str, &str); 2] = [
        (&["subscribers", &admin], "answers 401", "--ca-file names the CA"),
        (&["get", "pods", &server], "(Unauthorized)", "certificate"),
    ];
    for (command, reached, refused) in commands {
        let ask = async |name| run(&[command, &[&*ca, "--tls-server-name", name]].concat()).await;
        let known = ask("localhost").await;
        assert!(known.stderr.contains(reached), "it was reached, without a token: {known:?}");
        let other = ask("kubefan.example").await;
        assert!(other.code == Some(1) && other.stderr.contains(refused), "{other:?}");
    }
    let plaintext = kubefan.admin_addr.to_string();
    let wrong: [(&[&str], &str); 3] = [
        (&["--admin=127.0.0.1:7444", "--tls-server-name=localhost"], "write https://"),
        (&["--admin=127.0.0.1"], "error: --admin 127.0.0.1: it has no port, as in 127.0.0.1:7444\n"),
        (&["--admin", &plaintext], &format!("--admin https://{plaintext}")),
    ];
    for (flags, says) in wrong {
        let ran = run(&[&["subscribers"], flags].concat()).await;
        assert!(ran.stderr.contains(says), "{flags:?}: {ran:?}");
    }
}

/// A browser has no token: `kubefan status-page` adds it, for pages of its own address alone.
async fn a_browser_sees_the_status_page_with_the_operators_token() {
    let port = AdminPort::start().await;
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command.args(["status-page", "--port=0", "--token", &port.token]).args(port.flags());
    let _page = Process::spawn_apart("kubefan status-page", &mut command, dir.path());
    let address = wait::until("the address of the page", wait::SOON, || async {
        let printed = std::fs::read_to_string(dir.path().join("stdout")).ok()?;
        Some(printed.split_once(' ')?.0.to_owned())
    })
    .await;
    let client = Client::new();
    let (status, page) = answer(client.get(&address)).await;
    assert!(status == StatusCode::OK && page.starts_with("<!"), "{status}: {page}");
    let (status, state) = answer(client.get(format!("{address}status"))).await;
    assert!(status == StatusCode::OK && state.contains("\"pods\""), "{status}: {state}");
    let (status, why) = answer(client.get(&address).header("host", "evil.example")).await;
    assert!(status == StatusCode::FORBIDDEN && why.contains(&address), "{status}: {why}");
    let delete = client.delete(format!("{address}subscribers/1"));
    assert_eq!(answer(delete).await.0, StatusCode::METHOD_NOT_ALLOWED);
    let elsewhere = client.get(format!("{address}/evil.example/"));
    assert_eq!(answer(elsewhere).await.0, StatusCode::BAD_GATEWAY);
    let no_token = run(&["status-page", "--port=0", &port.flags()[0]]).await;
    assert!(no_token.code == Some(1) && no_token.stdout.is_empty(), "{no_token:?}");
}

async fn an_operator_learns_why_a_caller_is_denied() {
    let port = AdminPort::start().await;
    let (world, [admin, ca]) = (&port.world, port.flags());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, &port.token).unwrap();
    let token = format!("--token-file={}", file.display());
    let ask = async |args: &[&str]| run(&[&["auth", "can-i"], args, &[&*admin, &ca, &token]].concat()).await;
    let account = |name: &str| format!("--as=system:serviceaccount:{}:{name}", world.own);
    let namespace = format!("--namespace={}", world.own);
    let yes = ask(&["list", "po", "-A", &account("lister")]).await;
    assert!(yes.code == Some(0) && yes.stdout.starts_with("yes - RBAC: allowed by ClusterRoleBinding"), "{yes:?}");
    let part = ask(&["watch", "pods", &namespace, &account("own")]).await;
    assert_eq!(part.code, Some(0), "{part:?}");
    let asked: Vec<_> = part.stdout.lines().skip(2).map(|line| line.split("  ").next().unwrap()).collect();
    assert_eq!(asked, ["watch pods -A".to_owned(), format!("watch pods -n {}", world.own)], "{part:?}");
    let no = ask(&["get", "configmap/two", &namespace, &account("named")]).await;
    assert!(no.code == Some(1) && no.stdout.starts_with("no"), "{no:?}");
    assert!(no.stdout.contains(&format!("get configmaps two -n {}", world.own)), "{no:?}");
    let again = ask(&["list", "po", "-A", &account("lister")]).await;
    let last = again.stdout.lines().last().unwrap();
    let cells: Vec<_> = last.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(cells[..3], ["list pods -A", "yes", "yes"], "{again:?}");
    let quiet = ask(&["get", "configmap/two", &namespace, &account("named"), "-q"]).await;
    assert_eq!((quiet.code, &*quiet.stdout, &*quiet.stderr), (Some(1), "", ""));
    // As the data port decides.
    let client = world.client(Who::Named);
    let base = format!("https://{}/api/v1/namespaces/{}/configmaps", port.kubefan.grpc_addr, world.own);
    for (name, expected) in [("one", Some(0)), ("two", Some(1))] {
        let ran = ask(&["get", &format!("configmaps/{name}"), &namespace, &account("named")]).await;
        assert_eq!(ran.code, expected, "{ran:?}");
        let status = answer(client.get(format!("{base}/{name}?resourceVersion=0"))).await.0;
        assert_eq!(status == StatusCode::OK, expected == Some(0), "{name}: {status}");
    }
    let undetermined = run(&["auth", "can-i", "list", "pods", "--as=x", &admin, &ca]).await;
    assert!(undetermined.code == Some(2) && undetermined.stderr.contains(" answers 401: "), "{undetermined:?}");
    let denied = port.ask(&world.client(Own), "/can-i?verb=list").await;
    assert_eq!(denied.0, StatusCode::FORBIDDEN, "before anything else is looked at");
    let (_, text) = port.ask(&port.operator(), "/can-i?verb=list&resource=pods&user=x").await;
    let verdict: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(verdict["allowed"], false, "{verdict}");
}
