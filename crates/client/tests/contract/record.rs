//! The recording of client-go, and the table of the documentation.

use std::{collections::BTreeMap, fmt::Write, path::Path, process::Command};

use crate::script::{Script, directory, recordings, scripts};

/// Set to anything: the Go program runs. Set to `write`: the recording and the table are written.
const VARIABLE: &str = "KUBEFAN_CONTRACT_RECORD";

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/informer-contract.md");

/// The start of the page. Its lines are at most 100 columns wide, as in the other documents.
const INTRODUCTION: &str = "\
# The informer library and client-go

`kubefan-client` has the pieces of client-go's `tools/cache`. Each row below is a behaviour of
client-go, with the function that has it. A row is a script in
`crates/client/tests/contract/scripts/`: objects, lists, watch events, errors, handlers, and time
that passes. A Go program runs the script through client-go 0.35.4. It records every call of a
handler, what the store has, and, where the row is about them, the requests to the server. The test
of the same name runs the script through the library, step by step, and compares.

```sh
cargo test -p kubefan-client --test contract    # the library against the recording
# client-go against the recording; needs Go:
KUBEFAN_CONTRACT_RECORD=1 cargo test -p kubefan-client --test contract record
# writes the recording and this page:
KUBEFAN_CONTRACT_RECORD=write cargo test -p kubefan-client --test contract record
```

";

/// Titles of the pieces, in the order of the scripts.
const TITLES: [(&str, &str); 9] = [
    ("key", "Keys"),
    ("store", "Store and Indexer"),
    ("undelta", "UndeltaStore"),
    ("expiration", "ExpirationCache"),
    ("delta-fifo", "DeltaFifo"),
    ("real-fifo", "RealFifo"),
    ("reflector", "Reflector"),
    ("informer", "SharedInformer"),
    ("factory", "SharedInformerFactory"),
];

fn table(scripts: &[Script]) -> String {
    let mut page = INTRODUCTION.to_owned();
    let differing: Vec<_> = scripts.iter().filter(|script| script.differs.is_some()).collect();
    let all = scripts.len();
    let different = differing.len();
    writeln!(
        page,
        "{all} rows, all compared with client-go. {} are equal in every step. In {different}, some steps\n\
         differ on purpose; the test checks those steps too.\n",
        all - different
    )
    .unwrap();
    let mut by_piece: BTreeMap<&str, Vec<&Script>> = BTreeMap::new();
    for script in scripts {
        by_piece.entry(&script.piece).or_default().push(script);
    }
    for (piece, title) in TITLES {
        writeln!(page, "## {title}\n\n| promise (the name of the test) | client-go | compared |\n|---|---|---|")
            .unwrap();
        for script in by_piece.remove(piece).unwrap_or_default() {
            let compared = match &script.differs {
                None => "equal".to_owned(),
                Some(differs) => format!("differs: {}", differs.reason),
            };
            writeln!(page, "| `{}` | `{}` | {compared} |", script.name, script.source).unwrap();
        }
        page += "\n";
    }
    assert!(by_piece.is_empty(), "a piece has no title");
    page.truncate(page.trim_end().len());
    page + "\n"
}

#[test]
fn the_table_of_the_documentation_is_current() {
    let wanted = table(&scripts());
    if std::env::var(VARIABLE).as_deref() == Ok("write") {
        std::fs::write(TABLE, wanted).unwrap();
    } else if Path::new(TABLE).exists() {
        // The packaged crate has no documentation beside it.
        let found = std::fs::read_to_string(TABLE).unwrap();
        assert!(found == wanted, "docs/informer-contract.md is out of date: set {VARIABLE}=write");
    }
}

#[test]
fn the_recording_is_what_client_go_does() {
    let Ok(mode) = std::env::var(VARIABLE) else { return };
    let output = tempfile::NamedTempFile::new().unwrap();
    let status = Command::new("go")
        .args(["test", "-count=1", "./..."])
        .current_dir(directory().join("client-go"))
        .env("KUBEFAN_CONTRACT_OUTPUT", output.path())
        .status()
        .expect("go cannot be started");
    assert!(status.success());
    let text = std::fs::read_to_string(output.path()).unwrap();
    if mode == "write" {
        std::fs::write(directory().join("recorded.json"), text).unwrap();
    } else {
        let found: BTreeMap<String, crate::script::Recording> = serde_json::from_str(&text).unwrap();
        for (name, recording) in recordings() {
            assert_eq!(found.get(&name), Some(&recording), "client-go differs from the recording of {name}");
        }
    }
}
