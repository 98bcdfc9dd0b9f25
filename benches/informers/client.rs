//! A measured client. It does each step when the driver writes a line to its stdin, and answers
//! with a line, so that the driver can read its CPU time and memory in between:
//!
//! | the driver writes | the client answers |
//! |---|---|
//! | | `ready`, after its start |
//! | `start` | `synced`, with the number of objects |
//! | `until VERSION` | `current`, with the number of events, once it has this version |
//!
//! It ends with its stdin.

use std::{
    fmt::Debug,
    future::pending,
    hash::Hash,
    io::Write,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube_client::{
    Api, Client, Config, Resource, ResourceExt,
    core::{ApiResource, DynamicObject},
};
use kube_runtime::{WatchStreamExt, reflector::store::Writer, watcher};
use kubefan_client::{
    ClientOptions, Connection, Decode, Encoding, HandlerFuncs, InformerBuilder, ListWatch, Parts, Projection, RawJson,
    SharedInformer,
    http::{HttpClient, HttpClientOptions},
};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};

use crate::{
    Failure,
    kinds::Kind,
    types::{PROJECTED_PATHS, ProjectedPod, SmallPod},
};

const WAIT_MAX: Duration = Duration::from_secs(120);

/// Runs a client until its stdin ends. `apiserver` and `kubefan` are URLs.
pub(crate) async fn run(kind: Kind, apiserver: &str, kubefan: &str) -> Result<(), Failure> {
    let http = async |url: &str| -> Result<ListWatch, Failure> {
        let client = HttpClient::new(url, &HttpClientOptions::default()).await?;
        Ok(ListWatch::new(client, "pods", "", ""))
    };
    let grpc = async |encoding| -> Result<ListWatch, Failure> {
        let client = kubefan_client::Client::connect_lazy(kubefan, &ClientOptions::default()).await?;
        Ok(ListWatch::new(Connection::from(client), "pods", "", "").encoding(encoding))
    };
    let fields =
        Projection { parts: Parts::Fields(PROJECTED_PATHS.map(str::to_owned).into()), ..Projection::default() };
    match kind {
        Kind::KubeTyped => kube_rs::<Pod>(apiserver, (), watcher::Config::default()).await,
        Kind::KubeTypedStreaming => kube_rs::<Pod>(apiserver, (), watcher::Config::default().streaming_lists()).await,
        Kind::KubeSmall => kube_rs::<SmallPod>(apiserver, (), watcher::Config::default()).await,
        Kind::KubeDynamic => {
            kube_rs::<DynamicObject>(apiserver, ApiResource::erase::<Pod>(&()), watcher::Config::default()).await
        }
        Kind::GrpcTyped => library::<Pod>(grpc(Encoding::Json).await?).await,
        Kind::GrpcCompactTyped => inform::<Pod>(grpc(Encoding::Json).await?, InformerBuilder::compact).await,
        Kind::DirectCompactTyped => inform::<Pod>(http(apiserver).await?, InformerBuilder::compact).await,
        Kind::GrpcZstdTyped => library::<Pod>(grpc(Encoding::Zstd).await?).await,
        Kind::GrpcDeltaTyped => library::<Pod>(grpc(Encoding::ZstdDelta).await?).await,
        Kind::HttpTyped => library::<Pod>(http(kubefan).await?).await,
        Kind::DirectTyped => library::<Pod>(http(apiserver).await?).await,
        Kind::GrpcSmall => library::<SmallPod>(grpc(Encoding::Json).await?).await,
        Kind::GrpcZstdSmall => library::<SmallPod>(grpc(Encoding::Zstd).await?).await,
        Kind::HttpSmall => library::<SmallPod>(http(kubefan).await?).await,
        Kind::DirectSmall => library::<SmallPod>(http(apiserver).await?).await,
        Kind::GrpcRaw => library::<RawJson>(grpc(Encoding::Json).await?).await,
        Kind::GrpcZstdRaw => library::<RawJson>(grpc(Encoding::Zstd).await?).await,
        Kind::GrpcDeltaRaw => library::<RawJson>(grpc(Encoding::ZstdDelta).await?).await,
        Kind::HttpRaw => library::<RawJson>(http(kubefan).await?).await,
        Kind::DirectRaw => library::<RawJson>(http(apiserver).await?).await,
        Kind::GrpcProjected => library::<ProjectedPod>(grpc(Encoding::Json).await?.projection(fields)).await,
        Kind::GrpcZstdProjected => library::<ProjectedPod>(grpc(Encoding::Zstd).await?.projection(fields)).await,
        Kind::GoTyped => Err("client-go's informer is a program of its own".into()),
    }
}

/// An informer of this library with its default options.
async fn library<K: Decode>(source: ListWatch) -> Result<(), Failure> {
    inform::<K>(source, |builder| builder).await
}

/// An informer of this library with one handler.
async fn inform<K: Decode>(
    source: ListWatch,
    options: fn(InformerBuilder<K>) -> InformerBuilder<K>,
) -> Result<(), Failure> {
    let informer = options(SharedInformer::builder(source)).build();
    informer.on_error(|error| eprintln!("{error}"));
    let events = Arc::new(AtomicU64::new(0));
    let count = || {
        let events = events.clone();
        move || _ = events.fetch_add(1, Relaxed)
    };
    let added = count();
    let updated = count();
    let deleted = count();
    let handler =
        HandlerFuncs::new().on_add(move |_, _| added()).on_update(move |_, _| updated()).on_delete(move |_| deleted());
    let registration = informer.add_event_handler(handler)?;
    let mut driver = Driver::ready()?;
    driver.expect("start").await?;
    let running = informer.clone();
    tokio::spawn(async move { running.run(pending::<()>()).await });
    registration.synced().await?;
    let initial = events.load(Relaxed);
    driver.answer(&format!("synced {}", informer.indexer().len()))?;
    let version = driver.expect("until ").await?;
    informer.wait_until(&version, WAIT_MAX).await?;
    driver.answer(&format!("current {}", events.load(Relaxed) - initial))?;
    driver.end().await
}

/// kube-rs' reflector, with one consumer of its events.
async fn kube_rs<K>(apiserver: &str, dynamic: K::DynamicType, config: watcher::Config) -> Result<(), Failure>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Clone + Debug + Eq + Hash,
{
    let client = Client::try_from(Config::new(apiserver.parse()?))?;
    let api: Api<K> = Api::all_with(client, &dynamic);
    let writer = Writer::<K>::new(dynamic);
    let store = writer.as_reader();
    let mut driver = Driver::ready()?;
    driver.expect("start").await?;
    // The events so far, and the last version.
    let (progress, mut seen) = watch::channel((0_u64, 0_u64));
    tokio::spawn(async move {
        let mut events = pin!(watcher::watcher(api, config).default_backoff().reflect(writer));
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Apply(object) | watcher::Event::Delete(object)) => progress.send_modify(|state| {
                    let version = object.resource_version().and_then(|version| version.parse().ok());
                    *state = (state.0 + 1, version.unwrap_or_default());
                }),
                Ok(_) => {}
                Err(error) => eprintln!("{error}"),
            }
        }
    });
    store.wait_until_ready().await?;
    driver.answer(&format!("synced {}", store.len()))?;
    let version: u64 = driver.expect("until ").await?.parse()?;
    let events = tokio::time::timeout(WAIT_MAX, seen.wait_for(|(_, last)| *last >= version)).await??.0;
    driver.answer(&format!("current {events}"))?;
    driver.end().await
}

/// The driver's orders.
struct Driver(mpsc::Receiver<String>);

impl Driver {
    fn ready() -> Result<Self, Failure> {
        let (sender, orders) = mpsc::channel(1);
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                if sender.blocking_send(line).is_err() {
                    return;
                }
            }
        });
        let mut driver = Self(orders);
        driver.answer("ready")?;
        Ok(driver)
    }

    /// Waits for a line with this start. Returns the rest.
    async fn expect(&mut self, start: &str) -> Result<String, Failure> {
        let line = self.0.recv().await.ok_or("the driver has ended")?;
        Ok(line.strip_prefix(start).ok_or_else(|| format!("expected {start:?}, got {line:?}"))?.to_owned())
    }

    fn answer(&mut self, line: &str) -> Result<(), Failure> {
        writeln!(std::io::stdout(), "{line}")?;
        Ok(())
    }

    async fn end(mut self) -> Result<(), Failure> {
        while self.0.recv().await.is_some() {}
        Ok(())
    }
}
