//! A simulated kube-apiserver: LIST, WATCH, GET and simple writes over HTTP, in this process, with
//! fault injection.
//!
//! All that it implements behaves like Kubernetes 1.35, down to the bytes of events, lists and
//! Status objects. Pods are also served as protobuf. It leaves out: other encodings (YAML, CBOR)
//! and Tables; admission, defaulting and managed fields; finalizers and graceful deletion; and
//! authorization. Reviews of callers know every token, and allow everything. A strategic merge
//! patch is applied as a JSON merge patch.

mod accept;
mod discovery;
mod faults;
mod http;
mod list;
mod object;
mod options;
mod protobuf;
mod resource;
mod respond;
mod review;
mod server;
mod stats;
mod status;
mod store;
mod watch;
mod write;

use std::{
    future::Future,
    io,
    sync::{Arc, Mutex, PoisonError},
};

use ::http::Request;
use bytes::Bytes;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    task::JoinSet,
};

use self::{faults::Faults, server::Inner, store::Store, write::Part};
pub use self::{
    faults::{Fault, FaultRule, Verb},
    resource::{SelectableField, SimResource, VersionForm},
    server::SimOptions,
    stats::SimStats,
    status::{Cause, Details, Status},
};
use kubefan_common::sync::watch::Sender;
use kubefan_model::{GroupVersionResource, ObjectKey};

/// All objects at one resource version. Cheap: it shares memory with the server.
#[derive(Clone)]
pub struct Backup(store::Backup);

/// A simulated kube-apiserver. Clones share one server.
#[derive(Clone)]
pub struct SimApiserver {
    inner: Arc<Inner>,
}

impl SimApiserver {
    /// Returns a server with the built-in resources (pods, nodes, namespaces, services, configmaps,
    /// deployments, custom resource definitions) and the four namespaces of every cluster.
    pub fn new(options: SimOptions) -> Self {
        let inner = Inner {
            store: Arc::new(Store::new(options.window_events_max)),
            held: Sender::new(None),
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

    /// Serves HTTP/1.1 and cleartext HTTP/2 until `shutdown` resolves, and then drops all
    /// connections.
    ///
    /// # Errors
    /// Returns the error if the listener fails to accept.
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
            // Without TCP_NODELAY the socket is slower but still works.
            let _ = stream.set_nodelay(true);
            connections.spawn(self.clone().serve_connection(stream));
        }
        connections.shutdown().await;
        Ok(())
    }

    /// Serves one connection until either side closes it. In-memory connections work too, so that
    /// tests can run on simulated time.
    pub fn serve_connection(
        self,
        connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> impl Future<Output = ()> + Send {
        let inner = self.inner;
        let dropped = inner.connection_token();
        async move {
            let sends_date = inner.options.date;
            let service = service_fn(move |request: Request<Incoming>| http::handle(inner.clone(), request));
            let mut server = auto::Builder::new(TokioExecutor::new());
            server.http1().auto_date_header(sends_date);
            server.http2().auto_date_header(sends_date);
            let connection = server.serve_connection(TokioIo::new(connection), service);
            tokio::select! {
                biased;
                // Polled first: a dropped connection must send nothing more.
                () = dropped.cancelled() => {}
                // An error ends only this connection.
                _ = connection => {}
            }
        }
    }

    fn collection(&self, gvr: &GroupVersionResource) -> Result<Arc<store::Collection>, Status> {
        self.inner.store.collection(gvr).ok_or_else(Status::no_such_resource)
    }

    /// Stores a new object and returns its resource version. Fills in the uid, creation time and
    /// generation if they are missing.
    ///
    /// # Errors
    /// 404 for an unknown resource or namespace, 409 if the name exists already, 422 for an invalid
    /// name.
    pub fn create(&self, gvr: &GroupVersionResource, object: Value) -> Result<u64, Status> {
        Ok(self.inner.create(&*self.collection(gvr)?, object)?.version)
    }

    /// Replaces an object including its status, and returns its resource version. The version stays
    /// the same if nothing changed. If the given object has a `resourceVersion`, it must be the
    /// current one.
    ///
    /// # Errors
    /// 404 if the object does not exist, 409 if the resource version or uid differs.
    pub fn update(&self, gvr: &GroupVersionResource, object: Value) -> Result<u64, Status> {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
        let key = ObjectKey::new(text("namespace"), text("name"));
        Ok(self.inner.update(&*self.collection(gvr)?, &key, Part::All, |_| Ok(object))?.version)
    }

    /// Makes all writes at one resource version, as a transaction of etcd does: objects that expire
    /// with one lease are deleted so. They must be of different objects, and no other task may
    /// write meanwhile.
    pub fn at_one_version<T>(&self, writes: impl FnOnce() -> T) -> T {
        self.inner.store.in_one_revision(writes)
    }

    /// Deletes an object and returns the resource version of the deletion.
    ///
    /// # Errors
    /// 404 if the object does not exist.
    pub fn delete(&self, gvr: &GroupVersionResource, namespace: &str, name: &str) -> Result<u64, Status> {
        self.inner.delete(&*self.collection(gvr)?, &ObjectKey::new(namespace, name))?;
        Ok(self.revision())
    }

    /// The JSON of an object as a watch sends it. `None` if it does not exist.
    pub fn object(&self, gvr: &GroupVersionResource, namespace: &str, name: &str) -> Option<Bytes> {
        let object = self.inner.store.collection(gvr)?.get(&ObjectKey::new(namespace, name))?;
        Some(object.bytes().clone())
    }

    /// The resource version of the last write to any resource.
    pub fn revision(&self) -> u64 {
        self.inner.store.revision()
    }

    /// Starts to serve another resource.
    pub fn add_resource(&self, resource: SimResource) {
        self.inner.store.add(resource);
    }

    /// Stops serving a resource: deletes its objects, ends its watches, and answers its paths with
    /// 404.
    pub fn remove_resource(&self, gvr: &GroupVersionResource) {
        self.inner.store.remove(gvr);
    }

    /// Simulates a schema change: rewrites the bytes of all objects of a resource without new
    /// resource versions, and changes the resource's OpenAPI hash.
    ///
    /// # Errors
    /// 404 for an unknown resource.
    pub fn change_schema(&self, gvr: &GroupVersionResource, rewrite: impl Fn(&mut Value)) -> Result<(), Status> {
        self.inner.store.rewrite(&*self.collection(gvr)?, rewrite);
        Ok(())
    }

    /// Adds a fault rule for the next matching requests.
    pub fn set_fault(&self, rule: FaultRule) {
        self.inner.faults.add(rule);
    }

    /// Removes all fault rules.
    pub fn clear_faults(&self) {
        self.inner.faults.clear();
    }

    /// Drops all history: from now on older versions are answered with 410. Watches that are up to
    /// date continue.
    pub fn compact(&self) {
        self.inner.store.compact();
    }

    /// Simulates etcd's periodic compaction: older states can no longer be listed, but the watch
    /// cache still has their events.
    pub fn compact_etcd(&self) {
        self.inner.store.compact_states();
    }

    /// Closes every connection at once, even in the middle of a response.
    pub fn drop_connections(&self) {
        let mut connections = self.inner.connections.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *connections).cancel();
    }

    /// Simulates a restart of the apiserver: connections drop, and all earlier versions are too old
    /// to watch from.
    pub fn restart(&self) {
        self.compact();
        self.drop_connections();
    }

    /// Returns the current state of all resources, for [`Self::restore`].
    pub fn backup(&self) -> Backup {
        Backup(self.inner.store.backup())
    }

    /// Simulates restoring etcd from a backup. The resource version goes back, so later writes
    /// reuse version numbers. Connections drop, and versions before the restored one cannot be
    /// watched from. The set of served resources does not change.
    pub fn restore(&self, backup: &Backup) {
        self.inner.store.restore(&backup.0);
        self.drop_connections();
    }

    /// Another apiserver of the same cluster: it has the same etcd, and faults, counters and
    /// connections of its own. `seed` is that of its jitter.
    pub fn sibling(&self, seed: u64) -> Self {
        let inner = Inner {
            store: self.inner.store.clone(),
            held: Sender::new(None),
            faults: Faults::default(),
            counters: Arc::default(),
            random: Mutex::new(Pcg64Mcg::seed_from_u64(seed)),
            connections: Mutex::default(),
            options: self.inner.options.clone(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// From now on the watch caches of this apiserver get no events, until [`Self::catch_up`]. Its
    /// watches and its lists of any state show nothing newer; its consistent lists read etcd.
    pub fn lag(&self) {
        self.inner.held.send_replace(Some(self.revision()));
    }

    /// The watch caches get all events since [`Self::lag`].
    pub fn catch_up(&self) {
        self.inner.held.send_replace(None);
    }

    /// The counters.
    pub fn stats(&self) -> SimStats {
        self.inner.counters.snapshot()
    }
}
