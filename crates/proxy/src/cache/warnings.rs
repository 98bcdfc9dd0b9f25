//! Warnings in an apiserver's answer: `Warning` headers, as `endpoints/filters/warning.go` of the
//! apiserver writes them.
//!
//! Warnings about a resource (that it is deprecated, for example) are retained with the cache and
//! sent to its readers. The hazard is a warning about kubefan's own credentials, which is in the
//! same headers of every answer and must not be sent to readers.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, header};

/// The most warnings that are retained of one answer. An apiserver gives one or two, and truncates
/// what is more than 4 KiB in all.
const WARNINGS_MAX: usize = 16;
/// Their bytes together.
const WARNING_BYTES_MAX: usize = 8 << 10;
/// The code of all warnings that Kubernetes writes, and the only one that its clients show. Others
/// are about caches on the way, and do not apply to later answers (RFC 7234, 5.5).
const CODE: &[u8] = b"299 ";

/// The warnings of an answer, unchanged and in its order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Warnings(Arc<[HeaderValue]>);

impl Warnings {
    /// The warnings of an answer, within the limits.
    pub fn of(headers: &HeaderMap) -> Self {
        let mut bytes = 0;
        let all = headers.get_all(header::WARNING).into_iter().filter(|value| value.as_bytes().starts_with(CODE));
        let kept = all.take(WARNINGS_MAX).take_while(|value| {
            bytes += value.len();
            bytes <= WARNING_BYTES_MAX
        });
        Self(kept.cloned().collect())
    }

    /// Those that are not among `others`.
    pub fn without(self, others: &Self) -> Self {
        if !self.0.iter().any(|warning| others.0.contains(warning)) {
            return self;
        }
        Self(self.0.iter().filter(|warning| !others.0.contains(warning)).cloned().collect())
    }

    /// Adds them to the headers of another answer.
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
    fn warnings_go_on_as_they_came() {
        let (first, second) = (r#"299 - "v1 Endpoints is deprecated in v1.33+""#, r#"299 agent "more\"""#);
        let warnings = Warnings::of(&headers(&[first, "110 - \"stale\"", second]));
        assert_eq!(put(&warnings), [first, second]);
        assert_eq!(
            put(&warnings.without(&Warnings::of(&headers(&[first])))),
            [second],
            "what is said of kubefan itself"
        );
        assert_eq!(Warnings::of(&HeaderMap::new()), Warnings::default());
    }

    #[test]
    fn they_are_bounded_in_count_and_bytes() {
        let many: Vec<_> = (0..100).map(|number| format!("299 - \"{number}\"")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert_eq!(put(&Warnings::of(&headers(&many))).len(), WARNINGS_MAX);
        let long = format!("299 - \"{}\"", "x".repeat(WARNING_BYTES_MAX / 3));
        assert_eq!(put(&Warnings::of(&headers(&[long.as_str(); 5]))).len(), 2);
    }
}
