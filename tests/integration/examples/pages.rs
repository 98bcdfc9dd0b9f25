//! The blocks in Rust of the pages, which `examples/rust/build.rs` takes from them: all are
//! compiled, and those that can run print the right lines. `kubefan demo` has the objects.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

use super::printed;
use crate::{
    documented_configuration::blocks_of,
    harness::{
        process::{Process, free_port},
        tests,
        tools::rust_example,
        wait,
    },
};

tests! {
    local slow_release: every_block_in_rust_runs_or_has_its_reason, the_page_of_informers_names_features_that_exist,
        the_page_of_the_script_shows_a_step;
}

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The test of a block.
enum Tried {
    /// The program prints lines with these starts, in any order.
    Prints(&'static [&'static str]),
    /// The program ends by itself, without an error.
    Ends,
    /// The program is only compiled, for this reason.
    Compiled(&'static str),
}

use Tried::{Compiled, Ends, Prints};

const PAGES: &[(&str, &[Tried])] = &[
    ("README.md", &[Compiled("no object of the demo has the label")]),
    (
        "docs/clients-rust.md",
        &[
            Prints(&["Added team-0/", "Modified team-"]),
            Prints(&["Added {", "the state is complete: "]),
            Prints(&["one of them: Some(\"web-", "since then: Modified web-"]),
            Prints(&["new: team-0/web-", "changed: team-"]),
            Prints(&["web-0-"]),
            Prints(&["start over: version 1 belongs to another cluster"]),
            Compiled("it needs a server with a certificate"),
            Compiled("it needs to be in a pod"),
            Prints(&["NotFound OBJECT_NOT_FOUND false"]),
        ],
    ),
    (
        "docs/informers.md",
        &[
            Prints(&["team-0/web-0-"]),
            Compiled("it needs to be in a pod"),
            Compiled("it needs a server with a certificate"),
            Ends,
            Ends,
            Ends,
            Compiled("it waits for a write"),
            Compiled("it waits for keys until its end"),
            Ends,
        ],
    ),
];

async fn every_block_in_rust_runs_or_has_its_reason() {
    let program = rust_example("pages");
    let listed = Command::new(&program).output().unwrap();
    let counted = String::from_utf8(listed.stdout).unwrap();
    let known: Vec<_> = PAGES.iter().map(|(page, blocks)| format!("{page} {}", blocks.len())).collect();
    assert_eq!(counted.lines().collect::<Vec<_>>(), known, "a page has other blocks in Rust than this test knows");

    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_demo, address) = demo(dir.path()).await;
    for (page, blocks) in PAGES {
        for (number, block) in blocks.iter().enumerate() {
            let what = format!("{page}, block {number}");
            let mut command = Command::new(&program);
            command.args([page, &*number.to_string(), &address.to_string()]);
            match block {
                Prints(starts) => {
                    let log = dir.path().join(what.replace('/', "-"));
                    let mut process = Process::spawn("a block of a page", &mut command, &log);
                    for start in *starts {
                        printed(&mut process, start).await;
                    }
                }
                Ends => {
                    let ended = command.output().unwrap();
                    assert!(ended.status.success(), "{what}: {ended:?}");
                }
                Compiled(reason) => assert!(!reason.is_empty(), "{what}"),
            }
        }
    }
}

async fn demo(dir: &Path) -> (Process, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command.args(["demo", "--duration=0", "--objects=1000", "--subscribers=1", "--rate=20"]);
    command.args([format!("--listen={address}"), "--admin-listen=127.0.0.1:0".to_owned()]);
    let mut demo = Process::spawn("kubefan demo", &mut command, &dir.join("demo"));
    let serves = wait::try_until(wait::SOON * 4, || {
        let serves = demo.log().contains("\nthrough kubefan: ").then_some(true);
        let ended = demo.exited().map(|_| false);
        async move { serves.or(ended) }
    });
    assert_eq!(serves.await, Some(true), "{}", demo.log());
    (demo, address)
}

/// The blocks of a language on a page.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let blocks = blocks_of(page).into_iter().filter(|block| block.language == language);
    blocks.map(|block| block.text).collect()
}

/// The lines of a block that are not its comments.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(|line| line.split(" # ").next().unwrap_or(line).trim()).filter(|line| !line.is_empty())
}

/// The dependencies on the pages are those of the examples, which are compiled.
async fn the_page_of_informers_names_features_that_exist() {
    let manifest = fs::read_to_string(Path::new(ROOT).join("crates/client/Cargo.toml")).unwrap();
    let features: BTreeSet<_> = manifest
        .lines()
        .skip_while(|line| *line != "[features]")
        .take_while(|line| *line != "[dependencies]")
        .filter_map(|line| line.split_once(" = "))
        .map(|(name, _)| name)
        .collect();
    for page in ["docs/informers.md", "docs/clients-rust.md"] {
        let found = blocks(page, "toml");
        assert_eq!(found.len(), 1, "{page}");
        let mut dependencies: BTreeMap<&str, &str> =
            lines(&found[0]).filter_map(|line| line.split_once(" = ")).collect();
        let client = dependencies.remove("kubefan-client").unwrap_or_else(|| panic!("{page}: no kubefan-client"));
        assert!(client.starts_with("{ path = \"/path/to/kubefan/crates/client\""), "{page}: {client}");
        let named = client.split_once("features = [").map_or("", |(_, rest)| rest.split(']').next().unwrap());
        for feature in named.split(", ").map(|name| name.trim_matches('"')).filter(|name| !name.is_empty()) {
            assert!(features.contains(feature), "{page}: there is no feature {feature:?} in {features:?}");
        }
        assert_eq!(dependencies.keys().copied().collect::<Vec<_>>(), ["serde", "tokio"], "{page}");
    }
}

/// The example of a step is one of the script.
async fn the_page_of_the_script_shows_a_step() {
    let shown = blocks("docs/clients.md", "yaml");
    let folder = Path::new(ROOT).join("clients/conformance/steps");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let steps: Vec<String> = files.map(|file: PathBuf| fs::read_to_string(file).unwrap()).collect();
    assert!(!shown.is_empty());
    for block in shown {
        assert!(steps.iter().any(|text| text.contains(&block)), "the script has no\n{block}");
    }
}
