//! The files of the repository and its packages.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The repository under test. `KUBEFAN_ARCHITECTURE_ROOT` names another one, to compare with.
pub(crate) fn root() -> PathBuf {
    std::env::var_os("KUBEFAN_ARCHITECTURE_ROOT").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// A package of the workspace.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Relative to the repository.
    pub(crate) folder: PathBuf,
    /// The packages of this workspace that it depends on, those of its tests excluded.
    pub(crate) dependencies: Vec<String>,
}

/// The packages: the root, those in `crates/`, and the example programs.
pub(crate) fn packages(root: &Path) -> Vec<Package> {
    let mut folders = vec![PathBuf::new(), PathBuf::from("examples/rust")];
    if let Ok(entries) = fs::read_dir(root.join("crates")) {
        folders.extend(entries.flatten().map(|entry| Path::new("crates").join(entry.file_name())));
    }
    folders.sort();
    let read = |folder: PathBuf| {
        let manifest = fs::read_to_string(root.join(&folder).join("Cargo.toml")).ok()?;
        let (name, dependencies) = manifest_facts(&manifest)?;
        Some(Package { name, folder, dependencies })
    };
    folders.into_iter().filter_map(read).collect()
}

/// The name of a package and its dependencies on packages of this workspace.
fn manifest_facts(manifest: &str) -> Option<(String, Vec<String>)> {
    let (mut table, mut name, mut dependencies) = ("", None, Vec::new());
    for line in manifest.lines() {
        let key = line.split(['=', '.']).next().unwrap_or_default().trim();
        match line.strip_prefix('[') {
            Some(header) => table = header.trim_end_matches(']'),
            None if table == "package" && key == "name" => {
                name = line.split('"').nth(1).map(str::to_owned);
            }
            None if table == "dependencies" && key.starts_with("kubefan-") => dependencies.push(key.to_owned()),
            None => {}
        }
    }
    Some((name?, dependencies))
}

/// The files below `folder` whose names end in `.extension`, relative to `root` and sorted, without
/// those that a build or a test has made.
pub(crate) fn files(root: &Path, folder: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![root.join(folder)];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let is_made = ["target", ".git", "node_modules", "artifacts"].iter().any(|made| name == *made);
            if path.is_dir() && !is_made {
                waiting.push(path);
            } else if path.extension().is_some_and(|found| found == extension)
                && let Ok(relative) = path.strip_prefix(root)
            {
                found.push(relative.to_owned());
            }
        }
    }
    found.sort();
    found
}

/// The Rust sources of all packages, with their tests and benchmarks.
pub(crate) fn rust_files(root: &Path) -> Vec<PathBuf> {
    let folders = ["src", "crates", "tests", "benches", "fuzz", "examples"];
    let found = folders.iter().flat_map(|folder| files(root, folder, "rs"));
    found.filter(|file| !is_generated(file)).collect()
}

/// Whether `file` is made by a program from `proto/`.
pub(crate) fn is_generated(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == "generated")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_names_the_package_and_its_dependencies() {
        let manifest = "[package]\nname = \"a\"\n[dependencies]\nkubefan-b.workspace = true\nserde = \"1\"\n\
                        kubefan-c = { path = \"c\" }\n[dev-dependencies]\nkubefan-d.workspace = true\n";
        let expected = ("a".to_owned(), vec!["kubefan-b".to_owned(), "kubefan-c".to_owned()]);
        assert_eq!(manifest_facts(manifest), Some(expected));
    }
}
