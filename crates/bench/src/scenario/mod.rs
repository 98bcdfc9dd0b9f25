//! The scenarios: what is done in one run with one server, and which figures that gives.

mod fanout;
mod idle;
mod list;
mod resume_storm;
mod selectors;
mod snapshot;
mod stalled;
mod whole;

use super::{
    BenchError, BenchOptions, Scenario,
    figures::Figures,
    source::{Source, SourceOptions},
    stage::Stage,
};
use kubefan_sim::workload::WorkloadOptions;

/// Pods per node, about.
const PODS_PER_NODE: usize = 50;
const NAMESPACES: usize = 10;
/// Values of the label `app`.
const APPS: usize = 20;
/// Pods where nothing else is asked for.
const OBJECTS: usize = 1_000;
const OBJECTS_OF_A_SNAPSHOT: usize = 10_000;

/// One row of a scenario's table: what it was measured with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Variant {
    /// What is special about it; empty for nothing.
    pub(super) name: &'static str,
    pub(super) subscribers: usize,
    /// Changes per burst, where there are bursts.
    pub(super) batch: Option<usize>,
}

/// A row and its figures of one run.
pub(super) type Sample = (Variant, Figures);

/// What is run against one filled apiserver.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) scenario: Scenario,
    /// Views by node, instead of selectors that do not match.
    views: Option<usize>,
    pub(super) subscribers: usize,
    pub(super) source: SourceOptions,
}

impl Case {
    /// The cases of a scenario.
    pub(super) fn of(scenario: Scenario, options: &BenchOptions) -> Vec<Self> {
        let is_state = matches!(scenario, Scenario::Snapshot | Scenario::List);
        let least = if is_state { OBJECTS_OF_A_SNAPSHOT } else { OBJECTS };
        let objects = options.objects.unwrap_or(least);
        let case = |views: Option<usize>| {
            // A view by node sees something only if there is a pod on the node.
            let objects = objects.max(views.unwrap_or_default());
            let nodes = views.unwrap_or_else(|| objects.div_ceil(PODS_PER_NODE));
            let workload = WorkloadOptions { objects, nodes, namespaces: NAMESPACES, apps: APPS };
            let subscribers = match scenario {
                Scenario::Snapshot | Scenario::List => options.clients,
                _ => views.unwrap_or(options.subscribers),
            };
            let source = SourceOptions { workload, object_bytes: options.object_bytes, seed: options.seed };
            Self { scenario, views, subscribers, source }
        };
        match scenario {
            Scenario::Selectors => {
                [None].into_iter().chain(options.views.iter().copied().map(Some)).map(case).collect()
            }
            _ => vec![case(None)],
        }
    }

    /// Runs it once.
    pub(super) async fn run(&self, stage: &Stage<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
        match (self.scenario, self.views) {
            (Scenario::Fanout, _) => fanout::closed(stage, source).await,
            (Scenario::Paced, _) => fanout::paced(stage, source).await,
            (Scenario::Snapshot, _) => snapshot::run(stage, source).await,
            (Scenario::Selectors, None) => selectors::without_match(stage, source).await,
            (Scenario::Selectors, Some(views)) => selectors::by_node(stage, source, views).await,
            (Scenario::Idle, _) => idle::run(stage, source).await,
            (Scenario::ResumeStorm, _) => resume_storm::run(stage, source).await,
            (Scenario::Stalled, _) => stalled::run(stage, source).await,
            (Scenario::List, _) => list::run(stage, source).await,
        }
    }
}
