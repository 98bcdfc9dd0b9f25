//! HTTP/1.1 on the data port: the same router, served by hyper.

use std::{convert::Infallible, error::Error, io, time::Duration};

use ::http::{Request, Response, StatusCode, Version, header};
use axum::{Router, response::IntoResponse};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tower::Service;

use super::{
    call,
    http::{self, Front, tunnel::Tunnel, websocket::Socket},
    limits,
    listen::Peer,
    stall::{Guarded, Sending},
};
use crate::{
    fanout::{Catalog, ConnectionWaker, StreamWaker},
    telemetry::metrics::ConnectionEnd,
};

/// The number of a watch on its line, where it is alone.
const WATCH: u32 = 1;

/// Serves a connection until it ends, also where it becomes something else; once `drain` is cancelled, after the request that is under
/// way. What is to be read without a pause ends the connection when that takes `stall_timeout`.
pub async fn serve<C: Catalog>(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    front: Front<C>,
    router: Router,
    stall_timeout: Duration,
    drain: CancellationToken,
) -> ConnectionEnd {
    let (tunnel, sending) = (Tunnel::default(), Sending::default());
    let io = Guarded::new(io, sending.clone(), stall_timeout);
    let (becomes, ends) = (tunnel.clone(), drain.clone());
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(becomes.clone());
        answer(request, front.clone(), router.clone(), sending.clone(), ends.clone())
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::HTTP1_HEADERS_TIMEOUT)
        .max_buf_size(limits::HEADER_LIST_BYTES_MAX as usize)
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades();
    // In a box that goes when it has become something else, with its buffers.
    let mut connection = Box::pin(connection);
    let ended = tokio::select! {
        biased;
        result = connection.as_mut() => Some(result),
        () = drain.cancelled() => {
            connection.as_mut().graceful_shutdown();
            None
        }
    };
    let end = match ended {
        Some(Ok(())) => ConnectionEnd::Closed,
        Some(Err(error)) => {
            let end = end_of(&error);
            if end == ConnectionEnd::Error {
                tracing::debug!(error = %cause(&error), peer = ?peer.address, "a connection broke off");
            }
            end
        }
        None => {
            // Whatever comes of it, it ends with kubefan.
            let _ = connection.as_mut().await;
            ConnectionEnd::Draining
        }
    };
    drop(connection);
    if let Some(tunnel) = tunnel.take() {
        tunnel.await;
    }
    end
}

/// What ended a connection. A client that goes away in the middle of a watch, or of what it was asking for, has only closed it.
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

/// What hyper was told, where it says only what it was at.
fn cause(error: &hyper::Error) -> &(dyn Error + 'static) {
    error.source().unwrap_or(error)
}

async fn answer<C: Catalog>(
    request: Request<Incoming>,
    front: Front<C>,
    mut router: Router,
    sending: Sending,
    drain: CancellationToken,
) -> Result<Response<axum::body::Body>, Infallible> {
    if call::is_any_grpc(request.headers()) {
        let message = "gRPC needs HTTP/2; this connection speaks HTTP/1.1\n";
        return Ok((StatusCode::HTTP_VERSION_NOT_SUPPORTED, message).into_response());
    }
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
        // Who stands in between may have read another one, or none (RFC 9112, 3.2).
        let message = "a request names its host once\n";
        return Ok((StatusCode::BAD_REQUEST, [(header::CONNECTION, "close")], message).into_response());
    }
    if !http::is_kubernetes(&request) {
        return router.call(request).await;
    }
    let line = ConnectionWaker::new();
    // What is wrong with it is in the answer; and of what is answered here, only a watch is asked for so.
    let socket = Socket::of(request.headers(), request.extensions()).ok().flatten();
    let answer = front.answer(request.map(axum::body::Body::new), StreamWaker::new(&line, WATCH)).await;
    sending.must_not_wait(matches!(answer, http::Answer::Read(_)));
    // A tunnel may well end one side first.
    sending.look_for_end(match &answer {
        http::Answer::Watch(_) => socket.is_none(),
        http::Answer::PassedOn(response) => response.status() != StatusCode::SWITCHING_PROTOCOLS,
        http::Answer::Read(_) => false,
    });
    let response = match answer {
        http::Answer::PassedOn(response) => return Ok(response),
        http::Answer::Read(response) => response,
        http::Answer::Watch(opened) => front.body(opened, line, sending),
    };
    Ok(match socket {
        Some(socket) => front.socket(socket, response, drain),
        None => response,
    })
}
