//! Generates the gRPC code from `proto/`. protox compiles the files in Rust, so that no protoc has to be installed.

use std::{env, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    // What tests plant to see that it is found: src/planted.rs.
    println!("cargo:rustc-check-cfg=cfg(planted_bugs)");
    println!("cargo:rerun-if-env-changed=KUBEFAN_PLANTED_BUGS");
    let set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    // Its tests plant bugs too.
    println!("cargo:rustc-check-cfg=cfg(shuttle)");
    println!("cargo:rerun-if-env-changed=KUBEFAN_SHUTTLE");
    if set("KUBEFAN_SHUTTLE") {
        println!("cargo:rustc-cfg=shuttle");
    }
    if set("KUBEFAN_PLANTED_BUGS") || set("KUBEFAN_SHUTTLE") {
        println!("cargo:rustc-cfg=planted_bugs");
    }
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    // The reflection service answers from this file, and knows nothing of what peers say to each other.
    let public = protox::compile(["kubefan/v1alpha1/watch.proto"], ["proto"])?;
    fs::write(out_dir.join("kubefan_descriptor.bin"), prost_bytes(&public))?;
    let descriptors = protox::compile(["kubefan/v1alpha1/watch.proto", "kubefan/v1alpha1/peer.proto"], ["proto"])?;
    let server = env::var_os("CARGO_FEATURE_SERVER").is_some();
    tonic_prost_build::configure()
        .build_server(server)
        // A server is a client of its peers.
        .build_client(server || env::var_os("CARGO_FEATURE_CLIENT").is_some())
        .build_transport(false)
        // Object bytes are shared, never copied.
        .bytes(".kubefan.v1alpha1")
        .compile_fds(descriptors)?;
    Ok(())
}

fn prost_bytes(descriptors: &impl prost::Message) -> Vec<u8> {
    descriptors.encode_to_vec()
}
