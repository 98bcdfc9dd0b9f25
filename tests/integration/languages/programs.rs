//! Builds the programs of the languages. A language whose tools are not installed is left out, by
//! name.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

use super::script;
use crate::harness::{assets, tools};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// The sources of the TypeScript client and its runner.
const TYPESCRIPT: [&str; 6] =
    ["package.json", "package-lock.json", "tsconfig.json", "src", "tests/conformance", "tests/measure"];

/// A language and its program, or why it is left out.
pub(super) type Found = (&'static str, Result<Command, String>);

/// Builds the runners of all languages.
pub(super) fn build() -> Vec<Found> {
    let rust = Command::new(tools::rust_example("conformance"));
    let requirements = Path::new(script::DIR).join("requirements.txt");
    vec![
        ("rust", Ok(rust)),
        ("go", go("languages-go", "conformance")),
        ("python", python("languages-python", &requirements, "tests.conformance.runner")),
        ("typescript", typescript("tests/conformance/runner.js", &[])),
    ]
}

/// The programs of a language whose cost is measured. They are the same if a program only loads the
/// code that it needs.
pub(super) struct Measured {
    pub(super) straight: Command,
    pub(super) over_kubefan: Command,
}

/// Builds the programs whose cost is measured, those in Rust optimized, as the others always are.
pub(super) fn build_measured() -> Vec<(&'static str, Result<Measured, String>)> {
    let both =
        |program: &dyn Fn() -> Result<Command, String>| Ok(Measured { straight: program()?, over_kubefan: program()? });
    let rust = tools::optimized_rust_example("kubefan-client", "measure");
    let requirements = Path::new(ROOT).join("clients/python/tests/measure/requirements.txt");
    vec![
        ("rust", both(&|| Ok(Command::new(&rust)))),
        ("go", measured_go()),
        ("python", both(&|| python("measure-python", &requirements, "tests.measure.reader"))),
        ("typescript", both(&|| typescript("tests/measure/reader.js", &["--expose-gc"]))),
    ]
}

/// client-go has the types and clients of all groups in each program that uses one of them.
fn measured_go() -> Result<Measured, String> {
    Ok(Measured {
        straight: go("measure-go-straight", "measure/straight")?,
        over_kubefan: go("measure-go", "measure/overkubefan")?,
    })
}

fn go(name: &str, program: &str) -> Result<Command, String> {
    tools::installed("go", &["version"])?;
    let dir = Path::new(ROOT).join("clients/go/internal").join(program);
    Ok(Command::new(tools::go_program(name, &dir)))
}

fn python(environment: &str, requirements: &Path, module: &str) -> Result<Command, String> {
    tools::installed("python3", &["-c", "import venv, ensurepip"])?;
    let mut runner = Command::new(tools::python(environment, requirements));
    let client = Path::new(ROOT).join("clients/python");
    // No compiled files in the source tree.
    let paths = std::env::join_paths([client.clone(), client.join("src")]).expect("the paths have no colon");
    runner.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONPATH", paths);
    runner.args(["-m", module]);
    Ok(runner)
}

/// Compiles a copy of the client: its packages do not belong into the source tree.
fn typescript(program: &str, flags: &[&str]) -> Result<Command, String> {
    static COMPILING: Mutex<()> = Mutex::new(());
    let _alone = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
    tools::installed("npm", &["--version"])?;
    let dir = assets::target_dir().join("test-assets/languages-typescript");
    let client = Path::new(ROOT).join("clients/typescript");
    let mut runner = Command::new("node");
    runner.args(flags).arg(dir.join("build").join(program));
    let mut sources = Vec::new();
    for part in TYPESCRIPT {
        files(&client.join(part), &mut sources);
    }
    sources.sort();
    let mut text = String::new();
    for source in &sources {
        text += &format!("{}\n{}", source.display(), fs::read_to_string(source).expect("a source is text"));
    }
    let compiled = dir.join("compiled");
    if fs::read_to_string(&compiled).is_ok_and(|compiled| compiled == text) {
        return Ok(runner);
    }
    for part in ["src", "tests", "build"] {
        let _ = fs::remove_dir_all(dir.join(part));
    }
    for source in &sources {
        let copy = dir.join(source.strip_prefix(&client).expect("it is a file of the client"));
        fs::create_dir_all(copy.parent().expect("it has a parent")).expect("the directory is created");
        fs::copy(source, copy).expect("the file is copied");
    }
    let lock = fs::read_to_string(dir.join("package-lock.json")).expect("the client has a lock file");
    let stamp = dir.join("installed");
    if !fs::read_to_string(&stamp).is_ok_and(|installed| installed == lock) {
        tools::run("npm", Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(&dir));
        fs::write(stamp, lock).expect("the stamp is written");
    }
    let tsc = dir.join("node_modules/.bin/tsc");
    tools::run("tsc", Command::new(tsc).args(["--project", "tsconfig.json"]).current_dir(&dir));
    fs::write(compiled, text).expect("the stamp is written");
    Ok(runner)
}

/// The files at a path.
fn files(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        return found.push(path.to_owned());
    }
    for entry in fs::read_dir(path).expect("the directory is read") {
        files(&entry.expect("an entry is read").path(), found);
    }
}
