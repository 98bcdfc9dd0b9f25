//! Informers of all pods over each protocol, and their stores in a form that can be compared.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use kubefan_client::{
    Backlog, Client, ClientOptions, Encoding, HandlerOptions, ListWatch, Object, ReflectorError, Registration,
    SharedInformer, TransformError,
    http::{HttpClient, HttpClientOptions},
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::calls::{Call, Reporter};
use crate::harness::{apiserver::ApiServer, wait};

/// The content of a store: version and canonical JSON by key.
pub(super) type Content = BTreeMap<String, (String, String)>;

/// A running informer. Dropping it stops the informer.
pub(super) struct Watched {
    pub(super) name: &'static str,
    pub(super) informer: SharedInformer<Value>,
    registration: Registration,
    /// The number of errors of connections, which outages cause, and the last one.
    connection_errors: Arc<Mutex<(usize, String)>>,
    /// All other errors.
    failures: Arc<Mutex<Vec<String>>>,
    running: JoinHandle<()>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// The same pods over kubefan's gRPC, over the same with a projection and compression, over
/// kubefan's HTTP, and straight from the apiserver. kubefan's certificate is of the apiserver's CA.
pub(super) async fn sources(api: &ApiServer, kubefan: SocketAddr) -> [(&'static str, ListWatch); 4] {
    let kubefan = format!("https://{kubefan}");
    let options = ClientOptions { ca_file: Some(api.ca_pem_path()), ..ClientOptions::default() };
    let grpc = || async { ListWatch::new(Client::connect(&kubefan, &options).await.unwrap(), "pods", "", "") };
    let http = |address: String| async move {
        let options = HttpClientOptions {
            ca_file: Some(api.ca_pem_path()),
            token: Some(api.admin_token()),
            ..HttpClientOptions::default()
        };
        ListWatch::new(HttpClient::new(&address, &options).await.unwrap(), "pods", "", "")
    };
    [
        ("gRPC", grpc().await),
        ("gRPC, projected and compressed", grpc().await.drop_managed_fields().encoding(Encoding::Zstd)),
        ("HTTP through kubefan", http(kubefan.clone()).await),
        ("HTTP straight", http(api.url().to_owned()).await),
    ]
}

impl Watched {
    /// Starts an informer whose handler passes each call to `report`, without a limit.
    pub(super) fn start(name: &'static str, source: ListWatch, report: impl FnMut(Call) + Send + 'static) -> Watched {
        let informer = SharedInformer::builder(source).transform(without_managed_fields).build();
        let connection_errors = Arc::new(Mutex::new((0, String::new())));
        let failures = Arc::new(Mutex::new(Vec::new()));
        let counted = connection_errors.clone();
        let kept = failures.clone();
        informer.on_error(move |error| match error {
            ReflectorError::Client(error) => {
                let mut errors = counted.lock().unwrap();
                *errors = (errors.0 + 1, error.to_string());
            }
            other => kept.lock().unwrap().push(other.to_string()),
        });
        let options = HandlerOptions { backlog: Backlog::Unbounded, ..HandlerOptions::default() };
        let registration = informer.add_event_handler_with_options(Reporter(report), options).unwrap();
        let running = tokio::spawn({
            let informer = informer.clone();
            async move { informer.run(std::future::pending::<()>()).await.unwrap() }
        });
        Watched { name, informer, registration, connection_errors, failures, running }
    }

    /// Waits until the handler has the initial objects.
    pub(super) async fn synced(&self) {
        let synced = tokio::time::timeout(wait::SOON * 4, self.registration.synced()).await;
        let errors = || self.connection_errors.lock().unwrap().clone();
        synced.unwrap_or_else(|_| panic!("{} does not sync: {:?}", self.name, errors())).unwrap();
    }

    /// The number of errors of connections so far. Panics if there was any other error.
    pub(super) fn connection_errors(&self) -> usize {
        assert_eq!(*self.failures.lock().unwrap(), Vec::<String>::new(), "{}", self.name);
        self.connection_errors.lock().unwrap().0
    }

    /// The content of the store.
    pub(super) fn content(&self) -> Content {
        let snapshot = self.informer.indexer().snapshot();
        let entries = snapshot.iter().map(|object| {
            let content = (object.resource_version().to_owned(), canonical(object.value().clone()));
            (object.key().as_str().to_owned(), content)
        });
        entries.collect()
    }
}

/// The transform of the informers.
fn without_managed_fields(object: Object<Value>) -> Result<Object<Value>, TransformError> {
    Ok(object.map(|mut value| {
        if let Some(metadata) = value["metadata"].as_object_mut() {
            metadata.remove("managedFields");
        }
        value
    }))
}

/// The content of a list of pods, or of client-go's store.
pub(super) fn content_of(pods: Vec<Value>) -> Content {
    let entries = pods.into_iter().map(|mut pod| {
        // The apiserver leaves these two out of a list's items.
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
        (format!("{}/{}", text("namespace"), text("name")), (text("resourceVersion"), canonical(pod)))
    });
    entries.collect()
}

/// The object as JSON with sorted keys, without the fields that a projection leaves out.
fn canonical(mut object: Value) -> String {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
        metadata.remove("resourceVersion");
    }
    object.to_string()
}

/// Fails with the first object that differs.
#[track_caller]
pub(super) fn assert_same(what: &str, expected: &Content, found: &Content) {
    for key in expected.keys().chain(found.keys()) {
        assert_eq!(found.get(key), expected.get(key), "{what}: {key}");
    }
}
