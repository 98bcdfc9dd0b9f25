//! Wrong values are refused with the name of the value and the mistake.

use crate::harness::{
    helm::{self, CHART},
    tests,
};

tests! {
    apiserver slow_deploy: wrong_values_and_contradictions_are_named;
}

/// Values that the schema refuses.
const WRONG: &[(&str, &str)] = &[
    ("--set=cluster.replicas=two", "at '/cluster/replicas': got string, want integer"),
    ("--set=cluster.replicas=0", "at '/cluster/replicas': minimum: got 0, want 1"),
    ("--set=cluster.replica=3", "at '/cluster': additional properties 'replica' not allowed"),
    ("--set=tls.source=none", "at '/tls/source': value must be one of 'managed', 'certManager', 'existingSecret'"),
    ("--set=image.pullPolicy=always", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ("--set=image.digest=abc", "at '/image/digest': 'abc' does not match pattern '^$|^sha256:"),
    ("--set=image.repository=", "at '/image/repository': minLength: got 0, want 1"),
    ("--set=image.repository=REGISTRY/kubefan", "at '/image/repository': 'REGISTRY/kubefan' does not match pattern"),
    (
        "--set-json=config.modes=[{\"resources\":[\"pods\"],\"mode\":\"Off\"}]",
        "at '/config/modes/0/mode': value must be one of 'Cache', 'Passthrough', 'Deny'",
    ),
    ("--set-json=config.modes=[{\"mode\":\"Deny\"}]", "at '/config/modes/0': missing property 'resources'"),
    (
        "--set-json=config.modes=[{\"resources\":[\"po\"],\"mode\":\"Deny\"}]",
        "at '/config/modes/0/resources/0': 'not' failed",
    ),
    ("--set=drainTimeout=60", "at '/drainTimeout': got number, want string"),
    ("--set=drainTimeout=soon", "at '/drainTimeout': 'soon' does not match pattern '^$|^[0-9]+(s|m|h)$'"),
    ("--set=service.port=99999", "at '/service/port': maximum: got 99,999, want 65,535"),
    ("--set=node.hostSocket.path=run", "at '/node/hostSocket/path': 'run' does not match pattern '^/.+'"),
    (
        "--set=node.bootstrap.k8sServiceHost=https://10.0.0.1",
        "at '/node/bootstrap/k8sServiceHost': 'https://10.0.0.1' does not match pattern",
    ),
    ("--set=node.bootstrap.k8sServiceHost=10.0.0.1:6443", "'10.0.0.1:6443' does not match pattern"),
    ("--set=node.bootstrap.upstream=10.0.0.9", "at '/node/bootstrap/upstream': '10.0.0.9' does not match pattern"),
    (
        "--set=access=local",
        "at '/access': value must be one of 'authorized', 'authorized-cache-only', 'authorized-impersonate'",
    ),
    ("--set=resources=pods", "at '/resources': got string, want array"),
    ("--set=resources[0].kind=Pod", "additional properties 'kind' not allowed"),
    ("--set-json=resources=[]", "at '/resources': minItems: got 0, want 1"),
    ("--set=namespaces={A}", "at '/namespaces/0': 'A' does not match pattern"),
    ("--set=networkPolicy.egress.apiserverCIDRs={10.0.0.1}", "at '/networkPolicy/egress/apiserverCIDRs/0'"),
    ("--set=extraArgs={page-size=5}", "at '/extraArgs/0': 'page-size=5' does not match pattern '^--"),
    ("--set=tls=off", "at '/tls': got string, want object"),
    ("--set=config.limits={a}", "at '/config/limits': got array, want"),
    (
        "--set=node.state.volume.emptyDir=,node.state.volume.hostPath=",
        "at '/node/state/volume': maxProperties: got 2, want 1",
    ),
    ("--set=node.config.tuning=a", "at '/node/config/tuning': got string, want"),
];

/// Values that the templates refuse, as flags of `--set`.
const CONTRADICTIONS: &[(&str, &str)] = &[
    (
        "cluster.state.enabled=true,cluster.state.volume.persistentVolumeClaim.claimName=a",
        "cluster.state.volume.persistentVolumeClaim needs cluster.replicas=1",
    ),
    ("node.enabled=true,cluster.enabled=false", "node.enabled needs cluster.enabled"),
    ("node.enabled=true,resources[0].name=secrets", "resources must not have secrets if node.enabled"),
    ("rbac.clusterScoped=false", "rbac.clusterScoped=false needs namespaces"),
    ("namespaces={a}", "resources has namespaces, which have no namespace"),
    ("tls.source=existingSecret", "tls.source=existingSecret needs tls.existingSecret"),
    ("tls.source=certManager", "tls.source=certManager needs tls.certManager.issuerRef.name"),
    ("tls.certManager.bundle.enabled=true", "tls.certManager.bundle.enabled needs tls.source=certManager"),
    (
        "drainTimeout=1m",
        "cluster.terminationGracePeriodSeconds=60 must be 10 s longer than preStopSeconds (5) and drainTimeout (60s)",
    ),
    ("cluster.autoscaling.enabled=true,cluster.autoscaling.minReplicas=9", "minReplicas=9 is more than maxReplicas=6"),
    ("config.readsMax=5", "config.readsMax is now config.limits.readsMax"),
    ("node.config.pageSize=5", "node.config.pageSize is now node.config.tuning.pageSize"),
    ("extraArgs={--reads-max=5}", "--reads-max of extraArgs is now config.limits.readsMax"),
    (
        "extraEnv[0].name=KUBEFAN_PAGE_SIZE,extraEnv[0].value=5",
        "KUBEFAN_PAGE_SIZE of extraEnv is now config.tuning.pageSize",
    ),
    ("config.kind=Other", "config has kind, which the chart sets"),
    ("node.config.kind=Other", "node.config has kind, which the chart sets"),
    ("node.enabled=true,access=authorized-cache-only", "access=authorized-cache-only needs node.enabled=false"),
    ("passthrough.mode=off", "passthrough.mode is now access: set access=authorized-cache-only, and passthrough=null"),
    ("passthrough=caller", "passthrough is now access: set access=authorized, and passthrough=null"),
    ("config.passthrough=impersonate", "config.passthrough is now the value access: set access=authorized-impersonate"),
    (
        "extraArgs={--passthrough=off}",
        "--passthrough of extraArgs is now the value access: set access=authorized-cache-only",
    ),
    (
        "extraArgs={--insecure}",
        "--insecure of extraArgs is now the value access: \
         set access=authorized, authorized-cache-only or authorized-impersonate",
    ),
    (
        "extraEnv[0].name=KUBEFAN_PASSTHROUGH,extraEnv[0].value=caller",
        "KUBEFAN_PASSTHROUGH of extraEnv is now the value access: set access=authorized",
    ),
    ("config.access=authorized", "config has access: set the value access"),
    ("node.config.access=authorized", "node.config has access: set the value access"),
    ("extraArgs={--access=authorized}", "extraArgs has --access: set the value access"),
    (
        "extraEnv[0].name=KUBEFAN_ACCESS,extraEnv[0].value=authorized",
        "extraEnv has KUBEFAN_ACCESS: set the value access",
    ),
    ("node.enabled=true,rbac.clusterScoped=false,namespaces={a}", "node.enabled needs rbac.clusterScoped"),
    (
        "node.enabled=true,node.hostSocket.enabled=true,admin.authorization=true",
        "admin.authorization needs TLS, which the pods of the nodes do not have",
    ),
    ("node.bootstrap.enabled=true", "node.bootstrap.enabled needs node.enabled"),
    ("node.enabled=true,node.bootstrap.enabled=true", "node.bootstrap.enabled needs node.bootstrap.k8sServiceHost"),
    (
        "node.enabled=true,node.bootstrap.enabled=true,node.bootstrap.k8sServiceHost=kubernetes.default.svc",
        "node.bootstrap.k8sServiceHost=kubernetes.default.svc is the name of a Service",
    ),
    (
        "node.enabled=true,node.bootstrap.enabled=true,node.bootstrap.k8sServiceHost=a,\
         node.bootstrap.upstream=kubefan.kubefan.svc.cluster.local:443",
        "node.bootstrap.upstream=kubefan.kubefan.svc.cluster.local:443 is the name of a Service",
    ),
    (
        "node.enabled=true,node.bootstrap.enabled=true,node.bootstrap.k8sServiceHost=a,access=authorized-impersonate",
        "node.bootstrap.enabled needs access=authorized",
    ),
    (
        "node.enabled=true,node.bootstrap.enabled=true,node.bootstrap.k8sServiceHost=a,node.bootstrap.port=7444",
        "node.bootstrap.port and node.bootstrap.adminPort are both 7444",
    ),
    (
        "node.enabled=true,node.bootstrap.enabled=true,node.bootstrap.k8sServiceHost=a,extraEnv[0].name=KUBECONFIG",
        "extraEnv has KUBECONFIG: with node.bootstrap.enabled",
    ),
    ("node.enabled=true,config.cacheTables=true", "cacheTables is for the cluster form alone"),
    ("node.enabled=true,extraArgs={--cache-tables}", "cacheTables is for the cluster form alone"),
    (
        "networkPolicy.egress.apiserverCIDRs={10.0.0.1/32},otlp.endpoint=http://c:4317",
        "otlp.endpoint is cut off by networkPolicy.egress.apiserverCIDRs: say in networkPolicy.egress.otlp",
    ),
    (
        "networkPolicy.egress.apiserverCIDRs={10.0.0.1/32},extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://p:3128",
        "HTTPS_PROXY of extraEnv is cut off by networkPolicy.egress.apiserverCIDRs: say in networkPolicy.egress.proxy",
    ),
    (
        "networkPolicy.egress.apiserverCIDRs={10.0.0.1/32},extraArgs={--upstream=https://k:7443}",
        "--upstream of extraArgs is cut off by networkPolicy.egress.apiserverCIDRs: say in networkPolicy.egress.upstream",
    ),
    ("networkPolicy.egress.apiserverCIDRs={10.0.0.1/32},config.upstream=https://k:7443", "config.upstream is cut off"),
    ("extraArgs={--listen=:80}", "extraArgs has --listen=:80, which the chart sets from other values"),
];

async fn wrong_values_and_contradictions_are_named() {
    let contradictions = CONTRADICTIONS.iter().map(|(values, wanted)| (format!("--set={values}"), *wanted));
    for (flag, wanted) in WRONG.iter().map(|(flag, wanted)| ((*flag).to_owned(), *wanted)).chain(contradictions) {
        let (ok, stdout, stderr) = helm::run(None, &["template", "kubefan", CHART, &flag]).await;
        assert!(!ok, "{flag} is accepted: {stdout}");
        assert!(stderr.contains(wanted), "{flag}: {stderr}");
    }
}
