//! The tasks that answer the requests of an HTTP/2 connection.
//!
//! A watch is only opened here: it becomes a [`StartedWatch`], which the task of the connection
//! sends. Everything else is answered completely by its own task.

use std::{
    future::{pending, poll_fn},
    pin::pin,
    sync::Arc,
};

use h2::{RecvStream, server::SendResponse};
use http::{Request, StatusCode};
use kubefan_admission::Holder;
use kubefan_audit::{AuditRecord, Outcome, record::put_id};
use kubefan_common::proto::v1alpha1::WatchRequest;
use kubefan_fanout::{ConnectionWaker, StreamWaker};
use prost::Message;
use tokio::time::Instant;

use super::{
    arrival::Arrival,
    payload::Payload,
    respond::{self, OnCutOff, RequestBody, ResponseLimits},
};
use crate::{
    client_info::ClientInfo,
    grpc::{audited, call, status},
    kube::answer::Answer,
    transport::{early_answer::BodyRest, services::Services},
    watch::OpenedWatch,
};

/// A watch that was opened, and the stream to send it on.
pub struct StartedWatch {
    /// The watch.
    pub opened: OpenedWatch,
    /// The response, whose headers were not sent yet.
    pub respond: SendResponse<Payload>,
    /// The deadline of the gRPC call.
    pub deadline_at: Option<Instant>,
}

/// Opens a gRPC watch. A refusal is sent as the whole response.
pub async fn open_grpc_watch(
    services: Arc<Services>,
    client: ClientInfo,
    connection_waker: Arc<ConnectionWaker>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
    arrival: Arrival,
    mut record: AuditRecord,
) -> Option<StartedWatch> {
    let deadline_at = call::deadline_at(request.headers());
    let encoding = call::check_encoding(request.headers());
    // A call that waits for its message keeps no headers but its token and its user agent.
    let presented = client.presents(request.headers(), false);
    let sender = client.sender(request.headers());
    let notes = record.notes();
    let id = record.id();
    let mut body = request.into_body();
    let stream_waker = StreamWaker::new(&connection_waker, respond.stream_id().as_u32());
    let opened = {
        let opening = pin!(async {
            encoding?;
            let message = tokio::select! {
                biased;
                message = call::message(&mut body, services.options.message_bytes_max) => message?,
                status = arrival.failed(services.drain.clone(), false) => return Err(status),
            };
            arrival.arrived();
            let Some(message) = message else { return Ok(None) };
            let request = WatchRequest::decode(message).map_err(|error| status::malformed(&error.to_string()))?;
            // Boxed, so that a call that waits for its message does not have the memory for this.
            let opened = Box::pin(services.grpc.open(request, presented, sender, notes, stream_waker));
            record.span().follow(opened).await.map(Some)
        });
        tokio::select! {
            biased;
            opened = call::within(deadline_at, opening) => opened.unwrap_or_else(|| Err(status::deadline_exceeded())),
            _ = poll_fn(|cx| respond.poll_reset(cx)) => return None,
        }
    };
    let opened = match opened {
        Ok(None) => return None,
        Ok(Some(opened)) => {
            let recorded = record.started(Outcome::code(StatusCode::OK.as_u16()), false).await;
            recorded.map(|()| opened).map_err(status::not_recorded)
        }
        Err(status) => {
            let recorded = record.answered(audited::outcome(&status), false).await;
            Err(recorded.map_or_else(status::not_recorded, |()| status))
        }
    };
    match opened {
        Ok(opened) => Some(StartedWatch { opened: OpenedWatch { record, ..opened }, respond, deadline_at }),
        Err(status) => {
            let mut response = status.into_http();
            put_id(id, response.headers_mut());
            // Fails only if the stream is gone.
            let _ = respond.send_response(response, true);
            None
        }
    }
}

/// Answers a request of the Kubernetes API: opens a watch, or sends a whole response. Then it reads
/// the rest of the request, because many clients report a reset instead of the response. gRPC
/// clients do not, so their calls need no such end.
pub async fn answer_kube(
    services: Arc<Services>,
    stream_waker: StreamWaker,
    holder: Holder,
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
) -> Option<StartedWatch> {
    let (head, body) = request.into_parts();
    let (body, rest) = BodyRest::of(RequestBody::new(body, &head.headers), &head.headers);
    let request = Request::from_parts(head, body);
    let answering = Box::pin(services.kube.answer(request, stream_waker));
    let answer = tokio::select! {
        biased;
        answer = answering => answer,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return None,
    };
    let (response, stall_timeout) = match answer {
        Answer::Watch(opened) => return Some(StartedWatch { opened: *opened, respond, deadline_at: None }),
        Answer::Response(response) => (response, Some(services.options.snapshot_stall_timeout)),
        Answer::Forwarded(response) => (response, None),
    };
    let limits = ResponseLimits { deadline_at: None, stall_timeout };
    respond::respond(response, respond, limits, OnCutOff::Reset, &services.readers, pending()).await;
    // Now, because the response held its places until it was sent.
    rest.discard(&services.discards, holder).await;
    None
}
