//! A connection as a kubeconfig describes it. kube-client reads the file, and provides the TLS
//! configuration and the credentials: exec plugins, OIDC, tokens, impersonation. The requests are
//! sent like those of every other [`HttpClient`](super::HttpClient), so there are no hidden retries
//! and no limit for a quiet watch.

use std::{net::SocketAddr, path::Path, sync::Arc};

use kube_client::{
    Config,
    client::{AuthError, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use reqwest::{Proxy, dns};
use rustls::crypto::{CryptoProvider, ring};
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneSyncService};

use super::{
    options::HttpClientOptions,
    reqwest_transport::{self, Execute, ReqwestTransport, describe},
};
use crate::{error::root_cause, token::Token};
use kubefan_common::{
    kubeconfig::{fault_of_context, fault_of_file},
    text::with_single_quotes,
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
    let config = load(file, context).await?;
    let options = options.clone();
    // Exec plugins run here, and may take long.
    let built = tokio::task::spawn_blocking(move || build(config, &options)).await;
    built.map_err(|error| format!("the credential plugin failed: {error}"))?
}

async fn load(file: Option<&Path>, context: Option<&str>) -> Result<Config, String> {
    let kubeconfig = match file {
        Some(file) => Kubeconfig::read_from(file),
        None => Kubeconfig::read(),
    };
    let kubeconfig = kubeconfig.map_err(|error| explain(&error))?;
    // Merged files have no name twice, and `read` does not show them one by one.
    if let Some(fault) = fault_of_file(&kubeconfig).or_else(|| fault_of_context(&kubeconfig, context)) {
        return Err(fault);
    }
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|error| explain(&error))
}

fn build(mut config: Config, options: &HttpClientOptions) -> Result<ReqwestTransport, String> {
    let (address, base) = base(&config)?;
    let tls = config.rustls_client_config().map_err(|error| explain_auth(&error))?;
    let mut builder = reqwest_transport::builder(tls, options.connect_timeout, &options.user_agent);
    if let Some(url) = &config.proxy_url {
        if config.tls_server_name.is_some() {
            return Err("tls-server-name together with a proxy is not supported".to_owned());
        }
        let proxy = Proxy::all(url.to_string()).map_err(|_| "its proxy-url is not the URL of a proxy".to_owned())?;
        builder = builder.proxy(proxy);
    }
    if config.tls_server_name.is_some() {
        let host = config.cluster_url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        builder = builder.dns_resolver(Arc::new(ResolveAs { host }));
    }
    let client = builder.build().map_err(|error| describe(&error))?;
    // kube-client would send a token file's trailing newline, and would not read the file again
    // after a refusal.
    let other = config.auth_info.auth_provider.is_some() || config.auth_info.username.is_some();
    let token = match config.auth_info.token_file.take_if(|_| !other) {
        Some(file) => {
            config.auth_info.token = None;
            Token::file(file.into())
        }
        None => Token::None,
    };
    let execute = execute(&config, client.clone())?;
    Ok(ReqwestTransport::new(client, &base, token).with_execute(address, execute))
}

/// The way to execute requests with the configuration's credentials.
fn execute(config: &Config, client: reqwest::Client) -> Result<Execute, String> {
    let auth = config.auth_layer().map_err(|error| explain_auth(&error))?;
    let headers = config.extra_headers_layer().map_err(|_| "its impersonation settings are not valid headers")?;
    let send = service_fn(move |request: ::http::Request<reqwest::Body>| {
        let client = client.clone();
        async move { Ok::<_, BoxError>(client.execute(request.try_into()?).await?.into()) }
    });
    let service: Service =
        BoxCloneSyncService::new(ServiceBuilder::new().option_layer(auth).layer(headers).service(send));
    Ok(Box::new(move |request| {
        let service = service.clone();
        Box::pin(async move {
            let request = ::http::Request::try_from(request).map_err(|error| describe(&error))?;
            service.oneshot(request).await.map(reqwest::Response::from).map_err(|error| explain_request(&error))
        })
    }))
}

/// The address for messages, and the URL for requests. With `tls-server-name` the URL's host is
/// that name, because reqwest checks the certificate against the URL; [`ResolveAs`] then resolves
/// the name to the real host.
fn base(config: &Config) -> Result<(String, reqwest::Url), String> {
    let invalid = || "its server is not a URL".to_owned();
    let mut url: reqwest::Url = config.cluster_url.to_string().parse().map_err(|_| invalid())?;
    url.set_username("").and_then(|()| url.set_password(None)).map_err(|()| invalid())?;
    let address = url.origin().ascii_serialization();
    if let Some(name) = &config.tls_server_name {
        url.set_host(Some(name)).map_err(|_| "its tls-server-name is not a host name".to_owned())?;
    }
    Ok((address, url))
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

fn explain(error: &KubeconfigError) -> String {
    match error {
        // The parser's own text may quote the file.
        KubeconfigError::Parse(_) => "not a kubeconfig: bad YAML".to_owned(),
        other => with_single_quotes(&other.to_string()),
    }
}

fn explain_request(error: &BoxError) -> String {
    if let Some(error) = error.downcast_ref::<reqwest::Error>() {
        return describe(error);
    }
    error.downcast_ref::<AuthError>().map_or_else(|| root_cause(&**error), describe_auth)
}

fn explain_auth(error: &kube_client::Error) -> String {
    match error {
        kube_client::Error::Auth(error) => describe_auth(error),
        other => root_cause(other),
    }
}

/// Describes the failure without the output of a credential plugin, which may contain the
/// credential.
fn describe_auth(error: &AuthError) -> String {
    match error {
        AuthError::AuthExecRun { out, .. } => format!("the exec credential plugin failed: {}", out.status),
        AuthError::AuthExecStart(source) => format!("the exec credential plugin could not be started: {source}"),
        AuthError::AuthExecParse(_) => "the exec credential plugin did not print an ExecCredential".to_owned(),
        AuthError::ParseTokenKey(_) => "the credential command did not print JSON".to_owned(),
        AuthError::InvalidBasicAuth(_) | AuthError::InvalidBearerToken(_) => {
            "the token or password is not a valid header value".to_owned()
        }
        other => other.to_string(),
    }
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
    async fn requests_carry_the_token_of_the_kubeconfig() {
        let app = axum::Router::new().fallback(|headers: axum::http::HeaderMap| async move {
            headers["authorization"].to_str().unwrap().to_owned()
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move { axum::serve(listener, app).await });
        let text = CONFIG.replace("SERVER", &server).replace(", tls-server-name: 'kube.example'", "");
        let client = client(&text, None).await.unwrap();
        let transport: &dyn HttpTransport = client.transport();
        let response = transport.get("/api".to_owned(), "application/json").await.unwrap();
        assert_eq!(response.bytes(100, "h").await.unwrap(), "Bearer very-secret");
        serving.abort();
    }
}
