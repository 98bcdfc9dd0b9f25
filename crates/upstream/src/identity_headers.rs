//! The headers by which the apiserver knows the user of a request.
//!
//! The hazard is a header that one of these checks misses: with it a caller would act as another
//! user, or with kubefan's rights. So this is the only list of them.
//!
//! A token among the protocols of a websocket is an identity, too, in a header that also has other
//! values. `kubefan-access` finds it.

use http::{HeaderMap, header};

/// Start of the headers by which an authenticated user acts as another one. The apiserver refuses
/// or obeys them, by the rights of that user.
const IMPERSONATE: &str = "impersonate-";

/// Start of the headers by which a front proxy names its user (`--requestheader-username-headers`
/// and its like). The apiserver obeys them only if the client certificate is that of the proxy, and
/// ignores them otherwise. So a request with them acts as another user only if it is sent on with
/// such a certificate.
const FRONT_PROXY: &str = "x-remote-";

/// Whether a request acts as another user.
pub fn impersonates(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().starts_with(IMPERSONATE))
}

/// Whether the header with this name may make the apiserver attribute a request to another user.
pub fn is_identity(name: &str) -> bool {
    let has_prefix = |prefix: &str| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    name.eq_ignore_ascii_case(header::AUTHORIZATION.as_str()) || has_prefix(IMPERSONATE) || has_prefix(FRONT_PROXY)
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn each_header_of_an_identity_is_known() {
        for (name, is_impersonation, names_a_user) in [
            ("Impersonate-User", true, true),
            ("impersonate-group", true, true),
            ("IMPERSONATE-UID", true, true),
            ("Impersonate-Extra-Scopes", true, true),
            ("Impersonate-Of-A-Later-Version", true, true),
            ("X-Remote-User", false, true),
            ("X-Remote-Group", false, true),
            ("x-remote-uid", false, true),
            ("X-Remote-Extra-Scopes", false, true),
            ("Authorization", false, true),
            ("Proxy-Authorization", false, false),
            ("X-Impersonate-User", false, false),
            ("Impersonate", false, false),
            ("X-Remote", false, false),
            ("X-Forwarded-For", false, false),
            ("User-Agent", false, false),
        ] {
            let header = HeaderName::from_bytes(name.as_bytes()).unwrap();
            let headers = HeaderMap::from_iter([(header.clone(), HeaderValue::from_static("x"))]);
            assert_eq!(impersonates(&headers), is_impersonation, "{name}");
            assert_eq!(is_identity(header.as_str()), names_a_user, "{name}");
            assert_eq!(is_identity(name), names_a_user, "{name} as it is written");
        }
        assert!(!impersonates(&HeaderMap::new()));
    }
}
