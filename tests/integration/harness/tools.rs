//! Programs that a test runs: Go programs built from source, the examples in Rust, and a Python
//! environment with the packages of a requirements file.

use std::{
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

/// Builds the Go program in `dir` and stores it as `name`. Only one build runs at a time.
pub(crate) fn go_program(name: &str, dir: &Path) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _lock = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let program = assets::target_dir().join("test-assets").join(name);
    run("go", Command::new("go").args(["build", "-o"]).arg(&program).arg(".").current_dir(dir));
    program
}

/// Builds the programs in `examples/rust`, and returns the one called `name`. Only one build runs
/// at a time. It selects the same packages as `cargo test`, so their dependencies are compiled
/// already.
pub(crate) fn rust_example(name: &str) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _lock = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--locked", "--examples", "--target-dir"]).arg(assets::target_dir());
    run("cargo", cargo.current_dir(env!("CARGO_MANIFEST_DIR")));
    assets::target_dir().join("debug/examples").join(name)
}

/// The Python interpreter of the virtual environment `name`, with the packages of the file
/// `requirements`. The environment is rebuilt whenever that file changes.
pub(crate) fn python(name: &str, requirements: &Path) -> PathBuf {
    // One at a time: two would install into the same directory.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _lock = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let text = fs::read_to_string(requirements).expect("the requirements file exists");
    let environment = assets::target_dir().join("test-assets").join(name);
    let (python, requirements_stamp) = (environment.join("bin/python"), environment.join("requirements-stamp"));
    if fs::read_to_string(&requirements_stamp).is_ok_and(|requirements_stamp| requirements_stamp == text) {
        return python;
    }
    run("python3", Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment));
    run("pip", Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(requirements));
    fs::write(requirements_stamp, text).expect("the stamp file is written");
    python
}
