//! The services of the admin port: readiness, metrics, a status page, the rights of a user, and the
//! list of connected subscribers. It ends the stream of a subscriber. It never shows an object, and
//! sends no request upstream but those that a review needs. The port itself answers about liveness.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Path, Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{delete, get},
};
use kubefan_access::NonResource;
use kubefan_fanout::Catalog;
use kubefan_telemetry::last_hour::History;
use prometheus::{Encoder, Registry, TextEncoder};
use serde::Serialize;

use super::{
    admin_access::{AdminAccess, Refused, refused},
    can_i::CanI,
    client_info::ClientInfo,
    status_report::{Readiness, Sources, Status},
    subscribers::{ListOptions, Subscribers},
};

const PAGE: NonResource = NonResource::get("/");
const METRICS: NonResource = NonResource::get("/metrics");
const CAN_I: NonResource = NonResource::get("/can-i");
const STATUS: NonResource = NonResource::get("/status");
const SUBSCRIBERS: NonResource = NonResource::get("/subscribers");
/// The path in rules. No rule could name one subscriber: an id is as old as its stream.
const SUBSCRIBER: NonResource = NonResource::delete("/subscribers/*");

/// Sources that a browser may load for the status page.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The parts that the admin port serves from.
pub struct Admin {
    /// Access to the port's answers.
    pub access: AdminAccess,
    /// The caches.
    pub catalog: Arc<dyn Catalog>,
    /// The watches of the data port.
    pub subscribers: Arc<Subscribers>,
    /// The metrics.
    pub registry: Registry,
    /// The last hour.
    pub history: Arc<History>,
    /// Updates the gauges before they are read.
    pub refresh: Box<dyn Fn() + Send + Sync>,
    /// Returns the readiness.
    pub readiness: Box<dyn Fn() -> Readiness + Send + Sync>,
}

/// The routes of the admin port, without those about liveness.
pub fn router(admin: Admin) -> Router {
    Router::new()
        .route(PAGE.path(), get(page))
        .route("/readyz", get(readyz))
        .route(METRICS.path(), get(metrics))
        .route(CAN_I.path(), get(can_i))
        .route("/status.js", get(script))
        .route("/status.css", get(style))
        .route(STATUS.path(), get(status))
        .route(SUBSCRIBERS.path(), get(subscribers))
        .route("/subscribers/{id}", delete(disconnect))
        .with_state(Arc::new(admin))
}

/// Like the apiserver's: `ok`, or a line per resource if one is not ready or if `?verbose` is set.
async fn readyz(State(admin): State<Arc<Admin>>, request: Request) -> Response {
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
    let mut text: String = if admin.access.shows_details(PAGE, &request).await {
        lines.iter().map(|(ok, line)| format!("[{}]{line}\n", if *ok { '+' } else { '-' })).collect()
    } else {
        let failed = lines.iter().filter(|(ok, _)| !ok).count();
        format!(
            "{failed} of {} checks fail; send the token of a caller that may get the path / to see them\n",
            lines.len()
        )
    };
    text += if ready { "readyz check passed\n" } else { "readyz check failed\n" };
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text).into_response()
}

/// Explains what a user may read, and why: see [`CanI`].
async fn can_i(State(admin): State<Arc<Admin>>, request: Request) -> Result<Response, Refused> {
    let (request, _) = request.into_parts();
    admin.access.details(CAN_I, &request).await?;
    let CanI { user, read } = CanI::of_query(request.uri.query().unwrap_or_default()).map_err(bad_request)?;
    read.check_names().map_err(|refusal| bad_request(refusal.to_string()))?;
    let target = read.target();
    let full_name = admin.catalog.full_name(&target.group, &target.version, &target.resource).await;
    let read = match full_name {
        Some(gvr) => read.of_resource(gvr),
        None => read,
    };
    let holder = request.extensions.get::<ClientInfo>().cloned().unwrap_or_default().holder();
    let explained = admin.access.control().explain(user, &read, holder).await.map_err(refused)?;
    Ok(json(&explained))
}

/// Lists the connected subscribers: see [`ListOptions`].
async fn subscribers(State(admin): State<Arc<Admin>>, request: Request) -> Result<Response, Refused> {
    let request = request.map(drop);
    admin.access.callers(SUBSCRIBERS, &request).await?;
    let options = ListOptions::of_query(request.uri().query().unwrap_or_default()).map_err(bad_request)?;
    Ok(json(&admin.subscribers.list(options).await))
}

/// Ends one watch.
async fn disconnect(
    State(admin): State<Arc<Admin>>,
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

async fn metrics(State(admin): State<Arc<Admin>>, request: Request) -> Result<Response, Refused> {
    admin.access.metrics(METRICS, &request.into_parts().0).await?;
    (admin.refresh)();
    let mut text = Vec::new();
    Ok(match TextEncoder::new().encode(&admin.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    })
}

/// The status page, which asks for [`Status`] itself. It contains nothing about this kubefan.
async fn page(State(admin): State<Arc<Admin>>, request: Request) -> Result<Response, Refused> {
    admin.access.details(PAGE, &request.into_parts().0).await?;
    Ok(asset("text/html; charset=utf-8", include_str!("status_page/index.html")))
}

async fn script() -> Response {
    asset("text/javascript; charset=utf-8", include_str!("status_page/status.js"))
}

async fn style() -> Response {
    asset("text/css; charset=utf-8", include_str!("status_page/status.css"))
}

/// A file of the status page. A browser runs nothing on the page but its own script.
fn asset(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

/// The state as JSON: see [`Status`].
async fn status(State(admin): State<Arc<Admin>>, request: Request) -> Result<Response, Refused> {
    let request = request.map(drop);
    admin.access.callers(STATUS, &request).await?;
    let with_histories = match request.uri().query().unwrap_or_default() {
        "" => false,
        "histories=true" => true,
        other => return Err(bad_request(format!("{other:.64?} is no parameter of this path"))),
    };
    (admin.refresh)();
    Ok(json(&Status::of(Sources {
        families: &admin.registry.gather(),
        caches: admin.catalog.list(),
        readiness: (admin.readiness)(),
        history: &admin.history,
        with_histories,
    })))
}
