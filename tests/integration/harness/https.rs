//! HTTPS requests that are sent as they are: no library normalizes their paths, merges their
//! headers or follows where they lead.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use http_body_util::BodyExt;
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::pki::IssuedPem;

/// Time limit for an answer with its body. A watch sets its own, shorter timeout.
const ANSWER_AT_MOST: Duration = Duration::from_secs(60);

/// A server, and the client that connects to it.
#[derive(Clone, Copy)]
pub(crate) struct Https<'a> {
    pub(crate) addr: SocketAddr,
    /// The authority of the server's certificate, in PEM.
    pub(crate) ca_pem: &'a str,
    /// The client's certificates and key, in PEM.
    pub(crate) identity: Option<&'a IssuedPem>,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// Empty after an upgrade.
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl Https<'_> {
    /// Sends a request on a connection of its own. `path` is in the form of HTTP/1.1: a path with
    /// its query, or a whole URI.
    pub(crate) async fn ask(
        &self,
        version: Version,
        method: &Method,
        path: &str,
        headers: &[(String, String)],
    ) -> Answer {
        let asked = timeout(ANSWER_AT_MOST, self.asked(version, method, path, headers)).await;
        asked.unwrap_or_else(|_| panic!("{method} {path}: no whole answer from {}", self.addr))
    }

    async fn asked(&self, version: Version, method: &Method, path: &str, headers: &[(String, String)]) -> Answer {
        let mut request = Request::builder().method(method);
        if version == Version::HTTP_11 {
            request = request.header(header::HOST, self.addr.to_string());
        }
        for (name, value) in headers {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            request = request.header(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        if version == Version::HTTP_2 {
            let uri = Uri::builder().scheme("https").authority(self.addr.to_string()).path_and_query(path);
            let io = TokioIo::new(self.connect(b"h2").await);
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
            tokio::spawn(connection);
            let request = request.uri(uri.build().unwrap()).body(String::new()).unwrap();
            return answer(sender.send_request(request).await.unwrap()).await;
        }
        let io = TokioIo::new(self.connect(b"http/1.1").await);
        let (mut sender, connection) = http1::handshake(io).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        let request = request.uri(path).body(String::new()).unwrap();
        answer(sender.send_request(request).await.unwrap()).await
    }

    /// Sends bytes on a connection, and returns everything that comes until the server closes it.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect(b"http/1.1").await;
        // The server may refuse it before all has been written, or end without a TLS close.
        let _ = stream.write_all(bytes).await;
        let mut all = Vec::new();
        let read = timeout(ANSWER_AT_MOST, stream.read_to_end(&mut all)).await;
        let text = String::from_utf8_lossy(&all).into_owned();
        assert!(read.is_ok(), "{} keeps the connection open: {text}", self.addr);
        text
    }

    /// A connection for this protocol of ALPN.
    pub(crate) async fn connect(&self, protocol: &[u8]) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.ca_pem.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let mut config = match self.identity {
            None => builder.with_no_client_auth(),
            Some(IssuedPem { certificate, key }) => {
                let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).map(Result::unwrap).collect();
                builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
            }
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        let stream = TcpStream::connect(self.addr).await.unwrap();
        TlsConnector::from(Arc::new(config)).connect(ServerName::from(self.addr.ip()), stream).await.unwrap()
    }
}

async fn answer(response: Response<Incoming>) -> Answer {
    let status = response.status();
    let mut body = Vec::new();
    if status != StatusCode::SWITCHING_PROTOCOLS {
        let mut incoming = response.into_body();
        // A body that is cut off counts as far as it came.
        while let Some(Ok(frame)) = incoming.frame().await {
            body.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        }
    }
    Answer { status, body }
}
