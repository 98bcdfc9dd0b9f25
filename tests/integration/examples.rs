//! The example programs in `examples/`. Those in Go and Python, with stubs generated as their first
//! lines describe, show the existing pods and every later pod exactly once, even across a broken
//! connection. Their decoders accept every test vector of the contract, so libraries of other
//! languages can read kubefan's compressed data. Those in Rust are in `examples/in_rust.rs`, and
//! the Rust blocks of the pages in `examples/pages.rs`.

pub(crate) mod in_rust;
pub(crate) mod pages;

use std::{
    env, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

use crate::harness::{
    apiserver::ApiServer,
    kubefan::Kubefan,
    link::Link,
    objects::pod,
    process::Process,
    tests,
    tools::{self, run},
    wait,
};

tests! {
    apiserver slow_release: the_go_example_loses_and_repeats_no_event;
    python slow_release: the_python_example_loses_and_repeats_no_event, the_python_decoder_decodes_every_vector;
    local slow_release: the_examples_are_short, the_go_decoder_decodes_every_vector;
}

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
const PROTO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/proto");
const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/proto/kubefan/v1alpha1/testdata");

async fn the_examples_are_short() {
    for (file, most) in [("go/main.go", 39), ("python/watch.py", 39), ("rust/smallest.rs", 19)] {
        let lines = fs::read_to_string(Path::new(DIR).join(file)).unwrap().lines().count();
        assert!(lines <= most, "{file} has {lines} lines");
    }
}

async fn the_go_example_loses_and_repeats_no_event() {
    let program = tools::go_program("example-go", &Path::new(DIR).join("go"));
    check("EVENT_TYPE_ADDED", |server| {
        let mut command = Command::new(&program);
        command.arg(server.to_string());
        command
    })
    .await;
}

async fn the_python_example_loses_and_repeats_no_event() {
    let python = python();
    let stubs = stubs(&python);
    check("LISTED", |server| {
        let mut command = Command::new(&python);
        command.arg(Path::new(DIR).join("python/watch.py")).arg(server.to_string()).env("PYTHONPATH", stubs.path());
        command
    })
    .await;
}

async fn the_go_decoder_decodes_every_vector() {
    run("go", Command::new("go").args(["run", "./decode", VECTORS]).current_dir(Path::new(DIR).join("go")));
}

async fn the_python_decoder_decodes_every_vector() {
    let python = python();
    let stubs = stubs(&python);
    let program = Path::new(DIR).join("python/decode.py");
    run("decode.py", Command::new(&python).arg(program).arg(VECTORS).env("PYTHONPATH", stubs.path()));
}

/// Runs an example against kubefan. One pod exists before it starts and is shown as `first`. One is
/// created while it watches, and one while its connection is cut.
async fn check(first: &str, example: impl FnOnce(SocketAddr) -> Command) {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("example").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    api.create(&pods, &pod("before")).await;
    let kubefan = Kubefan::start(&api, &["--resource", "pods"]).await;
    let link = Link::to(kubefan.grpc_addr).await;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut process = Process::spawn("the example", &mut example(link.addr), &dir.path().join("log"));

    printed(&mut process, &format!("{first} {namespace}/before ")).await;
    api.create(&pods, &pod("during")).await;
    printed(&mut process, &format!("EVENT_TYPE_ADDED {namespace}/during ")).await;
    link.cut();
    printed(&mut process, "RESUMING ").await;
    api.create(&pods, &pod("between")).await;
    link.mend();
    printed(&mut process, &format!("EVENT_TYPE_ADDED {namespace}/between ")).await;
    api.create(&pods, &pod("after")).await;
    printed(&mut process, &format!("EVENT_TYPE_ADDED {namespace}/after ")).await;

    let log = process.log();
    for name in ["before", "during", "between", "after"] {
        assert_eq!(log.matches(&format!(" {namespace}/{name} ")).count(), 1, "{log}");
    }
}

/// Waits until the example has printed a line with this start.
async fn printed(process: &mut Process, start: &str) {
    let outcome = wait::try_until(wait::SOON, || {
        let found = process.log().lines().any(|line| line.starts_with(start)).then_some(true);
        let ended = process.exited().map(|_| false);
        async move { found.or(ended) }
    });
    let found = outcome.await;
    assert_eq!(found, Some(true), "the example does not print \"{start}\" but:\n{}", process.log());
}

/// The generated Python code of the contract, in its own directory.
fn stubs(python: &Path) -> tempfile::TempDir {
    let stubs = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let out = |flag: &str| format!("--{flag}={}", stubs.path().display());
    let mut protoc = Command::new(python);
    protoc.args(["-m", "grpc_tools.protoc", "-I", PROTO, &out("python_out"), &out("grpc_python_out")]);
    run("python", protoc.arg("kubefan/v1alpha1/watch.proto"));
    stubs
}

/// A Python environment with the requirements of the examples.
fn python() -> PathBuf {
    tools::python("example-python", &Path::new(DIR).join("python/requirements.txt"))
}
