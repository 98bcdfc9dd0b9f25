//! No files of a package use each other in a circle: a reader can start at the bottom and never has
//! to know a file that comes later. The compiler refuses cycles between packages, not within one.
//!
//! This reads lines as rustfmt formats them, and follows each path through re-exports to the file
//! that defines the name. Code for tests does not count, and a parent that only re-exports a child
//! does not use it. Names that a macro makes up are not seen.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// A path in the code, or of a module (empty: the root).
type Names = Vec<String>;

/// Re-exports behind each other that are followed.
const HOPS_MAX: usize = 8;

const ITEMS: [&str; 10] = ["const", "enum", "fn", "macro_rules", "mod", "static", "struct", "trait", "type", "union"];

/// The uses of a package's files that are part of a cycle, or lead from one cycle to another.
pub(crate) fn cycles<'a>(files: impl IntoIterator<Item = (&'a Path, &'a str)>) -> Vec<String> {
    let all: BTreeMap<Names, Module> = files.into_iter().map(|(file, text)| Module::read(file, text)).collect();
    let mut modules = Modules::new();
    for (path, module) in all {
        let is_declared = |(name, parent): (&String, &[String])| {
            modules.get(parent).is_some_and(|parent: &Module| parent.items.contains(name))
        };
        // The parent does not declare it if it is compiled only for tests.
        if path.split_last().is_none_or(is_declared) {
            modules.insert(path, module);
        }
    }
    let mut edges = edges(&modules);
    loop {
        let (users, used): (BTreeSet<PathBuf>, BTreeSet<PathBuf>) = edges.keys().cloned().unzip();
        let before = edges.len();
        edges.retain(|(from, to), _| used.contains(from) && users.contains(to));
        if edges.len() == before {
            break;
        }
    }
    let line = |((from, to), names): ((PathBuf, PathBuf), BTreeSet<String>)| {
        format!("{} -> {}: {}", from.display(), to.display(), Vec::from_iter(names).join(", "))
    };
    edges.into_iter().map(line).collect()
}

type Modules = BTreeMap<Names, Module>;

/// By which file, of which file, and the names that it uses.
fn edges(modules: &Modules) -> BTreeMap<(PathBuf, PathBuf), BTreeSet<String>> {
    let mut edges: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (at, module) in modules {
        let imports = module.imports.iter().filter_map(|import| {
            let (target, is_item) = resolve(modules, at, &import.path, 0)?;
            let is_reexport = import.is_public && target.starts_with(at);
            // The paths that begin with an imported module say what is used of it.
            ((is_item || import.name.is_none()) && !is_reexport).then_some((target, &import.path))
        });
        let paths = module.paths.iter().filter_map(|path| match resolve(modules, at, path, 0)? {
            (target, true) => Some((target, path)),
            _ => None,
        });
        for (target, path) in imports.chain(paths).filter(|(target, _)| target != at) {
            let edge = (module.file.clone(), modules[&target].file.clone());
            edges.entry(edge).or_default().extend(path.last().cloned());
        }
    }
    edges
}

/// The module that `path` leads to from the module `from`, and whether it names an item there.
/// `None`: another crate, or a local name.
fn resolve(modules: &Modules, from: &[String], path: &[String], hops: usize) -> Option<(Names, bool)> {
    let mut at = from.to_vec();
    for (index, name) in path.iter().enumerate() {
        match name.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            _ => at.push(name.clone()),
        }
        if modules.contains_key(&at) {
            continue;
        }
        at.pop();
        let module = &modules[&at];
        if module.items.contains(name) {
            return Some((at, true));
        }
        return module.imports.iter().filter(|_| hops < HOPS_MAX).find_map(|import| {
            let rest = match &import.name {
                Some(imported) if imported == name => &path[index + 1..],
                Some(_) => return None,
                None => &path[index..],
            };
            resolve(modules, &at, &[&import.path, rest].concat(), hops + 1)
        });
    }
    Some((at, false))
}

struct Import {
    path: Names,
    /// The name that it has here; `None`: every name of the module at `path`.
    name: Option<String>,
    is_public: bool,
}

#[derive(Default)]
struct Module {
    file: PathBuf,
    /// The items that are defined here, child modules included.
    items: BTreeSet<String>,
    imports: Vec<Import>,
    /// The names and paths outside of `use`.
    paths: BTreeSet<Names>,
}

impl Module {
    /// The path and the content of the module in `file`, whose name is relative to `src/`.
    fn read(file: &Path, text: &str) -> (Names, Self) {
        let mut path: Names = file.with_extension("").iter().map(|name| name.to_string_lossy().into_owned()).collect();
        path.pop_if(|name| ["lib", "main", "mod"].contains(&name.as_str()));
        let mut module = Self { file: file.to_owned(), ..Self::default() };
        let code = without_tests(text);
        let mut lines = code.into_iter();
        while let Some(line) = lines.next() {
            let trimmed = line.trim_start();
            let restricted = || trimmed.strip_prefix("pub(")?.split_once(") ").map(|(_, item)| item);
            let item = trimmed.strip_prefix("pub ").or_else(restricted).unwrap_or(trimmed);
            if let Some(tree) = item.strip_prefix("use ") {
                let mut tree = tree.to_owned();
                while !tree.ends_with(';') {
                    tree += lines.next().unwrap_or(";");
                }
                module.import("", tree.trim_end_matches(';'), item != trimmed);
                continue;
            }
            let words = item.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
            let words: Vec<&str> = words.map(|word| word.trim_matches(':')).filter(|word| !word.is_empty()).collect();
            // An indented item that is public may be an argument of a macro, which defines it here.
            if trimmed == line || item != trimmed {
                let named = words.windows(2).take(3).filter(|pair| ITEMS.contains(&pair[0]));
                module.items.extend(named.map(|pair| pair[1].to_owned()));
            }
            module.paths.extend(words.iter().map(|word| word.split("::").map(str::to_owned).collect()));
        }
        (path, module)
    }

    /// Adds the imports of a part of a `use`; `prefix` is the path before it.
    fn import(&mut self, prefix: &str, tree: &str, is_public: bool) {
        let tree = tree.trim();
        if let Some((path, group)) = tree.split_once('{') {
            let group = group.trim_end_matches(|c| c != '}');
            let prefix = format!("{prefix}{path}");
            let mut depth = 0;
            let is_end = |c: char| {
                depth += i32::from(c == '{') - i32::from(c == '}');
                (c == ',' && depth == 0) || depth < 0
            };
            for part in group.split(is_end) {
                self.import(&prefix, part, is_public);
            }
        } else if !tree.is_empty() {
            let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(path, alias)| (path, Some(alias)));
            let mut path: Names = format!("{prefix}{path}").split("::").map(str::to_owned).collect();
            let is_glob = path.pop_if(|name| name == "*").is_some();
            let name = alias.map(str::to_owned).or_else(|| path.iter().rfind(|name| *name != "self").cloned());
            self.imports.push(Import { path, name: name.filter(|_| !is_glob), is_public });
        }
    }
}

/// The lines of code that are neither comments nor compiled only for tests.
fn without_tests(text: &str) -> Vec<&str> {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let mut kept = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let code = line.trim_start();
        if code.starts_with("#[cfg(test)]") || code.starts_with("#[cfg(all(test") {
            // The item, field or statement ends at a line with the same indentation.
            lines.find(|next| indentation(next) == indentation(line) && next.ends_with(['}', ';', ',']));
        } else if code.starts_with("#![cfg(test)]") {
            return Vec::new();
        } else if !code.starts_with("//") {
            kept.push(line.split(" // ").next().unwrap_or(line));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles_of(files: &[(&str, &str)]) -> Vec<String> {
        cycles(files.iter().map(|(file, text)| (Path::new(*file), *text)))
    }

    #[test]
    fn a_planted_cycle_is_found_with_its_names() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\n#[cfg(test)]\nmod t;\nuse a::A;"),
            ("a.rs", "use crate::b::{\n    self,\n    B as C,\n};\npub struct A;"),
            ("b.rs", "pub struct B;\nfn f() {\n    assert!(crate::c::g());\n}"),
            ("c.rs", "use super::{a::A, d::{D}}; // why\npub(crate) fn g() {}\nuse other::b::B;"),
            ("d.rs", "pub struct D;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n// crate::a::A"),
            ("t.rs", "use crate::a::A;"),
        ];
        assert_eq!(cycles_of(&files), ["a.rs -> b.rs: B", "b.rs -> c.rs: g", "c.rs -> a.rs: A"]);
    }

    #[test]
    fn a_use_is_followed_through_reexports() {
        let files = |x| {
            [
                ("lib.rs", "mod a;\nmod b;"),
                ("a/mod.rs", "mod x;\nmod y;\npub use x::X;\npub(crate) use y::*;"),
                ("a/x.rs", x),
                ("a/y.rs", "pub struct Y;\nuse super::X;"),
                ("b.rs", "use crate::a;\nfn f(_: a::Y) {}"),
            ]
        };
        assert!(cycles_of(&files("pub struct X;\nuse crate::b;")).is_empty());
        let found = cycles_of(&files("pub struct X;\nuse crate::b;\nfn g() { b::f() }"));
        assert_eq!(found, ["a/x.rs -> b.rs: f", "a/y.rs -> a/x.rs: X", "b.rs -> a/y.rs: Y"]);
    }

    #[test]
    fn a_parent_uses_a_child_only_if_it_does_more_than_re_export_it() {
        let child = ("a/b.rs", "pub struct B;\npub fn f() {}\nuse super::A;");
        let cycles_with = |parent: &str| cycles_of(&[("lib.rs", "mod a;"), ("a/mod.rs", parent), child]).len();
        assert_eq!(cycles_with("mod b;\npub struct A;\npub use b::B;\npub(crate) use self::b::f;"), 0);
        assert_eq!(cycles_with("mod b;\npub struct A;\nuse b::B;"), 2);
        assert_eq!(cycles_with("mod b;\npub struct A(B);\npub use b::B;"), 2);
        assert_eq!(cycles_with("mod b;\npub struct A;\nfn g() { b::f() }"), 2);
    }
}
