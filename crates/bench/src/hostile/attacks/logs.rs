//! Clients that make kubefan or its libraries log.

use std::sync::Arc;

use futures::{FutureExt, future::join_all};
use tokio::{io::AsyncWriteExt, time::timeout_at};

use crate::hostile::{
    attack::Attack,
    client_hello,
    context::Context,
    frames::{END_HEADERS, END_STREAM, Frames, fields, flood},
    grpc_call::{get_as, open},
    raw_http::read_to_end,
};

/// Libraries log as they would by themselves.
const LIBRARIES_WARN: &[&str] = &["--log-level=info,rustls=warn,h2=warn"];
/// Callers are known by their tokens.
const CALLERS: &[&str] = &["--access=authorized", "--anonymous-auth"];
/// The bytes per second that a slow reader takes of the log.
const SLOW: u32 = 1000;

pub(super) const ATTACKS: &[Attack] = &[
    SERVER_NAMES,
    Attack { name: "server-names-slow-log", flags: LIBRARIES_WARN, log_read_per_second: Some(SLOW), ..SERVER_NAMES },
    RESETS,
    Attack { name: "reset-storm-slow-log", flags: LIBRARIES_WARN, log_read_per_second: Some(SLOW), ..RESETS },
    UNKNOWN_TOKENS,
    Attack { name: "unknown-tokens-slow-log", log_read_per_second: Some(SLOW), ..UNKNOWN_TOKENS },
];

const SERVER_NAMES: Attack =
    Attack { is_tls: true, ..Attack::new("server-names", |context| server_names(context).boxed()) };
const RESETS: Attack = Attack::new("reset-storm", |context| reset_storm(context).boxed());
const UNKNOWN_TOKENS: Attack = Attack {
    flags: CALLERS,
    is_tls: true,
    has_outage_of_reviews: true,
    ..Attack::new("unknown-tokens", |context| unknown_tokens(context).boxed())
};

/// 500 handshakes a second with an invalid server name of 60 kB.
async fn server_names(context: Context) {
    let hello = Arc::new(client_hello::with_server_name(&"!".repeat(60_000)));
    context
        .run(u64::MAX, 500, move |context, number| {
            let hello = hello.clone();
            async move {
                let Some(mut stream) = context.connect(number).await else { return };
                if stream.write_all(&hello).await.is_ok() {
                    read_to_end(&context, &mut stream).await;
                }
            }
        })
        .await;
}

/// 300 connections a second. Each resets more streams at once than h2 accepts.
async fn reset_storm(context: Context) {
    const STREAMS: u32 = 100;
    const WINDOW_BYTES: u32 = 65_535;
    let write = |number: u64| {
        let mut frames = if number == 0 { Frames::preface(WINDOW_BYTES) } else { Frames::default() };
        if number > 0 {
            frames.ping();
            return frames;
        }
        for stream in (0..STREAMS).map(|stream| stream * 2 + 1) {
            frames.headers(stream, END_HEADERS | END_STREAM, &fields("GET", "/api/v1/pods?watch=1"));
            frames.reset(stream);
        }
        frames
    };
    context
        .run(u64::MAX, 300, move |context, number| async move {
            let Some(stream) = context.connect(number).await else { return };
            flood(&context, stream, 1, write).await;
        })
        .await;
}

/// 500 requests a second, each with a token of its own, over eight connections.
async fn unknown_tokens(context: Context) {
    const CONNECTIONS: u64 = 8;
    // The sink never answers a handshake.
    let opening = join_all((0..CONNECTIONS).map(|number| open(&context, number)));
    let Ok(opened) = timeout_at(context.end, opening).await else { return };
    let connections: Arc<[_]> = opened.into_iter().flatten().collect();
    context
        .run(u64::MAX, 500, move |context, number| {
            let requests = connections.get(number as usize % connections.len().max(1)).cloned();
            async move {
                let Some(requests) = requests else { return };
                let token = format!("unknown-{:x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                get_as(&context, &requests, "/api/v1/pods?resourceVersion=0", &token).await;
            }
        })
        .await;
}
