//! Changes to a real apiserver's pods that go on until they are told to end, at a rate: pods come, go, come again under the same name,
//! and enter and leave selectors by label, by node and by phase. Each writer has pods of its own, so none is ever in another's way.

use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinSet, time::interval};

use super::{apiserver::ApiServer, objects::version_of};

/// Namespaces the pods live in: `team-0`, …
const NAMESPACES: usize = 3;
/// Nodes they are bound to: `node-0`, … None of them exists, which binding does not ask for.
const NODES: usize = 4;
const APPS: usize = 4;
/// Writers side by side: one alone is held to the time of a request.
const WRITERS: usize = 16;

/// What was written so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Written {
    /// Updates.
    pub(crate) count: usize,
    /// The largest version of one.
    pub(crate) version: u64,
}

/// Writers at work.
pub(crate) struct Churn {
    written: watch::Receiver<Written>,
    stop: watch::Sender<bool>,
    writers: JoinSet<()>,
}

impl Churn {
    /// Makes the namespaces and pods; nothing is changed before [`Self::begin`].
    pub(crate) async fn populate(api: &ApiServer, pods: usize) -> Vec<Writer> {
        for namespace in 0..NAMESPACES {
            let namespace = json!({ "metadata": { "name": format!("team-{namespace}") } });
            api.create("/api/v1/namespaces", &namespace).await;
        }
        let mut making = JoinSet::new();
        for number in 0..WRITERS {
            let api = api.handle();
            making.spawn(async move {
                let pods = vec![None; pods.div_ceil(WRITERS)];
                let mut writer = Writer { api, number, random: Pcg64Mcg::seed_from_u64(number as u64), pods };
                for at in 0..writer.pods.len() {
                    writer.create(at).await;
                }
                writer
            });
        }
        making.join_all().await
    }

    /// Lets the writers change their pods, so many times a second all together.
    pub(crate) fn begin(writers: Vec<Writer>, updates_per_second: u32) -> Churn {
        let (stop, stopped) = watch::channel(false);
        let (tell, written) = watch::channel(Written::default());
        let period = Duration::from_secs(1) * writers.len() as u32 / updates_per_second;
        let writers = writers.into_iter().map(|mut writer| {
            let (tell, stopped) = (tell.clone(), stopped.clone());
            async move {
                let mut ticks = interval(period);
                while !*stopped.borrow() {
                    ticks.tick().await;
                    let version = writer.step().await;
                    tell.send_modify(|written| {
                        written.count += 1;
                        written.version = written.version.max(version);
                    });
                }
            }
        });
        Churn { written, stop, writers: writers.collect() }
    }

    /// Waits until so many more updates have been made; the largest version then.
    pub(crate) async fn more(&mut self, updates: usize) -> u64 {
        let count = self.written.borrow().count + updates;
        self.written.wait_for(|written| written.count >= count).await.expect("the writers are at work").version
    }

    /// Ends the writers. What they wrote in all.
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

    /// One update; its version.
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
                // A binding's answer has no version: a later change has.
                self.phase(at).await
            }
            5 | 6 => self.phase(at).await,
            7 => {
                self.pods[at] = None;
                version_of(&self.api.delete(&self.path(at)).await)
            }
            _ => {
                // At once again, as another object.
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
        // A patch that changes nothing makes no version.
        let message = format!("{}", self.random.random_range(0..u32::MAX));
        let status = json!({ "status": { "phase": phase, "message": message } });
        self.patch(&format!("{}/status", self.path(at)), status).await
    }

    /// Null takes a label away.
    fn labels(&mut self) -> Value {
        let app = format!("web-{}", self.random.random_range(0..APPS));
        let stage = [json!("on"), json!("off"), Value::Null][self.random.random_range(0..3)].clone();
        let canary = if self.random.random_bool(0.2) { json!("") } else { Value::Null };
        let change = format!("{}", self.random.random_range(0..u32::MAX));
        json!({ "app": app, "stage": stage, "canary": canary, "change": change })
    }
}
