//! Who may read what: kubefan's verdict about a request is the apiserver's answer to the same
//! request sent straight, over every protocol. The table [`MATRIX`] is data: a line is a request.
//!
//! kubefan runs here with `--passthrough=off`, so that every answer is its own.

use std::collections::BTreeMap;

use kubefan_common::proto::v1alpha1::{
    GetRequest, ListRequest, ListResourcesRequest, Target, WatchRequest, watch_service_client::WatchServiceClient,
};
use rcgen::{DnType, ExtendedKeyUsagePurpose};
use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};
use tonic::{
    Code, Request,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};

use crate::harness::{
    Test,
    apiserver::{ADMIN, ApiServer, NOBODY, Options},
    kubefan::{Kubefan, run, run_with},
    pki::{self, Authority},
    rbac::{ServiceAccount, bind_cluster_role, grant},
    tests, wait,
};

pub(crate) const TESTS: &[Test] = tests! {
    apiserver: verdicts_are_those_of_the_apiserver, a_refusal_shows_nothing_and_starts_nothing,
        a_revoked_right_ends_with_its_verdict, a_live_watch_ends_when_its_right_is_revoked_and_others_continue,
        with_passthrough_the_apiserver_refuses_in_its_own_words,
        known_callers_are_served_through_an_outage_and_new_ones_are_not, a_review_needs_the_delegators_right,
        requests_that_act_as_others_are_not_answered_from_the_cache, no_token_is_in_a_log_or_metric,
        the_commands_read_with_a_token, over_tls_callers_are_authorized_by_default_and_a_reload_changes_nothing;
    local: a_start_that_would_let_callers_act_as_kubefan_is_refused;
};

/// The callers. `NS` is the namespace of the test, `OTHER` another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Who {
    /// A member of system:masters.
    Admin,
    /// A user without any role.
    Stranger,
    /// No credentials.
    Anonymous,
    /// A token that means nothing.
    Invalid,
    /// May list and watch pods and configmaps of the whole cluster, and get none.
    Lister,
    /// May get, list and watch pods and configmaps in NS.
    Own,
    /// May only list pods in NS.
    ListOnly,
    /// May get, list and watch the configmap `one` in NS.
    Named,
    /// May list configmaps in NS by its group, as a service account of OTHER.
    ByGroup,
    /// May get the namespace NS by a role in it.
    Inside,
    /// May list deployments of the whole cluster.
    Apps,
    /// May get, list and watch pods and configmaps in NS, by the name in its client certificate.
    Cert,
    /// The same user, whose certificate is of an intermediate CA.
    CertOfChain,
    /// May list configmaps in NS, by the group in its client certificate.
    CertGroup,
    /// A member of system:masters by its client certificate.
    CertMaster,
    /// A user without any role, by its client certificate.
    CertStranger,
    /// A member of system:masters by a certificate of a CA with the name of the right one.
    CertForeign,
    /// A member of system:masters by a certificate that has expired.
    CertExpired,
    /// A member of system:masters by a certificate for servers.
    CertServer,
    /// A member of system:masters without a name.
    CertNameless,
    /// A member of system:masters whose certificate has an empty uid.
    CertEmptyUid,
}

const SERVICE_ACCOUNTS: [(Who, &str); 7] = [
    (Who::Lister, "lister"),
    (Who::Own, "own"),
    (Who::ListOnly, "list-only"),
    (Who::Named, "named"),
    (Who::ByGroup, "by-group"),
    (Who::Inside, "inside"),
    (Who::Apps, "apps"),
];

/// How a request is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    Json,
    Protobuf,
    Metadata,
    /// The deprecated path with `/watch/`.
    WatchPath,
    Grpc,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verb {
    Get,
    List,
    Watch,
}

/// A request: who, verb, resource, namespace, name, selectors as in a query, and protocol. `NS`
/// stands for the namespace of the test.
type Row = (Who, Verb, &'static str, &'static str, &'static str, &'static str, By);

use By::{Grpc, Json, Metadata, Protobuf, WatchPath};
use Verb::{Get, List, Watch};
use Who::{
    Admin, Anonymous, Apps, ByGroup, Cert, CertEmptyUid, CertExpired, CertForeign, CertGroup, CertMaster, CertNameless,
    CertOfChain, CertServer, CertStranger, Inside, Invalid, ListOnly, Lister, Named, Own, Stranger,
};

const MATRIX: &[Row] = &[
    (Admin, List, "pods", "", "", "", Json),
    (Admin, Watch, "configmaps", "", "", "", Grpc),
    (Admin, Get, "configmaps", "NS", "one", "", Json),
    (Admin, Get, "configmaps", "NS", "missing", "", Grpc),
    (Anonymous, List, "pods", "", "", "", Json),
    (Anonymous, Watch, "pods", "NS", "", "", Grpc),
    (Invalid, List, "pods", "NS", "", "", Json),
    (Invalid, Get, "configmaps", "NS", "one", "", Protobuf),
    (Invalid, List, "pods", "NS", "", "", Grpc),
    (Stranger, List, "pods", "", "", "", Json),
    (Stranger, List, "pods", "NS", "", "", Protobuf),
    (Stranger, Watch, "pods", "NS", "", "", Metadata),
    (Stranger, Get, "configmaps", "NS", "one", "", Json),
    (Stranger, Get, "configmaps", "NS", "missing", "", Json),
    (Stranger, Get, "configmaps", "NS", "missing", "", Grpc),
    (Stranger, Watch, "namespaces", "", "", "", Grpc),
    (Stranger, Watch, "pods", "NS", "", "", WatchPath),
    (Lister, List, "pods", "", "", "", Json),
    (Lister, List, "pods", "NS", "", "fieldSelector=spec.nodeName=n", Json),
    (Lister, Watch, "pods", "NS", "", "labelSelector=a in (b,c)", Json),
    (Lister, Watch, "configmaps", "", "", "", Grpc),
    (Lister, Watch, "configmaps", "NS", "one", "", Grpc),
    (Lister, Get, "configmaps", "NS", "one", "", Json),
    (Lister, Get, "configmaps", "NS", "one", "", Grpc),
    (Lister, List, "namespaces", "", "", "", Json),
    (Own, List, "pods", "NS", "", "", Json),
    (Own, List, "pods", "", "", "", Json),
    (Own, List, "pods", "OTHER", "", "", Json),
    (Own, List, "pods", "", "", "fieldSelector=metadata.namespace=NS", Json),
    (Own, Watch, "pods", "NS", "", "", WatchPath),
    (Own, Watch, "pods", "", "", "", WatchPath),
    (Own, Watch, "pods", "NS", "", "fieldSelector=spec.nodeName=n", Grpc),
    (Own, Watch, "pods", "", "", "fieldSelector=spec.nodeName=n", Grpc),
    (Own, Get, "configmaps", "NS", "one", "", Metadata),
    (Own, Get, "configmaps", "OTHER", "one", "", Json),
    (Own, Get, "namespaces", "", "NS", "", Json),
    (ListOnly, List, "pods", "NS", "", "", Grpc),
    (ListOnly, Watch, "pods", "NS", "", "", Grpc),
    (ListOnly, Watch, "pods", "NS", "", "", Json),
    (ListOnly, Get, "pods", "NS", "missing", "", Json),
    (Named, Get, "configmaps", "NS", "one", "", Json),
    (Named, Get, "configmaps", "NS", "two", "", Json),
    (Named, Get, "configmaps", "NS", "one", "", Grpc),
    (Named, Get, "configmaps", "NS", "two", "", Grpc),
    (Named, List, "configmaps", "NS", "", "fieldSelector=metadata.name=one", Json),
    (Named, List, "configmaps", "NS", "", "fieldSelector=metadata.name==one", Json),
    (Named, List, "configmaps", "NS", "", "fieldSelector=metadata.name!=two", Json),
    (Named, List, "configmaps", "NS", "", "fieldSelector=metadata.name=two,metadata.name=one", Json),
    (Named, List, "configmaps", "NS", "", "fieldSelector=metadata.name=one,metadata.name==two", Json),
    (Named, List, "configmaps", "NS", "", "", Json),
    (Named, Watch, "configmaps", "NS", "", "fieldSelector=metadata.name=one", Protobuf),
    (Named, Watch, "configmaps", "NS", "one", "", WatchPath),
    (Named, Watch, "configmaps", "NS", "two", "", WatchPath),
    (Named, Watch, "configmaps", "NS", "", "fieldSelector=metadata.name=one", WatchPath),
    (Named, Watch, "configmaps", "NS", "one", "", Grpc),
    (Named, Watch, "configmaps", "NS", "two", "", Grpc),
    (Named, Watch, "configmaps", "", "one", "", Grpc),
    (Named, List, "configmaps", "NS", "one", "", Grpc),
    (ByGroup, List, "configmaps", "NS", "", "", Json),
    (ByGroup, Watch, "configmaps", "NS", "", "", Json),
    (Inside, Get, "namespaces", "", "NS", "", Json),
    (Inside, Get, "namespaces", "", "NS", "", Grpc),
    (Inside, Get, "namespaces", "", "OTHER", "", Json),
    (Inside, Watch, "namespaces", "", "NS", "", WatchPath),
    (Inside, List, "namespaces", "", "", "fieldSelector=metadata.name=NS", Json),
    (Apps, List, "deployments", "", "", "", Json),
    (Apps, List, "deployments", "NS", "", "", Grpc),
    (Apps, List, "pods", "", "", "", Json),
    (Apps, List, "deployments", "", "", "watch=false", Json),
    (Apps, List, "deployments", "", "", "watch=0&watch=1", Json),
    (Apps, List, "deployments", "", "", "watch=1&timeoutSeconds=1", Json),
    (Cert, List, "pods", "NS", "", "", Json),
    (Cert, Get, "configmaps", "NS", "one", "", Protobuf),
    (Cert, Get, "configmaps", "NS", "missing", "", Grpc),
    (Cert, Watch, "pods", "NS", "", "", Grpc),
    (Cert, Watch, "pods", "NS", "", "", WatchPath),
    (Cert, List, "pods", "", "", "", Json),
    (Cert, List, "pods", "OTHER", "", "", Grpc),
    (CertOfChain, List, "pods", "NS", "", "", Json),
    (CertOfChain, Watch, "configmaps", "NS", "", "", Grpc),
    (CertOfChain, List, "pods", "OTHER", "", "", Json),
    (CertGroup, List, "configmaps", "NS", "", "", Json),
    (CertGroup, List, "configmaps", "NS", "", "", Grpc),
    (CertGroup, Watch, "configmaps", "NS", "", "", Json),
    (CertMaster, List, "pods", "", "", "", Json),
    (CertMaster, Watch, "configmaps", "", "", "", Grpc),
    (CertStranger, List, "pods", "NS", "", "", Json),
    (CertStranger, Get, "configmaps", "NS", "missing", "", Grpc),
    (CertForeign, List, "pods", "NS", "", "", Json),
    (CertForeign, List, "pods", "NS", "", "", Grpc),
    (CertExpired, Get, "configmaps", "NS", "one", "", Json),
    (CertExpired, Watch, "pods", "", "", "", Grpc),
    (CertServer, List, "pods", "NS", "", "", Json),
    (CertServer, Get, "configmaps", "NS", "one", "", Grpc),
    (CertNameless, List, "pods", "NS", "", "", Json),
    (CertNameless, List, "pods", "NS", "", "", Grpc),
    (CertEmptyUid, List, "pods", "NS", "", "", Json),
    (CertEmptyUid, List, "pods", "NS", "", "", Grpc),
];

/// A control plane with the service accounts and their roles, and kubefan in front of it.
pub(crate) struct World {
    pub(crate) api: ApiServer,
    pub(crate) kubefan: Kubefan,
    pub(crate) own: String,
    other: String,
    tokens: BTreeMap<Who, Option<String>>,
    /// Client certificates with their keys, in PEM.
    certificates: BTreeMap<Who, (String, String)>,
}

const READS: [&str; 3] = ["get", "list", "watch"];

impl World {
    pub(crate) async fn start(api: ApiServer, args: &[&str]) -> World {
        let (own, other) = (api.namespace("authorized").await, api.namespace("other").await);
        let mut tokens: BTreeMap<Who, Option<String>> = BTreeMap::from([
            (Anonymous, None),
            (Invalid, Some("no-such-token".to_owned())),
            (Admin, Some(api.admin_token())),
            (Stranger, Some(format!("token-of-{NOBODY}"))),
        ]);
        for (who, name) in SERVICE_ACCOUNTS {
            let namespace = if who == ByGroup { &other } else { &own };
            let account = ServiceAccount::create(&api, namespace, name).await;
            tokens.insert(who, Some(account.token().await));
        }
        for (namespace, name) in [(&own, "one"), (&own, "two"), (&other, "one")] {
            let path = format!("/api/v1/namespaces/{namespace}/configmaps");
            api.create(&path, &json!({ "metadata": { "name": name } })).await;
        }
        let account = |name: &str| json!({ "kind": "ServiceAccount", "name": name, "namespace": own });
        let group = json!({
            "kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": format!("system:serviceaccounts:{other}"),
        });
        let by_certificate = |kind: &str| json!({ "kind": kind, "apiGroup": "rbac.authorization.k8s.io", "name": own });
        let both = &["pods", "configmaps"][..];
        let rule = |group: &str, resources: &[&str], verbs: &[&str], names: &[&str]| json!([{ "apiGroups": [group], "resources": resources, "verbs": verbs, "resourceNames": names }]);
        for (in_namespace, name, rules, subject) in [
            (false, "lister", rule("", both, &["list", "watch"], &[]), account("lister")),
            (false, "apps", rule("apps", &["deployments"], &["list"], &[]), account("apps")),
            (true, "own", rule("", both, &READS, &[]), account("own")),
            (true, "list-only", rule("", &["pods"], &["list"], &[]), account("list-only")),
            (true, "named", rule("", &["configmaps"], &READS, &["one"]), account("named")),
            (true, "by-group", rule("", &["configmaps"], &["list"], &[]), group),
            (true, "inside", rule("", &["namespaces"], &READS, &[]), account("inside")),
            (true, "cert", rule("", both, &READS, &[]), by_certificate("User")),
            (true, "cert-group", rule("", &["configmaps"], &["list"], &[]), by_certificate("Group")),
        ] {
            grant(&api, in_namespace.then_some(&*own), &format!("{own}-{name}"), &rules, &subject).await;
        }
        let (cert, key) = api.server_certificate();
        let (cert, key) = (cert.to_str().unwrap().to_owned(), key.to_str().unwrap().to_owned());
        let fixed = [
            "--authorization-mode=Webhook",
            "--resource=pods=json+protobuf,configmaps=json+protobuf,namespaces,deployments.apps",
            "--tls-cert-file",
            &cert,
            "--tls-private-key-file",
            &key,
        ];
        // kube-apiserver writes it soon after its start; kubefan looks once a minute.
        let cas = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
        wait::until("the CAs of clients", wait::SOON, || async {
            (api.request(Method::GET, cas, None).await.0 == StatusCode::OK).then_some(())
        })
        .await;
        let kubefan = Kubefan::start(&api, &[&fixed[..], args].concat()).await;
        let certificates = certificates(api.authority(), &own);
        let world = World { api, kubefan, own, other, tokens, certificates };
        world.roles_apply().await;
        world
    }

    /// Waits until the apiserver's authorizer has read all roles.
    async fn roles_apply(&self) {
        for (who, path) in [
            (Lister, "/api/v1/pods".to_owned()),
            (Apps, "/apis/apps/v1/deployments".to_owned()),
            (Own, format!("/api/v1/namespaces/{}/pods", self.own)),
            (ListOnly, format!("/api/v1/namespaces/{}/pods", self.own)),
            (Named, format!("/api/v1/namespaces/{}/configmaps/one", self.own)),
            (ByGroup, format!("/api/v1/namespaces/{}/configmaps", self.own)),
            (Inside, format!("/api/v1/namespaces/{}", self.own)),
            (Cert, format!("/api/v1/namespaces/{}/pods", self.own)),
            (CertGroup, format!("/api/v1/namespaces/{}/configmaps", self.own)),
        ] {
            let client = self.client(who);
            let url = format!("{}{path}", self.api.url());
            wait::until(&format!("{who:?} may read {path}"), wait::SOON, || async {
                (client.get(&url).send().await.unwrap().status() == StatusCode::OK).then_some(())
            })
            .await;
        }
    }

    pub(crate) fn token(&self, who: Who) -> Option<&str> {
        self.tokens.get(&who)?.as_deref()
    }

    fn ca(&self) -> String {
        std::fs::read_to_string(self.api.ca_pem_path()).unwrap()
    }

    /// A client that trusts the apiserver and kubefan.
    pub(crate) fn client(&self, who: Who) -> Client {
        match self.token(who) {
            Some(token) => self.api.client_with_token(token),
            None => {
                let ca = reqwest::Certificate::from_pem(self.ca().as_bytes()).unwrap();
                let builder = Client::builder().tls_certs_only([ca]).no_proxy();
                let builder = self.certificates.get(&who).into_iter().fold(builder, |builder, (certificate, key)| {
                    builder.identity(reqwest::Identity::from_pem(format!("{certificate}{key}").as_bytes()).unwrap())
                });
                builder.build().unwrap()
            }
        }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.kubefan.grpc_addr)
    }

    pub(crate) async fn grpc(&self) -> WatchServiceClient<Channel> {
        self.grpc_as(Anonymous).await
    }

    /// A connection with the client certificate of a caller, if it has one.
    async fn grpc_as(&self, who: Who) -> WatchServiceClient<Channel> {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(self.ca()));
        let tls =
            self.certificates.get(&who).into_iter().fold(tls, |tls, (certificate, key)| {
                tls.identity(tonic::transport::Identity::from_pem(certificate, key))
            });
        let endpoint = Endpoint::from_shared(self.url("")).unwrap().tls_config(tls).unwrap();
        WatchServiceClient::new(endpoint.connect().await.unwrap())
    }

    pub(crate) fn call<T>(&self, who: Who, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = self.token(who) {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        request
    }

    fn named(&self, text: &str) -> String {
        text.replace("OTHER", &self.other).replace("NS", &self.own)
    }

    /// The HTTP path and query of a row. A name in a gRPC list or watch is a field selector.
    fn path(&self, (_, verb, resource, namespace, name, selectors, by): Row) -> String {
        let (namespace, name, selectors) = (self.named(namespace), self.named(name), self.named(selectors));
        let group = if resource == "deployments" { "/apis/apps/v1" } else { "/api/v1" };
        let prefix = if by == WatchPath { "/watch" } else { "" };
        let scope = if namespace.is_empty() { String::new() } else { format!("/namespaces/{namespace}") };
        let is_in_path = verb == Get || by == WatchPath;
        let tail = if is_in_path && !name.is_empty() { format!("/{name}") } else { String::new() };
        let mut query: Vec<String> = Vec::new();
        if !selectors.is_empty() {
            query.push(selectors.replace(' ', "%20"));
        }
        if !is_in_path && !name.is_empty() {
            query.push(format!("fieldSelector=metadata.name={name}"));
        }
        match verb {
            // Answered from the cache without passthrough, whatever its freshness.
            Get | List => query.push("resourceVersion=0".to_owned()),
            Watch if by == WatchPath => query.push("timeoutSeconds=1&resourceVersion=0".to_owned()),
            Watch => query.push("watch=1&timeoutSeconds=1&resourceVersion=0".to_owned()),
        }
        format!("{group}{prefix}{scope}/{resource}{tail}?{}", query.join("&"))
    }

    async fn http(&self, row: Row, url: &str) -> (StatusCode, Value) {
        let accept = match row.6 {
            Protobuf => "application/vnd.kubernetes.protobuf,application/json",
            Metadata if row.1 == Get => "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json",
            Metadata => "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json",
            _ => "application/json",
        };
        let answer = self.client(row.0).get(url).header("accept", accept).send().await.unwrap();
        let status = answer.status();
        let body = answer.bytes().await.unwrap();
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    /// Whether kubefan lets a gRPC call read: its code, in HTTP's words.
    async fn over_grpc(&self, (who, verb, resource, namespace, name, selectors, _): Row) -> (StatusCode, String) {
        let field = |kind: &str| {
            let of = selectors.split('&').find_map(|part| part.strip_prefix(kind)?.strip_prefix('='));
            self.named(of.unwrap_or_default())
        };
        let target = Some(Target {
            resource: resource.to_owned(),
            namespace: self.named(namespace),
            name: self.named(name),
            label_selector: field("labelSelector"),
            field_selector: field("fieldSelector"),
            ..Target::default()
        });
        let mut client = self.grpc_as(who).await;
        let done = match verb {
            Get => client.get(self.call(who, GetRequest { target, ..GetRequest::default() })).await.map(drop),
            List => client.list(self.call(who, ListRequest { target, ..ListRequest::default() })).await.map(drop),
            Watch => client.watch(self.call(who, WatchRequest { target, ..WatchRequest::default() })).await.map(drop),
        };
        match done {
            Ok(()) => (StatusCode::OK, String::new()),
            Err(status) => {
                let code = match status.code() {
                    Code::Unauthenticated => StatusCode::UNAUTHORIZED,
                    Code::PermissionDenied => StatusCode::FORBIDDEN,
                    Code::NotFound => StatusCode::NOT_FOUND,
                    other => panic!("{other:?}: {}", status.message()),
                };
                (code, status.message().to_owned())
            }
        }
    }
}

/// The client certificates of the callers that have one. A user or group with a role has the name
/// of the namespace.
fn certificates(authority: &Authority, own: &str) -> BTreeMap<Who, (String, String)> {
    let (chain, foreign) = (authority.intermediate(), Authority::new());
    let of_chain = chain.client(own, "others");
    let masters = |user: &str| pki::named(user, "system:masters");
    let clients = [ExtendedKeyUsagePurpose::ClientAuth];
    let (mut expired, mut no_uid) = (masters("expired"), masters("no-uid"));
    expired.not_before = rcgen::date_time_ymd(2001, 1, 1);
    expired.not_after = rcgen::date_time_ymd(2002, 1, 1);
    no_uid.distinguished_name.push(DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]), "");
    BTreeMap::from([
        (Cert, authority.client(own, "others")),
        (CertOfChain, (format!("{}{}", of_chain.0, chain.ca_pem), of_chain.1)),
        (CertGroup, authority.client("member", own)),
        (CertMaster, authority.client("master", "system:masters")),
        (CertStranger, authority.client("stranger", "strangers")),
        (CertForeign, foreign.client("master", "system:masters")),
        (CertExpired, authority.issue(expired, &clients)),
        (CertServer, authority.issue(masters("server"), &[ExtendedKeyUsagePurpose::ServerAuth])),
        (CertNameless, authority.issue(masters(""), &clients)),
        (CertEmptyUid, authority.issue(no_uid, &clients)),
    ])
}

async fn verdicts_are_those_of_the_apiserver() {
    // The apiserver knows anonymous users, too.
    let world = World::start(ApiServer::shared().await, &["--passthrough=off", "--anonymous-auth"]).await;
    let mut wrong = Vec::new();
    let mut seen: BTreeMap<u16, usize> = BTreeMap::new();
    for row in MATRIX {
        let path = world.path(*row);
        let (straight, said) = world.http(*row, &format!("{}{path}", world.api.url())).await;
        let (through, answer) = match row.6 {
            Grpc => world.over_grpc(*row).await,
            _ => {
                let (status, body) = world.http(*row, &world.url(&path)).await;
                (status, body["message"].as_str().unwrap_or_default().to_owned())
            }
        };
        *seen.entry(straight.as_u16()).or_default() += 1;
        // A refusal has the apiserver's words, and over gRPC they come first.
        let words = said["message"].as_str().unwrap_or_default();
        let is_named = straight == StatusCode::FORBIDDEN && row.6 != Protobuf;
        let has_words = match row.6 {
            // A get names the object there.
            Grpc => answer.contains(words.split(" is forbidden: ").last().unwrap_or_default()),
            _ => answer == words,
        };
        if straight != through || (is_named && !has_words) {
            wrong.push(format!("{row:?}\n  {path}\n  straight {straight} {words}\n  kubefan  {through} {answer}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), MATRIX.len(), wrong.join("\n"));
    for code in [200, 401, 403, 404] {
        assert!(seen.get(&code).is_some_and(|count| *count > 0), "{seen:?}");
    }
}

async fn a_refusal_shows_nothing_and_starts_nothing() {
    let world = World::start(ApiServer::shared().await, &["--passthrough=off", "--on-demand"]).await;
    let mut grpc = world.grpc().await;
    // Cached or not, existing or not: the same answer, but for the names that were asked for.
    let told = |text: &str, name: &str| text.replace(name, "X");
    let mut answers = Vec::new();
    for resource in ["configmaps", "secrets", "nosuchthings"] {
        let target = Some(Target { resource: resource.to_owned(), ..Target::default() });
        let watch = world.call(Stranger, WatchRequest { target, ..WatchRequest::default() });
        let status = grpc.watch(watch).await.unwrap_err();
        answers.push((status.code(), told(status.message(), resource), status.metadata().len()));
    }
    assert_eq!(answers[0].0, Code::PermissionDenied);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let mut answers = Vec::new();
    for (resource, name) in [("configmaps", "one"), ("configmaps", "missing"), ("secrets", "x"), ("nosuchthings", "x")]
    {
        let url = world.url(&format!("/api/v1/namespaces/{}/{resource}/{name}?resourceVersion=0", world.own));
        let answer = world.client(Stranger).get(url).send().await.unwrap();
        let mut headers: Vec<_> = answer.headers().keys().map(ToString::to_string).collect();
        headers.sort_unstable();
        let status = answer.status();
        let text = told(&told(&answer.text().await.unwrap(), resource), &format!("\"{name}"));
        answers.push((status, headers, told(&text, &format!("\\\"{name}\\"))));
    }
    assert_eq!(answers[0].0, StatusCode::FORBIDDEN);
    assert!(!answers[0].1.iter().any(|name| name == "cache-status"), "{answers:?}");
    let shapes: Vec<_> = answers.iter().map(|(status, headers, _)| (status, headers)).collect();
    assert!(shapes.iter().all(|shape| *shape == shapes[0]), "{answers:?}");
    // The admin sees what is cached, and a refused reader has started nothing.
    let names = |resources: Vec<kubefan_common::proto::v1alpha1::ResourceStatus>| {
        resources.into_iter().map(|resource| resource.name).collect::<Vec<_>>()
    };
    let of = |who| world.call(who, ListResourcesRequest {});
    let all = names(grpc.list_resources(of(Admin)).await.unwrap().into_inner().resources);
    assert!(all.contains(&"pods".to_owned()) && !all.iter().any(|name| name.contains("secrets")), "{all:?}");
    let listed = names(grpc.list_resources(of(Lister)).await.unwrap().into_inner().resources);
    assert_eq!(listed, ["configmaps", "pods"]);
    assert_eq!(names(grpc.list_resources(of(Stranger)).await.unwrap().into_inner().resources), [] as [&str; 0]);
    let refused = grpc.list_resources(of(Anonymous)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let sees = world.kubefan.admin("/").await.unwrap().1;
    assert!(!sees.contains("secrets"), "a cache was started");
}

async fn a_revoked_right_ends_with_its_verdict() {
    let args = ["--passthrough=off", "--authorization-webhook-cache-authorized-ttl=1s"];
    let world = World::start(ApiServer::shared().await, &args).await;
    let url = world.url(&format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own));
    let client = world.client(Own);
    assert_eq!(client.get(&url).send().await.unwrap().status(), StatusCode::OK);
    let base = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}", world.own);
    world.api.delete(&format!("{base}/rolebindings/{}-own", world.own)).await;
    wait::until("the right to end", wait::SOON, || async {
        (client.get(&url).send().await.unwrap().status() == StatusCode::FORBIDDEN).then_some(())
    })
    .await;
}

async fn a_live_watch_ends_when_its_right_is_revoked_and_others_continue() {
    let args = ["--passthrough=off", "--reauthorize-interval=1s"];
    let world = World::start(ApiServer::shared().await, &args).await;
    let target = |name: &str| {
        let (resource, namespace) = ("configmaps".to_owned(), world.own.clone());
        Some(Target { resource, namespace, name: name.to_owned(), ..Target::default() })
    };
    let watch = |who, name| world.call(who, WatchRequest { target: target(name), ..WatchRequest::default() });
    let mut client = world.grpc().await;
    let mut revoked = client.watch(watch(Own, "")).await.unwrap().into_inner();
    let mut other = client.watch(watch(Named, "one")).await.unwrap().into_inner();
    let path = format!("/api/v1/namespaces/{}/configmaps?watch=1&resourceVersion=0", world.own);
    let over_http = world.client(Own).get(world.url(&path)).send().await.unwrap();
    assert_eq!(over_http.status(), StatusCode::OK);
    let base = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}", world.own);
    world.api.delete(&format!("{base}/rolebindings/{}-own", world.own)).await;
    let end = async {
        loop {
            match revoked.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended without a reason"),
                Err(status) => break status,
            }
        }
    };
    let end = tokio::time::timeout(wait::SOON, end).await.expect("the watch ends");
    assert_eq!(end.code(), Code::PermissionDenied, "{end:?}");
    // The body ends, without an error.
    tokio::time::timeout(wait::SOON, over_http.bytes()).await.expect("the watch ends").unwrap();
    let one = format!("/api/v1/namespaces/{}/configmaps/one", world.own);
    let changed = world.api.patch(&one, &json!({ "data": { "changed": "yes" } })).await;
    let version = changed["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let reaches = async { while other.message().await.unwrap().expect("it continues").resume_version != version {} };
    tokio::time::timeout(wait::SOON, reaches).await.expect("the other watch continues");
}

async fn with_passthrough_the_apiserver_refuses_in_its_own_words() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let path = format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own);
    for (who, status) in [(Stranger, StatusCode::FORBIDDEN), (Invalid, StatusCode::UNAUTHORIZED)] {
        let answer = world.client(who).get(world.url(&path)).send().await.unwrap();
        assert_eq!(answer.status(), status);
        // Only the apiserver sends this header.
        assert!(answer.headers().contains_key("audit-id"), "{answer:?}");
    }
    let answer = world.client(Own).get(world.url(&path)).send().await.unwrap();
    assert_eq!((answer.status(), answer.headers()["cache-status"].to_str().unwrap()), (StatusCode::OK, "kubefan; hit"));
}

async fn known_callers_are_served_through_an_outage_and_new_ones_are_not() {
    let api = ApiServer::start(Options::default()).await;
    let args = [
        "--passthrough=off",
        "--authentication-token-webhook-cache-ttl=1s",
        "--authorization-webhook-cache-authorized-ttl=1s",
    ];
    let world = World::start(api, &args).await;
    let url = world.url(&format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own));
    let ask = |who| {
        let request = world.client(who).get(&url);
        async move { request.send().await.unwrap().status() }
    };
    assert_eq!((ask(Own).await, ask(Stranger).await), (StatusCode::OK, StatusCode::FORBIDDEN));
    world.api.kill9();
    let grace = "kubefan_delegated_grace_total{review=\"access\"}";
    wait::until("a verdict in grace", wait::SOON, || async {
        assert_eq!(ask(Own).await, StatusCode::OK);
        world.kubefan.metric(grace).await.filter(|count| *count > 0.0).map(drop)
    })
    .await;
    assert_eq!(ask(ListOnly).await, StatusCode::SERVICE_UNAVAILABLE, "a new caller");
    let text = world.client(ListOnly).get(&url).send().await.unwrap().text().await.unwrap();
    assert!(text.contains("kubefan cannot ask the apiserver now"), "{text}");
    world.api.restart().await;
    wait::until("the new caller to be served", wait::SOON, || async {
        (ask(ListOnly).await == StatusCode::OK).then_some(())
    })
    .await;
}

/// kubefan as a service account that may read the cached resources: without the right to create
/// reviews it serves no caller, and does not say as which account it failed.
async fn a_review_needs_the_delegators_right() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("kubefan").await;
    let account = ServiceAccount::create(&api, &namespace, "proxy").await;
    let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"] }]);
    grant(&api, None, &format!("{namespace}-reads"), &rules, &account.subject()).await;
    let kubeconfig = account.kubeconfig().await;
    let (cert, key) = api.server_certificate();
    let args = [
        "--resource=pods",
        "--passthrough=off",
        "--authorization-mode=Webhook",
        "--authentication-token-webhook-cache-ttl=1s",
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
    ];
    let kubefan = Kubefan::spawn(&kubeconfig, &args).await;
    kubefan.ready().await;
    let url = format!("https://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr);
    let ask = || api.client_as(ADMIN).get(&url).send();
    let refused = ask().await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let text = refused.text().await.unwrap();
    assert!(!text.contains("serviceaccount") && !text.contains(&namespace), "{text}");
    assert!(kubefan.process.log().contains("TokenReview"), "the log says why");
    let binding = format!("{namespace}-reviews");
    bind_cluster_role(&api, &binding, "system:auth-delegator", &account.subject()).await;
    wait::until("the reviews to be allowed", wait::SOON, || async {
        (ask().await.unwrap().status() == StatusCode::OK).then_some(())
    })
    .await;
}

async fn requests_that_act_as_others_are_not_answered_from_the_cache() {
    let api = ApiServer::shared().await;
    let world = World::start(api, &[]).await;
    let url = world.url(&format!("/api/v1/namespaces/{}/pods?resourceVersion=0", world.own));
    let asked = |who: Who, user: &str| world.client(who).get(&url).header("impersonate-user", user).send();
    let forwarded = asked(Admin, "x").await.unwrap();
    assert_eq!(forwarded.status(), StatusCode::FORBIDDEN, "the apiserver asks what x may do");
    assert!(forwarded.headers().contains_key("audit-id"));
    assert_eq!(asked(Own, ADMIN).await.unwrap().status(), StatusCode::FORBIDDEN, "it may not act as others");
    let target = Some(Target { resource: "pods".to_owned(), ..Target::default() });
    let mut call = world.call(Admin, ListRequest { target, ..ListRequest::default() });
    call.metadata_mut().insert("impersonate-user", "x".parse().unwrap());
    let refused = world.grpc().await.list(call).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

async fn no_token_is_in_a_log_or_metric() {
    let world = World::start(ApiServer::shared().await, &["--passthrough=off"]).await;
    for who in [Own, Stranger, Invalid] {
        let request = world.client(who).request(Method::GET, world.url("/api/v1/pods?resourceVersion=0"));
        request.send().await.unwrap();
    }
    let (_, metrics) = world.kubefan.admin("/metrics").await.unwrap();
    let (_, page) = world.kubefan.admin("/").await.unwrap();
    let log = world.kubefan.process.log();
    for text in [&metrics, &page, &log] {
        for who in [Own, Stranger, Invalid, Admin] {
            assert!(!text.contains(world.token(who).unwrap()), "{who:?}: {text}");
        }
    }
    let count = |line: &str| {
        let found = metrics.lines().find_map(|found| found.strip_prefix(line)?.trim().parse::<f64>().ok());
        found.unwrap_or_else(|| panic!("{line}"))
    };
    assert_eq!(count("kubefan_authentication_attempts_total{result=\"failure\"}"), 1.0);
    assert_eq!(count("kubefan_authorization_attempts_total{result=\"denied\"}"), 2.0);
}

async fn the_commands_read_with_a_token() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = |who| {
        let path = dir.path().join(format!("{who:?}"));
        std::fs::write(&path, world.token(who).unwrap()).unwrap();
        format!("--token-file={}", path.display())
    };
    let (server, ca) =
        (format!("--server={}", world.url("")), format!("--ca-file={}", world.api.ca_pem_path().display()));
    let kubeconfig = format!("--kubeconfig={}", world.api.kubeconfig().display());
    let (by_file, namespace) = (file(Lister), format!("--namespace={}", world.own));
    let reads = [
        vec!["get", "configmaps", "one", &*namespace],
        vec!["get", "configmaps", &*namespace],
        vec!["watch", "configmaps", "--timeout=1s", "-o=name", &*namespace],
        vec!["verify", "configmaps", &*namespace, &*kubeconfig],
    ];
    let run_as = |read: &[&str], more: &[&str]| {
        let args: Vec<String> = [read, &[&*server, &*ca], more].concat().iter().map(ToString::to_string).collect();
        async move { run(&args.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    for read in &reads[1..] {
        let ran = run_as(read, &[&by_file]).await;
        assert!(ran.code == Some(0) && !ran.stdout.is_empty(), "{ran:?}");
        // Without a token, with a bad one, and with one that has no right.
        for (more, said) in [
            (vec![], "(Unauthorized): kubefan serves known callers only"),
            (vec!["--token=no-such-token"], "(Unauthorized): the apiserver does not accept this token"),
            (vec![&*file(Stranger)], "is forbidden: User \"nobody\" cannot"),
        ] {
            let ran = run_as(read, &more).await;
            let text = format!("{}{}", ran.stdout, ran.stderr);
            assert!(ran.code != Some(0) && text.contains(said), "{said}: {ran:?}");
            assert!(!said.contains("Unauthorized") || text.contains("--token-file"), "{ran:?}");
        }
    }
    let ran = run_as(&reads[0], &[&by_file]).await;
    assert!(ran.stderr.contains("(Forbidden)"), "it may list and not get: {ran:?}");
    let token = world.token(Own).unwrap();
    let ran = run_as(&reads[0], &["--token", token]).await;
    assert!(ran.code == Some(0) && ran.stdout.contains("one"), "{ran:?}");
    let by_variable = |name: &'static str, value: String| {
        let args: Vec<String> = [&reads[0][..], &[&*server, &*ca]].concat().iter().map(ToString::to_string).collect();
        async move {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            run_with(&args, |command| _ = command.env(name, value)).await
        }
    };
    let own = file(Own).trim_start_matches("--token-file=").to_owned();
    for ran in [by_variable("KUBEFAN_TOKEN", token.to_owned()).await, by_variable("KUBEFAN_TOKEN_FILE", own).await] {
        assert!(ran.code == Some(0) && ran.stdout.contains("one"), "{ran:?}");
    }
    // Not even to kubefan's own machine, because the port may be another program's.
    let plain = format!("--server={}", world.kubefan.grpc_addr);
    let ran = run(&["get", "configmaps", &plain, &by_file]).await;
    crate::bad_input::assert_line("plaintext", &ran, 1, &["over TLS or to a Unix socket", "use https://127.0.0.1:"]);
    let ran = run_as(&reads[1], &["--token-file=/does/not/exist"]).await;
    crate::bad_input::assert_line("no file", &ran, 1, &["token file /does/not/exist: No such file"]);
}

async fn over_tls_callers_are_authorized_by_default_and_a_reload_changes_nothing() {
    let api = ApiServer::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    let head = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\nresources: [pods]\n";
    std::fs::write(&config, head).unwrap();
    let (cert, key) = api.server_certificate();
    let tls = ["--tls-cert-file", cert.to_str().unwrap(), "--tls-private-key-file", key.to_str().unwrap()];
    let args = [&tls[..], &["--config", config.to_str().unwrap()]].concat();
    let kubefan = Kubefan::spawn_as_given(&api.kubeconfig(), &args).await;
    kubefan.ready().await;
    let url = format!("https://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr);
    let ask = |client: Client| {
        let request = client.get(&url);
        async move { request.send().await.unwrap().status() }
    };
    let verdicts = async || (ask(api.client()).await, ask(api.client_as(NOBODY)).await);
    assert_eq!(verdicts().await, (StatusCode::OK, StatusCode::FORBIDDEN));
    std::fs::write(&config, format!("{head}authorizationMode: AlwaysAllow\n")).unwrap();
    kubefan.process.hang_up();
    let read = || async { kubefan.process.log().contains("certificate of the data port was read again").then_some(()) };
    wait::until("the reload", wait::SOON, read).await;
    assert_eq!(verdicts().await, (StatusCode::OK, StatusCode::FORBIDDEN));
    let restarted = Kubefan::spawn_as_given(&api.kubeconfig(), &args).await;
    restarted.ready().await;
    let url = format!("https://{}/api/v1/pods?resourceVersion=0", restarted.grpc_addr);
    let open = api.client_as(NOBODY).get(&url).send().await.unwrap().status();
    assert_eq!(open, StatusCode::OK, "a restart takes the new file");
}

async fn a_start_that_would_let_callers_act_as_kubefan_is_refused() {
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let serve = ["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--authorization-mode=Webhook"];
    for (args, expected) in [
        (&["--passthrough=self"][..], "--passthrough=self lets every caller act as kubefan"),
        (&["--api-audiences=kubefan"], "--api-audiences names audiences of kubefan's own"),
    ] {
        let ran = run(&[&serve[..], &tls, args].concat()).await;
        crate::bad_input::assert_line(expected, &ran, 1, &[expected]);
    }
    let ran = run(&serve).await;
    crate::bad_input::assert_line("no TLS", &ran, 1, &["--authorization-mode=Webhook", "--tls-cert-file", "unix:"]);
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("config");
    let cluster = "{ server: 'https://127.0.0.1:1', insecure-skip-tls-verify: true }";
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{ name: c, cluster: {cluster} }}]\n\
         contexts: [{{ name: c, context: {{ cluster: c, user: u }} }}]\nusers: [{{ name: u, user: {{ token: t }} }}]\n"
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let ran = run(&[&serve[..], &tls, &[&*kubeconfig, "--passthrough=off"]].concat()).await;
    crate::bad_input::assert_line("reviewer", &ran, 1, &["insecure-skip-tls-verify", "--authorization-mode=Webhook"]);
}
