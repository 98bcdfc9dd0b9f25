//! What the admin port answers: readiness, metrics, a status page, what a user may read, and who is
//! connected. It ends the stream of a subscriber. It never shows an object, and sends no request
//! upstream but those that a review needs. The port itself answers about liveness.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Path, Request, State},
    http::{StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{delete, get},
};
use prometheus::{Encoder, Registry, TextEncoder};
use serde::Serialize;

use super::{
    admin_access::{AdminAccess, Refused, refused},
    can_i::CanI,
    client_info::ClientInfo,
    select::check_names,
    subscribers::{ListOptions, Subscribers},
};
use crate::{access::NonResource, fanout::Catalog};
use kubefan_common::proto::v1alpha1::{ResourceState, ResourceStatus};
use kubefan_model::Media;

/// The overall readiness, and the readiness of each resource with a line of text.
pub type Readiness = (bool, Vec<(bool, String)>);

const PAGE: NonResource = NonResource::get("/");
const METRICS: NonResource = NonResource::get("/metrics");
const CAN_I: NonResource = NonResource::get("/can-i");
const SUBSCRIBERS: NonResource = NonResource::get("/subscribers");
/// As rules name it. No rule could name one subscriber: an id is as old as its stream.
const SUBSCRIBER: NonResource = NonResource::delete("/subscribers/*");

/// What the admin port serves from.
pub struct Admin<C> {
    /// Who sees what.
    pub access: AdminAccess,
    /// The caches.
    pub catalog: C,
    /// The watches of the data port.
    pub subscribers: Arc<Subscribers>,
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
        .route(PAGE.path(), get(page::<C>))
        .route("/readyz", get(readyz::<C>))
        .route(METRICS.path(), get(metrics::<C>))
        .route(CAN_I.path(), get(can_i::<C>))
        .route(SUBSCRIBERS.path(), get(subscribers::<C>))
        .route("/subscribers/{id}", delete(disconnect::<C>))
        .with_state(Arc::new(admin))
}

/// Like the apiserver's: `ok`, or a line per resource if one is not ready or if `?verbose` is set.
async fn readyz<C: Catalog>(State(admin): State<Arc<Admin<C>>>, request: Request) -> Response {
    let (ready, lines) = (admin.readiness)();
    let (request, _) = request.into_parts();
    let verbose = request
        .uri
        .query()
        .is_some_and(|query| query.split('&').any(|pair| pair == "verbose" || pair.starts_with("verbose=")));
    if ready && !verbose {
        return "ok".into_response();
    }
    // Not by the right to /readyz, which every user has (ClusterRole system:public-info-viewer).
    let mut text: String = match admin.access.shows_details(PAGE, &request).await {
        true => lines.iter().map(|(ok, line)| format!("[{}]{line}\n", if *ok { '+' } else { '-' })).collect(),
        false => {
            let failed = lines.iter().filter(|(ok, _)| !ok).count();
            format!("{failed} of {} checks fail; callers that may get the path / see which\n", lines.len())
        }
    };
    text += if ready { "readyz check passed\n" } else { "readyz check failed\n" };
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text).into_response()
}

/// What a user may read, and why: see [`CanI`].
async fn can_i<C: Catalog>(State(admin): State<Arc<Admin<C>>>, request: Request) -> Result<Response, Refused> {
    let (request, _) = request.into_parts();
    admin.access.details(CAN_I, &request).await?;
    let CanI { user, read } = CanI::of_query(request.uri.query().unwrap_or_default()).map_err(bad_request)?;
    let target = read.target();
    check_names(target).map_err(|refusal| bad_request(refusal.to_string()))?;
    let full_name = admin.catalog.full_name(&target.group, &target.version, &target.resource).await;
    let read = match full_name {
        Some(gvr) => read.of_resource(gvr),
        None => read,
    };
    let holder = request.extensions.get::<ClientInfo>().cloned().unwrap_or_default().holder();
    let explained = admin.access.control().explain(user, &read, holder).await.map_err(refused)?;
    Ok(json(&explained))
}

/// Who is connected: see [`ListOptions`].
async fn subscribers<C: Catalog>(State(admin): State<Arc<Admin<C>>>, request: Request) -> Result<Response, Refused> {
    let request = request.map(drop);
    admin.access.callers(SUBSCRIBERS, &request).await?;
    let options = ListOptions::of_query(request.uri().query().unwrap_or_default()).map_err(bad_request)?;
    Ok(json(&admin.subscribers.list(options).await))
}

/// Ends one watch.
async fn disconnect<C: Catalog>(
    State(admin): State<Arc<Admin<C>>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Refused> {
    admin.access.changes(SUBSCRIBER, &request.map(drop)).await?;
    if !admin.subscribers.disconnect(&id) {
        let text = format!("there is no subscriber {id:.64?} here: it has ended, or another replica serves it\n");
        return Err((StatusCode::NOT_FOUND, text));
    }
    tracing::info!(id, "an operator disconnected a subscriber");
    Ok(json(&serde_json::json!({ "id": id })))
}

fn bad_request(problem: String) -> Refused {
    (StatusCode::BAD_REQUEST, format!("{problem}\n"))
}

fn json(answer: &impl Serialize) -> Response {
    let text = serde_json::to_vec(answer).unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

async fn metrics<C: Catalog>(State(admin): State<Arc<Admin<C>>>, request: Request) -> Result<Response, Refused> {
    admin.access.metrics(METRICS, &request.into_parts().0).await?;
    (admin.refresh)();
    let mut text = Vec::new();
    Ok(match TextEncoder::new().encode(&admin.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    })
}

async fn page<C: Catalog>(State(admin): State<Arc<Admin<C>>>, request: Request) -> Result<Html<String>, Refused> {
    admin.access.details(PAGE, &request.into_parts().0).await?;
    let rows: String = admin.catalog.list().iter().map(row).collect();
    Ok(Html(format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5><title>kubefan</title>\
         <style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#222}}table{{border-collapse:collapse}}\
         td,th{{padding:.3rem .9rem;text-align:left;border-bottom:1px solid #ddd}}td.n{{text-align:right;font-variant-numeric:tabular-nums}}\
         .ok{{color:#0a7d32}}.bad{{color:#b3261e}}</style>\
         <h1>kubefan {}</h1><table><tr><th>Resource<th>Namespace<th>Encoding<th>State<th>Objects<th>Bytes<th>Version<th>Oldest\
         <th>Subscribers<th>Message</tr>{rows}</table>\
         <p><a href=/metrics>metrics</a> · <a href=\"/readyz?verbose\">readyz</a> · <a href=/livez>livez</a></p></html>",
        env!("CARGO_PKG_VERSION")
    )))
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
