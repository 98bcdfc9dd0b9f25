//! The head of a request: its ID, its addresses, its client and its URI. All of it comes from the
//! client, so all of it has limits.

use std::{borrow::Cow, net::IpAddr};

use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use kubefan_telemetry::requests::Protocol;
use opentelemetry::KeyValue;

use super::event::{ObjectRef, shortened};

/// The header that has the ID of a request's records.
pub const AUDIT_ID: HeaderName = HeaderName::from_static("audit-id");

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// The longest ID that is taken from a client, in bytes; the rest is cut off, as the apiserver does
/// (`maxAuditIDLength`).
const ID_BYTES_MAX: usize = 64;
/// The longest User-Agent in a record, in bytes (`maxUserAgentLength` of the apiserver).
const USER_AGENT_BYTES_MAX: usize = 1024;
/// The longest method in a record, in bytes.
const VERB_BYTES_MAX: usize = 64;
/// The longest URI in a record, in bytes.
pub(super) const URI_BYTES_MAX: usize = 8 << 10;
/// The most addresses in a record: the client's own, and those that it says it forwards for.
const SOURCE_IPS_MAX: usize = 16;

/// The longest API group in the name of a span, in bytes: that of a DNS subdomain.
const GROUP_BYTES_MAX: usize = 253;
/// The longest version, resource or subresource in the name of a span, in bytes: that of a DNS
/// label.
const LABEL_BYTES_MAX: usize = 63;
/// The verbs in names of spans: the apiserver's, and the methods of HTTP for paths of no resource.
const VERBS: [&str; 15] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "post",
    "put",
    "head",
    "options",
    "connect",
    "trace",
    "other",
];
/// In place of a verb that a client has made up.
const OTHER_VERB: &str = "_OTHER";

/// The start of a request.
pub struct RequestHead<'a> {
    /// The protocol that it came in.
    pub protocol: Protocol,
    /// The apiserver's verb.
    pub verb: Cow<'static, str>,
    /// As sent.
    pub uri: &'a Uri,
    /// As sent.
    pub headers: &'a HeaderMap,
    /// The other end of the connection; `None` for a Unix socket.
    pub address: Option<IpAddr>,
    /// The object that its path names.
    pub object: Option<ObjectRef>,
}

impl RequestHead<'_> {
    /// The name of its span: the gRPC method, or the verb and the route over HTTP.
    pub(super) fn span_name(&self) -> String {
        match self.protocol {
            Protocol::Grpc => self.uri.path().trim_start_matches('/').to_owned(),
            Protocol::Http => format!("{} {}", self.span_verb(), self.route()),
        }
    }

    fn span_verb(&self) -> &str {
        if VERBS.contains(&&*self.verb) { &self.verb } else { OTHER_VERB }
    }

    /// The attributes of its span at the start. None of them is a name of an object or a selector.
    pub(super) fn span_attributes(&self) -> Vec<KeyValue> {
        let mut attributes = vec![
            KeyValue::new("k8s.request.verb", self.span_verb().to_owned()),
            KeyValue::new("user_agent.original", user_agent(self.headers)),
        ];
        attributes.extend(self.address.map(|ip| KeyValue::new("client.address", ip.to_canonical().to_string())));
        match (self.protocol, self.uri.path().trim_start_matches('/').split_once('/')) {
            (Protocol::Grpc, Some((service, method))) => attributes.extend([
                KeyValue::new("rpc.system", "grpc"),
                KeyValue::new("rpc.service", service.to_owned()),
                KeyValue::new("rpc.method", method.to_owned()),
            ]),
            (Protocol::Grpc, None) => {}
            (Protocol::Http, _) => attributes.push(KeyValue::new("http.route", self.route())),
        }
        attributes
    }

    /// The path with its variable parts replaced by their names. A path of no resource is one
    /// route, because callers could make up any number of them. So is one that no resource can
    /// have: it is here before its caller is known.
    fn route(&self) -> String {
        let Some(object) = self.object.as_ref().filter(|object| can_exist(object)) else {
            return "/{path}".to_owned();
        };
        let ObjectRef { resource, namespace, name, api_group, api_version, subresource } = object;
        let mut route = if api_group.is_empty() {
            format!("/api/{api_version}")
        } else {
            format!("/apis/{api_group}/{api_version}")
        };
        // The reference to a namespace has its name twice.
        if !namespace.is_empty() && resource != "namespaces" {
            route += "/namespaces/{namespace}";
        }
        route += &format!("/{resource}");
        if !name.is_empty() {
            route += "/{name}";
        }
        if !subresource.is_empty() {
            route += &format!("/{subresource}");
        }
        route
    }
}

/// Whether the apiserver would accept the names of a resource.
fn can_exist(object: &ObjectRef) -> bool {
    let is_name = |text: &str, bytes_max: usize| {
        let is_of_names = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-');
        text.len() <= bytes_max && text.bytes().all(is_of_names)
    };
    let labels = [&object.api_version, &object.resource, &object.subresource];
    is_name(&object.api_group, GROUP_BYTES_MAX) && labels.into_iter().all(|label| is_name(label, LABEL_BYTES_MAX))
}

/// The ID that a client has chosen, if it can be one.
pub(super) fn id_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let given = headers.get(AUDIT_ID)?.as_bytes();
    let id = given.get(..ID_BYTES_MAX).unwrap_or(given);
    if id.is_empty() || !id.iter().all(u8::is_ascii_graphic) {
        return None;
    }
    HeaderValue::from_bytes(id).ok()
}

/// The origin of a request (`SourceIPs` in `apimachinery/pkg/util/net/http.go`): the addresses in
/// its headers, and last the other end of the connection, the only address that it cannot choose.
pub(super) fn source_ips(headers: &HeaderMap, address: Option<IpAddr>) -> Vec<IpAddr> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
    let parse = |text: &str| text.trim().parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    let mut ips: Vec<IpAddr> = text(X_FORWARDED_FOR).split(',').filter_map(parse).take(SOURCE_IPS_MAX - 2).collect();
    ips.extend(parse(text(X_REAL_IP)).filter(|ip| !ips.contains(ip)));
    ips.extend(address.map(|ip| ip.to_canonical()).filter(|ip| ips.last() != Some(ip)));
    ips
}

/// The client's name for itself.
pub(super) fn user_agent(headers: &HeaderMap) -> String {
    let value = headers.get(header::USER_AGENT).map(|value| String::from_utf8_lossy(value.as_bytes()));
    shortened(value.unwrap_or_default().into_owned(), USER_AGENT_BYTES_MAX)
}

/// The verb in a record. A client may have made up a method of any length.
pub(super) fn verb_of(verb: Cow<'static, str>) -> Cow<'static, str> {
    match verb {
        Cow::Borrowed(_) => verb,
        Cow::Owned(method) => shortened(method, VERB_BYTES_MAX).into(),
    }
}

/// The path and the query, as sent.
pub(super) fn request_uri(uri: &Uri) -> String {
    shortened(uri.path_and_query().map_or_else(|| uri.path(), |both| both.as_str()).to_owned(), URI_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::TRUNCATED;

    fn headers(given: &[(&'static str, &str)]) -> HeaderMap {
        given.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn an_id_of_a_client_is_taken_if_it_is_visible_text_and_cut_if_it_is_long() {
        let id = |given: &str| id_of(&headers(&[("audit-id", given)])).map(|id| id.to_str().unwrap().to_owned());
        assert_eq!(id("f3a1-x"), Some("f3a1-x".to_owned()));
        assert_eq!(id(&"a".repeat(65)), Some("a".repeat(64)));
        for bad in ["", "a b", "a\tb"] {
            assert_eq!(id(bad), None, "{bad:?}");
        }
        let mut not_text = HeaderMap::new();
        not_text.insert(AUDIT_ID, HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(id_of(&not_text), None);
        assert_eq!(id_of(&HeaderMap::new()), None);
    }

    #[test]
    fn the_address_of_the_connection_is_last_and_not_repeated() {
        let ips = |given: &[(&'static str, &str)], address: &str| {
            let ips = source_ips(&headers(given), address.parse().ok());
            ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(ips(&[], "::ffff:10.0.0.1"), "10.0.0.1");
        assert_eq!(ips(&[], ""), "", "a Unix socket");
        assert_eq!(ips(&[("x-forwarded-for", "1.1.1.1, x, 2.2.2.2")], "10.0.0.1"), "1.1.1.1 2.2.2.2 10.0.0.1");
        assert_eq!(ips(&[("x-forwarded-for", "1.1.1.1"), ("x-real-ip", "1.1.1.1")], "1.1.1.1"), "1.1.1.1");
        assert_eq!(ips(&[("x-real-ip", "2.2.2.2")], "1.1.1.1"), "2.2.2.2 1.1.1.1");
        let many = vec!["1.1.1.1"; 1000].join(",");
        assert_eq!(source_ips(&headers(&[("x-forwarded-for", &many)]), None).len(), SOURCE_IPS_MAX - 2);
    }

    #[test]
    fn long_texts_are_cut_and_say_so() {
        let agent = user_agent(&headers(&[("user-agent", &"a".repeat(2000))]));
        assert_eq!(agent, "a".repeat(1024) + TRUNCATED);
        let uri = format!("/api/v1/pods?labelSelector={}", "b".repeat(URI_BYTES_MAX)).parse().unwrap();
        assert_eq!(request_uri(&uri).len(), URI_BYTES_MAX + TRUNCATED.len());
        assert_eq!(request_uri(&"https://host/a?b=c".parse().unwrap()), "/a?b=c");
        assert_eq!(verb_of("x".repeat(60_000).into()).len(), VERB_BYTES_MAX + TRUNCATED.len());
    }
    #[test]
    fn the_name_of_a_span_has_only_what_a_resource_can_have() {
        let name = |verb: &'static str, [api_group, api_version, resource, subresource]: [&str; 4]| {
            let head = RequestHead {
                protocol: Protocol::Http,
                verb: verb.into(),
                uri: &Uri::from_static("/"),
                headers: &HeaderMap::new(),
                address: None,
                object: Some(ObjectRef {
                    resource: resource.to_owned(),
                    namespace: "a".to_owned(),
                    name: "p".to_owned(),
                    api_group: api_group.to_owned(),
                    api_version: api_version.to_owned(),
                    subresource: subresource.to_owned(),
                }),
            };
            head.span_name()
        };
        let pods = ["", "v1", "pods", "log"];
        assert_eq!(name("get", pods), "get /api/v1/namespaces/{namespace}/pods/{name}/log");
        assert_eq!(name("made-up", pods), "_OTHER /api/v1/namespaces/{namespace}/pods/{name}/log");
        let group = "g".repeat(254);
        let label = "l".repeat(64);
        for made_up in [
            [&group, "v1", "pods", ""],
            ["", &label, "pods", ""],
            ["", "v1", &label, ""],
            ["", "v1", "pods", &label],
            ["", "v1", "Pods", ""],
            ["", "v1", "pods", "%41"],
        ] {
            assert_eq!(name("get", made_up), "get /{path}", "{made_up:?}");
        }
        assert!(name("get", [&group[1..], &label[1..], &label[1..], ""]).contains("/namespaces/{namespace}/"));
    }
}
