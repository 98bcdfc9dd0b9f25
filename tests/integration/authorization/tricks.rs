//! Requests over HTTP that try to slip past authorization, as data.
//!
//! In paths and values, `NS` and `OTHER` stand for the namespaces of the test, `{Admin}` for the
//! administrator's token and so on, `{ws Admin}` for the same as a protocol of a websocket,
//! `{continue}` and `{version}` for a continue token and a version that the administrator got,
//! `{forged}` for a continue token that leads to OTHER, and `{many}` for 10,001 parameters.

use super::identities::{
    Who,
    Who::{Admin, Anonymous, Inside, ListOnly, Named, Own, Stranger},
};

/// A request.
#[derive(Clone, Copy)]
pub(super) struct Trick {
    pub(super) name: &'static str,
    /// The owner of its token. The answer must show nothing that this caller may not read.
    pub(super) who: Who,
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// Beside the caller's Authorization, unless they have one.
    pub(super) headers: &'static [(&'static str, &'static str)],
    /// Whether it asks for a websocket. Then a token is only where `headers` have one.
    pub(super) is_websocket: bool,
    /// Whether kubefan may refuse a request in its own words that the apiserver refuses.
    pub(super) has_own_words: bool,
}

const fn get(name: &'static str, who: Who, path: &'static str) -> Trick {
    Trick { name, who, method: "GET", path, headers: &[], is_websocket: false, has_own_words: false }
}

/// A list of the configmaps in NS.
const fn list(name: &'static str, who: Who) -> Trick {
    get(name, who, "/api/v1/namespaces/NS/configmaps?resourceVersion=0")
}

/// A watch of the configmaps in NS.
const fn watch(name: &'static str, who: Who) -> Trick {
    get(name, who, "/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&resourceVersion=0")
}

/// A watch of the configmaps in NS over a websocket, with these headers.
const fn socket(name: &'static str, who: Who, headers: &'static [(&'static str, &'static str)]) -> Trick {
    Trick { headers, is_websocket: true, ..watch(name, who) }
}

impl Trick {
    const fn with(self, headers: &'static [(&'static str, &'static str)]) -> Trick {
        Trick { headers, ..self }
    }

    const fn by(self, method: &'static str) -> Trick {
        Trick { method, ..self }
    }

    const fn in_own_words(self) -> Trick {
        Trick { has_own_words: true, ..self }
    }
}

pub(super) const TRICKS: &[Trick] = &[
    // Paths.
    get("escaped dots", Named, "/api/v1/namespaces/NS/configmaps/%2e%2e/configmaps/two?resourceVersion=0"),
    get("an escaped slash in a name", Named, "/api/v1/namespaces/NS/configmaps/one%2F..%2Ftwo?resourceVersion=0"),
    get("an escaped slash before a name", Named, "/api/v1/namespaces/NS/configmaps%2Ftwo?resourceVersion=0"),
    get("an escaped letter", Named, "/api/v1/namespaces/NS/configmaps/tw%6F?resourceVersion=0"),
    get("an escaped letter of an allowed name", Named, "/api/v1/namespaces/NS/configmaps/on%65?resourceVersion=0"),
    get("a letter that is escaped twice", Named, "/api/v1/namespaces/NS/configmaps/tw%256F?resourceVersion=0"),
    get("an escaped null", Named, "/api/v1/namespaces/NS/configmaps/one%00?resourceVersion=0"),
    get("two slashes at the start", Named, "//api/v1/namespaces/NS/configmaps/two?resourceVersion=0"),
    get("two slashes before a secret", Own, "//api/v1/namespaces/NS/secrets/hidden"),
    get("two slashes inside", Named, "/api/v1//namespaces/NS/configmaps/two?resourceVersion=0"),
    get("two slashes before the name", Named, "/api/v1/namespaces/NS/configmaps//two?resourceVersion=0"),
    get("dots after the version", Named, "/api/v1/../v1/namespaces/NS/configmaps/two?resourceVersion=0"),
    get("dots after the namespace", Own, "/api/v1/namespaces/NS/../OTHER/configmaps/one?resourceVersion=0"),
    get("dots for the namespace", Own, "/api/v1/namespaces/../configmaps?resourceVersion=0"),
    get("dots for the name", Named, "/api/v1/namespaces/NS/configmaps/..?resourceVersion=0"),
    get("a dot before the name", Named, "/api/v1/namespaces/NS/configmaps/./two?resourceVersion=0"),
    get("a slash at the end", Named, "/api/v1/namespaces/NS/configmaps/two/?resourceVersion=0"),
    get("a slash after an allowed name", Named, "/api/v1/namespaces/NS/configmaps/one/?resourceVersion=0"),
    get("a subresource", Named, "/api/v1/namespaces/NS/configmaps/one/status?resourceVersion=0"),
    get("a parameter in the path", Named, "/api/v1/namespaces/NS/configmaps/two;a=b?resourceVersion=0"),
    get("another version", Named, "/api/v2/namespaces/NS/configmaps/two?resourceVersion=0"),
    get("capital letters", Stranger, "/api/v1/namespaces/NS/ConfigMaps?resourceVersion=0"),
    get("namespaces inside a namespace", Inside, "/api/v1/namespaces/NS/namespaces?resourceVersion=0"),
    get("another namespace inside", Inside, "/api/v1/namespaces/NS/namespaces/OTHER?resourceVersion=0"),
    get("the URI of another host", Stranger, "https://kubernetes.default/api/v1/configmaps?resourceVersion=0"),
    get("the prefix for proxies", Stranger, "/api/v1/proxy/namespaces/NS/configmaps/two"),
    get("the proxy of a service", Stranger, "/api/v1/namespaces/NS/services/x/proxy/api/v1/configmaps"),
    // Parameters.
    get(
        "a selector twice",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one&fieldSelector=metadata.name=two&resourceVersion=0",
    ),
    get(
        "a selector twice, the right one last",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=two&fieldSelector=metadata.name=one&resourceVersion=0",
    ),
    get("a namespace twice", Own, "/api/v1/configmaps?namespace=NS&namespace=OTHER&resourceVersion=0"),
    get("another namespace", Own, "/api/v1/namespaces/NS/configmaps?namespace=OTHER&resourceVersion=0"),
    get("watch after all", ListOnly, "/api/v1/namespaces/NS/pods?watch=0&watch=1&resourceVersion=0"),
    get(
        "no watch after all",
        ListOnly,
        "/api/v1/namespaces/NS/pods?watch=1&watch=0&timeoutSeconds=1&resourceVersion=0",
    ),
    get("watch=True", ListOnly, "/api/v1/namespaces/NS/pods?watch=True&timeoutSeconds=1&resourceVersion=0"),
    get("watch=1", ListOnly, "/api/v1/namespaces/NS/pods?watch=1&timeoutSeconds=1&resourceVersion=0"),
    get("watch=yes", ListOnly, "/api/v1/namespaces/NS/pods?watch=yes&timeoutSeconds=1&resourceVersion=0"),
    get("watch=FALSE", ListOnly, "/api/v1/namespaces/NS/pods?watch=FALSE&resourceVersion=0"),
    get("an empty watch", ListOnly, "/api/v1/namespaces/NS/pods?watch=&timeoutSeconds=1&resourceVersion=0"),
    get("watch without a value", ListOnly, "/api/v1/namespaces/NS/pods?watch&timeoutSeconds=1&resourceVersion=0"),
    get("WATCH=1", ListOnly, "/api/v1/namespaces/NS/pods?WATCH=1&timeoutSeconds=1&resourceVersion=0"),
    get("an escaped watch", ListOnly, "/api/v1/namespaces/NS/pods?%77atch=1&timeoutSeconds=1&resourceVersion=0"),
    get(
        "a semicolon between parameters",
        Named,
        "/api/v1/namespaces/NS/configmaps?resourceVersion=0;fieldSelector=metadata.name=one",
    ),
    get(
        "a semicolon in a selector",
        Named,
        "/api/v1/namespaces/NS/configmaps?resourceVersion=0&fieldSelector=metadata.name=one;",
    ),
    get(
        "an invalid escape",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one&x=%zz&resourceVersion=0",
    ),
    get(
        "more parameters than Go reads",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one&resourceVersion=0{many}",
    ),
    // Names as selectors.
    get(
        "a list of a name",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=two&resourceVersion=0",
    ),
    get(
        "a watch of a name",
        Named,
        "/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&fieldSelector=metadata.name=two&resourceVersion=0",
    ),
    get(
        "a list of an allowed name",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name%3Done&resourceVersion=0",
    ),
    get(
        "two names",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one,metadata.name=two&resourceVersion=0",
    ),
    get(
        "all names but one",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name!=one&resourceVersion=0",
    ),
    get(
        "a name and not that name",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one,metadata.name!=one&resourceVersion=0",
    ),
    get(
        "a name with an escaped comma",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one%5C,metadata.name=two&resourceVersion=0",
    ),
    get("an empty name", Named, "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=&resourceVersion=0"),
    get(
        "a name in all namespaces",
        Named,
        "/api/v1/configmaps?fieldSelector=metadata.name=one,metadata.namespace=NS&resourceVersion=0",
    ),
    get(
        "a name and an invalid label",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one&labelSelector==&resourceVersion=0",
    ),
    get(
        "a name and an invalid limit",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one&limit=x&resourceVersion=0",
    ),
    get("a selector without a field", Stranger, "/api/v1/configmaps?fieldSelector==x&resourceVersion=0"),
    get("a selector of no label", Stranger, "/api/v1/configmaps?labelSelector=a+in+()&resourceVersion=0"),
    // The deprecated paths.
    get(
        "the watch path of a name",
        Named,
        "/api/v1/watch/namespaces/NS/configmaps/two?timeoutSeconds=1&resourceVersion=0",
    ),
    get(
        "the watch path of an allowed name",
        Named,
        "/api/v1/watch/namespaces/NS/configmaps/one?timeoutSeconds=1&resourceVersion=0",
    ),
    get(
        "the watch path with a selector",
        Named,
        "/api/v1/watch/namespaces/NS/configmaps?fieldSelector=metadata.name=one&timeoutSeconds=1&resourceVersion=0",
    ),
    get(
        "the watch path of one name and a selector of another",
        Named,
        "/api/v1/watch/namespaces/NS/configmaps/one?fieldSelector=metadata.name=two&timeoutSeconds=1&resourceVersion=0",
    ),
    get(
        "the watch path that does not watch",
        ListOnly,
        "/api/v1/watch/namespaces/NS/pods?watch=0&timeoutSeconds=1&resourceVersion=0",
    ),
    get("the watch path twice", Named, "/api/v1/watch/watch/namespaces/NS/configmaps/one?timeoutSeconds=1"),
    get("the watch path without a namespace", Named, "/api/v1/watch/configmaps/one?timeoutSeconds=1&resourceVersion=0"),
    // Tokens that other callers received.
    get("a continue token", Own, "/api/v1/configmaps?limit=1&continue={continue}"),
    get("a continue token in a namespace", Own, "/api/v1/namespaces/NS/configmaps?limit=1&continue={continue}"),
    get("a continue token into a namespace", Own, "/api/v1/namespaces/NS/configmaps?limit=9&continue={forged}"),
    get(
        "a continue token and a name",
        Named,
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one&limit=1&continue={continue}",
    ),
    get("a version", Own, "/api/v1/configmaps?watch=1&timeoutSeconds=1&resourceVersion={version}"),
    get(
        "a version in a namespace",
        Own,
        "/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&resourceVersion={version}",
    ),
    get(
        "a version and a name",
        Named,
        "/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&fieldSelector=metadata.name=one&resourceVersion={version}",
    ),
    // Credentials.
    list("two Authorization headers", Stranger)
        .with(&[("authorization", "Bearer {Stranger}"), ("authorization", "Bearer {Admin}")]),
    list("two Authorization headers, the right one first", Admin)
        .with(&[("authorization", "Bearer {Admin}"), ("authorization", "Bearer {Stranger}")]),
    list("two tokens in one header", Stranger).with(&[("authorization", "Bearer {Stranger}, Bearer {Admin}")]),
    list("bearer", Own).with(&[("authorization", "bearer {Own}")]),
    list("BEARER", Own).with(&[("authorization", "BEARER {Own}")]),
    list("two spaces", Anonymous).with(&[("authorization", "Bearer  {Admin}")]),
    list("a tab", Anonymous).with(&[("authorization", "Bearer\t{Admin}")]),
    list("more after the token", Own).with(&[("authorization", "Bearer {Own} {Admin}")]),
    list("a token alone", Anonymous).with(&[("authorization", "{Admin}")]),
    list("another scheme", Anonymous).with(&[("authorization", "Basic {Admin}")]),
    list("a token for a proxy", Anonymous).with(&[("proxy-authorization", "Bearer {Admin}")]),
    list("a token as a cookie", Anonymous).with(&[("cookie", "access_token={Admin}; token={Admin}")]),
    get(
        "a token as a parameter",
        Anonymous,
        "/api/v1/namespaces/NS/configmaps?access_token={Admin}&token={Admin}&resourceVersion=0",
    ),
    list("the headers of a front proxy", Stranger).with(&[
        ("x-remote-user", "admin"),
        ("x-remote-group", "system:masters"),
        ("x-forwarded-user", "admin"),
        ("x-forwarded-access-token", "{Admin}"),
    ]),
    list("a Connection header with Authorization", Stranger).with(&[("connection", "authorization")]).in_own_words(),
    // Impersonation.
    list("to act as the administrator", Stranger).with(&[("impersonate-user", "admin")]),
    list("to act with a group", Own).with(&[("impersonate-user", "x"), ("impersonate-group", "system:masters")]),
    list("to act with a group alone", Stranger).with(&[("impersonate-group", "system:masters")]),
    list("to act with a uid alone", Stranger).with(&[("impersonate-uid", "admin")]),
    list("to act with an extra alone", Stranger).with(&[("impersonate-extra-scopes", "all")]),
    get("to act with a group for a secret", Own, "/api/v1/namespaces/NS/secrets/hidden")
        .with(&[("impersonate-user", "admin"), ("impersonate-group", "system:masters")]),
    list("the administrator as another user", Admin).with(&[("impersonate-user", "x")]),
    list("the administrator as an account", Admin).with(&[("impersonate-user", "system:serviceaccount:NS:own")]),
    list("a Connection header with Impersonate-User", Stranger)
        .with(&[("connection", "impersonate-user"), ("impersonate-user", "admin")])
        .in_own_words(),
    // Methods and other headers.
    list("another method by a header", Stranger).by("POST").with(&[("x-http-method-override", "GET")]),
    list("another method by a header, of a reader", Own).by("POST").with(&[("x-http-method-override", "GET")]),
    list("OPTIONS", Stranger).by("OPTIONS"),
    get("HEAD", Named, "/api/v1/namespaces/NS/configmaps/two?resourceVersion=0").by("HEAD"),
    get("HEAD of an allowed name", Named, "/api/v1/namespaces/NS/configmaps/one?resourceVersion=0").by("HEAD"),
    get("a range", Named, "/api/v1/namespaces/NS/configmaps/two?resourceVersion=0").with(&[("range", "bytes=0-9")]),
    get("a range of an allowed name", Named, "/api/v1/namespaces/NS/configmaps/one?resourceVersion=0")
        .with(&[("range", "bytes=0-9")]),
    get("If-None-Match", Named, "/api/v1/namespaces/NS/configmaps/two?resourceVersion=0")
        .with(&[("if-none-match", "*")]),
    get("If-None-Match of an allowed name", Named, "/api/v1/namespaces/NS/configmaps/one?resourceVersion=0")
        .with(&[("if-none-match", "*"), ("if-modified-since", "Fri, 01 Jan 2100 00:00:00 GMT")]),
    get("another path by a header", Named, "/api/v1/namespaces/NS/configmaps/one?resourceVersion=0").with(&[
        ("x-original-url", "/api/v1/namespaces/NS/configmaps/two"),
        ("x-rewrite-url", "/api/v1/namespaces/NS/configmaps/two"),
    ]),
    list("the content type of gRPC", Stranger).with(&[("content-type", "application/grpc")]),
    list("a POST with the content type of gRPC", Stranger).by("POST").with(&[("content-type", "application/grpc")]),
    // Websockets.
    socket("a token among protocols", Own, &[("sec-websocket-protocol", "{ws Own}, base64.channel.k8s.io")]),
    socket("a token as the only protocol", Own, &[("sec-websocket-protocol", "{ws Own}")]),
    socket(
        "two tokens among protocols",
        Stranger,
        &[("sec-websocket-protocol", "{ws Stranger}, {ws Admin}, base64.channel.k8s.io")],
    ),
    socket(
        "two Sec-WebSocket-Protocol headers with tokens",
        Stranger,
        &[("sec-websocket-protocol", "{ws Stranger}"), ("sec-websocket-protocol", "{ws Admin}, base64.channel.k8s.io")],
    ),
    socket(
        "an invalid token before a token",
        Own,
        &[("sec-websocket-protocol", "base64url.bearer.authorization.k8s.io.!, {ws Own}, base64.channel.k8s.io")],
    ),
    socket(
        "an empty token before a token",
        Own,
        &[("sec-websocket-protocol", "base64url.bearer.authorization.k8s.io., {ws Own}, base64.channel.k8s.io")],
    ),
    socket(
        "a token among protocols and another one in Authorization",
        Stranger,
        &[("authorization", "Bearer {Stranger}"), ("sec-websocket-protocol", "{ws Admin}, base64.channel.k8s.io")],
    ),
    watch("a token among protocols without an upgrade", Anonymous)
        .with(&[("sec-websocket-protocol", "{ws Admin}, base64.channel.k8s.io")]),
    watch("a token among protocols of another upgrade", Anonymous).with(&[
        ("connection", "Upgrade"),
        ("upgrade", "SPDY/3.1"),
        ("sec-websocket-protocol", "{ws Admin}, base64.channel.k8s.io"),
    ]),
    watch("two Upgrade headers", Anonymous).with(&[
        ("connection", "Upgrade"),
        ("upgrade", "SPDY/3.1"),
        ("upgrade", "websocket"),
        ("sec-websocket-protocol", "{ws Admin}, base64.channel.k8s.io"),
    ]),
    watch("websocket among other upgrades", Anonymous).with(&[
        ("connection", "Upgrade"),
        ("upgrade", "h2c, websocket"),
        ("sec-websocket-protocol", "{ws Admin}, base64.channel.k8s.io"),
    ]),
];
