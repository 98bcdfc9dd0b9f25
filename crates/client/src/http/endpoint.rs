//! An HTTP endpoint that serves the Kubernetes API, and how to connect to it.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;

use super::{
    options::HttpClientOptions,
    reqwest_transport::{self, ReqwestTransport, describe},
    tls,
    transport::HttpTransport,
};
use crate::{
    error::ClientError,
    token::{SERVICE_ACCOUNT, Token},
};
use kubefan_common::names::is_loopback;

/// A client of one HTTP endpoint that serves the Kubernetes API: a kube-apiserver or a kubefan.
/// Clones share the connections.
///
/// Over TLS, one HTTP/2 connection carries all requests. A kube-apiserver accepts 100 requests at
/// once on it; a program with more watches than that needs several clients.
#[derive(Clone)]
pub struct HttpClient {
    transport: Arc<dyn HttpTransport>,
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HttpClient").field("address", &self.address()).finish()
    }
}

/// Limits of a request whose answer is read as a whole.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadLimits {
    pub(super) timeout: Duration,
    pub(super) bytes_max: usize,
}

/// The address without a user and password, and without a query.
fn without_secrets(address: &str) -> String {
    let address = address.split(['?', '#']).next().unwrap_or_default();
    address.rsplit('@').next().unwrap_or_default().to_owned()
}

/// Whether to ask the server for gzip. On this machine, bytes cost less than their compression.
fn wants_gzip(url: &reqwest::Url, options: &HttpClientOptions) -> bool {
    !options.disable_compression && !is_loopback(url.host_str().unwrap_or_default())
}

impl HttpClient {
    /// Returns a client of `http://host:port` or `https://host:port`, optionally with a path that
    /// precedes `/api` and `/apis`. It connects on the first request. Proxies in the environment
    /// are not used.
    ///
    /// # Errors
    /// [`ClientError::Address`] if the address or a file is invalid. A token file is read later.
    pub async fn new(address: &str, options: &HttpClientOptions) -> Result<Self, ClientError> {
        let wrong = |problem: String| ClientError::Address { address: address.to_owned(), problem };
        let url = address
            .parse::<reqwest::Url>()
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.host().is_some() && url.query().is_none());
        let Some(url) = url else {
            // An address that cannot be parsed may still contain a password or a token.
            let problem = "not the URL of a Kubernetes API; write it like https://host:6443".to_owned();
            return Err(ClientError::Address { address: without_secrets(address), problem });
        };
        if !url.username().is_empty() || url.password().is_some() {
            // The error must not repeat the password.
            let address = url.origin().ascii_serialization();
            let problem = "user names and passwords are not supported; use a token or a client certificate".to_owned();
            return Err(ClientError::Address { address, problem });
        }
        let HttpClientOptions { ca_file, client_certificate_file, client_key_file, .. } = options;
        let client_certificate = match (client_certificate_file, client_key_file) {
            (Some(certificate), Some(key)) => Some((certificate.as_path(), key.as_path())),
            (None, None) => None,
            _ => return Err(wrong("a client certificate needs a key, and a key a certificate".to_owned())),
        };
        if url.scheme() == "http" && (ca_file.is_some() || client_certificate.is_some()) {
            return Err(wrong("a CA file or a client certificate needs an https:// address".to_owned()));
        }
        let token = Token::of(options.token.as_deref(), options.token_file.as_deref()).map_err(wrong)?;
        let tls = match url.scheme() {
            "http" => tls::without_authorities(),
            _ => tls::config(ca_file.as_deref(), client_certificate).await,
        };
        let builder = reqwest_transport::builder(tls.map_err(wrong)?, options.connect_timeout, &options.user_agent);
        let client = builder.build().map_err(|error| wrong(describe(&error)))?;
        let transport = ReqwestTransport::new(client, &url, token).with_gzip(wants_gzip(&url, options));
        Ok(Self::from_transport(Arc::new(transport)))
    }

    /// Returns a client of the apiserver of the cluster in which this program runs, with the pod's
    /// service account. Only the options for compression, the timeout and the user agent apply.
    ///
    /// # Errors
    /// [`ClientError::Address`] outside a pod, or if the service account is not mounted.
    pub async fn in_cluster(options: &HttpClientOptions) -> Result<Self, ClientError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let host = variable("KUBERNETES_SERVICE_HOST");
        let port = variable("KUBERNETES_SERVICE_PORT");
        let (Some(host), Some(port)) = (host, port) else {
            let problem = "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set; is this a pod?".to_owned();
            return Err(ClientError::Address { address: "in-cluster".to_owned(), problem });
        };
        Self::in_cluster_at(&host, &port, SERVICE_ACCOUNT.as_ref(), options).await
    }

    async fn in_cluster_at(
        host: &str,
        port: &str,
        service_account: &std::path::Path,
        options: &HttpClientOptions,
    ) -> Result<Self, ClientError> {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let options = HttpClientOptions {
            ca_file: Some(service_account.join("ca.crt")),
            client_certificate_file: None,
            client_key_file: None,
            token: None,
            token_file: Some(service_account.join("token")),
            ..options.clone()
        };
        Self::new(&format!("https://{host}:{port}"), &options).await
    }

    /// Returns a client of the cluster in a kubeconfig: the given file, or otherwise those in
    /// `$KUBECONFIG`, or `~/.kube/config`; the given context, or otherwise the current one. Only
    /// the options for the timeout and the user agent apply. The cluster's `disable-compression`
    /// replaces the option. Needs the feature `kubeconfig`.
    ///
    /// If the process has no default crypto provider of rustls, ring becomes it. Client
    /// certificates and CA files are read once.
    ///
    /// # Errors
    /// [`ClientError::Address`] if the file cannot be used, or an exec plugin fails.
    #[cfg(feature = "kubeconfig")]
    pub async fn from_kubeconfig(
        file: Option<&std::path::Path>,
        context: Option<&str>,
        options: &HttpClientOptions,
    ) -> Result<Self, ClientError> {
        let transport = super::kubeconfig::transport(file, context, options).await.map_err(|problem| {
            let address = file.map_or_else(|| "kubeconfig".to_owned(), |file| file.display().to_string());
            ClientError::Address { address, problem }
        })?;
        Ok(Self::from_transport(Arc::new(transport)))
    }

    /// Returns a client over another transport, for tests and simulations.
    pub fn from_transport(transport: Arc<dyn HttpTransport>) -> Self {
        Self { transport }
    }

    /// Scheme, host and port.
    pub fn address(&self) -> &str {
        self.transport.address()
    }

    /// Reads a whole answer. Every status except 200 is an error.
    pub(super) async fn read(
        &self,
        path_and_query: String,
        accept: &'static str,
        limits: ReadLimits,
    ) -> Result<Bytes, ClientError> {
        let address = self.address();
        let read = async {
            let response = self.transport.get(path_and_query, accept).await?.success(address).await?;
            response.bytes(limits.bytes_max, address).await
        };
        tokio::time::timeout(limits.timeout, read).await.unwrap_or_else(|_| {
            let message = format!("no complete answer within {:?}", limits.timeout);
            Err(ClientError::HttpUnreachable { address: address.to_owned(), message })
        })
    }

    /// Returns the transport that sends the requests.
    pub fn transport(&self) -> &dyn HttpTransport {
        &*self.transport
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_error_names_an_invalid_address_or_file_and_quotes_no_secret() {
        let options = HttpClientOptions { token: Some("very-secret".to_owned()), ..HttpClientOptions::default() };
        assert!(!format!("{options:?}").contains("very-secret"));
        let client = HttpClient::new("https://h:6443/prefix/", &options).await.unwrap();
        assert_eq!(format!("{client:?}"), "HttpClient { address: \"https://h:6443\" }");
        for address in ["127.0.0.1:6443", "ftp://h", "https://", "https://h:99999", "https://h?a=b"] {
            let error = HttpClient::new(address, &options).await.unwrap_err();
            assert!(error.to_string().contains("not the URL of a Kubernetes API"), "{error}");
        }
        let error = HttpClient::new("https://admin:very-secret@h", &options).await.unwrap_err().to_string();
        assert!(error.contains("passwords are not supported") && !error.contains("very-secret"), "{error}");
        let options = HttpClientOptions { ca_file: Some("/does/not/exist".into()), ..HttpClientOptions::default() };
        let error = HttpClient::new("https://h", &options).await.unwrap_err().to_string();
        assert!(error.contains("CA file /does/not/exist: No such file"), "{error}");
        let error = HttpClient::new("http://h", &options).await.unwrap_err().to_string();
        assert!(error.contains("needs an https:// address"), "{error}");
        let options = HttpClientOptions { client_key_file: Some("/k".into()), ..HttpClientOptions::default() };
        assert!(HttpClient::new("https://h", &options).await.unwrap_err().to_string().contains("needs a key"));
    }

    #[test]
    fn only_servers_elsewhere_are_asked_for_gzip_and_not_against_the_option() {
        let plain = HttpClientOptions { disable_compression: true, ..HttpClientOptions::default() };
        for (address, expected) in [
            ("https://kube.example:6443", true),
            ("https://[fd00::1]", true),
            ("http://localhost:7443", false),
            ("http://127.0.0.1:7443", false),
            ("https://[::1]:6443", false),
        ] {
            let url = address.parse().unwrap();
            assert_eq!(wants_gzip(&url, &HttpClientOptions::default()), expected, "{address}");
            assert!(!wants_gzip(&url, &plain), "{address}");
        }
    }

    #[tokio::test]
    async fn a_pod_uses_its_service_account() {
        let dir = tempfile::tempdir().unwrap();
        let options = HttpClientOptions::default();
        let error = HttpClient::in_cluster_at("fd00::1", "443", dir.path(), &options).await.unwrap_err().to_string();
        assert!(error.contains("ca.crt: No such file"), "{error}");
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.crt"), certificate.pem()).unwrap();
        let client = HttpClient::in_cluster_at("fd00::1", "6443", dir.path(), &options).await.unwrap();
        assert_eq!(client.address(), "https://[fd00::1]:6443");
        let error = client.transport().get("/api".to_owned(), "application/json").await.unwrap_err().to_string();
        assert!(error.contains("token: No such file"), "{error}");
    }
}
