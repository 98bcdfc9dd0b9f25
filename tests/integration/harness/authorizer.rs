//! An authorizer webhook of kube-apiserver: an HTTPS server that denies by a rule of the test, and
//! has no opinion of everything else.

use std::{convert::Infallible, net::SocketAddr, path::PathBuf, sync::Arc};

use http::{Request, Response, header::CONTENT_TYPE};
use http_body_util::BodyExt;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_rustls::TlsAcceptor;

use super::pki::{Authority, IssuedPem};

/// Function from the `spec` of a SubjectAccessReview to the reason of its denial, or `None`.
pub(crate) type Rule = fn(&Value) -> Option<&'static str>;

/// A running webhook. It stops when dropped.
pub(crate) struct Authorizer {
    config: PathBuf,
    _dir: TempDir,
    accepts: JoinHandle<()>,
}

impl Authorizer {
    /// Starts a webhook that is asked before RBAC.
    pub(crate) async fn start(denies: Rule) -> Authorizer {
        let authority = Authority::new();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let IssuedPem { certificate, key } = authority.server();
        let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let tls = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let accepts = tokio::spawn(accept(listener, TlsAcceptor::from(Arc::new(tls)), denies));
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("ca.pem"), &authority.ca_pem).unwrap();
        std::fs::write(path("kubeconfig"), kubeconfig(addr, &path("ca.pem"))).unwrap();
        let config = path("authorization.yaml");
        std::fs::write(&config, configuration(&path("kubeconfig"))).unwrap();
        Authorizer { config, _dir: dir, accepts }
    }

    /// The flag of kube-apiserver that puts it before RBAC.
    pub(crate) fn flag(&self) -> String {
        format!("--authorization-config={}", self.config.display())
    }
}

impl Drop for Authorizer {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

fn kubeconfig(addr: SocketAddr, ca: &std::path::Path) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{ name: c, cluster: {{ server: 'https://{addr}/authorize', certificate-authority: '{}' }} }}]\n\
         contexts: [{{ name: c, context: {{ cluster: c, user: u }} }}]\nusers: [{{ name: u, user: {{}} }}]\n",
        ca.display()
    )
}

/// An `AuthorizationConfiguration`. A webhook that fails denies, so that a broken one is noticed.
fn configuration(kubeconfig: &std::path::Path) -> String {
    let webhook = json!({
        "timeout": "10s",
        "authorizedTTL": "1s",
        "unauthorizedTTL": "1s",
        "subjectAccessReviewVersion": "v1",
        "matchConditionSubjectAccessReviewVersion": "v1",
        "failurePolicy": "Deny",
        "connectionInfo": { "type": "KubeConfigFile", "kubeConfigFile": kubeconfig },
    });
    let authorizers =
        json!([{ "type": "Webhook", "name": "denies", "webhook": webhook }, { "type": "RBAC", "name": "rbac" }]);
    let version = "apiserver.config.k8s.io/v1";
    let kind = "AuthorizationConfiguration";
    // JSON is YAML.
    json!({ "apiVersion": version, "kind": kind, "authorizers": authorizers }).to_string()
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, denies: Rule) {
    while let Ok((stream, _)) = listener.accept().await {
        let tls = tls.clone();
        tokio::spawn(async move {
            let Ok(stream) = tls.accept(stream).await else { return };
            let service = service_fn(move |request| answer(request, denies));
            // Ends with the connection.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(request: Request<Incoming>, denies: Rule) -> Result<Response<String>, Infallible> {
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let review: Value = serde_json::from_slice(&body).unwrap_or_default();
    let reason = denies(&review["spec"]);
    let status = json!({ "allowed": false, "denied": reason.is_some(), "reason": reason.unwrap_or_default() });
    let verdict = json!({ "apiVersion": review["apiVersion"], "kind": review["kind"], "status": status });
    let mut response = Response::new(verdict.to_string());
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    Ok(response)
}
