//! One informer of all pods, over kubefan or by kube-rs straight, whose memory and CPU time are
//! read from outside by `tests/integration/languages/cost.rs`, which also describes the lines
//! that it reads and writes.

use std::{
    env,
    error::Error,
    io::{BufRead, Write},
    path::Path,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::{StreamExt, future::pending};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube_client::{Api, Client, Config, ResourceExt, config::AuthInfo};
use kube_runtime::{WatchStreamExt, reflector::store::Writer, watcher};
use kubefan_client::{ClientOptions, Connection, Decode, InformerBuilder, ListWatch, SharedInformer};
use serde::Deserialize;
use tokio::sync::watch;

type Failure = Box<dyn Error + Send + Sync>;

const WAIT_AT_MOST: Duration = Duration::from_secs(600);

/// The type to decode into when a program asks for parts of an object.
#[derive(Deserialize)]
struct Parts {
    metadata: ObjectMeta,
    spec: Option<PartsOfSpec>,
    status: Option<PartsOfStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PartsOfSpec {
    node_name: Option<String>,
}

#[derive(Deserialize)]
struct PartsOfStatus {
    phase: Option<String>,
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    // measure MODE ADDRESS CA_FILE TOKEN PATH...
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [mode, address, ca_file, token, paths @ ..] = &arguments[..] else { return Err("too few arguments".into()) };
    answer("ready")?;
    expect("start")?;
    if mode == "straight-json" {
        return straight(address, Path::new(ca_file), token).await;
    }
    let options =
        ClientOptions { ca_file: Some(ca_file.into()), token: Some(token.clone()), ..ClientOptions::default() };
    let client = kubefan_client::Client::connect(address, &options).await?;
    let source = ListWatch::new(Connection::from(client), "pods", "", "");
    match &**mode {
        // kube-rs' reflector stores a clone of each object, too.
        "kubefan-json" => {
            let informer = SharedInformer::builder(source).compact();
            inform(informer, |pod: &Pod| pod.labels().len()).await
        }
        "kubefan-fields" => inform(SharedInformer::builder(source.fields(paths).drop_managed_fields()), labels).await,
        "kubefan-metadata" => {
            inform(SharedInformer::builder(source.metadata_only().drop_managed_fields()), labels).await
        }
        _ => Err(format!("{mode} is no mode").into()),
    }
}

fn labels(pod: &Parts) -> usize {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_ref());
    pod.metadata.labels.iter().len() + node.iter().len() + phase.iter().len()
}

/// An informer of this library. Its handler reads what a program would read.
async fn inform<K: Decode>(informer: InformerBuilder<K>, read: fn(&K) -> usize) -> Result<(), Failure> {
    let informer = informer.build();
    informer.on_error(|error| eprintln!("{error}"));
    let total = Arc::new(AtomicUsize::new(0));
    let added = total.clone();
    let updated = total;
    let handler = informer
        .handler()
        .on_add(move |it, _| _ = added.fetch_add(read(it.value()), Relaxed))
        .on_update(move |_, it| _ = updated.fetch_add(read(it.value()), Relaxed));
    let registration = informer.add_event_handler(handler)?;
    let running = informer.clone();
    tokio::spawn(async move { running.run(pending::<()>()).await });
    registration.synced().await?;
    answer(&format!("synced {}", informer.indexer().len()))?;
    informer.wait_until(&expect("until ")?, WAIT_AT_MOST).await?;
    answer(&format!("current {}", informer.indexer().len()))?;
    expect("settle")?;
    answer("settled")?;
    while expect("").is_ok() {}
    Ok(())
}

/// kube-rs' reflector.
async fn straight(address: &str, ca_file: &Path, token: &str) -> Result<(), Failure> {
    let mut config = Config::new(address.parse()?);
    let pem = std::fs::read(ca_file)?;
    config.root_cert = Some(certificates(&pem)?);
    config.auth_info = AuthInfo { token: Some(token.to_owned().into()), ..AuthInfo::default() };
    let api: Api<Pod> = Api::all(Client::try_from(config)?);
    let writer = Writer::<Pod>::default();
    let store = writer.as_reader();
    let (versions, mut seen) = watch::channel(0_u64);
    let total = AtomicUsize::new(0);
    tokio::spawn(async move {
        let mut events = pin!(watcher::watcher(api, watcher::Config::default()).default_backoff().reflect(writer));
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                    total.fetch_add(pod.labels().len(), Relaxed);
                    let version = pod.resource_version().and_then(|version| version.parse::<u64>().ok());
                    versions.send_if_modified(|last| {
                        let is_later = version.is_some_and(|version| version > *last);
                        *last = version.unwrap_or_default().max(*last);
                        is_later
                    });
                }
                Ok(_) => {}
                Err(error) => eprintln!("{error}"),
            }
        }
    });
    store.wait_until_ready().await?;
    answer(&format!("synced {}", store.len()))?;
    let version: u64 = expect("until ")?.parse()?;
    tokio::time::timeout(WAIT_AT_MOST, seen.wait_for(|last| *last >= version)).await??;
    answer(&format!("current {}", store.len()))?;
    expect("settle")?;
    answer("settled")?;
    while expect("").is_ok() {}
    Ok(())
}

/// The certificates of a PEM file, as DER.
fn certificates(pem: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    CertificateDer::pem_slice_iter(pem).map(|it| Ok(it?.to_vec())).collect()
}

/// Reads a line with this start, and returns the rest. The tasks run on other threads meanwhile.
fn expect(start: &str) -> Result<String, Failure> {
    let mut line = String::new();
    tokio::task::block_in_place(|| std::io::stdin().lock().read_line(&mut line))?;
    let rest = line.strip_suffix('\n').and_then(|line| line.strip_prefix(start));
    Ok(rest.ok_or_else(|| format!("expected {start:?}, got {line:?}"))?.to_owned())
}

fn answer(line: &str) -> Result<(), Failure> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}
