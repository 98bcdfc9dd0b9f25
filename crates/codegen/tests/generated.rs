//! Checks that the checked-in generated code matches `proto/`. It is checked in, so that neither
//! kubefan nor a user of its client library compiles a protobuf compiler first.
//!
//! `KUBEFAN_REGENERATE=1 cargo test -p kubefan-codegen` writes it.

use std::{env, error::Error, fs, path::Path};

use prost::Message;

const PROTO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../proto");
const GENERATED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../common/src/generated");

#[test]
fn the_checked_in_code_is_generated_from_proto() -> Result<(), Box<dyn Error>> {
    let watch = "kubefan/v1alpha1/watch.proto";
    let peer = "kubefan/v1alpha1/peer.proto";
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("generated");
    fs::create_dir_all(&dir)?;
    // The reflection service answers from this file. It leaves out the protocol between replicas.
    let public = protox::compile([watch], [PROTO])?;
    fs::write(dir.join("kubefan_descriptor.bin"), public.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_transport(false)
        .server_mod_attribute("kubefan.v1alpha1", "#[cfg(feature = \"server\")]")
        // Object bytes are shared, never copied.
        .bytes(".kubefan.v1alpha1")
        .out_dir(&dir)
        .compile_fds(protox::compile([watch, peer], [PROTO])?)?;
    for file in ["kubefan.v1alpha1.rs", "kubefan_descriptor.bin"] {
        let made = fs::read(dir.join(file))?;
        let kept = Path::new(GENERATED).join(file);
        if env::var_os("KUBEFAN_REGENERATE").is_some() {
            fs::write(&kept, made)?;
        } else {
            let message = "is not what proto/ says: KUBEFAN_REGENERATE=1 cargo test -p kubefan-codegen";
            assert!(fs::read(&kept)? == made, "{} {message}", kept.display());
        }
    }
    Ok(())
}
