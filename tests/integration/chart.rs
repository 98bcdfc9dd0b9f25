//! The Helm chart in `deploy/helm`: apiservers accept every form and variant of it (`accepted`),
//! its schema and its templates refuse wrong values by name, the real kubefan runs with the flags
//! and the role that it renders, and nothing that applies it again touches the objects that kubefan
//! has written. `deploy/overlays` is rendered from it.

use std::path::Path;

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{
    apiserver::{ApiServer, Options},
    assets,
    helm::{self, CHART, named, objects},
    kubefan::Kubefan,
    servers::is_cached,
    tests,
};

pub(crate) mod accepted;
pub(crate) mod rendered;
pub(crate) mod wrong_values;

tests! {
    apiserver slow_deploy: helm_lint_finds_nothing, nothing_that_applies_the_chart_again_touches_what_kubefan_wrote,
        kubefan_runs_with_the_flags_and_the_role_of_three_lists, a_node_reads_through_the_cluster_form,
        no_variant_is_insecure_or_gives_a_pod_the_key_of_the_ca, the_policy_admits_pods_and_the_networks_of_the_nodes,
        the_policy_lets_kubefan_connect_to_what_the_values_name, a_changed_setting_restarts_pods_if_it_must,
        modes_do_not_cut_off_the_pods_of_the_nodes, a_node_without_a_network_of_pods_reads_from_the_apiserver;
    apiserver large: kubefan_runs_with_the_newest_release;
}

/// A variant: its name, and the flags of helm.
type Variant = (&'static str, &'static [&'static str]);

const VARIANTS: &[Variant] = &[
    ("the cluster form", &[]),
    ("the node form", &["--set=node.enabled=true"]),
    ("the node form for older servers", &["--set=node.enabled=true,node.sameNode=InternalTrafficPolicy"]),
    ("a socket on the host", &["--set=node.enabled=true,node.hostSocket.enabled=true"]),
    ("nodes without a network", &[BOOTSTRAP]),
    (
        "nodes without a network, in front of the cluster form",
        &[
            BOOTSTRAP,
            "--set=node.bootstrap.upstream=10.0.0.9:7443,node.bootstrap.port=17443,node.bootstrap.adminPort=17444",
            "--set-json=node.bootstrap.hostAliases=[{\"ip\":\"10.0.0.1\",\"hostnames\":[\"kubernetes\"]}]",
        ],
    ),
    ("two namespaces", &["--set=namespaces={chart-a,chart-b}", "--set-json=resources=[{\"name\":\"pods\"}]"]),
    (
        "two namespaces without ClusterRoles",
        &["--set=namespaces={chart-a,chart-b},rbac.clusterScoped=false", "--set-json=resources=[{\"name\":\"pods\"}]"],
    ),
    ("a given certificate", &["--set=tls.source=existingSecret,tls.existingSecret=given,peers.existingSecret=peers"]),
    (
        "cert-manager and trust-manager",
        &[
            "--set=tls.source=certManager,tls.certManager.issuerRef.name=ca",
            "--set=tls.certManager.peersIssuerRef.name=peers",
            "--set=tls.certManager.bundle.enabled=true,tls.certManager.bundle.secretName=ca",
        ],
    ),
    ("the CA in other namespaces", &["--set=caBundle.namespaces={chart-a,chart-b}"]),
    (
        "autoscaling and placement",
        &[
            "--set=cluster.autoscaling.enabled=true,cluster.priorityClassName=system-cluster-critical",
            "--set-json=cluster.tolerations=[{\"operator\":\"Exists\"}]",
            "--set-json=cluster.affinity={\"nodeAffinity\":{}}",
            "--set=cluster.nodeSelector.disk=ssd",
            "--set=cluster.topologySpread.zone=DoNotSchedule,cluster.topologySpread.host=",
        ],
    ),
    (
        "limits of the network",
        &[
            "--set=networkPolicy.egress.apiserverCIDRs={10.0.0.1/32}",
            "--set-json=networkPolicy.adminFrom=[{\"namespaceSelector\":{\"matchLabels\":{\"team\":\"a\"}}}]",
            "--set-json=networkPolicy.from=[]",
            "--set-json=networkPolicy.egress.otlp=[{\"namespaceSelector\":{\"matchLabels\":{\"team\":\"b\"}}}]",
            "--set-json=networkPolicy.egress.proxy=[{\"ipBlock\":{\"cidr\":\"10.9.0.1/32\"}}]",
            "--set-json=networkPolicy.egress.upstream=[{\"podSelector\":{}}]",
        ],
    ),
    (
        "saved states",
        &[
            "--set=node.enabled=true,cluster.state.enabled=true,node.state.enabled=true,node.state.keySecret=key",
            "--set=cluster.replicas=1,cluster.state.volume.persistentVolumeClaim.claimName=kubefan",
        ],
    ),
    ("a priority level of its own", &["--set=flowSchema.enabled=true,flowSchema.priorityLevel="]),
    ("an existing priority level", &["--set=flowSchema.enabled=true,node.enabled=true"]),
    (
        "monitoring",
        &[
            "--set=monitoring.serviceMonitor.enabled=true,monitoring.prometheusRule.enabled=true",
            "--set=monitoring.dashboard.enabled=true,admin.authorization=true",
        ],
    ),
    (
        "a configuration file and further flags",
        &[
            "--set=config.limits.subscribersMax=100,config.tuning.cacheCompression=zstd,extraArgs={--max-staleness=5m},access=authorized-impersonate",
            "--set=drainTimeout=20s,connectionAgeMax=2h,tls.minVersion=VersionTLS13,commonLabels.team=a",
            "--set=image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "--set=imagePullSecrets[0].name=registry",
        ],
    ),
];

/// The node form for clients that bring the network.
const BOOTSTRAP: &str =
    "--set=node.enabled=true,node.bootstrap.enabled=true,node.bootstrap.k8sServiceHost=apiserver.example.com";

/// The CAs of the cluster's client certificates.
const CLIENT_CAS: &str = "configmaps/extension-apiserver-authentication";

/// A temporary file for kubectl.
fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

pub(crate) async fn apply(api: &ApiServer, text: &str, args: &[&str]) -> String {
    let file = file(text);
    api.kubectl(&[&["apply", "-f", file.path().to_str().unwrap()], args].concat()).await
}

async fn helm_lint_finds_nothing() {
    for (what, args) in VARIANTS {
        let printed = helm::helm(None, &[&["lint", "--strict", CHART], *args].concat()).await;
        assert!(printed.contains("0 chart(s) failed") && !printed.contains("[WARNING]"), "{what}: {printed}");
    }
}

/// The containers of a workload; none of another object.
pub(crate) fn containers(object: &Value) -> Vec<&Value> {
    let pod = &object["spec"]["template"]["spec"];
    ["initContainers", "containers"].into_iter().filter_map(|list| pod[list].as_array()).flatten().collect()
}

/// As an operator does it: install, upgrade, roll back, uninstall. In between kubefan has filled
/// the Secret and the ConfigMap, and other tools apply the same manifests.
async fn nothing_that_applies_the_chart_again_touches_what_kubefan_wrote() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("chart").await;
    let kubeconfig = api.kubeconfig();
    let run = async |args: &[&str]| helm::helm(Some(&kubeconfig), &[args, &["--namespace", &namespace]].concat()).await;
    let notes = run(&["install", &namespace, CHART]).await;
    let name = format!("{namespace}-kubefan");
    assert!(notes.contains(&format!("rollout status deployment/{name}")), "{notes}");

    let secret = format!("/api/v1/namespaces/{namespace}/secrets/{name}-tls");
    let ca = format!("/api/v1/namespaces/{namespace}/configmaps/kubefan-ca");
    assert_eq!(api.get_json(&secret).await["data"], Value::Null);
    let data = json!({ "ca.crt": "Y2E=", "ca.key": "a2V5", "tls.crt": "Y2VydA==", "tls.key": "a2V5" });
    api.patch(&secret, &json!({ "data": data })).await;
    api.patch(&ca, &json!({ "data": { "ca.crt": "ca" } })).await;
    let untouched = async |after: &str| {
        assert_eq!(api.get_json(&secret).await["data"], data, "after {after}");
        assert_eq!(api.get_json(&ca).await["data"], json!({ "ca.crt": "ca" }), "after {after}");
    };

    run(&["upgrade", &namespace, CHART, "--reset-then-reuse-values", "--set=cluster.replicas=3,commonLabels.team=a"])
        .await;
    let deployment = format!("/apis/apps/v1/namespaces/{namespace}/deployments/{name}");
    assert_eq!(api.get_json(&deployment).await["spec"]["replicas"], 3);
    assert_eq!(api.get_json(&secret).await["metadata"]["labels"]["team"], "a");
    untouched("helm upgrade").await;
    run(&["rollback", &namespace, "1"]).await;
    assert_eq!(api.get_json(&deployment).await["spec"]["replicas"], 2);
    untouched("helm rollback").await;
    let text = helm::template(&namespace, &namespace, &["--set=commonLabels.team=b"]).await;
    apply(&api, &text, &[]).await;
    untouched("kubectl apply, as of kustomize").await;
    apply(&api, &text, &["--server-side", "--force-conflicts", "--field-manager=argocd-controller"]).await;
    assert_eq!(api.get_json(&secret).await["metadata"]["labels"]["team"], "b");
    untouched("a server-side apply").await;
    // Argo CD and Flux make this comparison: a difference would be the drift.
    let file = file(&text);
    let args = ["diff", "--server-side", "--force-conflicts", "--field-manager=argocd-controller", "-f"];
    let (equal, difference, _) =
        api.try_kubectl(&kubeconfig, &[&args[..], &[file.path().to_str().unwrap()]].concat()).await;
    assert!(equal, "{difference}");

    run(&["uninstall", &namespace]).await;
    for path in [&secret, &ca, &deployment, &format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{name}")] {
        assert_eq!(api.request(Method::GET, path, None).await.0, StatusCode::NOT_FOUND, "{path}");
    }
}

/// The flags of kubefan in a workload, without those that a test sets: see [`flags_of`].
pub(crate) fn flags(workload: &Value, rendered: &[Value], dir: &Path) -> Vec<String> {
    let args: Vec<String> = serde_json::from_value(containers(workload)[0]["args"].clone()).unwrap();
    let volumes = workload["spec"]["template"]["spec"]["volumes"].as_array().unwrap();
    let config = volumes.iter().find(|volume| volume["name"] == "config").unwrap()["configMap"]["name"].as_str();
    flags_of(&args, named(rendered, "ConfigMap", config.unwrap())["data"]["config.yaml"].as_str(), dir)
}

/// The flags among a container's arguments, without addresses and kubeconfigs, which a test sets.
/// The configuration file that the pod mounts is written to `dir`, and `--config` names it there.
pub(crate) fn flags_of(args: &[String], config: Option<&str>, dir: &Path) -> Vec<String> {
    assert_eq!(args[0], "serve");
    let is_of_the_pod = |arg: &&String| arg.contains("listen=") || arg.contains("kubeconfig=");
    let here = |arg: &String| match arg.strip_prefix("--config=") {
        None => arg.clone(),
        Some(_) => {
            let file = dir.join("config.yaml");
            std::fs::write(&file, config.expect("no ConfigMap has the configuration file")).unwrap();
            format!("--config={}", file.display())
        }
    };
    args[1..].iter().filter(|arg| !is_of_the_pod(arg)).map(here).collect()
}

/// Starts kubefan with the flags, as a service account. The certificate is one for loopback: the
/// managed one needs the Services' names.
async fn start(api: &ApiServer, kubeconfig: &Path, flags: &[String]) -> Kubefan {
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let kubefan = Kubefan::spawn_over_tls(api, kubeconfig, &flags).await;
    kubefan.ready().await;
    kubefan
}

pub(crate) async fn token(api: &ApiServer, namespace: &str, account: &str) -> String {
    api.kubectl(&["create", "token", account, "-n", namespace]).await.trim().to_owned()
}

async fn kubefan_runs_with_the_flags_and_the_role_of_three_lists() {
    runs_with_the_flags_and_the_role_of_three_lists(&ApiServer::shared().await).await;
}

async fn kubefan_runs_with_the_newest_release() {
    let api = ApiServer::start(Options::default().program(assets::kube_apiserver_newest())).await;
    runs_with_the_flags_and_the_role_of_three_lists(&api).await;
}

async fn runs_with_the_flags_and_the_role_of_three_lists(api: &ApiServer) {
    let pods_and_more = r#"resources=[{"name":"pods","encoding":"json+protobuf"},{"group":"apps","name":"deployments"},
        {"group":"coordination.k8s.io","name":"leases"},{"name":"secrets"}]"#;
    let in_a_namespace = r#"resources=[{"name":"pods"},{"group":"apps","name":"replicasets"}]"#;
    let lists: [(&[&str], &[&str], bool); 3] = [
        (&[], &["namespaces", "nodes", "pods", "services", "endpointslices.discovery.k8s.io"], true),
        (&["--set-json", pods_and_more], &["pods", "deployments.apps", "leases.coordination.k8s.io", "secrets"], true),
        (&["--set-json", in_a_namespace, "--set=rbac.clusterScoped=false"], &["pods", "replicasets.apps"], false),
    ];
    for (args, resources, is_for_the_cluster) in lists {
        let namespace = api.namespace("chart").await;
        let only = format!("--set=namespaces={{{namespace}}}");
        let only: &[&str] = if is_for_the_cluster { &[] } else { &[&only] };
        let text = helm::template(&namespace, &namespace, &[args, only].concat()).await;
        apply(api, &text, &[]).await;
        let name = format!("{namespace}-kubefan");
        let rendered = objects(&text);
        let deployment = named(&rendered, "Deployment", &name);
        let kubeconfig = api.kubeconfig_with_token(&name, &token(api, &namespace, &name).await);
        let dir = tempfile::tempdir().unwrap();
        let kubefan = start(api, &kubeconfig, &flags(deployment, &rendered, dir.path())).await;
        let (_, verbose) = kubefan.admin("/readyz?verbose").await.unwrap();
        for resource in resources {
            assert!(verbose.contains(resource), "{resource}: {verbose}");
        }
        assert!(!verbose.contains("[-]"), "{verbose}");
        assert_eq!(verbose.contains("[+]identity kube-system uid "), is_for_the_cluster, "{verbose}");
        // Not more than that.
        let secret = format!("secrets/{name}-tls");
        for (verb, what, may) in [
            ("list", "configmaps", false),
            ("get", "pods", false),
            ("create", "pods", false),
            ("list", "daemonsets.apps", false),
            ("update", &secret, true),
            ("get", "configmaps/kubefan-ca", true),
            ("create", "secrets", false),
            ("get", CLIENT_CAS, false),
        ] {
            let args = ["auth", "can-i", verb, what, "-n", &namespace];
            assert_eq!(api.try_kubectl(&kubeconfig, &args).await.0, may, "{verb} {what}");
        }
        for (what, may) in [(CLIENT_CAS, is_for_the_cluster), ("configmaps/other", false)] {
            let args = ["auth", "can-i", "get", what, "-n", "kube-system"];
            assert_eq!(api.try_kubectl(&kubeconfig, &args).await.0, may, "{what} in kube-system");
        }
    }
}

/// The kubefan of a node as the chart configures it, in front of one of the cluster form.
async fn a_node_reads_through_the_cluster_form() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("chart").await;
    let text = helm::template(&namespace, &namespace, &["--set=node.enabled=true"]).await;
    apply(&api, &text, &[]).await;
    let name = format!("{namespace}-kubefan");
    let rendered = objects(&text);
    let account = api.kubeconfig_with_token(&name, &token(&api, &namespace, &name).await);
    let dir = tempfile::tempdir().unwrap();
    let deployment = named(&rendered, "Deployment", &name);
    let cluster = start(&api, &account, &flags(deployment, &rendered, dir.path())).await;

    let node = format!("{name}-node");
    let upstream = dir.path().join("kubeconfig");
    std::fs::write(dir.path().join("token"), token(&api, &namespace, &node).await).unwrap();
    std::fs::copy(api.ca_pem_path(), dir.path().join("ca.crt")).unwrap();
    let kubeconfig = named(&rendered, "ConfigMap", &format!("{node}-upstream"))["data"]["kubeconfig"].as_str().unwrap();
    let kubeconfig = kubeconfig
        .replace(&format!("https://{name}-cluster"), &format!("https://{}", cluster.grpc_addr))
        .replace("/etc/kubefan/upstream", dir.path().to_str().unwrap());
    std::fs::write(&upstream, kubeconfig).unwrap();
    let daemon_set = named(&rendered, "DaemonSet", &node);
    let flags: Vec<_> = flags(daemon_set, &rendered, dir.path())
        .iter()
        .map(|flag| flag.replace(&format!("https://{name}-headless:7443"), &format!("https://{}", cluster.grpc_addr)))
        .map(|flag| flag.replace("/etc/kubefan/upstream", dir.path().to_str().unwrap()))
        .collect();
    assert!(flags.iter().any(|flag| flag.starts_with("--upstream=https://127.0.0.1:")), "{flags:?}");
    let kubefan = start(&api, &upstream, &flags).await;

    let url = format!("https://{}/api/v1/namespaces/{namespace}/pods?resourceVersion=0", kubefan.grpc_addr);
    let answer = api.client().get(&url).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(is_cached(&answer), "{answer:?}");
    let stranger = api.client_as(crate::harness::apiserver::NOBODY).get(&url).send().await.unwrap();
    assert_eq!(stranger.status(), StatusCode::FORBIDDEN);
    // The pod gets only the files that it serves with.
    let volumes = daemon_set["spec"]["template"]["spec"]["volumes"].as_array().unwrap();
    let tls = volumes.iter().find(|volume| volume["name"] == "tls").unwrap();
    let keys: Vec<_> =
        tls["secret"]["items"].as_array().unwrap().iter().map(|item| item["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["tls.crt", "tls.key"]);
}

/// The kubefan of a node that network agents read from: nothing that it uses needs them.
async fn a_node_without_a_network_of_pods_reads_from_the_apiserver() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("chart").await;
    let tolerations = r#"--set-json=node.tolerations=[{"key":"gpu","operator":"Exists"}]"#;
    let text = helm::template(&namespace, &namespace, &[BOOTSTRAP, tolerations]).await;
    apply(&api, &text, &[]).await;
    let node = format!("{namespace}-kubefan-node");
    let rendered = objects(&text);
    let daemon_set = named(&rendered, "DaemonSet", &node);
    let pod = &daemon_set["spec"]["template"]["spec"];
    assert_eq!(pod["hostNetwork"], true);
    assert_eq!((&pod["dnsPolicy"], &pod["priorityClassName"]), (&json!("Default"), &json!("system-node-critical")));
    let taints = ["gpu", "node.kubernetes.io/not-ready", "node.kubernetes.io/network-unavailable"];
    assert_eq!(pod["tolerations"], json!(taints.map(|key| json!({ "key": key, "operator": "Exists" }))));
    let container = containers(daemon_set)[0].to_string();
    assert!(container.contains("apiserver.example.com"), "{container}");
    for service in rendered.iter().filter(|object| object["kind"] == "Service") {
        let name = service["metadata"]["name"].as_str().unwrap();
        for address in [format!("https://{name}"), format!("{name}.{namespace}.svc")] {
            assert!(!container.contains(&address), "{address}: {container}");
        }
    }
    let kubeconfig = api.kubeconfig_with_token(&node, &token(&api, &namespace, &node).await);
    let dir = tempfile::tempdir().unwrap();
    let kubefan = start(&api, &kubeconfig, &flags(daemon_set, &rendered, dir.path())).await;
    let (_, verbose) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(verbose.contains("[+]pods synced") && !verbose.contains("[-]"), "{verbose}");
}

/// A kubelet may read the whole Secret of a pod on its node, whichever keys the pod mounts.
async fn the_policy_admits_pods_and_the_networks_of_the_nodes() {
    let clients = async |args: &[&str]| {
        let rendered = objects(&helm::template("kubefan", "kubefan", args).await);
        named(&rendered, "NetworkPolicy", "kubefan")["spec"]["ingress"][0]["from"].clone()
    };
    let pods = json!({ "namespaceSelector": {} });
    assert_eq!(clients(&[]).await, json!([pods]));
    let nodes = json!({ "ipBlock": { "cidr": "10.0.0.0/16" } });
    assert_eq!(clients(&["--set=networkPolicy.nodeCIDRs={10.0.0.0/16}"]).await, json!([pods, nodes]));
    let everyone = clients(&["--set-json=networkPolicy.from=[]", "--set=networkPolicy.nodeCIDRs={10.0.0.0/16}"]).await;
    assert!(everyone.is_null(), "{everyone}");
}

/// A policy with egress cuts off all destinations that it does not name.
async fn the_policy_lets_kubefan_connect_to_what_the_values_name() {
    let rules = async |args: &[&str]| {
        let args = [&["--set=networkPolicy.egress.apiserverCIDRs={10.0.0.1/32}"], args].concat();
        let rendered = objects(&helm::template("kubefan", "kubefan", &args).await);
        let spec = named(&rendered, "NetworkPolicy", "kubefan")["spec"].clone();
        assert_eq!(spec["policyTypes"], json!(["Ingress", "Egress"]));
        spec["egress"].as_array().unwrap().clone()
    };
    // The apiserver, DNS and other pods of kubefan.
    assert_eq!(rules(&[]).await.len(), 3);
    let block = |name: &str| json!({ "ipBlock": { "cidr": format!("10.9.0.{}/32", name.len()) } });
    let names = ["otlp", "proxy", "upstream"];
    let args = names.map(|name| format!("--set-json=networkPolicy.egress.{name}=[{}]", block(name)));
    let uses = [
        "--set=otlp.endpoint=http://c:4317,extraArgs={--upstream=https://k:7443}",
        "--set=extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://p:3128",
    ];
    let all = rules(&[&args.each_ref().map(String::as_str)[..], &uses].concat()).await;
    assert_eq!(all[3..], names.map(|name| json!({ "to": [block(name)] })));
    // Those of releases that had no other place for them.
    let extra = r#"--set-json=networkPolicy.egress.extra=[{"to":[{"namespaceSelector":{}}]}]"#;
    assert_eq!(rules(&[&uses[..], &[extra]].concat()).await.len(), 4);
}

async fn no_variant_is_insecure_or_gives_a_pod_the_key_of_the_ca() {
    for (what, args) in VARIANTS {
        let text = helm::template("kubefan", "kubefan", args).await;
        assert!(!text.contains("insecure") && !text.contains("authorization-mode"), "{what}");
        let rendered = objects(&text);
        for service in rendered.iter().filter(|object| object["kind"] == "Service") {
            for port in service["spec"]["ports"].as_array().unwrap() {
                assert_ne!(port["name"], "grpc", "{what}: service meshes expect plaintext there");
            }
        }
        let variable = |name: &str| {
            let env = containers(named(&rendered, "Deployment", "kubefan"))[0]["env"].as_array().unwrap();
            let found = env.iter().find(|variable| variable["name"] == name)?;
            Some(found["value"].as_str().unwrap().trim_start_matches("$(POD_NAMESPACE)/").to_owned())
        };
        let pods: Vec<_> = rendered.iter().map(|object| object["spec"]["template"]["spec"].to_string()).collect();
        // In a volume or a variable.
        let is_in_a_pod = |secret: &String| pods.iter().any(|pod| pod.contains(&format!("\"{secret}\"")));
        let secret = variable("KUBEFAN_TLS_MANAGED_SECRET");
        assert!(secret.is_none_or(|secret| !is_in_a_pod(&secret)), "{what}");
        let copy = variable("KUBEFAN_TLS_MANAGED_COPIES");
        assert!(copy.iter().all(is_in_a_pod), "{what}");
        let serves_on_nodes = args.iter().any(|arg| arg.contains("node.enabled=true") && !arg.contains("hostSocket"));
        assert_eq!(copy.is_some(), serves_on_nodes, "{what}");
    }
}

/// Pods restart for a setting exactly if a running kubefan would refuse it.
async fn a_changed_setting_restarts_pods_if_it_must() {
    let pods = async |settings: Value| {
        let settings = format!("--set-json=config={settings}");
        let text = helm::template("kubefan", "kubefan", &["--set=node.enabled=true", &settings]).await;
        let rendered = objects(&text);
        [("Deployment", "kubefan"), ("DaemonSet", "kubefan-node")]
            .map(|(kind, name)| named(&rendered, kind, name)["spec"]["template"].clone())
    };
    let before = pods(json!({ "limits": { "ringAgeMax": "5m" } })).await;
    assert_ne!(before, pods(json!({ "limits": { "ringAgeMax": "6m" } })).await);
    for path in kubefan_app::config::reload::LIVE {
        let mut settings = json!({ "limits": { "ringAgeMax": "5m" } });
        match path.strip_prefix("limits.") {
            Some(key) => settings["limits"][key] = json!(7),
            None => {
                settings[path] = match path {
                    "modes" => json!([{ "resources": ["pods"], "mode": "Deny" }]),
                    "resources" => json!(["pods"]),
                    _ => json!("9m"),
                }
            }
        }
        assert_eq!(before, pods(settings).await, "{path}");
    }
}

/// Modes are for readers. The pods of the nodes apply them, and their own caches stay in sync.
async fn modes_do_not_cut_off_the_pods_of_the_nodes() {
    let modes = r#"--set-json=config.modes=[{"resources":["pods"],"mode":"Deny"}]"#;
    let text = helm::template("kubefan", "fleet", &["--set=node.enabled=true", modes]).await;
    let rendered = objects(&text);
    let modes = |name| {
        let file = named(&rendered, "ConfigMap", name)["data"]["config.yaml"].as_str().unwrap().to_owned();
        serde_saphyr::from_str::<Value>(&file).unwrap()["modes"].clone()
    };
    let deny = json!({ "resources": ["pods"], "mode": "Deny" });
    let nodes = json!({ "resources": ["*"], "users": ["system:serviceaccount:fleet:kubefan-node"], "mode": "Cache" });
    assert_eq!(modes("kubefan"), json!([nodes, deny]));
    assert_eq!(modes("kubefan-node"), json!([deny]));
}
