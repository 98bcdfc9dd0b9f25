//! The query of a request, parsed once.

use std::borrow::Cow;

use form_urlencoded::parse;

use super::status::Failure;

/// The longest query that is answered, in bytes.
const QUERY_BYTES_MAX: usize = 64 << 10;

/// Maximum parameters of a query. Go reads no parameter of a query with more (`urlmaxqueryparams`).
const PARAMETERS_MAX: usize = 10_000;

/// The parameters of a query, in their order.
#[derive(Debug)]
pub struct Query<'a> {
    text: &'a str,
    pairs: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

impl<'a> Query<'a> {
    /// Parses a query. See [`Self::check`] for the ones that must not be answered here.
    pub fn parse(text: &'a str) -> Self {
        Self { text, pairs: parse(text.as_bytes()).collect() }
    }

    /// Checks that Go's parser would find the same parameters. Go skips parameters with invalid
    /// escapes or semicolons, so a query with those is left to upstream.
    ///
    /// # Errors
    /// 400.
    pub fn check(&self) -> Result<(), Failure> {
        if self.text.len() > QUERY_BYTES_MAX {
            return Err(Failure::bad_request(format!("the query is longer than {QUERY_BYTES_MAX} bytes")));
        }
        if self.text.split('&').count() > PARAMETERS_MAX {
            return Err(Failure::bad_request(format!("the query has more than {PARAMETERS_MAX} parameters")));
        }
        let is_escaped =
            |part: &str| matches!(part.as_bytes(), [a, b, ..] if a.is_ascii_hexdigit() && b.is_ascii_hexdigit());
        let is_lossy = |text: &str| text.contains('\u{fffd}');
        let lossy = self.pairs.iter().any(|(name, value)| is_lossy(name) || is_lossy(value));
        if lossy || self.text.contains(';') || !self.text.split('%').skip(1).all(is_escaped) {
            return Err(Failure::bad_request("the query is not escaped correctly".to_owned()));
        }
        Ok(())
    }

    /// Returns all parameters and their values.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pairs.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Returns the first value of a parameter; if one is given more than once, the apiserver uses
    /// the first too.
    pub fn first(&self, name: &str) -> Option<&str> {
        self.pairs().find(|(known, _)| *known == name).map(|(_, value)| value)
    }
}

/// Parses a boolean as the apiserver does.
pub fn is_true(value: &str) -> bool {
    value != "0" && !value.eq_ignore_ascii_case("false")
}
