//! Requests that try to slip past authorization. kubefan's verdict is the apiserver's about the
//! same request sent straight, and no answer shows an object that its caller may not read.
//!
//! Each is sent with passthrough off, so that the answer is kubefan's own, and with both kinds of
//! passthrough, where a mistake could forward a request as another user.

use std::net::SocketAddr;

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use futures::{StreamExt, stream};
use http::{Method, Version};
use serde_json::{Value, json};

use super::{
    identities::{
        Who,
        Who::{Admin, Anonymous, ListOnly, Named, Own, Stranger},
    },
    requests::{WEBSOCKET, token_protocol},
    tricks::{TRICKS, Trick},
    world::{World, content},
};
use crate::harness::{
    apiserver::ApiServer,
    https::{Answer, Https},
    kubefan::Kubefan,
    tests,
};

tests! {
    apiserver slow_faults: a_crafted_request_gets_the_verdict_of_the_apiserver,
        a_request_inside_another_is_not_its_callers;
}

/// Parameters that Go refuses to read; a query with fewer is read.
const PARAMETERS: usize = 10_001;
/// Tricks that are tried at a time. A watch takes a second.
const CONCURRENCY: usize = 8;

/// A way to answer requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Passthrough {
    Off,
    Caller,
    Impersonate,
}

use Passthrough::{Caller, Impersonate, Off};

/// The apiserver, a kubefan of each kind, and the content of requests. The kubefan of `world` has
/// no passthrough.
struct Servers {
    world: World,
    with_passthrough: [(Passthrough, Kubefan); 2],
    ca: String,
    values: Vec<(String, String)>,
}

impl Servers {
    async fn start() -> Servers {
        let world =
            World::start(ApiServer::shared().await, &["--access=authorized-cache-only", "--anonymous-auth"]).await;
        let hidden =
            json!({ "metadata": { "name": "hidden", "annotations": { "content": content(&world.own, "hidden") } } });
        world.api.create(&format!("/api/v1/namespaces/{}/secrets", world.own), &hidden).await;
        let start = async |passthrough| {
            let args = [passthrough, "tuning.passthroughUpgrades", "--anonymous-auth", "--on-demand=false"];
            world.another(&args).await
        };
        let caller = (Caller, start("--access=authorized").await);
        let with_passthrough = [caller, (Impersonate, start("--access=authorized-impersonate").await)];
        let mut values = Vec::new();
        for who in [Admin, Stranger, Own, Named, ListOnly] {
            let token = world.token(who).unwrap();
            values.push((format!("{{{who:?}}}"), token.to_owned()));
            values.push((format!("{{ws {who:?}}}"), token_protocol(token)));
        }
        let ca = world.ca();
        let mut servers = Servers { world, with_passthrough, ca, values };
        servers.get_what_others_were_given().await;
        servers
    }

    /// Gets a continue token and a version as the administrator.
    async fn get_what_others_were_given(&mut self) {
        let off = self.world.kubefan.grpc_addr;
        let first = get_as(&self.world, off, "/api/v1/configmaps?limit=1").await;
        let continues = first["metadata"]["continue"].as_str().expect("there are more").to_owned();
        let one = get_as(&self.world, off, &self.world.named("/api/v1/namespaces/NS/configmaps/one")).await;
        let version = one["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
        let start = format!("../{}/\0", self.world.other);
        let number: u64 = version.parse().unwrap();
        let forged = json!({ "v": "meta.k8s.io/v1", "rv": number, "start": start }).to_string();
        let forged = BASE64_URL_SAFE_NO_PAD.encode(forged);
        for (name, value) in [("continue", continues), ("version", version), ("forged", forged)] {
            self.values.push((format!("{{{name}}}"), value));
        }
        self.values.push(("{many}".to_owned(), "&a".repeat(PARAMETERS)));
    }

    fn kubefans(&self) -> impl Iterator<Item = (Passthrough, SocketAddr)> {
        let with_passthrough = self.with_passthrough.iter().map(|(kind, kubefan)| (*kind, kubefan.grpc_addr));
        std::iter::once((Off, self.world.kubefan.grpc_addr)).chain(with_passthrough)
    }

    fn filled(&self, text: &str) -> String {
        let named = self.world.named(text);
        self.values.iter().fold(named, |text, (name, value)| text.replace(name, value))
    }

    fn server(&self, addr: SocketAddr) -> Https<'_> {
        Https { addr, ca_pem: &self.ca, identity: None }
    }

    async fn ask(&self, addr: SocketAddr, version: Version, trick: &Trick) -> Answer {
        let mut headers: Vec<(String, String)> = Vec::new();
        if trick.is_websocket {
            headers.extend(WEBSOCKET.map(|(name, value)| (name.to_owned(), value.to_owned())));
        }
        let has_own = trick.headers.iter().any(|(name, _)| *name == "authorization");
        let token = self.world.token(trick.who).filter(|_| !has_own && !trick.is_websocket);
        headers.extend(token.map(|token| ("authorization".to_owned(), format!("Bearer {token}"))));
        headers.extend(trick.headers.iter().map(|(name, value)| ((*name).to_owned(), self.filled(value))));
        let method = Method::from_bytes(trick.method.as_bytes()).unwrap();
        self.server(addr).ask(version, &method, &self.filled(trick.path), &headers).await
    }

    /// The content of the objects that a caller may not read.
    fn hidden_from(&self, who: Who) -> Vec<String> {
        let World { own, other, .. } = &self.world;
        let one = content(own, "one");
        let two = content(own, "two");
        let elsewhere = content(other, "one");
        let secret = content(own, "hidden");
        match who {
            Admin => vec![],
            Own => vec![elsewhere, secret],
            Named => vec![two, elsewhere, secret],
            _ => vec![one, two, elsewhere, secret],
        }
    }

    /// The versions of HTTP that a trick can be sent with. Only HTTP/1.1 has headers of a
    /// connection, and the URI of another host.
    fn versions(trick: &Trick) -> &'static [Version] {
        let is_hop_by_hop = |name: &str| matches!(name, "connection" | "upgrade" | "proxy-authorization");
        let needs_http1 = trick.is_websocket
            || !trick.path.starts_with('/')
            || trick.headers.iter().any(|(name, _)| is_hop_by_hop(name));
        if needs_http1 { &[Version::HTTP_11] } else { &[Version::HTTP_11, Version::HTTP_2] }
    }

    /// Sends a trick everywhere. Returns the mistakes, and the number of answers that are no
    /// refusals, by the kind of passthrough.
    async fn tried(&self, trick: &Trick) -> (Vec<String>, [usize; 3]) {
        let mut wrong = Vec::new();
        let mut served = [0; 3];
        let straight = self.ask(self.world.api.addr(), Version::HTTP_11, trick).await;
        let hidden = self.hidden_from(trick.who);
        let expected = straight.status.as_u16();
        for (passthrough, addr) in self.kubefans() {
            for version in Self::versions(trick) {
                let answer = self.ask(addr, *version, trick).await;
                let code = answer.status.as_u16();
                let is_right = match passthrough {
                    _ if code == expected => true,
                    Caller => trick.has_own_words && expected >= 400 && code >= 400,
                    // kubefan refuses requests that it does not serve, and requests to act as
                    // another user.
                    Off | Impersonate => (400..500).contains(&code) || code == 501,
                };
                let text = answer.text();
                let shown = hidden.iter().find(|content| text.contains(content.as_str()));
                served[passthrough as usize] += usize::from(code < 400);
                if !is_right || shown.is_some() {
                    wrong.push(format!(
                        "{} ({:?} {version:?}, {passthrough:?}): {} {:.200}\n  straight {} {:.300}\n  kubefan  {} {text:.300}\n  shows {shown:?}",
                        trick.name, trick.who, trick.method, self.filled(trick.path), straight.status, straight.text(), answer.status,
                    ));
                }
            }
        }
        (wrong, served)
    }
}

/// The JSON that the administrator gets.
async fn get_as(world: &World, addr: SocketAddr, path: &str) -> Value {
    let answer = world.client(Admin).get(format!("https://{addr}{path}")).send().await.unwrap();
    serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap()
}

async fn a_crafted_request_gets_the_verdict_of_the_apiserver() {
    let servers = Servers::start().await;
    // The content shows up in an answer that contains the object.
    for (_, addr) in servers.kubefans() {
        let all = get_as(&servers.world, addr, "/api/v1/configmaps?resourceVersion=0").await.to_string();
        for content in servers.hidden_from(Anonymous).iter().filter(|content| !content.ends_with("-hidden")) {
            assert!(all.contains(content.as_str()), "{all}");
        }
    }
    let tried = stream::iter(TRICKS).map(|trick| servers.tried(trick)).buffer_unordered(CONCURRENCY);
    let mut wrong = Vec::new();
    let mut served = [0; 3];
    for (differences, counts) in tried.collect::<Vec<_>>().await {
        wrong.extend(differences);
        for (all, count) in served.iter_mut().zip(counts) {
            *all += count;
        }
    }
    println!("{} tricks; served with passthrough off, caller, impersonate: {served:?}", TRICKS.len());
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
    // Otherwise the tricks would show nothing.
    assert!(served.iter().all(|count| *count >= 20), "{served:?}");
}

/// Requests whose end two servers could find at different places. `{end}` is the request that would
/// be smuggled: it has no credentials of its own.
const SMUGGLED: &[(&str, &str)] = &[
    ("a pipelined request", "GET {one} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\n\r\n{end}"),
    (
        "a length and chunks",
        "POST {all} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{end}",
    ),
    (
        "chunks and a longer length",
        "POST {all} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nTransfer-Encoding: chunked\r\nContent-Length: 30\r\n\r\n0\r\n\r\n{end}",
    ),
    (
        "two lengths",
        "POST {all} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nContent-Length: 0\r\nContent-Length: 30\r\n\r\n{end}",
    ),
    (
        "a length with a sign",
        "POST {all} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nContent-Length: +0\r\n\r\n{end}",
    ),
    (
        "an unknown encoding",
        "POST {all} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nTransfer-Encoding: xchunked\r\n\r\n{end}",
    ),
    (
        "a space before the colon",
        "POST {all} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n{end}",
    ),
    (
        "a header on two lines",
        "GET {one} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nX-A: b\r\n Transfer-Encoding: chunked\r\n\r\n{end}",
    ),
    (
        "a get with a body",
        "GET {one} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {Named}\r\nContent-Length: {end length}\r\n\r\n{end}{end}",
    ),
    ("a line feed alone", "GET {one} HTTP/1.1\nHost: h\nAuthorization: Bearer {Named}\n\n{end}"),
    ("two hosts", "GET {one} HTTP/1.1\r\nHost: h\r\nHost: i\r\nAuthorization: Bearer {Named}\r\n\r\n{end}"),
];

async fn a_request_inside_another_is_not_its_callers() {
    let servers = Servers::start().await;
    let collection = servers.world.named("/api/v1/namespaces/NS/configmaps");
    let end = format!("GET {collection}/two?resourceVersion=0 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    let hidden = servers.hidden_from(Named);
    let mut wrong = Vec::new();
    for (name, request) in SMUGGLED {
        let request = request
            .replace("{one}", &format!("{collection}/one?resourceVersion=0"))
            .replace("{all}", &collection)
            .replace("{end length}", &end.len().to_string())
            .replace("{end}", &end);
        let request = servers.filled(&request);
        for (passthrough, addr) in servers.kubefans() {
            let text = servers.server(addr).raw(request.as_bytes()).await;
            // Only the first request has a token, and that may read one object.
            let served = text.matches("HTTP/1.1 2").count();
            let most = usize::from(request.starts_with("GET"));
            if served > most || hidden.iter().any(|content| text.contains(content.as_str())) {
                wrong.push(format!("{name} ({passthrough:?}): {text}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The same connection serves the allowed request, and refuses the other.
    let pipelined = servers.filled(&SMUGGLED[0].1.replace("{one}", &format!("{collection}/one?resourceVersion=0")));
    let text = servers.server(servers.world.kubefan.grpc_addr).raw(pipelined.replace("{end}", &end).as_bytes()).await;
    assert!(text.contains("HTTP/1.1 200 ") && text.contains("HTTP/1.1 403 "), "{text}");
}
