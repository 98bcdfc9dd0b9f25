//! gRPC calls that try to slip past authorization, and what calls show that read no objects. The
//! verdict of a call is the apiserver's about the equivalent request over HTTP.

use std::net::SocketAddr;

use http::{Method, Version};
use kubefan_common::proto::v1alpha1::{
    GetRequest, ListRequest, ListResourcesRequest, Target, WatchRequest, watch_service_client::WatchServiceClient,
};
use prost::Message;
use reqwest::StatusCode;
use tokio::time::timeout;
use tonic::{Code, Request, Status, metadata::AsciiMetadataKey};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};

use super::{
    crafted::Servers,
    identities::{
        Who,
        Who::{Admin, Anonymous, Inside, Invalid, Lister, Named, Own, Stranger},
    },
    requests::{
        By::Grpc,
        Row,
        Verb::{Get, List, Watch},
    },
    world::World,
};
use crate::harness::{apiserver::ApiServer, tests, wait};

tests! {
    apiserver full: a_crafted_call_gets_the_verdict_of_the_apiserver, a_denied_reader_starts_no_cache,
        health_and_reflection_show_no_resource;
}

/// A call.
struct Call {
    name: &'static str,
    row: Row,
    /// The path of the equivalent request, where it is not that of the row.
    equivalent: Option<&'static str>,
    /// Headers of both. One that says who calls replaces the caller's token.
    metadata: &'static [(&'static str, &'static str)],
}

const fn call(name: &'static str, row: Row) -> Call {
    Call { name, row, equivalent: None, metadata: &[] }
}

/// A list of the configmaps in NS with these metadata, which say who calls.
const fn list(name: &'static str, who: Who, metadata: &'static [(&'static str, &'static str)]) -> Call {
    Call { metadata, ..call(name, (who, List, "configmaps", "NS", "", "", Grpc)) }
}

impl Call {
    const fn like(self, path: &'static str) -> Call {
        Call { equivalent: Some(path), ..self }
    }

    fn says_who(&self) -> bool {
        self.metadata.iter().any(|(name, _)| *name == "authorization")
    }
}

const CALLS: &[Call] = &[
    call("all namespaces", (Inside, List, "namespaces", "", "", "", Grpc)),
    call("namespaces in one", (Inside, List, "namespaces", "NS", "", "", Grpc)),
    call("a watch of them", (Inside, Watch, "namespaces", "NS", "", "", Grpc)),
    call("another one in one", (Inside, Get, "namespaces", "NS", "OTHER", "", Grpc)),
    call("another one", (Inside, Get, "namespaces", "", "OTHER", "", Grpc)),
    call("its own", (Inside, Get, "namespaces", "", "NS", "", Grpc)),
    call("an allowed name", (Named, Get, "configmaps", "NS", "one", "", Grpc)),
    call("a path for a name", (Named, Get, "configmaps", "NS", "one/../two", "", Grpc)).like("MAPS/one%2F..%2Ftwo"),
    call("dots for a name", (Named, Get, "configmaps", "NS", "..", "", Grpc)),
    call("a short name", (Named, Get, "cm", "NS", "two", "", Grpc)).like("MAPS/two"),
    call("a kind", (Named, Get, "ConfigMap", "NS", "two", "", Grpc)).like("MAPS/two"),
    call("a kind of an allowed name", (Named, Get, "ConfigMap", "NS", "one", "", Grpc)).like("MAPS/one"),
    call("a subresource", (Named, Get, "configmaps/status", "NS", "one", "", Grpc)).like("MAPS/one/status"),
    call("any resource", (Stranger, List, "*", "NS", "", "", Grpc)),
    call("a secret", (Own, Get, "secrets", "NS", "hidden", "", Grpc)),
    call("a space after a namespace", (Own, List, "configmaps", "OTHER ", "", "", Grpc))
        .like("/api/v1/namespaces/OTHER%20/configmaps"),
    call("a namespace as a selector", (Own, List, "configmaps", "", "", "fieldSelector=metadata.namespace=NS", Grpc)),
    call("a list of an allowed name", (Named, List, "configmaps", "NS", "one", "", Grpc)),
    call(
        "a name and the selector of another",
        (Named, List, "configmaps", "NS", "one", "fieldSelector=metadata.name=two", Grpc),
    )
    .like("MAPS?fieldSelector=NAME=one,NAME=two"),
    call("a name that contains a selector", (Named, List, "configmaps", "NS", "one,metadata.name=two", "", Grpc))
        .like("MAPS?fieldSelector=NAME=one%5C,NAME%5C=two"),
    call("all names but one", (Named, Watch, "configmaps", "NS", "", "fieldSelector=metadata.name!=one", Grpc)),
    call("a watch of an allowed name", (Named, Watch, "configmaps", "NS", "one", "", Grpc)),
    call("a selector without a field", (Stranger, List, "configmaps", "", "", "fieldSelector==x", Grpc)),
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

impl Servers {
    /// What a call to a kubefan returns, as bytes.
    async fn returned(&self, call: &Call, addr: SocketAddr) -> Result<Vec<u8>, Status> {
        let (world, target) = (&self.world, self.world.target(call.row));
        let mut client = WatchServiceClient::new(world.channel_to(addr, Anonymous).await);
        match call.row.1 {
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
                // From the version of an administrator's stream.
                let resource_version = self.filled("{version}");
                let watch = WatchRequest { target, timeout_seconds: 1, resource_version, ..WatchRequest::default() };
                let mut stream = client.watch(self.crafted(call, watch)).await?.into_inner();
                let mut all = Vec::new();
                while let Ok(Some(message)) = stream.message().await {
                    all.extend(message.encode_to_vec());
                }
                Ok(all)
            }
        }
    }

    fn crafted<T>(&self, call: &Call, message: T) -> Request<T> {
        let mut request = if call.says_who() { Request::new(message) } else { self.world.call(call.row.0, message) };
        for (name, value) in call.metadata {
            let name: AsciiMetadataKey = name.parse().unwrap();
            request.metadata_mut().append(name, self.filled(value).parse().unwrap());
        }
        request
    }

    /// The apiserver's answer to the equivalent of a call.
    async fn equivalent(&self, call: &Call) -> StatusCode {
        let token = self.world.token(call.row.0).filter(|_| !call.says_who());
        let own = token.map(|token| ("authorization".to_owned(), format!("Bearer {token}")));
        let more = call.metadata.iter().map(|(name, value)| ((*name).to_owned(), self.filled(value)));
        let headers: Vec<_> = own.into_iter().chain(more).collect();
        let path = call.equivalent.map_or_else(|| self.world.path(call.row), |path| self.filled(path));
        self.server(self.world.api.addr()).ask(Version::HTTP_11, &Method::GET, &path, &headers).await.status
    }
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
            // What is not a name, or no resource, is refused before or after the verdict.
            Code::InvalidArgument | Code::NotFound => straight.is_client_error(),
            _ => false,
        },
    }
}

async fn a_crafted_call_gets_the_verdict_of_the_apiserver() {
    let servers = Servers::start().await;
    let (mut wrong, mut served) = (Vec::new(), 0);
    for call in CALLS {
        let straight = servers.equivalent(call).await;
        let hidden = servers.hidden_from(call.row.0);
        for (passthrough, addr) in servers.kubefans() {
            let returned = servers.returned(call, addr).await;
            served += usize::from(returned.is_ok());
            let text = returned.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
            let shown = text.as_ref().is_ok_and(|text| hidden.iter().any(|content| text.contains(content.as_str())));
            if !is_right(call, straight, &returned) || shown {
                let (name, who) = (call.name, call.row.0);
                wrong.push(format!("{name} ({who:?}, {passthrough:?}): straight {straight}, kubefan {text:.300?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
    println!("{} calls to three kubefans; {served} are served", CALLS.len());
    assert!(served >= 15, "{served}");
}

async fn a_denied_reader_starts_no_cache() {
    let args = ["--passthrough=off", "--anonymous-auth", "--on-demand", "--cache-tables"];
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
        // What another one may list, a caller is not shown.
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
    let world = World::start(ApiServer::shared().await, &["--passthrough=off"]).await;
    let channel = world.channel_to(world.kubefan.grpc_addr, Anonymous).await;
    let health = HealthClient::new(channel.clone());
    let check = async |service: &str| health.clone().check(HealthCheckRequest { service: service.to_owned() }).await;
    wait::until("the health to be serving", wait::SOON, || async {
        (check("").await.unwrap().into_inner().status() == ServingStatus::Serving).then_some(())
    })
    .await;
    let of_namespace = format!("configmaps/{}", world.own);
    // Cached or not, existing or not.
    for name in ["pods", "configmaps", "configmaps/one", &*of_namespace, "deployments.apps", "secrets", "missing"] {
        let unknown = check(name).await.unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound, "{name}: {unknown:?}");
    }
    let asked = ["configmaps", "pods", &*world.own].map(|name| MessageRequest::FileContainingSymbol(name.to_owned()));
    let requests = [MessageRequest::ListServices(String::new())]
        .into_iter()
        .chain(asked)
        .map(|request| ServerReflectionRequest { host: String::new(), message_request: Some(request) });
    let answers = ServerReflectionClient::new(channel)
        .server_reflection_info(futures::stream::iter(requests.collect::<Vec<_>>()))
        .await;
    let mut answers = answers.unwrap().into_inner();
    let read = async {
        let mut texts = Vec::new();
        while let Ok(Some(answer)) = answers.message().await {
            texts.push(format!("{:?}", answer.message_response));
        }
        texts
    };
    let texts = timeout(wait::SOON, read).await.expect("reflection ends with its requests");
    assert!(texts[0].contains("kubefan.v1alpha1.WatchService") && !texts[0].contains("configmaps"), "{texts:?}");
    assert!(texts[1..].iter().all(|text| text.contains("ErrorResponse")), "{texts:?}");
}
