//! Tests that clients that cancel their requests leave a shared connection to others.

use std::{sync::Arc, time::Duration};

use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use kubefan_testkit::scripted_server::{END_STREAM_AND_HEADERS, HEADERS, RST_STREAM, SETTINGS, frame, read_frame};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
    task::JoinSet,
    time::timeout,
};

use super::{Forwarded, Passthrough, scripted_server::options, tests::Server};

/// The request that is not cancelled is the first of its connection.
const KEPT: u32 = 1;
/// `:status: 200` (RFC 7541, appendix A).
const OK: [u8; 1] = [0x88];

/// The numbers of frames that a server has read.
#[derive(Debug, Clone, Copy, Default)]
struct Read {
    requests: usize,
    resets: usize,
}

/// Answers each request when it has been cancelled, and the first one after `resets_max` of them.
async fn answer_late(
    mut stream: impl AsyncReadExt + AsyncWriteExt + Unpin,
    resets_max: usize,
    read: watch::Sender<Read>,
) -> std::io::Result<()> {
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
    stream.read_exact(&mut [0; 24]).await?;
    let mut answered = std::collections::HashSet::new();
    loop {
        let head = read_frame(&mut stream).await?;
        match head.kind {
            HEADERS => read.send_modify(|read| read.requests += 1),
            // The client resets a stream again whose answer it did not expect.
            RST_STREAM if answered.insert(head.stream) => {
                stream.write_all(&frame(HEADERS, END_STREAM_AND_HEADERS, head.stream, &OK)).await?;
                read.send_modify(|read| read.resets += 1);
                if read.borrow().resets == resets_max {
                    stream.write_all(&frame(HEADERS, END_STREAM_AND_HEADERS, KEPT, &OK)).await?;
                }
            }
            _ => {}
        }
    }
}

fn get() -> Forwarded {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let request = Request::get("/api/v1/namespaces/a/configmaps").body(body).unwrap();
    Forwarded { request, acting_as: None, is_upgrade: false, kept_bytes_max: 0 }
}

#[tokio::test]
async fn callers_that_cancel_requests_leave_the_connection_to_others() {
    /// By default h2 remembers 50 streams that it has reset, so each round has 30 late answers to
    /// forgotten ones.
    const AT_ONCE: usize = 80;
    /// 1,200 such answers. By default h2 closes a connection after 1,024.
    const ROUNDS: usize = 40;
    let (read, mut seen) = watch::channel(Read::default());
    let server = Server::start_http2(move |stream| {
        let read = read.clone();
        async move {
            let _end = answer_late(stream, AT_ONCE * ROUNDS, read).await;
        }
    })
    .await;
    let passthrough = Passthrough::from_settings(server.trust(&server.certificate_pem), options()).await.unwrap();
    let passthrough = Arc::new(passthrough);
    let send = || {
        let passthrough = passthrough.clone();
        async move { passthrough.send(get()).await.map(|response| response.status()) }
    };
    let kept = tokio::spawn(send());
    let cancelled = async {
        seen.wait_for(|read| read.requests == 1).await.unwrap();
        for round in 1..=ROUNDS {
            let mut sent: JoinSet<_> = (0..AT_ONCE).map(|_| send()).collect();
            seen.wait_for(|read| read.requests == 1 + round * AT_ONCE).await.unwrap();
            sent.shutdown().await;
            seen.wait_for(|read| read.resets == round * AT_ONCE).await.unwrap();
        }
    };
    let kept = async {
        cancelled.await;
        kept.await.unwrap()
    };
    // A connection that is closed makes the server wait for ever.
    let kept = timeout(Duration::from_secs(60), kept).await.expect("the connection stays open");
    assert_eq!(kept.unwrap(), StatusCode::OK);
}
