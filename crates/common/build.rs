//! Plants bugs if a test asks for them: `src/planted.rs` says why.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The tests of thread interleavings plant bugs too.
    for name in ["KUBEFAN_PLANTED_BUGS", "KUBEFAN_SHUTTLE"] {
        println!("cargo:rerun-if-env-changed={name}");
        if env::var_os(name).is_some_and(|value| !value.is_empty()) {
            println!("cargo:rustc-cfg=planted_bugs");
        }
    }
}
