//! kubectl. Its human-readable output uses Tables: those of the cached resources come from kubefan,
//! and all others from upstream. JSON output, watches and writes use the other paths.

use std::{fs, process::Command};

use serde_json::json;

use super::{Both, SMALL_LISTS, Server, assert_equal};
use crate::harness::{
    apiserver::ApiServer,
    assets,
    kubefan::Kubefan,
    objects::pod,
    process::{Process, closed_port},
    simulated::kubeconfig,
    tests, wait,
};

tests! {
    apiserver slow_programs: kubectl_reads_are_the_same_through_kubefan,
        kubectl_writes_are_the_same_and_visible_to_its_next_read, kubectl_watches_are_the_same_through_kubefan,
        kubectl_reports_an_outage_as_soon_as_straight;
}

/// Commands that read. They follow `-n NAMESPACE`, and the namespace does not change meanwhile.
const READS: &[&str] = &[
    "get pods",
    "get pods -o wide",
    "get pods -o json",
    "get pods --show-labels",
    "get pods -A --field-selector=metadata.namespace=NAMESPACE",
    "get pods --chunk-size=2",
    "get pods --chunk-size=2 -o json",
    "get pods -l stage=on",
    "get pods -l app!=web-1,stage -o json",
    "get pods --field-selector=spec.nodeName=node-1 -o name",
    "get pods --show-managed-fields -o json",
    "get pod web-0",
    "get pod web-0 web-2 -o json",
    "get pod/web-0 configmap/settings",
    "get all",
    "get widgets",
    "get widgets -o json",
    "get widgets one -o yaml",
    "get events -o json",
    "get namespace NAMESPACE -o json",
    "describe pod web-0",
    "describe pods",
    "describe widgets one",
    "describe namespace NAMESPACE",
    "explain pods.spec.nodeName",
    "api-resources --api-group=apps",
    "version",
    "auth can-i list pods",
    "auth whoami",
    "get --raw /api/v1/namespaces/NAMESPACE/pods/web-0",
    "get --raw /readyz",
    "wait --for=jsonpath={.metadata.name}=web-0 pod/web-0 --timeout=60s",
    "wait --for=delete pod/nothing --timeout=60s",
    "get pods nothing --ignore-not-found",
];

/// Commands that read and fail.
const FAILURES: &[&str] = &[
    "get pod nothing",
    "get pods nothing web-0",
    "get nonsense",
    "get pods --field-selector=nonsense=1",
    "get pods --field-selector=nonsense=1 -o json",
    "get pods -l a=(",
    "get --raw /api/v1/namespaces/NAMESPACE/pods/nothing",
    "get --raw /api/v1/pods?resourceVersion=x",
    "describe pod nothing",
    "logs web-0",
    "exec web-0 -- true",
    "wait --for=condition=Ready pod/web-0 --timeout=5s",
];

/// Commands that each run executes in its own namespace. `+FILE` becomes `-f` and the path of that
/// file.
const WRITES: &[&str] = &[
    "apply +pod-1",
    "get pods -l step=1 -o name",
    "get pod new -o jsonpath={.metadata.labels}",
    "apply +pod-1",
    "apply +pod-2",
    "get pods -l step=2 -o name",
    "get pods -l step=1 -o name",
    "apply --server-side --force-conflicts +pod-1",
    "create +pod-1",
    "label pod new extra=yes",
    "label pod new extra=no",
    "get pods -l extra=yes -o name",
    "annotate pod new note=kept",
    "patch pod new --type=json -p=[{\"op\":\"remove\",\"path\":\"/metadata/labels/extra\"}]",
    "get pods -l extra -o name",
    "set image pod/new main=registry.k8s.io/pause:3.9",
    "get pod new -o jsonpath={.spec.containers[0].image}",
    "apply +bad",
    "apply --validate=false +bad",
    "create configmap settings --from-literal=a=1",
    "get configmap settings -o jsonpath={.data}",
    "create configmap settings --from-literal=a=1",
    "apply --dry-run=server +pod-2",
    "create +deployment",
    "scale deployment web --replicas=3",
    "get deployment web -o jsonpath={.spec.replicas}",
    "delete deployment web --wait=false",
    "delete pod new",
    "get pod new",
    "delete pod new",
    "delete configmaps --all",
    "get configmaps -o name",
];

/// Whether the cache has sent something of pods in an encoding, by this metric.
async fn has_sent(both: &Both, metric: &str, media: &str) -> bool {
    let (_, lines) = both.metric(metric).await;
    let labels = [format!("media=\"{media}\""), "resource=\"pods\"".to_owned()];
    lines.lines().any(|line| labels.iter().all(|label| line.contains(label)) && !line.ends_with(" 0"))
}

async fn kubectl_reads_are_the_same_through_kubefan() {
    let args = [SMALL_LISTS, "tuning.passthroughUpgrades", "--cache-tables", "--resource=pods,configmaps"];
    let both = Both::start(ApiServer::shared().await, &args).await;
    let api = &both.api;
    let group = format!("{}.example.com", api.unique("kubectl"));
    api.create_crd(&group, "widgets", "Widget").await;
    let namespace = api.namespace("kubectl-reads").await;
    for number in 0..5 {
        let name = format!("web-{number}");
        let mut pod = pod(&name);
        pod["metadata"]["labels"]["stage"] = json!(["on", "off"][number % 2]);
        pod["spec"]["nodeName"] = json!(["node-1", "node-2"][number % 2]);
        api.create(&format!("/api/v1/namespaces/{namespace}/pods"), &pod).await;
    }
    let settings = json!({ "metadata": { "name": "settings" }, "data": { "text": "<b>&\u{2028}ü\n\"" } });
    api.create(&format!("/api/v1/namespaces/{namespace}/configmaps"), &settings).await;
    let widget = json!({
        "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": "one" }, "spec": { "z": 1.0, "a": "<&>" },
    });
    api.create(&format!("/apis/{group}/v1/namespaces/{namespace}/widgets"), &widget).await;
    let event = json!({
        "metadata": { "name": "seen" }, "reason": "Seen", "message": "m", "type": "Normal",
        "involvedObject": { "kind": "Pod", "namespace": namespace, "name": "web-0" },
    });
    api.create(&format!("/api/v1/namespaces/{namespace}/events"), &event).await;
    for (commands, outcome) in [(READS, "succeeded"), (FAILURES, "failed")] {
        for command in commands {
            // Other tests have widgets too.
            let command = command.replace("NAMESPACE", &namespace).replace("widgets", &format!("widgets.{group}"));
            let args: Vec<_> = command.split(' ').collect();
            let [direct, kubefan] = &both.servers;
            let direct = run(api, direct, &namespace, &args).await;
            assert_eq!(direct[0], outcome, "kubectl {command}: {direct:?}");
            assert_equal(&format!("kubectl {command}"), &direct, &run(api, kubefan, &namespace, &args).await);
        }
    }
    for media in ["table", "json"] {
        assert!(has_sent(&both, "kubefan_snapshot_objects_sent_total", media).await, "no {media} from the cache");
    }
    api.delete_crd(&group, "widgets").await;
}

async fn kubectl_writes_are_the_same_and_visible_to_its_next_read() {
    let args = ["--resource", "pods,configmaps,deployments.apps", SMALL_LISTS];
    let both = Both::start(ApiServer::shared().await, &args).await;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let pod = |step: &str| {
        let mut pod = pod("new");
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        pod["metadata"]["labels"]["step"] = json!(step);
        pod
    };
    let mut bad = pod("1");
    bad["spec"]["containers"][0]["nonsense"] = json!(true);
    bad["spec"]["restartPolicy"] = json!("Sometimes");
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "web" },
        "spec": {
            "selector": { "matchLabels": { "app": "web" } },
            "template": { "metadata": { "labels": { "app": "web" } }, "spec": pod("1")["spec"] },
        },
    });
    for (name, object) in [("pod-1", pod("1")), ("pod-2", pod("2")), ("bad", bad), ("deployment", deployment)] {
        fs::write(dir.path().join(name), object.to_string()).unwrap();
    }
    let mut sides = Vec::new();
    for server in &both.servers {
        let namespace = both.api.namespace("kubectl-writes").await;
        let mut printed = Vec::new();
        for write in WRITES {
            let mut args = Vec::new();
            for arg in write.split(' ') {
                match arg.strip_prefix('+') {
                    Some(file) => args.extend(["-f".to_owned(), dir.path().join(file).display().to_string()]),
                    None => args.push(arg.to_owned()),
                }
            }
            let args: Vec<_> = args.iter().map(String::as_str).collect();
            let lines = run(&both.api, server, &namespace, &args).await.into_iter();
            printed.push(format!("$ kubectl {write}"));
            printed.extend(lines.map(|line| line.replace(&namespace, "NAMESPACE")));
        }
        sides.push(printed);
    }
    assert_equal("kubectl's output", &sides[0], &sides[1]);
    both.assert_lists_were_cached().await;
    // The reads above would also be equal if both saw nothing.
    let after = |command: &str| sides[1].iter().skip_while(|line| **line != format!("$ kubectl {command}")).nth(2);
    assert_eq!(after("get pods -l step=1 -o name").map(String::as_str), Some("pod/new"));
    assert_eq!(after("get pods -l step=2 -o name").map(String::as_str), Some("pod/new"));
}

/// Watches that start from the same state and end in the same state.
const WATCHES: &[&str] = &[
    "get pods -w",
    "get pods -w -o wide",
    "get pods -w -o name",
    "get pods -w -o json",
    "get pods -w --output-watch-events",
    "get pods -w --output-watch-events -o jsonpath={.type}:{.object.metadata.name}:{.object.metadata.resourceVersion}:",
    "get pods -w -l stage=on",
    "get pods -w -l stage=on -o json",
    "get pods -w --field-selector=status.phase=Running",
    "get pods -w --field-selector=status.phase=Running -o json",
];

/// Commands that end by themselves when the pods reach the state, or immediately if they have
/// already.
const WAITS: &[&str] = &[
    "wait --for=condition=Ready pod/first --timeout=120s",
    "wait --for=jsonpath={.status.phase}=Running pod/doomed --timeout=120s",
    "wait --for=create pod/closing --timeout=120s",
];

async fn kubectl_watches_are_the_same_through_kubefan() {
    let both = Both::start(ApiServer::shared().await, &["--resource", "pods", "--cache-tables"]).await;
    let api = &both.api;
    let namespace = api.namespace("kubectl-watches").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let path = |name: &str| format!("{pods}/{name}");
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for name in ["first", "doomed"] {
        api.create(&pods, &pod(name)).await;
    }
    set_running(api, &path("first")).await;
    let start = |command: &'static &str| {
        let spawn = |server: &Server| {
            let mut kubectl = Command::new(&assets::get().expect("kubectl was found before").kubectl);
            kubectl.args(["-n", &namespace, "--kubeconfig"]).arg(&server.kubeconfig);
            kubectl.arg("--cache-dir").arg(dir.path().join("cache")).args(command.split(' '));
            Process::spawn("kubectl", &mut kubectl, &dir.path().join(api.unique("log")))
        };
        (*command, both.servers.each_ref().map(spawn))
    };
    let mut watches: Vec<_> = WATCHES.iter().map(start).collect();
    // All watches start from the same state. Watches by label match nothing yet; the next change
    // shows that they are active before the changes that they must not miss.
    for (command, processes) in &watches {
        if !command.contains("-l ") {
            printed(processes, "first", 1).await;
        }
    }
    set_stage(api, &path("first"), "on").await;
    for (_, processes) in &watches {
        printed(processes, "first", 1).await;
    }
    let mut waits: Vec<_> = WAITS.iter().map(start).collect();
    set_ready(api, &path("first")).await;
    set_stage(api, &path("doomed"), "on").await;
    set_ready(api, &path("doomed")).await;
    set_running(api, &path("doomed")).await;
    set_stage(api, &path("first"), "off").await;
    let mut closing = pod(CLOSING);
    closing["metadata"]["labels"]["stage"] = json!("on");
    api.create(&pods, &closing).await;
    set_running(api, &path(CLOSING)).await;
    for (command, processes) in &mut waits {
        for process in &mut *processes {
            assert!(process.ended(wait::SOON * 4).await.success(), "kubectl {command}: {}", process.log());
        }
        let [direct, kubefan] = processes.each_ref().map(|process| lines(&process.log()));
        assert_equal(&format!("kubectl {command}"), &direct, &kubefan);
    }
    api.delete(&path("doomed")).await;
    set_ready(api, &path(CLOSING)).await;
    for (command, processes) in &mut watches {
        // The pod is created, becomes Running and becomes Ready. A watch by phase selects it from
        // the second change on. JSON output contains the name twice per event.
        let events = if command.contains("phase=Running") { 2 } else { 3 };
        printed(processes, CLOSING, if command.ends_with("json") { 2 * events } else { events }).await;
        let [direct, kubefan] = processes.each_ref().map(|process| lines(&process.log()));
        assert_equal(&format!("kubectl {command}"), &direct, &kubefan);
    }
    for media in ["table", "json"] {
        assert!(has_sent(&both, "kubefan_deliveries_total", media).await, "no {media} from the cache");
    }
}

/// The name of the pod that changes last.
const CLOSING: &str = "closing";

async fn set_running(api: &ApiServer, path: &str) {
    api.patch(&format!("{path}/status"), &json!({ "status": { "phase": "Running" } })).await;
}

async fn set_ready(api: &ApiServer, path: &str) {
    let conditions = json!([{ "type": "Ready", "status": "True" }]);
    api.patch(&format!("{path}/status"), &json!({ "status": { "conditions": conditions } })).await;
}

async fn set_stage(api: &ApiServer, path: &str, stage: &str) {
    api.patch(path, &json!({ "metadata": { "labels": { "stage": stage } } })).await;
}

/// Waits until both processes have printed a text `times` times.
async fn printed(processes: &[Process; 2], what: &str, times: usize) {
    for process in processes {
        let outcome = wait::try_until(wait::SOON * 2, || {
            let log = process.log();
            // The output must be complete: half an object would differ.
            let whole = log.ends_with(['\n', ':']) && log.matches(what).count() >= times;
            async move { whole.then_some(()) }
        });
        assert!(outcome.await.is_some(), "{what:?} was not printed {times} times:\n{}", process.log());
    }
}

/// Runs a command. The lines are its outcome and its output.
async fn run(api: &ApiServer, server: &Server, namespace: &str, args: &[&str]) -> Vec<String> {
    let args = [&["-n", namespace], args].concat();
    let (ok, stdout, stderr) = api.try_kubectl(&server.kubeconfig, &args).await;
    let mut all = vec![if ok { "succeeded" } else { "failed" }.to_owned()];
    all.extend(lines(&stdout));
    all.extend(lines(&stderr));
    all
}

/// Output lines with ages masked and columns separated by one space, because ages change their
/// width.
fn lines(printed: &str) -> Vec<String> {
    let word = |word| if is_age(word) { "AGE" } else { word };
    printed.lines().map(|line| line.split_whitespace().map(word).collect::<Vec<_>>().join(" ")).collect()
}

/// Whether a word is an age such as `3m20s`.
fn is_age(word: &str) -> bool {
    let mut parts = word.split_inclusive(['s', 'm', 'h', 'd']).peekable();
    let is_part = |part: &str| {
        let number = part.strip_suffix(['s', 'm', 'h', 'd']).unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    parts.peek().is_some() && parts.all(is_part)
}

/// kubectl asks five times which API groups there are. If the answers asked for retries, it would
/// ask fifty times, over a minute.
async fn kubectl_reports_an_outage_as_soon_as_straight() {
    const ASKED: usize = 5;
    let dir = tempfile::tempdir().unwrap();
    let (_closed, address) = closed_port();
    let server = format!("http://{address}");
    let kubefan = Kubefan::spawn(&kubeconfig(&dir, &server, "{}"), &["--resource=pods"]).await;
    let get = async |server: &str| {
        let mut kubectl = tokio::process::Command::new(&assets::get().expect("kubectl is there").kubectl);
        kubectl.args(["--server", server, "--cache-dir"]).arg(dir.path().join("cache")).args(["get", "pods"]);
        let output = kubectl.kill_on_drop(true).output().await.expect("kubectl starts");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let asked = |text: &str| text.matches("couldn't get current server API group list").count();
    let straight = get(&server).await;
    assert_eq!(asked(&straight), ASKED, "{straight}");
    let through = get(&format!("http://{}", kubefan.grpc_addr)).await;
    let warning = through.lines().next().unwrap_or_default();
    assert!(
        warning.starts_with(&format!("Warning: cannot reach the apiserver at {server}: Connection refused")),
        "{through}"
    );
    assert_eq!(asked(&through), ASKED, "{through}");
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    let requests = format!("kubefan_passthrough_requests_total{{code=\"error\",verb=\"get\"}} {ASKED}\n");
    assert!(metrics.contains(&requests), "{metrics}");
}
