//! The module tree of a crate, and which file uses which: every path in a `use` or in the code is
//! followed, through re-exports, to the file that defines the name.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::{Path, PathBuf},
};

use crate::rust::{self, Token, closing};

/// A use of names: by which file, of which file, and the names.
pub(crate) type Edges = BTreeMap<(PathBuf, PathBuf), BTreeSet<String>>;

/// The modules of one crate, by their paths (`["fanout", "hub"]`; the root is empty).
#[derive(Debug, Default)]
pub(crate) struct Crate {
    modules: BTreeMap<Vec<String>, Module>,
}

#[derive(Debug, Default)]
struct Module {
    file: PathBuf,
    /// The items that are defined here, child modules excluded.
    items: HashSet<String>,
    imports: Vec<Import>,
    /// The paths in the code, outside of `use`.
    paths: Vec<Vec<String>>,
    /// The single names in the code.
    names: HashSet<String>,
}

#[derive(Debug, Clone)]
struct Import {
    path: Vec<String>,
    /// The name that it has here; `None`: every name of the module at `path`.
    name: Option<String>,
    is_public: bool,
}

/// What a path stands for.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    Module(Vec<String>),
    /// An item of the module.
    Item(Vec<String>),
}

impl Crate {
    /// Reads the modules from `root`, a `lib.rs` or `main.rs`. `read` returns the text of a file.
    pub(crate) fn read(root: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Self {
        let mut found = Self::default();
        found.read_module(Vec::new(), root.to_owned(), root.parent().unwrap_or(Path::new("")).to_owned(), read);
        found
    }

    fn read_module(
        &mut self,
        path: Vec<String>,
        file: PathBuf,
        folder: PathBuf,
        read: &dyn Fn(&Path) -> Option<String>,
    ) {
        let Some(text) = read(&file) else { return };
        let tokens = rust::without_tests(&rust::split(&text).tokens);
        self.add(path, &tokens, &file, &folder, read);
    }

    /// Adds the module whose body is `tokens`; `folder` has the files of its children.
    fn add(
        &mut self,
        path: Vec<String>,
        tokens: &[Token],
        file: &Path,
        folder: &Path,
        read: &dyn Fn(&Path) -> Option<String>,
    ) {
        let mut module = Module { file: file.to_owned(), ..Module::default() };
        let (mut at, mut depth) = (0, 0_usize);
        while at < tokens.len() {
            let word = tokens[at].ident().unwrap_or_default();
            let after = tokens.get(at + 1).and_then(Token::ident);
            match (word, after) {
                // Not the `use<...>` of a return type.
                ("use", _) if !tokens.get(at + 1).is_some_and(|token| token.is('<')) => {
                    let end = tokens[at..].iter().position(|token| token.is(';')).map_or(tokens.len(), |end| at + end);
                    let is_public = is_public(&tokens[..at]);
                    use_tree(&tokens[at + 1..end], &[], is_public, &mut module.imports);
                    at = end;
                }
                ("mod", Some(name)) if depth == 0 => {
                    let child: Vec<String> = path.iter().cloned().chain([name.to_owned()]).collect();
                    let children = folder.join(name);
                    if tokens.get(at + 2).is_some_and(|token| token.is('{')) {
                        let end = closing(tokens, at + 2);
                        self.add(child, &tokens[at + 3..end.saturating_sub(1)], file, &children, read);
                        at = end - 1;
                    } else {
                        let beside = folder.join(format!("{name}.rs"));
                        let below = children.join("mod.rs");
                        let file = if read(&beside).is_some() { beside } else { below };
                        self.read_module(child, file, children, read);
                    }
                }
                ("fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static", Some(name))
                    if depth == 0 =>
                {
                    module.items.insert(name.to_owned());
                }
                ("macro_rules", _) if tokens.get(at + 1).is_some_and(|token| token.is('!')) => {
                    module.items.extend(tokens.get(at + 2).and_then(Token::ident).map(str::to_owned));
                }
                _ => {}
            }
            match tokens.get(at) {
                Some(Token::Punct('{')) => depth += 1,
                Some(Token::Punct('}')) => depth = depth.saturating_sub(1),
                Some(Token::Ident(..)) => {
                    if let Some((segments, end)) = code_path(tokens, at) {
                        match segments.as_slice() {
                            [name] => {
                                module.names.insert(name.clone());
                            }
                            _ => module.paths.push(segments),
                        }
                        at = end - 1;
                    }
                }
                _ => {}
            }
            at += 1;
        }
        self.modules.insert(path, module);
    }

    /// Every use of one file's names by another. A re-export of a child is not a use of it.
    pub(crate) fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (path, module) in &self.modules {
            for import in &module.imports {
                let used = import.name.as_ref().is_some_and(|name| {
                    module.names.contains(name) || module.paths.iter().any(|path| path.first() == Some(name))
                });
                match self.resolve(path, &import.path, 0) {
                    Some(Target::Item(target)) => {
                        let is_reexport = import.is_public && target.starts_with(path) && !used;
                        if !is_reexport {
                            self.add_edge(&mut edges, module, &target, &import.path);
                        }
                    }
                    Some(Target::Module(target)) if import.name.is_none() && !import.is_public => {
                        self.add_edge(&mut edges, module, &target, &import.path);
                    }
                    // The paths that begin with an imported module say what is used of it.
                    _ => {}
                }
            }
            for segments in &module.paths {
                if let Some(Target::Item(target)) = self.resolve(path, segments, 0) {
                    self.add_edge(&mut edges, module, &target, segments);
                }
            }
        }
        edges
    }

    fn add_edge(&self, edges: &mut Edges, from: &Module, target: &[String], path: &[String]) {
        let to = &self.modules[target].file;
        if *to != from.file {
            let name = path.last().cloned().unwrap_or_default();
            edges.entry((from.file.clone(), to.clone())).or_default().insert(name);
        }
    }

    /// Follows `segments` from the module `from`. `None`: another crate.
    fn resolve(&self, from: &[String], segments: &[String], hops: usize) -> Option<Target> {
        // Imports that lead in a circle do not compile, but they must not hang the test.
        if hops > 32 {
            return None;
        }
        let mut current = from.to_vec();
        for (index, segment) in segments.iter().enumerate() {
            match segment.as_str() {
                "crate" if index == 0 => current = Vec::new(),
                "self" => {}
                "super" => {
                    current.pop();
                }
                name => {
                    let child: Vec<String> = current.iter().cloned().chain([name.to_owned()]).collect();
                    if self.modules.contains_key(&child) {
                        current = child;
                        continue;
                    }
                    let module = self.modules.get(&current)?;
                    if module.items.contains(name) {
                        return Some(Target::Item(current));
                    }
                    let named = module.imports.iter().find(|import| import.name.as_deref() == Some(name));
                    // A path that is just the imported name refers to the import itself, not to an
                    // import of the same name.
                    if let Some(import) = named.filter(|import| import.path != segments) {
                        return match self.resolve(&current, &import.path, hops + 1)? {
                            Target::Module(found) => self.resolve(&found, &segments[index + 1..], hops + 1),
                            item => Some(item),
                        };
                    }
                    let globs = module.imports.iter().filter(|import| import.name.is_none());
                    for glob in globs {
                        if let Some(Target::Module(found)) = self.resolve(&current, &glob.path, hops + 1)
                            && self.modules[&found].items.contains(name)
                        {
                            return Some(Target::Item(found));
                        }
                    }
                    // An unknown first name is another crate, or a name from std or a macro.
                    return (index > 0).then_some(Target::Item(current));
                }
            }
        }
        Some(Target::Module(current))
    }
}

/// Whether the item after `before` is `pub`, also `pub(crate)` and the like.
fn is_public(before: &[Token]) -> bool {
    match before {
        [.., Token::Punct(')')] => {
            let open = before.iter().rposition(|token| token.is('(')).unwrap_or(0);
            open > 0 && before[open - 1].ident() == Some("pub")
        }
        [.., last] => last.ident() == Some("pub"),
        [] => false,
    }
}

/// Adds the imports of a `use`, whose tokens after `use` are given.
fn use_tree(tokens: &[Token], prefix: &[String], is_public: bool, imports: &mut Vec<Import>) {
    let mut path = prefix.to_vec();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            Token::PathSep if at == 0 && prefix.is_empty() => path.push("::".to_owned()),
            Token::Ident(word, _) if word == "as" => {
                let name = tokens.get(at + 1).and_then(Token::ident).unwrap_or("_").to_owned();
                imports.push(Import { path, name: Some(name), is_public });
                return;
            }
            Token::Ident(word, _) if word == "self" && !path.is_empty() => {}
            Token::Ident(word, _) => path.push(word.clone()),
            Token::Punct('*') => {
                imports.push(Import { path, name: None, is_public });
                return;
            }
            Token::Punct('{') => {
                let end = closing(tokens, at);
                let (mut from, mut depth) = (at + 1, 0);
                for (index, token) in tokens.iter().enumerate().take(end).skip(at + 1) {
                    match token {
                        Token::Punct('{') => depth += 1,
                        Token::Punct('}') if depth > 0 => depth -= 1,
                        Token::Punct(',' | '}') if depth == 0 => {
                            if from < index {
                                use_tree(&tokens[from..index], &path, is_public, imports);
                            }
                            from = index + 1;
                        }
                        _ => {}
                    }
                }
                return;
            }
            _ => {}
        }
        at += 1;
    }
    if let Some(name) = path.last().cloned() {
        imports.push(Import { path, name: Some(name), is_public });
    }
}

/// The path in the code that starts at `at`, with the index after it.
fn code_path(tokens: &[Token], at: usize) -> Option<(Vec<String>, usize)> {
    let before = at.checked_sub(1).map(|before| &tokens[before]);
    let first = tokens[at].ident()?;
    let continues = before.is_some_and(|token| *token == Token::PathSep || token.is('.'));
    let is_variable = before.is_some_and(|token| token.is('$')) && first != "crate";
    if continues || is_variable {
        return None;
    }
    let (mut segments, mut end) = (vec![first.to_owned()], at + 1);
    while tokens.get(end) == Some(&Token::PathSep) {
        let Some(name) = tokens.get(end + 1).and_then(Token::ident) else { break };
        segments.push(name.to_owned());
        end += 2;
    }
    Some((segments, end))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Made-up files.
    pub(crate) fn planted(files: &[(&str, &str)]) -> Crate {
        let files: HashMap<PathBuf, String> =
            files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        Crate::read(Path::new("src/lib.rs"), &|path| files.get(path).cloned())
    }

    fn edges(files: &[(&str, &str)]) -> Vec<String> {
        let name = |path: &Path| path.strip_prefix("src").unwrap().display().to_string();
        let edges = planted(files).edges();
        let line = |((from, to), names): (&(PathBuf, PathBuf), &BTreeSet<String>)| {
            format!("{} -> {}: {}", name(from), name(to), names.iter().cloned().collect::<Vec<_>>().join(" "))
        };
        edges.iter().map(line).collect()
    }

    #[test]
    fn a_use_is_followed_to_the_file_that_defines_the_name() {
        let files = [
            ("src/lib.rs", "pub mod a; mod b;"),
            ("src/a/mod.rs", "mod x; mod y; pub use x::X; pub(crate) use y::*;"),
            ("src/a/x.rs", "pub struct X; use super::y::Y as Z;"),
            ("src/a/y.rs", "pub struct Y;"),
            ("src/b.rs", "use crate::a::{self, X}; use std::fmt; fn f(_: a::Y, _: fmt::Error) { crate::a::x::g() }"),
        ];
        assert_eq!(edges(&files), ["a/x.rs -> a/y.rs: Y", "b.rs -> a/x.rs: X g", "b.rs -> a/y.rs: Y"]);
    }

    #[test]
    fn a_parent_uses_a_child_only_if_it_does_more_than_re_export_it() {
        let child = ("src/a/b.rs", "pub struct B; pub fn f() {}");
        let edges_of = |parent: &str| edges(&[("src/lib.rs", "mod a;"), ("src/a/mod.rs", parent), child]);
        assert!(edges_of("mod b; pub use b::B; pub(crate) use self::b::f;").is_empty());
        assert_eq!(edges_of("mod b; use b::B;"), ["a/mod.rs -> a/b.rs: B"]);
        assert_eq!(edges_of("mod b; pub use b::B; struct C(B);"), ["a/mod.rs -> a/b.rs: B"]);
        assert_eq!(edges_of("mod b; fn g() { b::f() }"), ["a/mod.rs -> a/b.rs: f"]);
    }

    #[test]
    fn a_child_that_imports_from_its_parent_uses_it() {
        let files = [("src/lib.rs", "mod a;"), ("src/a.rs", "mod b; struct A;"), ("src/a/b.rs", "use super::A;")];
        assert_eq!(edges(&files), ["a/b.rs -> a.rs: A"]);
    }

    #[test]
    fn tests_and_other_crates_are_not_uses() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "use other::b::B; #[cfg(test)] mod tests { use crate::b::B; } #[cfg(test)] use crate::b::B;"),
            ("src/b.rs", "pub struct B;"),
        ];
        assert!(edges(&files).is_empty());
    }

    #[test]
    fn modules_within_a_file_and_macros_are_followed() {
        let files = [
            ("src/lib.rs", "mod a; pub mod b;"),
            ("src/a.rs", "mod inner { use super::super::b::B; pub mod deep { fn f() { crate::b::g() } } }"),
            ("src/b.rs", "pub struct B; macro_rules! m { () => { $crate::c::d() } } fn h() { B::new(); $x::y() }"),
        ];
        assert_eq!(edges(&files), ["a.rs -> b.rs: B g", "b.rs -> lib.rs: d"]);
    }
}
