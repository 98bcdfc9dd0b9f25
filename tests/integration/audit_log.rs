//! The audit log records exactly the requests that kubefan has answered, also when it ends or is
//! killed.

use std::path::{Path, PathBuf};

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::{GetRequest, ListRequest, Target, WatchRequest};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tonic::{Code, Request, Streaming};

use crate::{
    authorization::{Who, World},
    harness::{
        apiserver::{ADMIN, ApiServer, NOBODY},
        audit::Audit,
        kubefan::{Kubefan, run},
        record::connect,
        rig::target,
        simulated::kubeconfig,
        tests, wait,
    },
};

tests! {
    apiserver slow_faults: a_session_equals_its_audit_log;
    apiserver: what_started_before_a_kill_is_recorded,
        a_full_disk_stops_no_service_unless_every_answer_must_be_recorded,
        a_log_that_was_moved_is_continued_after_a_hangup;
    local: an_audit_log_that_cannot_be_opened_is_one_line;
}

/// An audit log of kubefan.
struct Log {
    folder: tempfile::TempDir,
}

impl Log {
    fn new() -> Log {
        Log { folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("audit.log")
    }

    fn flag(&self) -> String {
        format!("--audit-log-path={}", self.path().display())
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.path()).unwrap_or_default()
    }

    fn records(&self) -> Vec<Value> {
        // The last line may be incomplete.
        self.text().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Waits for the record of a request at a stage.
    async fn has(&self, id: &str, stage: &str) {
        let is = |record: &Value| record["auditID"] == id && record["stage"] == stage;
        wait::until(&format!("{stage} of {id}"), wait::SOON, || async { self.records().iter().any(is).then_some(()) })
            .await;
    }
}

/// A line of the log, as the session expects it: ID, protocol, verb, URI, user, code, stage, and
/// whether it was forwarded or why it has ended.
fn seen(record: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let annotations = &record["annotations"];
    let mut parts = vec![
        text(&record["auditID"]),
        text(&annotations["kubefan.dev/protocol"]),
        text(&record["verb"]),
        text(&record["requestURI"]),
        text(&record["user"]["username"]),
        record["responseStatus"]["code"].to_string(),
        text(&record["stage"]).replace("Response", ""),
    ];
    parts.extend(annotations["kubefan.dev/forwarded"].as_str().map(|_| "forwarded".to_owned()));
    parts.extend(annotations["kubefan.dev/end"].as_str().map(str::to_owned));
    parts.join(" ")
}

/// Sends the requests of a session one after the other, and keeps the records that the log should
/// have.
struct Session<'a> {
    world: &'a World,
    log: &'a Log,
    expected: Vec<String>,
}

impl Session<'_> {
    fn id(&self) -> String {
        format!("session-{:02}", self.expected.len())
    }

    fn expect(&mut self, id: &str, line: String) {
        self.expected.push(format!("{id} {line}"));
    }

    fn user(&self, who: Who) -> String {
        match who {
            Who::Admin => ADMIN.to_owned(),
            Who::Stranger => NOBODY.to_owned(),
            Who::Own => format!("system:serviceaccount:{}:own", self.world.own),
            Who::Lister => format!("system:serviceaccount:{}:lister", self.world.own),
            other => panic!("{other:?}"),
        }
    }

    async fn sent(&self, who: Who, method: Method, uri: &str, code: StatusCode, id: &str) -> Response {
        let mut request = self.world.client(who).request(method, self.world.url(uri)).header("audit-id", id);
        if uri.ends_with("configmaps") {
            let object = json!({ "metadata": { "name": format!("made-{id}") } });
            request = request.header("content-type", "application/json").body(object.to_string());
        }
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), code, "{uri}");
        assert_eq!(answer.headers()["audit-id"], id, "{uri}");
        answer
    }

    /// A whole answer. `user` as in the log: empty if kubefan does not know it.
    async fn http(&mut self, who: Who, user: &str, uri: &str, code: StatusCode, tail: &str) {
        let id = self.id();
        let is_post = uri.ends_with("configmaps");
        let method = if is_post { Method::POST } else { Method::GET };
        self.sent(who, method, uri, code, &id).await.bytes().await.unwrap();
        let verb = if is_post {
            "create"
        } else if uri.contains("/configmaps/") || uri == "/version" {
            "get"
        } else {
            "list"
        };
        self.expect(&id, format!("http {verb} {uri} {user} {} Complete{tail}", code.as_u16()));
        self.log.has(&id, "ResponseComplete").await;
    }

    /// A watch over HTTP, until its end or, if it is to be cancelled, its start.
    async fn watch(&mut self, who: Who, user: &str, uri: &str, tail: &str, end: &str) {
        let id = self.id();
        let answer = self.sent(who, Method::GET, uri, StatusCode::OK, &id).await;
        for (stage, end) in [("Started", ""), ("Complete", end)] {
            self.expect(&id, format!("http watch {uri} {user} 200 {stage}{tail}{end}"));
        }
        if end == " cancelled" {
            drop(answer);
        } else {
            answer.bytes().await.unwrap();
        }
        self.log.has(&id, "ResponseComplete").await;
    }

    fn call<T>(&self, who: Who, message: T, id: &str) -> Request<T> {
        let mut request = self.world.call(who, message);
        request.metadata_mut().insert("audit-id", id.parse().unwrap());
        request
    }

    fn target(&self, resource: &str, name: &str) -> Option<Target> {
        let resource = resource.to_owned();
        let namespace = self.world.own.clone();
        let name = name.to_owned();
        Some(Target { resource, namespace, name, ..Target::default() })
    }
}

async fn a_session_equals_its_audit_log() {
    let log = Log::new();
    let audit = Audit::of_reads();
    let api = ApiServer::start(audit.options()).await;
    let mut world = World::start(api, &[&*log.flag(), "--on-demand=false"]).await;
    // Only the session is compared.
    let own = world.own.clone();
    let base = format!("/api/v1/namespaces/{own}");
    let mut session = Session { world: &world, log: &log, expected: Vec::new() };
    let of_own = session.user(Who::Own);
    let of_lister = session.user(Who::Lister);
    let of_stranger = session.user(Who::Stranger);
    let ok = StatusCode::OK;
    session.http(Who::Own, &of_own, &format!("{base}/pods?resourceVersion=0"), ok, "").await;
    session.http(Who::Lister, &of_lister, "/api/v1/pods?resourceVersion=0&limit=5", ok, "").await;
    session.http(Who::Own, &of_own, &format!("{base}/configmaps/one?resourceVersion=0"), ok, "").await;
    let missing = format!("{base}/configmaps/missing?resourceVersion=0");
    session.http(Who::Own, &of_own, &missing, StatusCode::NOT_FOUND, "").await;
    // A consistent get, a discovery and a write are the apiserver's to answer.
    session.http(Who::Own, "", &format!("{base}/configmaps/one"), ok, " forwarded").await;
    session.http(Who::Admin, "", "/version", ok, " forwarded").await;
    session.http(Who::Admin, "", &format!("{base}/configmaps"), StatusCode::CREATED, " forwarded").await;
    let list = format!("{base}/pods?resourceVersion=0");
    session.http(Who::Stranger, &of_stranger, &list, StatusCode::FORBIDDEN, " forwarded").await;
    session.http(Who::Invalid, "", &list, StatusCode::UNAUTHORIZED, " forwarded").await;
    session.http(Who::Anonymous, "", &list, StatusCode::FORBIDDEN, " forwarded").await;

    let timed = format!("{base}/configmaps?watch=1&timeoutSeconds=1");
    session.watch(Who::Own, &of_own, &timed, "", " timeout").await;
    session.watch(Who::Own, &of_own, &format!("{base}/pods?watch=1"), "", " cancelled").await;
    let other = format!("{base}/serviceaccounts?watch=1&timeoutSeconds=1");
    session.watch(Who::Admin, ADMIN, &other, " forwarded", "").await;

    let mut grpc = world.grpc().await;
    let id = session.id();
    let get = GetRequest { target: session.target("cm", "one"), ..GetRequest::default() };
    let answer = grpc.get(session.call(Who::Own, get, &id)).await.unwrap();
    assert_eq!(answer.metadata().get("audit-id").unwrap().to_str().unwrap(), id);
    session.expect(&id, format!("grpc get {base}/configmaps/one {of_own} 200 Complete"));
    log.has(&id, "ResponseComplete").await;
    for (who, user, code) in [(Who::Own, &*of_own, 200), (Who::Stranger, &of_stranger, 403), (Who::Anonymous, "", 401)]
    {
        let id = session.id();
        let list = ListRequest { target: session.target("configmaps", ""), ..ListRequest::default() };
        let (answered, refused) = match grpc.list(session.call(who, list, &id)).await {
            Ok(answer) => (answer.metadata().clone(), Code::Ok),
            Err(status) => (status.metadata().clone(), status.code()),
        };
        assert_eq!(answered.get("audit-id").unwrap().to_str().unwrap(), id, "{refused:?}");
        // Before it is authenticated, a short name is not looked up.
        let uri =
            if code == 401 { "/kubefan.v1alpha1.WatchService/List".to_owned() } else { format!("{base}/configmaps") };
        session.expect(&id, format!("grpc list {uri} {user} {code} Complete"));
        log.has(&id, "ResponseComplete").await;
    }
    let mut open = Vec::new();
    for (timeout_seconds, end) in [(1, "timeout"), (0, "cancelled"), (0, "draining")] {
        let id = session.id();
        let watch = WatchRequest { target: session.target("pods", ""), timeout_seconds, ..WatchRequest::default() };
        let answer = grpc.watch(session.call(Who::Own, watch, &id)).await.unwrap();
        assert_eq!(answer.metadata().get("audit-id").unwrap().to_str().unwrap(), id);
        let mut stream: Streaming<_> = answer.into_inner();
        let query = if timeout_seconds == 0 { "watch=true" } else { "timeoutSeconds=1&watch=true" };
        let code = if end == "draining" { 503 } else { 200 };
        for (stage, code, end) in [("Started", 200, ""), ("Complete", code, end)] {
            session.expect(
                &id,
                format!("grpc watch {base}/pods?{query} {of_own} {code} {stage} {end}").trim_end().to_owned(),
            );
        }
        match end {
            "timeout" => while stream.message().await.unwrap().is_some() {},
            "cancelled" => drop(stream),
            _ => {
                log.has(&id, "ResponseStarted").await;
                open.push((id, stream));
                continue;
            }
        }
        log.has(&id, "ResponseComplete").await;
    }
    let expected = session.expected;
    world.kubefan.process.terminate();
    assert!(world.kubefan.process.ended(wait::SOON).await.success());
    drop(open);

    let records: Vec<Value> = log.records();
    let of_session = |record: &&Value| record["auditID"].as_str().is_some_and(|id| id.starts_with("session-"));
    let lines: Vec<String> = records.iter().filter(of_session).map(seen).collect();
    assert_eq!(lines, expected);
    for who in [Who::Own, Who::Lister, Who::Stranger, Who::Invalid, Who::Admin] {
        assert!(!log.text().contains(world.token(who).unwrap()), "a token is in the log");
    }
    // Forwarded requests are in the apiserver's own log, under the same ID and in the same form.
    let theirs = audit.records("session-");
    let mut compared = 0;
    for record in records.iter().filter(of_session) {
        let Some(their) = theirs.get(record["auditID"].as_str().unwrap()) else { continue };
        // The apiserver records a failed authentication when its answer starts.
        if record["stage"] != "ResponseComplete" || record["responseStatus"]["code"] == 401 {
            continue;
        }
        compared += 1;
        for field in ["kind", "apiVersion", "level", "auditID", "stage", "requestURI", "verb", "objectRef", "userAgent"]
        {
            assert_eq!(record[field], their[field], "{field} of {record} and {their}");
        }
        assert_eq!(record["responseStatus"]["code"], their["responseStatus"]["code"]);
        let fields = |record: &Value| record.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let known = fields(their);
        assert!(fields(record).iter().all(|field| known.contains(field)), "{record} and {their}");
        let sources = |record: &Value| record["sourceIPs"].as_array().cloned().unwrap_or_default();
        assert_eq!(sources(record)[0], sources(their)[0], "the client's address");
    }
    assert!(compared >= 5, "{compared} of {theirs:?}");
}

async fn what_started_before_a_kill_is_recorded() {
    let api = ApiServer::shared().await;
    for mode in ["batch", "blocking-strict"] {
        let log = Log::new();
        let path = log.flag();
        let mode_flag = format!("--audit-log-mode={mode}");
        let args = ["--resource=pods", &path, &mode_flag, "--access=local-cache-only"];
        let mut kubefan = Kubefan::start(&api, &args).await;
        let ids: Vec<_> = (0..40).map(|number| format!("watch-{number}")).collect();
        let client = reqwest::Client::new();
        let get = |query: &str, id: &str| {
            let url = format!("http://{}/api/v1/pods?resourceVersion=0{query}", kubefan.grpc_addr);
            let request = client.get(url).header("audit-id", id);
            async move { request.send().await.unwrap().error_for_status().unwrap() }
        };
        let over_http = join_all(ids[..20].iter().map(|id| get("&watch=1", id)));
        let grpc = connect(kubefan.grpc_addr).await;
        let over_grpc = join_all(ids[20..].iter().map(|id| {
            let mut call = Request::new(WatchRequest { target: Some(target("pods")), ..WatchRequest::default() });
            call.metadata_mut().insert("audit-id", id.parse().unwrap());
            let mut grpc = grpc.clone();
            async move { grpc.watch(call).await.unwrap().into_inner() }
        }));
        let open = tokio::join!(over_http, over_grpc);
        if mode == "batch" {
            // The queue is first in, first out: with a later record, all of these are written.
            get("", "later").await.bytes().await.unwrap();
            log.has("later", "ResponseComplete").await;
        }
        // With blocking-strict their headers have come after their records.
        kubefan.process.kill9();
        let records = log.records();
        for id in &ids {
            let of = records.iter().filter(|record| record["auditID"] == **id).map(seen).collect::<Vec<_>>();
            assert_eq!(of.len(), 1, "{mode} {id}: {of:?}");
            assert!(of[0].ends_with(" 200 Started"), "{mode} {of:?}");
        }
        drop(open);
    }
}

async fn a_full_disk_stops_no_service_unless_every_answer_must_be_recorded() {
    let api = ApiServer::shared().await;
    for (mode, http, grpc) in
        [("batch", StatusCode::OK, Code::Ok), ("blocking-strict", StatusCode::INTERNAL_SERVER_ERROR, Code::Internal)]
    {
        let is_served = grpc == Code::Ok;
        let mode = format!("--audit-log-mode={mode}");
        let kubefan = Kubefan::start(
            &api,
            &["--resource=configmaps", "--audit-log-path=/dev/full", &mode, "--access=local-cache-only"],
        )
        .await;
        let url = format!("http://{}/api/v1/configmaps?resourceVersion=0", kubefan.grpc_addr);
        let answer = reqwest::get(&url).await.unwrap();
        assert_eq!(answer.status(), http);
        let text = answer.text().await.unwrap();
        assert_eq!(text.contains("--audit-log-mode=blocking-strict"), !is_served, "{text}");
        let request = WatchRequest { target: Some(target("configmaps")), ..WatchRequest::default() };
        let watch = connect(kubefan.grpc_addr).await.watch(request).await;
        assert_eq!(watch.map_or_else(|status| status.code(), |_| Code::Ok), grpc);
        let errors = "kubefan_audit_write_errors_total";
        wait::until("the failure to be counted", wait::SOON, || async {
            kubefan.metric(errors).await.filter(|count| *count > 0.0).map(drop)
        })
        .await;
        if !is_served {
            assert_eq!(kubefan.metric("kubefan_audit_requests_rejected_total").await, Some(2.0));
        }
        assert!(kubefan.process.log().contains("the audit log cannot be written"), "{}", kubefan.process.log());
    }
}

async fn a_log_that_was_moved_is_continued_after_a_hangup() {
    let api = ApiServer::shared().await;
    let log = Log::new();
    let kubefan = Kubefan::start(&api, &["--resource=configmaps", &*log.flag(), "--access=local-cache-only"]).await;
    let url = format!("http://{}/api/v1/configmaps?resourceVersion=0", kubefan.grpc_addr);
    let ask = |id: &'static str| reqwest::Client::new().get(&url).header("audit-id", id).send();
    assert_eq!(ask("before").await.unwrap().headers()["audit-id"], "before");
    log.has("before", "ResponseComplete").await;
    let user = log.records()[0]["user"]["username"].clone();
    assert_eq!(user, "system:unsecured");
    std::fs::rename(log.path(), Path::new(&log.path()).with_extension("moved")).unwrap();
    kubefan.process.hang_up();
    wait::until("a new file", wait::SOON, || async {
        ask("after").await.unwrap();
        log.path().exists().then_some(())
    })
    .await;
    log.has("after", "ResponseComplete").await;
}

async fn an_audit_log_that_cannot_be_opened_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = kubeconfig(&dir, "https://127.0.0.1:1", "{ token: t }");
    let serve = ["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--resource=pods"];
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let ran = run(&[&serve[..], &[&*kubeconfig, "--audit-log-path=/nonexistent/audit.log"]].concat()).await;
    crate::bad_input::assert_line("no folder", &ran, 1, &["--audit-log-path /nonexistent/audit.log", "may write"]);
}
