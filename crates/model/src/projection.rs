//! What of each object a subscriber is sent: everything, the metadata, or the fields it named.
//!
//! A projection is a tree of field names, and equal requests give equal trees, so that their subscribers share one view. The JSON is
//! walked once and spans of it are copied: nothing is decoded and encoded again, so what is sent is what the apiserver wrote.
//!
//! Whatever leaves anything out is in *canonical form*: it also leaves out `metadata.resourceVersion`, which the message around the
//! object carries, and `metadata.managedFields`. So the bytes change only where something else about the object does, and are a
//! function of the object's history alone: that is what deltas and `only_changes` rest on.

use std::{borrow::Cow, fmt, sync::Arc};

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The most paths of a field mask.
pub const PATHS_MAX: usize = 64;

/// The longest path of a field mask.
pub const PATH_BYTES_MAX: usize = 1024;

/// The most names in a path of a field mask. It bounds the recursion of the walk, with room below serde_json's 128 levels.
pub const PATH_NAMES_MAX: usize = 32;

/// What `kubectl apply` notes in an object: its whole manifest once more.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

const RESOURCE_VERSION: [&str; 2] = ["metadata", "resourceVersion"];
const MANAGED_FIELDS: [&str; 2] = ["metadata", "managedFields"];
const LAST_APPLIED_PATH: [&str; 3] = ["metadata", "annotations", LAST_APPLIED];

/// How the apiserver names the type of an object of which it shows the metadata only.
pub const PARTIAL_KIND: &str = "PartialObjectMetadata";
/// Its group version.
pub const PARTIAL_API_VERSION: &str = "meta.k8s.io/v1";
/// Both, as members of the object.
const PARTIAL_TYPE: &[u8] = br#""kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1""#;

/// The parts of an object that a projection keeps, as a request names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parts<'a> {
    /// Everything.
    #[default]
    Full,
    /// The metadata, as a PartialObjectMetadata.
    Metadata,
    /// The fields at these paths: names separated by dots, a backslash before a dot or a backslash that is part of a name. A path
    /// through a list applies to each object in it.
    Fields(&'a [String]),
}

/// A field mask that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMask {
    /// It keeps nothing.
    #[error("a field mask needs at least one path, such as \"spec.nodeName\"")]
    Empty,
    /// Too many paths.
    #[error("{0} paths; at most {PATHS_MAX} are taken")]
    TooMany(usize),
    /// A path that is none, or that names what is never sent.
    #[error("path {path:?}: {problem}")]
    Path {
        /// The path, shortened.
        path: String,
        /// What is wrong with it and what would be right.
        problem: String,
    },
}

/// What of each object is sent. Equal requests give equal values. The default is the whole object as it came.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Projection {
    /// It says that it is a PartialObjectMetadata.
    partial: bool,
    /// `None`: the object's own bytes.
    root: Option<Arc<Node>>,
}

/// What becomes of the fields of a map.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Node {
    /// By name, in order.
    fields: Vec<(Box<str>, Rule)>,
    /// Fields that are not named are kept; in a field mask they are left out.
    keeps_others: bool,
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum Rule {
    Keep,
    Drop,
    Within(Node),
}

impl Projection {
    /// A projection to `parts`. Either drop gives the canonical form, and so does every type but [`Parts::Full`]; managed fields are
    /// left out by that already.
    pub fn new(parts: Parts<'_>, drop_managed_fields: bool, drop_last_applied: bool) -> Result<Self, InvalidMask> {
        let root = match parts {
            Parts::Full if drop_managed_fields || drop_last_applied => Rule::Keep,
            Parts::Full => return Ok(Self::default()),
            Parts::Metadata => {
                Rule::Within(Node { fields: vec![("metadata".into(), Rule::Keep)], keeps_others: false })
            }
            Parts::Fields(paths) => Rule::Within(mask(paths, drop_last_applied)?),
        };
        Ok(Self::canonical_of(parts == Parts::Metadata, root, drop_last_applied))
    }

    /// The metadata, whole: what the apiserver gives to who asks for a PartialObjectMetadata. The only one that leaves something out and
    /// is not in canonical form.
    pub fn partial_object_metadata() -> Self {
        let root = Node { fields: vec![("metadata".into(), Rule::Keep)], keeps_others: false };
        Self { partial: true, root: Some(Arc::new(root)) }
    }

    fn canonical_of(partial: bool, mut root: Rule, drop_last_applied: bool) -> Self {
        root.leave_out(&RESOURCE_VERSION);
        root.leave_out(&MANAGED_FIELDS);
        if drop_last_applied {
            root.leave_out(&LAST_APPLIED_PATH);
        }
        let root = match root {
            Rule::Within(node) => Some(Arc::new(node)),
            Rule::Keep | Rule::Drop => None,
        };
        Self { partial, root }
    }

    /// The same parts in canonical form.
    pub fn canonical(self) -> Self {
        if self.is_identity() { Self::canonical_of(false, Rule::Keep, false) } else { self }
    }

    /// Whether what is sent holds `metadata.resourceVersion`; if not, it is in canonical form.
    pub fn keeps_version(&self) -> bool {
        self.is_identity() || *self == Self::partial_object_metadata()
    }

    /// Whether the object's own bytes are sent, `metadata.resourceVersion` and all.
    pub fn is_identity(&self) -> bool {
        self.root.is_none()
    }

    /// What is left of an object's JSON. What is no JSON gives nothing, and so does a value that is no object, but for a projection
    /// that keeps what it does not know.
    pub fn apply(&self, json: &[u8]) -> Bytes {
        let Some(root) = &self.root else { return Bytes::copy_from_slice(json) };
        let Ok(text) = std::str::from_utf8(json) else { return Bytes::new() };
        let mut out = Vec::with_capacity(text.len() + PARTIAL_TYPE.len() + 1);
        let head = if self.partial { PARTIAL_TYPE } else { b"" };
        let mut walk = Walk { node: root, text, head, out: &mut out };
        match walk.value(text) {
            Ok(true) => Bytes::from(out.into_boxed_slice()),
            // An object without any of the fields is an object all the same.
            Ok(false) if text.trim_start().starts_with('{') => Bytes::from_static(b"{}"),
            _ => Bytes::new(),
        }
    }
}

/// The tree of a mask's paths; a path under another one is part of that already.
fn mask(paths: &[String], drop_last_applied: bool) -> Result<Node, InvalidMask> {
    match paths.len() {
        0 => return Err(InvalidMask::Empty),
        count if count > PATHS_MAX => return Err(InvalidMask::TooMany(count)),
        _ => {}
    }
    let mut root = Node { fields: Vec::new(), keeps_others: false };
    for path in paths {
        let wrong = |problem: String| InvalidMask::Path { path: path.chars().take(128).collect(), problem };
        let names = names(path).map_err(wrong)?;
        let begins = |with: &[&str]| with.iter().zip(&names).filter(|(a, b)| a == b).count() == with.len();
        if begins(&RESOURCE_VERSION) {
            return Err(wrong("a projection leaves out the version; it stands beside the object".to_owned()));
        }
        if begins(&MANAGED_FIELDS) {
            return Err(wrong("a projection leaves out managed fields; ask for the full object".to_owned()));
        }
        if drop_last_applied && begins(&LAST_APPLIED_PATH) {
            return Err(wrong("drop_last_applied leaves it out".to_owned()));
        }
        root.keep(&names);
    }
    Ok(root)
}

fn names(path: &str) -> Result<Vec<String>, String> {
    if path.len() > PATH_BYTES_MAX {
        return Err(format!("longer than {PATH_BYTES_MAX} bytes"));
    }
    let (mut names, mut name) = (Vec::new(), String::new());
    let mut chars = path.chars();
    while let Some(c) = chars.next() {
        match c {
            '.' => names.push(std::mem::take(&mut name)),
            '\\' => match chars.next() {
                Some(escaped @ ('.' | '\\')) => name.push(escaped),
                _ => return Err("a backslash stands before a dot or another backslash only".to_owned()),
            },
            c => name.push(c),
        }
    }
    names.push(name);
    if names.len() > PATH_NAMES_MAX {
        return Err(format!("more than {PATH_NAMES_MAX} names"));
    }
    if names.iter().any(String::is_empty) {
        return Err("a name in it is empty; write it like spec.nodeName, without a dot at either end".to_owned());
    }
    Ok(names)
}

impl Node {
    fn keep(&mut self, path: &[String]) {
        let Some((first, rest)) = path.split_first() else { return };
        let at = self.find(first).unwrap_or_else(|at| {
            self.fields
                .insert(at, (first.as_str().into(), Rule::Within(Self { fields: Vec::new(), keeps_others: false })));
            at
        });
        match &mut self.fields[at].1 {
            rule if rest.is_empty() => *rule = Rule::Keep,
            Rule::Within(node) => node.keep(rest),
            Rule::Keep | Rule::Drop => {}
        }
    }

    fn find(&self, name: &str) -> Result<usize, usize> {
        self.fields.binary_search_by(|(known, _)| (**known).cmp(name))
    }

    fn rule(&self, name: &str) -> &Rule {
        match (self.find(name), self.keeps_others) {
            (Ok(at), _) => &self.fields[at].1,
            (Err(_), true) => &Rule::Keep,
            (Err(_), false) => &Rule::Drop,
        }
    }
}

impl Rule {
    fn leave_out(&mut self, path: &[&str]) {
        let Some((first, rest)) = path.split_first() else {
            *self = Self::Drop;
            return;
        };
        if *self == Self::Keep {
            *self = Self::Within(Node { fields: Vec::new(), keeps_others: true });
        }
        let Self::Within(node) = self else { return };
        match node.find(first) {
            Ok(at) => node.fields[at].1.leave_out(rest),
            Err(at) if node.keeps_others => {
                let mut rule = Self::Keep;
                rule.leave_out(rest);
                node.fields.insert(at, ((*first).into(), rule));
            }
            // It is left out already.
            Err(_) => {}
        }
    }
}

/// Writes what a node leaves of a value; tells whether there was anything.
struct Walk<'w, 'de> {
    node: &'w Node,
    /// What spans are counted in.
    text: &'de str,
    /// Members that are written before the first of the map.
    head: &'static [u8],
    out: &'w mut Vec<u8>,
}

impl<'de> Walk<'_, 'de> {
    /// A whole value, which may be none of a map's.
    fn value(&mut self, raw: &'de str) -> Result<bool, serde_json::Error> {
        if self.node.keeps_others && !raw.trim_start().starts_with('{') {
            // Not what was expected: "annotations": null. It is kept, if it is JSON.
            let raw: &RawValue = serde_json::from_str(raw)?;
            self.out.extend_from_slice(raw.get().as_bytes());
            return Ok(true);
        }
        let mut json = serde_json::Deserializer::from_str(raw);
        let walk = Walk { node: self.node, text: self.text, head: self.head, out: self.out };
        let written = json.deserialize_any(walk)?;
        json.end().map(|()| written)
    }

    fn offset(&self, raw: &str) -> usize {
        raw.as_ptr() as usize - self.text.as_ptr() as usize
    }

    fn comma(&mut self, start: usize) {
        if self.out.len() > start {
            self.out.push(b',');
        }
    }

    /// Copies a run of members that stand side by side.
    fn flush(&mut self, run: &mut Option<(usize, usize)>, start: usize) {
        if let Some((from, to)) = run.take() {
            self.comma(start);
            self.out.extend_from_slice(&self.text.as_bytes()[from..to]);
        }
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_, 'de> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(mut self, deserializer: D) -> Result<bool, D::Error> {
        if self.node.keeps_others {
            let raw: &RawValue = serde::Deserialize::deserialize(deserializer)?;
            return self.value(raw.get()).map_err(serde::de::Error::custom);
        }
        deserializer.deserialize_any(self)
    }
}

/// Values that are neither map nor list hold none of the fields of a mask.
macro_rules! nothing {
    ($($visit:ident($($type:ty)?)),+) => {
        $(fn $visit<E>(self $(, _: $type)?) -> Result<bool, E> { Ok(false) })+
    };
}

impl<'de> Visitor<'de> for Walk<'_, 'de> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<bool, A::Error> {
        let begin = self.out.len();
        self.out.push(b'{');
        let start = self.out.len();
        self.out.extend_from_slice(self.head);
        let mut run: Option<(usize, usize)> = None;
        while let Some(key) = map.next_key::<&RawValue>()? {
            let key = key.get();
            match self.node.rule(&name_of(key)) {
                Rule::Keep => {
                    let value = map.next_value::<&RawValue>()?.get();
                    let from = run.map_or_else(|| self.offset(key), |(from, _)| from);
                    run = Some((from, self.offset(value) + value.len()));
                }
                Rule::Drop => {
                    self.flush(&mut run, start);
                    map.next_value::<IgnoredAny>()?;
                }
                Rule::Within(node) => {
                    self.flush(&mut run, start);
                    let before = self.out.len();
                    self.comma(start);
                    self.out.extend_from_slice(key.as_bytes());
                    self.out.push(b':');
                    let within = Walk { node, text: self.text, head: b"", out: &mut *self.out };
                    if !map.next_value_seed(within)? {
                        self.out.truncate(before);
                    }
                }
            }
        }
        self.flush(&mut run, start);
        if self.out.len() == start {
            self.out.truncate(begin);
            return Ok(false);
        }
        self.out.push(b'}');
        Ok(true)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        let begin = self.out.len();
        self.out.push(b'[');
        let start = self.out.len();
        loop {
            let before = self.out.len();
            if before > start {
                self.out.push(b',');
            }
            let element = Element(Walk { node: self.node, text: self.text, head: b"", out: &mut *self.out });
            match seq.next_element_seed(element)? {
                Some(true) => {}
                Some(false) => self.out.truncate(before),
                None => {
                    self.out.truncate(before);
                    break;
                }
            }
        }
        if self.out.len() == start {
            self.out.truncate(begin);
            return Ok(false);
        }
        self.out.push(b']');
        Ok(true)
    }

    nothing!(visit_unit(), visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f64(f64), visit_str(&str));
}

/// An element of a list: an object keeps its place, and what is no object has none of the fields. A list in a list is not looked
/// into: its depth has no bound.
struct Element<'w, 'de>(Walk<'w, 'de>);

impl<'de> DeserializeSeed<'de> for Element<'_, 'de> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Element<'_, 'de> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<bool, A::Error> {
        let Walk { node, text, head, out } = self.0;
        if !(Walk { node, text, head, out: &mut *out }).visit_map(map)? {
            out.extend_from_slice(b"{}");
        }
        Ok(true)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(false)
    }

    nothing!(visit_unit(), visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f64(f64), visit_str(&str));
}

/// The name in a key's JSON.
fn name_of(key: &str) -> Cow<'_, str> {
    match key.trim_matches('"') {
        plain if !key.contains('\\') => Cow::Borrowed(plain),
        _ => serde_json::from_str(key).map_or(Cow::Borrowed(""), Cow::Owned),
    }
}

#[cfg(test)]
mod tests;
