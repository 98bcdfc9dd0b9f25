//! The export of spans: a queue of limited length, and one task that sends batches over OTLP.

use std::{collections::HashMap, fmt, path::PathBuf, time::Duration};

use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{Protocol as OtlpProtocol, SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{Sampler, SdkTracerProvider, Span, SpanData, SpanExporter as _, SpanProcessor},
};
use reqwest::redirect::Policy;
use tokio::{
    sync::mpsc::{Receiver, Sender, channel},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{metadata::MetadataMap, transport::ClientTlsConfig};

use crate::metrics::TraceMetrics;

/// The most spans that wait to be exported.
const SPANS_MAX: usize = 4096;
/// The most spans of one request to the collector.
const BATCH_SPANS_MAX: usize = 512;
/// Time for which spans are collected for one request.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time of a request to the collector.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for the last spans at the end.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The path that OTLP over HTTP has for traces.
const HTTP_PATH: &str = "/v1/traces";

/// Protocol of the export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
pub enum Protocol {
    /// OTLP over gRPC.
    #[serde(rename = "grpc")]
    Grpc,
    /// OTLP over HTTP, in protobuf.
    #[serde(rename = "http/protobuf")]
    #[value(name = "http/protobuf")]
    HttpProtobuf,
}

kubefan_common::display_choice!(Protocol);

/// Settings of the export of spans.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceSettings {
    /// The URL of the collector, `http` or `https`.
    pub endpoint: String,
    /// Whether the URL is of a variable that is set for all programs. Then traces are off if it
    /// cannot be used, and kubefan serves without them.
    pub is_foreign: bool,
    /// The protocol.
    pub protocol: Protocol,
    /// A file with headers of each request, one a line: `name: value`. They may be secret.
    pub headers_file: Option<PathBuf>,
    /// The part of traces that begin here, from 0 to 1; `None` if the environment says it
    /// (`OTEL_TRACES_SAMPLER`), or all.
    pub sampling_ratio: Option<f64>,
}

/// The reason why no spans can be exported.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file with headers cannot be used.
    #[error("tuning.otlpHeadersFile {path}: {problem}", path = path.display())]
    Headers {
        /// The file.
        path: PathBuf,
        /// The problem. It quotes nothing of the file.
        problem: String,
    },
    /// The collector's address cannot be used.
    #[error("--otlp-endpoint {endpoint}: {problem}")]
    Endpoint {
        /// The URL, without the user and the password that it may have.
        endpoint: String,
        /// The problem.
        problem: String,
    },
}

/// The task that exports.
pub struct Exporter {
    task: JoinHandle<()>,
    closing: CancellationToken,
}

impl Exporter {
    /// Exports the queued spans, and stops.
    pub async fn finish(self) {
        self.closing.cancel();
        if timeout(FLUSH_TIMEOUT, self.task).await.is_err() {
            tracing::warn!("the last spans were not exported in time");
        }
    }
}

pub(super) fn start(
    settings: &TraceSettings,
    version: &'static str,
    metrics: TraceMetrics,
) -> Result<(SdkTracerProvider, Exporter), TraceError> {
    // The environment (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`) wins over the name.
    let named = std::env::var_os("OTEL_SERVICE_NAME").is_some()
        || std::env::var("OTEL_RESOURCE_ATTRIBUTES").is_ok_and(|text| text.contains("service.name="));
    let resource = Resource::builder().with_attribute(KeyValue::new("service.version", version));
    let resource = if named { resource } else { resource.with_service_name("kubefan") }.build();
    let mut exporter = exporter(settings)?;
    exporter.set_resource(&resource);
    let (spans, queued) = channel(SPANS_MAX);
    let closing = CancellationToken::new();
    let task = tokio::spawn(run(queued, exporter, closing.clone(), metrics.clone()));
    let provider = SdkTracerProvider::builder().with_resource(resource).with_span_processor(Queue { spans, metrics });
    let provider = match settings.sampling_ratio {
        Some(ratio) => provider.with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio)))),
        None => provider,
    };
    Ok((provider.build(), Exporter { task, closing }))
}

/// Returns a URL, or a text that should have been one, without its user and password. They may have
/// characters that would end them in a URL.
fn without_credentials(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, _)| url.split_at(scheme.len() + 3));
    let shown = rest.rfind('@').map_or(rest, |at| &rest[at + 1..]);
    format!("{scheme}{shown}")
}

fn exporter(settings: &TraceSettings) -> Result<SpanExporter, TraceError> {
    let TraceSettings { endpoint, protocol, headers_file, .. } = settings;
    let headers = headers_file.as_ref().map(read_headers).transpose()?.unwrap_or_default();
    let unusable = |problem: &dyn fmt::Display| TraceError::Endpoint {
        endpoint: without_credentials(endpoint),
        problem: problem.to_string(),
    };
    let url = reqwest::Url::parse(endpoint).map_err(|error| unusable(&error))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(unusable(&"it must begin with http:// or https://"));
    }
    let exporter = match protocol {
        Protocol::Grpc => {
            let tonic = SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT_TIMEOUT);
            let tonic = tonic.with_metadata(MetadataMap::from_headers(headers));
            match url.scheme() {
                "https" => tonic.with_tls_config(ClientTlsConfig::new().with_native_roots()).build(),
                _ => tonic.build(),
            }
        }
        Protocol::HttpProtobuf => {
            // The headers may be secret: they go to the collector that was named, and nowhere else.
            let client = reqwest::Client::builder().timeout(EXPORT_TIMEOUT).redirect(Policy::none()).no_proxy();
            let client = client.build().map_err(|error| unusable(&error))?;
            let text = |value: &http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
            let headers: HashMap<_, _> =
                headers.iter().map(|(name, value)| (name.as_str().to_owned(), text(value))).collect();
            let endpoint = match url.path() {
                "/" => format!("{}{HTTP_PATH}", endpoint.trim_end_matches('/')),
                _ => endpoint.clone(),
            };
            let http = SpanExporter::builder().with_http().with_endpoint(endpoint).with_timeout(EXPORT_TIMEOUT);
            // Otherwise the environment could choose JSON.
            let http = http.with_protocol(OtlpProtocol::HttpBinary);
            http.with_http_client(client).with_headers(headers).build()
        }
    };
    exporter.map_err(|error| unusable(&error))
}

fn read_headers(path: &PathBuf) -> Result<http::HeaderMap, TraceError> {
    let unusable = |problem: String| TraceError::Headers { path: path.clone(), problem };
    let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
    let mut headers = http::HeaderMap::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let header = line.split_once(':').and_then(|(name, value)| {
            let mut value = http::HeaderValue::try_from(value.trim()).ok()?;
            value.set_sensitive(true);
            Some((http::HeaderName::try_from(name.trim()).ok()?, value))
        });
        let (name, value) = header.ok_or_else(|| unusable(format!("line {number} is no header (name: value)")))?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Takes the spans that have ended.
#[derive(Debug)]
struct Queue {
    spans: Sender<SpanData>,
    metrics: TraceMetrics,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.spans.try_send(span).is_err() {
            self.metrics.dropped.inc();
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Exports batches until `closing`, and then the rest of the queue.
async fn run(mut spans: Receiver<SpanData>, exporter: SpanExporter, closing: CancellationToken, metrics: TraceMetrics) {
    let mut is_failing = false;
    loop {
        // Here, because the end may come while a batch is exported.
        if closing.is_cancelled() {
            spans.close();
        }
        let mut batch = Vec::new();
        tokio::select! {
            count = spans.recv_many(&mut batch, BATCH_SPANS_MAX) => if count == 0 { return },
            () = closing.cancelled(), if !closing.is_cancelled() => continue,
        }
        if batch.len() < BATCH_SPANS_MAX && !closing.is_cancelled() {
            tokio::select! {
                () = sleep(BATCH_INTERVAL) => {}
                () = closing.cancelled() => {}
            }
            while batch.len() < BATCH_SPANS_MAX
                && let Ok(span) = spans.try_recv()
            {
                batch.push(span);
            }
        }
        let count = batch.len() as u64;
        // Its own requests to the collector are no spans.
        let exported = timeout(EXPORT_TIMEOUT, exporter.export(batch)).await;
        match exported {
            Ok(Ok(())) => {
                metrics.exported.inc_by(count);
                if std::mem::take(&mut is_failing) {
                    tracing::info!("spans are exported again");
                }
            }
            failed => {
                metrics.failed.inc_by(count);
                if !std::mem::replace(&mut is_failing, true) {
                    let error =
                        failed.map_or_else(|_| "no answer in time".to_owned(), |result| format!("{:?}", result.err()));
                    tracing::warn!(error, "spans cannot be exported; the next failures are only counted");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_in_the_collectors_url_are_not_shown() {
        for (url, shown) in [
            ("grpc://user:p@ss@collector:4317", "grpc://collector:4317"),
            ("http://user:pa/s?s#@collector:4317", "http://collector:4317"),
            ("user:pass@collector:port/a", "collector:port/a"),
            ("http://collector:4318/a?c", "http://collector:4318/a?c"),
        ] {
            assert_eq!(without_credentials(url), shown);
        }
    }
}
