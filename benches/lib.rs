//! The benchmarks of single steps: `micro` and `instructions`. `naive` and `informers` beside them
//! belong to the package of the binary.
