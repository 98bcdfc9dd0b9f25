//! A simulated kube-apiserver: LIST, WATCH, GET and simple writes over HTTP, in the process, with faults on demand.
//!
//! It behaves as Kubernetes 1.35 does where clients can tell, down to the bytes of events, lists and Status objects. It differs in
//! what it leaves out: only JSON (no protobuf, YAML, CBOR, Table), no admission, defaulting or managed fields, no finalizers
//! and no grace on deletion, no authorization, and a strategic merge patch is merged as JSON.

mod discovery;
mod faults;
mod http;
mod list;
mod object;
mod options;
mod resource;
mod respond;
mod stats;
mod status;
mod store;
mod watch;
mod write;

use std::{
    future::Future,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ::http::Request;
use bytes::Bytes;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use self::{faults::Faults, stats::Counters, store::Store, write::Part};
pub use self::{
    faults::{Fault, FaultRule, Verb},
    resource::{SelectableField, SimResource},
    stats::SimStats,
    status::{Cause, Details, Status},
};
use kubefan_model::{GroupVersionResource, ObjectKey};

/// How the simulated apiserver behaves.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// Whether `sendInitialEvents` is known. Servers before 1.32 answer it with 422.
    pub watch_list: bool,
    /// Whether watches are compressed for clients that take gzip, one member per event, as Kubernetes 1.37 does.
    pub gzip_watches: bool,
    /// How many events per resource are held: what watches, exact lists and continued lists can go back to. At least 1.
    pub window_events_max: usize,
    /// How long between two bookmarks.
    pub bookmark_interval: Duration,
    /// How long a read waits for a version from the future.
    pub freshness_wait: Duration,
    /// A watch without `timeoutSeconds` ends after one to two times this.
    pub request_timeout_min: Duration,
    /// Only requests with this token are answered.
    pub bearer_token: Option<String>,
    /// What `/version` says.
    pub git_version: String,
    /// Decides uids, generated names and jitter.
    pub seed: u64,
    /// The time written into `creationTimestamp` where an object has none.
    pub clock: fn() -> String,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            watch_list: true,
            gzip_watches: false,
            window_events_max: 10_000,
            bookmark_interval: Duration::from_secs(60),
            freshness_wait: Duration::from_secs(3),
            request_timeout_min: Duration::from_secs(1800),
            bearer_token: None,
            git_version: "v1.35.4".to_owned(),
            seed: 0,
            clock: wall_clock,
        }
    }
}

/// All objects at one version. Costs little: it shares what the server holds.
#[derive(Clone)]
pub struct Backup(store::Backup);

/// A simulated kube-apiserver. Clones are handles to the same one.
#[derive(Clone)]
pub struct SimApiserver {
    inner: Arc<Inner>,
}

struct Inner {
    options: SimOptions,
    store: Store,
    faults: Faults,
    counters: Arc<Counters>,
    random: Mutex<Pcg64Mcg>,
    /// Cancelled to drop the connections of now; those that come after get another.
    connections: Mutex<CancellationToken>,
}

impl Inner {
    /// A number in [0, 1).
    fn random(&self) -> f64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).random()
    }

    fn uid(&self) -> String {
        let bits: u128 = self.random.lock().unwrap_or_else(PoisonError::into_inner).random();
        let hex = format!("{bits:032x}");
        format!("{}-{}-4{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
    }

    fn connection_token(&self) -> CancellationToken {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).child_token()
    }
}

impl SimApiserver {
    /// A server with the built-in resources (pods, nodes, namespaces, services, configmaps, deployments, custom resource
    /// definitions) and the four namespaces every cluster has.
    pub fn new(options: SimOptions) -> Self {
        let inner = Inner {
            store: Store::new(options.window_events_max),
            faults: Faults::default(),
            counters: Arc::default(),
            random: Mutex::new(Pcg64Mcg::seed_from_u64(options.seed)),
            connections: Mutex::default(),
            options,
        };
        for resource in resource::built_in() {
            inner.store.add(resource);
        }
        let sim = Self { inner: Arc::new(inner) };
        let namespaces = GroupVersionResource::new("", "v1", "namespaces");
        for name in ["default", "kube-node-lease", "kube-public", "kube-system"] {
            let namespace = json!({
                "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}},
                "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"},
            });
            sim.create(&namespaces, namespace).expect("the first namespaces are valid and new");
        }
        sim
    }

    /// Serves HTTP/1.1 and cleartext HTTP/2 until `shutdown`; then every connection is dropped.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve(self, listener: TcpListener, shutdown: impl Future<Output = ()>) -> io::Result<()> {
        let mut connections = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            let stream = tokio::select! {
                biased;
                () = &mut shutdown => break,
                Some(_) = connections.join_next(), if !connections.is_empty() => continue,
                accepted = listener.accept() => accepted?.0,
            };
            // Latency is the point; a socket that cannot do it still serves.
            let _ = stream.set_nodelay(true);
            connections.spawn(self.clone().serve_connection(stream));
        }
        connections.shutdown().await;
        Ok(())
    }

    /// Serves one connection until either side closes it: over memory too, so that a test can decide what time it is.
    pub fn serve_connection(
        self,
        connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> impl Future<Output = ()> + Send {
        let inner = self.inner;
        let dropped = inner.connection_token();
        async move {
            let service = service_fn(move |request: Request<Incoming>| http::handle(inner.clone(), request));
            let server = auto::Builder::new(TokioExecutor::new());
            let connection = server.serve_connection(TokioIo::new(connection), service);
            tokio::select! {
                biased;
                // What is dropped sends nothing more.
                () = dropped.cancelled() => {}
                // However it ends, it ends alone.
                _ = connection => {}
            }
        }
    }

    fn cell(&self, gvr: &GroupVersionResource) -> Result<Arc<store::Cell>, Status> {
        self.inner.store.cell(gvr).ok_or_else(Status::no_such_resource)
    }

    /// Stores a new object and returns its version. Uid, creation time and generation are filled in where missing.
    ///
    /// # Errors
    /// 404 for an unknown resource or namespace, 409 where the name is taken, 422 for a bad name.
    pub fn create(&self, gvr: &GroupVersionResource, object: Value) -> Result<u64, Status> {
        Ok(self.inner.create(&*self.cell(gvr)?, object)?.version)
    }

    /// Writes over an object, status and all, and returns its version: the old one where nothing changed. A `resourceVersion` in
    /// the object must be the current one.
    ///
    /// # Errors
    /// 404 where there is none, 409 for another version or uid.
    pub fn update(&self, gvr: &GroupVersionResource, object: Value) -> Result<u64, Status> {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
        let key = ObjectKey::new(text("namespace"), text("name"));
        Ok(self.inner.update(&*self.cell(gvr)?, &key, Part::All, |_| Ok(object))?.version)
    }

    /// Deletes an object and returns the version of the deletion.
    ///
    /// # Errors
    /// 404 where there is none.
    pub fn delete(&self, gvr: &GroupVersionResource, namespace: &str, name: &str) -> Result<u64, Status> {
        self.inner.delete(&*self.cell(gvr)?, &ObjectKey::new(namespace, name))?;
        Ok(self.revision())
    }

    /// An object as a watch sends it.
    pub fn object(&self, gvr: &GroupVersionResource, namespace: &str, name: &str) -> Option<Bytes> {
        let object = self.inner.store.cell(gvr)?.get(&ObjectKey::new(namespace, name))?;
        Some(object.bytes().clone())
    }

    /// The version of the last write, of any resource.
    pub fn revision(&self) -> u64 {
        self.inner.store.revision()
    }

    /// Serves another resource.
    pub fn add_resource(&self, resource: SimResource) {
        self.inner.store.add(resource);
    }

    /// Serves a resource no longer: its objects are deleted, its watches end, its paths are 404.
    pub fn remove_resource(&self, gvr: &GroupVersionResource) {
        self.inner.store.remove(gvr);
    }

    /// Rewrites the bytes of a resource's objects without new versions, and changes its OpenAPI hash: what a changed schema does.
    ///
    /// # Errors
    /// 404 for an unknown resource.
    pub fn change_schema(&self, gvr: &GroupVersionResource, rewrite: impl Fn(&mut Value)) -> Result<(), Status> {
        self.inner.store.rewrite(&*self.cell(gvr)?, rewrite);
        Ok(())
    }

    /// Makes something go wrong with the next requests.
    pub fn set_fault(&self, rule: FaultRule) {
        self.inner.faults.add(rule);
    }

    /// Takes back all faults that have not happened.
    pub fn clear_faults(&self) {
        self.inner.faults.clear();
    }

    /// Forgets all history: older versions are answered with 410 from here on. Watches that are up to date go on.
    pub fn compact(&self) {
        self.inner.store.compact();
    }

    /// What etcd's compaction does every few minutes: older states can no longer be listed. Its watch cache still has their events.
    pub fn compact_etcd(&self) {
        self.inner.store.compact_states();
    }

    /// Closes every connection in the middle of whatever it does.
    pub fn drop_connections(&self) {
        let mut connections = self.inner.connections.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *connections).cancel();
    }

    /// What a restart of the apiserver does: connections drop, and every version from before is too old to watch from.
    pub fn restart(&self) {
        self.compact();
        self.drop_connections();
    }

    /// Everything as it is now, to be put back later by [`Self::restore`].
    pub fn backup(&self) -> Backup {
        Backup(self.inner.store.backup())
    }

    /// What restoring etcd from a backup does: versions go back, and are given again to other writes; connections drop, and nothing
    /// from before the restore can be watched. Resources stay as they are served now.
    pub fn restore(&self, backup: &Backup) {
        self.inner.store.restore(&backup.0);
        self.drop_connections();
    }

    /// What was done so far.
    pub fn stats(&self) -> SimStats {
        self.inner.counters.snapshot()
    }
}

/// As `creationTimestamp` has it.
#[expect(clippy::disallowed_methods, reason = "the default of an option, which a simulation sets")]
fn wall_clock() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
