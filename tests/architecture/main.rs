//! Checks what the pages promise of the sources and the compiler does not check: no cycles within a
//! package, files with names of their own, narrow comments, links that resolve, patches that apply.
//! It reads the sources as text and builds nothing. Packages need no check of their layers: each
//! `Cargo.toml` names the lower ones.
//!
//! Each test lists all its findings at once.

mod comments;
mod cycles;
mod documents;
mod names;
mod patches;
mod tree;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn exists(path: &Path) -> bool {
    root().join(path).exists()
}

/// The files of the repository, by their paths, with their texts.
type Texts = BTreeMap<PathBuf, String>;

fn read(extension: &str) -> Texts {
    let text = |file: PathBuf| fs::read_to_string(root().join(&file)).ok().map(|text| (file, text));
    tree::files(root(), "", extension).into_iter().filter_map(text).collect()
}

/// The sources of each package, by their paths below its `src/`.
fn packages(sources: &Texts) -> impl Iterator<Item = (PathBuf, Vec<(&Path, &str)>)> {
    tree::packages(root()).into_iter().map(|folder| folder.join("src")).map(|src| {
        let files = sources.iter().filter_map(|(file, text)| Some((file.strip_prefix(&src).ok()?, text.as_str())));
        let files = files.collect();
        (src, files)
    })
}

/// Fails with all findings, if there are any.
#[track_caller]
fn assert_none(what: &str, found: impl IntoIterator<Item = String>) {
    let found = Vec::from_iter(found);
    assert!(found.is_empty(), "{what}: {}\n\n  {}\n", found.len(), found.join("\n  "));
}

#[test]
fn no_files_of_a_package_use_each_other_in_a_circle() {
    let sources = read("rs");
    let found = packages(&sources).flat_map(|(src, files)| {
        cycles::cycles(files).into_iter().map(move |edge| format!("{}: {edge}", src.display()))
    });
    assert_none("uses that are part of a cycle", found);
}

#[test]
fn no_two_files_of_a_package_have_the_same_name() {
    let sources = read("rs");
    let found = packages(&sources).flat_map(|(src, files)| {
        let files: Vec<PathBuf> = files.into_iter().map(|(file, _)| src.join(file)).collect();
        names::repeated(&files)
    });
    assert_none("repeated file names", found);
}

#[test]
fn comments_fit_into_100_columns() {
    let found = read("rs").into_iter().flat_map(|(file, text)| {
        let line = move |(line, columns)| format!("{}:{line}: {columns} columns", file.display());
        comments::wide(&text).into_iter().map(line)
    });
    assert_none("comment lines that are too wide", found);
}

#[test]
fn every_link_resolves() {
    assert_none("broken links", documents::broken_links(&read("md"), &exists));
}

#[test]
fn the_book_has_every_page() {
    assert_none("pages that docs/SUMMARY.md does not name", documents::unreachable_pages(&read("md")));
}

#[test]
fn the_places_in_contributing_exist() {
    let contributing = &read("md")[Path::new("CONTRIBUTING.md")];
    let sources = read("rs");
    let exists = |place: &str| match place.split_once("::") {
        Some((path, function)) => {
            sources.get(Path::new(path)).is_some_and(|text| text.contains(&format!("fn {function}(")))
        }
        None => exists(Path::new(place)),
    };
    assert_none("places that do not exist", documents::missing_places(contributing, &exists));
}

#[test]
fn the_glossary_is_short() {
    let glossary = &read("md")[Path::new("docs/glossary.md")];
    assert_none("the glossary", documents::long_glossary(glossary));
}

#[test]
fn the_patches_with_planted_bugs_apply() {
    assert_none("patches that do not apply", patches::misfits(root()));
}

#[test]
fn the_client_library_has_no_planted_bugs() {
    let of_client = |(file, text): &(PathBuf, String)| file.starts_with("crates/client") && text.contains("planted");
    let found = read("rs").into_iter().filter(of_client).map(|(file, _)| file.display().to_string());
    assert_none("files with planted bugs", found);
}
