//! The writes: pods are created and deleted, enter and leave every selection, and reuse the names
//! of deleted ones. Each write is drawn from the current state, so that the workload continues
//! after a restore.

use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::SimApiserver;
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};

use super::{
    schema::SCHEMA,
    truth::{MANAGED_FIELDS, Object, Truth},
};

const NAMESPACES: [&str; 3] = ["team-0", "team-1", "team-2"];
const APPS: [&str; 4] = ["web", "api", "db", "batch"];
const TIERS: [&str; 4] = ["frontend", "backend", "cache", "batch"];
const NODES: [&str; 4] = ["node-0", "node-1", "node-2", "node-3"];
const PHASES: [&str; 3] = ["Pending", "Running", "Failed"];

/// Bytes of filler in each pod, so that objects are worth compressing.
const FILLER_BYTES: usize = 500;

/// The share of steps that write several pods at one version, and how many at most.
const TOGETHER: f64 = 0.1;
const TOGETHER_MAX: usize = 4;

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

fn pods() -> GroupVersionResource {
    GroupVersionResource::new("", "v1", "pods")
}

fn one_of<T: Copy>(random: &mut Pcg64Mcg, all: &[T]) -> T {
    all[random.random_range(0..all.len())]
}

/// Writes pods, and records each write in the truth.
pub(crate) struct Workload {
    pub(crate) random: Pcg64Mcg,
    /// The approximate number of pods.
    pub(crate) objects: usize,
    pub(crate) writes: usize,
    serial: usize,
}

impl Workload {
    pub(crate) fn new(random: Pcg64Mcg, objects: usize) -> Workload {
        Workload { random, objects, writes: 0, serial: 0 }
    }

    /// Creates the namespaces and half of the pods.
    pub(crate) fn populate(&mut self, sim: &SimApiserver, truth: &mut Truth) {
        for name in NAMESPACES {
            let namespace = json!({ "metadata": { "name": name } });
            sim.create(&GroupVersionResource::new("", "v1", "namespaces"), namespace).unwrap();
        }
        truth.moved(sim.revision());
        for _ in 0..self.objects / 2 {
            self.create(sim, truth, None);
        }
    }

    /// One write, two if a pod is deleted and created again under its name, or several at one
    /// version.
    pub(crate) fn step(&mut self, sim: &SimApiserver, truth: &mut Truth) {
        let held = truth.state().len();
        if held > TOGETHER_MAX && self.random.random_bool(TOGETHER) {
            return self.step_together(sim, truth);
        }
        let kind = self.random.random_range(0..100u32);
        if held == 0 || (kind < 14 && held < self.objects) {
            return self.create(sim, truth, None);
        }
        let at = self.random.random_range(0..held);
        let object = truth.state().values().nth(at).unwrap().clone();
        match kind {
            0..26 => self.delete(sim, truth, &object),
            26..33 => {
                self.delete(sim, truth, &object);
                self.create(sim, truth, Some(&object.key));
            }
            33..36 => self.write_other(sim, truth),
            // A pod that comes and goes.
            36..38 => {
                self.create(sim, truth, None);
                let created = truth.now().1.writes.last().and_then(|write| write.after.clone());
                self.delete(sim, truth, &created.unwrap());
            }
            38..58 => {
                let app = one_of(&mut self.random, &APPS);
                let tier = one_of(&mut self.random, &TIERS);
                let canary = self.random.random_bool(0.3);
                self.update(sim, truth, &object, |pod| pod["metadata"]["labels"] = labels(app, tier, canary));
            }
            58..61 => {
                // Only subscribers to whole objects see this.
                let has_some = object.value()["metadata"].get("managedFields").is_some();
                self.update(sim, truth, &object, |pod| {
                    if has_some {
                        drop(pod["metadata"].as_object_mut().unwrap().remove("managedFields"))
                    } else {
                        pod["metadata"]["managedFields"] = managed_fields()
                    }
                });
            }
            61..70 => {
                // Binds a pod or, unlike in a real cluster, moves it to another node.
                let node = one_of(&mut self.random, &NODES);
                self.update(sim, truth, &object, |pod| pod["spec"]["nodeName"] = node.into());
            }
            _ => {
                let phase = one_of(&mut self.random, &PHASES);
                let count = self.writes;
                self.update(sim, truth, &object, |pod| {
                    pod["status"] = json!({ "phase": phase, "message": format!("change {count}") })
                });
            }
        }
    }

    /// Several writes at one version, of different pods: mostly deletes, as objects that expire
    /// with one lease are deleted, and sometimes other writes among them.
    fn step_together(&mut self, sim: &SimApiserver, truth: &mut Truth) {
        let count = self.random.random_range(2..=TOGETHER_MAX);
        let only_deletes = self.random.random_bool(0.5);
        let at = rand::seq::index::sample(&mut self.random, truth.state().len(), count);
        let objects: Vec<_> = at.iter().map(|at| truth.state().values().nth(at).unwrap().clone()).collect();
        sim.at_one_version(|| {
            for object in objects {
                match self.random.random_range(0..10u32) {
                    0..3 if !only_deletes => self.create(sim, truth, None),
                    3..6 if !only_deletes => {
                        let app = one_of(&mut self.random, &APPS);
                        let count = self.writes;
                        self.update(sim, truth, &object, |pod| {
                            pod["metadata"]["labels"]["app"] = app.into();
                            pod["status"]["message"] = format!("change {count}").into();
                        });
                    }
                    _ => self.delete(sim, truth, &object),
                }
            }
        });
    }

    /// Creates a pod behind all others in the order of keys, and deletes it again if it only
    /// `comes_and_goes`.
    pub(crate) fn create_last(&mut self, sim: &SimApiserver, truth: &mut Truth, comes_and_goes: bool) {
        self.serial += 1;
        self.create(sim, truth, Some(&format!("team-2/z-{:06}", self.serial)));
        if comes_and_goes {
            let created = truth.now().1.writes.last().and_then(|write| write.after.clone());
            self.delete(sim, truth, &created.unwrap());
        }
    }

    /// Creates pods so that every selection has an event at the end, at versions that no history
    /// has reached before, not even one that a restore undid.
    pub(crate) fn finish(&mut self, sim: &SimApiserver, truth: &mut Truth) {
        let highest = truth.epochs.iter().map(|epoch| epoch.revision).max().unwrap_or(0);
        while truth.now().1.revision < highest {
            self.write_other(sim, truth);
        }
        for (app, tier, canary, node) in
            [("web", "backend", false, "node-0"), ("api", "cache", true, "node-2"), ("web", "batch", false, "node-1")]
        {
            for namespace in ["team-0", "team-1"] {
                self.serial += 1;
                let name = format!("last-{}", self.serial);
                let mut pod = pod(namespace, &name, node, labels(app, tier, canary), "Pending", "");
                pod["metadata"]["annotations"][SCHEMA] = truth.schema.to_string().into();
                self.write(sim, truth, &format!("{namespace}/{name}"), |sim| sim.create(&pods(), pod));
            }
        }
    }

    fn create(&mut self, sim: &SimApiserver, truth: &mut Truth, key: Option<&str>) {
        let random = &mut self.random;
        let key = key.map(str::to_owned).unwrap_or_else(|| {
            self.serial += 1;
            // Some are behind all others in the order of keys.
            if random.random_bool(0.1) {
                format!("team-2/z-{:06}", self.serial)
            } else {
                format!("{}/pod-{:03}-{}", one_of(random, &NAMESPACES), random.random_range(0..1000), self.serial)
            }
        });
        let (namespace, name) = key.split_once('/').unwrap();
        let node = if random.random_bool(0.5) { one_of(random, &NODES) } else { "" };
        let labels = labels(one_of(random, &APPS), one_of(random, &TIERS), random.random_bool(0.3));
        let filler: String = (0..FILLER_BYTES).map(|_| char::from(random.random_range(b'a'..=b'z'))).collect();
        let mut pod = pod(namespace, name, node, labels, one_of(random, &PHASES), &filler);
        pod["metadata"]["annotations"][SCHEMA] = truth.schema.to_string().into();
        if random.random_bool(0.3) {
            pod["metadata"]["managedFields"] = managed_fields();
        }
        if random.random_bool(0.3) {
            pod["metadata"]["annotations"][LAST_APPLIED] = "{}".into();
        }
        self.write(sim, truth, &key, |sim| sim.create(&pods(), pod));
    }

    /// Writes another resource, which advances the version.
    pub(crate) fn write_other(&mut self, sim: &SimApiserver, truth: &mut Truth) {
        self.serial += 1;
        let settings = json!({ "metadata": { "namespace": NAMESPACES[0], "name": format!("other-{}", self.serial) } });
        sim.create(&GroupVersionResource::new("", "v1", "configmaps"), settings).unwrap();
        truth.moved(sim.revision());
    }

    pub(crate) fn delete(&mut self, sim: &SimApiserver, truth: &mut Truth, object: &Object) {
        let (namespace, name) = object.key.split_once('/').unwrap();
        self.write(sim, truth, &object.key, |sim| sim.delete(&pods(), namespace, name));
    }

    fn update(&mut self, sim: &SimApiserver, truth: &mut Truth, object: &Object, change: impl FnOnce(&mut Value)) {
        let mut pod: Value = serde_json::from_slice(&object.bytes_at(object.version, false)).unwrap();
        change(&mut pod);
        pod["metadata"]["annotations"][SCHEMA] = truth.schema.to_string().into();
        self.write(sim, truth, &object.key, |sim| sim.update(&pods(), pod));
    }

    fn write<E: std::fmt::Debug>(
        &mut self,
        sim: &SimApiserver,
        truth: &mut Truth,
        key: &str,
        write: impl FnOnce(&SimApiserver) -> Result<u64, E>,
    ) {
        let version = write(sim).unwrap();
        let (namespace, name) = key.split_once('/').unwrap();
        let changed = truth.state().get(key).is_none_or(|before| before.version < version);
        if !changed {
            // The write changed nothing.
            return;
        }
        self.writes += 1;
        let object = sim.object(&pods(), namespace, name).map(|bytes| Object::read(&bytes));
        truth.wrote(version, key, object);
    }
}

fn managed_fields() -> Value {
    let fields: Value = serde_json::from_str(&format!("{{{MANAGED_FIELDS}}}")).unwrap();
    fields["managedFields"].clone()
}

fn labels(app: &str, tier: &str, canary: bool) -> Value {
    if canary { json!({ "app": app, "tier": tier, "canary": "" }) } else { json!({ "app": app, "tier": tier }) }
}

fn pod(namespace: &str, name: &str, node: &str, labels: Value, phase: &str, filler: &str) -> Value {
    let mut spec = json!({ "containers": [{ "name": "main", "image": "pause" }] });
    if !node.is_empty() {
        spec["nodeName"] = node.into();
    }
    json!({
        "metadata": { "namespace": namespace, "name": name, "labels": labels, "annotations": { "filler": filler } },
        "spec": spec,
        "status": { "phase": phase },
    })
}
