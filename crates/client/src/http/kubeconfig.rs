//! A connection as a kubeconfig describes it. kube-client provides the TLS configuration and the
//! credentials: exec plugins, OIDC, tokens, impersonation. The requests are sent like those of
//! every other [`HttpClient`](super::HttpClient), so there are no hidden retries and no limit for a
//! quiet watch.

use std::{net::SocketAddr, path::Path, sync::Arc};

use kube_client::{Config, client::AuthError};
use reqwest::{Proxy, dns};
use rustls::crypto::{CryptoProvider, ring};
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneSyncService};

use super::{
    options::HttpClientOptions,
    reqwest_transport::{self, Execute, ReqwestTransport, describe},
};
use crate::{error::root_cause, token::Token};
use kubefan_common::kubeconfig::{
    self, Credentials, ProxyEnvironment, TokenOfFile, explain_auth, proxy_url, real_host, request_url, tls_config,
    usual_files, wants_gzip,
};

/// Sends a request with the kubeconfig's credentials.
type Service = BoxCloneSyncService<::http::Request<reqwest::Body>, ::http::Response<reqwest::Body>, BoxError>;

/// Reads a kubeconfig and returns a transport. The errors quote nothing from the file.
pub(super) async fn transport(
    file: Option<&Path>,
    context: Option<&str>,
    options: &HttpClientOptions,
) -> Result<ReqwestTransport, String> {
    // kube-client uses the process's provider, and panics without one.
    if CryptoProvider::get_default().is_none() {
        // Another thread may have installed one meanwhile, which is as good.
        let _ = ring::default_provider().install_default();
    }
    let config = load(file, context, &ProxyEnvironment::read()).await?;
    let options = options.clone();
    // Exec plugins run here, and may take long.
    let built = tokio::task::spawn_blocking(move || build(config, &options)).await;
    built.map_err(|error| format!("the credential plugin failed: {error}"))?
}

async fn load(file: Option<&Path>, context: Option<&str>, proxies: &ProxyEnvironment) -> Result<Config, String> {
    let files = match file {
        Some(file) => vec![file.to_owned()],
        None => usual_files().into_iter().filter(|file| file.exists()).collect(),
    };
    if files.is_empty() {
        return Err("no kubeconfig exists in $KUBECONFIG or at ~/.kube/config".to_owned());
    }
    kubeconfig::configuration(kubeconfig::read(&files)?, context, proxies).await
}

fn build(config: Config, options: &HttpClientOptions) -> Result<ReqwestTransport, String> {
    let url =
        |uri: &::http::Uri| uri.to_string().parse::<reqwest::Url>().map_err(|_| "its server is not a URL".to_owned());
    let address = url(&config.cluster_url)?.origin().ascii_serialization();
    let base = url(&request_url(&config)?)?;
    let tls = tls_config(&config)?;
    let mut builder = reqwest_transport::builder(tls, options.connect_timeout, &options.user_agent);
    if let Some(url) = proxy_url(&config)? {
        let proxy = Proxy::all(url).map_err(|_| "its proxy-url is not the URL of a proxy".to_owned())?;
        builder = builder.proxy(proxy);
    }
    if let Some(host) = real_host(&config) {
        builder = builder.dns_resolver(Arc::new(ResolveAs { host: host.to_owned() }));
    }
    let client = builder.build().map_err(|error| describe(&error))?;
    let Credentials { token_file, auth, headers } = Credentials::new(&config)?;
    let token = token_file.map_or(Token::None, |TokenOfFile { path, inline }| Token::file(path, inline));
    let sending = client.clone();
    let send = service_fn(move |request: ::http::Request<reqwest::Body>| {
        let client = sending.clone();
        async move { Ok::<_, BoxError>(client.execute(request.try_into()?).await?.into()) }
    });
    let service: Service =
        BoxCloneSyncService::new(ServiceBuilder::new().option_layer(auth).layer(headers).service(send));
    let execute: Execute = Box::new(move |request| {
        let service = service.clone();
        Box::pin(async move {
            let request = ::http::Request::try_from(request).map_err(|error| describe(&error))?;
            service.oneshot(request).await.map(reqwest::Response::from).map_err(|error| explain_request(&error))
        })
    });
    let transport = ReqwestTransport::new(client, &base, token).with_gzip(wants_gzip(&config));
    Ok(transport.with_execute(address, execute))
}

/// Resolves every name to the addresses of one host.
struct ResolveAs {
    host: String,
}

impl dns::Resolve for ResolveAs {
    fn resolve(&self, _name: dns::Name) -> dns::Resolving {
        let host = self.host.clone();
        Box::pin(async move {
            // Port 0 stands for the URL's port.
            let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            Ok(Box::new(addresses.into_iter()) as dns::Addrs)
        })
    }
}

fn explain_request(error: &BoxError) -> String {
    if let Some(error) = error.downcast_ref::<reqwest::Error>() {
        return describe(error);
    }
    error.downcast_ref::<AuthError>().map_or_else(|| root_cause(&**error), explain_auth)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{HttpClient, transport::HttpTransport};

    const CONFIG: &str = "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters:\n\
        - name: c\n  cluster: {server: 'SERVER', tls-server-name: 'kube.example'}\n\
        users:\n- name: u\n  user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: /does/not/exist, interactiveMode: Never}}\n\
        - name: t\n  user: {token: very-secret}\n\
        contexts:\n- name: a\n  context: {cluster: c, user: t}\n- name: b\n  context: {cluster: c, user: u}\n";

    async fn client(text: &str, context: Option<&str>) -> Result<HttpClient, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        std::fs::write(&file, text).unwrap();
        let client = HttpClient::from_kubeconfig(Some(&file), context, &HttpClientOptions::default()).await;
        client.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn the_errors_of_a_kubeconfig_quote_no_secret() {
        let text = CONFIG.replace("SERVER", "https://h:6443");
        let client_of = |context: &'static str| client(&text, Some(context));
        assert!(client_of("missing").await.unwrap_err().contains("missing"));
        assert!(client_of("b").await.unwrap_err().contains("plugin could not be started"));
        let error = client(&text.replace("very-secret}", "very-secret"), None).await.unwrap_err();
        assert!(error.contains("bad YAML") && !error.contains("very-secret"), "{error}");
        let client = client(&text, None).await.unwrap();
        assert_eq!(client.address(), "https://h:6443");
        assert!(!format!("{client:?}").contains("secret"));
    }

    #[tokio::test]
    async fn a_broken_private_key_is_never_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["kubefan".to_owned()]).unwrap();
        let key = made.signing_key.serialize_pem();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("a.crt"), made.cert.pem()).unwrap();
        let secret = key.lines().nth(1).unwrap().get(..12).unwrap();
        let numbers = secret.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(", ");
        let with_blank_line = key.replacen('\n', &format!("\n{secret}\n\n"), 1);
        for broken in [key.replace('\n', " "), key.replace('\n', "\\n"), with_blank_line] {
            std::fs::write(path("a.key"), &broken).unwrap();
            let user = format!("client-certificate: {}, client-key: {}", path("a.crt"), path("a.key"));
            let as_key = CONFIG.replace("SERVER", "https://h:6443").replace("token: very-secret", &user);
            let as_ca = format!("certificate-authority: {}, tls-server-name", path("a.key"));
            let as_ca = CONFIG.replace("SERVER", "https://h:6443").replace("tls-server-name", &as_ca);
            for text in [as_key, as_ca] {
                // The library takes some of them.
                let error = client(&text, None).await.err().unwrap_or_default();
                assert!(!error.contains(secret) && !error.contains(&numbers), "{error}");
            }
        }
    }

    #[tokio::test]
    async fn requests_carry_the_token_of_the_kubeconfig() {
        let text = CONFIG.replace(", tls-server-name: 'kube.example'", "");
        assert_eq!(sent_authorization(&text).await, "Bearer very-secret");
    }

    /// The `Authorization` header of a request with a kubeconfig whose server is `SERVER`.
    async fn sent_authorization(text: &str) -> String {
        let app = axum::Router::new().fallback(|headers: axum::http::HeaderMap| async move {
            headers["authorization"].to_str().unwrap().to_owned()
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move { axum::serve(listener, app).await });
        let client = client(&text.replace("SERVER", &server), None).await.unwrap();
        let transport: &dyn HttpTransport = client.transport();
        let response = transport.get("/api".to_owned(), "application/json").await.unwrap();
        let authorization = response.bytes(100, "h").await.unwrap();
        serving.abort();
        String::from_utf8(authorization.to_vec()).unwrap()
    }
}
