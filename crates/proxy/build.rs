//! Replaces the locks of the wake-up path by shuttle's for the tests of thread interleavings:
//! `src/fanout/sync.rs`.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=KUBEFAN_SHUTTLE");
    if env::var_os("KUBEFAN_SHUTTLE").is_some_and(|value| !value.is_empty()) {
        println!("cargo:rustc-cfg=shuttle");
    }
}
