//! The resource and selectors to list and watch, over whichever protocol the connection speaks.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::future::BoxFuture;
use kubefan_common::{encoding::Encoding, proto::v1alpha1::Target};

#[cfg(feature = "http")]
use crate::http::{HttpClient, HttpListWatch, HttpListWatchOptions};
use crate::{
    budget::FallbackBudget,
    error::ClientError,
    grpc::{Client, GrpcListWatch, Parts, Projection, WatchOptions},
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvents},
};

/// A connection to a server that can be listed and watched. Clones share it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Connection {
    /// To the source that a function returns for each target: see [`Connection::custom`].
    Custom(CustomConnection),
    /// To a kubefan, over gRPC.
    Grpc(Client),
    /// To a kube-apiserver, or to a kubefan, over HTTP.
    #[cfg(feature = "http")]
    Http(HttpClient),
}

type MakeSource = dyn Fn(&Target) -> Arc<dyn ListerWatcher> + Send + Sync;

/// A function that returns the [`ListerWatcher`] of a target.
#[derive(Clone)]
pub struct CustomConnection(Arc<MakeSource>);

impl fmt::Debug for CustomConnection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("CustomConnection")
    }
}

impl Connection {
    /// Returns a connection that calls `source` for the [`ListerWatcher`] of each resource, such as
    /// a [`FakeListWatch`](crate::FakeListWatch). So a program that uses a
    /// [`SharedInformerFactory`](crate::SharedInformerFactory) can be tested without a server.
    pub fn custom(source: impl Fn(&Target) -> Arc<dyn ListerWatcher> + Send + Sync + 'static) -> Self {
        Self::Custom(CustomConnection(Arc::new(source)))
    }
}

impl From<Client> for Connection {
    fn from(client: Client) -> Self {
        Self::Grpc(client)
    }
}

#[cfg(feature = "http")]
impl From<HttpClient> for Connection {
    fn from(client: HttpClient) -> Self {
        Self::Http(client)
    }
}

/// Lists and watches one resource: client-go's `ListWatch`. The same program works over kubefan's
/// gRPC, over its HTTP, and straight against an apiserver: only the connection differs.
#[derive(Clone)]
pub struct ListWatch {
    connection: Connection,
    target: Target,
    grpc: WatchOptions,
    #[cfg(feature = "http")]
    http: HttpListWatchOptions,
    /// Made at the first request, from the options above.
    source: OnceLock<Result<Arc<dyn ListerWatcher>, ClientError>>,
}

impl ListWatch {
    /// Returns the equivalent of client-go's `NewListWatchFromClient`. `resource` is any name that
    /// kubectl accepts, such as `pods` or `deployments.apps`. An empty namespace means all of them,
    /// an empty field selector selects everything. Nothing is requested yet: a wrong name or
    /// selector is an error of the first list or watch.
    pub fn new(connection: impl Into<Connection>, resource: &str, namespace: &str, field_selector: &str) -> Self {
        Self {
            connection: connection.into(),
            target: Target {
                resource: resource.to_owned(),
                namespace: namespace.to_owned(),
                field_selector: field_selector.to_owned(),
                ..Target::default()
            },
            grpc: WatchOptions::default(),
            #[cfg(feature = "http")]
            http: HttpListWatchOptions::default(),
            source: OnceLock::new(),
        }
    }

    /// Limits the objects by labels, such as `app=web,tier!=db`.
    #[must_use]
    pub fn label_selector(mut self, selector: &str) -> Self {
        selector.clone_into(&mut self.target.label_selector);
        self.changed()
    }

    /// Limits the objects by fields, such as `spec.nodeName=n1`.
    #[must_use]
    pub fn field_selector(mut self, selector: &str) -> Self {
        selector.clone_into(&mut self.target.field_selector);
        self.changed()
    }

    /// The parts of each object to receive. Single fields need gRPC.
    #[must_use]
    pub fn projection(mut self, projection: Projection) -> Self {
        self.grpc.projection = projection.clone();
        #[cfg(feature = "http")]
        {
            self.http.projection = projection;
        }
        self.changed()
    }

    /// Leaves `metadata.managedFields` out, often a third of an object. Over gRPC it is not sent,
    /// and neither is `metadata.resourceVersion`: [`Object::resource_version`] has it.
    ///
    /// [`Object::resource_version`]: crate::Object::resource_version
    #[must_use]
    pub fn drop_managed_fields(self) -> Self {
        let projection = Projection { drop_managed_fields: true, ..self.grpc.projection.clone() };
        self.projection(projection)
    }

    /// Receives only these fields of each object, such as `spec.nodeName`, and only changes of
    /// them: see [`Parts::Fields`] for the syntax of paths. Needs gRPC.
    #[must_use]
    pub fn fields<P: Into<String>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.grpc.only_changes = true;
        let parts = Parts::Fields(paths.into_iter().map(Into::into).collect());
        let projection = Projection { parts, ..self.grpc.projection.clone() };
        self.projection(projection)
    }

    /// Receives only the metadata of each object.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        let projection = Projection { parts: Parts::Metadata, ..self.grpc.projection.clone() };
        self.projection(projection)
    }

    /// gRPC: how objects are encoded on the wire. Default: JSON. `Encoding::ZstdDelta` is
    /// experimental. `Encoding::Protobuf` is for [`RawProtobuf`](crate::RawProtobuf): every other
    /// type reads JSON.
    #[must_use]
    pub fn encoding(mut self, encoding: Encoding) -> Self {
        self.grpc.encoding = encoding;
        self.changed()
    }

    /// gRPC: the silence after which kubefan sends a bookmark. Default: 60 s, minimum: 1 s.
    #[must_use]
    pub fn bookmark_interval(mut self, interval: Duration) -> Self {
        self.grpc.bookmark_interval = Some(interval);
        self.changed()
    }

    /// gRPC: changes any other option of the watches.
    #[must_use]
    pub fn tweak_grpc(mut self, tweak: impl FnOnce(&mut WatchOptions)) -> Self {
        tweak(&mut self.grpc);
        self.changed()
    }

    /// HTTP: changes any other option. The namespace and the selectors are set over it.
    #[cfg(feature = "http")]
    #[must_use]
    pub fn tweak_http(mut self, tweak: impl FnOnce(&mut HttpListWatchOptions)) -> Self {
        tweak(&mut self.http);
        self.changed()
    }

    fn changed(mut self) -> Self {
        self.source = OnceLock::new();
        self
    }

    fn source(&self) -> Result<&Arc<dyn ListerWatcher>, ClientError> {
        self.source.get_or_init(|| self.make()).as_ref().map_err(Clone::clone)
    }

    fn make(&self) -> Result<Arc<dyn ListerWatcher>, ClientError> {
        match &self.connection {
            Connection::Custom(source) => Ok((source.0)(&self.target)),
            Connection::Grpc(client) => {
                Ok(Arc::new(GrpcListWatch::new(client.clone(), self.target.clone(), self.grpc.clone())))
            }
            #[cfg(feature = "http")]
            Connection::Http(client) => {
                let options = HttpListWatchOptions {
                    namespace: self.target.namespace.clone(),
                    label_selector: self.target.label_selector.clone(),
                    field_selector: self.target.field_selector.clone(),
                    ..self.http.clone()
                };
                Ok(Arc::new(HttpListWatch::new(client.clone(), self.target.resource.as_str(), options)?))
            }
        }
    }
}

impl ListerWatcher for ListWatch {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        match self.source() {
            Ok(source) => source.list(options),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        match self.source() {
            Ok(source) => source.watch(options),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn supports_watch_list(&self) -> bool {
        self.source().map_or(true, |source| source.supports_watch_list())
    }

    fn watch_reconnects(&self) -> bool {
        self.source().is_ok_and(|source| source.watch_reconnects())
    }

    fn fallback_budget(&self) -> Option<FallbackBudget> {
        self.source().ok()?.fallback_budget()
    }

    fn describe(&self) -> String {
        self.source().map_or_else(|_| self.target.resource.clone(), |source| source.describe())
    }
}

impl fmt::Debug for ListWatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ListWatch").field("target", &self.target).finish_non_exhaustive()
    }
}
