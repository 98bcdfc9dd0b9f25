//! Tells the simulation whether bugs are planted: `crates/common/src/planted.rs` says why.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=KUBEFAN_PLANTED_BUGS");
    if env::var_os("KUBEFAN_PLANTED_BUGS").is_some_and(|value| !value.is_empty()) {
        println!("cargo:rustc-cfg=planted_bugs");
    }
}
