//! The manifests in `deploy/`: the overlays with their components, and the shipped service
//! accounts, which have exactly the rights that the `--resource` flags and the reviews of callers
//! need. `chart` shows that apiservers accept the overlays and their pods.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{
    chart::{accepted::variables_are_defined_before_their_use, flags_of},
    harness::{
        apiserver::ApiServer,
        helm::{named, objects},
        kubefan::Kubefan,
        rbac::settled,
        tests, wait,
    },
};

tests! {
    apiserver slow_deploy: the_apiserver_accepts_the_cluster_proxy_with_its_components,
        the_node_form_takes_a_given_certificate, the_files_for_a_host_are_understood, the_shipped_accounts_have_the_rights_that_kubefan_needs_and_no_others;
    local: no_manifest_serves_everything_to_everyone;
}

/// An overlay of `deploy/overlays`, and the names in it.
pub(crate) struct Overlay {
    dir: &'static str,
    namespace: &'static str,
    service_account: &'static str,
    /// Path of the object whose `spec.template` is kubefan's pod.
    workload: &'static str,
}

/// The overlay for one kubefan deployment per cluster.
pub(crate) const CLUSTER_PROXY: Overlay = Overlay {
    dir: concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/overlays/cluster"),
    namespace: "kubefan",
    service_account: "kubefan",
    workload: "/apis/apps/v1/namespaces/kubefan/deployments/kubefan",
};

/// The overlay for kubefan beside an agent on every node.
pub(crate) const SIDECAR: Overlay = Overlay {
    dir: concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/overlays/sidecar"),
    namespace: "node-agent",
    service_account: "agent",
    workload: "/apis/apps/v1/namespaces/node-agent/daemonsets/agent",
};

impl Overlay {
    async fn make_namespace(&self, api: &ApiServer) {
        let labels = json!({ "pod-security.kubernetes.io/enforce": "restricted" });
        let namespace = json!({ "metadata": { "name": self.namespace, "labels": labels } });
        let body = Some(("application/json", &namespace));
        let (status, answer) = api.request(Method::POST, "/api/v1/namespaces", body).await;
        assert!(status.is_success() || status == StatusCode::CONFLICT, "{answer}");
    }

    /// Creates the namespace as the overlay's comment says, and applies the overlay.
    pub(crate) async fn apply(&self, api: &ApiServer) {
        // kubectl first checks whether an object exists and then creates it, so two runs at the
        // same time could collide.
        static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let _guard = ONE_AT_A_TIME.lock().await;
        self.make_namespace(api).await;
        api.kubectl(&["apply", "-k", self.dir]).await;
    }

    /// A new token of the shipped service account.
    async fn token(&self, api: &ApiServer) -> String {
        let token = api.kubectl(&["create", "token", self.service_account, "-n", self.namespace]).await;
        token.trim().to_owned()
    }

    /// Applies the overlay, and waits until the apiserver applies its roles. Returns a kubeconfig
    /// of its service account, which kubefan uses in a cluster.
    pub(crate) async fn service_account_kubeconfig(&self, api: &ApiServer) -> PathBuf {
        self.apply(api).await;
        settled(api).await;
        api.kubeconfig_with_token(self.service_account, &self.token(api).await)
    }

    /// Like [`Self::service_account_kubeconfig`], with a component of `deploy/components`.
    pub(crate) async fn service_account_kubeconfig_with(&self, api: &ApiServer, component: &str) -> PathBuf {
        self.make_namespace(api).await;
        let dir = kustomization("cluster", &[component]);
        api.kubectl(&["apply", "-k", dir.path().to_str().unwrap()]).await;
        settled(api).await;
        api.kubeconfig_with_token(self.service_account, &self.token(api).await)
    }

    /// kubefan's flags in the applied overlay, without those that a test sets: see [`flags_of`].
    pub(crate) async fn flags(&self, api: &ApiServer, dir: &Path) -> Vec<String> {
        let path = format!("/api/v1/namespaces/{}/configmaps/kubefan", self.namespace);
        let (_, config) = api.request(Method::GET, &path, None).await;
        flags_of(&self.args(api).await, config["data"]["config.yaml"].as_str(), dir)
    }

    /// The arguments of kubefan in the applied overlay.
    pub(crate) async fn args(&self, api: &ApiServer) -> Vec<String> {
        let workload = api.get_json(self.workload).await;
        let pod = &workload["spec"]["template"]["spec"];
        let containers = ["initContainers", "containers"].map(|list| pod[list].as_array().cloned().unwrap_or_default());
        let kubefan = containers.concat().into_iter().find(|container| container["name"] == "kubefan");
        let args = kubefan.expect("no container is named kubefan")["args"].take();
        serde_json::from_value(args).expect("args are not strings")
    }
}

/// A directory with an overlay and components of `deploy/components`.
fn kustomization(overlay: &str, components: &[&str]) -> tempfile::TempDir {
    // kustomize accepts only relative paths.
    let target = concat!(env!("CARGO_MANIFEST_DIR"), "/target");
    std::fs::create_dir_all(target).unwrap();
    let dir = tempfile::tempdir_in(target).unwrap();
    let components = components.iter().map(|name| format!("../../deploy/components/{name}")).collect::<Vec<_>>();
    let text = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n\
         resources: [../../deploy/overlays/{overlay}]\ncomponents: [{}]\n",
        components.join(", ")
    );
    std::fs::write(dir.path().join("kustomization.yaml"), text).unwrap();
    dir
}

async fn the_apiserver_accepts_the_cluster_proxy_with_its_components() {
    let api = ApiServer::shared().await;
    CLUSTER_PROXY.make_namespace(&api).await;
    let dir = kustomization("cluster", &["tls", "peers", "impersonation"]);
    let path = dir.path().to_str().unwrap();
    let applied = api.kubectl(&["apply", "-k", path, "--dry-run=server", "-o", "json"]).await;
    let applied: Value = serde_json::from_str(&applied).unwrap();
    let items = applied["items"].as_array().unwrap();
    let named = |kind: &str, name: &str| named(items, kind, name);
    // Objects that kubefan would fill by itself are not there: nothing replaces those of the
    // operator.
    assert!(!items.iter().any(|item| item["kind"] == "Secret" || item["kind"] == "Role"), "{items:?}");
    let binding = named("RoleBinding", "kubefan-client-cas");
    assert_eq!(binding["metadata"]["namespace"], "kube-system", "{binding}");
    assert_eq!(binding["subjects"][0]["namespace"], "kubefan", "{binding}");
    variables_are_defined_before_their_use("the overlay with its components", items);
    let pod = &named("Deployment", "kubefan")["spec"]["template"]["spec"];
    let secrets: BTreeSet<_> = pod["volumes"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|volume| volume["secret"]["secretName"].as_str())
        .collect();
    assert_eq!(secrets, BTreeSet::from(["kubefan-peers", "kubefan-tls"]));
    assert_eq!(named("ClusterRoleBinding", "kubefan-reviews")["subjects"][0]["namespace"], "kubefan");
    assert_eq!(named("Service", "kubefan")["spec"]["ports"][0]["appProtocol"], "https");
    let help = crate::harness::kubefan::run(&["serve", "--help"]).await;
    let names = pod["containers"][0]["env"].as_array().unwrap().iter().map(|env| env["name"].as_str().unwrap());
    for name in names.filter(|name| *name != "POD_NAMESPACE") {
        let flag = name.strip_prefix("KUBEFAN_").unwrap().to_lowercase().replace('_', "-");
        let shown = [" ", "["].iter().any(|end| help.stdout.contains(&format!("--{flag}{end}")));
        assert!(shown, "{flag}");
    }
    let args: Vec<String> = serde_json::from_value(pod["containers"][0]["args"].clone()).unwrap();
    assert!(args.contains(&"--access=authorized-impersonate".to_owned()), "{args:?}");
    // The certificate files exist only in the pod. Here their absence must be the only error.
    let config = named("ConfigMap", "kubefan")["data"]["config.yaml"].as_str();
    let flags = flags_of(&args, config, dir.path());
    let kubeconfig = format!("--kubeconfig={}", api.kubeconfig().display());
    let args: Vec<&str> = ["serve", &kubeconfig].into_iter().chain(flags.iter().map(String::as_str)).collect();
    let env = pod["containers"][0]["env"].as_array().unwrap().iter();
    let value = |env: &Value| Some(env["value"].as_str()?.replace("$(POD_NAMESPACE)", "kubefan"));
    let env: Vec<_> = env.filter_map(|env| Some((env["name"].as_str()?, value(env)?))).collect();
    assert!(env.iter().any(|(name, _)| *name == "KUBEFAN_TLS_CERT_FILE"), "{env:?}");
    let ran = crate::harness::kubefan::run_with(&args, |command| _ = command.envs(env)).await;
    assert!(ran.stderr.contains("cannot read /etc/kubefan/tls/"), "{ran:?}");
}

async fn the_node_form_takes_a_given_certificate() {
    let api = ApiServer::shared().await;
    let dir = kustomization("node", &["tls"]);
    let rendered = objects(&api.kubectl(&["kustomize", dir.path().to_str().unwrap()]).await);
    assert!(!rendered.iter().any(|object| object["kind"] == "Secret" || object["kind"] == "Role"), "{rendered:?}");
    for (kind, name) in [("Deployment", "kubefan"), ("DaemonSet", "kubefan-node")] {
        let pod = &named(&rendered, kind, name)["spec"]["template"]["spec"];
        let tls = pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == "tls").unwrap();
        assert_eq!(tls["secret"]["secretName"], "kubefan-tls", "{kind}");
        assert!(!pod.to_string().contains("KUBEFAN_TLS_MANAGED"), "{kind}: {pod}");
    }
}

async fn the_files_for_a_host_are_understood() {
    let api = ApiServer::shared().await;
    let path = |file: &str| format!("{}/deploy/host/{file}", env!("CARGO_MANIFEST_DIR"));
    // The files that it names exist on the host alone.
    let ran = crate::harness::kubefan::run(&["check", "--config", &path("config.yaml")]).await;
    assert!(ran.stdout.contains("  ok       flags, environment and file: "), "{ran:?}");
    for (file, count) in [("static-pod.yaml", 1), ("rbac.yaml", 4), ("kubelet-rbac.yaml", 2)] {
        let applied = api.kubectl(&["apply", "--dry-run=server", "--validate=strict", "-f", &path(file)]).await;
        assert_eq!(applied.matches("(server dry run)").count(), count, "{file}: {applied}");
    }
    // kubefan may list and watch what it caches, and no more.
    let text = |file| std::fs::read_to_string(path(file)).unwrap();
    let config: Value = serde_saphyr::from_str(&text("config.yaml")).unwrap();
    let cached = config["resources"].as_array().unwrap().iter().map(|name| name.as_str().unwrap());
    let cached: BTreeSet<String> = cached.map(|name| name.split('=').next().unwrap().to_owned()).collect();
    let roles = objects(&text("rbac.yaml"));
    let rules = named(&roles, "ClusterRole", "kubefan-hosts")["rules"].as_array().unwrap();
    let granted = rules.iter().flat_map(rights_of).filter(|right| right.verb != "get").map(Right::written);
    let wanted = cached.iter().flat_map(|name| ["list", "watch"].map(|verb| (verb.to_owned(), name.clone())));
    assert_eq!(granted.collect::<BTreeSet<_>>(), wanted.collect());
}

async fn no_manifest_serves_everything_to_everyone() {
    let mut dirs = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy"))];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            // It names the flags that are refused.
            if path.ends_with("files/moved.yaml") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(!text.contains("insecure") && !text.contains("authorization-mode"), "{}", path.display());
        }
    }
}

async fn the_shipped_accounts_have_the_rights_that_kubefan_needs_and_no_others() {
    let api = ApiServer::shared().await;
    for overlay in [CLUSTER_PROXY, SIDECAR] {
        let kubeconfig = overlay.service_account_kubeconfig(&api).await;
        let cached: BTreeSet<String> =
            overlay.args(&api).await.iter().filter_map(|flag| resource_of_flag(flag)).collect();
        assert!(cached.contains("pods"), "{cached:?}");

        let may = rights_in(&api, &overlay, "default").await;
        let wanted =
            cached.iter().flat_map(|resource| ["list", "watch"].map(|verb| (verb.to_owned(), resource.clone())));
        let mut wanted: BTreeSet<_> = wanted.collect();
        wanted.insert(("get".to_owned(), "namespaces/kube-system".to_owned()));
        if overlay.dir == CLUSTER_PROXY.dir {
            let reviews = ["tokenreviews.authentication.k8s.io", "subjectaccessreviews.authorization.k8s.io"];
            wanted.extend(reviews.map(|resource| ("create".to_owned(), resource.to_owned())));
        }
        assert_eq!(may, wanted);
        syncs(&api, &overlay, &kubeconfig, &cached).await;
    }
    // In its own namespace it may also fill two objects that it cannot create: a Secret and a
    // ConfigMap.
    let own = rights_in(&api, &CLUSTER_PROXY, CLUSTER_PROXY.namespace).await;
    let elsewhere = rights_in(&api, &CLUSTER_PROXY, "default").await;
    let wanted = ["secrets/kubefan-tls", "configmaps/kubefan-ca"]
        .into_iter()
        .flat_map(|object| ["get", "update"].map(|verb| (verb.to_owned(), object.to_owned())));
    assert_eq!(&own - &elsewhere, wanted.collect());
    // And there the CAs of client certificates.
    let of_system = rights_in(&api, &CLUSTER_PROXY, "kube-system").await;
    let wanted = ["get", "list", "watch"]
        .map(|verb| (verb.to_owned(), "configmaps/extension-apiserver-authentication".to_owned()));
    assert_eq!(&of_system - &elsewhere, BTreeSet::from(wanted));
}

/// With these rights and the shipped flags, kubefan caches all resources and knows its cluster.
async fn syncs(api: &ApiServer, overlay: &Overlay, kubeconfig: &Path, cached: &BTreeSet<String>) {
    let dir = tempfile::tempdir().unwrap();
    let flags = overlay.flags(api, dir.path()).await;
    let flags: Vec<String> = flags.iter().map(|flag| flag.replace("$(NODE_NAME)", "node-1")).collect();
    let kubefan = Kubefan::spawn(kubeconfig, &flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
    kubefan.ready().await;
    // Readiness does not wait for the identity.
    wait::until("the identity, for which the shipped rights are enough", wait::SOON, || async {
        let (_, verbose) = kubefan.admin("/readyz?verbose").await?;
        let has_all = cached.iter().all(|resource| verbose.contains(resource));
        (has_all && verbose.contains("[+]identity kube-system uid ")).then_some(())
    })
    .await;
}

/// Extracts `pods` from `--resource=pods`.
fn resource_of_flag(flag: &str) -> Option<String> {
    flag.strip_prefix("--resource=").map(str::to_owned)
}

/// Returns the rights of the service account in a namespace, beside those of every user.
async fn rights_in(api: &ApiServer, overlay: &Overlay, namespace: &str) -> BTreeSet<(String, String)> {
    let url = format!("{}/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", api.url());
    let review = json!({ "spec": { "namespace": namespace } }).to_string();
    let client = api.client_with_token(&overlay.token(api).await);
    let answer = client.post(url).header("content-type", "application/json").body(review).send().await.unwrap();
    let answer: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
    assert_eq!(answer["status"]["incomplete"], false, "{answer}");
    let rules = answer["status"]["resourceRules"].as_array().unwrap_or_else(|| panic!("{answer}"));
    rules.iter().filter(|rule| !is_of_every_user(rule)).flat_map(rights_of).map(Right::written).collect()
}

/// Whether the rule comes from `system:basic-user`, with which every user may ask about its own
/// rights.
fn is_of_every_user(rule: &Value) -> bool {
    let resources = rule["resources"].as_array().expect("a rule names resources");
    rule["verbs"] == json!(["create"])
        && resources.iter().all(|name| name.as_str().is_some_and(|name| name.starts_with("selfsubject")))
}

/// A verb on a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Right {
    pub(crate) verb: String,
    pub(crate) group: String,
    pub(crate) resource: String,
    /// Empty for all objects.
    pub(crate) name: String,
}

impl Right {
    /// The verb, and the resource as in kubectl, with the object's name if the right is for one.
    fn written(self) -> (String, String) {
        let Right { verb, group, resource, name } = self;
        let resource = if group.is_empty() { resource } else { format!("{resource}.{group}") };
        (verb, if name.is_empty() { resource } else { format!("{resource}/{name}") })
    }
}

/// The single rights of a rule.
pub(crate) fn rights_of(rule: &Value) -> Vec<Right> {
    let words = |field: &str| -> Vec<String> {
        let words = rule[field].as_array().filter(|words| !words.is_empty());
        let words = words.unwrap_or_else(|| panic!("a rule without {field}: {rule}"));
        words.iter().map(|word| word.as_str().expect("a word is text").to_owned()).collect()
    };
    let names = if rule["resourceNames"].is_array() { words("resourceNames") } else { vec![String::new()] };
    let mut rights = Vec::new();
    for verb in words("verbs") {
        for group in words("apiGroups") {
            for resource in words("resources") {
                for name in &names {
                    let verb = verb.clone();
                    let group = group.clone();
                    let resource = resource.clone();
                    rights.push(Right { verb, group, resource, name: name.clone() });
                }
            }
        }
    }
    rights
}
