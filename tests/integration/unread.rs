//! Streams whose clients give no window, when memory is short.

use std::time::Duration;

use http::{Request, StatusCode};
use tokio::time::{Instant, sleep};
use tonic::Code;

use crate::{
    connections::{RawConnection, large, rig},
    harness::{
        rig::{pods, target},
        tests,
    },
};

tests! {
    paused: streams_without_a_window_are_ended_when_memory_is_short,
        a_long_snapshot_that_is_read_is_not_ended_when_memory_is_short;
}

/// Its client is always one window behind.
async fn a_long_snapshot_that_is_read_is_not_ended_when_memory_is_short() {
    let rig = rig().await;
    for number in 0..400 {
        rig.sim.create(&pods(), large(&format!("p{number}"), 'x')).unwrap();
    }
    rig.watch(target("pods"), "").await.unwrap().until(rig.sim.revision()).await;
    let mut raw = RawConnection::to(&rig).await;
    let path = "http://localhost/api/v1/pods?watch=1&resourceVersion=0";
    let (response, _) = raw.requests.send_request(Request::get(path).body(()).unwrap(), true).unwrap();
    let mut body = response.await.unwrap().into_body();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(15) {
        let data = body.data().await.expect("the snapshot is longer").unwrap();
        sleep(Duration::from_millis(100)).await;
        body.flow_control().release_capacity(data.len()).unwrap();
        assert_eq!(rig.server.readers().end_some(), 0, "after {:?}", start.elapsed());
    }
}

async fn streams_without_a_window_are_ended_when_memory_is_short() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut unread = raw.watch(target("pods")).await;
    unread.snapshot().await;
    let path = "http://localhost/api/v1/pods?watch=1&resourceVersion=0";
    let (response, _) = raw.requests.send_request(Request::get(path).body(()).unwrap(), true).unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut unread_http = response.into_body();
    let mut read = raw.watch(target("pods")).await;
    read.snapshot().await;

    // More than the window of a stream.
    for number in 0..20 {
        rig.sim.create(&pods(), large(&format!("p{number}"), 'x')).unwrap();
    }
    read.until("p19").await;
    sleep(Duration::from_secs(9)).await;
    assert_eq!(rig.server.readers().end_some(), 0, "they may be slow");
    sleep(Duration::from_secs(2)).await;
    assert_eq!(rig.server.readers().end_some(), 2);
    let status = loop {
        if let Err(status) = unread.next().await {
            break status;
        }
    };
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    while let Some(data) = unread_http.data().await {
        unread_http.flow_control().release_capacity(data.unwrap().len()).unwrap();
    }

    rig.sim.update(&pods(), large("p7", 'y')).unwrap();
    read.until("p7").await;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(rig.server.readers().end_some(), 0, "nothing waits for a client");
}
