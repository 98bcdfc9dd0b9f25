//! Lists and watches one resource of a Kubernetes API over HTTP, with the parameters that
//! client-go's reflector sends.
//!
//! The options of the protocol are documented at
//! <https://kubernetes.io/docs/reference/using-api/api-concepts/>.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::BoxFuture;
use rand::rngs::SmallRng;
use tokio::time::{Instant, timeout_at};

use super::{
    built_in,
    cut::{self, Cuts},
    discovery::{self, ResourcePath},
    endpoint::{HttpClient, ReadLimits},
    lines::Lines,
    metadata::{Page, raw_object, read_page},
    watch_events,
};
use crate::{
    budget::FallbackBudget,
    error::{ApiStatus, ClientError},
    grpc::{Parts, Projection},
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvents},
    random::{generator, watch_timeout},
    version::whole,
};
use kubefan_common::{api_json::check_next_page, query::encode_query, text::without_value};

const JSON: &str = "application/json";
/// Servers that do not know the first type answer with whole objects, as client-go's metadata
/// client allows them to.
const METADATA: &str = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io,application/json";
const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json";
/// The time that a server gets to end a watch after its timeout.
const TIMEOUT_GRACE: Duration = Duration::from_secs(30);

/// One year: tokio's clock cannot represent every time.
const WATCH_TIMEOUT_MAX_SECONDS: u64 = 365 * 24 * 3600;

/// The resource to list and watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HttpResource {
    /// A name as kubectl takes it: `pods`, `po`, `deployments.apps`, `widgets.v1.example.com`. The
    /// first request looks it up in the server's discovery documents, except for the plural names
    /// of built-in resources.
    Named(String),
    /// A path, without discovery.
    Path {
        /// `api/v1`, or `apis/` with a group and a version: `apis/apps/v1`.
        api: String,
        /// The plural name: `deployments`.
        resource: String,
    },
}

impl From<&str> for HttpResource {
    fn from(name: &str) -> Self {
        Self::Named(name.to_owned())
    }
}

/// Selection of the objects to list and watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpListWatchOptions {
    /// The namespace. Empty for all, and for resources that are not in namespaces.
    pub namespace: String,
    /// Kubernetes' label selector, such as `app=web,tier!=cache`. Empty selects everything.
    pub label_selector: String,
    /// Kubernetes' field selector, such as `spec.nodeName=node-1`. Empty selects everything.
    pub field_selector: String,
    /// The parts of each object. [`Parts::Metadata`] asks the server for PartialObjectMetadata. The
    /// parts to drop are cut out after they arrived. [`Parts::Fields`] needs kubefan's gRPC API.
    pub projection: Projection,
    /// Longest event of a watch, in bytes. Default: 64 MiB.
    pub event_bytes_max: usize,
    /// Longest page of a list, in bytes. Default: 512 MiB.
    pub page_bytes_max: usize,
    /// Limit for a page of a list. Default: 2 minutes; kube-apiserver's own limit is 1 minute.
    pub list_timeout: Duration,
    /// Seed of the random watch timeouts, for simulations. `None` for a random one.
    pub seed: Option<u64>,
}

impl Default for HttpListWatchOptions {
    fn default() -> Self {
        Self {
            namespace: String::new(),
            label_selector: String::new(),
            field_selector: String::new(),
            projection: Projection::default(),
            event_bytes_max: 64 << 20,
            page_bytes_max: 512 << 20,
            list_timeout: Duration::from_secs(120),
            seed: None,
        }
    }
}

/// Lists and watches one resource over HTTP.
#[derive(Debug)]
pub struct HttpListWatch {
    client: HttpClient,
    resource: HttpResource,
    options: HttpListWatchOptions,
    /// The result of discovery, until the server no longer knows it.
    resolved: Mutex<Option<Arc<ResourcePath>>>,
    random: Mutex<SmallRng>,
}

impl HttpListWatch {
    /// Returns a lister and watcher. No request is sent yet.
    ///
    /// # Errors
    /// [`ClientError::Api`] with code 400 if the namespace or the path is invalid, or the
    /// projection names fields.
    pub fn new(
        client: HttpClient,
        resource: impl Into<HttpResource>,
        options: HttpListWatchOptions,
    ) -> Result<Self, ClientError> {
        let resource = resource.into();
        if matches!(options.projection.parts, Parts::Fields(_)) {
            return Err(bad_request(
                "a projection to fields needs kubefan's gRPC API; over HTTP there are only full objects and metadata",
            ));
        }
        if !options.namespace.is_empty() && !is_path_segment(&options.namespace) {
            return Err(bad_request(&format!("{:?} is not a namespace", options.namespace)));
        }
        if let HttpResource::Path { api, resource } = &resource {
            let segments = || api.split('/').chain([resource.as_str()]);
            let is_api = api.starts_with("api/") && segments().count() == 3
                || api.starts_with("apis/") && segments().count() == 4;
            if !is_api || !segments().all(is_path_segment) {
                let message =
                    format!("{api:?} with {resource:?} is not a resource; write it like apis/apps/v1 with deployments");
                return Err(bad_request(&message));
            }
        }
        let random = Mutex::new(generator(options.seed));
        Ok(Self { client, resource, options, resolved: Mutex::default(), random })
    }

    fn limits(&self) -> ReadLimits {
        ReadLimits { timeout: self.options.list_timeout, bytes_max: self.options.page_bytes_max }
    }

    /// The path of the collection.
    async fn collection(&self) -> Result<String, ClientError> {
        let path = match &self.resource {
            HttpResource::Path { api, resource } => {
                Arc::new(ResourcePath { api: api.clone(), resource: resource.clone(), namespaced: None })
            }
            HttpResource::Named(name) => {
                let resolved = self.resolved.lock().unwrap_or_else(PoisonError::into_inner).clone();
                match resolved {
                    Some(path) => path,
                    None => {
                        let path = match built_in::path(name) {
                            Some(path) => path,
                            None => discovery::resolve(&self.client, self.limits(), name).await?,
                        };
                        let path = Arc::new(path);
                        *self.resolved.lock().unwrap_or_else(PoisonError::into_inner) = Some(path.clone());
                        path
                    }
                }
            }
        };
        let ResourcePath { api, resource, namespaced } = &*path;
        let namespace = &self.options.namespace;
        if namespace.is_empty() {
            return Ok(format!("/{api}/{resource}"));
        }
        if *namespaced == Some(false) {
            return Err(bad_request(&format!("{resource} are not in namespaces; leave the namespace empty")));
        }
        Ok(format!("/{api}/namespaces/{namespace}/{resource}"))
    }

    /// Forgets the result of discovery if the server does not know the path: the resource's version
    /// may no longer be served.
    fn check_path<T>(&self, result: Result<T, ClientError>) -> Result<T, ClientError> {
        if let Err(ClientError::Api(status)) = &result
            && status.code == 404
        {
            *self.resolved.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        result
    }

    /// A path with the selectors and these parameters. Parameters without a value are left out.
    fn with_query(&self, path: &str, parameters: &[(&str, &str)]) -> String {
        let HttpListWatchOptions { label_selector, field_selector, .. } = &self.options;
        let selectors = [("labelSelector", label_selector.as_str()), ("fieldSelector", field_selector.as_str())];
        path.to_owned() + &encode_query(selectors.iter().chain(parameters).copied())
    }

    fn cuts(&self) -> Cuts {
        let Projection { drop_managed_fields, drop_last_applied, .. } = self.options.projection;
        Cuts { managed_fields: drop_managed_fields, last_applied: drop_last_applied }
    }

    async fn list_page(&self, options: ListOptions) -> Result<ListPage, ClientError> {
        let ListOptions { resource_version, limit, continue_token, .. } = options;
        let limit = if limit == 0 { String::new() } else { limit.to_string() };
        let path = self.collection().await?;
        // The token contains the version; kube-apiserver refuses both together.
        let version = if continue_token.is_empty() { whole(&resource_version) } else { "" };
        let parameters = [("limit", limit.as_str()), ("continue", &continue_token), ("resourceVersion", version)];
        let accept = if self.options.projection.parts == Parts::Metadata { METADATA_LIST } else { JSON };
        let body = self.client.read(self.with_query(&path, &parameters), accept, self.limits()).await;
        let body = self.check_path(body)?;
        let protocol = |what: String, error: serde_json::Error| ClientError::HttpProtocol {
            address: self.client.address().to_owned(),
            message: format!("{what}: {}", without_value(&error)),
        };
        let Page { resource_version, continue_token: next, items } =
            read_page(&body).map_err(|error| protocol(format!("the list at {path}"), error))?;
        check_next_page(&next, &continue_token).map_err(|error| ClientError::HttpProtocol {
            address: self.client.address().to_owned(),
            message: format!("the list at {path}: {error}"),
        })?;
        let cuts = self.cuts();
        let object = |(index, item)| {
            raw_object(cut::apply(item, cuts))
                .map_err(|error| protocol(format!("item {index} of the list at {path}"), error))
        };
        let objects = items.into_iter().enumerate().map(object).collect::<Result<_, _>>()?;
        Ok(ListPage { resource_version, objects, continue_token: next })
    }

    async fn start_watch(&self, options: ListOptions) -> Result<WatchEvents, ClientError> {
        let ListOptions { resource_version, send_initial_events, timeout, .. } = options;
        let seconds = match timeout {
            // 0 would be the server's default, half an hour and more.
            Some(timeout) => timeout
                .as_secs()
                .saturating_add(u64::from(timeout.subsec_nanos() > 0))
                .clamp(1, WATCH_TIMEOUT_MAX_SECONDS),
            None => watch_timeout(&mut self.random.lock().unwrap_or_else(PoisonError::into_inner)).as_secs(),
        };
        let path = self.collection().await?;
        let seconds_text = seconds.to_string();
        let mut parameters = vec![
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", whole(&resource_version)),
            ("timeoutSeconds", seconds_text.as_str()),
        ];
        if send_initial_events {
            parameters.extend([("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")]);
        }
        let path = self.with_query(&path, &parameters);
        let accept = if self.options.projection.parts == Parts::Metadata { METADATA } else { JSON };
        let deadline = Instant::now() + Duration::from_secs(seconds) + TIMEOUT_GRACE;
        let address = self.client.address();
        let response = async { self.client.transport().get(path, accept).await?.success(address).await };
        let response = timeout_at(deadline, response).await.unwrap_or_else(|_| {
            let message = "no answer to a watch within its timeout".to_owned();
            Err(ClientError::HttpUnreachable { address: address.to_owned(), message })
        });
        let body = self.check_path(response)?.body;
        let lines = Lines::new(body, self.options.event_bytes_max, deadline, address);
        Ok(watch_events::events(lines, send_initial_events, self.cuts()))
    }
}

impl ListerWatcher for HttpListWatch {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        Box::pin(self.list_page(options))
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        Box::pin(self.start_watch(options))
    }

    fn fallback_budget(&self) -> Option<FallbackBudget> {
        self.client.transport().fallback_budget()
    }

    fn describe(&self) -> String {
        let resource = match &self.resource {
            HttpResource::Named(name) => name,
            HttpResource::Path { resource, .. } => resource,
        };
        format!("{resource} from {}", self.client.address())
    }
}

/// Whether a text can be a segment of a path as it is: without slashes, escapes and dot segments.
fn is_path_segment(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !matches!(text, "" | "." | "..") && text.bytes().all(is_plain)
}

fn bad_request(message: &str) -> ClientError {
    ApiStatus::new(400, "BadRequest", message).into()
}

#[cfg(test)]
mod tests;
