//! The destination of every forwarded request, regardless of the host that the request names.

use http::{
    Uri,
    uri::{Authority, InvalidUri, PathAndQuery, Scheme},
};

/// Scheme, host and path of the server.
pub(super) struct BaseUrl {
    scheme: Scheme,
    /// Without user info.
    authority: Authority,
    /// Without a trailing slash.
    prefix: String,
}

impl BaseUrl {
    /// The parts of a server's URL; `None` if it has no host.
    pub(super) fn of(url: &Uri) -> Option<Self> {
        let authority = url.authority()?.as_str();
        let authority = authority.rsplit('@').next()?.parse().ok()?;
        let scheme = url.scheme().cloned().unwrap_or(Scheme::HTTPS);
        Some(Self { scheme, authority, prefix: url.path().trim_end_matches('/').to_owned() })
    }

    /// Whether a server that resolves dots could read a path as one outside of the prefix.
    pub(super) fn is_left_by(&self, path: &str) -> bool {
        let path = path.to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/").replace("%5c", "\\");
        !self.prefix.is_empty() && path.split(['/', '\\']).any(|segment| segment == "..")
    }

    /// The full URL of a request. Path and query stay the same, byte for byte.
    pub(super) fn join(&self, uri: &Uri) -> Result<Uri, InvalidUri> {
        let path = match uri.path_and_query() {
            Some(path) if self.prefix.is_empty() => path.clone(),
            Some(path) => PathAndQuery::from_maybe_shared(format!("{}{path}", self.prefix))?,
            None => PathAndQuery::from_static("/"),
        };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path);
        // Cannot fail, because all three parts are set.
        Ok(Uri::from_parts(parts).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(base: &str, path: &'static str) -> String {
        BaseUrl::of(&base.parse().unwrap()).unwrap().join(&path.parse().unwrap()).unwrap().to_string()
    }

    #[test]
    fn paths_are_forwarded_byte_for_byte() {
        for path in [
            "/api/v1/pods",
            "/api/v1/../x/%2e%2E/./y//z/",
            "/apis/a/v1/b?labelSelector=a%3Db,c='d'&x=%zz&&=",
            "/api/v1/namespaces/a/services/https:s:1/proxy/{x}|\"~",
        ] {
            assert_eq!(join("https://h:6443", path), format!("https://h:6443{path}"));
            assert_eq!(join("https://h/k8s/clusters/a/", path), format!("https://h/k8s/clusters/a{path}"));
        }
        assert_eq!(join("https://h:6443", "http://elsewhere:1/api?x"), "https://h:6443/api?x", "absolute form");
        assert_eq!(join("https://admin:secret@h:6443", "/api"), "https://h:6443/api");
    }

    #[test]
    fn a_path_with_dots_may_lead_out_of_a_prefix() {
        let is_left = |base: &str, path| BaseUrl::of(&base.parse().unwrap()).unwrap().is_left_by(path);
        for (path, is) in [
            ("/api/v1/pods", false),
            ("/api/v1/namespaces/a/configmaps/a..b", false),
            ("/api/../../../../v3/tokens", true),
            ("/api/%2e%2E/v3", true),
            ("/api/.%2e%2Fv3", true),
            ("/api/..%5cv3", true),
            ("/..", true),
        ] {
            assert_eq!(is_left("https://h/k8s/clusters/a", path), is, "{path}");
            assert!(!is_left("https://h:6443/", path), "all of the server is the apiserver");
        }
    }
}
