//! An informer lives longer than its tokens. The file gets the next token in time or too late; in
//! both cases its handler gets every change once.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use kubefan_client::{
    BackoffOptions, Client, ClientOptions, ListWatch,
    http::{HttpClient, HttpClientOptions},
};
use reqwest::StatusCode;
use serde_json::json;

use super::{
    calls::{Call, Kind},
    watched::Watched,
};
use crate::harness::{apiserver::ApiServer, kubefan::Kubefan, objects::version_of, rbac::grant, tests, wait};

tests! {
    apiserver full: an_informer_gets_every_change_once_although_its_tokens_end, an_informer_that_is_forbidden_says_so;
}

/// Fewer retries than a program would need, because this test waits for them.
const BACKOFF: BackoffOptions = BackoffOptions {
    initial: Duration::from_millis(50),
    max: Duration::from_millis(500),
    factor: 2.0,
    jitter: 1.0,
    reset_after: Duration::from_secs(120),
};

/// The time until an apiserver no longer remembers that it accepted a token: its cache of tokens
/// (10 s), and what a busy machine takes.
const FORGOTTEN_AT_MOST: Duration = Duration::from_secs(60);

/// A service account whose tokens can be revoked, and kubefan with authorization.
struct World {
    api: ApiServer,
    namespace: String,
    kubefan: Kubefan,
    dir: tempfile::TempDir,
    /// Every token so far, by the Secret that it is bound to.
    tokens: Mutex<Vec<(String, String)>>,
}

impl World {
    async fn start(args: &[&str]) -> World {
        let api = ApiServer::shared().await;
        let namespace = api.namespace("tokens").await;
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        api.create(&accounts, &json!({ "metadata": { "name": "agent" } })).await;
        let (cert, key) = api.server_certificate();
        let (cert, key) = (cert.to_str().unwrap(), key.to_str().unwrap());
        let tls = ["--tls-cert-file", cert, "--tls-private-key-file", key, "--authorization-mode=Webhook"];
        let kubefan = Kubefan::start(&api, &[&tls, &["--resource=configmaps"][..], args].concat()).await;
        World { api, namespace, kubefan, dir: tempfile::tempdir().unwrap(), tokens: Mutex::default() }
    }

    async fn may_read_configmaps(&self) {
        let account = json!({ "kind": "ServiceAccount", "name": "agent", "namespace": self.namespace });
        let rules = json!([{ "apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch"] }]);
        grant(&self.api, Some(&self.namespace), "agent", &rules, &account).await;
    }

    /// Replaces the token in the file by one that is valid until the Secret `name` is deleted.
    async fn rotate(&self, name: &str) {
        let secrets = format!("/api/v1/namespaces/{}/secrets", self.namespace);
        self.api.create(&secrets, &json!({ "metadata": { "name": name } })).await;
        let bound = ["--bound-object-kind=Secret", "--bound-object-name", name];
        let token =
            self.api.kubectl(&[&["create", "token", "agent", "-n", &self.namespace][..], &bound].concat()).await;
        // As the kubelet does: the new file replaces the old one.
        let fresh = self.dir.path().join("fresh");
        std::fs::write(&fresh, &token).unwrap();
        std::fs::rename(fresh, self.file()).unwrap();
        self.tokens.lock().unwrap().push((name.to_owned(), token.trim().to_owned()));
    }

    /// Ends the token of the Secret `name`, and waits until the apiserver refuses it.
    async fn revoke(&self, name: &str) {
        let token = self.tokens.lock().unwrap().iter().find(|(of, _)| of == name).unwrap().1.clone();
        self.api.delete(&format!("/api/v1/namespaces/{}/secrets/{name}", self.namespace)).await;
        let client = self.api.client_with_token(&token);
        wait::until("the token to be refused", FORGOTTEN_AT_MOST, || async {
            let answer = client.get(format!("{}{}", self.api.url(), self.configmaps())).send().await.unwrap();
            (answer.status() == StatusCode::UNAUTHORIZED).then_some(())
        })
        .await;
    }

    fn file(&self) -> std::path::PathBuf {
        self.dir.path().join("token")
    }

    fn configmaps(&self) -> String {
        format!("/api/v1/namespaces/{}/configmaps", self.namespace)
    }

    /// The configmaps over both protocols.
    async fn sources(&self) -> [(&'static str, ListWatch); 2] {
        let (address, ca, file) = (format!("https://{}", self.kubefan.grpc_addr), self.api.ca_pem_path(), self.file());
        let options =
            ClientOptions { ca_file: Some(ca.clone()), token_file: Some(file.clone()), ..ClientOptions::default() };
        let grpc = Client::connect(&address, &options).await.unwrap();
        let options = HttpClientOptions { ca_file: Some(ca), token_file: Some(file), ..HttpClientOptions::default() };
        let http = HttpClient::new(&address, &options).await.unwrap();
        let configmaps = |connection: kubefan_client::Connection| {
            ListWatch::new(connection, "configmaps", &self.namespace, "").tweak_grpc(|grpc| grpc.backoff = BACKOFF)
        };
        [("gRPC", configmaps(grpc.into())), ("HTTP", configmaps(http.into()))]
    }
}

type Calls = Arc<Mutex<Vec<Call>>>;

/// An informer, and the calls of its handler.
fn watched(name: &'static str, source: ListWatch) -> (Watched, Calls) {
    let calls = Calls::default();
    let report = calls.clone();
    (Watched::start(name, source, move |call| report.lock().unwrap().push(call)), calls)
}

async fn an_informer_gets_every_change_once_although_its_tokens_end() {
    // Streams end every two seconds, as those whose token has ended.
    let world = World::start(&["--stream-age-max=2s", "--authentication-token-webhook-cache-ttl=0s"]).await;
    world.may_read_configmaps().await;
    world.rotate("first").await;
    let created = world.api.create(&world.configmaps(), &json!({ "metadata": { "name": "counter" } })).await;
    let path = format!("{}/counter", world.configmaps());
    let mut versions = vec![version_of(&created).to_string()];
    let informers = world.sources().await.map(|(name, source)| watched(name, source));
    for (informer, _) in &informers {
        informer.synced().await;
    }
    for phase in 0..3 {
        for _ in 0..20 {
            let data = json!({ "data": { "count": versions.len().to_string() } });
            let written = world.api.patch(&path, &data).await;
            versions.push(version_of(&written).to_string());
        }
        match phase {
            0 => {
                world.rotate("second").await;
                world.revoke("first").await;
            }
            1 => {
                let errors = informers.iter().map(|(informer, _)| informer.connection_errors()).collect::<Vec<_>>();
                world.revoke("second").await;
                wait::until("both informers to be refused", wait::SOON, || async {
                    let more =
                        |((informer, _), before): (&(Watched, _), &usize)| informer.connection_errors() > *before;
                    informers.iter().zip(&errors).all(more).then_some(())
                })
                .await;
            }
            _ => world.rotate("third").await,
        }
    }
    let deleted = world.api.delete(&path).await;
    assert_eq!(deleted["status"], "Success", "{deleted}");
    let expected: Vec<(Kind, String)> = versions.iter().map(|version| (Kind::Update, version.clone())).collect();
    for (informer, calls) in &informers {
        let ended = || calls.lock().unwrap().last().is_some_and(Call::is_delete);
        wait::until("the deletion to be reported", wait::SOON * 3, || async { ended().then_some(()) }).await;
        let calls = calls.lock().unwrap();
        let made: Vec<_> = calls[1..calls.len() - 1].iter().map(|call| (call.kind, call.new.clone())).collect();
        assert_eq!((calls[0].kind, calls[0].new.as_str()), (Kind::Initial, &*versions[0]), "{}", informer.name);
        assert_eq!(made, expected[1..], "{}", informer.name);
        assert!(calls.last().unwrap().kind == Kind::Delete, "{}: its last state is known", informer.name);
        println!("{}: {} calls, {} errors", informer.name, calls.len(), informer.connection_errors());
    }
    let shown = format!("{:?} {}", informers[0].0.informer, world.kubefan.process.log());
    for (name, token) in world.tokens.lock().unwrap().iter() {
        assert!(!shown.contains(token), "the token of {name} is in a log");
    }
}

async fn an_informer_that_is_forbidden_says_so() {
    let world = World::start(&[]).await;
    world.rotate("only").await;
    let [(name, grpc), _] = world.sources().await;
    let (informer, calls) = watched(name, grpc);
    wait::until("the refusal to be reported", wait::SOON, || async {
        let text = informer.last_error();
        (text.contains("cannot watch resource \"configmaps\"")).then_some(())
    })
    .await;
    assert!(calls.lock().unwrap().is_empty());
    world.may_read_configmaps().await;
    informer.synced().await;
}
