//! A control plane with callers and their roles, and kubefan in front of it.

use std::{collections::BTreeMap, net::SocketAddr};

use kubefan_common::proto::v1alpha1::watch_service_client::WatchServiceClient;
use reqwest::{Client, Method, StatusCode};
use serde_json::json;
use tonic::{
    Request,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};

use super::identities::{
    PODS, SERVICE_ACCOUNTS, Who,
    Who::{
        Admin, Anonymous, Apps, BoundToGone, ByGroup, Cert, CertGroup, Inside, Invalid, ListOnly, Lister, Named, Own,
        Stranger,
    },
    certificates,
};
use crate::harness::{
    apiserver::{ApiServer, NOBODY},
    kubefan::Kubefan,
    pki::IssuedPem,
    rbac::{ServiceAccount, grant},
    wait,
};

/// A control plane with the service accounts and their roles, and kubefan in front of it.
pub(crate) struct World {
    pub(crate) api: ApiServer,
    pub(crate) kubefan: Kubefan,
    pub(crate) own: String,
    pub(super) other: String,
    tokens: BTreeMap<Who, Option<String>>,
    /// Client certificates with their keys, in PEM.
    certificates: BTreeMap<Who, IssuedPem>,
}

const READS: [&str; 3] = ["get", "list", "watch"];

impl World {
    pub(crate) async fn start(api: ApiServer, args: &[&str]) -> World {
        let own = api.namespace("authorized").await;
        let other = api.namespace("other").await;
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
            let annotations = json!({ "content": content(namespace, name) });
            api.create(&path, &json!({ "metadata": { "name": name, "annotations": annotations } })).await;
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
        // kube-apiserver writes it soon after its start; kubefan looks once a minute.
        let cas = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
        wait::until("the CAs of clients", wait::SOON, || async {
            (api.request(Method::GET, cas, None).await.0 == StatusCode::OK).then_some(())
        })
        .await;
        let kubefan = kubefan(&api, args).await;
        let certificates = certificates(api.authority(), &own);
        let world = World { api, kubefan, own, other, tokens, certificates };
        world.roles_apply().await;
        world
    }

    /// Adds the callers that have the token of a pod.
    pub(super) async fn with_pods(mut self) -> World {
        let pods = format!("/api/v1/namespaces/{}/pods", self.own);
        for (who, name) in PODS {
            let spec = json!({ "serviceAccountName": "own", "containers": [{ "name": "c", "image": "i" }] });
            self.api.create(&pods, &json!({ "metadata": { "name": name }, "spec": spec })).await;
            let bound = ["--bound-object-kind", "Pod", "--bound-object-name", name];
            let token = self.api.kubectl(&[&["create", "token", "own", "-n", &self.own], &bound[..]].concat()).await;
            self.tokens.insert(who, Some(token.trim().to_owned()));
        }
        self.api.delete(&format!("{pods}/gone")).await;
        let client = self.client(BoundToGone);
        let url = format!("{}{pods}", self.api.url());
        wait::until("the token of a pod that is gone to end", wait::SOON, || async {
            (client.get(&url).send().await.unwrap().status() == StatusCode::UNAUTHORIZED).then_some(())
        })
        .await;
        self
    }

    /// Another kubefan in front of the same control plane.
    pub(super) async fn another(&self, args: &[&str]) -> Kubefan {
        kubefan(&self.api, args).await
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

    pub(super) fn ca(&self) -> String {
        std::fs::read_to_string(self.api.ca_pem_path()).unwrap()
    }

    /// The client certificate of a caller, if it has one.
    pub(super) fn certificate(&self, who: Who) -> Option<&IssuedPem> {
        self.certificates.get(&who)
    }

    /// A client that trusts the apiserver and kubefan.
    pub(crate) fn client(&self, who: Who) -> Client {
        match self.token(who) {
            Some(token) => self.api.client_with_token(token),
            None => {
                let ca = reqwest::Certificate::from_pem(self.ca().as_bytes()).unwrap();
                let mut builder = Client::builder().tls_certs_only([ca]).no_proxy();
                if let Some(IssuedPem { certificate, key }) = self.certificates.get(&who) {
                    let identity = reqwest::Identity::from_pem(format!("{certificate}{key}").as_bytes());
                    builder = builder.identity(identity.unwrap());
                }
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
    pub(super) async fn grpc_as(&self, who: Who) -> WatchServiceClient<Channel> {
        WatchServiceClient::new(self.channel_to(self.kubefan.grpc_addr, who).await)
    }

    /// A channel to any kubefan, for any service.
    pub(super) async fn channel_to(&self, addr: SocketAddr, who: Who) -> Channel {
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(self.ca()));
        if let Some(IssuedPem { certificate, key }) = self.certificates.get(&who) {
            tls = tls.identity(tonic::transport::Identity::from_pem(certificate, key));
        }
        let endpoint = Endpoint::from_shared(format!("https://{addr}")).unwrap().tls_config(tls).unwrap();
        endpoint.connect().await.unwrap()
    }

    pub(crate) fn call<T>(&self, who: Who, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = self.token(who) {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        request
    }

    pub(super) fn named(&self, text: &str) -> String {
        text.replace("OTHER", &self.other).replace("NS", &self.own)
    }
}

/// Returns the content of an object, which no other object has.
pub(super) fn content(namespace: &str, name: &str) -> String {
    format!("content-of-{namespace}-{name}")
}

async fn kubefan(api: &ApiServer, args: &[&str]) -> Kubefan {
    let (cert, key) = api.server_certificate();
    let has_access = args.iter().any(|arg| arg.starts_with("--access="));
    let access: &[&str] = if has_access { &[] } else { &["--access=authorized"] };
    let fixed = [
        "--resource=pods=json+protobuf,configmaps=json+protobuf,namespaces,deployments.apps",
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
    ];
    Kubefan::start(api, &[&fixed[..], access, args].concat()).await
}
