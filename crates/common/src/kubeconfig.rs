//! Kubeconfigs, for kubefan and the client library. kube-client reads them. Beyond that, both
//! refuse the faults that kubectl refuses (`faults`), find the HTTP proxy by Go's rules
//! (`proxy_environment`), read token files themselves, and describe errors (`errors`).
//!
//! The hazard is a library's error that quotes a key, a token or a file.

mod connection;
mod errors;
mod faults;
mod proxy_environment;
mod token_of_file;

use std::{
    env,
    path::{Path, PathBuf},
};

use kube_client::{
    Config,
    client::ConfigExt,
    config::{KubeConfigOptions, Kubeconfig},
};
use secrecy::ExposeSecret;

pub use connection::{Credentials, proxy_url, real_host, request_url, wants_gzip};
pub use errors::explain_auth;
pub use proxy_environment::{ProxyEnvironment, is_loopback};
pub use token_of_file::{TokenOfFile, take_token_file};

/// A placeholder for the proxy of the environment while kube-client makes a configuration. Without
/// it kube-client would read the variables itself, ignore `NO_PROXY`, and fail if one is no URL.
const OF_ENVIRONMENT: &str = "http://proxy-of-the-environment.invalid/";

/// The files that kubectl reads if no flag names one: those in `$KUBECONFIG`, otherwise
/// `~/.kube/config`. Callers skip those that do not exist, as kubectl does.
pub fn usual_files() -> Vec<PathBuf> {
    let listed = env::var_os("KUBECONFIG").unwrap_or_default();
    let listed: Vec<_> = env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty()).collect();
    if !listed.is_empty() {
        return listed;
    }
    env::home_dir().map(|home| home.join(".kube").join("config")).into_iter().collect()
}

/// Reads files and merges them.
///
/// # Errors
/// The reason why one of the files cannot be used, without its text.
pub fn read<F: AsRef<Path>>(files: &[F]) -> Result<Kubeconfig, String> {
    let mut merged = Kubeconfig::default();
    for file in files {
        let of_file = |why: String| match files {
            [_] => why,
            _ => format!("{}: {why}", file.as_ref().display()),
        };
        let mut one = Kubeconfig::read_from(file).map_err(|error| of_file(errors::explain(&error, &[])))?;
        remove_empty_paths(&mut one, file.as_ref());
        if let Some(fault) = faults::of_file(&one) {
            return Err(of_file(fault));
        }
        merged = merged.merge(one).map_err(|error| of_file(errors::explain(&error, &[])))?;
    }
    Ok(merged)
}

/// Removes the paths that are empty in the file: kube-client has made them the path of its folder.
fn remove_empty_paths(kubeconfig: &mut Kubeconfig, file: &Path) {
    let folder = file.parent().map(|folder| folder.join(""));
    let folder = folder.as_deref().and_then(Path::to_str);
    let is_empty = |path: &mut String| path.is_empty() || folder == Some(path.as_str());
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        cluster.certificate_authority.take_if(is_empty);
    }
    for user in kubeconfig.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        for path in [&mut user.client_certificate, &mut user.client_key, &mut user.token_file] {
            path.take_if(is_empty);
        }
    }
}

/// Makes the configuration of a context, or of the current one. Its proxy is the `proxy-url` of the
/// cluster, or otherwise that of the environment. Its `root_cert_file` is the file of its CA.
///
/// # Errors
/// The reason why the context cannot be used, without the text of a file.
pub async fn configuration(
    mut kubeconfig: Kubeconfig,
    context: Option<&str>,
    environment: &ProxyEnvironment,
) -> Result<Config, String> {
    if let Some(fault) = faults::of_context(&kubeconfig, context) {
        return Err(fault);
    }
    remove_empty_values(&mut kubeconfig);
    let contexts: Vec<String> = kubeconfig.contexts.iter().map(|named| named.name.clone()).collect();
    let cluster = faults::cluster_of(&kubeconfig, context).cloned().unwrap_or_default();
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        cluster.proxy_url.get_or_insert_with(|| OF_ENVIRONMENT.to_owned());
    }
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
    let mut config = config.map_err(|error| errors::explain(&error, &contexts))?;
    if let Some(fault) = faults::of_authority(&cluster.name, &config) {
        return Err(fault);
    }
    config.root_cert_file = cluster.cluster.and_then(|cluster| cluster.certificate_authority).map(PathBuf::from);
    if config.proxy_url.as_ref().is_some_and(|url| *url == OF_ENVIRONMENT) {
        config.proxy_url = environment.proxy_for(&config.cluster_url);
        // client-go tells a credential plugin only of a `proxy-url`.
        if let Some(told) = config.auth_info.exec.as_mut().and_then(|exec| exec.cluster.as_mut()) {
            told.proxy_url = None;
        }
    }
    Ok(config)
}

/// Empty values count as absent, as in client-go. kube-client would use them.
fn remove_empty_values(kubeconfig: &mut Kubeconfig) {
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        for value in [&mut cluster.certificate_authority_data, &mut cluster.proxy_url] {
            value.take_if(|value| value.is_empty());
        }
    }
    for user in kubeconfig.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        for value in [&mut user.client_certificate_data, &mut user.username, &mut user.impersonate] {
            value.take_if(|value| value.is_empty());
        }
        user.impersonate_groups.take_if(|groups| groups.is_empty());
        for secret in [&mut user.client_key_data, &mut user.token] {
            secret.take_if(|secret| secret.expose_secret().is_empty());
        }
    }
}

/// The TLS configuration for the server, with the CA as it was read. This runs the kubeconfig's
/// exec plugin, if any.
///
/// # Errors
/// The reason why it cannot be made.
pub fn tls_config(config: &Config) -> Result<rustls::ClientConfig, String> {
    // Otherwise kube-client would read the CA's file again, and trust another CA than the one that
    // identifies the cluster.
    let mut config = config.clone();
    config.root_cert_file = None;
    config.rustls_client_config().map_err(|error| errors::explain_tls(&error, &config.auth_info))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubeconfig(cluster: &str, user: &str) -> Kubeconfig {
        let text = format!(
            "{{current-context: a, contexts: [{{name: a, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: 'https://h.example:6443'{cluster}}}}}], \
             users: [{{name: u, user: {{{user}}}}}]}}"
        );
        Kubeconfig::from_yaml(&text).unwrap()
    }

    async fn configured(cluster: &str, user: &str) -> Result<Config, String> {
        configuration(kubeconfig(cluster, user), None, &ProxyEnvironment::default()).await
    }

    #[tokio::test]
    async fn the_proxy_is_that_of_the_cluster_or_else_of_the_environment() {
        let environment = ProxyEnvironment::of(|name| (name == "HTTPS_PROXY").then(|| "proxy.example:1".to_owned()));
        let proxy = async |cluster: &str, environment: &ProxyEnvironment| {
            let config = configuration(kubeconfig(cluster, ""), None, environment).await.unwrap();
            config.proxy_url.map(|url| url.to_string())
        };
        let own = ", proxy-url: 'http://other.example:1'";
        assert_eq!(proxy("", &environment).await.unwrap(), "http://proxy.example:1/");
        assert_eq!(proxy(own, &environment).await.unwrap(), "http://other.example:1/");
        assert_eq!(proxy(", proxy-url: ''", &ProxyEnvironment::default()).await, None);
    }

    #[tokio::test]
    async fn a_credential_plugin_is_not_told_of_the_proxy_of_the_environment() {
        let environment = ProxyEnvironment::of(|_| Some("http://proxy.example:1".to_owned()));
        let user = "exec: {apiVersion: client.authentication.k8s.io/v1, command: x, interactiveMode: Never, \
                    provideClusterInfo: true}";
        let config = configuration(kubeconfig("", user), None, &environment).await.unwrap();
        assert_eq!(config.auth_info.exec.unwrap().cluster.unwrap().proxy_url, None);
    }

    #[tokio::test]
    async fn data_that_cannot_be_read_is_not_quoted() {
        // A PEM section with a line before a blank one, which its parser takes for a header.
        let pem = "LS0tLS1CRUdJTiBYLS0tLS0Kc2VjcmV0CgpBQUFBCi0tLS0tRU5EIFgtLS0tLQo=";
        for (data, explained) in [
            (pem, "its certificate-authority is not PEM"),
            ("'secret!'", "failed to load certificate authority: its data is not base64"),
            ("YQ==", "the cluster \"c\" has a certificate-authority without a certificate"),
        ] {
            let error = configured(&format!(", certificate-authority-data: {data}"), "").await.unwrap_err();
            assert_eq!(error, explained);
        }
    }

    #[tokio::test]
    async fn empty_values_count_as_absent() {
        let user = "token: '', username: '', password: x, client-certificate-data: '', client-key-data: ''";
        let config = configured(", certificate-authority-data: ''", user).await.unwrap();
        assert!(config.root_cert.is_none() && config.auth_layer().unwrap().is_none());
    }
}
