//! The transport of programs: reqwest, over TLS or in plain text.
//!
//! A half-open connection must not look like a quiet resource, so HTTP/2 PINGs and TCP keepalive
//! are on.

use std::{error::Error, time::Duration};

use futures::{StreamExt, TryStreamExt, future::BoxFuture};
use reqwest::{
    ClientBuilder, Response,
    header::{self, HeaderMap, HeaderValue},
    redirect,
};

use super::transport::{HttpResponse, HttpTransport};
use crate::{
    budget::{self, FallbackBudget, NamedBudget},
    error::{ClientError, root_cause},
    token::Token,
};
use kubefan_common::api_status;
use kubefan_gzip::{BodyError, GzipError, PlainBody};

/// The window of one stream. With HTTP/2's default of 64 KiB, lists are many times slower.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// More than one stream's window, so that a stream that is not read does not block the others.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// A connection that is silent for this long gets an HTTP/2 PING, or a TCP keepalive probe.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// A PING without an answer for this long means that the connection is dead.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(15);

/// The caches that took part in an answer (RFC 9211).
const CACHE_STATUS: &str = "cache-status";

/// Executes a request that is complete except for credentials that a kubeconfig adds.
pub(super) type Execute = Box<dyn Fn(reqwest::Request) -> BoxFuture<'static, Result<Response, String>> + Send + Sync>;

/// Sends requests with reqwest.
pub(super) struct ReqwestTransport {
    client: reqwest::Client,
    /// Replaces `client`'s own way to execute a request.
    execute: Option<Execute>,
    /// Scheme, authority and path prefix, without a trailing slash.
    base: String,
    address: String,
    token: Token,
    accept_encoding: &'static str,
    budget: NamedBudget,
}

impl ReqwestTransport {
    /// `base` is the URL of the server with an optional path, and without user info.
    pub(super) fn new(client: reqwest::Client, base: &reqwest::Url, token: Token) -> Self {
        let address = base.origin().ascii_serialization();
        let base = format!("{address}{}", base.path().trim_end_matches('/'));
        let accept_encoding = "identity";
        Self { client, execute: None, base, address, token, accept_encoding, budget: NamedBudget::default() }
    }

    /// Asks the server for gzip, or not.
    pub(super) fn with_gzip(mut self, gzip: bool) -> Self {
        self.accept_encoding = if gzip { "gzip" } else { "identity" };
        self
    }

    /// Executes requests in another way.
    #[cfg(feature = "kubeconfig")]
    pub(super) fn with_execute(mut self, address: String, execute: Execute) -> Self {
        self.execute = Some(execute);
        self.address = address;
        self
    }

    async fn send(
        &self,
        path_and_query: &str,
        accept: &'static str,
        token: Option<HeaderValue>,
    ) -> Result<Response, ClientError> {
        let mut request = self
            .client
            .get(format!("{}{path_and_query}", self.base))
            .header(header::ACCEPT, accept)
            .header(header::ACCEPT_ENCODING, self.accept_encoding);
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let request = request.build().map_err(|error| self.unreachable(describe(&error)))?;
        match &self.execute {
            Some(execute) => execute(request).await.map_err(|message| self.unreachable(message)),
            None => self.client.execute(request).await.map_err(|error| self.unreachable(describe(&error))),
        }
    }

    fn unreachable(&self, message: String) -> ClientError {
        ClientError::HttpUnreachable { address: self.address.clone(), message }
    }
}

impl HttpTransport for ReqwestTransport {
    fn get(&self, path_and_query: String, accept: &'static str) -> BoxFuture<'_, Result<HttpResponse, ClientError>> {
        Box::pin(async move {
            let token = self.token.header().await.map_err(|message| self.unreachable(message))?;
            let mut response = self.send(&path_and_query, accept, token.clone()).await?;
            if response.status() == reqwest::StatusCode::UNAUTHORIZED
                && let Some(token) = self.token.replacement(token.as_ref()).await
            {
                response = self.send(&path_and_query, accept, Some(token)).await?;
            }
            note_budget(response.headers(), &self.budget);
            let coding = response.headers().get(header::CONTENT_ENCODING).cloned();
            let retry_after = response.headers().get(header::RETRY_AFTER);
            let retry_after = retry_after.and_then(|value| api_status::retry_after(value.to_str().ok()?));
            let status = response.status().as_u16();
            let address = self.address.clone();
            let plain = PlainBody::new(response.bytes_stream(), coding.as_ref().map(HeaderValue::as_bytes));
            let plain = plain
                .map_err(|error| ClientError::HttpProtocol { address: address.clone(), message: error.to_string() })?;
            let body = plain.map_err(move |error| broken_body(error, address.clone()));
            Ok(HttpResponse { status, retry_after, body: body.boxed() })
        })
    }

    fn address(&self) -> &str {
        &self.address
    }

    fn fallback_budget(&self) -> Option<FallbackBudget> {
        self.budget.last()
    }
}

/// Notes the budget in an answer of kubefan's own. An apiserver's answer that kubefan has passed on
/// is none: its caller may have reached the apiserver by a path of its own.
fn note_budget(headers: &HeaderMap, named: &NamedBudget) {
    let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
    let caches = headers.get_all(CACHE_STATUS).iter().map(text);
    let is_own = |cache: &str| {
        let mut parts = cache.split(';').map(str::trim);
        parts.next() == Some("kubefan") && parts.all(|part| !part.starts_with("fwd=bypass"))
    };
    if caches.collect::<Vec<_>>().join(",").split(',').any(is_own) {
        let values: Vec<_> = headers.get_all(budget::HEADER).iter().map(text).collect();
        named.note(&values.join(","));
    }
}

/// A body that is cut off inside gzip is a broken connection, as without gzip.
fn broken_body(error: BodyError<reqwest::Error>, address: String) -> ClientError {
    match error {
        BodyError::Chunks(error) => ClientError::HttpUnreachable { address, message: describe(&error) },
        BodyError::Gzip(error @ GzipError::CutOff) => {
            ClientError::HttpUnreachable { address, message: error.to_string() }
        }
        BodyError::Gzip(error @ GzipError::Broken(_)) => {
            ClientError::HttpProtocol { address, message: error.to_string() }
        }
    }
}

/// A builder with the settings that do not depend on the server.
pub(super) fn builder(mut tls: rustls::ClientConfig, connect_timeout: Duration, user_agent: &str) -> ClientBuilder {
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .user_agent(user_agent)
        // Another crate may turn on reqwest's feature, whose decoder ends after the first gzip
        // member. `PlainBody` decodes all.
        .no_gzip()
        .connect_timeout(connect_timeout)
        .tcp_nodelay(true)
        .tcp_keepalive(KEEPALIVE_INTERVAL)
        .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
        .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .http2_keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .http2_keep_alive_while_idle(true)
        // A redirect would send the credentials to another host.
        .redirect(redirect::Policy::none())
        .no_proxy()
}

/// The text of the innermost error. The outer ones would repeat the URL.
pub(super) fn describe(error: &reqwest::Error) -> String {
    if error.source().is_some() {
        return root_cause(error);
    }
    if error.is_timeout() { "timed out".to_owned() } else { "the request could not be sent".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_counts_only_in_answers_of_kubefan_itself() {
        for (cache_status, is_believed) in [
            (Some("kubefan; hit"), true),
            (Some("other; hit, kubefan; hit; detail=x"), true),
            (Some("kubefan; fwd=bypass"), false),
            (Some("other; hit"), false),
            (None, false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(budget::HEADER, HeaderValue::from_static("clients=3000, rate=50"));
            if let Some(cache_status) = cache_status {
                headers.insert(CACHE_STATUS, HeaderValue::from_static(cache_status));
            }
            let named = NamedBudget::default();
            note_budget(&headers, &named);
            assert_eq!(named.last().is_some(), is_believed, "{cache_status:?}");
        }
    }
}
