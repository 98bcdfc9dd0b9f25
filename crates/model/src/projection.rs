//! The parts of each object that a subscriber receives: everything, the metadata, or selected
//! fields.
//!
//! A projection is a tree of field names. Equal requests give equal trees, so their subscribers
//! share one view. The JSON is walked once and spans of it are copied. Decoding and encoding it
//! again would be slower and could change the bytes that the apiserver wrote.
//!
//! A projection of gRPC that leaves anything out is in *canonical form*: it also leaves out
//! `metadata.resourceVersion`, which the surrounding message carries, and `metadata.managedFields`.
//! So the bytes change only if something else in the object changes, and they depend only on the
//! object's history. Deltas and `only_changes` rely on that. Projections of the Kubernetes API keep
//! the version.

mod difference;
mod rules;

use std::{borrow::Cow, fmt, sync::Arc};

use bytes::Bytes;
use kubefan_common::planted::{self, Bug};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

pub use difference::Difference;
use rules::{Node, Rule};

/// Maximum number of paths in a field mask.
pub const PATHS_MAX: usize = 64;

/// Maximum length of a path, in bytes.
pub const PATH_BYTES_MAX: usize = 1024;

/// Maximum number of names in a path. It bounds the recursion of the walk, well below the 128
/// levels that serde_json allows.
pub const PATH_NAMES_MAX: usize = 32;

/// The annotation in which `kubectl apply` stores the whole manifest.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

const RESOURCE_VERSION: [&str; 2] = ["metadata", "resourceVersion"];
const MANAGED_FIELDS: [&str; 2] = ["metadata", "managedFields"];
const LAST_APPLIED_PATH: [&str; 3] = ["metadata", "annotations", LAST_APPLIED];

/// The kind of an object that is reduced to its metadata.
pub const PARTIAL_KIND: &str = "PartialObjectMetadata";
/// `apiVersion` of a PartialObjectMetadata.
pub const PARTIAL_API_VERSION: &str = "meta.k8s.io/v1";
/// Kind and `apiVersion` as JSON members.
const PARTIAL_TYPE: &[u8] = br#""kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1""#;

/// The parts of an object that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parts<'a> {
    /// Everything.
    #[default]
    Full,
    /// The metadata, as a `PartialObjectMetadata`.
    Metadata,
    /// The fields at these paths: names separated by dots. A backslash escapes a dot or a backslash
    /// in a name. A path through a list applies to each object in the list.
    Fields(&'a [String]),
}

/// The reason why a field mask is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMask {
    /// The mask has no paths.
    #[error("a field mask needs at least one path, such as \"spec.nodeName\"")]
    Empty,
    /// Too many paths.
    #[error("{0} paths; the maximum is {PATHS_MAX}")]
    TooMany(usize),
    /// A path that is malformed, or that names a field that is never sent.
    #[error("path {path:?}: {problem}")]
    Path {
        /// The path, cut to 128 characters.
        path: String,
        /// The mistake, and the text to write instead.
        problem: String,
    },
}

/// The parts of each object that are sent. Equal requests give equal values. The default is the
/// whole object, unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Projection {
    /// Whether the result calls itself a `PartialObjectMetadata`.
    partial: bool,
    /// `None` for the whole object, unchanged.
    root: Option<Arc<Node>>,
}

impl Projection {
    /// The memory of the paths, in bytes.
    pub fn heap_bytes(&self) -> usize {
        self.root.as_ref().map_or(0, |root| size_of::<Node>() + root.heap_bytes())
    }

    /// A projection to `parts`. Everything but [`Parts::Full`] without either `drop_` option gives
    /// the canonical form, which leaves out the managed fields in any case.
    ///
    /// # Errors
    /// If the paths of [`Parts::Fields`] are not a valid field mask.
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

    /// The whole metadata, as the apiserver sends a `PartialObjectMetadata`.
    pub fn partial_object_metadata() -> Self {
        let root = Node { fields: vec![("metadata".into(), Rule::Keep)], keeps_others: false };
        Self { partial: true, root: Some(Arc::new(root)) }
    }

    /// The projection without `metadata.managedFields`, as the apiserver sends it for
    /// `drop=metadata.managedFields` (KEP-5958).
    #[must_use]
    pub fn without_managed_fields(self) -> Self {
        let root = match self.root.map(Arc::unwrap_or_clone) {
            Some(node) => Rule::Within(node),
            None => Rule::Keep,
        };
        Self::of(self.partial, root, &[&MANAGED_FIELDS])
    }

    fn canonical_of(partial: bool, root: Rule, drop_last_applied: bool) -> Self {
        if drop_last_applied && !planted::is(Bug::LastAppliedStays) {
            Self::of(partial, root, &[&RESOURCE_VERSION, &MANAGED_FIELDS, &LAST_APPLIED_PATH])
        } else {
            Self::of(partial, root, &[&RESOURCE_VERSION, &MANAGED_FIELDS])
        }
    }

    fn of(partial: bool, mut root: Rule, without: &[&[&str]]) -> Self {
        for path in without {
            root.leave_out(path);
        }
        let root = match root {
            Rule::Within(node) => Some(Arc::new(node)),
            Rule::Keep | Rule::Drop => None,
        };
        Self { partial, root }
    }

    /// The projection in canonical form.
    pub fn canonical(self) -> Self {
        if self.is_identity() { Self::canonical_of(false, Rule::Keep, false) } else { self }
    }

    /// Whether the result contains `metadata.resourceVersion`. If not, it is in canonical form.
    pub fn keeps_version(&self) -> bool {
        self.keeps(&RESOURCE_VERSION)
    }

    /// Whether the result contains `metadata.managedFields`.
    pub fn keeps_managed_fields(&self) -> bool {
        self.keeps(&MANAGED_FIELDS)
    }

    fn keeps(&self, path: &[&str]) -> bool {
        let mut node = self.root.as_deref();
        for name in path {
            match node.map(|node| node.rule(name)) {
                None | Some(Rule::Keep) => return true,
                Some(Rule::Drop) => return false,
                Some(Rule::Within(within)) => node = Some(within),
            }
        }
        true
    }

    /// Whether the result calls itself a `PartialObjectMetadata`.
    pub fn is_partial(&self) -> bool {
        self.partial
    }

    /// Whether objects are sent unchanged.
    pub fn is_identity(&self) -> bool {
        self.root.is_none()
    }

    /// Applies the projection to an object's JSON. Invalid JSON gives an empty result. So does a
    /// value that is not an object, unless the projection keeps fields that it does not name.
    pub fn apply(&self, json: &[u8]) -> Bytes {
        let Some(root) = &self.root else { return Bytes::copy_from_slice(json) };
        let Ok(text) = std::str::from_utf8(json) else { return Bytes::new() };
        let mut out = Vec::with_capacity(text.len() + PARTIAL_TYPE.len() + 1);
        let head = if self.partial { PARTIAL_TYPE } else { b"" };
        let mut walk = Walk { node: root, text, head, out: &mut out };
        match walk.value(text) {
            Ok(true) => Bytes::from(out.into_boxed_slice()),
            // If the object lacks all of the fields, the result is an empty object.
            Ok(false) if text.trim_start().starts_with('{') => Bytes::from_static(b"{}"),
            _ => Bytes::new(),
        }
    }
}

/// The tree of a mask's paths. A path below another path of the mask adds nothing.
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
            return Err(wrong("projections leave out the resource version; it is a field of the message".to_owned()));
        }
        if begins(&MANAGED_FIELDS) {
            return Err(wrong("projections leave out managed fields; request the full object".to_owned()));
        }
        if drop_last_applied && begins(&LAST_APPLIED_PATH) {
            return Err(wrong("drop_last_applied leaves out this annotation".to_owned()));
        }
        root.keep(&names);
    }
    root.shrink();
    Ok(root)
}

fn names(path: &str) -> Result<Vec<String>, String> {
    if path.len() > PATH_BYTES_MAX {
        return Err(format!("longer than {PATH_BYTES_MAX} bytes"));
    }
    let mut names = Vec::new();
    let mut name = String::new();
    let mut chars = path.chars();
    while let Some(c) = chars.next() {
        match c {
            '.' => names.push(std::mem::take(&mut name)),
            '\\' => match chars.next() {
                Some(escaped @ ('.' | '\\')) => name.push(escaped),
                _ => return Err("a backslash may only escape a dot or another backslash".to_owned()),
            },
            c => name.push(c),
        }
    }
    names.push(name);
    if names.len() > PATH_NAMES_MAX {
        return Err(format!("more than {PATH_NAMES_MAX} names"));
    }
    if names.iter().any(String::is_empty) {
        return Err("it contains an empty name; write it like spec.nodeName, without a dot at either end".to_owned());
    }
    Ok(names)
}

/// Writes the parts of a value that `node` keeps. Its result is whether it wrote anything.
struct Walk<'w, 'de> {
    node: &'w Node,
    /// The whole JSON, in which offsets are counted.
    text: &'de str,
    /// Members to write before the first member of the map.
    head: &'static [u8],
    out: &'w mut Vec<u8>,
}

impl<'de> Walk<'_, 'de> {
    /// A whole value, which may be of any type.
    fn value(&mut self, raw: &'de str) -> Result<bool, serde_json::Error> {
        if self.node.keeps_others && !raw.trim_start().starts_with('{') {
            // An unexpected type, such as "annotations": null. It is kept if it is valid JSON.
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

    /// Copies a run of adjacent members.
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

/// Values that are neither a map nor a list cannot have the fields of a mask.
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

/// An element of a list. An object stays in its position, even if it lacks all of the fields; any
/// other value is left out. Lists within lists are skipped, because their depth has no bound.
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
