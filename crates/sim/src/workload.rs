//! A generated workload: a cluster's pods, nodes and namespaces, and then a sequence of changes to
//! the pods.
//!
//! A seed yields the same objects and changes on every machine and in every build, so that a
//! failure can be reproduced. The generator stores only the fields that vary and renders an object
//! when it changes: ten thousand decoded pods would use more memory than the process under test.

mod pod;
mod render;

use std::collections::BTreeMap;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::Value;

use self::pod::{Pod, TIERS};
use super::apiserver::{SimApiserver, Status};
use kubefan_model::GroupVersionResource;

/// The size of the cluster. Values below 1 are raised to 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadOptions {
    /// Number of pods. The churn keeps the number close to this.
    pub objects: usize,
    /// Number of nodes that the pods run on.
    pub nodes: usize,
    /// Number of namespaces with pods: `team-0`, `team-1`, …
    pub namespaces: usize,
    /// Number of values of the label `app`: `web-0`, `web-1`, …
    pub apps: usize,
}

impl Default for WorkloadOptions {
    fn default() -> Self {
        Self { objects: 10_000, nodes: 100, namespaces: 10, apps: 20 }
    }
}

/// One change to one object.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The resource of the object.
    pub resource: GroupVersionResource,
    /// The operation.
    pub operation: Operation,
}

/// An operation on an object. The objects have no uid and no resource version, because the server
/// sets both.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// POST of this object.
    Create(Value),
    /// PUT of this object: its labels or annotations changed.
    Update(Value),
    /// PUT to `/status`: only the status changed.
    UpdateStatus(Value),
    /// DELETE.
    Delete {
        /// Empty for cluster-scoped resources.
        namespace: String,
        /// The object's name.
        name: String,
    },
}

impl Change {
    /// Applies the change and returns the new resource version.
    ///
    /// # Errors
    /// Returns the server's error. Changes that are applied completely and in order never fail.
    pub fn apply(self, sim: &SimApiserver) -> Result<u64, Status> {
        match self.operation {
            Operation::Create(value) => sim.create(&self.resource, value),
            Operation::Update(value) | Operation::UpdateStatus(value) => sim.update(&self.resource, value),
            Operation::Delete { namespace, name } => sim.delete(&self.resource, &namespace, &name),
        }
    }
}

/// A generator of a cluster and its changes.
#[derive(Debug, Clone)]
pub struct Workload {
    random: Pcg64Mcg,
    options: WorkloadOptions,
    pods: Vec<Pod>,
    serial: u64,
    /// The workload's clock, in seconds. It advances by changes, not by real time.
    seconds: u64,
    setup: usize,
}

impl Workload {
    /// Returns the workload of a seed. Option values below 1 are raised to 1.
    pub fn new(seed: u64, options: WorkloadOptions) -> Self {
        let options = WorkloadOptions {
            objects: options.objects.max(1),
            nodes: options.nodes.max(1),
            namespaces: options.namespaces.max(1),
            apps: options.apps.max(1),
        };
        let pods = Vec::with_capacity(options.objects);
        Self { random: Pcg64Mcg::seed_from_u64(seed), options, pods, serial: 0, seconds: 0, setup: 0 }
    }

    /// The next change of the setup: namespaces, nodes, then pods. `None` when the setup is
    /// complete.
    pub fn next_setup(&mut self) -> Option<Change> {
        let namespaces = self.options.namespaces;
        let nodes = self.options.nodes;
        let step = self.setup;
        self.setup += 1;
        if step < namespaces {
            let value = render::namespace(step);
            return Some(Change { resource: resource("namespaces"), operation: Operation::Create(value) });
        }
        if step < namespaces + nodes {
            let value = render::node(step - namespaces);
            return Some(Change { resource: resource("nodes"), operation: Operation::Create(value) });
        }
        (self.pods.len() < self.options.objects).then(|| self.create())
    }

    /// Applies the whole setup.
    ///
    /// # Errors
    /// Returns the server's error, such as 409 if the server already has such a workload.
    pub fn populate(&mut self, sim: &SimApiserver) -> Result<(), Status> {
        while let Some(change) = self.next_setup() {
            change.apply(sim)?;
        }
        Ok(())
    }

    /// The next change of the churn. Seven of ten update a status, two update labels or
    /// annotations, and one creates or deletes a pod.
    pub fn next_change(&mut self) -> Change {
        self.seconds += 1;
        let kind = self.random.random_range(0..10u32);
        let full = self.pods.len() >= self.options.objects;
        if self.pods.is_empty() || (kind == 0 && !full) {
            return self.create();
        }
        let at = self.random.random_range(0..self.pods.len());
        if kind == 0 {
            let pod = self.pods.swap_remove(at);
            let namespace = render::namespace_name(pod.namespace);
            let name = render::pod_name(&pod);
            return Change { resource: resource("pods"), operation: Operation::Delete { namespace, name } };
        }
        let pod = &mut self.pods[at];
        pod.changed = self.seconds;
        let operation = if kind <= 2 {
            pod.revision += 1;
            match self.random.random_range(0..4u32) {
                0 => pod.app = self.random.random_range(0..self.options.apps),
                1 => pod.tier = self.random.random_range(0..TIERS.len()),
                2 => pod.canary = !pod.canary,
                // Only the revision annotation changes.
                _ => {}
            }
            Operation::Update(render::pod(pod))
        } else {
            pod.restarts += u64::from(pod.ready);
            pod.ready = !pod.ready;
            Operation::UpdateStatus(render::pod(pod))
        };
        Change { resource: resource("pods"), operation }
    }

    /// Applies the next change of the churn and returns the new resource version.
    ///
    /// # Errors
    /// Returns the server's error. There is none if this workload is the only writer.
    pub fn step(&mut self, sim: &SimApiserver) -> Result<u64, Status> {
        self.next_change().apply(sim)
    }

    /// One update of one pod of each node that has pods, which sets an annotation. Each comes with
    /// the number of the node, in the order of the nodes.
    pub fn annotate_each_node(&mut self, annotation: &str, text: &str) -> Vec<(usize, Change)> {
        let mut first: BTreeMap<usize, &mut Pod> = BTreeMap::new();
        for pod in &mut self.pods {
            first.entry(pod.node).or_insert(pod);
        }
        let changes = first.into_iter().map(|(node, pod)| {
            pod.revision += 1;
            let mut value = render::pod(pod);
            value["metadata"]["annotations"][annotation] = text.into();
            (node, Change { resource: resource("pods"), operation: Operation::Update(value) })
        });
        changes.collect()
    }

    /// Number of existing pods.
    pub fn pod_count(&self) -> usize {
        self.pods.len()
    }

    fn create(&mut self) -> Change {
        let app = self.random.random_range(0..self.options.apps);
        let pod = Pod {
            serial: self.serial,
            namespace: self.random.random_range(0..self.options.namespaces),
            node: self.random.random_range(0..self.options.nodes),
            born_app: app,
            app,
            tier: self.random.random_range(0..TIERS.len()),
            canary: self.random.random_range(0..10u32) == 0,
            containers: self.random.random_range(1..=2),
            ready: true,
            restarts: 0,
            revision: 1,
            created: self.seconds,
            changed: self.seconds,
        };
        self.serial += 1;
        let value = render::new_pod(&pod);
        self.pods.push(pod);
        Change { resource: resource("pods"), operation: Operation::Create(value) }
    }
}

fn resource(plural: &str) -> GroupVersionResource {
    GroupVersionResource::new("", "v1", plural)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::SimOptions;

    fn small() -> WorkloadOptions {
        WorkloadOptions { objects: 50, nodes: 5, namespaces: 3, apps: 4 }
    }

    #[test]
    fn the_same_seed_yields_the_same_changes() {
        let changes = |seed| {
            let mut workload = Workload::new(seed, small());
            let setup: Vec<_> = std::iter::from_fn(|| workload.next_setup()).collect();
            (setup, (0..200).map(|_| workload.next_change()).collect::<Vec<_>>())
        };
        assert_eq!(changes(1), changes(1));
        assert_ne!(changes(1), changes(2));
    }

    #[test]
    fn a_seed_yields_the_same_pod_names_in_every_build() {
        let mut workload = Workload::new(7, small());
        let first: Vec<_> = std::iter::from_fn(|| workload.next_setup()).skip(8).take(2).collect();
        let names = first.iter().map(|change| match &change.operation {
            Operation::Create(value) => value["metadata"]["name"].as_str().unwrap_or_default(),
            _ => "",
        });
        assert_eq!(names.collect::<Vec<_>>(), EXPECTED_NAMES);
    }

    /// A change of these names invalidates every recorded seed, so it needs a changelog entry.
    const EXPECTED_NAMES: [&str; 2] = ["web-2-7cdaa66d13-bbbbb", "web-0-7c9e3779b1-cdn6r"];

    #[test]
    fn every_change_is_accepted_and_the_number_of_pods_stays_close_to_the_option() {
        let sim = SimApiserver::new(SimOptions::default());
        let mut workload = Workload::new(3, small());
        workload.populate(&sim).unwrap();
        let mut kinds = BTreeMap::new();
        for _ in 0..2000 {
            let change = workload.next_change();
            let kind = match change.operation {
                Operation::Create(_) => "create",
                Operation::Update(_) => "update",
                Operation::UpdateStatus(_) => "status",
                Operation::Delete { .. } => "delete",
            };
            *kinds.entry(kind).or_insert(0) += 1;
            let before = sim.revision();
            assert_eq!(change.apply(&sim), Ok(before + 1));
        }
        assert!((40..=50).contains(&workload.pod_count()), "{}", workload.pod_count());
        assert!((1200..1600).contains(&kinds["status"]) && (300..500).contains(&kinds["update"]), "{kinds:?}");
    }

    #[test]
    fn one_pod_of_each_node_is_annotated() {
        let sim = SimApiserver::new(SimOptions::default());
        let mut workload = Workload::new(3, small());
        workload.populate(&sim).unwrap();
        let changes = workload.annotate_each_node("example.com/mark", "x");
        assert_eq!(changes.iter().map(|(node, _)| *node).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        for (node, change) in changes {
            let Operation::Update(value) = &change.operation else { panic!("{change:?}") };
            assert_eq!(value["spec"]["nodeName"], format!("node-{node}"));
            assert_eq!(value["metadata"]["annotations"]["example.com/mark"], "x");
            change.apply(&sim).unwrap();
        }
    }

    #[test]
    fn pods_have_a_realistic_size() {
        let mut workload = Workload::new(4, small());
        for change in std::iter::from_fn(|| workload.next_setup()).filter(|change| change.resource == resource("pods"))
        {
            let Operation::Create(value) = change.operation else { continue };
            let bytes = value.to_string().len();
            assert!((3000..6500).contains(&bytes), "{bytes}");
        }
    }
}
