//! The patches that plant bugs for the simulation. Only a build with planted bugs applies them, so
//! without this test a change next to one would be noticed late.

use std::{path::Path, process::Command};

use crate::tree;

/// The folder of the patches.
const FOLDER: &str = "tests/simulation/planted";

/// The reasons why the patches do not apply to the sources below `root`; empty if they do.
pub(crate) fn misfits(root: &Path) -> Vec<String> {
    let patches = tree::files(root, FOLDER, "patch");
    if patches.is_empty() {
        return vec![format!("{FOLDER}: there are no patches")];
    }
    let mut git = Command::new("git");
    git.current_dir(root).args(["apply", "--check"]).args(&patches);
    // Inside of another repository git would ignore all files.
    git.env("GIT_CEILING_DIRECTORIES", root.parent().unwrap_or(root));
    match git.output() {
        Ok(output) if output.status.success() => Vec::new(),
        Ok(output) => String::from_utf8_lossy(&output.stderr).lines().map(str::to_owned).collect(),
        Err(error) => vec![format!("git: {error}")],
    }
}
