//! Access to an apiserver named by a kubeconfig: an HTTP/2 client for writes, and the connection
//! settings and credentials that receivers use for watches.

use std::{path::Path, sync::Arc};

use bytes::{Bytes, BytesMut};
use h2::{RecvStream, client::SendRequest};
use http::{HeaderValue, Method, Request, Response, Uri, header};
use kubefan_common::kubeconfig::tls_config;
use kubefan_upstream::settings::UpstreamSettings;
use rustls::pki_types::ServerName;
use secrecy::ExposeSecret;
use serde_json::Value;
use tokio::net::lookup_host;

use super::{
    BenchError, body::decoder_of, connector::Connector, counters::Counters, encoding::Encoding, windows::Windows,
};

/// Longest excerpt of an error response in an error message, in characters.
const MESSAGE_CHARS_MAX: usize = 300;

/// The address of a server, and the credentials for it.
#[derive(Clone)]
pub(super) struct Endpoint {
    pub(super) connector: Connector,
    /// Scheme, authority and path prefix.
    base: Arc<str>,
    authorization: Option<HeaderValue>,
}

impl Endpoint {
    /// Reads a kubeconfig. Only client certificates and tokens are supported.
    pub(super) async fn read(kubeconfig: &Path) -> Result<Self, BenchError> {
        let failed = |message: &dyn std::fmt::Display| BenchError::Cluster(message.to_string());
        let settings = UpstreamSettings { kubeconfig: Some(kubeconfig.to_owned()), context: None };
        let config = settings.load().await.map_err(|error| failed(&error))?;
        let uri: &Uri = &config.cluster_url;
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let is_tls = uri.scheme_str() != Some("http");
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let address = lookup_host((&*host, port)).await?.next();
        let address = address.ok_or_else(|| failed(&format_args!("{host} has no address")))?;
        let tls = if is_tls {
            let mut tls = tls_config(&config).map_err(|error| failed(&error))?;
            tls.alpn_protocols = vec![b"h2".to_vec()];
            let name = config.tls_server_name.clone().unwrap_or(host);
            Some((Arc::new(tls), ServerName::try_from(name).map_err(|error| failed(&error))?))
        } else {
            None
        };
        let info = &config.auth_info;
        if info.exec.is_some() || info.auth_provider.is_some() || info.username.is_some() {
            return Err(failed(
                &"bench supports only client certificates and tokens; use a kubeconfig with one of them",
            ));
        }
        let token = match (&info.token_file, &info.token) {
            (Some(file), _) => Some(std::fs::read_to_string(file)?.trim().to_owned()),
            (None, Some(token)) => Some(token.expose_secret().to_owned()),
            (None, None) => None,
        };
        let authorization = token.map(|token| HeaderValue::try_from(format!("Bearer {token}")));
        let authorization = authorization.transpose().map_err(|_| failed(&"the token is not a valid header value"))?;
        let base = uri.to_string().trim_end_matches('/').into();
        Ok(Self { connector: Connector { address, tls }, base, authorization })
    }

    /// An endpoint that requires no credentials.
    pub(super) fn without_credentials(connector: Connector) -> Self {
        let scheme = if connector.tls.is_some() { "https" } else { "http" };
        Self { base: format!("{scheme}://{}", connector.address).into(), connector, authorization: None }
    }

    /// Returns the endpoint for the holder of a token.
    pub(super) fn with_token(&self, token: &str) -> Self {
        Self { authorization: HeaderValue::try_from(format!("Bearer {token}")).ok(), ..self.clone() }
    }

    /// Builds a request for a path such as `/api/v1/pods?watch=1`.
    pub(super) fn request(&self, method: Method, path: &str, content_type: Option<&str>) -> http::Result<Request<()>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        request = request.header(header::ACCEPT, "application/json").header(header::USER_AGENT, "kubefan-bench");
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        if let Some(content_type) = content_type {
            request = request.header(header::CONTENT_TYPE, content_type);
        }
        request.body(())
    }
}

/// An HTTP/2 connection for requests. Clones share it.
#[derive(Clone)]
pub(super) struct RestClient {
    endpoint: Endpoint,
    send: SendRequest<Bytes>,
}

impl RestClient {
    pub(super) async fn connect(endpoint: Endpoint) -> Result<Self, BenchError> {
        Self::connect_counted(endpoint, &Arc::new(Counters::new(0, false))).await
    }

    /// Like [`Self::connect`], and counts the bytes read from the socket.
    pub(super) async fn connect_counted(endpoint: Endpoint, counters: &Arc<Counters>) -> Result<Self, BenchError> {
        let transport = endpoint.connector.connect(counters).await?;
        let windows = Windows::GO;
        let (send, connection) = h2::client::Builder::new()
            .initial_window_size(windows.stream)
            .initial_connection_window_size(windows.connection)
            .max_frame_size(windows.frame)
            .handshake(transport)
            .await
            .map_err(|error| BenchError::Cluster(format!("HTTP/2: {error}")))?;
        // This task ends with the last clone. Its error also fails the pending requests.
        tokio::spawn(async move { connection.await.ok() });
        Ok(Self { endpoint, send })
    }

    /// Opens another connection to the same server. kube-apiserver closes one that is idle for 90
    /// seconds (`http.Server.IdleTimeout`).
    pub(super) async fn reconnect(&self) -> Result<Self, BenchError> {
        Self::connect(self.endpoint.clone()).await
    }

    /// Returns the connection for the holder of a token.
    pub(super) fn with_token(&self, token: &str) -> Self {
        Self { endpoint: self.endpoint.with_token(token), send: self.send.clone() }
    }

    /// Sends a request, and abandons the response once its headers are there.
    pub(super) async fn open(&self, path: &str) -> Result<(), BenchError> {
        let named = |message: String| BenchError::Cluster(format!("GET {path}: {message}"));
        let failed = |error: h2::Error| named(error.to_string());
        let request = self.endpoint.request(Method::GET, path, None).map_err(|error| named(error.to_string()))?;
        let mut send = self.send.clone().ready().await.map_err(failed)?;
        let response = send.send_request(request, true).map_err(failed)?.0.await.map_err(failed)?;
        if response.status().is_success() { Ok(()) } else { Err(named(response.status().to_string())) }
    }

    /// Reads a response in JSON to its end, discards it, and returns its size in bytes.
    pub(super) async fn download(&self, path: &str) -> Result<u64, BenchError> {
        self.list(path, Encoding::Json).await
    }

    /// Reads a list to its end, discards it, and returns the size of its body in bytes, as sent.
    pub(super) async fn list(&self, path: &str, encoding: Encoding) -> Result<u64, BenchError> {
        let mut body = self.get(path, encoding).await?.into_body();
        let mut bytes = 0;
        while let Some(data) = next_data(&mut body).await {
            bytes += data.map_err(|error| of_get(path, &error))?.len() as u64;
        }
        Ok(bytes)
    }

    /// Reads a list to its end, and decodes it.
    ///
    /// # Errors
    /// If a content coding is not complete and correct.
    pub(super) async fn check_list(&self, path: &str, encoding: Encoding) -> Result<(), BenchError> {
        let (head, mut body) = self.get(path, encoding).await?.into_parts();
        let mut decoder = decoder_of(&head.headers).map_err(|message| of_get(path, &message))?;
        while let Some(data) = next_data(&mut body).await {
            let data = data.map_err(|error| of_get(path, &error))?;
            if let Some(decoder) = &mut decoder {
                decoder.push(data);
                while decoder.next_slice().map_err(|error| of_get(path, &error))?.is_some() {}
            }
        }
        if let Some(decoder) = decoder {
            decoder.finish().map_err(|error| of_get(path, &error))?;
        }
        Ok(())
    }

    /// Sends a request for a list, and waits for the head of the response.
    async fn get(&self, path: &str, encoding: Encoding) -> Result<Response<RecvStream>, BenchError> {
        let failed = |error: h2::Error| of_get(path, &error);
        let mut request = self.endpoint.request(Method::GET, path, None).map_err(|error| of_get(path, &error))?;
        encoding.accept_list(request.headers_mut());
        let mut send = self.send.clone().ready().await.map_err(failed)?;
        let response = send.send_request(request, true).map_err(failed)?.0.await.map_err(failed)?;
        if !response.status().is_success() {
            return Err(of_get(path, &response.status()));
        }
        Ok(response)
    }

    /// Sends JSON and returns the response.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Option<&Value>,
    ) -> Result<Value, BenchError> {
        let named = |message: String| BenchError::Cluster(format!("{method} {path}: {message}"));
        let failed = |error: h2::Error| named(error.to_string());
        let request = self.endpoint.request(method.clone(), path, Some(content_type));
        let request = request.map_err(|error| named(error.to_string()))?;
        let mut send = self.send.clone().ready().await.map_err(failed)?;
        let (response, mut stream) = send.send_request(request, body.is_none()).map_err(failed)?;
        if let Some(body) = body {
            stream.send_data(body.to_string().into(), true).map_err(failed)?;
        }
        let (head, mut body) = response.await.map_err(failed)?.into_parts();
        let mut answer = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data.map_err(failed)?;
            // Cannot fail: this many bytes were just received.
            let _ = body.flow_control().release_capacity(data.len());
            answer.extend_from_slice(&data);
        }
        if !head.status.is_success() {
            let text: String = String::from_utf8_lossy(&answer).chars().take(MESSAGE_CHARS_MAX).collect();
            return Err(named(format!("{} {text}", head.status)));
        }
        serde_json::from_slice(&answer).map_err(|error| named(error.to_string()))
    }
}

/// Reads the next part of a body; `None` at its end.
async fn next_data(body: &mut RecvStream) -> Option<Result<Bytes, h2::Error>> {
    let data = body.data().await?;
    if let Ok(data) = &data {
        // Cannot fail: this many bytes were just received.
        let _ = body.flow_control().release_capacity(data.len());
    }
    Some(data)
}

/// The error of a GET request.
fn of_get(path: &str, error: &dyn std::fmt::Display) -> BenchError {
    BenchError::Cluster(format!("GET {path}: {error}"))
}
