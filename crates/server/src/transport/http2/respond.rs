//! Answers HTTP/2 requests other than watches: passes them to the router (gRPC lists, gets, health,
//! reflection), and sends whole responses.
//!
//! Each runs as its own task, so it never delays the watches of its connection. A response body is
//! polled only as far as the client's window allows. The hazard is a list that is not read: it pins
//! a snapshot and occupies the snapshot gate, so it is ended after a stall timeout.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream, server::SendResponse};
use http::{HeaderMap, Request, Response, header::CONTENT_LENGTH};
use http_body::{Body, Frame, SizeHint};
use kubefan_admission::Holder;
use kubefan_audit::{AuditRecord, Outcome, record::put_id};
use kubefan_cache::StreamEnd;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tower::Service;

use super::{arrival::Arrival, payload::Payload};
use crate::{
    grpc::{audited, call, status},
    transport::{
        limits::BATCH_BYTES_MAX,
        read_progress::ReadProgress,
        services::Services,
        unread::{ObservedReader, Readers},
    },
};

/// The body of a request.
pub struct RequestBody {
    body: RecvStream,
    /// Until the request has arrived, if that is limited.
    arrival: Option<Arrival>,
    /// Whether the first data is the whole request for now.
    is_stream: bool,
    /// The bytes that are still to come, if the client has said how many.
    left: Option<u64>,
}

impl RequestBody {
    /// The body of a request with these headers.
    pub fn new(body: RecvStream, headers: &HeaderMap) -> Self {
        // h2 resets a stream that has more or fewer bytes.
        let left = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        Self { body, arrival: None, is_stream: false, left }
    }

    fn arrived(&mut self) {
        if let Some(arrival) = self.arrival.take() {
            arrival.arrived();
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        match ready!(self.body.poll_data(cx)) {
            Some(Ok(data)) => {
                // Fails only if the stream is gone, which the next read reports.
                let _ = self.body.flow_control().release_capacity(data.len());
                self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
                if self.is_stream || self.body.is_end_stream() {
                    self.arrived();
                }
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            None => {
                let trailers = ready!(self.body.poll_trailers(cx));
                self.arrived();
                Poll::Ready(trailers.map(|some| some.map(Frame::trailers)).transpose())
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.body.is_end_stream() {
            return SizeHint::with_exact(0);
        }
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// The reason why a response was not sent completely.
enum SendError {
    /// The client has reset the stream.
    Gone,
    /// The body has failed.
    Failed(axum::Error),
    /// The client has read too little in a stall timeout.
    Stalled,
    /// The client reads nothing, and memory is short.
    Unread,
    /// The call must end.
    Ended(Box<Status>),
}

/// Limits of a response.
#[derive(Debug, Clone, Copy, Default)]
pub struct ResponseLimits {
    /// The deadline of the call.
    pub deadline_at: Option<Instant>,
    /// Ends the response if the client reads too little in this time; `None` if it may be read at
    /// any pace.
    pub stall_timeout: Option<Duration>,
}

/// The sign that a response was cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCutOff {
    /// A gRPC status in the trailers.
    GrpcStatus,
    /// A stream reset: without trailers there is no other way.
    Reset,
}

/// Passes a gRPC request to the router and sends its response, unless the client goes away, stalls,
/// or does not send its whole request in time. A stream holds a place among all streams. The record
/// is complete when the response has ended.
pub async fn serve_router(
    services: Arc<Services>,
    holder: Holder,
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
    arrival: Arrival,
    mut record: AuditRecord,
) {
    let deadline_at = call::deadline_at(request.headers());
    let is_stream = call::is_stream(request.uri().path());
    let is_of_watch_service = call::is_of_watch_service(request.uri().path());
    let ends_with_drain = call::is_reflection(request.uri().path());
    let _place = match is_stream.then(|| services.grpc.admit_stream(holder)).transpose() {
        Ok(place) => place,
        Err(status) => {
            // Fails only if the stream is gone.
            let _ = respond.send_response(status.into_http(), true);
            return;
        }
    };
    let mut ended = Box::pin(arrival.failed(services.drain.clone(), ends_with_drain));
    let request = request.map(|body| RequestBody { body, arrival: Some(arrival), is_stream, left: None });
    let mut router = services.router.clone();
    let answer = pin!(record.span().follow(router.call(request)));
    let answer = tokio::select! {
        biased;
        answer = call::within(deadline_at, answer) => answer,
        status = &mut ended => Some(Ok(status.into_http())),
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
    };
    let response = match answer {
        Some(Ok(response)) => response,
        None => status::deadline_exceeded().into_http(),
    };
    let id = record.id();
    // Present if the response consists of a status only.
    let outcome = response.extensions().get::<Status>().map_or_else(|| Outcome::code(200), audited::outcome);
    let mut response = match record.answered(outcome, false).await {
        Ok(()) => response,
        Err(not_recorded) => status::not_recorded(not_recorded).into_http(),
    };
    put_id(id, response.headers_mut());
    let is_refused = response.extensions().get::<Status>().is_some();
    if is_of_watch_service && !is_refused {
        services.budget.put(response.headers_mut());
    }
    let limits = ResponseLimits { deadline_at, stall_timeout: Some(services.options.snapshot_stall_timeout) };
    self::respond(response, respond, limits, OnCutOff::GrpcStatus, &services.readers, ended).await;
}

/// Sends a whole response within its limits, unless the client goes away or the call `ended` with
/// a status. While it waits for a window, the client is one of the `readers` that may be given up.
pub async fn respond(
    response: Response<axum::body::Body>,
    mut respond: SendResponse<Payload>,
    ResponseLimits { deadline_at, stall_timeout }: ResponseLimits,
    on_cut_off: OnCutOff,
    readers: &Arc<Readers>,
    ended: impl Future<Output = Status>,
) {
    let (parts, body) = response.into_parts();
    let is_empty = body.is_end_stream();
    let Ok(mut send) = respond.send_response(Response::from_parts(parts, ()), is_empty) else { return };
    if is_empty {
        return;
    }
    let sending = Box::pin(call::within(deadline_at, Box::pin(send_body(body, &mut send, stall_timeout, readers))));
    let sent = tokio::select! {
        biased;
        sent = sending => sent,
        status = ended => Some(Err(SendError::Ended(Box::new(status)))),
    };
    match sent {
        Some(Ok(()) | Err(SendError::Gone)) => {}
        Some(Err(SendError::Failed(error))) => {
            tracing::debug!(%error, "the body of a response failed");
            send.send_reset(Reason::INTERNAL_ERROR);
        }
        Some(Err(SendError::Stalled | SendError::Unread)) if on_cut_off == OnCutOff::Reset => {
            send.send_reset(Reason::CANCEL);
        }
        Some(Err(SendError::Unread)) => {
            // Fails only if the stream is gone.
            let _ = send.send_trailers(status::trailers(status::ended(&ObservedReader::end(), None)));
        }
        Some(Err(SendError::Stalled)) => {
            let stall_timeout = stall_timeout.unwrap_or_default();
            let end = status::ended(&StreamEnd::SnapshotStalled(stall_timeout), None);
            // Fails only if the stream is gone.
            let _ = send.send_trailers(status::trailers(end));
        }
        Some(Err(SendError::Ended(status))) => {
            // Fails only if the stream is gone.
            let _ = send.send_trailers(status::trailers(Some(*status)));
        }
        None => {
            // Fails only if the stream is gone.
            let _ = send.send_trailers(status::trailers(Some(status::deadline_exceeded())));
        }
    }
}

/// Sends a body.
async fn send_body(
    mut body: axum::body::Body,
    send: &mut SendStream<Payload>,
    stall_timeout: Option<Duration>,
    readers: &Arc<Readers>,
) -> Result<(), SendError> {
    let mut progress = stall_timeout.map(ReadProgress::new);
    let mut reader = None;
    loop {
        let frame = tokio::select! {
            biased;
            frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)) => frame,
            _ = poll_fn(|cx| send.poll_reset(cx)) => return Err(SendError::Gone),
        };
        let Some(frame) = frame.transpose().map_err(SendError::Failed)? else {
            return send.send_data(Payload::Bytes(Bytes::new()), true).map_err(|_| SendError::Gone);
        };
        match frame.into_data() {
            Ok(data) => send_data(data, send, progress.as_mut(), &mut reader, readers).await?,
            Err(frame) => {
                let trailers: HeaderMap = frame.into_trailers().unwrap_or_default();
                return send.send_trailers(trailers).map_err(|_| SendError::Gone);
            }
        }
        // A client with large windows would otherwise occupy this thread.
        tokio::task::coop::consume_budget().await;
    }
}

/// Sends data as far as the client's window allows.
async fn send_data(
    mut data: Bytes,
    send: &mut SendStream<Payload>,
    mut progress: Option<&mut ReadProgress>,
    reader: &mut Option<ObservedReader>,
    readers: &Arc<Readers>,
) -> Result<(), SendError> {
    while !data.is_empty() {
        send.reserve_capacity(data.len().min(BATCH_BYTES_MAX));
        let mut room = send.capacity();
        if room == 0 {
            let reader = reader.get_or_insert_with(|| readers.observe());
            let has_room = poll_fn(|cx| match send.poll_capacity(cx) {
                Poll::Ready(room) => Poll::Ready(room.and_then(Result::ok).ok_or(SendError::Gone)),
                Poll::Pending if reader.is_given_up(cx.waker()) => Poll::Ready(Err(SendError::Unread)),
                Poll::Pending => Poll::Pending,
            });
            let has_room = match &mut progress {
                Some(progress) => timeout_at(progress.due_at(), has_room).await.map_err(|_| SendError::Stalled)?,
                None => has_room.await,
            };
            reader.reads();
            room = has_room?;
        }
        let part = data.split_to(room.min(data.len()));
        if let Some(progress) = &mut progress {
            progress.advanced(part.len());
        }
        send.send_data(Payload::Bytes(part), false).map_err(|_| SendError::Gone)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tokio::{io::duplex, time::sleep};

    use super::*;
    use crate::transport::limits::PROGRESS_BYTES_MIN;

    const STALL: Duration = Duration::from_secs(30);
    const ANSWER_BYTES: usize = 2 * PROGRESS_BYTES_MIN;

    /// The bytes of a long answer that a client gets that reads one window of it ten times per
    /// stall timeout.
    async fn bytes_read_with_window(window_bytes: usize) -> usize {
        let (near, far) = duplex(64 << 10);
        tokio::spawn(async move {
            let mut http2 = h2::server::Builder::new().handshake::<_, Payload>(near).await.unwrap();
            while let Some(Ok((_, send))) = http2.accept().await {
                let answer = Response::new(Body::from(vec![0; ANSWER_BYTES]));
                let limits = ResponseLimits { stall_timeout: Some(STALL), ..ResponseLimits::default() };
                let sending = async move {
                    respond(answer, send, limits, OnCutOff::Reset, &Readers::new(), std::future::pending()).await;
                };
                tokio::spawn(sending);
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

    /// The size decides how much of a forwarded request is kept for a repeat.
    #[tokio::test]
    async fn a_request_has_the_size_that_its_client_says() {
        let (near, far) = duplex(64 << 10);
        let client = tokio::spawn(async move {
            let (mut send, http2) = h2::client::handshake(far).await.unwrap();
            tokio::spawn(http2);
            for (length, is_empty) in [(Some("300"), false), (None, false), (None, true)] {
                let mut request = Request::new(());
                length.map(|length| request.headers_mut().insert(CONTENT_LENGTH, length.parse().unwrap()));
                let (answer, mut body) = send.send_request(request, is_empty).unwrap();
                if !is_empty {
                    body.send_data(Bytes::from(vec![b'x'; 300]), true).unwrap();
                }
                answer.await.unwrap();
                send = send.ready().await.unwrap();
            }
        });
        let mut http2 = h2::server::Builder::new().handshake::<_, Payload>(near).await.unwrap();
        let mut sizes = Vec::new();
        while let Some(Ok((request, mut respond))) = http2.accept().await {
            let (head, body) = request.into_parts();
            sizes.push(http_body::Body::size_hint(&RequestBody::new(body, &head.headers)).exact());
            respond.send_response(Response::new(()), true).unwrap();
        }
        client.await.unwrap();
        assert_eq!(sizes, [Some(300), None, Some(0)]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unread_answer_is_ended_when_memory_is_short() {
        let readers = Readers::new();
        let (near, far) = duplex(64 << 10);
        let observed = readers.clone();
        tokio::spawn(async move {
            let mut http2 = h2::server::Builder::new().handshake::<_, Payload>(near).await.unwrap();
            while let Some(Ok((_, send))) = http2.accept().await {
                let answer = Response::new(Body::from(vec![0; ANSWER_BYTES]));
                let observed = observed.clone();
                tokio::spawn(async move {
                    let limits = ResponseLimits::default();
                    respond(answer, send, limits, OnCutOff::Reset, &observed, std::future::pending()).await;
                });
            }
        });
        let mut client = h2::client::Builder::new();
        client.initial_window_size(8);
        let (mut send, http2) = client.handshake::<_, Bytes>(far).await.unwrap();
        tokio::spawn(http2);
        let (answer, _) = send.send_request(Request::new(()), true).unwrap();
        let mut body = answer.await.unwrap().into_body();
        assert_eq!(body.data().await.unwrap().unwrap().len(), 8);
        sleep(STALL).await;
        assert_eq!(readers.end_some(), 1);
        assert_eq!(body.data().await.unwrap().unwrap_err().reason(), Some(Reason::CANCEL));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_served_and_one_that_reads_next_to_nothing_is_not() {
        assert_eq!(bytes_read_with_window(PROGRESS_BYTES_MIN / 8).await, ANSWER_BYTES);
        let read = bytes_read_with_window(8).await;
        assert!(read < PROGRESS_BYTES_MIN, "{read} bytes");
    }
}
