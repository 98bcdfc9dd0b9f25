//! The forms of a kubeconfig that kubectl refuses (`clientcmd/validation.go`, `transport.go` and
//! `exec.go` in client-go), as far as kube-client takes them.
//!
//! The hazard is that kube-client chooses in silence: of two credentials it uses one, and a client
//! certificate without its key it leaves out. So kubefan would act as another user than kubectl
//! with the same file. Only the context in use is looked at, as kubectl does.

use std::collections::HashMap;

use http::uri::Scheme;
use kube_client::{
    Config,
    config::{AuthInfo, Cluster, Context, ExecConfig, Kubeconfig, NamedCluster},
};
use secrecy::{ExposeSecret, SecretString};

/// The versions of credential plugins. `v1beta1` has a default for `interactiveMode`.
const EXEC_VERSIONS: [&str; 2] = ["client.authentication.k8s.io/v1", EXEC_V1BETA1];
const EXEC_V1BETA1: &str = "client.authentication.k8s.io/v1beta1";

/// The fault of one file, before it is merged with others; `None` if kubectl reads it.
pub(super) fn of_file(kubeconfig: &Kubeconfig) -> Option<String> {
    if given(&kubeconfig.kind).is_some_and(|kind| kind != "Config")
        || given(&kubeconfig.api_version).is_some_and(|version| version != "v1")
    {
        return Some("it is not a kubeconfig: it must have apiVersion v1 and kind Config".to_owned());
    }
    let names = |what, names: Vec<&str>| {
        let repeated = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name))?.1;
        Some(format!("it has two {what} with the name {repeated:?}"))
    };
    let Kubeconfig { clusters, auth_infos, contexts, .. } = kubeconfig;
    names("clusters", clusters.iter().map(|named| &*named.name).collect())
        .or_else(|| names("users", auth_infos.iter().map(|named| &*named.name).collect()))
        .or_else(|| names("contexts", contexts.iter().map(|named| &*named.name).collect()))
}

/// The fault of a context, or of the current one; `None` if kubectl takes it, or if it does not
/// exist.
pub(super) fn of_context(kubeconfig: &Kubeconfig, context: Option<&str>) -> Option<String> {
    let cluster = cluster_of(kubeconfig, context);
    if let Some(NamedCluster { name, cluster: Some(cluster), .. }) = cluster
        && let Some(fault) = of_cluster(cluster)
    {
        return Some(format!("the cluster {name:?} {fault}"));
    }
    let user = context_of(kubeconfig, context)?.user.as_ref();
    let user = kubeconfig.auth_infos.iter().find(|named| Some(&named.name) == user)?;
    let sends_credentials = cluster.and_then(|named| named.cluster.as_ref()).is_some_and(is_https);
    let fault = of_user(user.auth_info.as_ref()?, sends_credentials)?;
    Some(format!("the user {:?} {fault}", user.name))
}

/// The cluster of a context, or of the current one; `None` if it does not exist.
pub(super) fn cluster_of<'a>(kubeconfig: &'a Kubeconfig, context: Option<&str>) -> Option<&'a NamedCluster> {
    let context = context_of(kubeconfig, context)?;
    kubeconfig.clusters.iter().find(|named| named.name == context.cluster)
}

fn context_of<'a>(kubeconfig: &'a Kubeconfig, context: Option<&str>) -> Option<&'a Context> {
    let name = context.or(kubeconfig.current_context.as_deref())?;
    kubeconfig.contexts.iter().find(|named| named.name == name)?.context.as_ref()
}

/// Returns the fault of a CA that was read. kubectl accepts a CA file that is only readable in
/// part.
pub(super) fn of_authority(cluster: &str, config: &Config) -> Option<String> {
    let is_https = config.cluster_url.scheme() == Some(&Scheme::HTTPS);
    let is_empty = is_https && config.root_cert.as_ref().is_some_and(Vec::is_empty);
    is_empty.then(|| format!("the cluster {cluster:?} has a certificate-authority without a certificate"))
}

/// Whether the server has TLS. Without it kubectl looks at neither the CA nor the credentials.
fn is_https(cluster: &Cluster) -> bool {
    given(&cluster.server).is_some_and(|server| server.starts_with("https:"))
}

fn of_cluster(cluster: &Cluster) -> Option<String> {
    let Cluster { certificate_authority, certificate_authority_data, .. } = cluster;
    let file = given(certificate_authority);
    let data = given(certificate_authority_data);
    if given(&cluster.server).is_none() {
        return Some("has no server".to_owned());
    }
    if file.is_some() && data.is_some() {
        return Some(both("certificate-authority", "certificate-authority-data"));
    }
    let is_insecure = cluster.insecure_skip_tls_verify == Some(true) && is_https(cluster);
    if is_insecure && (file.is_some() || data.is_some()) {
        return Some(both("insecure-skip-tls-verify", "a certificate-authority"));
    }
    let proxy = given(&cluster.proxy_url)?;
    let has_scheme = ["http://", "https://", "socks5://"].iter().any(|scheme| proxy.starts_with(scheme));
    (!has_scheme).then(|| "has a proxy-url that does not begin with http://, https:// or socks5://".to_owned())
}

fn of_user(user: &AuthInfo, sends_credentials: bool) -> Option<String> {
    let certificate = (given(&user.client_certificate), given(&user.client_certificate_data));
    let has_key_data = user.client_key_data.as_ref().is_some_and(|data| !data.expose_secret().is_empty());
    let has_key_file = given(&user.client_key).is_some();
    if certificate.0.is_some() || certificate.1.is_some() {
        if certificate.0.is_some() && certificate.1.is_some() {
            return Some(both("client-certificate", "client-certificate-data"));
        }
        if has_key_file && has_key_data {
            return Some(both("client-key", "client-key-data"));
        }
        if !has_key_file && !has_key_data {
            return Some("has a client certificate without its private key (client-key)".to_owned());
        }
    }
    let has_secret = |secret: &Option<SecretString>| secret.as_ref().is_some_and(|it| !it.expose_secret().is_empty());
    let has_password = given(&user.username).is_some() || has_secret(&user.password);
    if has_secret(&user.token) && has_password {
        return Some(both("a token", "a username or password"));
    }
    // client-go looks at this later, and not at a password alone.
    if sends_credentials && given(&user.token_file).is_some() && given(&user.username).is_some() {
        return Some(both("a tokenFile", "a username"));
    }
    if let Some(exec) = &user.exec {
        if user.auth_provider.is_some() {
            return Some(both("exec", "auth-provider"));
        }
        if let Some(fault) = of_plugin(exec) {
            return Some(format!("has a credential plugin (exec) {fault}"));
        }
    }
    if let Some(provider) = user.auth_provider.as_ref().filter(|provider| provider.name != "oidc") {
        let name = &provider.name;
        return Some(format!(
            "has the auth-provider {name:?}; Kubernetes has removed it for credential plugins (exec)"
        ));
    }
    let acts_for_nobody = given(&user.impersonate).is_none()
        && (given(&user.impersonate_uid).is_some()
            || user.impersonate_groups.as_ref().is_some_and(|groups| !groups.is_empty())
            || user.impersonate_user_extra.as_ref().is_some_and(|extra| !extra.is_empty()));
    acts_for_nobody.then(|| "has as-uid, as-groups or as-user-extra without the name of a user (as)".to_owned())
}

fn of_plugin(exec: &ExecConfig) -> Option<String> {
    let Some(version) = given(&exec.api_version) else { return Some("without apiVersion".to_owned()) };
    if given(&exec.command).is_none() {
        return Some("without a command".to_owned());
    }
    if !EXEC_VERSIONS.contains(&version) {
        return Some(format!("whose apiVersion is none of {}", EXEC_VERSIONS.join(" and ")));
    }
    if exec.interactive_mode.is_none() && version != EXEC_V1BETA1 {
        return Some("without interactiveMode (Never, IfAvailable or Always)".to_owned());
    }
    let mut variables = exec.env.iter().flatten();
    let is_unnamed = |variable: &HashMap<String, String>| variable.get("name").is_none_or(|name| name.is_empty());
    variables.any(is_unnamed).then(|| "with an environment variable that has no name".to_owned())
}

fn both(one: &str, other: &str) -> String {
    format!("has {one} and {other}; give only one of them")
}

/// A value that is given. Empty ones count as absent, as in client-go.
fn given(value: &Option<String>) -> Option<&str> {
    value.as_deref().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kubeconfig with this content of its cluster and user.
    fn fault(cluster: &str, user: &str) -> Option<String> {
        let text = format!(
            "{{current-context: a, contexts: [{{name: a, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{{cluster}}}}}], users: [{{name: u, user: {{{user}}}}}]}}"
        );
        of_context(&Kubeconfig::from_yaml(&text).unwrap(), None)
    }

    const HTTPS: &str = "server: 'https://h'";

    /// `kubeconfig_forms` of the integration tests has the verdicts of kubectl for all forms.
    #[test]
    fn a_fault_names_the_entry_and_its_settings_and_no_secret() {
        for (user, words) in [
            ("token: very-secret, password: very-secret", "a token and a username or password"),
            ("client-key-data: very-secret, client-key: f, client-certificate: f", "client-key and client-key-data"),
            ("client-certificate-data: very-secret", "without its private key"),
            ("tokenFile: f, username: very-secret", "a tokenFile and a username"),
            ("as-groups: [very-secret]", "without the name of a user (as)"),
        ] {
            let fault = fault(HTTPS, user).unwrap();
            assert!(fault.starts_with("the user \"u\" has ") && fault.contains(words), "{fault}");
            assert!(!fault.contains("very-secret"), "{fault}");
        }
        assert_eq!(fault("", "").as_deref(), Some("the cluster \"c\" has no server"));
        assert_eq!(fault(HTTPS, "tokenFile: f, password: very-secret"), None);
        assert_eq!(fault("server: 'http://h'", "tokenFile: f, username: a"), None, "kubectl sends neither");
    }

    #[test]
    fn empty_values_and_contexts_that_are_not_used_are_no_faults() {
        let nothing = "token: '', username: '', client-certificate: '', client-key-data: '', as-groups: []";
        assert_eq!(fault(&format!("{HTTPS}, proxy-url: '', certificate-authority: ''"), nothing), None);
        let unused = "{contexts: [{name: a, context: {cluster: c, user: u}}], clusters: [{name: c, cluster: {}}]}";
        let unused = Kubeconfig::from_yaml(unused).unwrap();
        assert_eq!(of_context(&unused, None), None);
        assert_eq!(of_context(&unused, Some("b")), None);
        assert!(of_context(&unused, Some("a")).is_some());
    }

    #[test]
    fn names_must_be_unique_in_a_file() {
        for list in ["clusters", "users", "contexts"] {
            let text = format!("{{{list}: [{{name: a}}, {{name: b}}, {{name: a}}]}}");
            let fault = of_file(&Kubeconfig::from_yaml(&text).unwrap());
            assert_eq!(fault, Some(format!("it has two {list} with the name \"a\"")));
        }
        for (text, is_read) in
            [("{kind: Pod}", false), ("{apiVersion: v2}", false), ("{kind: Config, apiVersion: v1}", true)]
        {
            assert_eq!(of_file(&Kubeconfig::from_yaml(text).unwrap()).is_none(), is_read, "{text}");
        }
    }
}
