//! The `Warning` headers in an answer, as the apiserver's `endpoints/filters/warning.go` writes
//! them.
//!
//! Warnings about a resource, such as its deprecation, are stored with the cache and forwarded to
//! its readers. Warnings about kubefan's own credentials arrive in the same headers, with every
//! answer, and must not reach other clients.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, header};
use kubefan_common::text::one_line;

/// The maximum number of warnings stored from one answer. An apiserver sends one or two, and
/// truncates them at 4 KiB in total.
const WARNINGS_MAX: usize = 16;
/// The maximum total size of the stored warnings, in bytes.
const WARNING_BYTES_MAX: usize = 8 << 10;
/// The maximum length of a warning of kubefan's own, in characters.
const OWN_CHARS_MAX: usize = 1024;
/// The only code that Kubernetes writes and its clients show. Most other codes concern an HTTP
/// cache on the way and must not be stored (RFC 7234, 5.5).
const CODE: &[u8] = b"299 ";

/// The warnings of an answer, in order and unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Warnings(Arc<[HeaderValue]>);

impl Warnings {
    /// Extracts the warnings of an answer, up to the limits.
    pub fn of(headers: &HeaderMap) -> Self {
        let mut bytes = 0;
        let all = headers.get_all(header::WARNING).into_iter().filter(|value| value.as_bytes().starts_with(CODE));
        let stored = all.take(WARNINGS_MAX).take_while(|value| {
            bytes += value.len();
            bytes <= WARNING_BYTES_MAX
        });
        Self(stored.cloned().collect())
    }

    /// A warning of kubefan's own, as apimachinery's `NewWarningHeader` writes it.
    pub fn own(text: &str) -> Self {
        let mut value = String::from("299 kubefan \"");
        for character in one_line(text, OWN_CHARS_MAX).chars() {
            if matches!(character, '"' | '\\') {
                value.push('\\');
            }
            value.push(character);
        }
        value.push('"');
        // Cannot fail: there are no control characters.
        Self(HeaderValue::from_str(&value).into_iter().collect())
    }

    /// The warnings that are not in `others`.
    pub fn without(self, others: &Self) -> Self {
        if !self.0.iter().any(|warning| others.0.contains(warning)) {
            return self;
        }
        Self(self.0.iter().filter(|warning| !others.0.contains(warning)).cloned().collect())
    }

    /// Appends the warnings to the headers of another answer.
    pub fn put(&self, headers: &mut HeaderMap) {
        for warning in &*self.0 {
            headers.append(header::WARNING, warning.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (header::WARNING, HeaderValue::from_str(value).unwrap())).collect()
    }

    fn put(warnings: &Warnings) -> Vec<String> {
        let mut headers = HeaderMap::new();
        warnings.put(&mut headers);
        headers.get_all(header::WARNING).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn warnings_are_forwarded_unchanged() {
        let first = r#"299 - "v1 Endpoints is deprecated in v1.33+""#;
        let second = r#"299 agent "more\"""#;
        let warnings = Warnings::of(&headers(&[first, "110 - \"stale\"", second]));
        assert_eq!(put(&warnings), [first, second]);
        assert_eq!(
            put(&warnings.without(&Warnings::of(&headers(&[first])))),
            [second],
            "a warning about kubefan itself is left out"
        );
        assert_eq!(Warnings::of(&HeaderMap::new()), Warnings::default());
    }

    #[test]
    fn a_warning_of_our_own_is_quoted() {
        assert_eq!(put(&Warnings::own("a \"b\" \\\n c")), [r#"299 kubefan "a \"b\" \\  c""#]);
    }

    #[test]
    fn warnings_are_limited_in_count_and_bytes() {
        let many: Vec<_> = (0..100).map(|number| format!("299 - \"{number}\"")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert_eq!(put(&Warnings::of(&headers(&many))).len(), WARNINGS_MAX);
        let long = format!("299 - \"{}\"", "x".repeat(WARNING_BYTES_MAX / 3));
        assert_eq!(put(&Warnings::of(&headers(&[long.as_str(); 5]))).len(), 2);
    }
}
