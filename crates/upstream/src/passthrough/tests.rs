//! Tests of forwarded requests, and of servers that fail in the middle of them.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures::future::join_all;
use http::Uri;
use http_body_util::Full;
use rustls::{ServerConfig, pki_types::PrivateKeyDer};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{scripted_server::options, *};

/// The answer of a server that has read a whole request.
#[derive(Debug, Clone, Copy)]
enum Then {
    /// Answers 201.
    Answers,
    /// Sends bytes that are not TLS.
    BreaksTls,
}

/// A server that speaks HTTP/1.1 over TLS, and the kubeconfig of its clients.
pub(super) struct Server {
    pub(super) certificate_pem: String,
    address: std::net::SocketAddr,
    /// The requests that it has read.
    read: Arc<AtomicUsize>,
    dir: TempDir,
}

fn certified() -> rcgen::CertifiedKey<rcgen::KeyPair> {
    rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap()
}

impl Server {
    async fn start(then: Then) -> Self {
        let read = Arc::new(AtomicUsize::new(0));
        let count = read.clone();
        let serve = move |stream| {
            let count = count.clone();
            async move { serve(stream, then, &count).await }
        };
        Self { read, ..Self::serving(&[], serve).await }
    }

    /// A server whose connections are over HTTP/2.
    pub(super) async fn start_http2<F>(serve: impl Fn(TlsStream<TcpStream>) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self::serving(&[b"h2"], serve).await
    }

    async fn serving<F>(protocols: &[&[u8]], serve: impl Fn(TlsStream<TcpStream>) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let certified = certified();
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
        let tls = ServerConfig::builder().with_no_client_auth();
        let mut tls = tls.with_single_cert(vec![certified.cert.der().clone()], key).unwrap();
        tls.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let read = Arc::default();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                tokio::spawn(serve(stream));
            }
        });
        Self { certificate_pem: certified.cert.pem(), address, read, dir: tempfile::tempdir().unwrap() }
    }

    /// Writes the kubeconfig, which trusts this certificate.
    pub(super) fn trust(&self, certificate_pem: &str) -> UpstreamSettings {
        use base64::{Engine, prelude::BASE64_STANDARD};
        let path = self.dir.path().join("kubeconfig");
        let text = format!(
            "{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{}}}}], \
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: 'https://{}', certificate-authority-data: {}}}}}]}}",
            self.address,
            BASE64_STANDARD.encode(certificate_pem)
        );
        std::fs::write(&path, text).unwrap();
        UpstreamSettings { kubeconfig: Some(path), context: None }
    }

    fn read(&self) -> usize {
        self.read.load(Ordering::SeqCst)
    }
}

/// Answers the one request of a connection, whose body is `{}`.
async fn serve(mut stream: TlsStream<TcpStream>, then: Then, read: &AtomicUsize) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n{}") {
        let Ok(byte) = stream.read_u8().await else { return };
        request.push(byte);
    }
    read.fetch_add(1, Ordering::SeqCst);
    let _written = match then {
        Then::Answers => {
            stream.write_all(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await
        }
        Then::BreaksTls => stream.get_mut().0.write_all(b"this is not a record of TLS").await,
    };
    // Until the client has closed it.
    let _end = stream.read_u8().await;
}

fn post(body: impl Into<Bytes>, kept_bytes_max: usize) -> Forwarded {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed_unsync();
    let request = Request::post("/api/v1/namespaces/a/configmaps").body(body).unwrap();
    Forwarded { request, acting_as: None, is_upgrade: false, kept_bytes_max }
}

#[tokio::test]
async fn requests_that_fail_together_after_a_change_of_the_ca_are_all_sent_again() {
    let server = Server::start(Then::Answers).await;
    let settings = server.trust(&certified().cert.pem());
    let passthrough = Passthrough::from_settings(settings, options()).await.unwrap();
    server.trust(&server.certificate_pem);
    let sent = join_all((0..8).map(|_| passthrough.send(post("{}", 2)))).await;
    let failed: Vec<_> = sent.into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{} of 8 failed: {:?}", failed.len(), failed.first());
    assert_eq!(server.read(), 8);
}

#[tokio::test]
async fn a_write_is_not_sent_again_if_tls_breaks_after_it() {
    let server = Server::start(Then::BreaksTls).await;
    let passthrough = Passthrough::from_settings(server.trust(&server.certificate_pem), options()).await.unwrap();
    let error = passthrough.send(post("{}", 2)).await.unwrap_err();
    assert_eq!((error.reason(), server.read()), ("tls", 1), "{error}");
}

#[tokio::test(start_paused = true)]
async fn only_a_body_that_is_kept_is_sent_again() {
    for (bytes, kept_bytes_max, times) in [(3, 3, 9), (4, 3, 1), (4, 0, 1), (1 << 20, 1 << 20, 9)] {
        let (passthrough, sent) = scripted_server::to_closing_server();
        let error = passthrough.send(post(vec![b'x'; bytes], kept_bytes_max)).await.unwrap_err();
        let sent = sent.load(Ordering::SeqCst);
        assert_eq!((error.reason(), sent), ("unread", times), "{bytes} bytes, of which {kept_bytes_max} are kept");
    }
}

#[test]
fn every_identity_header_is_removed() {
    let mut headers = HeaderMap::new();
    for name in
        ["authorization", "impersonate-user", "impersonate-extra-scopes", "x-remote-user", "accept", "x-request-id"]
    {
        headers.append(http::HeaderName::from_static(name), http::HeaderValue::from_static("x"));
        headers.append(http::HeaderName::from_static(name), http::HeaderValue::from_static("y"));
    }
    remove_credentials(&mut headers);
    let mut left: Vec<_> = headers.keys().map(|name| name.as_str()).collect();
    left.sort_unstable();
    assert_eq!(left, ["accept", "x-request-id"]);
}

#[test]
fn an_anonymous_configuration_has_no_credentials() {
    let mut config = Config::new(Uri::from_static("https://h:6443"));
    config.auth_info.client_certificate_data = Some("certificate".to_owned());
    config.auth_info.username = Some("kubefan".to_owned());
    config.auth_info.impersonate = Some("admin".to_owned());
    config.headers.push((header::AUTHORIZATION, http::HeaderValue::from_static("Bearer x")));
    let config = anonymous(config);
    assert_eq!(format!("{:?}", config.auth_info), format!("{:?}", AuthInfo::default()));
    assert!(config.headers.is_empty());
}
