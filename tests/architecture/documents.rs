//! The documents point at things that exist: links, anchors, and the paths in CONTRIBUTING.md. The
//! glossary stays short enough to be read.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Component, Path, PathBuf},
};

/// Terms in docs/glossary.md.
const TERMS_MAX: usize = 60;

/// The links of the documents that lead nowhere. `exists` gets paths relative to the repository.
pub(crate) fn broken_links(documents: &BTreeMap<PathBuf, String>, exists: &dyn Fn(&Path) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (file, text) in documents {
        for (line, link) in links(text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(path, anchor)| (path, Some(anchor)));
            let folder = file.parent().unwrap_or(Path::new(""));
            let target = if path.is_empty() { file.clone() } else { normal(&folder.join(path)) };
            let broken = if !exists(&target) {
                Some("no such file")
            } else {
                match (anchor, documents.get(&target)) {
                    (Some(anchor), Some(text)) if !anchors(text).contains(&anchor.to_owned()) => {
                        Some("no such heading")
                    }
                    _ => None,
                }
            };
            found.extend(broken.map(|problem| format!("{}:{line}: {link}: {problem}", file.display())));
        }
    }
    found
}

/// The pages in docs/ that docs/SUMMARY.md does not name, so that the book has no way to them.
pub(crate) fn unreachable_pages(documents: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let summary = Path::new("docs/SUMMARY.md");
    let text = documents.get(summary).map_or("", String::as_str);
    let named: Vec<PathBuf> = links(text).into_iter().map(|(_, link)| normal(&Path::new("docs").join(link))).collect();
    let pages = documents.keys().filter(|file| file.starts_with("docs") && *file != summary);
    pages.filter(|page| !named.contains(page)).map(|page| page.display().to_string()).collect()
}

/// The lines of a document that are not in a block of code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((index + 1, line))
    })
}

/// The targets of all links and images, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        // Inline code shows links of others.
        let line = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let inline = line.match_indices("](").map(|(at, _)| &line[at + 2..]);
        let html = ["src=\"", "href=\""]
            .into_iter()
            .flat_map(|key| line.match_indices(key).map(|(at, key)| &line[at + key.len()..]));
        let targets = inline.chain(html).filter_map(|rest| rest.split([')', '"', ' ']).next());
        let reference = line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, target)| target.trim());
        found.extend(targets.chain(reference).map(|target| (number, target.to_owned())));
    }
    found
}

/// The anchors of a document, as GitHub and mdBook make them from its headings.
fn anchors(text: &str) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut found = Vec::new();
    for (_, line) in prose(text) {
        if let Some((_, rest)) = line.split_once("id=\"") {
            found.extend(rest.split('"').next().map(str::to_owned));
        }
        let level = line.bytes().take_while(|b| *b == b'#').count();
        if level == 0 || !line[level..].starts_with(' ') {
            continue;
        }
        let heading = line[level..].trim().to_lowercase();
        let slug: String = heading
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let count = seen.entry(slug.clone()).or_default();
        found.push(if *count == 0 { slug } else { format!("{slug}-{count}") });
        *count += 1;
    }
    found
}

/// `a/../b` is `b`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// The places in the table "to change X, go to Y" of CONTRIBUTING.md that do not exist. A place is
/// a path, or a function of a file, as `path::function`.
pub(crate) fn missing_places(text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<String> {
    let lines = text.lines().skip_while(|line| *line != "| to change | go to |").skip(2);
    let rows: Vec<&str> = lines.take_while(|line| line.starts_with('|')).collect();
    if rows.is_empty() {
        return vec!["CONTRIBUTING.md: there is no table of what to change where".to_owned()];
    }
    let mut found = Vec::new();
    for row in rows {
        let places = row.trim_matches(['|', ' ']).rsplit('|').next().unwrap_or_default();
        let missing = places.split('`').skip(1).step_by(2).filter(|place| !exists(place));
        found.extend(missing.map(|place| format!("CONTRIBUTING.md: {place}")));
    }
    found
}

/// Returns the fault of the glossary's length, if it has one. A term is a row of a table.
pub(crate) fn long_glossary(text: &str) -> Option<String> {
    let rows = || text.lines().filter(|line| line.starts_with('|'));
    let rules = rows().filter(|line| line.trim_matches(['|', '-', ':', ' ']).is_empty()).count();
    // Each table has a row of headings and a rule.
    let terms = rows().count() - 2 * rules;
    (terms > TERMS_MAX).then(|| format!("docs/glossary.md: {terms} terms; at most {TERMS_MAX}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_broken_link_is_found() {
        let documents = BTreeMap::from([
            (
                PathBuf::from("docs/a.md"),
                "# One\n[b](b.md#the-2nd--half) [c](../c.md) [x](x.md) [y](b.md#y)\n`[z](z.md)`\n[r]: #one\n\
                 ```\n[z](z.md)\n```\n<img src=\"i.svg\"> [web](https://e.x/y.md)\n"
                    .to_owned(),
            ),
            (PathBuf::from("docs/b.md"), "## The 2nd: / half\n".to_owned()),
        ]);
        let exists = |path: &Path| ["docs/a.md", "docs/b.md", "c.md"].iter().any(|known| path == Path::new(known));
        assert_eq!(
            broken_links(&documents, &exists),
            [
                "docs/a.md:2: x.md: no such file",
                "docs/a.md:2: b.md#y: no such heading",
                "docs/a.md:8: i.svg: no such file",
            ]
        );
    }

    #[test]
    fn a_page_that_the_summary_does_not_name_is_found() {
        let page = |name: &str| (PathBuf::from(name), String::new());
        let summary = (PathBuf::from("docs/SUMMARY.md"), "- [A](a.md)\n  - [B](b/README.md)\n".to_owned());
        let documents = BTreeMap::from([page("README.md"), page("docs/a.md"), page("docs/b/README.md"), summary]);
        assert!(unreachable_pages(&documents).is_empty());
        let more = documents.into_iter().chain([page("docs/b/c.md")]).collect();
        assert_eq!(unreachable_pages(&more), ["docs/b/c.md"]);
    }

    #[test]
    fn headings_that_are_equal_have_different_anchors() {
        assert_eq!(anchors("# A `b`\n## A b\n### Ü_1\n"), ["a-b", "a-b-1", "ü_1"]);
    }

    #[test]
    fn a_place_that_does_not_exist_is_found() {
        let text = "| to change | go to |\n|---|---|\n| a `flag` | `src/a.rs`, `src/b/` |\n\n| c | `d` |\n";
        assert_eq!(missing_places(text, &|place| place == "src/b/"), ["CONTRIBUTING.md: src/a.rs"]);
        assert_eq!(missing_places("nothing", &|_| true).len(), 1);
    }

    #[test]
    fn a_long_glossary_is_found() {
        let table = |rows: usize| format!("| term | here |\n|---|---|\n{}", "| a | b |\n".repeat(rows));
        assert_eq!(long_glossary(&format!("{}\n{}", table(30), table(30))), None);
        assert_eq!(
            long_glossary(&format!("{}\n{}", table(31), table(30))).as_deref(),
            Some("docs/glossary.md: 61 terms; at most 60")
        );
    }
}
