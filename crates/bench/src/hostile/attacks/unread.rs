//! Clients that read nothing, or just enough to seem alive.

use std::{sync::Arc, time::Duration};

use futures::FutureExt;
use kubefan_common::proto::{
    WATCH_PATH,
    v1alpha1::{Target, WatchRequest},
};
use prost::Message;
use tokio::{io::AsyncWriteExt, time::interval};

use crate::hostile::{
    attack::Attack,
    context::Context,
    frames::{END_HEADERS, END_STREAM, Frames, grpc_fields},
    raw_http::{drip, get, request_without_reading, wait_for_end, websocket},
};
use crate::messages::framed;

pub(super) const ATTACKS: &[Attack] = &[
    Attack::new("dripping-lists", |context| dripping_lists(context).boxed()),
    Attack::new("unread-watches", |context| unread_watches(context).boxed()),
    Attack::new("unread-live-watches", |context| unread_live_watches(context).boxed()),
    Attack::new("unread-websockets", |context| unread_websockets(context).boxed()),
    Attack::new("unread-pings", |context| unread_pings(context, 1).boxed()),
    Attack::new("unread-pings-of-four", |context| unread_pings(context, 4).boxed()),
    Attack::new("unread-pipelines", |context| unread_pipelines(context).boxed()),
    Attack::new("no-window", |context| no_window(context).boxed()),
];

/// A watch with nothing to send at first.
const LIVE: &str = "/api/v1/pods?watch=1&labelSelector=none";
const STATE: &str = "/api/v1/pods?watch=1&resourceVersion=0";

/// 256 lists that read 2 KiB every 50 ms.
async fn dripping_lists(context: Context) {
    context
        .run(256, 500, |context, number| async move {
            let request = get("/api/v1/pods?resourceVersion=0", &[]);
            drip(&context, number, &request, 2048, Duration::from_millis(50)).await;
        })
        .await;
}

/// 500 watches over HTTP/1.1 that read nothing, from the state on.
async fn unread_watches(context: Context) {
    context
        .run(500, 500, |context, number| async move {
            request_without_reading(&context, number, &get(STATE, &[])).await;
        })
        .await;
}

/// 1,000 live watches over HTTP/1.1 that read nothing.
async fn unread_live_watches(context: Context) {
    context
        .run(1000, 1000, |context, number| async move {
            let path = format!("/api/v1/pods?watch=1&resourceVersion={}", context.version);
            request_without_reading(&context, number, &get(&path, &[])).await;
        })
        .await;
}

/// 300 watches over websockets that read nothing.
async fn unread_websockets(context: Context) {
    context
        .run(300, 300, |context, number| async move {
            request_without_reading(&context, number, &websocket(STATE)).await;
        })
        .await;
}

/// Watches over websockets that send up to 100 MB of pings a second each, and read no answer. A
/// watch that the server ends is opened again.
async fn unread_pings(context: Context, sockets: u64) {
    const PAYLOAD_BYTES: u8 = 125;
    const PER_WRITE: usize = 500;
    const WRITES_PER_SECOND: u64 = 1600;
    // A masked ping. The mask is zero.
    let ping = [&[0x89, 0x80 | PAYLOAD_BYTES, 0, 0, 0, 0][..], &[7; PAYLOAD_BYTES as usize]].concat();
    let pings = Arc::new(ping.repeat(PER_WRITE));
    context
        .run(sockets, sockets * 10, move |context, number| {
            let pings = pings.clone();
            async move {
                while let Some(mut stream) = context.connect_with_small_buffer(number).await {
                    let mut ticks = interval(Duration::from_micros(1_000_000 / WRITES_PER_SECOND));
                    let mut written = stream.write_all(websocket(LIVE).as_bytes()).await;
                    while written.is_ok() {
                        ticks.tick().await;
                        written = stream.write_all(&pings).await;
                    }
                    context.tally.count("ended");
                }
            }
        })
        .await;
}

/// 100 connections that each send 100 lists and read nothing.
async fn unread_pipelines(context: Context) {
    context
        .run(100, 100, |context, number| async move {
            let requests = get("/api/v1/pods?resourceVersion=0", &[]).repeat(100);
            request_without_reading(&context, number, &requests).await;
        })
        .await;
}

/// 20 connections with 50 watches each. None of the watches gives a window.
async fn no_window(context: Context) {
    context
        .run(20, 40, |context, number| async move {
            let Some(mut stream) = context.connect(number).await else { return };
            let target = Target { resource: "pods".to_owned(), ..Target::default() };
            let message = WatchRequest { target: Some(target), ..WatchRequest::default() }.encode_to_vec();
            let mut frames = Frames::preface(0);
            frames.settings_ack();
            for watch in 0..50 {
                frames.headers(watch * 2 + 1, END_HEADERS, &grpc_fields(WATCH_PATH));
                frames.data(watch * 2 + 1, END_STREAM, &framed(&message));
            }
            if frames.send(&mut stream).await.is_ok() {
                context.tally.count("sent");
                wait_for_end(&context, &stream).await;
            }
        })
        .await;
}
