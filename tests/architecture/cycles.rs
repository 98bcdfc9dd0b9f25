//! No files use each other in a circle: a reader can start at the bottom and never has to know a
//! file that comes later.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use crate::modules::Edges;

/// The cycles: each a set of files that all reach each other, with the names that connect them.
pub(crate) fn cycles(edges: &Edges) -> Vec<String> {
    let mut next: BTreeMap<&Path, BTreeSet<&Path>> = BTreeMap::new();
    for (from, to) in edges.keys() {
        next.entry(from).or_default().insert(to);
    }
    let reach: BTreeMap<&Path, BTreeSet<&Path>> = next.keys().map(|file| (*file, reachable(file, &next))).collect();
    let reaches = |from: &Path, to: &Path| reach.get(from).is_some_and(|reached| reached.contains(to));
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for file in next.keys().filter(|file| reaches(file, file)) {
        if !seen.insert(*file) {
            continue;
        }
        let cycle: BTreeSet<&Path> =
            next.keys().filter(|other| reaches(file, other) && reaches(other, file)).copied().collect();
        seen.extend(&cycle);
        let inside = |(from, to): &(PathBuf, PathBuf)| cycle.contains(from.as_path()) && cycle.contains(to.as_path());
        let lines = edges.iter().filter(|(edge, _)| inside(edge)).map(|((from, to), names)| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            format!("\n    {} -> {}: {}", from.display(), to.display(), names.join(", "))
        });
        found.push(format!("{} files:{}", cycle.len(), lines.collect::<String>()));
    }
    found
}

fn reachable<'a>(from: &'a Path, next: &BTreeMap<&'a Path, BTreeSet<&'a Path>>) -> BTreeSet<&'a Path> {
    let mut reached = BTreeSet::new();
    let mut waiting = vec![from];
    while let Some(file) = waiting.pop() {
        for to in next.get(file).into_iter().flatten() {
            if reached.insert(*to) {
                waiting.push(to);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::tests::planted;

    #[test]
    fn a_planted_cycle_is_found_with_its_names() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c; mod d;"),
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "pub struct B; fn f() { crate::c::g() }"),
            ("src/c.rs", "use super::a::A; use super::d::D;"),
            ("src/d.rs", "pub struct D;"),
        ];
        assert_eq!(
            cycles(&planted(&files).edges()),
            ["3 files:\n    src/a.rs -> src/b.rs: B\n    src/b.rs -> src/c.rs: g\n    src/c.rs -> src/a.rs: A"]
        );
    }

    #[test]
    fn two_cycles_are_told_apart_and_a_tree_has_none() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c; mod d;"),
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "use crate::a::A; pub struct B;"),
            ("src/c.rs", "use crate::a::A; use crate::d::D; pub struct C;"),
            ("src/d.rs", "use crate::c::C; pub struct D;"),
        ];
        assert_eq!(cycles(&planted(&files).edges()).len(), 2);
        let tree = [("src/lib.rs", "mod a; mod b;"), ("src/a.rs", "use crate::b::B;"), ("src/b.rs", "pub struct B;")];
        assert!(cycles(&planted(&tree).edges()).is_empty());
    }
}
