//! The scenarios: each drives one run of one server and returns its figures.

mod access;
mod agents;
mod fanout;
mod full_state;
mod hostile_clients;
mod idle;
mod list;
mod resume_storm;
mod sample;
mod selectors;
mod snapshot;
mod stalled;

use super::{
    BenchError, BenchOptions, Scenario,
    hostile::{all, attack::Attack},
    server_process::Run,
    source::Source,
    source_options::SourceOptions,
};
use kubefan_sim::workload::WorkloadOptions;
pub(super) use sample::{Sample, Variant};
use selectors::APPS;

/// Approximate number of pods per node.
const PODS_PER_NODE: usize = 50;
const NAMESPACES: usize = 10;
/// Default number of pods.
const OBJECTS: usize = 1_000;
const OBJECTS_OF_A_SNAPSHOT: usize = 10_000;

/// A measurement against one filled apiserver.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) scenario: Scenario,
    /// Number of views by node; `None` for selectors without a match.
    views: Option<usize>,
    /// The attack of `hostile`.
    attack: Option<&'static Attack>,
    pub(super) subscribers: usize,
    pub(super) source: SourceOptions,
}

impl Case {
    /// The cases of a scenario.
    pub(super) fn of(scenario: Scenario, options: &BenchOptions) -> Vec<Self> {
        let is_state = matches!(scenario, Scenario::Snapshot | Scenario::List | Scenario::Agents | Scenario::Access);
        let least = if is_state { OBJECTS_OF_A_SNAPSHOT } else { OBJECTS };
        let sizes = if options.objects.is_empty() { &[least][..] } else { &options.objects };
        sizes.iter().flat_map(|objects| Self::with(scenario, options, *objects)).collect()
    }

    /// The cases of a scenario with this number of pods.
    fn with(scenario: Scenario, options: &BenchOptions, objects: usize) -> Vec<Self> {
        let case = |views: Option<usize>| {
            // A view by node receives events only if the node has a pod.
            let objects = objects.max(views.unwrap_or_default());
            let nodes = match scenario {
                Scenario::Agents | Scenario::Access => options.nodes,
                _ => views.unwrap_or_else(|| objects.div_ceil(PODS_PER_NODE)),
            };
            let workload = WorkloadOptions { objects, nodes, namespaces: NAMESPACES, apps: APPS };
            let subscribers = match scenario {
                Scenario::Snapshot | Scenario::List => options.clients,
                Scenario::Hostile => options.honest,
                Scenario::Agents => options.nodes,
                Scenario::Access => 1,
                _ => views.unwrap_or(options.subscribers),
            };
            let source = SourceOptions { workload, object_bytes: options.object_bytes, seed: options.seed };
            Self { scenario, views, attack: None, subscribers, source }
        };
        match scenario {
            Scenario::Selectors => {
                [None].into_iter().chain(options.views.iter().copied().map(Some)).map(case).collect()
            }
            Scenario::Hostile => {
                let named = options.attacks.iter().copied();
                let attacks: Vec<_> = if options.attacks.is_empty() { all().collect() } else { named.collect() };
                attacks.into_iter().map(|attack| Self { attack: Some(attack), ..case(None) }).collect()
            }
            _ => vec![case(None)],
        }
    }

    /// Measures one server once.
    pub(super) async fn measure(&self, run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
        if let Some(attack) = self.attack {
            return hostile_clients::measure(run, source, attack).await;
        }
        match (self.scenario, self.views) {
            (Scenario::Fanout, _) => fanout::closed_loop(run, source).await,
            (Scenario::Paced, _) => fanout::paced(run, source).await,
            (Scenario::Snapshot, _) => snapshot::measure(run, source).await,
            (Scenario::Selectors, None) => selectors::without_match(run, source).await,
            (Scenario::Selectors, Some(views)) => selectors::by_node(run, source, views).await,
            (Scenario::Idle, _) => idle::measure(run, source).await,
            (Scenario::ResumeStorm, _) => resume_storm::measure(run, source).await,
            (Scenario::Stalled, _) => stalled::measure(run, source).await,
            (Scenario::List, _) => list::measure(run, source).await,
            (Scenario::Agents, _) => agents::measure(run, source).await,
            (Scenario::Access, _) => access::measure(run, source).await,
            // Has an attack.
            (Scenario::Hostile, _) => Ok(Vec::new()),
        }
    }
}
