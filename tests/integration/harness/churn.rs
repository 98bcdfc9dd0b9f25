//! Changes a real apiserver's pods at a fixed rate until stopped: pods are created, deleted and
//! recreated under the same name, and enter and leave selectors by label, node and phase. Each
//! writer has its own pods, so writers never conflict.

use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinSet, time::interval};

use super::{apiserver::ApiServer, objects::version_of};

/// Namespaces of the pods: `team-0`, …
const NAMESPACES: usize = 3;
/// Nodes that pods are bound to: `node-0`, … The nodes do not exist; binding does not require them.
const NODES: usize = 4;
const APPS: usize = 4;
/// Number of parallel writers. A single writer would be limited by the duration of a request.
const WRITERS: usize = 16;

/// The writes so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Written {
    /// Number of updates.
    pub(crate) count: usize,
    /// The largest version of an update.
    pub(crate) version: u64,
}

/// Running writers.
pub(crate) struct Churn {
    written: watch::Receiver<Written>,
    stop: watch::Sender<bool>,
    writers: JoinSet<()>,
}

impl Churn {
    /// Creates the namespaces and pods. Changes start with [`Self::begin`].
    pub(crate) async fn populate(api: &ApiServer, pods: usize) -> Vec<Writer> {
        for namespace in 0..NAMESPACES {
            let namespace = json!({ "metadata": { "name": format!("team-{namespace}") } });
            api.create("/api/v1/namespaces", &namespace).await;
        }
        let mut setups = JoinSet::new();
        for number in 0..WRITERS {
            let api = api.handle();
            setups.spawn(async move {
                let pods = vec![None; pods.div_ceil(WRITERS)];
                let mut writer = Writer { api, number, random: Pcg64Mcg::seed_from_u64(number as u64), pods };
                for at in 0..writer.pods.len() {
                    writer.create(at).await;
                }
                writer
            });
        }
        setups.join_all().await
    }

    /// Starts the writers, with `updates_per_second` in total.
    pub(crate) fn begin(writers: Vec<Writer>, updates_per_second: u32) -> Churn {
        let (stop, stopped) = watch::channel(false);
        let (sender, written) = watch::channel(Written::default());
        let period = Duration::from_secs(1) * writers.len() as u32 / updates_per_second;
        let writers = writers.into_iter().map(|mut writer| {
            let sender = sender.clone();
            let stopped = stopped.clone();
            async move {
                let mut ticks = interval(period);
                while !*stopped.borrow() {
                    ticks.tick().await;
                    let version = writer.step().await;
                    sender.send_modify(|written| {
                        written.count += 1;
                        written.version = written.version.max(version);
                    });
                }
            }
        });
        Churn { written, stop, writers: writers.collect() }
    }

    /// Waits for this many more updates. Returns the largest version so far.
    pub(crate) async fn more(&mut self, updates: usize) -> u64 {
        let count = self.written.borrow().count + updates;
        self.written.wait_for(|written| written.count >= count).await.expect("the writers are running").version
    }

    /// Stops the writers. Returns the total of their writes.
    pub(crate) async fn end(self) -> Written {
        self.stop.send_replace(true);
        self.writers.join_all().await;
        *self.written.borrow()
    }
}

/// One writer and its pods.
pub(crate) struct Writer {
    api: ApiServer,
    number: usize,
    random: Pcg64Mcg,
    pods: Vec<Option<Pod>>,
}

#[derive(Clone, Copy)]
struct Pod {
    bound: bool,
}

impl Writer {
    fn collection(&self, at: usize) -> String {
        format!("/api/v1/namespaces/team-{}/pods", (self.number + at) % NAMESPACES)
    }

    fn name(&self, at: usize) -> String {
        format!("p{}-{at}", self.number)
    }

    fn path(&self, at: usize) -> String {
        format!("{}/{}", self.collection(at), self.name(at))
    }

    /// Makes one update. Returns its version.
    async fn step(&mut self) -> u64 {
        let at = self.random.random_range(0..self.pods.len());
        let Some(pod) = self.pods[at] else { return self.create(at).await };
        match self.random.random_range(0..10u32) {
            0..5 => {
                let labels = self.labels();
                self.patch(&self.path(at), json!({ "metadata": { "labels": labels } })).await
            }
            5 if !pod.bound => {
                self.bind(at).await;
                // The response to a binding has no version, so make a change that has one.
                self.phase(at).await
            }
            5 | 6 => self.phase(at).await,
            7 => {
                self.pods[at] = None;
                version_of(&self.api.delete(&self.path(at)).await)
            }
            _ => {
                // Delete and recreate at once, as another object.
                self.api.delete(&self.path(at)).await;
                self.create(at).await
            }
        }
    }

    async fn patch(&self, path: &str, patch: Value) -> u64 {
        version_of(&self.api.patch(path, &patch).await)
    }

    async fn create(&mut self, at: usize) -> u64 {
        let bound = self.random.random_bool(0.5);
        let node = bound.then(|| format!("node-{}", self.random.random_range(0..NODES)));
        let object = json!({
            "metadata": { "name": self.name(at), "labels": self.labels() },
            "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "pause" }] },
        });
        self.pods[at] = Some(Pod { bound });
        version_of(&self.api.create(&self.collection(at), &object).await)
    }

    async fn bind(&mut self, at: usize) {
        let target = json!({ "kind": "Node", "name": format!("node-{}", self.random.random_range(0..NODES)) });
        let binding = json!({ "metadata": { "name": self.name(at) }, "target": target });
        self.api.create(&format!("{}/binding", self.path(at)), &binding).await;
        self.pods[at] = Some(Pod { bound: true });
    }

    async fn phase(&mut self, at: usize) -> u64 {
        let phase = ["Pending", "Running", "Succeeded"][self.random.random_range(0..3)];
        // A patch without changes would not create a version.
        let message = format!("{}", self.random.random_range(0..u32::MAX));
        let status = json!({ "status": { "phase": phase, "message": message } });
        self.patch(&format!("{}/status", self.path(at)), status).await
    }

    /// Null removes a label.
    fn labels(&mut self) -> Value {
        let app = format!("web-{}", self.random.random_range(0..APPS));
        let stage = [json!("on"), json!("off"), Value::Null][self.random.random_range(0..3)].clone();
        let canary = if self.random.random_bool(0.2) { json!("") } else { Value::Null };
        let change = format!("{}", self.random.random_range(0..u32::MAX));
        json!({ "app": app, "stage": stage, "canary": canary, "change": change })
    }
}
