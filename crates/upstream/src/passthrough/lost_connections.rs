//! Tests that requests survive connections that the server closes before it has read them.

use std::sync::Arc;

use futures::future::join_all;
use h2::Reason;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use kube_client::Config;
use kubefan_testkit::scripted_server::{END_STREAM_AND_HEADERS, HEADERS, SETTINGS, frame, go_away, read_frame};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tower::ServiceExt;

use super::{Forwarded, Passthrough, scripted_server::options, tests::Server};
use crate::transport::{self, connection::ConnectionLimits};

/// `:status: 401` (RFC 7541, 6.2.1).
const UNAUTHORIZED: &[u8] = b"\x48\x03401";
/// Requests at once. Each connection answers one of them, and each is sent nine times at most.
const AT_ONCE: usize = 6;
/// Rounds of them. The errors are races within the pool of the HTTP client, so one round rarely has
/// all of them.
const ROUNDS: usize = 15;

/// Answers the first request of a connection as kube-apiserver answers a request that it cannot
/// authenticate: it reads no further one. Like Go's server, it closes the connection later.
async fn answer_one(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let answer = [
        frame(SETTINGS, 0, 0, &[]),
        frame(HEADERS, END_STREAM_AND_HEADERS, 1, UNAUTHORIZED),
        go_away(1, Reason::NO_ERROR),
    ];
    let answered = async {
        stream.read_exact(&mut [0; 24]).await?;
        while read_frame(&mut stream).await?.kind != HEADERS {}
        stream.write_all(&answer.concat()).await
    };
    let _answered = answered.await;
    let _end = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
}

fn get() -> Forwarded {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let request = Request::get("/version").body(body).unwrap();
    Forwarded { request, acting_as: None, is_upgrade: false, kept_bytes_max: 0 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forwarded_requests_survive_connections_that_close_before_they_are_sent() {
    let server = Server::start_http2(answer_one).await;
    let passthrough = Passthrough::from_settings(server.trust(&server.certificate_pem), options()).await.unwrap();
    let passthrough = Arc::new(passthrough);
    for round in 0..ROUNDS {
        let send = |_| {
            let passthrough = passthrough.clone();
            tokio::spawn(async move { passthrough.send(get()).await.map(|response| response.status()) })
        };
        for sent in join_all((0..AT_ONCE).map(send)).await {
            assert_eq!(sent.unwrap().unwrap(), StatusCode::UNAUTHORIZED, "in round {round}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn own_requests_survive_connections_that_close_before_they_are_sent() {
    let server = Server::start_http2(answer_one).await;
    let config: Config = server.trust(&server.certificate_pem).load().await.unwrap();
    let service = transport::build(&config, ConnectionLimits::APISERVER, "kubefan").unwrap();
    for round in 0..ROUNDS {
        let uri = format!("{}version", config.cluster_url);
        let send = |_| tokio::spawn(service.clone().oneshot(Request::get(&uri).body(bytes::Bytes::new()).unwrap()));
        for sent in join_all((0..AT_ONCE).map(send)).await {
            let status = sent.unwrap().map(|response| response.status());
            assert_eq!(status.map_err(|e| format!("{e:?}")), Ok(StatusCode::UNAUTHORIZED), "in round {round}");
        }
    }
}
