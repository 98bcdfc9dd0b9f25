//! The marks of answers that kubefan passes on from upstream.
//!
//! The hazard is a server that speaks for kubefan: a program in the cluster whose answer the
//! apiserver proxies can send any header. A client that believes its `Cache-Status`, `Proxy-Status`
//! or `Kubefan-Fallback` might leave kubefan, or all of them might run to the apiserver at once. So
//! kubefan removes what an upstream says in its name. Another kubefan has done so already, and what
//! that one says itself stays: whether its cache has answered, or that it refuses the request. Its
//! budget does not: it counts the kubefans behind it, and not the clients of those.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::{answer::CACHE_STATUS, error_type::PROXY_STATUS};
use crate::fallback_budget::KUBEFAN_FALLBACK;

/// The value of [`CACHE_STATUS`] for an answer that no cache of a kubefan has decided (RFC 9211).
const PASSED_ON: HeaderValue = HeaderValue::from_static("kubefan; fwd=bypass");

/// Start of the names of headers that only kubefan sends.
const OWN_HEADERS: &str = "kubefan-";

/// Marks an answer as passed on, unless another kubefan has said who made it.
pub(super) fn mark(headers: &mut HeaderMap, is_of_kubefan: bool) {
    if is_of_kubefan {
        headers.remove(KUBEFAN_FALLBACK);
        if !is_named(headers, &CACHE_STATUS) && !is_named(headers, &PROXY_STATUS) {
            headers.append(CACHE_STATUS, PASSED_ON);
        }
        return;
    }
    for name in [CACHE_STATUS, PROXY_STATUS] {
        remove_named(headers, &name);
    }
    let own: Vec<HeaderName> = headers.keys().filter(|name| name.as_str().starts_with(OWN_HEADERS)).cloned().collect();
    for name in own {
        headers.remove(name);
    }
    headers.append(CACHE_STATUS, PASSED_ON);
}

/// Whether a header names kubefan.
fn is_named(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(name).iter().any(names_kubefan)
}

/// Removes the values that name kubefan. A value is not taken apart, because readers differ in how
/// they do that: a comma in a quoted string separates nothing, and some split there.
fn remove_named(headers: &mut HeaderMap, name: &HeaderName) {
    if !is_named(headers, name) {
        return;
    }
    let others: Vec<HeaderValue> =
        headers.get_all(name).iter().filter(|value| !names_kubefan(value)).cloned().collect();
    headers.remove(name);
    for value in others {
        headers.append(name, value);
    }
}

fn names_kubefan(value: &HeaderValue) -> bool {
    const NAME: &[u8] = b"kubefan";
    value.as_bytes().windows(NAME.len()).any(|part| part.eq_ignore_ascii_case(NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIT: (&str, &str) = ("cache-status", "kubefan; hit");
    const BYPASS: (&str, &str) = ("cache-status", "kubefan; fwd=bypass");
    const ERROR: (&str, &str) = ("proxy-status", "kubefan; error=http_request_denied");
    const BUDGET: (&str, &str) = ("kubefan-fallback", "clients=1000000, rate=0.001");
    const CDN: (&str, &str) = ("cache-status", "cdn; hit");
    const GATEWAY: (&str, &str) = ("proxy-status", "gateway; error=connection_timeout");
    const ANY: (&str, &str) = ("audit-id", "x");

    fn marked(given: &[(&'static str, &'static str)], is_of_kubefan: bool) -> Vec<(String, String)> {
        let mut headers = HeaderMap::new();
        for &(name, value) in given {
            headers.append(name, HeaderValue::from_static(value));
        }
        mark(&mut headers, is_of_kubefan);
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        let mut all: Vec<_> = headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        all.sort();
        all
    }

    #[test]
    fn no_server_but_a_kubefan_can_speak_for_kubefan() {
        let lies =
            [HIT, ERROR, BUDGET, ("cache-status", "cdn; detail=\"a, kubefan; hit\""), ("proxy-status", "Kubefan")];
        let of_apiserver: Vec<_> = marked(&[&lies[..], &[CDN, GATEWAY, ANY]].concat(), false);
        let expected = [ANY, CDN, BYPASS, GATEWAY].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(of_apiserver, expected);
    }

    #[test]
    fn one_kubefan_of_several_tells_who_made_the_answer() {
        for (given, expected) in [
            (&[ANY][..], &[ANY, BYPASS][..]),
            (&[ANY, CDN], &[ANY, CDN, BYPASS]),
            (&[BYPASS], &[BYPASS]),
            (&[HIT, BUDGET], &[HIT]),
            (&[ERROR], &[ERROR]),
            (&[GATEWAY], &[BYPASS, GATEWAY]),
        ] {
            let expected: Vec<_> = expected.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            assert_eq!(marked(given, true), expected, "{given:?}");
        }
    }
}
