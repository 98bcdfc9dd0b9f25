//! The scene of a step: a kubefan, the connection to it, a namespace, and files. Steps share a
//! kubefan if their actions do not disturb it.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpSocket;

use super::{
    report::Names,
    script::{Change, Own, ServerSpec, Shared, Step},
};
use crate::harness::{
    apiserver::{ADMIN, ApiServer, NOBODY, READER},
    kubefan::Kubefan,
    link::Link,
    objects::version_of,
    process::{closed_port, send_signal},
    rbac::grant,
    wait,
};

/// Only these two resources are cached.
const RESOURCES: [&str; 3] = ["--on-demand=false", "--resource=configmaps", "--resource=pods"];
/// Rights and tokens are reviewed often, so that a step need not wait for long.
const REVIEWS: [&str; 5] = [
    "--access=authorized-cache-only",
    "tuning.reauthorizeInterval=1s",
    "tuning.authorizationWebhookCacheAuthorizedTtl=1s",
    "tuning.authorizationWebhookCacheUnauthorizedTtl=1s",
    "tuning.authenticationTokenWebhookCacheTtl=1s",
];
/// A service account whose tokens end with a Secret.
const ACCOUNT: &str = "agent";

/// The apiserver, and the kubefans that steps share.
pub(super) struct World {
    pub(super) api: ApiServer,
    shared: BTreeMap<Shared, Kubefan>,
}

impl World {
    pub(super) fn new(api: ApiServer) -> World {
        World { api, shared: BTreeMap::new() }
    }

    async fn share(&mut self, which: Shared) -> &Kubefan {
        if !self.shared.contains_key(&which) {
            let args = match which {
                Shared::Open => RESOURCES.map(str::to_owned).to_vec(),
                Shared::Secure | Shared::ShortLived => {
                    let (certificate, key) = self.api.server_certificate();
                    let tls = [
                        format!("--tls-cert-file={}", certificate.display()),
                        format!("--tls-private-key-file={}", key.display()),
                    ];
                    let mut args = [&RESOURCES.map(str::to_owned)[..], &REVIEWS.map(str::to_owned), &tls].concat();
                    if which == Shared::ShortLived {
                        args.push("limits.streamAgeMax=2s".to_owned());
                    }
                    args
                }
            };
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            self.shared.insert(which, Kubefan::start(&self.api, &args).await);
        }
        &self.shared[&which]
    }
}

/// The scene of one step.
pub(super) struct Scene<'a> {
    api: &'a ApiServer,
    shared: Option<&'a Kubefan>,
    own: Option<Kubefan>,
    second: Option<Kubefan>,
    own_args: Vec<String>,
    kubeconfig: PathBuf,
    link: Link,
    upstream: Option<Link>,
    resource: String,
    pub(super) names: Names,
    is_secure: bool,
    dir: TempDir,
    /// Every token of the account, by its Secret.
    tokens: BTreeMap<String, String>,
    last_version: u64,
}

impl<'a> Scene<'a> {
    pub(super) async fn start(world: &'a mut World, step: &Step) -> Scene<'a> {
        let namespace = world.api.namespace("step").await;
        let elsewhere = world.api.namespace("elsewhere").await;
        let which = match &step.server {
            ServerSpec::Shared(which) => Some(*which),
            ServerSpec::Own(_) => None,
        };
        if let Some(which) = which {
            world.share(which).await;
        }
        let api = &world.api;
        let shared = which.map(|which| &world.shared[&which]);
        let is_secure = which.is_some_and(|which| which != Shared::Open);
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut own = None;
        let mut second = None;
        let mut upstream = None;
        let mut own_args = Vec::new();
        let mut kubeconfig = api.kubeconfig();
        if let ServerSpec::Own(Own { args, second: has_second, upstream_link }) = &step.server {
            own_args = RESOURCES.iter().map(ToString::to_string).chain(args.iter().cloned()).collect();
            if *upstream_link {
                let link = Link::to(api.addr()).await;
                kubeconfig = api.kubeconfig_to(&format!("https://{}", link.addr));
                upstream = Some(link);
            }
            own = Some(start(&kubeconfig, "127.0.0.1:0", &own_args).await);
            if *has_second {
                second = Some(start(&kubeconfig, "127.0.0.1:0", &own_args).await);
            }
        }
        let server = own.as_ref().or(shared).expect("each step has a kubefan").grpc_addr;
        let link = Link::to(server).await;
        let resource = step.resource.clone();
        let names = Names { namespace, elsewhere };
        let tokens = BTreeMap::new();
        let last_version = 0;
        Scene {
            api,
            shared,
            own,
            second,
            own_args,
            kubeconfig,
            link,
            upstream,
            resource,
            names,
            is_secure,
            dir,
            tokens,
            last_version,
        }
    }

    /// The variables that every step has.
    pub(super) fn variables(&self) -> BTreeMap<String, Value> {
        // Closed while the tests run.
        static UNUSED: LazyLock<(TcpSocket, SocketAddr)> = LazyLock::new(closed_port);
        let scheme = if self.is_secure { "https://" } else { "" };
        let path = |path: &Path| json!(path.to_str().expect("the path is text"));
        let (_, unused) = *UNUSED;
        BTreeMap::from([
            ("$address".to_owned(), json!(format!("{scheme}{}", self.link.addr))),
            ("$host".to_owned(), json!(self.link.addr.to_string())),
            ("$unused_address".to_owned(), json!(unused.to_string())),
            ("$admin_address".to_owned(), json!(self.kubefan().admin_addr.to_string())),
            ("$apiserver".to_owned(), json!(self.api.url())),
            ("$ca".to_owned(), path(&self.api.ca_pem_path())),
            ("$token_file".to_owned(), path(&self.token_file())),
            ("$namespace".to_owned(), json!(self.names.namespace)),
            ("$elsewhere".to_owned(), json!(self.names.elsewhere)),
            ("$token.admin".to_owned(), json!(format!("token-of-{ADMIN}"))),
            ("$token.reader".to_owned(), json!(format!("token-of-{READER}"))),
            ("$token.nobody".to_owned(), json!(format!("token-of-{NOBODY}"))),
        ])
    }

    /// The options of the client that each step has.
    pub(super) fn connect(&self) -> Value {
        if self.is_secure {
            json!({ "as": "client", "address": "$address", "ca_file": "$ca", "token": "$token.admin" })
        } else {
            json!({ "as": "client", "address": "$address" })
        }
    }

    fn kubefan(&self) -> &Kubefan {
        self.own.as_ref().or(self.shared).expect("kubefan runs")
    }

    fn collection(&self, elsewhere: bool) -> String {
        let namespace = if elsewhere { &self.names.elsewhere } else { &self.names.namespace };
        format!("/api/v1/namespaces/{namespace}/{}", self.resource)
    }

    /// Creates an object, and returns its version.
    pub(super) async fn create(&mut self, change: &Change) -> Value {
        let mut object = json!({ "metadata": { "name": change.name, "labels": change.labels } });
        if self.resource == "pods" {
            object["spec"] = json!({ "containers": [{ "name": "main", "image": "pause" }], "nodeName": change.node });
        } else {
            object["data"] = json!(change.data);
        }
        if change.bytes > 0 {
            object["data"] = json!({ "long": "text ".repeat(change.bytes / 5) });
        }
        let made = self.api.create(&self.collection(change.elsewhere), &object).await;
        self.written(&made)
    }

    /// Changes an object, and returns its version.
    pub(super) async fn patch(&mut self, change: &Change) -> Value {
        let path = format!("{}/{}", self.collection(change.elsewhere), change.name);
        let made = match &change.phase {
            Some(phase) => self.api.patch(&format!("{path}/status"), &json!({ "status": { "phase": phase } })).await,
            None => {
                let mut patch = json!({ "metadata": { "labels": change.labels } });
                if self.resource != "pods" {
                    patch["data"] = json!(change.data);
                }
                self.api.patch(&path, &patch).await
            }
        };
        self.written(&made)
    }

    fn written(&mut self, object: &Value) -> Value {
        self.last_version = version_of(object);
        json!(self.last_version.to_string())
    }

    pub(super) async fn delete(&self, name: &str) {
        self.api.delete(&format!("{}/{name}", self.collection(false))).await;
    }

    pub(super) async fn delete_where(&self, labels: &str) {
        self.api.delete(&format!("{}?labelSelector={labels}", self.collection(false))).await;
    }

    /// Lets a user, or the service account `agent`, read the resource in the namespace.
    pub(super) async fn grant(&self, user: &str) {
        let namespace = &self.names.namespace;
        let subject = match user {
            ACCOUNT => json!({ "kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace }),
            user => json!({ "kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io" }),
        };
        let rules = json!([{ "apiGroups": [""], "resources": [self.resource], "verbs": ["get", "list", "watch"] }]);
        grant(self.api, Some(namespace), user, &rules, &subject).await;
    }

    pub(super) async fn revoke(&self, user: &str) {
        let base = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}", self.names.namespace);
        self.api.delete(&format!("{base}/rolebindings/{user}")).await;
        self.api.delete(&format!("{base}/roles/{user}")).await;
    }

    fn token_file(&self) -> PathBuf {
        self.dir.path().join("token")
    }

    pub(super) async fn rotate_token(&mut self, secret: &str) {
        let namespace = &self.names.namespace;
        let base = format!("/api/v1/namespaces/{namespace}");
        if self.tokens.is_empty() {
            self.api.create(&format!("{base}/serviceaccounts"), &json!({ "metadata": { "name": ACCOUNT } })).await;
        }
        self.api.create(&format!("{base}/secrets"), &json!({ "metadata": { "name": secret } })).await;
        let bound = ["--bound-object-kind=Secret", "--bound-object-name", secret];
        let token = self.api.kubectl(&[&["create", "token", ACCOUNT, "-n", namespace][..], &bound].concat()).await;
        // As the kubelet does: the new file replaces the old one.
        let fresh = self.dir.path().join("fresh");
        fs::write(&fresh, &token).unwrap();
        fs::rename(fresh, self.token_file()).unwrap();
        self.tokens.insert(secret.to_owned(), token.trim().to_owned());
    }

    pub(super) async fn end_token(&self, secret: &str) {
        self.api.delete(&format!("/api/v1/namespaces/{}/secrets/{secret}", self.names.namespace)).await;
        let client = self.api.client_with_token(&self.tokens[secret]);
        let url = format!("{}{}", self.api.url(), self.collection(false));
        // The apiserver remembers for ten seconds that it accepted a token.
        wait::until("the token to be refused", wait::SOON * 2, || async {
            (client.get(&url).send().await.unwrap().status() == StatusCode::UNAUTHORIZED).then_some(())
        })
        .await;
    }

    pub(super) fn cut(&self) {
        self.link.cut();
    }

    pub(super) fn mend(&self) {
        self.link.mend();
    }

    pub(super) fn freeze(&self) {
        self.link.freeze();
    }

    pub(super) fn lead_to_second(&self) {
        self.link.lead_to(self.second.as_ref().expect("the step has a second replica").grpc_addr);
    }

    pub(super) fn kill(&mut self) {
        self.own = None;
    }

    /// Starts kubefan again. It has lost its history.
    pub(super) async fn restart(&mut self) {
        let kubefan = start(&self.kubeconfig, "127.0.0.1:0", &self.own_args).await;
        self.link.lead_to(kubefan.grpc_addr);
        self.own = Some(kubefan);
    }

    /// Sends a signal to kubefan.
    pub(super) fn signal(&self, name: &str) {
        send_signal(self.own.as_ref().expect("the step has a kubefan of its own").process.pid(), name);
    }

    pub(super) fn drain(&self) {
        self.own.as_ref().expect("the step has a kubefan of its own").process.terminate();
    }

    /// Ends the watches of the namespace, as `kubefan disconnect` does.
    pub(super) async fn disconnect(&self) {
        let admin = self.kubefan().admin_addr;
        let client = reqwest::Client::new();
        for subscriber in self.subscribers().await {
            let id = subscriber["id"].as_str().expect("a subscriber has an id");
            let answer = client.delete(format!("http://{admin}/subscribers/{id}")).send().await.unwrap();
            assert!(answer.status().is_success(), "{}", answer.status());
        }
    }

    /// Waits until this many watches of the step are sent in an encoding.
    pub(super) async fn served(&self, encoding: &str, count: usize) {
        let what = format!("{count} watches in {encoding}");
        wait::until(&what, wait::SOON, || async {
            let found = self.subscribers().await;
            let ours = found.iter().filter(|it| it["encoding"] == *encoding).count();
            (ours == count && found.len() == count).then_some(())
        })
        .await;
    }

    async fn subscribers(&self) -> Vec<Value> {
        let (_, text) = self.kubefan().admin("/subscribers?limit=1000").await.expect("the admin port answers");
        let all: Value = serde_json::from_str(&text).expect("the answer is JSON");
        let all = all["subscribers"].as_array().unwrap_or_else(|| panic!("no list of subscribers: {all}")).clone();
        all.into_iter().filter(|it| it["namespace"] == self.names.namespace.as_str()).collect()
    }

    /// Cuts kubefan off from the apiserver, and waits until it has noticed.
    pub(super) async fn cut_upstream(&self) {
        self.upstream.as_ref().expect("the step has an upstream link").cut();
        let stale = format!("{} stale", self.resource);
        wait::until("kubefan to notice", wait::SOON, || async {
            let (_, ready) = self.kubefan().admin("/readyz?verbose").await?;
            ready.contains(&stale).then_some(())
        })
        .await;
    }

    /// The apiserver forgets the versions so far, and kubefan reaches it again.
    pub(super) async fn lose_history(&self) {
        self.api.compact_etcd(self.last_version).await;
        self.api.kill9();
        self.api.restart().await;
        self.upstream.as_ref().expect("the step has an upstream link").mend();
    }

    /// Deletes the namespaces: objects of a finished step must not fill later lists.
    pub(super) async fn end(self) {
        for namespace in [&self.names.namespace, &self.names.elsewhere] {
            for resource in ["configmaps", "pods"] {
                let path = format!("/api/v1/namespaces/{namespace}/{resource}");
                let _ = self.api.request(Method::DELETE, &path, None).await;
            }
        }
    }
}

async fn start(kubeconfig: &Path, listen: &str, args: &[String]) -> Kubefan {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let kubefan = Kubefan::spawn_at(kubeconfig, listen, &args).await;
    kubefan.ready().await;
    kubefan
}
