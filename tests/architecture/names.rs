//! No two files of a package can be mistaken for each other in an editor's list of files.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Folders whose files may be named like files elsewhere, because the folder says what they are.
const TELLING_FOLDERS: [(&str, &str); 6] = [
    ("config", "a section of the configuration is named like what it configures"),
    ("grpc", "each protocol has the same steps"),
    ("kube", "each protocol has the same steps"),
    ("http1", "each version of HTTP has the same steps"),
    ("http2", "each version of HTTP has the same steps"),
    ("kube_encoding", "a response and its encoding have the same name"),
];

/// Names that several files of a package may have, and what tells the files apart.
const REPEATED: [(&str, &str); 4] = [
    ("lib.rs", "the library of its package"),
    ("main.rs", "the program of its package"),
    ("tests.rs", "its folder"),
    ("error.rs", "the error type of its folder"),
];

/// The names that several of these files of one package have, with their files.
pub(crate) fn repeated(files: &[PathBuf]) -> Vec<String> {
    let is_told_apart = |file: &Path| {
        let is_listed = |name: &str| REPEATED.iter().any(|(repeated, _)| *repeated == name);
        let folder = file.parent().unwrap_or(Path::new(""));
        file.file_name().and_then(|name| name.to_str()).is_some_and(is_listed)
            || TELLING_FOLDERS.iter().any(|(telling, _)| folder.ends_with(telling))
            || file.components().any(|part| part.as_os_str() == "tests")
    };
    let mut by_name: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for file in files.iter().filter(|file| !is_told_apart(file)) {
        by_name.entry(file.file_name()).or_default().push(file.display().to_string());
    }
    by_name.into_values().filter(|files| files.len() > 1).map(|files| files.join(", ")).collect()
}

#[test]
fn a_name_that_two_files_have_is_found() {
    let files = ["src/a/x.rs", "src/b/x.rs", "src/a/error.rs", "src/b/error.rs", "src/grpc/y.rs", "src/kube/y.rs"];
    assert_eq!(repeated(&files.map(PathBuf::from)), ["src/a/x.rs, src/b/x.rs"]);
}
