//! Connections, headers, bodies and calls that are begun and never finished.

use std::time::Duration;

use futures::FutureExt;
use kubefan_common::proto::WATCH_PATH;
use tokio::io::AsyncWriteExt;

use crate::hostile::{
    attack::Attack,
    context::Context,
    grpc_call::{self, open},
    raw_http::{drip_out, get, read_to_end, request},
};

pub(super) const ATTACKS: &[Attack] = &[
    Attack::new("half-open-calls", |context| half_open_calls(context).boxed()),
    Attack::new("reflection-streams", |context| reflection_streams(context).boxed()),
    Attack::new("health-watches", |context| health_watches(context).boxed()),
    Attack::new("idle-connections", |context| idle_connections(context).boxed()),
    Attack::new("idle-admin-connections", |context| idle_admin_connections(context).boxed()),
    Attack::new("header-drip", |context| header_drip(context).boxed()),
    Attack::new("admin-header-drip", |context| admin_header_drip(context).boxed()),
    Attack::new("unfinished-bodies", |context| unfinished_bodies(context).boxed()),
    Attack::new("huge-headers", |context| huge_headers(context).boxed()),
    Attack { is_tls: true, ..Attack::new("half-tls-hellos", |context| half_tls_hellos(context).boxed()) },
    Attack::new("garbage", |context| garbage(context).boxed()),
];

const DRIP: Duration = Duration::from_millis(200);
/// Asks for the list of services.
const REFLECTION: StreamCall =
    StreamCall { path: "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", message: &[0x3a, 0] };
/// Asks for the overall health.
const HEALTH: StreamCall = StreamCall { path: "/grpc.health.v1.Health/Watch", message: &[] };
/// The first bytes of a TLS record with a ClientHello of 512 bytes.
const HALF_HELLO: &[u8] = &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 1, 2, 3, 4, 5, 6, 7, 8];

/// A call of a method that answers with a stream.
#[derive(Clone, Copy)]
struct StreamCall {
    path: &'static str,
    message: &'static [u8],
}

/// 5,000 calls of `Watch` with headers and no message, on 10 connections.
async fn half_open_calls(context: Context) {
    context
        .run(10, 20, |context, number| async move {
            let Some(requests) = open(&context, number).await else { return };
            let calls = (0..500).map(|_| grpc_call::call(&context, &requests, WATCH_PATH, None));
            futures::future::join_all(calls).await;
        })
        .await;
}

/// Opens 1,000 streams on 10 connections and keeps them open.
async fn streams(context: Context, call: StreamCall) {
    context
        .run(10, 20, move |context, number| async move {
            let Some(requests) = open(&context, number).await else { return };
            let calls = (0..100).map(|_| grpc_call::call_open(&context, &requests, call.path, call.message));
            futures::future::join_all(calls).await;
            // The server may have completed or refused all of them; the connection stays.
            context.hold().await;
        })
        .await;
}

async fn reflection_streams(context: Context) {
    streams(context, REFLECTION).await;
}

async fn health_watches(context: Context) {
    streams(context, HEALTH).await;
}

/// 2,000 connections that send nothing.
async fn idle_connections(context: Context) {
    context
        .run(2000, 2000, |context, number| async move {
            let Some(mut stream) = context.connect(number).await else { return };
            context.tally.count("connected");
            read_to_end(&context, &mut stream).await;
        })
        .await;
}

/// 2,000 connections to the admin port that send nothing.
async fn idle_admin_connections(mut context: Context) {
    context.target = context.admin;
    idle_connections(context).await;
}

/// 500 connections that send a byte of a header every 200 ms.
async fn header_drip(context: Context) {
    context
        .run(500, 500, |context, number| async move {
            let Some(stream) = context.connect(number).await else { return };
            drip_out(&context, stream, "GET /api/v1/pods HTTP/1.1\r\nHost: localhost\r\nX-Drip: ", DRIP).await;
        })
        .await;
}

/// 500 connections to the admin port that send a byte of a header every 200 ms.
async fn admin_header_drip(mut context: Context) {
    context.target = context.admin;
    header_drip(context).await;
}

/// 200 requests whose bodies never end.
async fn unfinished_bodies(context: Context) {
    context
        .run(200, 400, |context, number| async move {
            let Some(stream) = context.connect(number).await else { return };
            let path = if number % 2 == 0 { "/api/v1/namespaces/team-0/pods" } else { WATCH_PATH };
            let start = format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                 Content-Length: 1000000000\r\n\r\n{{\"a\":\""
            );
            drip_out(&context, stream, &start, DRIP).await;
        })
        .await;
}

/// 50 requests a second with 60 KiB, or a megabyte, of headers.
async fn huge_headers(context: Context) {
    context
        .run(u64::MAX, 50, |context, number| async move {
            let bytes = if number % 2 == 0 { 60 << 10 } else { 1 << 20 };
            let value = "x".repeat(bytes);
            request(&context, number, &get("/api/v1/pods?limit=1", &[("X-Huge", &value), ("Connection", "close")]))
                .await;
        })
        .await;
}

/// 1,000 connections with the first bytes of a TLS handshake.
async fn half_tls_hellos(context: Context) {
    context
        .run(1000, 1000, |context, number| async move {
            let Some(mut stream) = context.connect(number).await else { return };
            if stream.write_all(HALF_HELLO).await.is_ok() {
                context.tally.count("sent");
                read_to_end(&context, &mut stream).await;
            }
        })
        .await;
}

/// 500 connections a second with bytes of no protocol.
async fn garbage(context: Context) {
    context
        .run(u64::MAX, 500, |context, number| async move {
            let Some(mut stream) = context.connect(number).await else { return };
            let start: &[u8] = match number % 4 {
                0 => &[0; 512],
                1 => HALF_HELLO,
                2 => b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
                _ => b"\r\n\r\n\r\nGET  \x01 HTTP/9.9\r\n\r\n",
            };
            if stream.write_all(start).await.is_ok() {
                read_to_end(&context, &mut stream).await;
            }
        })
        .await;
}
