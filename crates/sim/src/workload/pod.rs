//! The fields of a pod that the workload stores.

/// Values of the label `tier`.
pub(super) const TIERS: [&str; 4] = ["frontend", "backend", "cache", "batch"];

/// The fields that vary between pods and over time.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) serial: u64,
    pub(super) namespace: usize,
    pub(super) node: usize,
    /// The app in the pod's name, which never changes, and the app in its label.
    pub(super) born_app: usize,
    pub(super) app: usize,
    pub(super) tier: usize,
    pub(super) canary: bool,
    pub(super) containers: usize,
    /// Alternates with each status change: a restart makes the pod unready, the next change ready.
    pub(super) ready: bool,
    pub(super) restarts: u64,
    pub(super) revision: u64,
    /// Times in seconds of the workload's clock.
    pub(super) created: u64,
    pub(super) changed: u64,
}
