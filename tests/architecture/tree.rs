//! The files of the repository and its packages.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The folders of the packages with a `src/`, relative to the repository.
pub(crate) fn packages(root: &Path) -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::new(), PathBuf::from("examples/rust")];
    let entries = fs::read_dir(root.join("crates")).into_iter().flatten().flatten();
    folders.extend(entries.map(|entry| Path::new("crates").join(entry.file_name())));
    folders.retain(|folder| root.join(folder).join("src").is_dir());
    folders.sort();
    folders
}

/// The files below `folder` whose names end in `.extension`, relative to `root` and sorted, without
/// those that a build, a test or a generator has made.
pub(crate) fn files(root: &Path, folder: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![root.join(folder)];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let is_made = ["target", ".git", "node_modules", "artifacts", "generated"].iter().any(|made| name == *made);
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
