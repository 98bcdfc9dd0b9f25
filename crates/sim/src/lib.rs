//! The simulated apiserver, its workload, and the demo and benchmarks that run on them. The tests
//! use them too.
//!
//! A simulator that is more lenient than a real apiserver proves nothing. Therefore the same list
//! and watch tests (`tests/integration/conformance.rs`) run against this simulator and against a
//! real kube-apiserver.

pub mod apiserver;
pub mod workload;
