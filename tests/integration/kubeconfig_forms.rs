//! Forms of a kubeconfig that kubectl and kubefan accept. kubefan refuses the forms that kubectl
//! refuses; every exception gives its reason.

use std::path::Path;

use kubefan_upstream::{Upstream, client::UpstreamOptions, settings::UpstreamSettings};

use crate::harness::{
    apiserver::ApiServer,
    pki::{Authority, IssuedPem},
    tests,
};

tests! {
    apiserver: kubefan_refuses_the_kubeconfigs_that_kubectl_refuses;
}

/// The programs that take a form.
#[derive(Clone, Copy, PartialEq)]
enum Taken {
    ByBoth,
    ByNone,
    /// kubectl turns to localhost:8080 then, which is no use to a server.
    ByNoneForWantOfACluster,
    /// kubefan keeps running while its token is not there yet.
    OnlyByKubefan,
    /// A name in place of the server's together with a proxy is not supported, and a key without a
    /// certificate is a mistake.
    OnlyByKubectl,
}
use Taken::*;

/// The parts of a kubeconfig that differ.
struct Form {
    what: &'static str,
    cluster: String,
    user: String,
    /// The rest; empty for one context with this cluster and user, which is the current one.
    rest: &'static str,
    taken: Taken,
}

fn form(what: &'static str, cluster: &str, user: &str, taken: Taken) -> Form {
    Form { what, cluster: cluster.to_owned(), user: user.to_owned(), rest: "", taken }
}

/// Nothing listens there.
const SERVER: &str = "server: 'https://127.0.0.1:1'";
const CURRENT: &str = "current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}]";

fn forms(dir: &Path) -> Vec<Form> {
    let file = |name: &str, text: &str| {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let authority = Authority::new();
    let IssuedPem { certificate, key } = authority.client("somebody", "some");
    let ca = file("ca", &authority.ca_pem);
    let certificate = file("crt", &certificate);
    let key = file("key", &key);
    let base64 = |path: &str| {
        use base64::{Engine, engine::general_purpose::STANDARD};
        STANDARD.encode(std::fs::read(path).unwrap())
    };
    let ca_data = base64(&ca);
    let certificate_data = base64(&certificate);
    let key_data = base64(&key);
    let credential =
        r#"{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"t"}}"#;
    let command = format!("command: cat, args: ['{}']", file("credential", credential));
    let beta = file("beta", &credential.replace("/v1", "/v1beta1"));
    let v1 = "apiVersion: client.authentication.k8s.io/v1";
    let certified = format!("client-certificate: '{certificate}', client-key: '{key}'");
    let of_cluster = |what, cluster: &str, taken| form(what, &format!("{SERVER}, {cluster}"), "token: t", taken);
    let of_user = |what, user: &str, taken| form(what, SERVER, user, taken);
    let of_plugin = |what, exec: &str, taken| form(what, SERVER, &format!("exec: {{{exec}}}"), taken);
    let of_rest = |what, rest, taken| Form { rest, ..form(what, SERVER, "token: t", taken) };
    vec![
        of_user("a token", "token: t", ByBoth),
        of_user("nothing", "", ByBoth),
        of_user("a certificate and its key", &certified, ByBoth),
        of_user(
            "a certificate and its key as data",
            &format!("client-certificate-data: {certificate_data}, client-key-data: {key_data}"),
            ByBoth,
        ),
        of_user(
            "a certificate as a file and as data",
            &format!("{certified}, client-certificate-data: {certificate_data}"),
            ByNone,
        ),
        of_user("a key as a file and as data", &format!("{certified}, client-key-data: {key_data}"), ByNone),
        of_user("a certificate without a key", &format!("client-certificate: '{certificate}'"), ByNone),
        of_user("a key without a certificate", &format!("client-key: '{key}'"), OnlyByKubectl),
        of_user("a certificate that is not there", &certified.replace("/crt", "/gone"), ByNone),
        of_user("a key that is not there", &certified.replace("/key", "/gone"), ByNone),
        of_user("a certificate and a token", &format!("{certified}, token: t"), ByBoth),
        of_user("a user name and a password", "username: a, password: b", ByBoth),
        of_user("a token and a password", "token: t, username: a, password: b", ByNone),
        of_user("a token and a user name", "token: t, username: a", ByNone),
        of_user("a token file and a password", &format!("tokenFile: '{beta}', username: a, password: b"), ByNone),
        of_user("a token file and a user name", &format!("tokenFile: '{beta}', username: a"), ByNone),
        of_user("a token file and a password alone", &format!("tokenFile: '{beta}', password: b"), ByBoth),
        of_user("a token and a password alone", "token: t, password: b", ByNone),
        form(
            "a token file and a password for a server without TLS",
            "server: 'http://127.0.0.1:1'",
            &format!("tokenFile: '{beta}', username: a, password: b"),
            ByBoth,
        ),
        of_user("a token and a file that is not there", "token: t, tokenFile: /gone", ByBoth),
        of_user("a token file that is not there", "tokenFile: /gone", OnlyByKubefan),
        of_user("another user", "token: t, as: a, as-groups: [b]", ByBoth),
        of_user("groups without a user", "token: t, as-groups: [b]", ByNone),
        of_user("a uid without a user", "token: t, as-uid: b", ByNone),
        of_user("extras without a user", "token: t, as-user-extra: {a: [b]}", ByNone),
        of_user("a removed provider", "auth-provider: {name: gcp, config: {cmd-path: cat}}", ByNone),
        of_user("an unknown provider", "auth-provider: {name: x}", ByNone),
        of_plugin("a plugin", &format!("{v1}, {command}, interactiveMode: Never"), ByBoth),
        of_plugin(
            "a plugin of v1beta1 without interactiveMode",
            &format!("{v1}beta1, command: cat, args: ['{beta}']"),
            ByBoth,
        ),
        of_plugin("a plugin without interactiveMode", &format!("{v1}, {command}"), ByNone),
        of_plugin("a plugin with another interactiveMode", &format!("{v1}, {command}, interactiveMode: x"), ByNone),
        of_plugin("a plugin without apiVersion", &format!("{command}, interactiveMode: Never"), ByNone),
        of_plugin("a plugin of v1alpha1", &format!("{v1}alpha1, {command}, interactiveMode: Never"), ByNone),
        of_plugin("a plugin without a command", &format!("{v1}, interactiveMode: Never"), ByNone),
        of_plugin(
            "a plugin with a variable without a name",
            &format!("{v1}, {command}, interactiveMode: Never, env: [{{value: x}}]"),
            ByNone,
        ),
        form(
            "a plugin and a token",
            SERVER,
            &format!("token: t, exec: {{{v1}, {command}, interactiveMode: Never}}"),
            ByBoth,
        ),
        form(
            "a plugin and a provider",
            SERVER,
            &format!("auth-provider: {{name: oidc}}, exec: {{{v1}, {command}, interactiveMode: Never}}"),
            ByNone,
        ),
        of_cluster("a CA", &format!("certificate-authority: '{ca}'"), ByBoth),
        of_cluster("a CA as data", &format!("certificate-authority-data: {ca_data}"), ByBoth),
        of_cluster(
            "a CA as a file and as data",
            &format!("certificate-authority: '{ca}', certificate-authority-data: {ca_data}"),
            ByNone,
        ),
        of_cluster("a CA that is not there", "certificate-authority: /gone", ByNone),
        of_cluster("a CA that is no certificate", "certificate-authority-data: YQ==", ByNone),
        of_cluster("a file of a CA that is no certificate", &format!("certificate-authority: '{key}'"), ByNone),
        form(
            "a CA that is no certificate of a server without TLS",
            "server: 'http://127.0.0.1:1', certificate-authority-data: YQ==",
            "",
            ByBoth,
        ),
        of_cluster("no CA as data", "certificate-authority-data: ''", ByBoth),
        of_cluster("no file of a CA", "certificate-authority: ''", ByBoth),
        of_cluster(
            "a CA as data and none as a file",
            &format!("certificate-authority-data: {ca_data}, certificate-authority: ''"),
            ByBoth,
        ),
        of_user("empty paths", "token: t, tokenFile: '', client-certificate: '', client-key: ''", ByBoth),
        of_cluster(
            "a CA as a file and none as data",
            &format!("certificate-authority: '{ca}', certificate-authority-data: ''"),
            ByBoth,
        ),
        of_cluster("a CA that is not base64", "certificate-authority-data: '?'", ByNone),
        of_cluster("no check of the server", "insecure-skip-tls-verify: true", ByBoth),
        of_cluster(
            "a CA and no check of the server",
            &format!("certificate-authority: '{ca}', insecure-skip-tls-verify: true"),
            ByNone,
        ),
        of_cluster(
            "a CA as data and no check of the server",
            &format!("certificate-authority-data: {ca_data}, insecure-skip-tls-verify: true"),
            ByNone,
        ),
        form(
            "a CA and no check of a server without TLS",
            &format!("server: 'http://127.0.0.1:1', certificate-authority: '{ca}', insecure-skip-tls-verify: true"),
            "",
            ByBoth,
        ),
        of_cluster("a proxy", "proxy-url: 'http://127.0.0.1:1'", ByBoth),
        of_cluster("a SOCKS proxy", "proxy-url: 'socks5://127.0.0.1:1'", ByBoth),
        of_cluster("a SOCKS proxy that resolves names", "proxy-url: 'socks5h://127.0.0.1:1'", ByNone),
        of_cluster("a proxy of another scheme", "proxy-url: 'ftp://127.0.0.1:1'", ByNone),
        of_cluster("a proxy without a scheme", "proxy-url: '127.0.0.1:1'", ByNone),
        of_cluster("a proxy and another name", "proxy-url: 'http://127.0.0.1:1', tls-server-name: b", OnlyByKubectl),
        form("an empty server", "server: '', insecure-skip-tls-verify: true", "token: t", ByNoneForWantOfACluster),
        form("no server", "insecure-skip-tls-verify: true", "token: t", ByNoneForWantOfACluster),
        form("an empty cluster", "", "token: t", ByNoneForWantOfACluster),
        of_rest("no current context", "contexts: [{name: a, context: {cluster: c, user: u}}]", ByNoneForWantOfACluster),
        of_rest("a current context that is not there", "current-context: gone", ByNone),
        of_rest(
            "a cluster that is not there",
            "current-context: a, contexts: [{name: a, context: {cluster: gone, user: u}}]",
            ByNoneForWantOfACluster,
        ),
        of_rest(
            "a user that is not there",
            "current-context: a, contexts: [{name: a, context: {cluster: c, user: gone}}]",
            ByBoth,
        ),
        of_rest("no user", "current-context: a, contexts: [{name: a, context: {cluster: c}}]", ByBoth),
        of_rest(
            "two contexts of one name",
            "current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}, {name: a, context: {cluster: c, user: u}}]",
            ByNone,
        ),
        of_rest(
            "another kind",
            "kind: Pod, current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}]",
            ByNone,
        ),
        of_rest(
            "another version",
            "kind: Config, apiVersion: v2, current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}]",
            ByNone,
        ),
        of_rest(
            "a setting that nobody knows",
            "x: y, current-context: a, contexts: [{name: a, context: {cluster: c, user: u, x: y}}]",
            ByBoth,
        ),
    ]
}

async fn kubefan_refuses_the_kubeconfigs_that_kubectl_refuses() {
    let api = ApiServer::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for Form { what, cluster, user, rest, taken } in forms(dir.path()) {
        let rest = if rest.is_empty() { CURRENT } else { rest };
        let text = format!(
            "{{{rest}, clusters: [{{name: c, cluster: {{{cluster}}}}}], users: [{{name: u, user: {{{user}}}}}]}}"
        );
        let kubeconfig = dir.path().join("kubeconfig");
        std::fs::write(&kubeconfig, text).unwrap();
        let (_, _, by_kubectl) = api.try_kubectl(&kubeconfig, &["get", "--raw", "/version"]).await;
        // It asks the server of the file, where nothing listens, or a person for a password.
        let kubectl_takes = ["127.0.0.1:1 was refused", "127.0.0.1:1: connect: connection refused", "error: EOF"];
        let kubectl_takes = kubectl_takes.iter().any(|text| by_kubectl.contains(text));
        let settings = UpstreamSettings { kubeconfig: Some(kubeconfig), context: None };
        let by_kubefan = Upstream::from_settings(settings, UpstreamOptions::default()).await.err();
        let by_kubefan = by_kubefan.map(|error| error.to_string());
        let expected = match taken {
            ByBoth => (true, true),
            ByNone | ByNoneForWantOfACluster => (false, false),
            OnlyByKubefan => (false, true),
            OnlyByKubectl => (true, false),
        };
        if (kubectl_takes, by_kubefan.is_none()) != expected
            || by_kubectl.contains("localhost:8080") != (taken == ByNoneForWantOfACluster)
        {
            wrong.push(format!("{what}\n  kubectl: {}\n  kubefan: {by_kubefan:?}", by_kubectl.trim()));
        }
        if let Some(error) = by_kubefan {
            assert!(!error.contains('\n') && !error.contains("PRIVATE"), "{what}: {error}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
