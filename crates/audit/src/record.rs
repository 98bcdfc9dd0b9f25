//! The record of one request, from its start to its end.
//!
//! The hazard is a path through the servers that forgets the end. So no call ends a record:
//! dropping it does, however its request ended.

use std::{borrow::Cow, net::IpAddr, sync::Arc, time::SystemTime};

use http::{HeaderMap, HeaderValue};
use kubefan_telemetry::{requests::Protocol, traces::RequestSpan};

use super::{
    event::{Event, ObjectRef, Outcome, Stage},
    notes::Notes,
    queue::{NotRecorded, Queue},
    request_head::{AUDIT_ID, RequestHead, request_uri, source_ips, user_agent, verb_of},
};

const DECISION: &str = "authorization.k8s.io/decision";
const REASON: &str = "authorization.k8s.io/reason";
const PROTOCOL: &str = "kubefan.dev/protocol";
const FORWARDED: &str = "kubefan.dev/forwarded";
const OBJECTS: &str = "kubefan.dev/objects";
const BYTES: &str = "kubefan.dev/bytes";
/// Annotation with the reason of the end of a stream, by the label of the metric.
const END: &str = "kubefan.dev/end";
/// The end of a stream whose caller went away.
const CANCELLED: &str = "cancelled";

/// The record of one request: a line of the audit log, and a span. Dropping it completes both.
/// Without an audit log it has no line, and without tracing no span.
#[derive(Default)]
pub struct AuditRecord {
    open: Option<Box<Open>>,
    notes: Notes,
    span: RequestSpan,
}

/// A record that was not completed yet.
struct Open {
    queue: Arc<Queue>,
    id: HeaderValue,
    received: SystemTime,
    protocol: Protocol,
    verb: Cow<'static, str>,
    uri: String,
    source_ips: Vec<IpAddr>,
    user_agent: String,
    object: Option<ObjectRef>,
    outcome: Option<Outcome>,
    is_forwarded: bool,
    /// Whether its stream has started.
    is_started: bool,
    end: Option<&'static str>,
}

impl AuditRecord {
    /// The record of a request that begins.
    pub(super) fn new(line: Option<(Arc<Queue>, HeaderValue)>, span: RequestSpan, head: RequestHead<'_>) -> Self {
        let open = line.map(|(queue, id)| Box::new(Open::new(queue, id, head)));
        let notes = if open.is_some() || span.is_on() { Notes::new() } else { Notes::default() };
        Self { open, notes, span }
    }

    /// Whether anything waits for the end of the request: a line, or a span.
    pub fn is_on(&self) -> bool {
        self.open.is_some() || self.span.is_on()
    }

    /// The span of the request.
    pub fn span(&self) -> &RequestSpan {
        &self.span
    }

    /// Notes about the request.
    pub fn notes(&self) -> Notes {
        self.notes.clone()
    }

    /// The ID of the record; `None` without an audit log, and once it was completed.
    pub fn id(&self) -> Option<HeaderValue> {
        self.open.as_ref().map(|open| open.id.clone())
    }

    /// Puts the ID into the headers of the answer, or of the forwarded request.
    pub fn put_id(&self, headers: &mut HeaderMap) {
        put_id(self.id(), headers);
    }

    /// Records that a stream starts, before its headers are sent. A forwarded one does not wait for
    /// that: the apiserver has it on record.
    ///
    /// # Errors
    /// The record cannot be written, and the mode demands it. Then the stream must not start.
    pub async fn started(&mut self, outcome: Outcome, is_forwarded: bool) -> Result<(), NotRecorded> {
        let traced = self.span.is_on().then(|| outcome.clone());
        let written = self.write_start(outcome, is_forwarded).await;
        self.trace_written(traced, is_forwarded, written);
        if written.is_ok() {
            self.span.streams();
        }
        written
    }

    async fn write_start(&mut self, outcome: Outcome, is_forwarded: bool) -> Result<(), NotRecorded> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.outcome = Some(outcome);
        open.is_forwarded = is_forwarded;
        let line = open.line(Stage::ResponseStarted, &self.notes);
        if is_forwarded || !open.queue.is_strict {
            open.is_started = true;
            open.queue.push(line);
            return Ok(());
        }
        let Ok(place) = open.queue.place(line.len()).await else {
            self.open = None;
            return Err(NotRecorded);
        };
        open.is_started = true;
        let written = place.write(line).await;
        if written.is_err() {
            // There is no stream.
            self.open = None;
        }
        written
    }

    /// Records the answer to a request that is no stream. With `blocking-strict` the record is
    /// complete before the answer is sent, unless the answer is forwarded. Otherwise it is complete
    /// when the answer has ended.
    ///
    /// # Errors
    /// The record cannot be written, and the mode demands it. Then the answer must not be sent.
    pub async fn answered(&mut self, outcome: Outcome, is_forwarded: bool) -> Result<(), NotRecorded> {
        let traced = self.span.is_on().then(|| outcome.clone());
        let written = self.write_answer(outcome, is_forwarded).await;
        self.trace_written(traced, is_forwarded, written);
        written
    }

    async fn write_answer(&mut self, outcome: Outcome, is_forwarded: bool) -> Result<(), NotRecorded> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.outcome = Some(outcome);
        open.is_forwarded = is_forwarded;
        if is_forwarded || !open.queue.is_strict {
            return Ok(());
        }
        let line = open.line(Stage::ResponseComplete, &self.notes);
        let Ok(place) = open.queue.place(line.len()).await else {
            self.open = None;
            return Err(NotRecorded);
        };
        self.open = None;
        place.write(line).await
    }

    /// Notes the answer to a request that is refused without waiting for its record.
    pub fn refused(&mut self, outcome: Outcome) {
        self.trace(&outcome, false);
        if let Some(open) = &mut self.open {
            open.outcome = Some(outcome);
        }
    }

    /// Notes why a stream ends, and its last status if it has one. A stream that is dropped without
    /// a reason was cancelled by its caller.
    pub fn ended(&mut self, end: &'static str, outcome: Option<Outcome>) {
        self.span.note("kubefan.stream.end", end);
        if let Some(open) = &mut self.open {
            open.end = Some(end);
            open.outcome = outcome.or(open.outcome.take());
        }
    }

    /// Sets the caller's answer in the span. It is known once the record is written or has failed.
    fn trace_written(&self, outcome: Option<Outcome>, is_forwarded: bool, written: Result<(), NotRecorded>) {
        match (outcome, written) {
            (Some(outcome), Ok(())) => self.trace(&outcome, is_forwarded),
            (Some(_), Err(NotRecorded)) => self.trace(&Outcome::code(500), false),
            (None, _) => {}
        }
    }

    /// Sets the attributes of the span that are known with the answer.
    fn trace(&self, outcome: &Outcome, is_forwarded: bool) {
        if !self.span.is_on() {
            return;
        }
        if let Some(noted) = self.notes.lock() {
            noted.trace(&self.span);
        }
        self.span.note("http.response.status_code", i64::from(outcome.status_code()));
        self.span.note("kubefan.forwarded", is_forwarded);
        if outcome.is_failure() {
            self.span.note("error.type", outcome.error_type());
        }
        // By the conventions, only a failure of the server is an error.
        if outcome.status_code() >= 500 {
            self.span.failed(outcome.error_type());
        }
    }
}

/// Puts an ID into headers.
pub fn put_id(id: Option<HeaderValue>, headers: &mut HeaderMap) {
    if let Some(id) = id {
        headers.insert(AUDIT_ID, id);
    }
}

impl Drop for AuditRecord {
    fn drop(&mut self) {
        if self.span.is_on()
            && let Some((objects, bytes)) = self.notes.lock().and_then(|noted| noted.sent)
        {
            self.span.note("kubefan.sent.objects", i64::try_from(objects).unwrap_or(i64::MAX));
            self.span.note("kubefan.sent.bytes", i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        let is_panic = std::thread::panicking();
        if is_panic {
            self.span.note("error.type", "panic");
            self.span.failed("panic");
        }
        let Some(mut open) = self.open.take() else { return };
        if is_panic {
            open.outcome = Some(Outcome::panicked());
            return open.queue.push(open.line(Stage::Panic, &self.notes));
        }
        open.outcome.get_or_insert_with(Outcome::closed_early);
        // Either side may have ended a forwarded stream.
        if open.is_started && !open.is_forwarded {
            open.end.get_or_insert(CANCELLED);
        }
        open.queue.push(open.line(Stage::ResponseComplete, &self.notes));
    }
}

impl Open {
    fn new(queue: Arc<Queue>, id: HeaderValue, head: RequestHead<'_>) -> Self {
        let RequestHead { protocol, verb, uri, headers, address, object } = head;
        Self {
            received: (queue.clock)(),
            queue,
            id,
            protocol,
            verb: verb_of(verb),
            uri: request_uri(uri),
            source_ips: source_ips(headers, address),
            user_agent: user_agent(headers),
            object: object.map(ObjectRef::shortened),
            outcome: None,
            is_forwarded: false,
            is_started: false,
            end: None,
        }
    }

    fn line(&self, stage: Stage, notes: &Notes) -> Vec<u8> {
        let noted = notes.lock();
        let noted = noted.as_deref();
        // Visible ASCII.
        let id = self.id.to_str().unwrap_or_default();
        let mut event = Event::new(id, stage, self.received, (self.queue.clock)());
        event.verb = &self.verb;
        event.source_ips = &self.source_ips;
        event.user_agent = &self.user_agent;
        event.response_status = self.outcome.as_ref();
        event.request_uri = Cow::Borrowed(&self.uri);
        event.object_ref = self.object.as_ref().map(Cow::Borrowed);
        event.annotations.insert(PROTOCOL, self.protocol.as_str().into());
        if self.is_forwarded {
            event.annotations.insert(FORWARDED, "true".into());
        }
        event.annotations.extend(self.end.map(|end| (END, end.into())));
        let Some(noted) = noted else { return event.to_line() };
        event.user = noted.user(self.is_forwarded);
        if let Some(object) = noted.object() {
            event.object_ref = Some(Cow::Owned(object.shortened()));
        }
        if self.protocol == Protocol::Grpc
            && let Some(uri) = noted.http_equivalent()
        {
            event.request_uri = Cow::Owned(uri);
        }
        if let Some((is_allowed, reason)) = &noted.decision {
            event.annotations.insert(DECISION, if *is_allowed { "allow" } else { "forbid" }.into());
            event.annotations.insert(REASON, Cow::Borrowed(reason));
        }
        // kubefan counts nothing of an answer that comes from upstream.
        if let Some((objects, bytes)) = noted.sent.filter(|_| !self.is_forwarded) {
            event.annotations.insert(OBJECTS, objects.to_string().into());
            event.annotations.insert(BYTES, bytes.to_string().into());
        }
        event.to_line()
    }
}

#[cfg(test)]
mod tests;
