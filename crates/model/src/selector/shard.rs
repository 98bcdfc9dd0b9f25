//! Shard selectors: objects by the hash of their uid or namespace, so that the replicas of a
//! controller each read a part of a collection (KEP-5866).
//!
//! The syntax is that of the apiserver's `sharding.Parse`, which uses a parser of CEL: one or more
//! `shardRange(object.metadata.uid, '0x…', '0x…')`, joined by `||`. Only this much of CEL is read
//! here: parentheses and both kinds of quotes, but no escapes and no comments. Text that the two
//! parsers would read differently is refused, because the apiserver answers an invalid selector
//! with an error too.

use std::fmt;

use super::{SELECTOR_BYTES_MAX, SelectorError, check_length};

/// One more than the largest hash.
const HASHES: u128 = 1 << 64;
/// The digits of a hash.
const DIGITS: usize = 16;
/// More than the longest known path.
const PATH_BYTES_MAX: usize = 64;
/// Maximum depth of parentheses: CEL's parser has a limit too.
const DEPTH_MAX: usize = 32;

/// The field whose hash decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ShardField {
    Uid,
    Namespace,
}

impl ShardField {
    fn parse(path: &str) -> Option<Self> {
        match path {
            "object.metadata.uid" => Some(Self::Uid),
            "object.metadata.namespace" => Some(Self::Namespace),
            _ => None,
        }
    }

    fn path(self) -> &'static str {
        match self {
            Self::Uid => "object.metadata.uid",
            Self::Namespace => "object.metadata.namespace",
        }
    }
}

/// Hashes from the first up to, but without, the second.
type Range = (u128, u128);

/// Selects the objects whose hash is in one of several ranges.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShardSelector {
    field: ShardField,
    /// At least one, in the order of the text. None is empty.
    ranges: Vec<Range>,
}

/// The objects of a [`ShardSelector`]. Equal sets compare equal, whatever their selectors' texts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shards {
    field: ShardField,
    /// Sorted; no two touch or overlap.
    ranges: Box<[Range]>,
}

impl ShardSelector {
    /// Parses a selector.
    ///
    /// # Errors
    /// If it is not one or more `shardRange()` of one field, joined by `||`.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        check_length(text)?;
        let mut parser = Parser { text, at: 0 };
        let mut ranges = Vec::new();
        parser.any_of(&mut ranges, 0)?;
        parser.skip_spaces();
        if parser.at < text.len() {
            return Err(parser.expected("|| or the end"));
        }
        let mut fields = ranges.iter().map(|(field, _)| *field);
        let Some(field) = fields.next() else { return Err(parser.expected("shardRange()")) };
        if let Some(other) = fields.find(|other| *other != field) {
            let message =
                format!("all shard ranges must use the same field, got {:?} and {:?}", field.path(), other.path());
            return Err(SelectorError::new(0, message));
        }
        Ok(Self { field, ranges: ranges.into_iter().map(|(_, range)| range).collect() })
    }

    /// Memory of the selector, in bytes.
    pub fn heap_bytes(&self) -> usize {
        size_of_val(&*self.ranges)
    }

    /// The objects that it selects; `None` for all.
    pub fn shards(&self) -> Option<Shards> {
        let mut sorted = self.ranges.clone();
        sorted.sort_unstable();
        let mut ranges: Vec<Range> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            match ranges.last_mut() {
                Some((_, last)) if start <= *last => *last = end.max(*last),
                _ => ranges.push((start, end)),
            }
        }
        (*ranges != [(0, HASHES)]).then(|| Shards { field: self.field, ranges: ranges.into() })
    }
}

impl fmt::Display for ShardSelector {
    /// In the apiserver's form, which `shardInfo` of a list shows (`shardSelector.String`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_ranges(self.field, &self.ranges, f)
    }
}

impl fmt::Display for Shards {
    /// As a selector.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_ranges(self.field, &self.ranges, f)
    }
}

fn write_ranges(field: ShardField, ranges: &[Range], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (index, (start, end)) in ranges.iter().enumerate() {
        let or = if index == 0 { "" } else { " || " };
        write!(f, "{or}shardRange({}, '0x{start:016x}', '0x{end:016x}')", field.path())?;
    }
    Ok(())
}

impl Shards {
    /// Whether the object with this namespace and uid is selected.
    pub fn contains(&self, namespace: &str, uid: &str) -> bool {
        let hash = fnv1a(match self.field {
            ShardField::Uid => uid,
            ShardField::Namespace => namespace,
        });
        let after = self.ranges.partition_point(|(start, _)| *start <= hash);
        after > 0 && hash < self.ranges[after - 1].1
    }

    /// Memory of the shards, in bytes.
    pub fn heap_bytes(&self) -> usize {
        size_of_val(&*self.ranges)
    }
}

/// FNV-1a, 64 bits (`sharding.HashField`). All apiservers and kubefans must agree on it.
fn fnv1a(text: &str) -> u128 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    text.bytes().fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME)).into()
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn skip_spaces(&mut self) {
        self.at = self.text.len() - self.rest().trim_start_matches([' ', '\t', '\n', '\r', '\u{c}']).len();
    }

    fn expected(&self, what: &str) -> SelectorError {
        let form = "write it like shardRange(object.metadata.uid, '0x0000000000000000', '0x8000000000000000')";
        let found = match self.rest().chars().next() {
            Some(_) => format!("{:?}", self.rest().chars().take(20).collect::<String>()),
            None => "the end".to_owned(),
        };
        SelectorError::new(self.at.min(SELECTOR_BYTES_MAX), format!("expected {what}, found {found}; {form}"))
    }

    fn takes(&mut self, token: &str) -> bool {
        self.skip_spaces();
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn take(&mut self, token: &str) -> Result<(), SelectorError> {
        if self.takes(token) { Ok(()) } else { Err(self.expected(token)) }
    }

    /// A name, which may be followed by anything that is no part of a name.
    fn name(&mut self) -> &'a str {
        self.skip_spaces();
        let rest = self.rest();
        let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        self.at += len;
        &rest[..len]
    }

    /// Expressions joined by `||`.
    fn any_of(&mut self, ranges: &mut Vec<(ShardField, Range)>, depth: usize) -> Result<(), SelectorError> {
        loop {
            if self.takes("(") {
                if depth == DEPTH_MAX {
                    return Err(self.expected("fewer parentheses"));
                }
                self.any_of(ranges, depth + 1)?;
                self.take(")")?;
            } else {
                ranges.push(self.range()?);
            }
            if !self.takes("||") {
                return Ok(());
            }
        }
    }

    fn range(&mut self) -> Result<(ShardField, Range), SelectorError> {
        let start = self.at;
        if self.name() != "shardRange" {
            self.at = start;
            self.skip_spaces();
            return Err(self.expected("shardRange()"));
        }
        self.take("(")?;
        let field = self.field()?;
        self.take(",")?;
        let from = self.hash("hexStart")?;
        self.take(",")?;
        let to = self.hash("hexEnd")?;
        self.take(")")?;
        if from >= to {
            let message = format!("shard range start 0x{from:016x} must be less than end 0x{to:016x}");
            return Err(SelectorError::new(start, message));
        }
        Ok((field, (from, to)))
    }

    fn field(&mut self) -> Result<ShardField, SelectorError> {
        self.skip_spaces();
        let start = self.at;
        let mut path = self.name().to_owned();
        while path.len() < PATH_BYTES_MAX && self.takes(".") {
            path.push('.');
            path.push_str(self.name());
        }
        path.truncate(PATH_BYTES_MAX);
        ShardField::parse(&path).ok_or_else(|| {
            let known = [ShardField::Uid.path(), ShardField::Namespace.path()].join(", ");
            SelectorError::new(start, format!("unsupported field path {path:?}; supported: {known}"))
        })
    }

    /// A hash in quotes: `0x` and 16 hexadecimal digits, or 2^64.
    fn hash(&mut self, name: &str) -> Result<u128, SelectorError> {
        self.skip_spaces();
        let start = self.at;
        let quote = self.rest().chars().next().filter(|c| matches!(c, '\'' | '"'));
        let text = quote.and_then(|quote| {
            let (text, _) = self.rest()[1..].split_once(quote)?;
            self.at += text.len() + 2;
            Some(text)
        });
        let Some(text) = text else { return Err(self.expected("a string literal")) };
        let is_digit = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        let digits = text.strip_prefix("0x").filter(|digits| digits.len() == DIGITS && digits.chars().all(is_digit));
        match digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()) {
            Some(hash) => Ok(hash.into()),
            None if text == "0x10000000000000000" => Ok(HASHES),
            None => {
                let message = format!(
                    "{name} must be a 0x-prefixed {DIGITS}-digit hex value in lowercase, or 0x10000000000000000, got \
                     {:?}",
                    text.chars().take(32).collect::<String>()
                );
                Err(SelectorError::new(start, message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: &str = "shardRange(object.metadata.uid, '0x0000000000000000', '0x8000000000000000')";

    fn parse(text: &str) -> ShardSelector {
        ShardSelector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn the_hash_is_the_apiservers() {
        // From `hash/fnv`'s tests.
        for (text, hash) in [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("abc", 0xe71f_a219_0541_574b)]
        {
            assert_eq!(fnv1a(text), hash, "{text:?}");
        }
    }

    #[test]
    fn shards_that_cover_all_hashes_select_each_object_once() {
        let one = "0x0000000000000000', '0x5555555555555555";
        let other = "0x5555555555555555', '0x10000000000000000";
        for field in ["uid", "namespace"] {
            let shards = [one, other].map(|range| parse(&format!("shardRange(object.metadata.{field}, '{range}')")));
            let shards = shards.map(|shard| shard.shards().unwrap());
            let mut counts = [0, 0];
            for i in 0..1000_u128 {
                let id = |n: u128| format!("{:032x}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
                let namespace = id(i % 100);
                let uid = id(i);
                let selected = shards.each_ref().map(|shards| usize::from(shards.contains(&namespace, &uid)));
                assert_eq!(selected.iter().sum::<usize>(), 1, "{namespace} {uid}");
                counts = [counts[0] + selected[0], counts[1] + selected[1]];
            }
            assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
        }
    }

    #[test]
    fn equal_sets_of_hashes_are_equal_and_the_text_is_kept() {
        let two = "shardRange(object.metadata.uid, '0x4000000000000000', '0x8000000000000000') || \
                   shardRange(object.metadata.uid, '0x0000000000000000', '0x4000000000000000')";
        assert_eq!(parse(two).shards(), parse(HALF).shards());
        assert_eq!(parse(two).to_string(), two);
        let spaced = HALF.replace(", ", "  ,\n").replace('(', " ( ").replace('\'', "\"");
        assert_eq!(parse(&format!("((({spaced})))||{HALF}")).to_string(), format!("{HALF} || {HALF}"));
        let all = "shardRange(object.metadata.namespace, '0x0000000000000000', '0x10000000000000000')";
        assert_eq!((parse(all).shards(), parse(all).to_string()), (None, all.to_owned()));
    }

    #[test]
    fn selectors_that_the_apiserver_refuses_are_refused() {
        let range = |from: &str, to: &str| format!("shardRange(object.metadata.uid, {from}, {to})");
        let zero = "'0x0000000000000000'";
        let one = "'0x0000000000000001'";
        for text in [
            "",
            "  ",
            "true",
            "shardRange",
            "shardRange()",
            "shardRanges(object.metadata.uid, '0x0000000000000000', '0x0000000000000001')",
            "object.metadata.uid",
            &range(one, zero),
            &range(one, one),
            &range(zero, "'0x1'"),
            &range(zero, "'0x000000000000000A'"),
            &range(zero, "'0x00000000000000001'"),
            &range(zero, "'0x10000000000000001'"),
            &range(zero, "'0000000000000001'"),
            &range(zero, "1"),
            &range(zero, "'0x0000000000000001"),
            &range(zero, "'0x00000000000000é1'"),
            &format!("{HALF} && {HALF}"),
            &format!("{HALF} | {HALF}"),
            &format!("{HALF} ||"),
            &format!("{HALF} {HALF}"),
            &format!("({HALF}"),
            &format!("{HALF})"),
            &format!("!{HALF}"),
            &HALF.replace("uid", "name"),
            &HALF.replace("object.", ""),
            &format!("{HALF} || {}", HALF.replace("uid", "namespace")),
            &format!("{}{HALF}{}", "(".repeat(100), ")".repeat(100)),
            &"shardRange(".repeat(2000),
            &format!("shardRange({}", ".".repeat(10_000)),
            &format!("shardRange({}, '0x0000000000000000', '0x8000000000000000')", "a".repeat(1000)),
        ] {
            assert!(ShardSelector::parse(text).is_err(), "{text}");
        }
        let error = ShardSelector::parse("shardRange(object.metadata.name, 'a', 'b')").unwrap_err().to_string();
        assert!(error.contains("object.metadata.name") && error.contains("object.metadata.namespace"), "{error}");
    }
}
