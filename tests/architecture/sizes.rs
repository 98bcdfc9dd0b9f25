//! No source file is too long to be read in one go, and no two files of a package can be mistaken
//! for each other.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Lines of a source file, tests excluded.
const LINES_MAX: usize = 500;

/// Longer files, and why. Entries are removed, not added.
pub(crate) const LONG: &[(&str, &str)] = &[];

/// Folders whose files may be named like files elsewhere, because the folder says what they are.
pub(crate) const TELLING_FOLDERS: &[(&str, &str)] = &[
    ("config", "a section of the configuration is named like what it configures"),
    ("grpc", "each protocol has the same steps"),
    ("kube", "each protocol has the same steps"),
    ("http1", "each version of HTTP has the same steps"),
    ("http2", "each version of HTTP has the same steps"),
    ("kube_encoding", "a response and its encoding have the same name"),
];

/// Other names that several files of a package have, and what tells the files apart. Entries are
/// removed, not added.
pub(crate) const REPEATED: &[(&str, &str)] = &[
    ("error.rs", "the error type of its folder"),
    ("identity.rs", "`peer` identifies a cache, `upstream/client` a cluster"),
    ("tls.rs", "`peer` is mutual TLS between replicas, `server/transport` is TLS for clients"),
];

/// The files that are too long, and the entries of `allowed` that are no longer needed.
pub(crate) fn long_files(lines: &[(PathBuf, usize)], allowed: &[(&str, &str)]) -> Vec<String> {
    let is_long = |(file, lines): &&(PathBuf, usize)| *lines > LINES_MAX && !is_test(file);
    let long: Vec<&(PathBuf, usize)> = lines.iter().filter(is_long).collect();
    let is_allowed = |file: &Path| allowed.iter().any(|(name, _)| Path::new(name) == file);
    let found = long.iter().filter(|(file, _)| !is_allowed(file));
    let unneeded = allowed.iter().filter(|(name, _)| !long.iter().any(|(file, _)| file == Path::new(name)));
    found
        .map(|(file, lines)| format!("{}: {lines} lines", file.display()))
        .chain(unneeded.map(|(name, _)| format!("{name}: no longer too long; remove it from the list")))
        .collect()
}

/// The file names that occur more than once in one package. `mod.rs` and the like are told apart by
/// their folders, and so are files in the folders of `telling`.
pub(crate) fn repeated_names(
    package: &str,
    files: &[PathBuf],
    telling: &[(&str, &str)],
    allowed: &[(&str, &str)],
) -> Vec<String> {
    let mut by_name: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
    for file in files {
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let folder = file.parent().unwrap_or(Path::new(""));
        let is_told_apart = ["mod.rs", "lib.rs", "main.rs", "tests.rs"].contains(&name)
            || telling.iter().any(|(telling, _)| folder.ends_with(telling))
            || is_test(file);
        if !is_told_apart {
            by_name.entry(name).or_default().push(file);
        }
    }
    let is_allowed = |name: &str| allowed.iter().any(|(allowed, _)| *allowed == name);
    let repeated = by_name.into_iter().filter(|(name, files)| files.len() > 1 && !is_allowed(name));
    repeated
        .map(|(name, files)| {
            let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            format!("{package}: {name}: {}", files.join(", "))
        })
        .collect()
}

/// Whether a source file is compiled only for tests, by its name or folder.
fn is_test(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_is_found_unless_it_is_listed_or_a_test() {
        let lines = |file: &str, lines| (PathBuf::from(file), lines);
        let files = [lines("src/a.rs", 501), lines("src/b.rs", 500), lines("src/c/tests.rs", 900), lines("d.rs", 600)];
        assert_eq!(long_files(&files, &[("d.rs", "a reason")]), ["src/a.rs: 501 lines"]);
        assert_eq!(
            long_files(&files[1..], &[("d.rs", "a reason"), ("src/b.rs", "a reason")]),
            ["src/b.rs: no longer too long; remove it from the list"]
        );
    }

    #[test]
    fn a_name_that_two_files_have_is_found() {
        let files = [
            "src/a/x.rs",
            "src/b/x.rs",
            "src/a/mod.rs",
            "src/b/mod.rs",
            "src/b/y.rs",
            "src/c/y.rs",
            "src/a/z.rs",
            "src/t/z.rs",
        ];
        let files = files.map(PathBuf::from);
        assert_eq!(
            repeated_names("p", &files, &[("t", "a reason")], &[("y.rs", "a reason")]),
            ["p: x.rs: src/a/x.rs, src/b/x.rs"]
        );
    }
}
