//! A simulated kube-apiserver and a workload for it.
