//! The documents that are made from the declarations of options. `KUBEFAN_RENDER=1` writes them.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use super::{ServeOptions, moved, reload::LIVE, section::FileKey, serve::key_default_texts, settings};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compares what is between two marks of a page with what it must be, or writes it.
fn must_be(page: &str, mark: &str, wanted: &str) {
    let begin = format!("<!-- {mark} -->\n");
    let end = format!("<!-- end of {mark} -->\n");
    let path = root().join(page);
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(&*begin).unwrap_or_else(|| panic!("{page} has no {begin}"));
    let (found, after) = rest.split_once(&*end).unwrap_or_else(|| panic!("{page} has no {end}"));
    if env::var_os("KUBEFAN_RENDER").is_some() {
        fs::write(&path, format!("{before}{begin}{wanted}{end}{after}")).unwrap();
        return;
    }
    let first = found.lines().zip(wanted.lines()).find(|(found, wanted)| found != wanted);
    assert!(
        found == wanted,
        "{page} differs at {first:?}: KUBEFAN_RENDER=1 cargo test -p kubefan-app --lib config::documented writes it"
    );
}

/// The row of a key: its name, the kind of its value, its default, whether a reload takes it over,
/// and its documentation.
fn row(key: &FileKey) -> String {
    let help = key.help.trim();
    let (meaning, default) = match help.split_once(" [default: ") {
        Some((meaning, default)) => (meaning, default.trim_end_matches(']').to_owned()),
        None => (help, default(key)),
    };
    let value = if key.given.starts_with("Vec") { format!("list of {}", key.value) } else { key.value.to_owned() };
    let live = if LIVE.contains(&key.path) { "yes" } else { "no" };
    format!("| `{}` | {value} | {default} | {live} | {meaning} |\n", key.path).replace('<', "\\<")
}

fn default(key: &FileKey) -> String {
    let texts = key_default_texts();
    let given = texts.iter().find(|(path, _)| *path == key.path).map(|(_, text)| text.clone());
    given.unwrap_or(if key.value == "BOOL" { "false".to_owned() } else { "none".to_owned() })
}

#[test]
fn the_page_lists_every_key_without_a_flag() {
    for place in settings::PLACES {
        let keys = ServeOptions::file_keys().into_iter().filter(|key| key.place == place);
        let head = "| key | value | default | reload | meaning, and when to change it |\n|---|---|---|---|---|\n";
        let rows: String = keys.map(|key| row(&key)).collect();
        must_be("docs/configuration.md", place, &format!("{head}{rows}"));
    }
}

#[test]
fn the_changelog_says_where_every_flag_moved() {
    let rows = moved::all().map(|(flag, place)| format!("| `--{flag}` | `{place}` |\n"));
    let table = format!("| flag | now |\n|---|---|\n{}", rows.collect::<String>());
    must_be("CHANGELOG.md", "moved flags", &table);
}

#[test]
fn the_chart_refuses_every_flag_that_moved() {
    let row =
        |(flag, place): (&str, String)| format!("- {{ flag: {flag}, key: {}, to: {place} }}\n", moved::camel(flag));
    let rows: String = moved::all().map(row).collect();
    let page = "deploy/helm/kubefan/files/moved.yaml";
    let path = root().join(page);
    let wanted = format!("# Made from kubefan_app::config::moved.\n{rows}");
    if env::var_os("KUBEFAN_RENDER").is_some() {
        fs::write(&path, &wanted).unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), wanted, "{page}");
}
