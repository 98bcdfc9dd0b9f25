//! Writes a workload's changes in parallel, while the apiserver may be restarted. The changes of
//! one object stay in order.

use std::{
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    time::Duration,
};

use kubefan_sim::workload::{Change, Operation, Workload, WorkloadOptions};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::interval,
};

use super::{apiserver::ApiServer, load};

/// Number of parallel writers. A single writer would be limited by the duration of a request.
const WRITERS: usize = 12;
/// Changes that wait for a writer.
const WAITING_MAX: usize = 16;
/// One of this many updates becomes a deletion and a new pod under the same name.
const RECREATED: usize = 15;

/// Running writers.
pub(crate) struct Writes {
    workload: Workload,
    /// The second half of a replaced pod.
    next: Option<Change>,
    changes: usize,
    queues: Vec<mpsc::Sender<Change>>,
    done: watch::Receiver<usize>,
    _writers: JoinSet<()>,
}

impl Writes {
    /// Creates namespaces, nodes and this many pods.
    pub(crate) async fn populate(api: &ApiServer, pods: usize) -> Writes {
        let options = WorkloadOptions { objects: pods, nodes: 10, namespaces: 4, ..WorkloadOptions::default() };
        let mut workload = Workload::new(14, options);
        load::populate(api, &mut workload).await;
        let (sender, done) = watch::channel(0);
        let mut queues = Vec::new();
        let mut writers = JoinSet::new();
        for _ in 0..WRITERS {
            let (queue, mut changes) = mpsc::channel(WAITING_MAX);
            queues.push(queue);
            let api = api.handle();
            let sender = sender.clone();
            writers.spawn(async move {
                while let Some(change) = changes.recv().await {
                    load::apply_through_outages(&api, change).await;
                    sender.send_modify(|done| *done += 1);
                }
            });
        }
        Writes { workload, next: None, changes: 0, queues, done, _writers: writers }
    }

    /// Makes this many changes, as fast as the apiserver takes them. Some may still be under way
    /// when it returns.
    pub(crate) async fn more(&mut self, changes: usize) {
        for _ in 0..changes {
            self.one().await;
        }
    }

    /// Makes changes at a fixed rate until `stop`.
    pub(crate) async fn at_rate(&mut self, per_second: u32, mut stop: watch::Receiver<bool>) {
        let mut ticks = interval(Duration::from_secs(1) / per_second);
        loop {
            tokio::select! {
                _ = ticks.tick() => self.one().await,
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    /// Waits until the apiserver has all changes. Returns their number.
    pub(crate) async fn flush(&mut self) -> usize {
        let changes = self.changes;
        self.done.wait_for(|done| *done == changes).await.expect("the writers are running");
        changes
    }

    async fn one(&mut self) {
        let change = self.next.take().unwrap_or_else(|| self.workload.next_change());
        let (queue, again) = match &change.operation {
            Operation::Update(pod) => {
                let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
                (writer(&text("namespace"), &text("name")), Some(pod.clone()))
            }
            Operation::Create(pod) | Operation::UpdateStatus(pod) => {
                let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
                (writer(text("namespace"), text("name")), None)
            }
            Operation::Delete { namespace, name } => (writer(namespace, name), None),
        };
        self.changes += 1;
        let change = match again {
            Some(pod) if self.changes.is_multiple_of(RECREATED) => {
                let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
                let operation = Operation::Delete { namespace: text("namespace"), name: text("name") };
                self.next = Some(Change { resource: change.resource.clone(), operation: Operation::Create(pod) });
                Change { resource: change.resource, operation }
            }
            _ => change,
        };
        self.queues[queue].send(change).await.expect("the writers are running");
    }
}

/// The writer of an object.
fn writer(namespace: &str, name: &str) -> usize {
    let hasher: BuildHasherDefault<DefaultHasher> = BuildHasherDefault::default();
    (hasher.hash_one((namespace, name)) % WRITERS as u64) as usize
}
