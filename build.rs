//! Generates the gRPC code from `proto/`. protox compiles the files in Rust, so that no protoc has to be installed.

use std::{env, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["kubefan/v1alpha1/watch.proto"], ["proto"])?;
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    // The reflection service answers from this file.
    fs::write(out_dir.join("kubefan_descriptor.bin"), prost_bytes(&descriptors))?;
    if env::var_os("CARGO_FEATURE_SERVER").is_some() {
        watch_service_server();
    }
    tonic_prost_build::configure()
        .build_server(false)
        .build_client(env::var_os("CARGO_FEATURE_CLIENT").is_some())
        .build_transport(false)
        // Object bytes are shared, never copied.
        .bytes(".kubefan.v1alpha1")
        .compile_fds(descriptors)?;
    Ok(())
}

/// The server side of the service, by hand, because a watch answers with frames that are encoded already.
fn watch_service_server() {
    use tonic_prost_build::manual::{Builder, Method, Service};
    const PROST: &str = "tonic_prost::ProstCodec";
    let message = |name: &str| format!("crate::proto::v1alpha1::{name}");
    let method = |route: &str, name: &str, output: &str, codec: &str| {
        let method = Method::builder().name(name).route_name(route).comment(format!("{route}; see the contract."));
        method.input_type(message(&format!("{route}Request"))).output_type(output).codec_path(codec)
    };
    let service = Service::builder()
        .package("kubefan.v1alpha1")
        .name("WatchService")
        .comment("The service of the contract.")
        .method(
            method("Watch", "watch", "crate::server::codec::Frame", "crate::server::codec::FrameCodec")
                .server_streaming()
                .build(),
        )
        .method(method("List", "list", &message("ListResponse"), PROST).server_streaming().build())
        .method(method("Get", "get", &message("GetResponse"), PROST).build())
        .method(method("ListResources", "list_resources", &message("ListResourcesResponse"), PROST).build())
        .build();
    Builder::new().build_client(false).build_transport(false).compile(&[service]);
}

fn prost_bytes(descriptors: &impl prost::Message) -> Vec<u8> {
    descriptors.encode_to_vec()
}
