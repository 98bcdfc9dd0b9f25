//! The simulated apiserver and its workload, shared by the demo, the tests and the benchmarks.
//!
//! A simulator that is kinder than the real thing proves nothing: the same tests of list and watch behaviour
//! (`tests/integration/conformance.rs`) run against this one and against a real kube-apiserver.

pub mod apiserver;
pub mod workload;
