//! The fields in which two states of an object differ.
//!
//! Subscribers with `only_changes` skip a change that their projection does not show. To project
//! both states costs microseconds for every distinct projection. The difference is computed once,
//! and most projections only need to compare themselves with it.

use std::{borrow::Cow, collections::HashMap, fmt};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{Node, Projection, Rule, name_of};

/// Depth below which a difference takes everything as different. A field mask has no more names.
const LEVELS_MAX: usize = super::PATH_NAMES_MAX;

/// Maximum number of differing fields. With more of them a difference says that everything differs.
const FIELDS_MAX: usize = 256;

/// The fields in which two states of an object differ. It may contain more of them, never fewer.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference(Part);

#[derive(Debug, PartialEq, Eq)]
enum Part {
    /// The texts are equal.
    Nothing,
    /// Anything may differ.
    Everything,
    /// Only these fields of an object differ.
    Fields(Vec<(Box<str>, Self)>),
    /// Objects in a list differ, each in this.
    Elements(Box<Self>),
}

impl Difference {
    /// The difference of two states of an object, as JSON. Each text is read once, and again for
    /// each level at which something in it differs.
    pub fn new(before: &[u8], after: &[u8]) -> Self {
        let part = match (std::str::from_utf8(before), std::str::from_utf8(after)) {
            (Ok(before), Ok(after)) => part(before, after, LEVELS_MAX, &mut { FIELDS_MAX }),
            _ => Part::Everything,
        };
        Self(part)
    }

    /// Memory of the difference, in bytes.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.0.bytes()
    }

    /// Whether a projection of the two states may differ. If not, [`Projection::apply`] gives the
    /// same bytes for both.
    pub fn may_change(&self, projection: &Projection) -> bool {
        match &projection.root {
            Some(root) => self.0.is_seen_within(root),
            None => self.0 != Part::Nothing,
        }
    }
}

impl Part {
    fn bytes(&self) -> usize {
        match self {
            Self::Nothing | Self::Everything => 0,
            Self::Elements(part) => size_of::<Self>() + part.bytes(),
            Self::Fields(fields) => {
                fields.iter().map(|(name, part)| size_of::<(Box<str>, Self)>() + name.len() + part.bytes()).sum()
            }
        }
    }

    fn is_seen_by(&self, rule: &Rule) -> bool {
        match rule {
            Rule::Keep => *self != Self::Nothing,
            Rule::Drop => false,
            Rule::Within(node) => self.is_seen_within(node),
        }
    }

    fn is_seen_within(&self, node: &Node) -> bool {
        match self {
            Self::Nothing => false,
            Self::Everything => true,
            // A value that is no object is kept as a whole.
            Self::Elements(_) if node.keeps_others => true,
            Self::Elements(part) => part.is_seen_within(node),
            Self::Fields(fields) => fields.iter().any(|(name, part)| part.is_seen_by(node.rule(name))),
        }
    }
}

/// `room` is the number of differing fields that may still be named.
fn part(before: &str, after: &str, levels: usize, room: &mut usize) -> Part {
    if before == after {
        return Part::Nothing;
    }
    let Some(levels) = levels.checked_sub(1) else { return Part::Everything };
    let found = match (before.as_bytes().first(), after.as_bytes().first()) {
        (Some(b'{'), Some(b'{')) => fields(before, after, levels, room),
        (Some(b'['), Some(b'[')) => elements(before, after, levels, room),
        _ => None,
    };
    found.unwrap_or(Part::Everything)
}

/// The fields in which two objects differ. `None` if they differ in anything else, such as the
/// order of their fields.
fn fields(before: &str, after: &str, levels: usize, room: &mut usize) -> Option<Part> {
    let before = members(before)?;
    let after = members(after)?;
    let mut old = HashMap::with_capacity(before.len());
    for (place, member) in before.iter().enumerate() {
        if old.insert(&*member.name, (place, member)).is_some() {
            return None;
        }
    }
    let mut differing = Vec::new();
    let mut next = 0;
    for member in &after {
        let found = match old.remove(&*member.name) {
            Some((place, _)) if place < next => return None,
            Some((place, known)) => {
                next = place + 1;
                if known.key == member.key { part(known.value, member.value, levels, room) } else { Part::Everything }
            }
            None => Part::Everything,
        };
        if found != Part::Nothing {
            differing.push((member.name.as_ref().into(), found));
        }
    }
    differing.extend(old.into_keys().map(|name| (name.into(), Part::Everything)));
    *room = room.checked_sub(differing.len())?;
    Some(Part::Fields(differing))
}

/// Returns the union of the differences between the objects of two lists. `None` if the lists
/// differ in anything else.
fn elements(before: &str, after: &str, levels: usize, room: &mut usize) -> Option<Part> {
    let Elements(before) = serde_json::from_str(before).ok()?;
    let Elements(after) = serde_json::from_str(after).ok()?;
    if before.len() != after.len() {
        return None;
    }
    let mut all = Vec::new();
    for (before, after) in before.into_iter().zip(after) {
        match part(before.get(), after.get(), levels, room) {
            Part::Nothing => {}
            Part::Fields(fields) => all.extend(fields),
            Part::Everything | Part::Elements(_) => return None,
        }
    }
    Some(Part::Elements(Box::new(Part::Fields(all))))
}

struct Member<'a> {
    /// The name as written in the JSON.
    key: &'a str,
    name: Cow<'a, str>,
    value: &'a str,
}

/// The members of an object. `None` if there is white space between them, because projections copy
/// the text between two members.
fn members(text: &str) -> Option<Vec<Member<'_>>> {
    let Members(members) = serde_json::from_str(text).ok()?;
    let separators = if members.is_empty() { 2 } else { 1 + 2 * members.len() };
    let lengths = members.iter().map(|member| member.key.len() + member.value.len()).sum::<usize>();
    (lengths + separators == text.len()).then_some(members)
}

struct Members<'a>(Vec<Member<'a>>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some((key, value)) = map.next_entry::<&RawValue, &RawValue>()? {
                    members.push(Member { key: key.get(), name: name_of(key.get()), value: value.get() });
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Read)
    }
}

#[derive(serde::Deserialize)]
struct Elements<'a>(#[serde(borrow)] Vec<&'a RawValue>);
