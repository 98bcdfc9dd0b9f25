//! What the admin port answers: readiness, metrics, and a status page. It never shows an object and
//! never sends a request upstream. The port itself answers about liveness.

use std::sync::Arc;

use axum::{
    Router,
    extract::{RawQuery, State},
    http::{StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use prometheus::{Encoder, Registry, TextEncoder};

use crate::fanout::Catalog;
use kubefan_common::proto::v1alpha1::{ResourceState, ResourceStatus};
use kubefan_model::Media;

/// The overall readiness, and the readiness of each resource with a line of text.
pub type Readiness = (bool, Vec<(bool, String)>);

/// What the admin port serves from.
pub struct Admin<C> {
    /// The caches.
    pub catalog: C,
    /// The metrics.
    pub registry: Registry,
    /// Updates the gauges before they are read.
    pub refresh: Box<dyn Fn() + Send + Sync>,
    /// Returns the readiness.
    pub readiness: Box<dyn Fn() -> Readiness + Send + Sync>,
}

/// The routes of the admin port, without those about liveness.
pub fn router<C: Catalog>(admin: Admin<C>) -> Router {
    Router::new()
        .route("/", get(page::<C>))
        .route("/readyz", get(readyz::<C>))
        .route("/metrics", get(metrics::<C>))
        .with_state(Arc::new(admin))
}

/// Like the apiserver's: `ok`, or a line per resource if one is not ready or if `?verbose` is set.
async fn readyz<C: Catalog>(State(admin): State<Arc<Admin<C>>>, RawQuery(query): RawQuery) -> Response {
    let (ready, lines) = (admin.readiness)();
    let verbose =
        query.is_some_and(|query| query.split('&').any(|pair| pair == "verbose" || pair.starts_with("verbose=")));
    if ready && !verbose {
        return "ok".into_response();
    }
    let mut text: String =
        lines.iter().map(|(ok, line)| format!("[{}]{line}\n", if *ok { '+' } else { '-' })).collect();
    text += if ready { "readyz check passed\n" } else { "readyz check failed\n" };
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text).into_response()
}

async fn metrics<C: Catalog>(State(admin): State<Arc<Admin<C>>>) -> Response {
    (admin.refresh)();
    let mut text = Vec::new();
    match TextEncoder::new().encode(&admin.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn page<C: Catalog>(State(admin): State<Arc<Admin<C>>>) -> Html<String> {
    let rows: String = admin.catalog.list().iter().map(row).collect();
    Html(format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5><title>kubefan</title>\
         <style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#222}}table{{border-collapse:collapse}}\
         td,th{{padding:.3rem .9rem;text-align:left;border-bottom:1px solid #ddd}}td.n{{text-align:right;font-variant-numeric:tabular-nums}}\
         .ok{{color:#0a7d32}}.bad{{color:#b3261e}}</style>\
         <h1>kubefan {}</h1><table><tr><th>Resource<th>Namespace<th>Encoding<th>State<th>Objects<th>Bytes<th>Version<th>Oldest\
         <th>Subscribers<th>Message</tr>{rows}</table>\
         <p><a href=/metrics>metrics</a> · <a href=\"/readyz?verbose\">readyz</a> · <a href=/livez>livez</a></p></html>",
        env!("CARGO_PKG_VERSION")
    ))
}

fn row((media, resource): &(Media, ResourceStatus)) -> String {
    let state = resource.state();
    let class = if matches!(state, ResourceState::Synced) { "ok" } else { "bad" };
    let state = state.as_str_name().trim_start_matches("RESOURCE_STATE_").to_lowercase().replace('_', " ");
    let namespace = if resource.namespace.is_empty() { "(all)" } else { &resource.namespace };
    format!(
        "<tr><td>{}<td>{}<td>{}<td class={class}>{state}<td class=n>{}<td class=n>{}<td class=n>{}<td class=n>{}<td class=n>{}<td>{}</tr>",
        escape(&resource.name),
        escape(namespace),
        media.as_str(),
        resource.object_count,
        resource.object_bytes,
        resource.resource_version,
        resource.oldest_resource_version,
        resource.subscribers,
        escape(&resource.message),
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
