//! gRPC calls that try to slip past authorization, and the answers of calls that read no objects.
//! The verdict of a call is the apiserver's about the equivalent request over HTTP.

use std::net::SocketAddr;

use http::{Method, Version};
use kubefan_common::proto::v1alpha1::{
    GetRequest, ListRequest, ListResourcesRequest, Target, WatchRequest, WatchResponse, watch_response,
    watch_service_client::WatchServiceClient,
};
use prost::Message;
use reqwest::StatusCode;
use serde_json::json;
use tokio::time::timeout;
use tonic::{Code, Request, Status, Streaming, metadata::AsciiMetadataKey};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};

use super::{
    identities::{
        Who,
        Who::{Admin, Anonymous, Inside, Invalid, Lister, Named, Own, Stranger},
    },
    requests::{
        Verb,
        Verb::{Get, List, Watch},
        token_protocol,
    },
    world::{World, content},
};
use crate::harness::{apiserver::ApiServer, https::Https, tests, wait};

tests! {
    apiserver slow_faults: a_crafted_call_gets_the_verdict_of_the_apiserver,
        a_view_that_is_shared_refuses_who_may_not_read_it, a_denied_reader_starts_no_cache,
        health_and_reflection_show_no_resource;
}

/// The objects that a call names.
#[derive(Clone, Copy)]
struct CallTarget {
    resource: &'static str,
    namespace: &'static str,
    name: &'static str,
    field_selector: &'static str,
}

const fn target(
    resource: &'static str,
    namespace: &'static str,
    name: &'static str,
    field_selector: &'static str,
) -> CallTarget {
    CallTarget { resource, namespace, name, field_selector }
}

/// A call, and the equivalent request. The metadata are headers of both.
struct Call {
    name: &'static str,
    who: Who,
    verb: Verb,
    target: CallTarget,
    equivalent: &'static str,
    metadata: &'static [(&'static str, &'static str)],
}

const fn call(name: &'static str, who: Who, verb: Verb, target: CallTarget, equivalent: &'static str) -> Call {
    Call { name, who, verb, target, equivalent, metadata: &[] }
}

/// A list of the configmaps in NS with these metadata, which name the caller.
const fn list(name: &'static str, who: Who, metadata: &'static [(&'static str, &'static str)]) -> Call {
    let list = call(name, who, List, target("configmaps", "NS", "", ""), "/api/v1/namespaces/NS/configmaps");
    Call { metadata, ..list }
}

const CALLS: &[Call] = &[
    call("all namespaces", Inside, List, target("namespaces", "", "", ""), "/api/v1/namespaces"),
    call("namespaces in one", Inside, List, target("namespaces", "NS", "", ""), "/api/v1/namespaces/NS/namespaces"),
    call(
        "a watch of them",
        Inside,
        Watch,
        target("namespaces", "NS", "", ""),
        "/api/v1/namespaces/NS/namespaces?watch=1",
    ),
    call(
        "another one in one",
        Inside,
        Get,
        target("namespaces", "NS", "OTHER", ""),
        "/api/v1/namespaces/NS/namespaces/OTHER",
    ),
    call("another one", Inside, Get, target("namespaces", "", "OTHER", ""), "/api/v1/namespaces/OTHER"),
    call("its own", Inside, Get, target("namespaces", "", "NS", ""), "/api/v1/namespaces/NS"),
    call("an allowed name", Named, Get, target("configmaps", "NS", "one", ""), "/api/v1/namespaces/NS/configmaps/one"),
    call("a name", Named, Get, target("configmaps", "NS", "two", ""), "/api/v1/namespaces/NS/configmaps/two"),
    call(
        "a path for a name",
        Named,
        Get,
        target("configmaps", "NS", "one/../two", ""),
        "/api/v1/namespaces/NS/configmaps/one%2F..%2Ftwo",
    ),
    call("dots for a name", Named, Get, target("configmaps", "NS", "..", ""), "/api/v1/namespaces/NS/configmaps/.."),
    call("a short name", Named, Get, target("cm", "NS", "two", ""), "/api/v1/namespaces/NS/configmaps/two"),
    call("a kind", Named, Get, target("ConfigMap", "NS", "two", ""), "/api/v1/namespaces/NS/configmaps/two"),
    call(
        "a kind of an allowed name",
        Named,
        Get,
        target("ConfigMap", "NS", "one", ""),
        "/api/v1/namespaces/NS/configmaps/one",
    ),
    call(
        "a subresource",
        Named,
        Get,
        target("configmaps/status", "NS", "one", ""),
        "/api/v1/namespaces/NS/configmaps/one/status",
    ),
    call("any resource", Stranger, List, target("*", "NS", "", ""), "/api/v1/namespaces/NS/*"),
    call("a secret", Own, Get, target("secrets", "NS", "hidden", ""), "/api/v1/namespaces/NS/secrets/hidden"),
    call(
        "a space after a namespace",
        Own,
        List,
        target("configmaps", "OTHER ", "", ""),
        "/api/v1/namespaces/OTHER%20/configmaps",
    ),
    call(
        "a namespace as a selector",
        Own,
        List,
        target("configmaps", "", "", "metadata.namespace=NS"),
        "/api/v1/configmaps?fieldSelector=metadata.namespace=NS",
    ),
    call(
        "a list of an allowed name",
        Named,
        List,
        target("configmaps", "NS", "one", ""),
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one",
    ),
    call(
        "a name and the selector of another",
        Named,
        List,
        target("configmaps", "NS", "one", "metadata.name=two"),
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one,metadata.name=two",
    ),
    call(
        "a name that contains a selector",
        Named,
        List,
        target("configmaps", "NS", "one,metadata.name=two", ""),
        "/api/v1/namespaces/NS/configmaps?fieldSelector=metadata.name=one%5C,metadata.name%5C=two",
    ),
    call(
        "all names but one",
        Named,
        Watch,
        target("configmaps", "NS", "", "metadata.name!=one"),
        "/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&fieldSelector=metadata.name!=one",
    ),
    call(
        "a watch of a name",
        Named,
        Watch,
        target("configmaps", "NS", "two", ""),
        "/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&fieldSelector=metadata.name=two",
    ),
    call(
        "a watch of an allowed name",
        Named,
        Watch,
        target("configmaps", "NS", "one", ""),
        "/api/v1/namespaces/NS/configmaps?watch=1&timeoutSeconds=1&fieldSelector=metadata.name=one",
    ),
    call(
        "a selector without a field",
        Stranger,
        List,
        target("configmaps", "", "", "=x"),
        "/api/v1/configmaps?fieldSelector==x",
    ),
    list("bearer", Own, &[("authorization", "bearer {Own}")]),
    list("two tokens", Stranger, &[("authorization", "Bearer {Stranger}"), ("authorization", "Bearer {Admin}")]),
    list("a token in other metadata", Anonymous, &[("access-token", "{Admin}"), ("token", "Bearer {Admin}")]),
    list("a token of a websocket", Anonymous, &[("sec-websocket-protocol", "{ws Admin}, base64.channel.k8s.io")]),
    list("a front proxy", Stranger, &[("x-remote-user", "admin"), ("x-remote-group", "system:masters")]),
    list("to act as the administrator", Stranger, &[("impersonate-user", "admin")]),
    list("to act with a group", Own, &[("impersonate-user", "x"), ("impersonate-group", "system:masters")]),
    list("to act with a group alone", Own, &[("impersonate-group", "system:masters")]),
    list("to act with a uid", Own, &[("impersonate-uid", "admin")]),
    list("to act with an extra", Own, &[("impersonate-extra-scopes", "all")]),
    list("the administrator as a reader", Admin, &[("impersonate-user", "system:serviceaccount:NS:own")]),
];

impl World {
    fn filled(&self, text: &str) -> String {
        [Admin, Stranger, Own].into_iter().fold(self.named(text), |text, who| {
            let token = self.token(who).unwrap();
            text.replace(&format!("{{ws {who:?}}}"), &token_protocol(token)).replace(&format!("{{{who:?}}}"), token)
        })
    }

    fn crafted<T>(&self, call: &Call, message: T) -> Request<T> {
        let says_who = call.metadata.iter().any(|(name, _)| *name == "authorization");
        let mut request = if says_who { Request::new(message) } else { self.call(call.who, message) };
        for (name, value) in call.metadata {
            let name: AsciiMetadataKey = name.parse().unwrap();
            request.metadata_mut().append(name, self.filled(value).parse().unwrap());
        }
        request
    }

    /// Returns the result of a call to a kubefan, as bytes.
    async fn returned(&self, call: &Call, addr: SocketAddr) -> Result<Vec<u8>, Status> {
        let CallTarget { resource, namespace, name, field_selector: fields } = call.target;
        let target = Some(Target {
            resource: resource.to_owned(),
            namespace: self.named(namespace),
            name: self.named(name),
            field_selector: self.named(fields),
            ..Target::default()
        });
        let mut client = WatchServiceClient::new(self.channel_to(addr, Anonymous).await);
        match call.verb {
            Get => {
                let request = self.crafted(call, GetRequest { target, ..GetRequest::default() });
                client.get(request).await.map(|answer| answer.into_inner().encode_to_vec())
            }
            List => {
                let request = self.crafted(call, ListRequest { target, ..ListRequest::default() });
                let mut chunks = client.list(request).await?.into_inner();
                let mut all = Vec::new();
                while let Some(chunk) = chunks.message().await? {
                    all.extend(chunk.encode_to_vec());
                }
                Ok(all)
            }
            Watch => {
                let watch = WatchRequest { target, timeout_seconds: 1, ..WatchRequest::default() };
                Ok(all_of(client.watch(self.crafted(call, watch)).await?.into_inner()).await)
            }
        }
    }

    /// The apiserver's answer to the equivalent of a call.
    async fn equivalent(&self, call: &Call) -> StatusCode {
        let says_who = call.metadata.iter().any(|(name, _)| *name == "authorization");
        let token = self.token(call.who).filter(|_| !says_who);
        let own = token.map(|token| ("authorization".to_owned(), format!("Bearer {token}")));
        let more = call.metadata.iter().map(|(name, value)| ((*name).to_owned(), self.filled(value)));
        let headers: Vec<_> = own.into_iter().chain(more).collect();
        let ca = self.ca();
        let server = Https { addr: self.api.addr(), ca_pem: &ca, identity: None };
        server.ask(Version::HTTP_11, &Method::GET, &self.named(call.equivalent), &headers).await.status
    }
}

/// Everything that a stream sends until it ends.
async fn all_of(mut stream: Streaming<WatchResponse>) -> Vec<u8> {
    let mut all = Vec::new();
    let read = async {
        while let Ok(Some(message)) = stream.message().await {
            all.extend(message.encode_to_vec());
        }
    };
    timeout(wait::SOON, read).await.expect("the stream ends");
    all
}

/// Whether an outcome of a call is the apiserver's answer to its equivalent.
fn is_right(call: &Call, straight: StatusCode, returned: &Result<Vec<u8>, Status>) -> bool {
    // Over gRPC no call acts as another user, with any kind of passthrough.
    let acts_as_another = call.metadata.iter().any(|(name, _)| name.starts_with("impersonate-"));
    match returned {
        Ok(_) => straight == StatusCode::OK && !acts_as_another,
        Err(status) => match status.code() {
            Code::PermissionDenied => straight == StatusCode::FORBIDDEN || acts_as_another,
            Code::Unauthenticated => straight == StatusCode::UNAUTHORIZED,
            // An invalid name, or an unknown resource, is refused before or after the verdict.
            Code::InvalidArgument | Code::NotFound => straight.is_client_error(),
            _ => false,
        },
    }
}

async fn a_crafted_call_gets_the_verdict_of_the_apiserver() {
    let world = World::start(ApiServer::shared().await, &["--access=authorized-cache-only", "--anonymous-auth"]).await;
    let caller = world.another(&["--access=authorized", "--anonymous-auth"]).await;
    let impersonate = world.another(&["--access=authorized-impersonate", "--anonymous-auth"]).await;
    let one = content(&world.own, "one");
    let two = content(&world.own, "two");
    let elsewhere = content(&world.other, "one");
    let mut wrong = Vec::new();
    let mut served = 0;
    for call in CALLS {
        let straight = world.equivalent(call).await;
        let hidden: &[&String] = match call.who {
            Admin => &[],
            Own => &[&elsewhere],
            Named => &[&two, &elsewhere],
            _ => &[&one, &two, &elsewhere],
        };
        for kubefan in [&world.kubefan, &caller, &impersonate] {
            let returned = world.returned(call, kubefan.grpc_addr).await;
            served += usize::from(returned.is_ok());
            let text = returned.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
            let shown = text.as_ref().is_ok_and(|text| hidden.iter().any(|content| text.contains(content.as_str())));
            if !is_right(call, straight, &returned) || shown {
                wrong.push(format!("{} ({:?}): straight {straight}, kubefan {text:.300?}", call.name, call.who));
            }
        }
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
    println!("{} calls to three kubefans; {served} are served", CALLS.len());
    assert!(served >= 15, "{served}");
}

async fn a_view_that_is_shared_refuses_who_may_not_read_it() {
    let world = World::start(ApiServer::shared().await, &["--access=authorized-cache-only"]).await;
    let target = |namespace: &str| {
        Some(Target { resource: "configmaps".to_owned(), namespace: namespace.to_owned(), ..Target::default() })
    };
    let mut client = world.grpc().await;
    let watch = |namespace| WatchRequest { target: target(namespace), ..WatchRequest::default() };
    let mut admin = client.watch(world.call(Admin, watch(&world.own))).await.unwrap().into_inner();
    let mut own = client.watch(world.call(Own, watch(&world.own))).await.unwrap().into_inner();
    // The version of the administrator's stream, and its cluster.
    let mut version = String::new();
    let mut cluster = String::new();
    while version.is_empty() {
        let message = admin.message().await.unwrap().expect("it continues");
        version = message.resume_version;
        if let Some(watch_response::Message::SnapshotBegin(begin)) = message.message {
            cluster = begin.cluster;
        }
    }
    for who in [Stranger, Named, Inside] {
        let resumed = WatchRequest { resource_version: version.clone(), cluster: cluster.clone(), ..watch(&world.own) };
        for request in [watch(&world.own), resumed] {
            let refused = client.watch(world.call(who, request)).await.unwrap_err();
            assert_eq!(refused.code(), Code::PermissionDenied, "{who:?}: {refused:?}");
        }
        let url = world.url(&format!("/api/v1/namespaces/{}/configmaps?watch=1&resourceVersion={version}", world.own));
        let refused = world.client(who).get(url).send().await.unwrap();
        assert_eq!(refused.status(), StatusCode::FORBIDDEN, "{who:?}");
    }
    // The version of another caller's stream gives only the caller's own part of the later events.
    for (namespace, name) in [(&world.other, "later"), (&world.own, "later")] {
        let annotations = json!({ "content": content(namespace, name) });
        let object = json!({ "metadata": { "name": name, "annotations": annotations } });
        world.api.create(&format!("/api/v1/namespaces/{namespace}/configmaps"), &object).await;
    }
    let later = content(&world.own, "later");
    for stream in [&mut admin, &mut own] {
        let shown = async {
            loop {
                let message = stream.message().await.unwrap().expect("it continues").encode_to_vec();
                let text = String::from_utf8_lossy(&message).into_owned();
                assert!(!text.contains(&content(&world.other, "later")), "{text}");
                if text.contains(&later) {
                    return;
                }
            }
        };
        timeout(wait::SOON, shown).await.expect("the event arrives");
    }
    let resumed = WatchRequest { resource_version: version, cluster, timeout_seconds: 5, ..watch(&world.own) };
    let text = all_of(client.watch(world.call(Own, resumed)).await.unwrap().into_inner()).await;
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains(&later) && !text.contains(&content(&world.other, "later")), "{text}");
}

async fn a_denied_reader_starts_no_cache() {
    let args = ["--access=authorized-cache-only", "--anonymous-auth", "--on-demand", "--cache-tables"];
    let world = World::start(ApiServer::shared().await, &args).await;
    let is_cached = async || world.kubefan.admin("/metrics").await.unwrap().1.contains("resource=\"services\"");
    let accepts = [
        "application/json",
        "application/vnd.kubernetes.protobuf",
        "application/json;as=Table;g=meta.k8s.io;v=v1",
        "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
    ];
    let base = format!("/api/v1/namespaces/{}/services", world.own);
    let watched = format!("/api/v1/watch/namespaces/{}/services", world.own);
    let target = || Some(Target { resource: "services".to_owned(), ..Target::default() });
    for who in [Anonymous, Invalid, Stranger, Own, Lister] {
        for accept in accepts {
            for path in [&*base, &format!("{base}?watch=1"), &format!("{base}/x?resourceVersion=0"), &watched] {
                let request = world.client(who).get(world.url(path)).header("accept", accept);
                let refused = request.send().await.unwrap().status();
                let expected = if who == Invalid { StatusCode::UNAUTHORIZED } else { StatusCode::FORBIDDEN };
                assert_eq!(refused, expected, "{who:?} {accept} {path}");
            }
        }
        let mut client = world.grpc().await;
        let codes = [
            client.watch(world.call(who, WatchRequest { target: target(), ..WatchRequest::default() })).await.err(),
            client.list(world.call(who, ListRequest { target: target(), ..ListRequest::default() })).await.err(),
        ];
        let expected = if who == Invalid { Code::Unauthenticated } else { Code::PermissionDenied };
        assert!(codes.iter().flatten().filter(|status| status.code() == expected).count() == 2, "{codes:?}");
        // A caller does not see resources that only another caller may list.
        let named = client.list_resources(world.call(who, ListResourcesRequest {})).await;
        let named: Vec<String> = named.map_or(Vec::new(), |named| {
            named.into_inner().resources.into_iter().map(|resource| resource.name).collect()
        });
        let expected: &[&str] = if who == Lister { &["configmaps", "pods"] } else { &[] };
        assert_eq!(named, expected, "{who:?}");
    }
    assert!(!is_cached().await, "a denied reader has started a cache");
    let request = WatchRequest { target: target(), ..WatchRequest::default() };
    let _watch = world.grpc().await.watch(world.call(Admin, request)).await.unwrap();
    assert!(is_cached().await, "the metric shows a cache that was started");
}

async fn health_and_reflection_show_no_resource() {
    let world = World::start(ApiServer::shared().await, &["--access=authorized-cache-only"]).await;
    let channel = world.channel_to(world.kubefan.grpc_addr, Anonymous).await;
    let mut health = HealthClient::new(channel.clone());
    wait::until("the health to be serving", wait::SOON, || {
        let mut health = health.clone();
        async move {
            let overall = health.check(HealthCheckRequest { service: String::new() }).await.unwrap();
            (overall.into_inner().status() == ServingStatus::Serving).then_some(())
        }
    })
    .await;
    let of_namespace = format!("configmaps/{}", world.own);
    // Cached or not, existing or not.
    for name in ["pods", "configmaps", "configmaps/one", &*of_namespace, "deployments.apps", "secrets", "missing"] {
        let unknown = health.check(HealthCheckRequest { service: name.to_owned() }).await.unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound, "{name}: {unknown:?}");
    }
    let asked = ["configmaps", "pods", &*world.own];
    let requests = [MessageRequest::ListServices(String::new())]
        .into_iter()
        .chain(asked.map(|name| MessageRequest::FileContainingSymbol(name.to_owned())));
    let requests =
        requests.map(|request| ServerReflectionRequest { host: String::new(), message_request: Some(request) });
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(futures::stream::iter(requests.collect::<Vec<_>>()))
        .await
        .unwrap()
        .into_inner();
    let read = async {
        let mut seen = 0;
        while let Ok(Some(answer)) = answers.message().await {
            seen += 1;
            let text = format!("{:?}", answer.message_response);
            let is_list = text.contains("ListServicesResponse");
            assert!(is_list || text.contains("ErrorResponse"), "{text}");
            assert!(
                !is_list || (text.contains("kubefan.v1alpha1.WatchService") && !text.contains("configmaps")),
                "{text}"
            );
        }
        assert!(seen >= 1, "{seen}");
    };
    timeout(wait::SOON, read).await.expect("reflection ends with its requests");
}
