//! Label selectors, parsed like apimachinery's `labels.Parse`.

use std::{fmt, sync::Arc};

use super::{
    SelectorError, check_length,
    label_tokens::{Token, TokenKind, scan},
    validate,
    value_set::ValueSet,
};
use kubefan_common::planted::{self, Bug};

/// A conjunction of requirements on labels. The default selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct LabelSelector {
    requirements: Arc<[Requirement]>,
}

/// A condition on one label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Requirement {
    key: Box<str>,
    operator: Operator,
    values: ValueSet,
}

/// The condition on the label. `=` and `==` are `In` with one value, `!=` is `NotIn` with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operator {
    /// The label exists, and its value is one of these.
    In,
    /// The label does not exist, or its value is not one of these.
    NotIn,
    /// The label exists.
    Exists,
    /// The label does not exist.
    DoesNotExist,
    /// The label exists, is a decimal number, and is greater.
    GreaterThan,
    /// The label exists, is a decimal number, and is less.
    LessThan,
}

impl Requirement {
    /// The label's key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The condition on the label.
    pub fn operator(&self) -> Operator {
        self.operator
    }

    /// The values, sorted and without duplicates: at least one for `In` and `NotIn`, one for the
    /// comparisons, otherwise none.
    pub fn values(&self) -> &ValueSet {
        &self.values
    }

    /// Whether the requirement holds for this value of the label, or without the label.
    pub fn matches(&self, value: Option<&str>) -> bool {
        let among = |value: &str| self.values.contains(value);
        match self.operator {
            Operator::In => value.is_some_and(among),
            Operator::NotIn if planted::is(Bug::NotInWantsLabel) => value.is_some_and(|value| !among(value)),
            Operator::NotIn => !value.is_some_and(among),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::GreaterThan => self.compare(value, |label, bound| label > bound),
            Operator::LessThan => self.compare(value, |label, bound| label < bound),
        }
    }

    fn compare(&self, value: Option<&str>, holds: impl Fn(i64, i64) -> bool) -> bool {
        let label = value.and_then(|value| value.parse().ok());
        let bound = self.values.get(0).and_then(|bound| bound.parse().ok());
        label.zip(bound).is_some_and(|(label, bound)| holds(label, bound))
    }
}

impl LabelSelector {
    /// Parses `a=b,c==d,e!=f,g in (h,i),j notin (k),l,!m,n>1,o<2`. An empty text selects
    /// everything.
    ///
    /// # Errors
    /// All that apimachinery refuses: bad syntax, a key or value that no label can have, a
    /// comparison without an integer. Also more than [`super::SELECTOR_BYTES_MAX`] bytes.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        check_length(text)?;
        let mut requirements = Parser { tokens: scan(text), next: 0 }.parse()?;
        requirements.sort_unstable();
        requirements.dedup();
        Ok(Self { requirements: requirements.into() })
    }

    /// Whether there are no requirements.
    pub fn is_everything(&self) -> bool {
        self.requirements.is_empty()
    }

    /// The requirements, sorted by key and without duplicates.
    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    /// The memory behind the selector, in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let behind = |requirement: &Requirement| requirement.key.len() + requirement.values.heap_bytes();
        size_of_val(self.requirements()) + self.requirements.iter().map(behind).sum::<usize>()
    }

    /// Whether all requirements hold for the labels that `get` reads.
    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|requirement| requirement.matches(get(&requirement.key)))
    }
}

/// The canonical text, which parses to the same selector.
impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, requirement) in self.requirements.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            requirement.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, operator, values } = self;
        match (operator, values.len()) {
            (Operator::Exists, _) => f.write_str(key),
            (Operator::DoesNotExist, _) => write!(f, "!{key}"),
            (Operator::In, 1) => write!(f, "{key}={values}"),
            (Operator::NotIn, 1) => write!(f, "{key}!={values}"),
            (Operator::In, _) => write!(f, "{key} in ({values})"),
            (Operator::NotIn, _) => write!(f, "{key} notin ({values})"),
            (Operator::GreaterThan, _) => write!(f, "{key}>{values}"),
            (Operator::LessThan, _) => write!(f, "{key}<{values}"),
        }
    }
}

/// Values with their positions.
type Values<'a> = Vec<(&'a str, usize)>;

/// Sorts values, and keeps the first of equal ones. This takes less time than a map, which searches
/// for the place of each.
fn sorted(mut values: Values<'_>) -> Values<'_> {
    values.sort_by_key(|(value, _)| *value);
    values.dedup_by_key(|(value, _)| *value);
    values
}

struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    next: usize,
}

impl<'a> Parser<'a> {
    /// The next token. After the last one it is always `End`.
    fn peek(&self) -> Token<'a> {
        self.tokens[self.next.min(self.tokens.len() - 1)]
    }

    fn take(&mut self) -> Token<'a> {
        let token = self.peek();
        self.next += 1;
        token
    }

    /// `in` and `notin` are ordinary words wherever an operator is not allowed.
    fn peek_word(&self) -> Token<'a> {
        let token = self.peek();
        match token.kind {
            TokenKind::In | TokenKind::NotIn => Token { kind: TokenKind::Word, ..token },
            _ => token,
        }
    }

    fn take_word(&mut self) -> Token<'a> {
        let token = self.peek_word();
        self.next += 1;
        token
    }

    fn parse(mut self) -> Result<Vec<Requirement>, SelectorError> {
        let mut requirements = Vec::new();
        loop {
            let token = self.peek_word();
            match token.kind {
                TokenKind::Word | TokenKind::Not => {}
                TokenKind::End => return Ok(requirements),
                _ => return Err(unexpected(token, ", expected: !, identifier, or 'end of string'")),
            }
            let requirement = self.requirement().map_err(|error| {
                SelectorError::new(error.position, format!("unable to parse requirement: {}", error.message))
            })?;
            requirements.push(requirement);
            let token = self.take_word();
            match token.kind {
                TokenKind::End => return Ok(requirements),
                TokenKind::Comma if matches!(self.peek_word().kind, TokenKind::Word | TokenKind::Not) => {}
                TokenKind::Comma => return Err(unexpected(self.peek(), ", expected: identifier after ','")),
                _ => return Err(unexpected(token, ", expected: ',' or 'end of string'")),
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        let mut token = self.take_word();
        let negated = token.kind == TokenKind::Not;
        if negated {
            token = self.take_word();
        }
        if token.kind != TokenKind::Word {
            return Err(unexpected(token, ", expected: identifier"));
        }
        let key = token.text;
        if let Some(fault) = validate::label_key(key) {
            return Err(SelectorError::new(token.at, format!("<nil>: Invalid value: {key:?}: {fault}")));
        }
        if negated {
            return Ok(requirement::<&str>(key, Operator::DoesNotExist, []));
        }
        if matches!(self.peek().kind, TokenKind::End | TokenKind::Comma) {
            return Ok(requirement::<&str>(key, Operator::Exists, []));
        }
        let token = self.take();
        let (operator, values) = match token.kind {
            TokenKind::In => (Operator::In, self.value_set()?),
            TokenKind::NotIn => (Operator::NotIn, self.value_set()?),
            TokenKind::Equals | TokenKind::DoubleEquals => (Operator::In, self.single_value()?),
            TokenKind::NotEquals => (Operator::NotIn, self.single_value()?),
            TokenKind::Greater => (Operator::GreaterThan, self.single_value()?),
            TokenKind::Less => (Operator::LessThan, self.single_value()?),
            _ => return Err(unexpected(token, ", expected: in, notin, =, ==, !=, gt, lt")),
        };
        check_values(key, operator, &values)?;
        if matches!(operator, Operator::GreaterThan | Operator::LessThan) {
            // `007` and `7` are the same bound.
            let bounds = values.iter().filter_map(|(value, _)| value.parse().ok()).map(|bound: i64| bound.to_string());
            return Ok(requirement(key, operator, bounds));
        }
        Ok(requirement(key, operator, values.into_iter().map(|(value, _)| value)))
    }

    /// The values in parentheses. `()`, `(,` and `,)` contain the empty value.
    fn value_set(&mut self) -> Result<Values<'a>, SelectorError> {
        let open = self.take_word();
        if open.kind != TokenKind::Open {
            return Err(unexpected(open, " expected: '('"));
        }
        let first = self.peek_word();
        let mut values = Values::new();
        match first.kind {
            TokenKind::Word | TokenKind::Comma => {}
            TokenKind::Close => {
                self.take();
                return Ok(vec![("", first.at)]);
            }
            _ => return Err(unexpected(first, ", expected: ',', ')' or identifier")),
        }
        loop {
            let token = self.take_word();
            let next = self.peek_word();
            match token.kind {
                TokenKind::Word => {
                    values.push((token.text, token.at));
                    if !matches!(next.kind, TokenKind::Comma | TokenKind::Close) {
                        return Err(unexpected(next, ", expected: ',' or ')'"));
                    }
                }
                TokenKind::Comma => {
                    if values.is_empty() || matches!(next.kind, TokenKind::Comma | TokenKind::Close) {
                        values.push(("", token.at));
                    }
                }
                _ => return Err(unexpected(token, ", expected: ',', or identifier")),
            }
            if next.kind == TokenKind::Close {
                self.take();
                return Ok(sorted(values));
            }
        }
    }

    /// The value of a comparison; empty before a comma or the end.
    fn single_value(&mut self) -> Result<Values<'a>, SelectorError> {
        let token = self.peek_word();
        match token.kind {
            TokenKind::End | TokenKind::Comma => Ok(Values::from([("", token.at)])),
            TokenKind::Word => {
                self.take();
                Ok(Values::from([(token.text, token.at)]))
            }
            _ => Err(unexpected(token, ", expected: identifier")),
        }
    }
}

fn unexpected(token: Token<'_>, expected: &str) -> SelectorError {
    SelectorError::new(token.at, format!("found '{}'{expected}", token.text))
}

fn requirement<S: AsRef<str>>(key: &str, operator: Operator, values: impl IntoIterator<Item = S>) -> Requirement {
    Requirement { key: key.into(), operator, values: ValueSet::of_sorted(values) }
}

/// The faults of values that an error names.
const FAULTS_MAX: usize = 16;

/// Checks the values of a term. The apiserver names every fault, and a text of 16 kB would make an
/// error of some MB. So here the first ones are named and the others counted.
fn check_values(key: &str, operator: Operator, values: &[(&str, usize)]) -> Result<(), SelectorError> {
    let mut faults: Vec<(usize, String)> = Vec::new();
    let mut others = 0;
    if matches!(operator, Operator::GreaterThan | Operator::LessThan) {
        for (i, (value, at)) in values.iter().enumerate().filter(|(_, (value, _))| value.parse::<i64>().is_err()) {
            let rule = "for 'Gt', 'Lt' operators, the value must be an integer";
            faults.push((*at, format!("values[{i}]: Invalid value: {value:?}: {rule}")));
        }
    }
    for (i, (value, at)) in values.iter().enumerate() {
        let Some(fault) = validate::label_value(value) else { continue };
        if faults.len() < FAULTS_MAX {
            faults.push((*at, format!("values[{i}][{key}]: Invalid value: {value:?}: {fault}")));
        } else {
            others += 1;
        }
    }
    let Some(&(at, _)) = faults.first() else { return Ok(()) };
    let mut messages: Vec<_> = faults.into_iter().map(|(_, message)| message).collect();
    if others > 0 {
        messages.push(format!("and {others} more"));
    }
    match &*messages {
        [message] => Err(SelectorError::new(at, message)),
        messages => Err(SelectorError::new(at, format!("[{}]", messages.join(", ")))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> LabelSelector {
        LabelSelector::parse(text).unwrap()
    }

    fn matches(text: &str, labels: &[(&str, &str)]) -> bool {
        let get = |key: &str| labels.iter().find(|(k, _)| *k == key).map(|(_, v)| *v);
        parse(text).matches(get)
    }

    #[test]
    fn many_invalid_values_make_no_long_error() {
        let values: Vec<_> = (0..2500).map(|value| format!("-{value}")).collect();
        let error = LabelSelector::parse(&format!("app in ({})", values.join(","))).unwrap_err().to_string();
        assert!(error.len() < 16 << 10, "{} bytes", error.len());
        assert!(error.contains("and 2484 more]"), "{error}");
    }

    #[test]
    fn every_operator_matches_its_labels() {
        let labels = [("app", "web"), ("gen", "5"), ("empty", "")];
        for yes in [
            "",
            "app=web",
            "app==web",
            "app!=db",
            "app in (db,web)",
            "app notin (db)",
            "app",
            "!tier",
            "gen>4",
            "gen<6",
            "gen > 4 , app",
            "empty=",
            "empty",
            "empty in ()",
            "app=web,gen in (5,6),!x",
        ] {
            assert!(matches(yes, &labels), "{yes}");
        }
        for no in
            ["app=db", "app!=web", "app in (a,b)", "app notin (web)", "tier", "!app", "gen>5", "gen<5", "app>1", "x<1"]
        {
            assert!(!matches(no, &labels), "{no}");
        }
    }

    #[test]
    fn an_absent_label_is_unequal_and_in_no_set() {
        assert!(matches("tier!=db", &[]) && matches("tier notin (db)", &[]));
        assert!(!matches("tier=", &[]) && !matches("tier in ()", &[]));
    }

    #[test]
    fn equivalent_texts_are_equal() {
        assert_eq!(parse("b,a in (x),c notin (z, y,z)"), parse("a==x,c notin (y,z),b,b"));
        assert_eq!(parse("a>007"), parse("a>7"));
        assert_eq!(parse("x in (foo,,baz),y,z notin ()").to_string(), "x in (,baz,foo),y,z!=");
        assert!(parse(" ").is_everything());
        assert_ne!(parse("a=b"), parse("a!=b"));
    }

    #[test]
    fn in_and_notin_are_words_where_no_operator_is_allowed() {
        assert_eq!(parse("in in (in,notin)").to_string(), "in in (in,notin)");
        assert_eq!(parse("notin=in,!in").to_string(), "!in,notin=in");
    }

    #[test]
    fn errors_have_positions_and_the_words_of_apimachinery() {
        let error = |text: &str| {
            let error = LabelSelector::parse(text).unwrap_err();
            (error.position(), error.message().to_owned())
        };
        let is = |at: usize, message: &str| (at, message.to_owned());
        assert_eq!(error("a=b,"), is(4, "found '', expected: identifier after ','"));
        assert_eq!(error("=b"), is(0, "found '=', expected: !, identifier, or 'end of string'"));
        assert_eq!(
            error("a b"),
            is(2, "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt")
        );
        assert_eq!(error("a===b"), is(3, "unable to parse requirement: found '=', expected: identifier"));
        assert_eq!(error("a in b"), is(5, "unable to parse requirement: found 'b' expected: '('"));
        assert_eq!(error("a in (b"), is(7, "unable to parse requirement: found '', expected: ',' or ')'"));
        assert_eq!(error("!a=b"), is(2, "found '=', expected: ',' or 'end of string'"));
        assert_eq!(error("!"), is(1, "unable to parse requirement: found '', expected: identifier"));
        assert!(error("x=a b").1.starts_with("found 'b', expected: ',' or 'end of string'"));
        let (at, message) = error("ok,-bad");
        assert!(at == 3 && message.contains("Invalid value: \"-bad\": name part must consist of"), "{message}");
        let (at, message) = error("a in (ok,b@d)");
        assert!(at == 9 && message.contains("values[0][a]: Invalid value: \"b@d\""), "{message}");
        assert_eq!(error("a in (ok,b@d,x,b@d,,)").0, 9, "the first of equal values");
        assert!(error("a>x").1.contains("the value must be an integer"));
        assert!(error("Ex.com/a").1.contains("prefix part a lowercase RFC 1123 subdomain"));
        assert!(error("a/b/c").1.contains("a valid label key"));
        assert_eq!(error(&"a,".repeat(10_000)).0, super::super::SELECTOR_BYTES_MAX);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused_and_canonical_text_parses_back(
            words in prop::collection::vec("[a-c1]|in|notin|\\(|\\)|,|=|==|!|!=|>|<| |/|\0|é", 0..16)
        ) {
            if let Ok(selector) = LabelSelector::parse(&words.concat()) {
                prop_assert_eq!(LabelSelector::parse(&selector.to_string()), Ok(selector));
            }
        }

        #[test]
        fn the_canonical_form_matches_like_the_separate_requirements(
            requirements in prop::collection::vec("(a|b)(=|!=|>|<)[0-2]|!?(a|b)|(a|b) (in|notin) \\([0-2],[0-2]\\)", 1..4),
            labels in prop::collection::btree_map("a|b", "[0-2]", 0..2),
        ) {
            let get = |key: &str| labels.get(key).map(String::as_str);
            let each = requirements.iter().all(|text| parse(text).matches(get));
            prop_assert_eq!(parse(&requirements.join(",")).matches(get), each);
        }
    }
}
