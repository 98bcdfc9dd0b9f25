//! Traces: a span for each request, and one for each thing that it waits for, exported over OTLP.
//!
//! The span of a request is in the context of the task that answers it ([`RequestSpan::follow`]),
//! so the code that waits needs no parameter for it: [`wait`] begins a child, and [`note`] says
//! something about the request. Without tracing there is no such context, and both find out so by
//! one look at a thread's own memory. Events have no spans: a watch has one until it starts, and
//! one from there to its end.
//!
//! The hazard is a collector that is slow or away. Spans wait in a queue of limited length, which
//! drops spans that find no room, and one task exports them.

mod export;

use std::{borrow::Cow, future::Future, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context, KeyValue, Value,
    context::FutureExt,
    propagation::{Extractor, Injector, TextMapPropagator},
    trace::{SpanKind, Status, TraceContextExt, Tracer, TracerProvider},
};
use opentelemetry_sdk::{
    propagation::TraceContextPropagator,
    trace::{SdkTracer, SdkTracerProvider},
};

pub use export::{Exporter, Protocol, TraceError, TraceSettings};

use super::metrics::TraceMetrics;

/// The name of the instrumentation in spans.
const SCOPE: &str = "kubefan";
/// The longest `tracestate` that is taken from a client, in bytes, as W3C Trace Context demands. A
/// longer one is ignored.
const TRACESTATE_BYTES_MAX: usize = 512;

/// Begins the spans of requests. Clones are the same traces; the default is none.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<Shared>>);

struct Shared {
    tracer: SdkTracer,
    propagator: TraceContextPropagator,
    /// Provider of the tracer, whose processor ends with it.
    _provider: SdkTracerProvider,
}

/// Part of a context while a request with a span is answered.
struct Current(Arc<Shared>);

impl Traces {
    /// Starts the export of spans. `version` is kubefan's own.
    ///
    /// # Errors
    /// The mistake in the settings.
    pub fn start(
        settings: &TraceSettings,
        version: &'static str,
        metrics: TraceMetrics,
    ) -> Result<(Self, Exporter), TraceError> {
        let (provider, exporter) = export::start(settings, version, metrics)?;
        let tracer = provider.tracer(SCOPE);
        let propagator = TraceContextPropagator::new();
        Ok((Self(Some(Arc::new(Shared { tracer, propagator, _provider: provider }))), exporter))
    }

    /// Whether there are any.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Begins the span of a request. Its headers may name the parent (`traceparent` of W3C Trace
    /// Context).
    pub fn begin(&self, headers: &HeaderMap, name: String, attributes: Vec<KeyValue>) -> RequestSpan {
        let Some(shared) = &self.0 else { return RequestSpan::default() };
        let parent = shared.propagator.extract_with_context(&Context::new(), &Headers(headers));
        let span = shared.tracer.span_builder(name).with_kind(SpanKind::Server).with_attributes(attributes);
        let span = shared.tracer.build_with_context(span, &parent);
        RequestSpan(Some(Box::new(Context::new().with_value(Current(shared.clone())).with_span(span))))
    }
}

/// The span of a request. It ends when it is dropped. Without tracing it is empty.
#[derive(Default)]
pub struct RequestSpan(Option<Box<Context>>);

impl RequestSpan {
    /// Whether there is one.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Answers the request in its context.
    pub fn follow<F: Future>(&self, answer: F) -> impl Future<Output = F::Output> + use<F> {
        // Without tracing the context is empty, which is how it is outside.
        answer.with_context(self.0.as_deref().cloned().unwrap_or_default())
    }

    /// Sets an attribute of the request's span.
    pub fn note(&self, key: &'static str, value: impl Into<Value>) {
        if let Some(context) = &self.0 {
            context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// The request has failed because of kubefan or the apiserver.
    pub fn failed(&self, reason: impl Into<Cow<'static, str>>) {
        if let Some(context) = &self.0 {
            context.span().set_status(Status::error(reason));
        }
    }

    /// Ends the span because its stream starts. From now on this is the span of the stream.
    pub fn streams(&mut self) {
        let Some(context) = &mut self.0 else { return };
        let span = context.get::<Current>().map(|Current(shared)| shared.tracer.start_with_context("stream", context));
        context.span().end();
        if let Some(span) = span {
            **context = context.with_span(span);
        }
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        if let Some(context) = &self.0 {
            context.span().end();
        }
    }
}

/// Sets an attribute of the span of this task's request.
pub fn note(key: &'static str, value: impl Into<Value>) {
    Context::map_current(|context| {
        if context.get::<Current>().is_some() {
            context.span().set_attribute(KeyValue::new(key, value));
        }
    });
}

/// Begins a span for a wait of this task's request.
pub fn wait(name: &'static str) -> Wait {
    wait_as(SpanKind::Internal, name)
}

/// Begins a span for a wait of this task's request for another server.
pub fn wait_for_server(name: &'static str) -> Wait {
    wait_as(SpanKind::Client, name)
}

fn wait_as(kind: SpanKind, name: &'static str) -> Wait {
    Wait(Context::map_current(|context| {
        let Current(shared) = context.get::<Current>()?;
        let span = shared.tracer.span_builder(name).with_kind(kind);
        Some(Box::new(context.with_span(shared.tracer.build_with_context(span, context))))
    }))
}

/// The span of a wait. It ends when it is dropped.
#[must_use = "the wait ends when this is dropped"]
pub struct Wait(Option<Box<Context>>);

impl Wait {
    /// Sets an attribute of the wait's span.
    pub fn note(&self, key: &'static str, value: impl Into<Value>) {
        if let Some(context) = &self.0 {
            context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// Names this span as the parent of a request to another server, instead of the caller's.
    pub fn put_into(&self, headers: &mut HeaderMap) {
        if let Some(context) = &self.0
            && let Some(Current(shared)) = context.get::<Current>()
        {
            shared.propagator.inject_context(context, &mut HeadersMut(headers));
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(context) = &self.0 {
            context.span().end();
        }
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let value = self.0.get(key)?.to_str().ok()?;
        (key != "tracestate" || value.len() <= TRACESTATE_BYTES_MAX).then_some(value)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct HeadersMut<'a>(&'a mut HeaderMap);

impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        // No header rather than an empty one; the header already here belongs to another parent.
        if value.is_empty() {
            self.0.remove(key);
            return;
        }
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_tracestate_is_ignored_and_an_empty_one_is_not_sent() {
        let mut headers = HeaderMap::new();
        headers.insert("tracestate", "a".repeat(TRACESTATE_BYTES_MAX).parse().unwrap());
        assert!(Headers(&headers).get("tracestate").is_some());
        headers.insert("tracestate", "a".repeat(TRACESTATE_BYTES_MAX + 1).parse().unwrap());
        assert!(Headers(&headers).get("tracestate").is_none());
        HeadersMut(&mut headers).set("tracestate", String::new());
        HeadersMut(&mut headers).set("traceparent", "b".to_owned());
        assert_eq!(headers.len(), 1);
        assert_eq!(headers["traceparent"], "b");
    }
}
