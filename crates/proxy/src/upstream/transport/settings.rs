//! Finds the apiserver's address and kubefan's credentials: in a kubeconfig, by kubectl's rules, or
//! from the pod's service account.
//!
//! kube-client reads and merges the files. This module adds errors that name the file and a remedy,
//! and that never quote the file: a YAML error with a snippet could put a token into the log.

use std::{
    env,
    path::{Path, PathBuf},
};

use http::Uri;
use kube_client::{
    Config,
    config::{Cluster, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

use crate::upstream::{
    error::shorten,
    transport::{proxy_environment::ProxyEnvironment, renewal::NamedFiles},
};
use kubefan_common::{
    kubeconfig::{self, given},
    text::with_single_quotes,
};

/// How to find the apiserver. If nothing is set, kubectl's rules apply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Only this file, instead of the files in `$KUBECONFIG` or `~/.kube/config`.
    pub kubeconfig: Option<PathBuf>,
    /// This context instead of the current one.
    pub context: Option<String>,
}

/// Why there is no usable configuration.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// A kubeconfig could not be read or used.
    #[error("cannot use kubeconfig {files}: {message}")]
    Kubeconfig {
        /// The files that were read.
        files: String,
        /// The problem and the remedy.
        message: String,
    },
    /// There is neither a kubeconfig nor a service account.
    #[error(
        "no kubeconfig found at {looked_at}, and this is not a pod with a service account; pass --kubeconfig FILE or set KUBECONFIG"
    )]
    NotFound {
        /// The files that do not exist.
        looked_at: String,
    },
    /// kubefan runs in a pod, but the pod's service account cannot be used.
    #[error("cannot use the pod's service account: {message}; is automountServiceAccountToken off?")]
    InCluster {
        /// The missing file or variable.
        message: String,
    },
    /// Callers' tokens would be sent to the apiserver without protection.
    #[error(
        "callers' tokens would be passed on to {server} {problem}, where others could read them; use a kubeconfig with https and \
         the CA of the apiserver, pass nothing on (--passthrough=off), or accept this with --passthrough-insecure-upstream"
    )]
    Unprotected {
        /// Scheme, host and port.
        server: String,
        /// How they would be sent.
        problem: &'static str,
    },
    /// Callers would be reviewed by a server that others could stand in for.
    #[error(
        "callers would be reviewed (--authorization-mode=Webhook) by {server} {problem}, where others could read their tokens \
         or give false answers; use a kubeconfig with https and the CA of the apiserver"
    )]
    Unverified {
        /// Scheme, host and port.
        server: String,
        /// How it would be asked.
        problem: &'static str,
    },
    /// A changed kubeconfig leads to another server. Nothing of it is for this one.
    #[error(
        "the kubeconfig leads to {found} now, and kubefan was started for {server}; restart it to use another server, or start \
         it with --context"
    )]
    OtherServer {
        /// Scheme, host and port at the start.
        server: String,
        /// Scheme, host and port now.
        found: String,
    },
    /// The TLS, proxy or credential settings cannot be used.
    #[error("cannot set up the connection to {server}: {message}")]
    Transport {
        /// Scheme, host and port.
        server: String,
        /// The problem.
        message: String,
    },
}

/// Settings that are read again while they are in use.
#[derive(Debug, Clone)]
pub(in crate::upstream) struct UsedSettings {
    settings: UpstreamSettings,
    /// The server that they lead to.
    server: Uri,
}

impl UsedSettings {
    /// Reads the configuration, and the files that it names. The small files are read with blocking
    /// I/O.
    ///
    /// # Errors
    /// As [`UpstreamSettings::load`]; also if they lead to another server.
    pub(in crate::upstream) async fn load(&self) -> Result<(Config, NamedFiles), SettingsError> {
        let named = self.settings.load().await?;
        let client = [named.auth_info.client_certificate, named.auth_info.client_key];
        let paths = client.into_iter().flatten().map(PathBuf::from).chain(named.root_cert_file);
        let files = NamedFiles::look(paths.collect());
        let config = self.settings.load().await?;
        if config.cluster_url != self.server {
            let (server, found) = (server_name(&self.server), server_name(&config.cluster_url));
            return Err(SettingsError::OtherServer { server, found });
        }
        Ok((config, files))
    }
}

impl UpstreamSettings {
    /// The settings of a client of the server that `config` leads to.
    pub(in crate::upstream) fn for_server(self, config: &Config) -> UsedSettings {
        UsedSettings { settings: self, server: config.cluster_url.clone() }
    }

    /// Reads the configuration. The small files are read with blocking I/O.
    pub async fn load(&self) -> Result<Config, SettingsError> {
        let files = self.files();
        let shown = show(&files);
        let broken = |error: &KubeconfigError, kubeconfig: Option<&Kubeconfig>| SettingsError::Kubeconfig {
            files: shown.clone(),
            message: explain(error, kubeconfig),
        };
        // Like kubectl, this skips files that do not exist, except one given by flag.
        let present: Vec<&PathBuf> = files.iter().filter(|path| self.kubeconfig.is_some() || path.exists()).collect();
        if present.is_empty() {
            return self.service_account(shown);
        }
        let refused = |fault: &str| SettingsError::Kubeconfig { files: shown.clone(), message: shorten(fault) };
        let mut kubeconfig = Kubeconfig::default();
        for path in present {
            let file = Kubeconfig::read_from(path).map_err(|error| broken(&error, None))?;
            if let Some(fault) = kubeconfig::fault_of_file(&file) {
                return Err(refused(&fault));
            }
            kubeconfig = kubeconfig.merge(file).map_err(|error| broken(&error, None))?;
        }
        if let Some(fault) = kubeconfig::fault_of_context(&kubeconfig, self.context.as_deref()) {
            return Err(refused(&fault));
        }
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = Config::from_custom_kubeconfig(kubeconfig.clone(), &options).await;
        let mut config = config.map_err(|error| broken(&error, Some(&kubeconfig)))?;
        let Some(cluster) = self.cluster(&kubeconfig) else { return Ok(config) };
        config.root_cert_file = given(&cluster.certificate_authority).map(PathBuf::from);
        if given(&cluster.proxy_url).is_some() { Ok(config) } else { with_proxy_of_environment(config) }
    }

    /// The cluster of the context.
    fn cluster<'a>(&self, kubeconfig: &'a Kubeconfig) -> Option<&'a Cluster> {
        let context = self.context.as_ref().or(kubeconfig.current_context.as_ref())?;
        let context = kubeconfig.contexts.iter().find(|named| named.name == *context)?;
        let cluster = &context.context.as_ref()?.cluster;
        kubeconfig.clusters.iter().find(|named| named.name == *cluster)?.cluster.as_ref()
    }

    fn files(&self) -> Vec<PathBuf> {
        if let Some(file) = &self.kubeconfig {
            return vec![file.clone()];
        }
        let listed =
            env::var_os("KUBECONFIG").map(|list| env::split_paths(&list).collect::<Vec<_>>()).unwrap_or_default();
        let listed: Vec<PathBuf> = listed.into_iter().filter(|path| !path.as_os_str().is_empty()).collect();
        if !listed.is_empty() {
            return listed;
        }
        env::home_dir().map(|home| home.join(".kube").join("config")).into_iter().collect()
    }

    fn service_account(&self, looked_at: String) -> Result<Config, SettingsError> {
        let looked_at =
            if looked_at.is_empty() { "~/.kube/config (there is no home directory)".to_owned() } else { looked_at };
        if env::var_os("KUBERNETES_SERVICE_HOST").is_none() || self.context.is_some() {
            return Err(SettingsError::NotFound { looked_at });
        }
        let config = Config::incluster();
        let config = config.map_err(|error| SettingsError::InCluster { message: shorten(&error.to_string()) })?;
        with_proxy_of_environment(config)
    }
}

/// Scheme, host and port, for errors and logs. The URL's user info is omitted.
pub(in crate::upstream) fn server_name(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{}://{host}", uri.scheme_str().unwrap_or("https"))
}

/// kube-client knows the variables, but not their exceptions.
fn with_proxy_of_environment(mut config: Config) -> Result<Config, SettingsError> {
    config.proxy_url = ProxyEnvironment::read()
        .proxy_for(&config.cluster_url)
        .map_err(|message| SettingsError::Transport { server: server_name(&config.cluster_url), message })?;
    Ok(config)
}

fn show(files: &[PathBuf]) -> String {
    let names: Vec<String> = files.iter().map(|path: &PathBuf| Path::display(path).to_string()).collect();
    names.join(", ")
}

fn explain(error: &KubeconfigError, kubeconfig: Option<&Kubeconfig>) -> String {
    let contexts = || {
        let names: Vec<&str> =
            kubeconfig.iter().flat_map(|config| &config.contexts).map(|named| named.name.as_str()).collect();
        if names.is_empty() {
            "it has no contexts".to_owned()
        } else {
            format!("it has the contexts {}", names.join(", "))
        }
    };
    let message = match error {
        KubeconfigError::ReadConfig(source, _) => source.to_string(),
        KubeconfigError::Parse(source) => match source.location() {
            Some(location) => format!("not a kubeconfig: bad YAML at line {}", location.line()),
            None => "not a kubeconfig: bad YAML".to_owned(),
        },
        KubeconfigError::CurrentContextNotSet => {
            format!("no current-context is set; {}: choose one with --context", contexts())
        }
        KubeconfigError::LoadContext(name) => format!("there is no context {name:?}; {}", contexts()),
        KubeconfigError::LoadClusterOfContext(name) => {
            format!("its context names the cluster {name:?}, which does not exist")
        }
        other => with_single_quotes(&other.to_string()),
    };
    shorten(&message)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn settings(text: &str, context: Option<&str>) -> (tempfile::TempDir, UpstreamSettings) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        fs::write(&file, text).unwrap();
        (dir, UpstreamSettings { kubeconfig: Some(file), context: context.map(str::to_owned) })
    }

    const TWO: &str = "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters:\n- name: c\n  cluster: {server: 'https://h:6443'}\n\
        users:\n- name: u\n  user: {token: very-secret}\ncontexts:\n- name: a\n  context: {cluster: c, user: u}\n\
        - name: b\n  context: {cluster: gone, user: u}\n";

    #[tokio::test]
    async fn the_error_for_a_missing_context_lists_the_existing_ones() {
        let (_dir, settings) = settings(TWO, Some("prod"));
        let error = settings.load().await.unwrap_err().to_string();
        assert!(error.contains("there is no context \"prod\"; it has the contexts a, b"), "{error}");
    }

    #[tokio::test]
    async fn a_valid_file_is_read() {
        let (_dir, settings) = settings(TWO, None);
        assert_eq!(settings.load().await.unwrap().cluster_url.to_string(), "https://h:6443/");
    }

    #[tokio::test]
    async fn the_error_for_invalid_yaml_names_the_file_but_quotes_no_secret() {
        let (_dir, settings) = settings(&TWO.replace("{token: very-secret}", "{token: very-secret"), None);
        let error = settings.load().await.unwrap_err().to_string();
        assert!(error.contains("config: not a kubeconfig: bad YAML at line"), "{error}");
        assert!(!error.contains("very-secret"), "{error}");
    }

    #[tokio::test]
    async fn a_missing_file_of_the_kubeconfig_is_quoted_once() {
        let missing = "{server: 'https://h:6443', certificate-authority: /does/not/exist.crt}";
        let (_dir, settings) = settings(&TWO.replace("{server: 'https://h:6443'}", missing), None);
        let error = settings.load().await.unwrap_err().to_string();
        assert!(
            error.contains("certificate authority: failed to read file \"/does/not/exist.crt\": No such"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn the_error_for_a_missing_file_names_it() {
        let settings = UpstreamSettings { kubeconfig: Some("/does/not/exist".into()), context: None };
        let error = settings.load().await.unwrap_err().to_string();
        assert!(error.starts_with("cannot use kubeconfig /does/not/exist: No such file"), "{error}");
    }
}
