//! A controller: two informers, a work queue and two workers. It reports how many pods each node
//! runs.
//!
//! cargo run --example controller
//!
//! Reads from kubefan on 127.0.0.1:7443, such as `cargo run -- demo --duration 0`.
//!
//! The handlers only queue the name of a node. A worker then reads the current state from the
//! stores, so any number of changes of one node are one reconciliation, and none is lost if one
//! fails.
use std::{error::Error, process::ExitCode, sync::Arc, time::Duration};

use kubefan_client::{
    Client, ClientOptions, Deleted, EventHandler, Indexer, Lister, Object, SharedInformerFactory, WorkQueue,
};
use serde::Deserialize;
use tokio::{
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    task::JoinSet,
    time::timeout,
};

const WORKERS: usize = 2;
/// A node that still fails after this many retries waits for its next change.
const RETRIES_MAX: u32 = 10;
/// The limit of the drain at the end.
const DRAIN_MAX: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct Pod {
    spec: PodSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    /// Empty before the pod is scheduled.
    #[serde(default)]
    node_name: String,
}

#[derive(Deserialize)]
struct Node {
    #[serde(default)]
    spec: NodeSpec,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NodeSpec {
    unschedulable: bool,
}

/// Queues the nodes that a change of an object concerns.
struct QueueNodes<F> {
    queue: WorkQueue<String>,
    node_of: F,
}

impl<K, F> EventHandler<K> for QueueNodes<F>
where
    K: Send + Sync + 'static,
    F: Fn(&Object<K>) -> String + Send + 'static,
{
    async fn on_add(&mut self, object: Arc<Object<K>>, _is_in_initial_list: bool) {
        self.queue.add((self.node_of)(&object));
    }

    async fn on_update(&mut self, old: Arc<Object<K>>, new: Arc<Object<K>>) {
        self.queue.add((self.node_of)(&old));
        self.queue.add((self.node_of)(&new));
    }

    async fn on_delete(&mut self, deleted: Deleted<K>) {
        // Also if the deletion itself was missed: the last known state names the node.
        if let Some(object) = deleted.last_known() {
            self.queue.add((self.node_of)(object));
        }
    }
}

#[derive(Clone)]
struct Controller {
    pods: Indexer<Pod>,
    nodes: Lister<Node>,
    queue: WorkQueue<String>,
}

impl Controller {
    async fn work(self) {
        while let Some(node) = self.queue.get().await {
            match self.reconcile(&node) {
                Ok(()) => self.queue.forget(&node),
                Err(error) if self.queue.num_requeues(&node) < RETRIES_MAX => {
                    eprintln!("retrying {:?}: {error}", *node);
                    self.queue.add_rate_limited(node.clone());
                }
                Err(error) => {
                    eprintln!("giving {:?} up: {error}", *node);
                    self.queue.forget(&node);
                }
            }
        }
    }

    /// Must be right however often it runs, and for any kind of change.
    fn reconcile(&self, name: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
        if name.is_empty() {
            return Ok(()); // pods that are not scheduled
        }
        let pods = self.pods.index_keys("node", name)?.len();
        match self.nodes.get(name) {
            Some(node) if node.spec.unschedulable => println!("{name}: {pods} pods, cordoned"),
            Some(_) => println!("{name}: {pods} pods"),
            None if pods == 0 => println!("{name}: gone"),
            // The two informers are independent: a pod may arrive before its node.
            None => return Err(format!("{pods} pods run on an unknown node").into()),
        }
        Ok(())
    }
}

async fn run(address: &str) -> Result<(), Box<dyn Error>> {
    let kubefan = Client::connect(address, &ClientOptions::default()).await?;
    let factory = SharedInformerFactory::new(kubefan).tweak_list_options(|list_watch| list_watch.drop_managed_fields());
    let pods = factory.informer::<Pod>("pods");
    let nodes = factory.informer::<Node>("nodes");
    pods.indexer().add_index("node", |pod| vec![pod.spec.node_name.clone()])?;
    pods.on_error(|error| eprintln!("pods: {error}"));
    nodes.on_error(|error| eprintln!("nodes: {error}"));

    let queue = WorkQueue::new();
    let node_of = |pod: &Object<Pod>| pod.spec.node_name.clone();
    pods.add_event_handler(QueueNodes { queue: queue.clone(), node_of })?;
    let node_of = |node: &Object<Node>| node.name().to_owned();
    nodes.add_event_handler(QueueNodes { queue: queue.clone(), node_of })?;

    factory.start()?;
    // Kubernetes stops a container with SIGTERM.
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async {
        tokio::select! {
            _ = ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    };
    tokio::pin!(stop);
    tokio::select! {
        synced = factory.wait_for_cache_sync() => synced?,
        () = &mut stop => return Ok(()),
    }
    // Only now: a worker that starts before would count pods that have not arrived as missing.
    let controller = Controller { pods: pods.indexer().clone(), nodes: nodes.lister(), queue: queue.clone() };
    let mut workers = JoinSet::new();
    for _ in 0..WORKERS {
        workers.spawn(controller.clone().work());
    }
    println!("{} pods on {} nodes", controller.pods.len(), controller.nodes.list().len());

    stop.await;
    // First the source of the keys, then the queue, which finishes its items.
    factory.shutdown().await;
    if timeout(DRAIN_MAX, queue.shut_down_with_drain()).await.is_err() {
        eprintln!("stopped with {} nodes in the queue", queue.len());
    }
    println!("stopped");
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:7443".to_owned());
    if let Err(error) = run(&address).await {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
