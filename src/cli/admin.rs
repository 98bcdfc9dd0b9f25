//! The admin port of a running kubefan, as the commands for operators reach it.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Args;
use reqwest::{Certificate, Client, ClientBuilder, Method, Response, StatusCode, Url, redirect};
use serde::de::DeserializeOwned;

use super::select::CredentialArgs;
use kubefan_common::text::innermost;

/// A running kubefan answers within this time; a review may wait for its turn.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct AdminArgs {
    /// The address of kubefan's admin port: HOST:PORT, https://HOST:PORT or unix:PATH
    #[arg(long = "admin", env = "KUBEFAN_ADMIN", value_name = "ADDRESS", default_value = "127.0.0.1:7444")]
    address: String,

    #[command(flatten)]
    credentials: CredentialArgs,
}

/// Asks an admin port.
pub(super) struct Admin {
    client: Client,
    base: Url,
    address: String,
    token: Option<String>,
}

impl AdminArgs {
    /// Reads the credentials. Sends nothing yet.
    ///
    /// # Errors
    /// The mistake in the arguments.
    pub(super) async fn connect(&self) -> Result<Admin, String> {
        let Self { address, credentials: CredentialArgs { ca_file, tls_server_name, .. } } = self;
        // Fails if there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = ClientBuilder::new()
            .timeout(ANSWER_TIMEOUT)
            // A redirect would send the token to another host.
            .redirect(redirect::Policy::none())
            .no_proxy();
        if let Some(file) = ca_file {
            let bytes =
                tokio::fs::read(file).await.map_err(|error| format!("--ca-file {}: {error}", file.display()))?;
            let certificates =
                Certificate::from_pem_bundle(&bytes).ok().filter(|certificates| !certificates.is_empty());
            let certificates =
                certificates.ok_or(format!("--ca-file {}: it has no PEM certificate", file.display()))?;
            builder = builder.tls_certs_only(certificates);
        }
        let url = match address.strip_prefix("unix:") {
            Some(path) => {
                builder = builder.unix_socket(PathBuf::from(path));
                "http://localhost".to_owned()
            }
            None if address.contains("://") => address.clone(),
            // Without one it would be port 80.
            None if !has_port(address) => {
                return Err(format!("--admin {address}: it has no port, as in {address}:7444"));
            }
            None => format!("http://{address}"),
        };
        let mut base: Url =
            url.parse().map_err(|_| format!("--admin {address}: write it like 127.0.0.1:7444 or unix:PATH"))?;
        if let Some(name) = tls_server_name {
            if base.scheme() != "https" {
                return Err(format!("--tls-server-name is for TLS, and --admin {address} has none: write https://"));
            }
            builder = builder.resolve_to_addrs(name, &addresses(&base).await?);
            // reqwest checks the certificate against the host of the URL.
            base.set_host(Some(name)).map_err(|_| format!("--tls-server-name {name}: it is no host name"))?;
        }
        let client = builder.build().map_err(|error| innermost(&error).to_string())?;
        // Others could read a token on the way.
        let sends_token = base.scheme() == "https" || address.starts_with("unix:");
        let token = self.token()?.filter(|_| sends_token);
        Ok(Admin { client, base, address: address.clone(), token })
    }

    fn token(&self) -> Result<Option<String>, String> {
        if let Some(file) = &self.credentials.token_file {
            let token =
                std::fs::read_to_string(file).map_err(|error| format!("--token-file {}: {error}", file.display()))?;
            return Ok(Some(token.trim().to_owned()));
        }
        let given = self.credentials.token.as_ref().map(|given| given.read(std::io::stdin()));
        given.transpose().map_err(|error| error.to_string())
    }
}

/// The addresses of the host of a URL.
async fn addresses(url: &Url) -> Result<Vec<SocketAddr>, String> {
    let host = url.host_str().unwrap_or_default();
    let port = url.port_or_known_default().unwrap_or_default();
    let found = tokio::net::lookup_host(format!("{host}:{port}")).await;
    Ok(found.map_err(|error| format!("--admin {url}: {error}"))?.collect())
}

/// Whether HOST:PORT has the port.
fn has_port(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

impl Admin {
    /// The answer to a GET.
    ///
    /// # Errors
    /// The reason why there is no answer, in the words of the user.
    pub(super) async fn get(&self, path: &str, query: &[(&str, String)]) -> Result<String, String> {
        self.send(Method::GET, path, query).await
    }

    /// The answer to a DELETE.
    ///
    /// # Errors
    /// The reason why there is no answer, in the words of the user.
    pub(super) async fn delete(&self, path: &str) -> Result<String, String> {
        self.send(Method::DELETE, path, &[]).await
    }

    /// Returns the answer to a GET of a path with its query, whatever its status is.
    ///
    /// # Errors
    /// The reason why there is none, worded for the user.
    pub(super) async fn fetch(&self, target: &str) -> Result<Response, String> {
        self.request(Method::GET, target, &[]).await
    }

    async fn request(&self, method: Method, path: &str, query: &[(&str, String)]) -> Result<Response, String> {
        let address = &self.address;
        let mut url = self.base.join(path).map_err(|error| format!("--admin {address}: {error}"))?;
        // A path with two slashes would be another host.
        if url.origin() != self.base.origin() {
            return Err(format!("{path:?} is not a path of {address}"));
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request = self.client.request(method, url);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        request.send().await.map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &reqwest::Error) -> String {
        let cause = innermost(error).to_string();
        let hint = if cause.contains("certificate") {
            "--ca-file names the CA of its certificate, and --tls-server-name a name in it"
        } else {
            "is `kubefan serve` running there? --admin names another address"
        };
        format!("cannot reach the admin port of kubefan at {}: {cause}; {hint}", self.address)
    }

    async fn send(&self, method: Method, path: &str, query: &[(&str, String)]) -> Result<String, String> {
        let address = &self.address;
        let answer = self.request(method, path, query).await?;
        let status = answer.status();
        let text = answer.text().await.map_err(|error| self.unreachable(&error))?;
        match status {
            StatusCode::OK => Ok(text),
            // A 404 below a path that exists gives a reason.
            StatusCode::NOT_FOUND if text.starts_with("there is no ") => Err(text.trim_end().to_owned()),
            StatusCode::NOT_FOUND => Err(self.unlike_kubefan()),
            // Answer of a port with TLS to a request without TLS.
            StatusCode::BAD_REQUEST if text.contains("HTTPS") => {
                Err(format!("{address} serves TLS: --admin https://{address}"))
            }
            _ => Err(format!("{address} answers {}: {}", status.as_u16(), text.trim_end())),
        }
    }

    /// An answer.
    ///
    /// # Errors
    /// If the answer is not one of kubefan's.
    pub(super) fn parse<T: DeserializeOwned>(&self, answer: &str) -> Result<T, String> {
        serde_json::from_str(answer).map_err(|_| self.unlike_kubefan())
    }

    /// The message about an answer that no kubefan gives.
    fn unlike_kubefan(&self) -> String {
        format!("{} is not the admin port of a kubefan of this version (--admin)", self.address)
    }
}
