//! Negotiation of the content coding of a response (RFC 9110, sections 8.4.1 and 12.5.3).

use http::{HeaderMap, HeaderValue, header};
use kubefan_model::format::ContentCoding;

/// One coding of an `Accept-Encoding` header.
struct Clause<'a> {
    coding: &'a str,
    /// In thousandths.
    weight: u16,
}

impl<'a> Clause<'a> {
    /// Returns `None` if the weight is invalid: the client cannot have meant to accept the coding.
    fn parse(text: &'a str) -> Option<Self> {
        let (coding, parameter) = text.split_once(';').unwrap_or((text, ""));
        let coding = coding.trim_matches([' ', '\t']);
        let weight = match parameter.trim_matches([' ', '\t']) {
            "" => 1000,
            parameter => {
                let (name, value) = parameter.split_once('=')?;
                let weight: f32 = value.parse().ok()?;
                if !name.eq_ignore_ascii_case("q") || !(0.0..=1.0).contains(&weight) {
                    return None;
                }
                (weight * 1000.0).round() as u16
            }
        };
        Some(Self { coding, weight })
    }
}

/// Returns gzip if the client that sends these headers accepts it and does not prefer `identity`.
pub fn negotiate(headers: &HeaderMap) -> ContentCoding {
    let mut gzip = None;
    let mut identity = None;
    let mut any = None;
    let values = headers.get_all(header::ACCEPT_ENCODING);
    for value in values.iter().filter_map(|value| value.to_str().ok()) {
        for Clause { coding, weight } in value.split(',').filter_map(Clause::parse) {
            if coding.eq_ignore_ascii_case("gzip") || coding.eq_ignore_ascii_case("x-gzip") {
                gzip = gzip.max(Some(weight));
            } else if coding.eq_ignore_ascii_case("identity") {
                identity = Some(weight);
            } else if coding == "*" {
                any = Some(weight);
            }
        }
    }
    let gzip = gzip.or(any).unwrap_or_default();
    // A client that does not name it accepts it, but prefers the codings that it names.
    let prefers_identity = identity.is_some_and(|identity| identity > gzip);
    if gzip > 0 && !prefers_identity { ContentCoding::Gzip } else { ContentCoding::Identity }
}

/// Puts the headers of an answer from the cache.
pub fn put_headers(coding: ContentCoding, headers: &mut HeaderMap) {
    headers.append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if coding == ContentCoding::Gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_to_clients_that_accept_it_at_least_as_much_as_none() {
        for (values, expected) in [
            (vec![], false),
            (vec!["gzip"], true),
            (vec!["GZIP"], true),
            (vec!["x-gzip"], true),
            (vec!["gzip, deflate, br, zstd"], true),
            (vec!["deflate", "gzip;q=0.5"], true),
            (vec!["gzip; q=0.2, identity; q=0.1"], true),
            (vec!["gzip;q=0.5, identity;q=0.5"], true),
            (vec!["gzip;q=0.5, identity"], false),
            (vec!["gzip;q=0"], false),
            (vec!["gzip;q=0, *"], false),
            (vec!["*"], true),
            (vec!["*;q=0"], false),
            (vec!["identity;q=0, gzip;q=0.001"], true),
            (vec!["identity"], false),
            (vec!["deflate, br"], false),
            (vec!["gzip;q=2"], false),
            (vec!["gzip;q=high"], false),
            (vec!["gzip;level=1"], false),
            (vec![""], false),
            (vec![",;=,"], false),
        ] {
            let mut headers = HeaderMap::new();
            for value in &values {
                headers.append(header::ACCEPT_ENCODING, HeaderValue::from_static(value));
            }
            assert_eq!(negotiate(&headers) == ContentCoding::Gzip, expected, "{values:?}");
        }
    }
}
