//! `--access=authorized-impersonate`: a caller's answer through kubefan equals its answer straight
//! from the apiserver. kubefan runs as the shipped service account, with the shipped rights.

use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};

use crate::{
    deploy::CLUSTER_PROXY,
    harness::{
        apiserver::{ApiServer, NOBODY, Options},
        kubefan::Kubefan,
        rbac::{ServiceAccount, grant},
        tests,
    },
};

tests! {
    apiserver slow_faults: a_request_that_is_passed_on_is_its_callers_and_strangers_have_none;
}

/// The apiserver, kubefan in front of it, and the token of a service account.
struct World {
    api: ApiServer,
    kubefan: Kubefan,
    namespace: String,
    token: String,
}

impl World {
    async fn start() -> World {
        let api = ApiServer::start(Options::default()).await;
        let kubeconfig = CLUSTER_PROXY.service_account_kubeconfig_with(&api, "impersonation").await;
        let args = ["--resource=pods", "--access=authorized-impersonate", "--on-demand=false", "--anonymous-auth"];
        let kubefan = Kubefan::spawn_over_tls(&api, &kubeconfig, &args).await;
        kubefan.ready().await;
        let namespace = api.namespace("impersonated").await;
        let account = ServiceAccount::create(&api, &namespace, "agent").await;
        let rules = json!([{ "apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"] }]);
        grant(&api, Some(&namespace), "agent", &rules, &account.subject()).await;
        let token = account.token().await;
        World { api, kubefan, namespace, token }
    }

    fn path(&self, resource: &str) -> String {
        format!("/api/v1/namespaces/{}/{resource}", self.namespace)
    }

    fn through(&self) -> String {
        format!("https://{}", self.kubefan.grpc_addr)
    }
}

async fn send(client: &Client, server: &str, method: &Method, path: &str, body: &Value) -> (StatusCode, Value) {
    let mut request = client.request(method.clone(), format!("{server}{path}"));
    if !body.is_null() {
        let patch = *method == Method::PATCH;
        let content = if patch { "application/merge-patch+json" } else { "application/json" };
        request = request.header("content-type", content).body(body.to_string());
    }
    let answer = request.send().await.unwrap();
    let status = answer.status();
    (status, serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or_default())
}

async fn a_request_that_is_passed_on_is_its_callers_and_strangers_have_none() {
    let world = World::start().await;
    requests_are_their_callers(&world).await;
    only_authenticated_callers_are_impersonated(&world).await;
}

async fn requests_are_their_callers(world: &World) {
    let named = |name: &str| json!({ "metadata": { "name": name }, "data": { "a": "b" } });
    let review = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview" });
    let configmap = |name: &str| world.path(&format!("configmaps/{name}"));
    // `NAME` is another one on each way.
    let requests = [
        (Method::POST, world.path("configmaps"), named("NAME"), 201),
        (Method::GET, configmap("NAME"), Value::Null, 200),
        (Method::PATCH, configmap("NAME"), json!({ "data": { "a": "c" } }), 200),
        (Method::GET, format!("{}?labelSelector=none", world.path("configmaps")), Value::Null, 200),
        (Method::DELETE, configmap("NAME"), Value::Null, 200),
        (Method::GET, configmap("missing"), Value::Null, 404),
        (Method::GET, world.path("secrets"), Value::Null, 403),
        (Method::POST, world.path("secrets"), named("NAME"), 403),
        (Method::GET, "/api/v1/configmaps".to_owned(), Value::Null, 403),
        (Method::GET, "/api/v1/nodes/none".to_owned(), Value::Null, 403),
        (Method::GET, "/version".to_owned(), Value::Null, 200),
        (Method::GET, "/apis".to_owned(), Value::Null, 200),
        (Method::POST, "/apis/authentication.k8s.io/v1/selfsubjectreviews".to_owned(), review, 201),
    ];
    let clients = [world.api.client_with_token(&world.token), world.api.client_as(NOBODY), world.api.client()];
    for (index, client) in clients.iter().enumerate() {
        for (method, path, body, expected) in &requests {
            let mut answers = Vec::new();
            for (server, name) in [(world.api.url().to_owned(), "straight"), (world.through(), "through")] {
                let path = path.replace("NAME", name);
                let body = serde_json::from_str(&body.to_string().replace("NAME", name)).unwrap();
                let (status, mut answer) = send(client, &server, method, &path, &body).await;
                // Fields that differ between any two requests.
                for field in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
                    answer["metadata"].as_object_mut().and_then(|metadata| metadata.remove(field));
                }
                answer["details"].as_object_mut().and_then(|details| details.remove("uid"));
                answers.push((status, answer.to_string().replace(name, "NAME")));
            }
            assert_eq!(answers[0], answers[1], "{index}: {method} {path}");
            assert!(index > 0 || answers[0].0 == *expected, "{method} {path}: {answers:?}");
        }
    }
}

async fn only_authenticated_callers_are_impersonated(world: &World) {
    let url = format!("{}{}", world.through(), world.path("configmaps"));
    let ca = reqwest::Certificate::from_pem(&std::fs::read(world.api.ca_pem_path()).unwrap()).unwrap();
    let stranger = Client::builder().tls_certs_only([ca]).no_proxy().build().unwrap();
    let refused = async |request: reqwest::RequestBuilder| {
        let answer = request.send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    };
    for client in [stranger, world.api.client_with_token("no-such-token")] {
        // Every user may read the version.
        for url in [&url, &format!("{}/version", world.through())] {
            let (status, text) = refused(client.get(url)).await;
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{url}: {text}");
        }
    }
    for header in ["Impersonate-User", "Impersonate-Group", "Impersonate-Uid", "Impersonate-Extra-Scopes"] {
        for method in [Method::GET, Method::POST] {
            let request = world.api.client().request(method, &url).header(header, "system:masters");
            let (status, text) = refused(request).await;
            assert!(
                status == StatusCode::FORBIDDEN && text.contains("--access=authorized-impersonate"),
                "{header}: {text}"
            );
        }
    }
    let count = |reason: &str| format!("kubefan_passthrough_refused_total{{reason=\"{reason}\"}}");
    assert_eq!(world.kubefan.metric(&count("identity")).await, Some(4.0));
    assert_eq!(world.kubefan.metric(&count("impersonation")).await, Some(8.0));
    // Headers by which a front proxy would name a user mean nothing.
    let request =
        world.api.client_with_token(&world.token).get(format!("{}{}", world.through(), world.path("secrets")));
    let request = request.header("x-remote-user", "admin").header("x-remote-group", "system:masters");
    let (status, text) = refused(request).await;
    assert!(status == StatusCode::FORBIDDEN && text.contains(":agent"), "{text}");
}
