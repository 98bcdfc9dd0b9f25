//! Requests that are refused before their bodies were read: their clients get the whole answer.

use std::future::poll_fn;

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    connections::{RawConnection, rig, served},
    harness::tests,
};

tests! {
    paused: an_http1_connection_takes_more_requests_after_a_refusal,
        a_refusal_says_that_the_connection_closes_if_the_body_does_not_end,
        an_http2_client_that_still_sends_its_body_gets_the_whole_refusal,
        an_endless_http2_body_is_reset_without_an_error;
}

/// Without passthrough, kubefan refuses every write.
const PATH: &str = "/api/v1/namespaces/a/configmaps";

/// More than the server reads together with the headers, and more than a window of HTTP/2.
const BODY_BYTES: usize = 100_000;

fn assert_is_refusal(status: StatusCode, body: &[u8]) {
    let answer: Value = serde_json::from_slice(body).unwrap();
    assert_eq!((status, &answer["code"]), (StatusCode::METHOD_NOT_ALLOWED, &Value::from(405)), "{answer}");
}

async fn an_http1_connection_takes_more_requests_after_a_refusal() {
    let rig = rig().await;
    let (ours, _served) = served(&rig);
    let (mut requests, connection) = http1::handshake(TokioIo::new(ours)).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..2 {
        requests.ready().await.unwrap();
        let body = Full::new(Bytes::from(vec![b'x'; BODY_BYTES]));
        let request = Request::post(PATH).header(header::HOST, "kubefan.test").body(body).unwrap();
        let response = requests.send_request(request).await.unwrap();
        assert!(!response.headers().contains_key(header::CONNECTION), "{:?}", response.headers());
        let status = response.status();
        assert_is_refusal(status, &response.into_body().collect().await.unwrap().to_bytes());
    }
}

async fn a_refusal_says_that_the_connection_closes_if_the_body_does_not_end() {
    let rig = rig().await;
    for (body, sent) in [
        ("too long", "Content-Length: 1000000\r\n\r\n{"),
        ("never ends", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"),
        ("waits for an answer", "Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"),
    ] {
        let (mut ours, _served) = served(&rig);
        let head = format!("POST {PATH} HTTP/1.1\r\nHost: kubefan.test\r\n{sent}");
        ours.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        ours.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 405 "), "{body}: {answer}");
        assert!(answer.to_lowercase().contains("\r\nconnection: close\r\n"), "{body}: {answer}");
        assert!(answer.ends_with('}') || answer.ends_with("}\n"), "{body}: {answer}");
    }
}

/// Begins a write over HTTP/2.
async fn begin(raw: &RawConnection) -> (Response<RecvStream>, SendStream<Bytes>) {
    let mut requests = raw.requests.clone().ready().await.unwrap();
    let request = Request::post(format!("http://kubefan.test{PATH}")).body(()).unwrap();
    let (response, body) = requests.send_request(request, false).unwrap();
    (response.await.unwrap(), body)
}

async fn an_http2_client_that_still_sends_its_body_gets_the_whole_refusal() {
    let rig = rig().await;
    let raw = RawConnection::to(&rig).await;
    for _ in 0..2 {
        let (response, mut body) = begin(&raw).await;
        let mut left = BODY_BYTES;
        while left > 0 {
            body.reserve_capacity(left);
            let room = poll_fn(|cx| body.poll_capacity(cx)).await;
            let room = room.expect("the stream is open").unwrap().min(left);
            left -= room;
            body.send_data(Bytes::from(vec![b'x'; room]), left == 0).unwrap();
        }
        let status = response.status();
        assert_is_refusal(status, &whole(response.into_body()).await);
    }
}

async fn an_endless_http2_body_is_reset_without_an_error() {
    let rig = rig().await;
    let raw = RawConnection::to(&rig).await;
    let (response, mut body) = begin(&raw).await;
    let status = response.status();
    assert_is_refusal(status, &whole(response.into_body()).await);
    body.send_data(Bytes::from_static(b"{"), false).unwrap();
    assert_eq!(poll_fn(|cx| body.poll_reset(cx)).await.unwrap(), Reason::NO_ERROR);
}

async fn whole(mut body: RecvStream) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(data) = body.data().await {
        whole.extend_from_slice(&data.unwrap());
    }
    whole
}
