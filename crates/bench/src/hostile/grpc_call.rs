//! gRPC calls over the h2 crate, whose requests can be missing and whose answers can stay unread.

use bytes::Bytes;
use h2::{
    RecvStream, SendStream,
    client::{self, SendRequest},
};
use http::{HeaderMap, Request};
use kubefan_common::proto::{
    WATCH_PATH,
    v1alpha1::{Target, WatchRequest},
};
use prost::Message;

use super::context::Context;
use crate::messages::framed;

/// The streams that a connection opens before the server's limit is known. A sink has none.
const STREAMS_MAX: usize = 2000;
/// Windows large enough that the server does not wait.
const WINDOW_BYTES: u32 = 4 << 20;

/// Opens a connection. The task that drives it ends with the last clone of the sender.
pub(super) async fn open(context: &Context, number: u64) -> Option<SendRequest<Bytes>> {
    let stream = context.connect_by_tls(number).await?;
    let mut builder = client::Builder::new();
    builder.initial_max_send_streams(STREAMS_MAX).initial_window_size(WINDOW_BYTES);
    builder.initial_connection_window_size(WINDOW_BYTES).enable_push(false);
    match builder.handshake(stream).await {
        Ok((send, connection)) => {
            let tally = context.tally.clone();
            tokio::spawn(async move {
                if let Err(error) = connection.await {
                    tally.count(&named("connection", &error));
                }
            });
            Some(send)
        }
        Err(error) => {
            context.tally.count(&named("handshake", &error));
            None
        }
    }
}

/// Sends the headers of a call.
async fn send(
    context: &Context,
    send: &SendRequest<Bytes>,
    path: &str,
) -> Option<(client::ResponseFuture, SendStream<Bytes>)> {
    let request = Request::post(format!("http://localhost{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .ok()?;
    let sent = match send.clone().ready().await {
        Ok(mut ready) => ready.send_request(request, false),
        Err(error) => Err(error),
    };
    sent.inspect_err(|error| context.tally.count(&named("request", error))).ok()
}

/// Makes a call, whose message is missing if it is `None`, and reads its answer to the end.
pub(super) async fn call(context: &Context, requests: &SendRequest<Bytes>, path: &str, message: Option<&[u8]>) {
    let Some((response, mut stream)) = send(context, requests, path).await else { return };
    if let Some(message) = message {
        // Its failure also fails the response.
        let _ = stream.send_data(framed(message), true);
    }
    answer(context, response).await;
}

/// Makes a call, does not end the request, and reads the answer to the end.
pub(super) async fn call_open(context: &Context, requests: &SendRequest<Bytes>, path: &str, message: &[u8]) {
    let Some((response, mut stream)) = send(context, requests, path).await else { return };
    // As above.
    let _ = stream.send_data(framed(message), false);
    answer(context, response).await;
}

/// Reads a path as the owner of a token, and the answer to its end.
pub(super) async fn get_as(context: &Context, requests: &SendRequest<Bytes>, path: &str, token: &str) {
    let request = Request::get(format!("https://localhost{path}")).header("authorization", format!("Bearer {token}"));
    let Ok(request) = request.body(()) else { return };
    let sent = match requests.clone().ready().await {
        Ok(mut ready) => ready.send_request(request, true),
        Err(error) => Err(error),
    };
    match sent {
        Ok((response, _)) => answer(context, response).await,
        Err(error) => context.tally.count(&named("request", &error)),
    }
}

async fn answer(context: &Context, response: client::ResponseFuture) {
    match response.await {
        Err(error) => context.tally.count(&named("stream", &error)),
        Ok(response) => {
            if let Some(status) = status(response.headers()) {
                return context.tally.count(&status);
            }
            context.tally.count(response.status().as_str());
            read(context, response.into_body()).await;
        }
    }
}

async fn read(context: &Context, mut body: RecvStream) {
    while let Some(data) = body.data().await {
        match data {
            Ok(data) => {
                context.tally.add_bytes(data.len());
                // Cannot fail: this many bytes were just received.
                let _ = body.flow_control().release_capacity(data.len());
            }
            Err(error) => return context.tally.count(&named("stream", &error)),
        }
    }
    if let Ok(Some(trailers)) = body.trailers().await {
        context.tally.count(&format!("end {}", status(&trailers).unwrap_or_default()));
    }
}

fn status(headers: &HeaderMap) -> Option<String> {
    Some(format!("gRPC {}", headers.get("grpc-status")?.to_str().ok()?))
}

fn named(what: &str, error: &h2::Error) -> String {
    match error.reason() {
        Some(reason) => format!("{what} {reason:?}"),
        None => format!("{what} ended"),
    }
}

/// A watch of pods.
pub(super) fn pods(label_selector: String) -> WatchRequest {
    let target = Target { resource: "pods".to_owned(), label_selector, ..Target::default() };
    WatchRequest { target: Some(target), ..WatchRequest::default() }
}

/// Makes a watch and reads it to its end.
pub(super) async fn watch(context: &Context, requests: &SendRequest<Bytes>, request: &WatchRequest) {
    call(context, requests, WATCH_PATH, Some(&request.encode_to_vec())).await;
}
