//! How the runners are built. A language whose tools are not installed is left out, by name.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::script;
use crate::harness::{assets, tools};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// What the TypeScript client and its runner are compiled from.
const TYPESCRIPT: [&str; 5] = ["package.json", "package-lock.json", "tsconfig.json", "src", "tests/conformance"];

/// A language and its runner, or why it is left out.
pub(super) type Found = (&'static str, Result<Command, String>);

/// Builds the runners of all languages.
pub(super) fn build() -> Vec<Found> {
    let rust = Command::new(tools::rust_example("conformance"));
    vec![("rust", Ok(rust)), ("go", go()), ("python", python()), ("typescript", typescript())]
}

fn go() -> Result<Command, String> {
    installed("go", &["version"])?;
    Ok(Command::new(tools::go_program("languages-go", &Path::new(ROOT).join("clients/go/internal/conformance"))))
}

fn python() -> Result<Command, String> {
    installed("python3", &["-c", "import venv, ensurepip"])?;
    let requirements = Path::new(script::DIR).join("requirements.txt");
    let mut runner = Command::new(tools::python("languages-python", &requirements));
    let client = Path::new(ROOT).join("clients/python");
    // No compiled files in the source tree.
    runner.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONPATH", client.join("src"));
    runner.arg(client.join("tests/conformance/runner.py"));
    Ok(runner)
}

/// Compiles a copy of the client: its packages do not belong into the source tree.
fn typescript() -> Result<Command, String> {
    installed("npm", &["--version"])?;
    let dir = assets::target_dir().join("test-assets/languages-typescript");
    let client = Path::new(ROOT).join("clients/typescript");
    for part in ["src", "tests", "build"] {
        let _ = fs::remove_dir_all(dir.join(part));
    }
    for part in TYPESCRIPT {
        copy(&client.join(part), &dir.join(part));
    }
    let lock = fs::read_to_string(dir.join("package-lock.json")).expect("the client has a lock file");
    let stamp = dir.join("installed");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == lock) {
        // The packages are there.
    } else {
        tools::run("npm", Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(&dir));
        fs::write(stamp, lock).expect("the stamp is written");
    }
    let tsc = dir.join("node_modules/.bin/tsc");
    tools::run("tsc", Command::new(tsc).args(["--project", "tsconfig.json"]).current_dir(&dir));
    let mut runner = Command::new("node");
    runner.arg(dir.join("build/tests/conformance/runner.js"));
    Ok(runner)
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).expect("the directory is created");
        let entries: Vec<PathBuf> =
            fs::read_dir(from).expect("the directory is read").map(|entry| entry.expect("an entry").path()).collect();
        for entry in entries {
            copy(&entry, &to.join(entry.file_name().expect("it has a name")));
        }
    } else {
        fs::create_dir_all(to.parent().expect("it has a parent")).expect("the directory is created");
        fs::copy(from, to).expect("the file is copied");
    }
}

fn installed(program: &str, args: &[&str]) -> Result<(), String> {
    let ran = Command::new(program).args(args).output();
    let is_there = ran.is_ok_and(|output| output.status.success());
    is_there.then_some(()).ok_or(format!("{program} is not installed"))
}
