//! Programs of other languages: Go ones built as the apiserver itself is, and a Python with what a list of requirements names.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

use super::assets;

/// Runs a tool to its end, and fails with what it printed.
pub(crate) fn run(name: &str, command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{name} is needed for this test: {error}"));
    let printed = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{name}: {}{}", printed(&output.stdout), printed(&output.stderr));
}

/// Builds the Go program in `dir`, one at a time; it is kept under `name`.
pub(crate) fn go_program(name: &str, dir: &Path) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _alone = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let program = assets::target_dir().join("test-assets").join(name);
    run("go", Command::new("go").args(["build", "-o"]).arg(&program).arg(".").current_dir(dir));
    program
}

/// A Python with what the file `requirements` lists, in the environment `name`, which is made once for each such list.
pub(crate) fn python(name: &str, requirements: &Path) -> PathBuf {
    // One at a time: two would install into the same place.
    static MAKING: Mutex<()> = Mutex::new(());
    let _alone = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let text = fs::read_to_string(requirements).expect("the requirements are there");
    let environment = assets::target_dir().join("test-assets").join(name);
    let (python, made_for) = (environment.join("bin/python"), environment.join("made-for"));
    if fs::read_to_string(&made_for).is_ok_and(|made_for| made_for == text) {
        return python;
    }
    run("python3", Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment));
    run("pip", Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(requirements));
    fs::write(made_for, text).expect("a mark is left");
    python
}
