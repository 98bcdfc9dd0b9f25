//! Watches as websockets: each event is one message (`WatchServer.HandleWS` in the apiserver, over
//! golang.org/x/net/websocket).
//!
//! The hazard is a browser: unlike other answers, web pages may read websockets of any host. So an
//! `Origin` is required, as the apiserver does. It must be the requested host, this machine, or an
//! origin whose pages may read other answers; the apiserver does not check this. Messages of the
//! client are read within small limits, for the sake of pings and the close, and discarded.

use std::{iter, time::Duration};

use axum::body::Body;
use bytes::{Buf, Bytes};
use futures::{SinkExt, StreamExt};
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Uri, header, uri::Authority};
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use kubefan_access::authentication::websocket_protocols::WebsocketProtocols;
use kubefan_audit::request_head::AUDIT_ID;
use kubefan_model::Media;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error, Message, Utf8Bytes,
        handshake::derive_accept_key,
        protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
    },
};
use tokio_util::sync::CancellationToken;

use super::{answer::CACHE_STATUS, hop_by_hop, host::is_loopback, status::Failure, tunnel::Tunnel};
use crate::fallback_budget::KUBEFAN_FALLBACK;

/// The longest message of a client, in bytes. The apiserver reads longer ones, and discards them as
/// well.
const INCOMING_BYTES_MAX: usize = 64 << 10;
/// The read buffer of a websocket, in bytes.
const READ_BUFFER_BYTES: usize = 4 << 10;
/// The write buffer of a websocket, in bytes.
const WRITE_BUFFER_BYTES: usize = 16 << 10;
/// Time for the client to confirm the close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The only version of the protocol.
const VERSION: &str = "13";

/// A request for a websocket that passed the checks of the handshake.
pub struct Socket {
    tunnel: Tunnel,
    upgrade: OnUpgrade,
    accept: HeaderValue,
    protocol: Option<HeaderValue>,
}

impl Socket {
    /// Checks a request. `None` if it does not ask for a websocket, or if its connection cannot
    /// become one; only HTTP/1.1 connections can.
    ///
    /// # Errors
    /// 400 for a handshake without a key, with another version or with several protocols, as from
    /// the apiserver.
    pub fn from_request(headers: &HeaderMap, extensions: &Extensions) -> Result<Option<Self>, Failure> {
        let connection = extensions.get::<Tunnel>().cloned().zip(extensions.get::<OnUpgrade>().cloned());
        let Some((tunnel, upgrade)) = connection.filter(|_| hop_by_hop::is_websocket(headers)) else { return Ok(None) };
        let bad = |message: String| Failure::bad_request(format!("invalid websocket handshake: {message}"));
        let key = headers.get(header::SEC_WEBSOCKET_KEY).filter(|key| !key.is_empty());
        let key = key.ok_or_else(|| bad("Sec-WebSocket-Key is missing".to_owned()))?;
        if headers.get(header::SEC_WEBSOCKET_VERSION).is_none_or(|version| version != VERSION) {
            return Err(bad(format!("Sec-WebSocket-Version must be {VERSION}")));
        }
        let accept = HeaderValue::try_from(derive_accept_key(key.as_bytes()));
        let accept = accept.map_err(|_| bad("the key is invalid".to_owned()))?;
        let protocol = match &*WebsocketProtocols::of(headers).names() {
            [] => None,
            [one] => Some(HeaderValue::try_from(*one).map_err(|_| bad("the protocol is not a name".to_owned()))?),
            several => return Err(bad(format!("only one protocol may be named, not {}", several.len()))),
        };
        Ok(Some(Self { tunnel, upgrade, accept, protocol }))
    }

    /// Returns the response that switches protocols. After it, each event of the body of `response`
    /// is sent as a message. The websocket ends with the body, on a drain, and if a message cannot
    /// be written in `stall_timeout`.
    pub fn upgrade(
        self,
        response: Response<Body>,
        stall_timeout: Duration,
        drain: CancellationToken,
    ) -> Response<Body> {
        let Self { tunnel, upgrade, accept, protocol } = self;
        let (parts, body) = response.into_parts();
        let is_protobuf = |value: &HeaderValue| value == Media::Protobuf.watch_content_type();
        let is_protobuf = parts.headers.get(header::CONTENT_TYPE).is_some_and(is_protobuf);
        let media = if is_protobuf { Media::Protobuf } else { Media::Json };
        tunnel.set(Box::pin(async move {
            let io = match upgrade.await {
                Ok(io) => TokioIo::new(io),
                Err(error) => return tracing::debug!(%error, "an upgrade to a websocket failed"),
            };
            let config = WebSocketConfig::default()
                .read_buffer_size(READ_BUFFER_BYTES)
                .write_buffer_size(WRITE_BUFFER_BYTES)
                .max_message_size(Some(INCOMING_BYTES_MAX))
                .max_frame_size(Some(INCOMING_BYTES_MAX));
            let mut socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
            let code = match send(&mut socket, body, media, stall_timeout).await {
                // A drain ends the body.
                Some(CloseCode::Normal) if drain.is_cancelled() => Some(CloseCode::Away),
                code => code,
            };
            if let Some(code) = code {
                close(&mut socket, code).await;
            }
        }));
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        let copied = [CACHE_STATUS, header::AGE, KUBEFAN_FALLBACK, AUDIT_ID].into_iter();
        let of_response = copied.filter_map(|name| Some((name.clone(), parts.headers.get(name)?.clone())));
        let protocol = protocol.map(|protocol| (header::SEC_WEBSOCKET_PROTOCOL, protocol));
        headers.extend(of_response.chain(protocol).map(|(name, value): (HeaderName, _)| (name, value)));
        response
    }
}

/// Refuses a handshake without an origin, or of a page of another site.
///
/// # Errors
/// 403.
pub fn check_origin(headers: &HeaderMap) -> Result<(), Failure> {
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default());
    let Some(origin) = text(header::ORIGIN) else {
        return Err(Failure::forbidden("a websocket needs an Origin header, as with the apiserver".to_owned()));
    };
    if is_loopback(origin) || text(header::HOST).is_some_and(|host| is_same(origin, host)) {
        return Ok(());
    }
    let message =
        format!("a page of {origin:.256} may not open a websocket here; only pages of the requested host may");
    Err(Failure::forbidden(message))
}

/// Whether an origin is the host that the request names.
fn is_same(origin: &str, host: &str) -> bool {
    let (Ok(origin), Ok(host)) = (origin.parse::<Uri>(), host.parse::<Authority>()) else { return false };
    let default = match origin.scheme_str() {
        Some("http" | "ws") => 80,
        Some("https" | "wss") => 443,
        _ => return false,
    };
    let port = |named: Option<u16>| named.unwrap_or(default);
    origin.host().is_some_and(|name| name.eq_ignore_ascii_case(host.host()))
        && port(origin.port_u16()) == port(host.port_u16())
}

/// Sends each event of a body as a message, until the body or the client ends. Returns the close
/// code, unless the connection is lost.
async fn send<S: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut WebSocketStream<S>,
    mut body: Body,
    media: Media,
    stall_timeout: Duration,
) -> Option<CloseCode> {
    loop {
        let chunk = tokio::select! {
            biased;
            said = socket.next() => match said {
                None | Some(Ok(Message::Close(_))) => return Some(CloseCode::Normal),
                Some(Ok(_)) => {
                    // The library answers a ping by itself, into a buffer without a limit. So
                    // nothing more is read until the client has taken the answer.
                    timeout(stall_timeout, socket.flush()).await.ok()?.ok()?;
                    continue;
                }
                Some(Err(error)) => return code_of(&error),
            },
            frame = body.frame() => match frame.and_then(Result::ok).map(http_body::Frame::into_data) {
                Some(Ok(chunk)) => chunk,
                Some(Err(_)) => continue,
                None => return Some(CloseCode::Normal),
            },
        };
        for message in messages(chunk, media) {
            let Some(message) = message else { return Some(CloseCode::Error) };
            timeout(stall_timeout, socket.feed(message)).await.ok()?.ok()?;
        }
        timeout(stall_timeout, socket.flush()).await.ok()?.ok()?;
    }
}

/// Returns the events of a chunk, which contains whole events only. A JSON line becomes a text
/// message, with its line feed, as the apiserver sends it. A protobuf event becomes a binary
/// message, without its length prefix. `None` for an invalid event.
fn messages(mut chunk: Bytes, media: Media) -> impl Iterator<Item = Option<Message>> {
    iter::from_fn(move || {
        if chunk.is_empty() {
            return None;
        }
        let message = match media {
            Media::Json | Media::Table => {
                let end = memchr::memchr(b'\n', &chunk).map_or(chunk.len(), |at| at + 1);
                Utf8Bytes::try_from(chunk.split_to(end)).ok().map(Message::Text)
            }
            Media::Protobuf => {
                let len = chunk.try_get_u32().ok().and_then(|len| usize::try_from(len).ok());
                let len = len.filter(|len| *len <= chunk.len());
                len.map(|len| Message::Binary(chunk.split_to(len)))
            }
        };
        if message.is_none() {
            chunk.clear();
        }
        Some(message)
    })
}

/// Returns the close code for an error of the client.
fn code_of(error: &Error) -> Option<CloseCode> {
    match error {
        Error::Protocol(_) => Some(CloseCode::Protocol),
        Error::Capacity(_) => Some(CloseCode::Size),
        Error::Utf8(_) => Some(CloseCode::Invalid),
        _ => None,
    }
}

async fn close<S: AsyncRead + AsyncWrite + Unpin>(socket: &mut WebSocketStream<S>, code: CloseCode) {
    let frame = CloseFrame { code, reason: Utf8Bytes::default() };
    let closing = async {
        // Fails if the client has closed first; then the next read sends the reply.
        let _ = socket.close(Some(frame)).await;
        while let Some(Ok(_)) = socket.next().await {
            if socket.flush().await.is_err() {
                break;
            }
        }
    };
    let _ = timeout(CLOSE_TIMEOUT, closing).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        pairs.collect()
    }

    #[test]
    fn web_pages_of_other_hosts_get_no_websocket() {
        for (origin, host, is) in [
            ("http://kubefan.example:7443", "kubefan.example:7443", true),
            ("https://kubefan.example", "KUBEFAN.example:443", true),
            ("https://kubefan.example:443", "kubefan.example", true),
            ("http://localhost:3000", "kubefan.example:7443", true),
            ("http://[::1]:7443", "[::1]:7443", true),
            ("http://kubefan.example:7444", "kubefan.example:7443", false),
            ("https://evil.example", "localhost:7443", false),
            ("http://localhost.evil.example", "localhost:7443", false),
            ("http://kubefan.example@evil.example", "kubefan.example", false),
            ("file:///etc/passwd", "kubefan.example", false),
            ("null", "kubefan.example", false),
            ("null", "null", false),
            ("", "kubefan.example", false),
        ] {
            let headers = headers(&[("origin", origin), ("host", host)]);
            assert_eq!(check_origin(&headers).is_ok(), is, "{origin} at {host}");
        }
        assert!(check_origin(&headers(&[("host", "localhost")])).is_err(), "the apiserver requires it too");
    }

    #[test]
    fn each_event_is_a_message() {
        let all = |chunk: &'static [u8], media| messages(Bytes::from_static(chunk), media).collect::<Vec<_>>();
        let text = |text: &str| Some(Message::text(text));
        assert_eq!(all(b"{\"a\":1}\n{\"b\":2}\n", Media::Json), [text("{\"a\":1}\n"), text("{\"b\":2}\n")]);
        assert_eq!(all(b"\xff\n{}\n", Media::Json), [None], "not UTF-8");
        let binary = |bytes: &'static [u8]| Some(Message::binary(bytes));
        assert_eq!(
            all(b"\0\0\0\x02ab\0\0\0\0\0\0\0\x01c", Media::Protobuf),
            [binary(b"ab"), binary(b""), binary(b"c")]
        );
        assert_eq!(all(b"\0\0\0\x09ab", Media::Protobuf), [None]);
        assert_eq!(all(b"\0\0", Media::Protobuf), [None]);
        assert_eq!(all(b"", Media::Json), []);
    }
}
