//! Checks that the constants of all languages, and the tables of the gRPC guide, are those of
//! `proto/kubefan/v1alpha1/reasons.yaml`. A reason that one language spells differently would be
//! missed by its clients without an error.
//!
//! `KUBEFAN_REGENERATE=1 cargo test -p kubefan-codegen` writes them.

mod go_constants;
mod guide_tables;
mod python_constants;
mod rust_enums;
mod table;
mod typescript_constants;

use std::{env, error::Error, fs, path::Path};

use table::{Table, quoted};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

#[test]
fn every_language_has_the_reasons_of_the_table() -> Result<(), Box<dyn Error>> {
    let table = Table::read()?;
    let guide = fs::read_to_string(Path::new(ROOT).join(guide_tables::PATH))?;
    let made = [
        (rust_enums::PATH, rust_enums::render(&table)),
        (go_constants::PATH, go_constants::render(&table)),
        (python_constants::PATH, python_constants::render(&table)),
        (typescript_constants::PATH, typescript_constants::render(&table)),
        (guide_tables::PATH, guide_tables::replace(&guide, &table)?),
    ];
    for (path, made) in made {
        let kept = Path::new(ROOT).join(path);
        if env::var_os("KUBEFAN_REGENERATE").is_some() {
            fs::write(&kept, made)?;
        } else {
            let message = "is not what reasons.yaml says: KUBEFAN_REGENERATE=1 cargo test -p kubefan-codegen";
            assert!(fs::read_to_string(&kept).unwrap_or_default() == made, "{path} {message}");
        }
    }
    Ok(())
}

#[test]
fn the_table_has_every_reason_that_the_contract_names() -> Result<(), Box<dyn Error>> {
    let table = Table::read()?;
    let proto = fs::read_to_string(Path::new(ROOT).join("proto/kubefan/v1alpha1/watch.proto"))?;
    let (_, gap) = proto.split_once("message GapBegin {").ok_or("there is no GapBegin")?;
    let (comment, _) = gap.split_once("string reason").ok_or("GapBegin has no reason")?;
    let named = quoted(comment);
    let known = table.gaps.iter().map(|gap| &*gap.value).collect::<Vec<_>>();
    assert!(named.len() > 5, "the comment names reasons: {comment}");
    for reason in named {
        assert!(known.contains(&reason), "GapBegin.reason {reason:?} is not in reasons.yaml");
    }
    for reason in table.metadata.iter().flat_map(|key| &key.reasons) {
        assert!(table.errors.iter().any(|error| error.value == *reason), "there is no reason {reason}");
    }
    Ok(())
}
