//! Plants bugs if a test asks for them: `src/planted.rs` says why.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The simulation is built with the variable, the tests of thread interleavings with the
    // feature.
    for name in ["KUBEFAN_PLANTED_BUGS", "CARGO_FEATURE_PLANTED_BUGS"] {
        println!("cargo:rerun-if-env-changed={name}");
        if env::var_os(name).is_some_and(|value| !value.is_empty()) {
            println!("cargo:rustc-cfg=planted_bugs");
        }
    }
}
