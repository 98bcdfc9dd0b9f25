//! Where changes are made: a simulated apiserver in this process, filled by the workload, or a cluster.

use std::path::{Path, PathBuf};

use tokio_util::sync::{CancellationToken, DropGuard};

use super::{BenchError, cluster::Cluster, latency::Times, size};
use kubefan_proxy::server::transport::listen::listen_tcp;
use kubefan_sim::{
    apiserver::{SimApiserver, SimOptions},
    workload::{Change, Operation, Workload, WorkloadOptions},
};

/// How many and what kind of objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SourceOptions {
    pub(super) workload: WorkloadOptions,
    /// Of each pod's JSON, about; `None` as the workload makes them.
    pub(super) object_bytes: Option<usize>,
    pub(super) seed: u64,
}

/// The objects, and the only writer to them.
pub(super) enum Source {
    /// In this process.
    Simulated(Simulated),
    /// Behind a kubeconfig.
    Cluster(Box<Cluster>),
}

/// A simulated apiserver that is served on loopback.
pub(super) struct Simulated {
    sim: SimApiserver,
    workload: Workload,
    object_bytes: Option<usize>,
    kubeconfig: PathBuf,
    _serving: DropGuard,
}

impl Source {
    /// Leads to the apiserver.
    pub(super) fn kubeconfig(&self) -> &Path {
        match self {
            Self::Simulated(simulated) => &simulated.kubeconfig,
            Self::Cluster(cluster) => cluster.kubeconfig(),
        }
    }

    /// Where the pods are; empty for everywhere.
    pub(super) fn namespace(&self) -> &str {
        match self {
            Self::Simulated(_) => "",
            Self::Cluster(cluster) => cluster.namespace(),
        }
    }

    /// Pods there are.
    pub(super) fn objects(&self) -> usize {
        match self {
            Self::Simulated(simulated) => simulated.workload.pod_count(),
            Self::Cluster(cluster) => cluster.objects(),
        }
    }

    /// The version of the last change.
    pub(super) fn version(&self) -> u64 {
        match self {
            Self::Simulated(simulated) => simulated.sim.revision(),
            Self::Cluster(cluster) => cluster.version(),
        }
    }

    /// Makes changes to pods, as fast as it goes.
    pub(super) async fn change(&mut self, count: usize, times: &Times) -> Result<(), BenchError> {
        match self {
            Self::Simulated(simulated) => simulated.change(count, times),
            Self::Cluster(cluster) => cluster.change(count, times).await,
        }
    }

    /// Makes the pods, where they are not there yet.
    pub(super) async fn fill(&mut self) -> Result<(), BenchError> {
        match self {
            Self::Simulated(_) => Ok(()),
            Self::Cluster(cluster) => cluster.fill().await,
        }
    }

    /// Takes away what was made.
    pub(super) async fn finish(self) -> Result<(), BenchError> {
        match self {
            Self::Simulated(_) => Ok(()),
            Self::Cluster(cluster) => cluster.finish().await,
        }
    }
}

impl Simulated {
    /// Fills an apiserver and serves it; its kubeconfig is written below `directory`.
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
            source.apply(Self::fitted(options.object_bytes, change))?;
            count += 1;
            if count.is_multiple_of(64) {
                // What ends the measurement must get its turn.
                tokio::task::yield_now().await;
            }
        }
        Ok(source)
    }

    fn change(&mut self, count: usize, times: &Times) -> Result<(), BenchError> {
        // Made first, so that a burst comes as one.
        let changes: Vec<_> =
            (0..count).map(|_| Self::fitted(self.object_bytes, self.workload.next_change())).collect();
        for change in changes {
            times.made();
            self.apply(change)?;
        }
        Ok(())
    }

    /// With a pod of the size that is asked for.
    fn fitted(object_bytes: Option<usize>, mut change: Change) -> Change {
        if let (Some(bytes), "pods") = (object_bytes, &*change.resource.resource)
            && let Operation::Create(pod) | Operation::Update(pod) | Operation::UpdateStatus(pod) =
                &mut change.operation
        {
            size::fit(pod, bytes);
        }
        change
    }

    fn apply(&self, change: Change) -> Result<(), BenchError> {
        change.apply(&self.sim).map_err(|status| BenchError::Source(status.message))?;
        Ok(())
    }
}
