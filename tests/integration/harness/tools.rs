//! Programs that a test runs: Go programs built from source, the examples in Rust, a Python
//! environment with the packages of a requirements file, and Java classes with their jars. Also
//! files that are only in a Go module.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

use super::assets;

/// Runs a tool until it exits. Panics with its output if it fails.
pub(crate) fn run(name: &str, command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("this test needs {name}: {error}"));
    let printed = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{name}: {}{}", printed(&output.stdout), printed(&output.stderr));
}

/// Whether a program runs with these arguments. The error says that it is not installed.
pub(crate) fn installed(program: &str, args: &[&str]) -> Result<(), String> {
    let ran = Command::new(program).args(args).output();
    let is_there = ran.is_ok_and(|output| output.status.success());
    is_there.then_some(()).ok_or(format!("{program} is not installed"))
}

/// Builds the Go program in `dir` and stores it as `name`. Only one build runs at a time.
pub(crate) fn go_program(name: &str, dir: &Path) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _lock = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let program = assets::target_dir().join("test-assets").join(name);
    run("go", Command::new("go").args(["build", "-o"]).arg(&program).arg(".").current_dir(dir));
    program
}

/// The directory with the files of the module `path`, at the version that the go.mod in `dir`
/// requires. Go compares them with the go.sum beside it. Nothing is built.
pub(crate) fn go_module(dir: &Path, path: &str) -> PathBuf {
    let text = fs::read_to_string(dir.join("go.mod")).expect("the directory has a go.mod");
    let version = text.lines().find_map(|line| line.trim().strip_prefix(path)?.strip_prefix(' '));
    let version = version.unwrap_or_else(|| panic!("{}/go.mod does not require {path}", dir.display()));
    let mut go = Command::new("go");
    let output = go.args(["mod", "download", "-json", &format!("{path}@{version}")]).current_dir(dir).output();
    let output = output.unwrap_or_else(|error| panic!("this test needs go: {error}"));
    let printed = String::from_utf8_lossy(&output.stdout);
    let answer: serde_json::Value =
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert!(output.status.success(), "{answer}");
    answer["Dir"].as_str().expect("go names the directory").into()
}

/// Builds the examples of all packages, and returns the one called `name`. It selects the same
/// packages as `cargo test`, so their dependencies are compiled already.
pub(crate) fn rust_example(name: &str) -> PathBuf {
    build_example(&["--examples"]);
    assets::target_dir().join("debug/examples").join(name)
}

/// Builds an example of a package with optimization. The first time that takes minutes.
pub(crate) fn optimized_rust_example(package: &str, name: &str) -> PathBuf {
    build_example(&["--release", "--package", package, "--example", name]);
    assets::target_dir().join("release/examples").join(name)
}

/// Only one build runs at a time.
fn build_example(args: &[&str]) {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _lock = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--locked"]).args(args).arg("--target-dir").arg(assets::target_dir());
    // `cargo test` sets these for the test. ring's build script names some of them, so cargo would
    // compile ring again, and everything above it, here and at the next `cargo test`.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    run("cargo", cargo.current_dir(env!("CARGO_MANIFEST_DIR")));
}

/// The Python interpreter of the virtual environment `name`, with the packages of the file
/// `requirements`. The environment is rebuilt whenever that file changes.
pub(crate) fn python(name: &str, requirements: &Path) -> PathBuf {
    // One at a time: two would install into the same directory.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _lock = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let text = fs::read_to_string(requirements).expect("the requirements file exists");
    let environment = assets::target_dir().join("test-assets").join(name);
    let python = environment.join("bin/python");
    let requirements_stamp = environment.join("requirements-stamp");
    if fs::read_to_string(&requirements_stamp).is_ok_and(|requirements_stamp| requirements_stamp == text) {
        return python;
    }
    run("python3", Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment));
    run("pip", Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(requirements));
    fs::write(requirements_stamp, text).expect("the stamp file is written");
    python
}

/// Compiles `source` in `dir` with the jars that the pom.xml beside it requires, and returns the
/// class path. Both are stored as `name`, and made again whenever one of the files changes.
pub(crate) fn java_classes(name: &str, dir: &Path, source: &str) -> OsString {
    static COMPILING: Mutex<()> = Mutex::new(());
    let _lock = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
    let read = |name: &str| fs::read_to_string(dir.join(name)).expect("the file exists");
    let text = read("pom.xml") + &read(source);
    let target = assets::target_dir().join("test-assets").join(name);
    let jars = target.join("jars");
    let classes = target.join("classes");
    let class_path = [classes.as_os_str(), jars.join("*").as_os_str()].join(":".as_ref());
    let stamp = target.join("stamp");
    if fs::read_to_string(&stamp).is_ok_and(|stamp| stamp == text) {
        return class_path;
    }
    let _ = fs::remove_dir_all(&target);
    fs::create_dir_all(&target).expect("the directory is created");
    // Maven would write beside its pom.xml.
    fs::copy(dir.join("pom.xml"), target.join("pom.xml")).expect("the file is copied");
    let mut maven = Command::new("mvn");
    let output = format!("-DoutputDirectory={}", jars.display());
    run("mvn", maven.args(["--quiet", "--batch-mode", "dependency:copy-dependencies", &output]).current_dir(&target));
    let mut javac = Command::new("javac");
    javac.arg("-d").arg(&classes).arg("-cp").arg(&class_path).arg(dir.join(source));
    run("javac", &mut javac);
    fs::write(stamp, text).expect("the stamp is written");
    class_path
}
