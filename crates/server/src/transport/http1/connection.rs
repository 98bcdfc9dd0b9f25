//! One HTTP/1.1 connection, served by hyper: the Kubernetes API and the router.
//!
//! The hazard is a request that an intermediary reads differently, so a request without exactly one
//! host is refused.

use std::{convert::Infallible, error::Error, io, sync::Arc};

use axum::{body::Body, response::IntoResponse};
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use kubefan_admission::Holder;
use kubefan_fanout::{ConnectionWaker, StreamWaker};
use kubefan_telemetry::metrics::ConnectionEnd;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    socket::{MonitoredSocket, Pace, ResponseNeeds},
    watch_body::WatchBody,
};
use crate::{
    client_info::ClientInfo,
    grpc::call,
    kube::{
        answer::{Answer, FromUpstream},
        error_type::{ErrorType, PROXY_STATUS},
        tunnel::Tunnel,
        websocket::Socket,
    },
    transport::{early_answer::BodyRest, limits, open_connections::OpenConnection, services::Services},
};

/// The stream number of a watch: a connection has only one at a time.
const WATCH: u32 = 1;

/// Serves a connection until it ends, also after it was upgraded to another protocol. Once the
/// drain starts, or it is asked to end otherwise, it ends after the current request. A client that
/// reads a pinning response too slowly ends the connection.
pub async fn serve(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    client: ClientInfo,
    services: Arc<Services>,
) -> ConnectionEnd {
    let tunnel = Tunnel::default();
    let needs = ResponseNeeds::default();
    let io = MonitoredSocket::new(io, needs.clone(), services.options.snapshot_stall_timeout);
    let open = services.connections.open();
    let upgraded = tunnel.clone();
    let drain = services.drain.clone();
    let address = client.address;
    let mut end_requests = open.end_requests();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let client = client.of_request(request.headers());
        let holder = client.holder();
        request.extensions_mut().insert(client);
        request.extensions_mut().insert(upgraded.clone());
        answer(request, holder, services.clone(), needs.clone(), open.clone())
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::HTTP1_HEADERS_TIMEOUT)
        .max_buf_size(limits::HEADER_LIST_BYTES_MAX as usize)
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades();
    // Boxed, so that its buffers are freed when the connection was upgraded.
    let mut connection = Box::pin(connection);
    let ended = tokio::select! {
        biased;
        result = connection.as_mut() => Ok(result),
        // At once: between two requests there is nothing to spread.
        () = drain.cancelled() => Err(ConnectionEnd::Draining),
        request = end_requests.next() => Err(request.reason.connection_end()),
    };
    let end = match ended {
        Ok(Ok(())) => ConnectionEnd::Closed,
        Ok(Err(error)) => {
            let end = end_of(&error);
            if end == ConnectionEnd::Error {
                tracing::debug!(error = %cause(&error), peer = ?address, "a connection failed");
            }
            end
        }
        Err(end) => {
            connection.as_mut().graceful_shutdown();
            // This end is reported, even if the last request fails.
            let _ = connection.as_mut().await;
            end
        }
    };
    drop(connection);
    if let Some(tunnel) = tunnel.take() {
        tunnel.await;
    }
    end
}

/// The reason of the end of a connection. A client that goes away during a response has only closed
/// the connection.
fn end_of(error: &hyper::Error) -> ConnectionEnd {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    let is_gone = |error: &io::Error| {
        matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof)
    };
    if error.is_timeout() {
        ConnectionEnd::Idle
    } else if error.is_incomplete_message() || cause(error).downcast_ref().is_some_and(is_gone) {
        ConnectionEnd::Closed
    } else {
        ConnectionEnd::Error
    }
}

/// The cause of a hyper error, whose own text names only the operation.
fn cause(error: &hyper::Error) -> &(dyn Error + 'static) {
    error.source().unwrap_or(error)
}

/// Answers a request. Before a refusal is sent, the rest of the request is read, so that the client
/// can send another one; if there is too much, the refusal says that the connection closes.
async fn answer(
    request: Request<Incoming>,
    holder: Holder,
    services: Arc<Services>,
    needs: ResponseNeeds,
    open: OpenConnection,
) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let (body, rest) = BodyRest::of(body, &head.headers);
    let mut response = respond(Request::from_parts(head, body), &services, needs, open).await;
    let status = response.status();
    if !status.is_client_error() && !status.is_server_error() {
        return Ok(response);
    }
    let is_forwarded = response.extensions().get::<FromUpstream>().is_some();
    // A forwarded response holds its place until it is sent.
    let has_ended = if is_forwarded { !rest.is_left() } else { rest.discard(&services.discards, holder).await };
    if !has_ended {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// Makes the response to a request.
async fn respond(
    request: Request<Body>,
    services: &Arc<Services>,
    needs: ResponseNeeds,
    open: OpenConnection,
) -> Response<Body> {
    if call::is_any_grpc(&request) {
        let message = "gRPC needs HTTP/2; this connection speaks HTTP/1.1\n";
        // A kubefan behind this one tells by it that this is a kubefan: `Upstream::serves`.
        let error = [(PROXY_STATUS, ErrorType::HttpProtocolError.value())];
        return (StatusCode::HTTP_VERSION_NOT_SUPPORTED, error, message).into_response();
    }
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
        // An intermediary may have read another host (RFC 9112, 3.2).
        let message = "a request must have exactly one Host header\n";
        return (StatusCode::BAD_REQUEST, [(header::CONNECTION, "close")], message).into_response();
    }
    let connection_waker = ConnectionWaker::new();
    // An invalid handshake is refused by the API. Only a watch can be a websocket among the
    // requests that are answered here.
    let socket = Socket::from_request(request.headers(), request.extensions()).ok().flatten();
    let answer = services.kube.answer(request, StreamWaker::new(&connection_waker, WATCH)).await;
    needs.begin(match &answer {
        Answer::Response(_) => Pace::Pinning,
        Answer::Watch(_) => Pace::Live,
        Answer::Forwarded(_) => Pace::Any,
    });
    // A tunnel may close one side before the other.
    needs.close_detection(match &answer {
        Answer::Watch(_) => socket.is_none(),
        Answer::Forwarded(response) => response.status() != StatusCode::SWITCHING_PROTOCOLS,
        Answer::Response(_) => false,
    });
    let stall_timeout = services.options.snapshot_stall_timeout;
    let response = match answer {
        Answer::Forwarded(response) => return response,
        Answer::Response(response) => response,
        Answer::Watch(opened) => {
            let mut response = WatchBody::response(*opened, connection_waker, stall_timeout, &open, needs);
            services.budget.put(response.headers_mut());
            response
        }
    };
    match socket {
        // If the watch was refused, the response stays as it is.
        Some(socket) if response.status() == StatusCode::OK => {
            socket.upgrade(response, stall_timeout, services.drain.clone())
        }
        _ => response,
    }
}
