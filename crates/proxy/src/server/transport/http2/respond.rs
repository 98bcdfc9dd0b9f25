//! Carries a request that is no watch between HTTP/2 and the router: lists, gets, health, reflection.
//!
//! Each runs as a task of its own, so that nothing it does holds up the watches on its connection. The response waits for the peer's
//! windows: what it has not room for is not asked of the service. It does not wait for ever: a list that nobody reads pins state, and takes
//! the place of others at the gate.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::Router;
use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream, server::SendResponse};
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame};
use tokio::time::{Instant, timeout_at};
use tower::Service;

use super::{call, limits::BATCH_BYTES_MAX, payload::Payload, reader::Speech, stall::Progress, status};
use crate::fanout::StreamEnd;

/// The body of a request.
pub struct RequestBody(RecvStream);

impl From<RecvStream> for RequestBody {
    fn from(body: RecvStream) -> Self {
        Self(body)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        match ready!(self.0.poll_data(cx)) {
            Some(Ok(data)) => {
                // Fails only when the stream is gone, which the next read tells.
                let _ = self.0.flow_control().release_capacity(data.len());
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            None => self.0.poll_trailers(cx).map(|trailers| trailers.map(|some| some.map(Frame::trailers)).transpose()),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

/// Why a response is not sent to its end.
enum Broken {
    /// The stream is gone.
    Gone,
    /// The service has failed.
    Failed(axum::Error),
    /// The caller has read too little for too long.
    Stalled,
}

/// Answers a request, until the response is handed over, the caller has gone away, or has read too little in `stall_timeout`.
pub async fn serve(
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
    mut router: Router,
    stall_timeout: Duration,
) {
    let deadline_at = call::deadline_at(request.headers());
    let request = request.map(RequestBody);
    let answer = pin!(router.call(request));
    let answer = tokio::select! {
        biased;
        answer = call::within(deadline_at, answer) => answer,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
    };
    let response = match answer {
        Some(Ok(response)) => response,
        None => status::deadline_exceeded().into_http(),
    };
    self::respond(response, respond, (deadline_at, Some(stall_timeout)), Speech::Grpc).await;
}

/// Sends a whole response, until its deadline, until the caller has gone away, or has read too little in the second of the times.
pub async fn respond(
    response: Response<axum::body::Body>,
    mut respond: SendResponse<Payload>,
    (deadline_at, stall_timeout): (Option<Instant>, Option<Duration>),
    speech: Speech,
) {
    let (parts, body) = response.into_parts();
    let ended = body.is_end_stream();
    let Ok(mut send) = respond.send_response(Response::from_parts(parts, ()), ended) else { return };
    if ended {
        return;
    }
    match call::within(deadline_at, Box::pin(pump(body, &mut send, stall_timeout))).await {
        Some(Ok(()) | Err(Broken::Gone)) => {}
        Some(Err(Broken::Failed(error))) => {
            tracing::debug!(%error, "a response broke off");
            send.send_reset(Reason::INTERNAL_ERROR);
        }
        // Whatever came is not all, and without trailers there is no other way to say so.
        Some(Err(Broken::Stalled)) if speech != Speech::Grpc => send.send_reset(Reason::CANCEL),
        Some(Err(Broken::Stalled)) => {
            let stall_timeout = stall_timeout.unwrap_or_default();
            let end = status::ended(&StreamEnd::SnapshotStalled(stall_timeout));
            // Fails where the stream is gone.
            let _ = send.send_trailers(status::trailers(end));
        }
        None => {
            // Fails where the stream is gone.
            let _ = send.send_trailers(status::trailers(Some(status::deadline_exceeded())));
        }
    }
}

/// Sends a body.
async fn pump(
    mut body: axum::body::Body,
    send: &mut SendStream<Payload>,
    stall_timeout: Option<Duration>,
) -> Result<(), Broken> {
    let mut progress = stall_timeout.map(Progress::new);
    loop {
        let frame = tokio::select! {
            biased;
            frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)) => frame,
            _ = poll_fn(|cx| send.poll_reset(cx)) => return Err(Broken::Gone),
        };
        let Some(frame) = frame.transpose().map_err(Broken::Failed)? else {
            return send.send_data(Payload::Bytes(Bytes::new()), true).map_err(|_| Broken::Gone);
        };
        match frame.into_data() {
            Ok(data) => send_data(data, send, progress.as_mut()).await?,
            Err(frame) => {
                let trailers: HeaderMap = frame.into_trailers().unwrap_or_default();
                return send.send_trailers(trailers).map_err(|_| Broken::Gone);
            }
        }
        // A peer with large windows could otherwise keep this thread to itself.
        tokio::task::coop::consume_budget().await;
    }
}

/// Sends data as the peer has room for it.
async fn send_data(
    mut data: Bytes,
    send: &mut SendStream<Payload>,
    mut progress: Option<&mut Progress>,
) -> Result<(), Broken> {
    while !data.is_empty() {
        send.reserve_capacity(data.len().min(BATCH_BYTES_MAX));
        let mut room = send.capacity();
        if room == 0 {
            let has_room = poll_fn(|cx| send.poll_capacity(cx));
            let has_room = match &mut progress {
                Some(progress) => timeout_at(progress.due_at(), has_room).await.map_err(|_| Broken::Stalled)?,
                None => has_room.await,
            };
            room = has_room.and_then(Result::ok).ok_or(Broken::Gone)?;
        }
        let part = data.split_to(room.min(data.len()));
        progress.iter_mut().for_each(|progress| progress.took(part.len()));
        send.send_data(Payload::Bytes(part), false).map_err(|_| Broken::Gone)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tokio::{io::duplex, time::sleep};

    use super::*;
    use crate::server::limits::PROGRESS_BYTES_MIN;
    use kubefan_model::Media;

    const STALL: Duration = Duration::from_secs(30);
    const ANSWER_BYTES: usize = 10 * PROGRESS_BYTES_MIN;

    /// How much one reads of a long answer who takes a window of it ten times per stall timeout.
    async fn read_by_one_with(window_bytes: usize) -> usize {
        let (near, far) = duplex(64 << 10);
        tokio::spawn(async move {
            let mut http2 = h2::server::Builder::new().handshake::<_, Payload>(near).await.unwrap();
            while let Some(Ok((_, send))) = http2.accept().await {
                let answer = Response::new(Body::from(vec![0; ANSWER_BYTES]));
                tokio::spawn(respond(answer, send, (None, Some(STALL)), Speech::Http(Media::Json)));
            }
        });
        let mut client = h2::client::Builder::new();
        client.initial_window_size(window_bytes as u32);
        let (mut send, http2) = client.handshake::<_, Bytes>(far).await.unwrap();
        tokio::spawn(http2);
        let (answer, _) = send.send_request(Request::new(()), true).unwrap();
        let mut body = answer.await.unwrap().into_body();
        let mut read = 0;
        while let Some(Ok(data)) = body.data().await {
            read += data.len();
            sleep(STALL / 10).await;
            body.flow_control().release_capacity(data.len()).unwrap();
        }
        read
    }

    #[tokio::test(start_paused = true)]
    async fn a_small_window_is_served_and_one_that_only_keeps_a_place_is_not() {
        assert_eq!(read_by_one_with(PROGRESS_BYTES_MIN / 8).await, ANSWER_BYTES);
        let read = read_by_one_with(8).await;
        assert!(read < PROGRESS_BYTES_MIN, "{read} bytes");
    }
}
