//! Finds the apiserver's address and kubefan's credentials: in a kubeconfig, by kubectl's rules, or
//! from the pod's service account.
//!
//! [`kubefan_common::kubeconfig`] reads the files. This module adds errors that name them.

use std::{
    env,
    path::{Path, PathBuf},
};

use http::Uri;
use kube_client::{Config, config::InClusterError};
use kubefan_common::kubeconfig::{self, ProxyEnvironment};

use crate::{error::shorten, transport::renewal::NamedFiles};

/// The kubeconfig and its context. If nothing is set, kubectl's rules apply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Only this file, instead of the files in `$KUBECONFIG` or `~/.kube/config`.
    pub kubeconfig: Option<PathBuf>,
    /// Context to use instead of the current one.
    pub context: Option<String>,
}

/// The reason why there is no usable configuration.
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
         the CA of the apiserver, choose a profile that passes nothing on (--access=…-cache-only), or accept this with tuning.passthroughInsecureUpstream"
    )]
    Unprotected {
        /// Scheme, host and port.
        server: String,
        /// The way in which they would be sent.
        problem: &'static str,
    },
    /// Callers would be reviewed by a server that others could stand in for.
    #[error(
        "callers would be reviewed (--access=authorized) by {server} {problem}, where others could read their tokens \
         or give false answers; use a kubeconfig with https and the CA of the apiserver"
    )]
    Unverified {
        /// Scheme, host and port.
        server: String,
        /// The way in which it would be asked.
        problem: &'static str,
    },
    /// A changed kubeconfig leads to another server. None of its settings are for this one.
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
pub(crate) struct UsedSettings {
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
    pub(crate) async fn load(&self) -> Result<(Config, NamedFiles), SettingsError> {
        let named = self.settings.load().await?;
        let client = [named.auth_info.client_certificate, named.auth_info.client_key];
        let paths = client.into_iter().flatten().map(PathBuf::from).chain(named.root_cert_file);
        let files = NamedFiles::look(paths.collect());
        let config = self.settings.load().await?;
        if config.cluster_url != self.server {
            let server = server_name(&self.server);
            let found = server_name(&config.cluster_url);
            return Err(SettingsError::OtherServer { server, found });
        }
        Ok((config, files))
    }
}

impl UpstreamSettings {
    /// The settings of a client of the server that `config` leads to.
    pub(crate) fn for_server(self, config: &Config) -> UsedSettings {
        UsedSettings { settings: self, server: config.cluster_url.clone() }
    }

    /// Reads the configuration. The small files are read with blocking I/O.
    pub async fn load(&self) -> Result<Config, SettingsError> {
        let files = self.kubeconfig.as_ref().map_or_else(kubeconfig::usual_files, |file| vec![file.clone()]);
        let shown = show(&files);
        // Like kubectl, this skips files that do not exist, except one given by flag.
        let present: Vec<&PathBuf> = files.iter().filter(|path| self.kubeconfig.is_some() || path.exists()).collect();
        if present.is_empty() {
            return self.service_account(shown);
        }
        let unusable = |why: String| SettingsError::Kubeconfig { files: shown.clone(), message: shorten(&why) };
        let merged = kubeconfig::read(&present).map_err(unusable)?;
        let environment = ProxyEnvironment::read();
        kubeconfig::configuration(merged, self.context.as_deref(), &environment).await.map_err(unusable)
    }

    fn service_account(&self, looked_at: String) -> Result<Config, SettingsError> {
        let looked_at =
            if looked_at.is_empty() { "~/.kube/config (there is no home directory)".to_owned() } else { looked_at };
        if env::var_os("KUBERNETES_SERVICE_HOST").is_none() || self.context.is_some() {
            return Err(SettingsError::NotFound { looked_at });
        }
        let mut config = Config::incluster().map_err(|error| SettingsError::InCluster {
            message: match error {
                // Its text may quote the file.
                InClusterError::ParseCertificates(_) => "its ca.crt is not PEM".to_owned(),
                other => shorten(&other.to_string()),
            },
        })?;
        config.proxy_url = ProxyEnvironment::read().proxy_for(&config.cluster_url);
        Ok(config)
    }
}

/// Scheme, host and port, for errors and logs. The URL's user info is omitted.
pub(crate) fn server_name(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{}://{host}", uri.scheme_str().unwrap_or("https"))
}

fn show(files: &[PathBuf]) -> String {
    let names: Vec<String> = files.iter().map(|path: &PathBuf| Path::display(path).to_string()).collect();
    names.join(", ")
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
