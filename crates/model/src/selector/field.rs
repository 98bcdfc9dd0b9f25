//! Field selectors, parsed like apimachinery's `fields.ParseSelector`. Whether a resource has a
//! field is not checked here.

use std::{borrow::Cow, fmt, sync::Arc};

use super::{SelectorError, check_length};

/// A conjunction of conditions on fields. The default selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct FieldSelector {
    terms: Arc<[FieldTerm]>,
}

/// One condition, such as `spec.nodeName=n1`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FieldTerm {
    /// The field's path as written, such as `spec.nodeName`. It may not exist in the resource.
    pub path: Box<str>,
    /// Comparison of the field with the value.
    pub op: FieldOperator,
    /// The value, with escapes resolved.
    pub value: Box<str>,
}

/// The comparison of a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FieldOperator {
    /// `=` or `==`.
    Equals,
    /// `!=`.
    NotEquals,
}

/// The path of the field with an object's name.
pub const NAME_FIELD: &str = "metadata.name";

/// A term that requires a name of the objects. Of several, the least counts: the apiserver takes
/// the one whose text sorts first, and authorizes a request with it for that name
/// (`RequiresExactMatch`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequiredName {
    /// Its text.
    term: Box<str>,
    name: Box<str>,
}

impl RequiredName {
    /// Requires this name.
    pub fn new(name: &str) -> Self {
        Self { term: format!("{NAME_FIELD}={}", escape(name)).into(), name: name.into() }
    }

    /// The text of the term.
    pub fn term(&self) -> &str {
        &self.term
    }

    /// The name, with escapes resolved.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// A field selector that was parsed, and the name that it requires of the objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedFields {
    /// The selector.
    pub selector: FieldSelector,
    /// The first of its required names.
    pub required_name: Option<RequiredName>,
}

impl ParsedFields {
    /// Parses a selector.
    ///
    /// # Errors
    /// As [`FieldSelector::parse`].
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        check_length(text)?;
        let mut parts = split_terms(text);
        // If several terms are wrong, the apiserver reports the one that sorts first.
        parts.sort_unstable_by_key(|(_, part)| *part);
        let mut terms = Vec::new();
        let mut required_name = None;
        for (start, term) in parts {
            if term.is_empty() {
                continue;
            }
            let Some((path, op, value)) = split_term(term) else {
                let message = format!("invalid selector: '{text}'; can't understand '{term}'");
                return Err(SelectorError::new(start, message));
            };
            let value_start = start + term.len() - value.len();
            let value = unescape(value).map_err(|(at, message)| {
                SelectorError::new(value_start + at, format!("invalid field selector: {message}"))
            })?;
            if required_name.is_none() && path == NAME_FIELD && op == FieldOperator::Equals {
                required_name = Some(RequiredName { term: term.into(), name: value.as_str().into() });
            }
            // The apiserver drops a term that has neither path nor value.
            if !path.is_empty() || !value.is_empty() {
                terms.push(FieldTerm { path: path.into(), op, value: value.into() });
            }
        }
        Ok(Self { selector: FieldSelector::new(terms), required_name })
    }
}

impl FieldSelector {
    /// Parses `path=value,path!=value`. In a value, `\`, `,` and `=` are escaped with `\`. An empty
    /// text selects everything.
    ///
    /// # Errors
    /// A term without an operator, an unknown escape, an unescaped `=`, or more than
    /// [`super::SELECTOR_BYTES_MAX`] bytes.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        ParsedFields::parse(text).map(|parsed| parsed.selector)
    }

    /// A selector of these terms.
    pub fn new(terms: impl IntoIterator<Item = FieldTerm>) -> Self {
        let mut terms: Vec<_> = terms.into_iter().collect();
        terms.sort_unstable();
        terms.dedup();
        Self { terms: terms.into() }
    }

    /// Counts the terms in a text, and repeated ones each time. Parsing returns at most as many,
    /// and costs much more.
    pub fn count_terms(text: &str) -> usize {
        let mut terms = 0;
        let mut is_empty = true;
        let mut escaped = false;
        for byte in text.bytes() {
            if byte == b',' && !escaped {
                is_empty = true;
            } else {
                terms += usize::from(is_empty);
                is_empty = false;
            }
            escaped = byte == b'\\' && !escaped;
        }
        terms
    }

    /// Whether there are no terms.
    pub fn is_everything(&self) -> bool {
        self.terms.is_empty()
    }

    /// The terms, sorted and without duplicates.
    pub fn terms(&self) -> &[FieldTerm] {
        &self.terms
    }

    /// Whether all terms hold. `get` reads a field; `None` counts as empty.
    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<Cow<'a, str>>) -> bool {
        self.terms.iter().all(|term| {
            let value = get(&term.path).unwrap_or_default();
            (*value == *term.value) == (term.op == FieldOperator::Equals)
        })
    }
}

/// The canonical text, which parses to the same selector.
impl fmt::Display for FieldSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, term) in self.terms.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let op = if term.op == FieldOperator::Equals { "=" } else { "!=" };
            write!(f, "{comma}{}{op}{}", term.path, escape(&term.value))?;
        }
        Ok(())
    }
}

/// The terms between unescaped commas, with their positions.
fn split_terms(text: &str) -> Vec<(usize, &str)> {
    let mut terms = Vec::new();
    let mut start = 0;
    let mut escaped = false;
    for (i, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ',' => {
                terms.push((start, &text[start..i]));
                start = i + 1;
            }
            _ => {}
        }
    }
    terms.push((start, &text[start..]));
    terms
}

/// Splits a term at its first operator. Paths have no escapes.
fn split_term(term: &str) -> Option<(&str, FieldOperator, &str)> {
    let equals = term.find('=')?;
    let (path, rest) = term.split_at(equals);
    match (path.strip_suffix('!'), rest.strip_prefix("==")) {
        (Some(path), _) => Some((path, FieldOperator::NotEquals, &rest[1..])),
        (None, Some(value)) => Some((path, FieldOperator::Equals, value)),
        (None, None) => Some((path, FieldOperator::Equals, &rest[1..])),
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=")
}

fn unescape(text: &str) -> Result<String, (usize, String)> {
    let mut value = String::with_capacity(text.len());
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some((_, c @ ('\\' | ',' | '='))) => value.push(c),
                Some((_, c)) => return Err((at, format!("invalid escape sequence: \\{c}"))),
                None => return Err((at, "invalid escape sequence: \\".to_owned())),
            },
            // The apiserver prints the character's number too.
            ',' | '=' => return Err((at, format!("unescaped character in value: {}", c as u32))),
            c => value.push(c),
        }
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> FieldSelector {
        FieldSelector::parse(text).unwrap()
    }

    fn matches(text: &str, fields: &[(&str, &str)]) -> bool {
        let get = |path: &str| fields.iter().find(|(p, _)| *p == path).map(|(_, v)| Cow::Owned((*v).to_owned()));
        parse(text).matches(get)
    }

    #[test]
    fn terms_compare_and_all_must_hold() {
        let pod = [("spec.nodeName", "n1"), ("status.phase", "Running")];
        assert!(matches("spec.nodeName=n1,status.phase!=Failed", &pod));
        assert!(matches("spec.nodeName==n1", &pod));
        assert!(!matches("spec.nodeName=n1,status.phase=Failed", &pod));
        assert!(matches("", &pod));
    }

    #[test]
    fn a_missing_field_is_empty() {
        assert!(matches("spec.nodeName=", &[]));
        assert!(matches("spec.nodeName!=n1", &[]));
        assert!(!matches("spec.nodeName!=", &[]));
    }

    #[test]
    fn escapes_are_resolved_and_written_again() {
        let selector = parse(r"a=x\,y\=z\\");
        assert_eq!(&*selector.terms()[0].value, r"x,y=z\");
        assert_eq!(selector.to_string(), r"a=x\,y\=z\\");
    }

    #[test]
    fn equivalent_texts_are_equal() {
        assert_eq!(parse("b!=2,,a==1,b!=2"), parse("a=1,b!=2"));
        assert_eq!(parse("=,!="), FieldSelector::default());
        assert!(parse("").is_everything() && parse(",").is_everything());
    }

    #[test]
    fn the_required_name_is_that_of_the_term_whose_text_sorts_first() {
        for (text, name) in [
            ("", None),
            ("spec.nodeName=n", None),
            ("metadata.name!=p", None),
            ("metadata.name=p", Some("p")),
            ("metadata.name==p,spec.nodeName=n", Some("p")),
            ("metadata.name=q,metadata.name=p", Some("p")),
            ("metadata.name=p,metadata.name==q", Some("q")),
            (r"metadata.name=p\,q", Some("p,q")),
            ("metadata.name=,metadata.name=p", Some("")),
        ] {
            let ParsedFields { selector, required_name } = ParsedFields::parse(text).unwrap();
            assert_eq!(required_name.as_ref().map(RequiredName::name), name, "{text}");
            assert_eq!(selector, parse(text));
        }
        let given = RequiredName::new("a,b=c");
        assert_eq!(given.term(), r"metadata.name=a\,b\=c");
        assert_eq!(ParsedFields::parse(given.term()).unwrap().required_name, Some(given));
    }

    #[test]
    fn terms_are_counted_without_parsing() {
        let counted = |text: &str| FieldSelector::count_terms(text);
        assert_eq!((counted(""), counted(",,"), counted("a=1"), counted(",a=1,,b=2,")), (0, 0, 1, 2));
        assert_eq!((counted(r"a=x\,y,b=2"), counted(r"a=x\\,b=2"), counted("a=1,a=1")), (2, 2, 2));
    }

    #[test]
    fn errors_have_positions_and_messages() {
        let error = |text: &str| {
            let error = FieldSelector::parse(text).unwrap_err();
            (error.position(), error.message().to_owned())
        };
        assert_eq!(error("a=1,b"), (4, "invalid selector: 'a=1,b'; can't understand 'b'".into()));
        assert_eq!(error("a=1=2"), (3, "invalid field selector: unescaped character in value: 61".into()));
        assert_eq!(error(r"a=\x"), (2, r"invalid field selector: invalid escape sequence: \x".into()));
        assert_eq!(error(r"b=,a=1\"), (6, r"invalid field selector: invalid escape sequence: \".into()));
        assert_eq!(error(&"a".repeat(20_000)).0, super::super::SELECTOR_BYTES_MAX);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused_and_canonical_text_parses_back(text in "[a-c=!,\\\\ é.]{0,24}") {
            if let Ok(selector) = FieldSelector::parse(&text) {
                prop_assert!(selector.terms().len() <= FieldSelector::count_terms(&text));
                prop_assert_eq!(FieldSelector::parse(&selector.to_string()), Ok(selector));
            }
        }
    }
}
