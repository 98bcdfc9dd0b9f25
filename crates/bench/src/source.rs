//! The source of changes: a simulated apiserver in this process, or a real cluster.

use std::path::{Path, PathBuf};

use kubefan_server::transport::listen::listen_tcp;
use kubefan_sim::{
    apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb},
    workload::{Change, Operation, Workload},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{BenchError, cluster::Cluster, latency::ChangeTimes, size, source_options::SourceOptions};

/// The pods and their changes. Nothing else writes to them.
pub(super) enum Source {
    /// A simulated apiserver in this process.
    Simulated(Simulated),
    /// A cluster given by a kubeconfig.
    Cluster(Box<Cluster>),
}

/// A simulated apiserver, served on loopback.
pub(super) struct Simulated {
    sim: SimApiserver,
    workload: Workload,
    object_bytes: Option<usize>,
    kubeconfig: PathBuf,
    _serving: DropGuard,
}

impl Source {
    /// The kubeconfig for the server under test.
    pub(super) fn kubeconfig(&self) -> &Path {
        match self {
            Self::Simulated(simulated) => &simulated.kubeconfig,
            Self::Cluster(cluster) => cluster.kubeconfig(),
        }
    }

    /// The namespace of the pods; empty for all namespaces.
    pub(super) fn namespace(&self) -> &str {
        match self {
            Self::Simulated(_) => "",
            Self::Cluster(cluster) => cluster.namespace(),
        }
    }

    /// The number of pods.
    pub(super) fn objects(&self) -> usize {
        match self {
            Self::Simulated(simulated) => simulated.workload.pod_count(),
            Self::Cluster(cluster) => cluster.objects(),
        }
    }

    /// The resource version of the last change.
    pub(super) fn version(&self) -> u64 {
        match self {
            Self::Simulated(simulated) => simulated.sim.revision(),
            Self::Cluster(cluster) => cluster.version(),
        }
    }

    /// Changes pods as fast as possible, and records when in `times`.
    pub(super) async fn make_changes(&mut self, count: usize, times: &ChangeTimes) -> Result<(), BenchError> {
        match self {
            Self::Simulated(simulated) => simulated.make_changes(count, times),
            Self::Cluster(cluster) => cluster.make_changes(count, times).await,
        }
    }

    /// Sets an annotation on one pod of each node that has pods. Returns these nodes' numbers.
    pub(super) async fn annotate_each_node(&mut self, annotation: &str, text: &str) -> Result<Vec<usize>, BenchError> {
        match self {
            Self::Simulated(simulated) => simulated.annotate_each_node(annotation, text),
            Self::Cluster(cluster) => cluster.annotate_each_node(annotation, text).await,
        }
    }

    /// Whether the apiserver answers reviews of callers from now on.
    ///
    /// # Errors
    /// A real apiserver always does.
    pub(super) fn set_answers_reviews(&self, answers: bool) -> Result<(), BenchError> {
        match self {
            Self::Simulated(simulated) => {
                simulated.sim.clear_faults();
                if !answers {
                    let fault = Fault::ServiceUnavailable;
                    let verb = Some(Verb::Review);
                    simulated.sim.set_fault(FaultRule { fault, verb, resource: None, requests: usize::MAX });
                }
                Ok(())
            }
            Self::Cluster(_) if answers => Ok(()),
            Self::Cluster(_) => Err(BenchError::Cluster("an outage needs the simulated apiserver".to_owned())),
        }
    }

    /// Creates the pods, unless they already exist.
    pub(super) async fn fill(&mut self) -> Result<(), BenchError> {
        match self {
            Self::Simulated(_) => Ok(()),
            Self::Cluster(cluster) => cluster.fill().await,
        }
    }

    /// Deletes everything the benchmark created.
    pub(super) async fn clean_up(self) -> Result<(), BenchError> {
        match self {
            Self::Simulated(_) => Ok(()),
            Self::Cluster(cluster) => cluster.clean_up().await,
        }
    }
}

/// The URL path of the pods in a namespace; empty for all namespaces.
pub(super) fn pods_path(namespace: &str) -> String {
    match namespace {
        "" => "/api/v1/pods".to_owned(),
        namespace => format!("/api/v1/namespaces/{namespace}/pods"),
    }
}

impl Simulated {
    /// Fills a simulated apiserver and serves it. Writes a kubeconfig for it to `directory`.
    pub(super) async fn start(options: SourceOptions, directory: &Path) -> Result<Self, BenchError> {
        let listener = listen_tcp(([127, 0, 0, 1], 0).into())?;
        let address = listener.local_addr()?;
        let sim = SimApiserver::new(SimOptions { seed: options.seed, ..SimOptions::default() });
        let stop = CancellationToken::new();
        tokio::spawn(sim.clone().serve(listener, stop.clone().cancelled_owned()));
        let kubeconfig = directory.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: bench\nclusters: [{{ name: bench, cluster: {{ server: 'http://{address}' }} }}]\n\
             contexts: [{{ name: bench, context: {{ cluster: bench, user: bench }} }}]\nusers: [{{ name: bench, user: {{}} }}]\n"
        );
        std::fs::write(&kubeconfig, text)?;
        let workload = Workload::new(options.seed, options.workload);
        let mut source =
            Self { sim, workload, object_bytes: options.object_bytes, kubeconfig, _serving: stop.drop_guard() };
        let mut count = 0_usize;
        while let Some(change) = source.workload.next_setup() {
            source.apply(Self::resized(options.object_bytes, change))?;
            count += 1;
            if count.is_multiple_of(64) {
                // Yield, so that the stop signal is handled during the setup.
                tokio::task::yield_now().await;
            }
        }
        Ok(source)
    }

    fn make_changes(&mut self, count: usize, times: &ChangeTimes) -> Result<(), BenchError> {
        // Generate all changes first, so that a burst is written at once.
        let changes: Vec<_> =
            (0..count).map(|_| Self::resized(self.object_bytes, self.workload.next_change())).collect();
        for change in changes {
            times.record_change();
            self.apply(change)?;
        }
        Ok(())
    }

    fn annotate_each_node(&mut self, annotation: &str, text: &str) -> Result<Vec<usize>, BenchError> {
        let changes = self.workload.annotate_each_node(annotation, text);
        let apply = |(node, change)| self.apply(Self::resized(self.object_bytes, change)).map(|()| node);
        changes.into_iter().map(apply).collect()
    }

    /// Resizes the pod of a change, if a size is configured.
    fn resized(object_bytes: Option<usize>, mut change: Change) -> Change {
        if let (Some(bytes), "pods") = (object_bytes, &*change.resource.resource)
            && let Operation::Create(pod) | Operation::Update(pod) | Operation::UpdateStatus(pod) =
                &mut change.operation
        {
            size::resize(pod, bytes);
        }
        change
    }

    fn apply(&self, change: Change) -> Result<(), BenchError> {
        change.apply(&self.sim).map_err(|status| BenchError::Source(status.message))?;
        Ok(())
    }
}
