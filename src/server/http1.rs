//! HTTP/1.1 on the data port: the same router, served by hyper.

use std::convert::Infallible;

use axum::{Router, response::IntoResponse};
use http::{Request, Response, StatusCode};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tower::Service;

use super::{call, limits};

/// Serves a connection until it ends; once `drain` is cancelled, after the request that is under way.
pub async fn serve(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    drain: CancellationToken,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |request| answer(request, router.clone()));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::HTTP1_HEADERS_TIMEOUT)
        .max_buf_size(limits::HEADER_LIST_BYTES_MAX as usize)
        .serve_connection(TokioIo::new(io), service);
    tokio::pin!(connection);
    tokio::select! {
        biased;
        result = connection.as_mut() => return result,
        () = drain.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

async fn answer(request: Request<Incoming>, mut router: Router) -> Result<Response<axum::body::Body>, Infallible> {
    if call::is_any_grpc(request.headers()) {
        let message = "gRPC needs HTTP/2; this connection speaks HTTP/1.1\n";
        return Ok((StatusCode::HTTP_VERSION_NOT_SUPPORTED, message).into_response());
    }
    router.call(request).await
}
