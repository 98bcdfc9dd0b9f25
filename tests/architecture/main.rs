//! Checks that the sources have the shape that CONTRIBUTING.md and docs/architecture.md promise:
//! layers, no cycles, files with names of their own, links that resolve, patches that apply.
//! It reads the sources as text and builds nothing, so it takes about a second.
//!
//! Each test lists all its findings at once. `figures` (`--ignored --nocapture figures`) prints the
//! counts of all.

mod cycles;
mod documents;
mod layers;
mod modules;
mod names;
mod patches;
mod prose;
mod rust;
mod tree;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use modules::Crate;
use rust::Source;
use tree::Package;

/// The workspace as text.
struct Workspace {
    root: PathBuf,
    packages: Vec<Package>,
    /// All Rust files, with their texts.
    sources: Vec<(PathBuf, String, Source)>,
    documents: BTreeMap<PathBuf, String>,
}

impl Workspace {
    fn read() -> Self {
        let root = tree::root();
        let text = |file: &Path| fs::read_to_string(root.join(file)).unwrap_or_default();
        let source = |file: PathBuf| {
            let text = text(&file);
            let source = rust::split(&text);
            (file, text, source)
        };
        let sources = tree::rust_files(&root).into_iter().map(source).collect();
        let documents = tree::files(&root, "", "md").into_iter().map(|file| (file.clone(), text(&file))).collect();
        Self { packages: tree::packages(&root), sources, documents, root }
    }

    /// The crates of a package: its library, its program or both.
    fn crates(&self, package: &Package) -> Vec<Crate> {
        let read = |path: &Path| fs::read_to_string(self.root.join(path)).ok();
        let roots = ["lib.rs", "main.rs"].map(|name| package.folder.join("src").join(name));
        roots.iter().filter(|file| read(file).is_some()).map(|file| Crate::read(file, &read)).collect()
    }

    fn layers(&self) -> Vec<String> {
        layers::packages_upwards(&self.packages, layers::PACKAGES)
    }

    fn cycles(&self) -> Vec<String> {
        self.packages.iter().flat_map(|package| self.crates(package)).flat_map(|c| cycles::cycles(&c.edges())).collect()
    }

    /// The files in `src/` of a package.
    fn package_files(&self, package: &Package) -> Vec<PathBuf> {
        let folder = package.folder.join("src");
        self.sources.iter().map(|(file, ..)| file).filter(|file| file.starts_with(&folder)).cloned().collect()
    }

    fn repeated_names(&self) -> Vec<String> {
        self.packages.iter().flat_map(|package| names::repeated(&self.package_files(package))).collect()
    }

    fn wide_comments(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (file, text, source) in &self.sources {
            let wide = prose::wide_comments(text, source).into_iter();
            found.extend(wide.map(|(line, columns)| format!("{}:{line}: {columns} columns", file.display())));
        }
        found
    }

    fn links(&self) -> Vec<String> {
        documents::broken_links(&self.documents, &|path| self.root.join(path).exists())
    }

    /// Mentions of planted bugs in the client library.
    fn bugs_in_client(&self) -> Vec<String> {
        let is_client = |file: &Path| file.starts_with("crates/client");
        let mentions = |text: &str| text.contains("planted");
        let files = self.sources.iter().filter(|(file, text, _)| is_client(file) && mentions(text));
        files.map(|(file, ..)| file.display().to_string()).collect()
    }

    fn places(&self) -> Vec<String> {
        let document = |file: &str| self.documents.get(Path::new(file)).map(String::as_str).unwrap_or_default();
        let mut found = documents::missing_places(document("CONTRIBUTING.md"), &|path| self.root.join(path).exists());
        match document("docs/glossary.md") {
            "" => found.push("docs/glossary.md: there is none".to_owned()),
            glossary => found.extend(documents::long_glossary(glossary)),
        }
        found
    }
}

/// Fails with all findings, if there are any.
#[track_caller]
fn assert_none(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}: {}\n\n  {}\n", found.len(), found.join("\n  "));
}

#[test]
fn nothing_imports_upwards() {
    assert_none("imports that go upwards", &Workspace::read().layers());
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    assert_none("cycles between files", &Workspace::read().cycles());
}

#[test]
fn no_two_files_of_a_package_have_the_same_name() {
    assert_none("repeated file names", &Workspace::read().repeated_names());
}

#[test]
fn comments_fit_into_100_columns() {
    assert_none("comment lines that are too wide", &Workspace::read().wide_comments());
}

#[test]
fn every_link_resolves() {
    assert_none("broken links", &Workspace::read().links());
}

#[test]
fn the_book_has_every_page() {
    assert_none(
        "pages that docs/SUMMARY.md does not name",
        &documents::unreachable_pages(&Workspace::read().documents),
    );
}

#[test]
fn the_places_in_contributing_exist_and_the_glossary_is_short() {
    assert_none("places and terms", &Workspace::read().places());
}

#[test]
fn the_patches_with_planted_bugs_apply() {
    assert_none("patches that do not apply", &patches::misfits(&tree::root()));
}

#[test]
fn the_client_library_has_no_planted_bugs() {
    assert_none("files with planted bugs", &Workspace::read().bugs_in_client());
}

#[test]
#[ignore = "prints figures and checks nothing"]
fn figures() {
    let workspace = Workspace::read();
    let figures: [(&str, Vec<String>); 8] = [
        ("imports upwards", workspace.layers()),
        ("cycles between files", workspace.cycles()),
        ("repeated file names", workspace.repeated_names()),
        ("wide comment lines", workspace.wide_comments()),
        ("broken links", workspace.links()),
        ("places and terms", workspace.places()),
        ("patches that do not apply", patches::misfits(&workspace.root)),
        ("files of the client with planted bugs", workspace.bugs_in_client()),
    ];
    for (what, found) in &figures {
        println!("{:6} {what}", found.len());
    }
    for (what, found) in figures {
        println!("\n{what}\n  {}", found.join("\n  "));
    }
}
