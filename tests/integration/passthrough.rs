//! Passthrough: requests that the cache does not answer go to the apiserver unchanged, with the
//! caller's credentials, and the answers come back unchanged.

use std::{net::SocketAddr, path::PathBuf};

use kubefan_sim::apiserver::SimOptions;
use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use crate::harness::{
    apiserver::{ADMIN, ApiServer, NOBODY},
    kubefan::{Kubefan, run},
    objects::pod,
    pki::{Authority, write_server_files},
    process::{closed_port, free_port},
    simulated::{Simulated, kubeconfig},
    tests, wait,
};

tests! {
    apiserver: kubectl_works_with_the_kubeconfig_that_kubefan_writes,
        a_forwarded_request_never_uses_kubefans_credentials, a_client_certificate_is_refused_with_the_reason,
        with_self_every_request_uses_kubefans_credentials, large_bodies_are_forwarded_both_ways,
        uncached_watches_are_forwarded_event_by_event_however_many_they_are;
    local: a_kubefan_that_is_its_own_upstream_says_so, requests_and_responses_are_forwarded_to_the_byte,
        bodies_are_streamed_and_a_broken_one_does_not_look_complete, an_upgrade_becomes_a_tunnel_if_it_is_allowed,
        too_many_requests_are_refused_with_retry_after, an_unreachable_apiserver_is_reported_without_secrets,
        with_passthrough_off_nothing_is_forwarded, unfinished_requests_and_websockets_do_not_delay_the_shutdown;
}

/// kubefan with TLS, and the CA of its certificate.
struct Secure {
    kubefan: Kubefan,
    dir: TempDir,
    authority: Authority,
}

impl Secure {
    async fn start(api: &ApiServer, args: &[&str]) -> Secure {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        write_server_files(&authority, dir.path());
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let tls = ["--tls-cert-file", &path("server.pem"), "--tls-private-key-file", &path("server-key.pem")];
        let kubefan = Kubefan::start(api, &[&tls, args].concat()).await;
        Secure { kubefan, dir, authority }
    }

    fn url(&self) -> String {
        format!("https://{}", self.kubefan.grpc_addr)
    }

    /// Writes the output of `kubefan kubeconfig`, with a token file.
    async fn kubeconfig(&self, token: &str) -> PathBuf {
        let [ca, token_file, kubeconfig] = ["ca.pem", "token", "kubeconfig"].map(|name| self.dir.path().join(name));
        std::fs::write(&token_file, token).unwrap();
        let ca = ca.to_str().unwrap();
        let token_file = token_file.to_str().unwrap();
        let args = ["kubeconfig", "--server", &self.url(), "--certificate-authority", ca, "--token-file", token_file];
        let ran = run(&args).await;
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
        std::fs::write(&kubeconfig, ran.stdout).unwrap();
        kubeconfig
    }

    fn client(&self, identity: Option<reqwest::Identity>) -> Client {
        let ca = reqwest::Certificate::from_pem(self.authority.ca_pem.as_bytes()).unwrap();
        let builder = Client::builder().tls_certs_only([ca]).no_proxy();
        identity.into_iter().fold(builder, reqwest::ClientBuilder::identity).build().unwrap()
    }
}

fn url(kubefan: &Kubefan, path: &str) -> String {
    format!("http://{}{path}", kubefan.grpc_addr)
}

async fn json_of(response: reqwest::Response) -> Value {
    let text = response.text().await.unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

async fn status(response: reqwest::Response) -> (StatusCode, Value) {
    let code = response.status();
    let status = json_of(response).await;
    assert_eq!((&status["kind"], &status["code"]), (&json!("Status"), &json!(code.as_u16())), "{status}");
    (code, status)
}

async fn kubectl_works_with_the_kubeconfig_that_kubefan_writes() {
    let api = ApiServer::shared().await;
    let ns = api.namespace("kubectl").await;
    let secure = Secure::start(&api, &["--resource=pods"]).await;
    let through = secure.kubeconfig(&api.admin_token()).await;
    api.create(&format!("/api/v1/namespaces/{ns}/pods"), &pod("a")).await;
    let (ok, name, stderr) = api.try_kubectl(&through, &["get", "pods", "-n", &ns, "-o", "name"]).await;
    assert!(ok && name == "pod/a\n", "{name}{stderr}");
    // The refused upgrade appears as an ordinary kubectl error that names the flag.
    let (_, _, stderr) = api.try_kubectl(&through, &["exec", "a", "-n", &ns, "--", "true"]).await;
    assert!(stderr.contains("tuning.passthroughUpgrades"), "{stderr}");
}

const REVIEWS: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

fn review() -> String {
    json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview" }).to_string()
}

/// The user that the apiserver sees for a caller, or the status code if it sees none.
async fn whoami(client: &Client, server: &str, headers: &[(&str, &str)]) -> Result<String, StatusCode> {
    let mut request =
        client.post(format!("{server}{REVIEWS}")).header("content-type", "application/json").body(review());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    if !response.status().is_success() {
        return Err(response.status());
    }
    let review = json_of(response).await;
    Ok(review["status"]["userInfo"]["username"].as_str().unwrap().to_owned())
}

async fn a_forwarded_request_never_uses_kubefans_credentials() {
    let api = ApiServer::shared().await;
    let token = format!("Bearer token-of-{NOBODY}");
    let callers: [&[(&str, &str)]; 5] = [
        &[],
        &[("authorization", "Bearer wrong")],
        &[("authorization", &token)],
        &[("authorization", &token), ("impersonate-user", "admin")],
        &[("impersonate-user", "admin"), ("x-remote-user", "admin")],
    ];
    let ca = std::fs::read(api.ca_pem_path()).unwrap();
    let ca = reqwest::Certificate::from_pem(&ca).unwrap();
    let client = Client::builder().tls_certs_only([ca]).no_proxy().build().unwrap();
    // kubefan's own credentials allow everything, by token or by certificate.
    for kubeconfig in [api.kubeconfig(), api.kubeconfig_with_certificate("kubefan-masters", "system:masters")] {
        let kubefan = Kubefan::spawn(&kubeconfig, &["--resource=pods"]).await;
        kubefan.ready().await;
        for headers in callers {
            let direct = whoami(&client, api.url(), headers).await;
            assert_ne!(direct, Ok(ADMIN.to_owned()));
            assert_eq!(whoami(&client, &url(&kubefan, ""), headers).await, direct, "{headers:?}");
        }
        let admin = format!("Bearer {}", api.admin_token());
        let as_admin = whoami(&client, &url(&kubefan, ""), &[("authorization", &admin)]).await;
        assert_eq!(as_admin, Ok(ADMIN.to_owned()));
        // The same connections were used by the administrator before.
        assert_eq!(whoami(&client, &url(&kubefan, ""), &[]).await, whoami(&client, api.url(), &[]).await);
        let secrets = client.get(url(&kubefan, "/api/v1/namespaces/kube-system/secrets?x=%20")).send().await.unwrap();
        assert!([StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN].contains(&secrets.status()), "{secrets:?}");
    }
}

async fn a_client_certificate_is_refused_with_the_reason() {
    let api = ApiServer::shared().await;
    let secure = Secure::start(&api, &["--resource=pods"]).await;
    // A certificate that the apiserver would accept.
    let path = api.kubeconfig_with_certificate("certified", "system:masters");
    let pem = |name: &str| std::fs::read(path.with_file_name(name)).unwrap();
    let identity = [pem("certified.pem"), pem("certified-key.pem")].concat();
    let client = secure.client(Some(reqwest::Identity::from_pem(&identity).unwrap()));
    let (code, status) = status(client.get(format!("{}/version", secure.url())).send().await.unwrap()).await;
    assert_eq!(code, StatusCode::UNAUTHORIZED);
    assert_eq!(status["reason"], "Unauthorized");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("client certificate cannot be forwarded") && message.contains("token"), "{message}");
    // A token beside the certificate is enough. A caller with neither is left to the apiserver.
    let admin = format!("Bearer {}", api.admin_token());
    let got = whoami(&client, &secure.url(), &[("authorization", &admin)]).await;
    assert_eq!(got, Ok(ADMIN.to_owned()));
    assert!(whoami(&secure.client(None), &secure.url(), &[]).await.is_err_and(|code| code.is_client_error()));
    let refused = secure.kubefan.metric(r#"kubefan_passthrough_refused_total{reason="certificate"}"#).await;
    assert_eq!(refused, Some(1.0));
}

async fn with_self_every_request_uses_kubefans_credentials() {
    let api = ApiServer::shared().await;
    let client = Client::builder().no_proxy().build().unwrap();
    let token = format!("Bearer token-of-{NOBODY}");
    let certificate = api.kubeconfig_with_certificate("kubefan-itself", "system:masters");
    for (kubeconfig, name) in [(api.kubeconfig(), ADMIN), (certificate, "kubefan-itself")] {
        let kubefan = Kubefan::spawn(&kubeconfig, &["--access=local-self"]).await;
        let name = Ok(name.to_owned());
        let server = url(&kubefan, "");
        assert_eq!(whoami(&client, &server, &[]).await, name);
        let other = [("authorization", token.as_str()), ("x-remote-user", NOBODY)];
        assert_eq!(whoami(&client, &server, &other).await, name);
        // A request to act with fewer rights is refused. It must not get kubefan's rights silently.
        let lesser = [("impersonate-user", NOBODY)];
        assert_eq!(whoami(&client, &server, &lesser).await, Err(StatusCode::FORBIDDEN));
        for foreign in [("host", "evil.example"), ("origin", "https://evil.example")] {
            assert_eq!(whoami(&client, &server, &[foreign]).await, Err(StatusCode::FORBIDDEN), "{foreign:?}");
        }
    }
}

async fn a_kubefan_that_is_its_own_upstream_says_so() {
    let address = format!("127.0.0.1:{}", free_port());
    let dir = tempfile::tempdir().unwrap();
    let itself = kubeconfig(&dir, &format!("http://{address}"), "{}");
    let kubefan = Kubefan::spawn_at(&itself, &address, &["--resource=pods"]).await;
    let client = Client::builder().no_proxy().build().unwrap();
    let (code, status) = status(client.get(url(&kubefan, "/version")).send().await.unwrap()).await;
    assert_eq!(code, StatusCode::LOOP_DETECTED);
    assert!(status["message"].as_str().unwrap().contains("is kubefan itself"), "{status}");
}

async fn large_bodies_are_forwarded_both_ways() {
    let api = ApiServer::shared().await;
    let ns = api.namespace("large").await;
    let kubefan = Kubefan::start(&api, &["--resource=pods"]).await;
    let http2 = Client::builder().http2_prior_knowledge().no_proxy().build().unwrap();
    let http1 = Client::builder().http1_only().no_proxy().build().unwrap();
    // Close to the apiserver's size limit, and larger than every window on the way.
    let text = "0123456789abcdef".repeat(60 << 10);
    for (client, name) in [(http1, "by-http1"), (http2, "by-http2")] {
        let path = format!("/api/v1/namespaces/{ns}/configmaps");
        let body = json!({ "metadata": { "name": name }, "data": { "text": text } }).to_string();
        let request = client.post(url(&kubefan, &path)).header("content-type", "application/json").body(body);
        let made = request.bearer_auth(api.admin_token()).send().await.unwrap();
        assert_eq!(made.status(), StatusCode::CREATED);
        drop(made);
        // Several requests at a time, compressed by the apiserver and forwarded as they are.
        let get = |encoding: &'static str| {
            let request = client.get(url(&kubefan, &format!("{path}/{name}?pretty=0"))).bearer_auth(api.admin_token());
            async move { request.header("accept-encoding", encoding).send().await.unwrap() }
        };
        let (plain, packed) = tokio::join!(get("identity"), get("gzip"));
        assert_eq!(packed.headers()["content-encoding"], "gzip");
        let packed = packed.bytes().await.unwrap();
        assert_eq!((packed[..2].to_vec(), packed.len() < text.len()), (vec![0x1f, 0x8b], true));
        assert_eq!(json_of(plain).await["data"]["text"], json!(text));
    }
}

async fn uncached_watches_are_forwarded_event_by_event_however_many_they_are() {
    // kube-apiserver allows 100 streams per connection; the next one would wait until one of them
    // ends.
    const WATCHES: usize = 130;
    let api = ApiServer::shared().await;
    let path = format!("/api/v1/namespaces/{}/configmaps", api.namespace("uncached").await);
    let kubefan = Kubefan::start(&api, &["--resource=pods", "--on-demand=false"]).await;
    for client in [Client::builder().http2_prior_knowledge(), Client::builder().http1_only()] {
        let client = client.no_proxy().build().unwrap();
        let get = |path: &str| client.get(url(&kubefan, path)).bearer_auth(api.admin_token()).send();
        // The headers come before the first event.
        let mut watch = get(&format!("{path}?watch=1")).await.unwrap();
        assert_eq!(watch.status(), StatusCode::OK);
        let mut read = String::new();
        for name in ["a", "b"].map(|name| api.unique(name)) {
            api.create(&path, &json!({ "metadata": { "name": name } })).await;
            while !read.contains(&name) {
                read += std::str::from_utf8(&watch.chunk().await.unwrap().unwrap()).unwrap();
            }
        }
        let others = format!("{path}?watch=1");
        let others = futures::future::join_all((1..WATCHES).map(|_| get(&others))).await;
        assert!(others.iter().all(|watch| watch.as_ref().is_ok_and(|watch| watch.status() == StatusCode::OK)));
        assert_eq!(get("/version").await.unwrap().status(), StatusCode::OK);
        // The body of /version may still be on its way.
        kubefan.metric_becomes("kubefan_passthrough_requests", WATCHES as f64).await;
        drop(watch);
        drop(others);
        until_nothing_is_forwarded(&kubefan).await;
    }
    let counted = r#"kubefan_passthrough_requests_total{code="200",verb="watch"}"#;
    assert_eq!(kubefan.metric(counted).await, Some(2.0 * WATCHES as f64));
}

/// Waits until no request is being forwarded.
async fn until_nothing_is_forwarded(kubefan: &Kubefan) {
    kubefan.metric_becomes("kubefan_passthrough_requests", 0.0).await;
}

/// An apiserver whose answers the test writes byte by byte.
struct Scripted {
    listener: TcpListener,
    dir: TempDir,
}

impl Scripted {
    async fn start() -> Scripted {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Scripted { listener, dir: tempfile::tempdir().unwrap() }
    }

    /// A kubefan in front of it, whose own requests are never answered.
    async fn kubefan(&self, prefix: &str, args: &[&str]) -> Kubefan {
        let server = format!("http://{}{prefix}", self.listener.local_addr().unwrap());
        Kubefan::spawn(&kubeconfig(&self.dir, &server, "{ token: very-secret }"), args).await
    }

    /// The next forwarded request: its head, and its connection.
    async fn next(&self) -> (String, TcpStream) {
        loop {
            let (mut stream, _) = self.listener.accept().await.unwrap();
            let head = read_head(&mut stream).await;
            if !head.contains("user-agent: kubefan/") {
                return (head, stream);
            }
        }
    }
}

/// Reads up to the empty line, byte by byte, because the bytes after it belong to the body.
async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).unwrap()
}

async fn send(address: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

async fn read_exactly(stream: &mut TcpStream, text: &str) {
    let mut read = vec![0; text.len()];
    stream.read_exact(&mut read).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&read), text);
}

/// The first line of a head, and its headers in order of their names.
fn parts(head: &str) -> (&str, Vec<&str>) {
    let (first, headers) = head.split_once("\r\n").unwrap();
    let mut headers: Vec<_> = headers.trim_end().lines().collect();
    headers.sort_unstable();
    (first, headers)
}

async fn requests_and_responses_are_forwarded_to_the_byte() {
    let scripted = Scripted::start().await;
    for prefix in ["", "/k8s/clusters/a"] {
        let kubefan = scripted.kubefan(prefix, &["--resource=pods"]).await;
        let path = "/api/v1/../%2e%2E//x/?labelSelector=a='b'&c=%zz&&d";
        let request = format!(
            "PATCH {path} HTTP/1.1\r\nHost: 10.1.2.3\r\nAuthorization: Bearer mine\r\nImpersonate-User: other\r\n\
             User-Agent: test/1\r\nAccept-Encoding: br, gzip\r\nX-Twice: 1\r\nX-Twice: 2\r\nConnection: X-Hop, close\r\nX-Hop: 1\r\n\
             Keep-Alive: timeout=5\r\nTE: trailers\r\nProxy-Authorization: Basic eA==\r\nUpgrade: h2c\r\nX-Forwarded-For: 10.0.0.1\r\n\
             Content-Length: 2\r\n\r\n{{}}"
        );
        let mut caller = send(kubefan.grpc_addr, &request).await;
        let (head, mut upstream) = scripted.next().await;
        let (first, mut headers) = parts(&head);
        assert_eq!(first, format!("PATCH {prefix}{path} HTTP/1.1"));
        let via = headers.iter().position(|header| header.starts_with("via: 1.1 kubefan-")).expect("no via header");
        headers.remove(via);
        let host = scripted.listener.local_addr().unwrap();
        let expected = format!(
            "accept-encoding: br, gzip\nauthorization: Bearer mine\ncontent-length: 2\nhost: {host}\nimpersonate-user: other\n\
             user-agent: test/1\nx-forwarded-for: 10.0.0.1, 127.0.0.1\nx-twice: 1\nx-twice: 2"
        );
        assert_eq!(headers.join("\n"), expected);
        read_exactly(&mut upstream, "{}").await;
        let response = "HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\nContent-Encoding: x\r\nDate: then\r\nLocation: /else\r\nWarning: a\r\n\
                        Warning: b\r\nAudit-Id: 1\r\nConnection: X-Theirs\r\nX-Theirs: 1\r\nKeep-Alive: timeout=5\r\n\r\nhello";
        upstream.write_all(response.as_bytes()).await.unwrap();
        let head = read_head(&mut caller).await;
        let (first, headers) = parts(&head);
        let expected = "audit-id: 1\ncache-status: kubefan; fwd=bypass\nconnection: close\ncontent-encoding: x\n\
                        content-length: 5\ndate: then\nlocation: /else\nwarning: a\nwarning: b";
        assert_eq!((first, &*headers.join("\n")), ("HTTP/1.1 418 Teapot", expected));
        read_exactly(&mut caller, "hello").await;
    }
}

async fn bodies_are_streamed_and_a_broken_one_does_not_look_complete() {
    let scripted = Scripted::start().await;
    let kubefan = scripted.kubefan("", &["--resource=pods"]).await;
    let request =
        "POST /api/v1/namespaces/a/pods/p/proxy/ HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    for is_broken in [false, true] {
        let mut caller = send(kubefan.grpc_addr, request).await;
        let (_, mut upstream) = scripted.next().await;
        caller.write_all(b"5\r\nhello\r\n").await.unwrap();
        read_exactly(&mut upstream, "5\r\nhello\r\n").await;
        // The response starts before the request has ended.
        upstream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
        assert!(read_head(&mut caller).await.starts_with("HTTP/1.1 200 OK"));
        for _ in 0..3 {
            upstream.write_all(b"5\r\nworld\r\n").await.unwrap();
            read_exactly(&mut caller, "5\r\nworld\r\n").await;
            caller.write_all(b"5\r\nhello\r\n").await.unwrap();
            read_exactly(&mut upstream, "5\r\nhello\r\n").await;
        }
        caller.write_all(b"0\r\n\r\n").await.unwrap();
        read_exactly(&mut upstream, "0\r\n\r\n").await;
        if is_broken {
            drop(upstream);
            let mut rest = Vec::new();
            let _ = caller.read_to_end(&mut rest).await;
            assert_eq!(String::from_utf8_lossy(&rest), "", "no last chunk");
        } else {
            upstream.write_all(b"0\r\n\r\n").await.unwrap();
            read_exactly(&mut caller, "0\r\n\r\n").await;
        }
    }
}

const EXEC: &str = "/api/v1/namespaces/a/pods/p/exec?command=sh";

async fn unfinished_requests_and_websockets_do_not_delay_the_shutdown() {
    let scripted = Scripted::start().await;
    let args = ["--resource=pods", "--drain-timeout=10m", "tuning.passthroughUpgrades"];
    let mut kubefan = scripted.kubefan("", &args).await;
    let watch = "GET /api/v1/configmaps?watch=1 HTTP/1.1\r\nHost: localhost\r\n";
    let websocket = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nOrigin: http://localhost\r\n\
                     Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let post = "POST /api/v1/namespaces/a/configmaps HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{";
    let mut open = send(kubefan.grpc_addr, &format!("{watch}{websocket}\r\n")).await;
    let (_, mut upgraded) = scripted.next().await;
    let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    upgraded.write_all(answer.as_bytes()).await.unwrap();
    assert!(read_head(&mut open).await.starts_with("HTTP/1.1 101 "));
    let mut callers = Vec::new();
    let mut unanswered = Vec::new();
    for (name, request, retry) in [
        ("a watch", format!("{watch}\r\n"), "retry-after: 1\r\n"),
        ("a websocket", format!("{watch}{websocket}\r\n"), "retry-after: 1\r\n"),
        ("half a body", post.to_owned(), ""),
    ] {
        callers.push((name, retry, send(kubefan.grpc_addr, &request).await));
        unanswered.push(scripted.next().await);
    }
    kubefan.process.terminate();
    for (name, retry, caller) in &mut callers {
        let head = timeout(wait::SOON, read_head(caller)).await.expect("an answer");
        assert!(head.starts_with("HTTP/1.1 503 ") && head.contains(*retry), "{name}: {head}");
    }
    drop(callers);
    let rest = timeout(wait::SOON, open.read(&mut [0; 8])).await.expect("the end of the open websocket");
    assert_eq!(rest.unwrap_or(0), 0);
    assert!(kubefan.process.ended(wait::SOON).await.success());
}

fn upgrade(path: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4\r\nContent-Length: 0\r\n\r\n"
    )
}

async fn an_upgrade_becomes_a_tunnel_if_it_is_allowed() {
    let scripted = Scripted::start().await;
    let kubefan =
        scripted.kubefan("", &["--resource=pods", "tuning.passthroughUpgrades", "limits.passthroughMax=1"]).await;
    let mut caller = send(kubefan.grpc_addr, &upgrade(EXEC)).await;
    let (head, mut upstream) = scripted.next().await;
    assert!(head.starts_with(&format!("POST {EXEC} HTTP/1.1\r\n")), "{head}");
    assert!(head.contains("connection: Upgrade\r\n") && head.contains("upgrade: SPDY/3.1\r\n"), "{head}");
    // Bytes directly after the 101 already belong to the tunnel.
    let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4\r\n\r\nfirst";
    upstream.write_all(answer.as_bytes()).await.unwrap();
    let answer = read_head(&mut caller).await;
    assert!(answer.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{answer}");
    for header in ["connection: Upgrade\r\n", "upgrade: SPDY/3.1\r\n", "x-stream-protocol-version: v4\r\n"] {
        assert!(answer.contains(header), "{header} in {answer}");
    }
    read_exactly(&mut caller, "first").await;
    for text in ["\0\x01\x02", "GET / HTTP/1.1\r\n\r\n"] {
        caller.write_all(text.as_bytes()).await.unwrap();
        read_exactly(&mut upstream, text).await;
        upstream.write_all(text.as_bytes()).await.unwrap();
        read_exactly(&mut caller, text).await;
    }
    // The tunnel counts as a request until it ends.
    let client = Client::builder().no_proxy().build().unwrap();
    let refused = client.post(url(&kubefan, "/x")).send().await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    // Either side may end first.
    caller.shutdown().await.unwrap();
    assert_eq!(upstream.read(&mut [0; 8]).await.unwrap(), 0);
    upstream.write_all(b"late").await.unwrap();
    read_exactly(&mut caller, "late").await;
    drop(upstream);
    assert_eq!(caller.read(&mut [0; 8]).await.unwrap_or(0), 0);
    drop(caller);
    until_nothing_is_forwarded(&kubefan).await;

    // A refused upgrade is an ordinary response, and its connection stays usable.
    let mut caller = send(kubefan.grpc_addr, &upgrade(EXEC)).await;
    let (_, mut upstream) = scripted.next().await;
    upstream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").await.unwrap();
    assert!(read_head(&mut caller).await.starts_with("HTTP/1.1 403 Forbidden\r\n"));
    read_exactly(&mut caller, "no").await;
    caller.write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let (head, _) = scripted.next().await;
    assert!(head.starts_with("GET /version HTTP/1.1\r\n"), "{head}");

    let kubefan = scripted.kubefan("", &["--resource=pods"]).await;
    let client = Client::builder().no_proxy().http1_only().build().unwrap();
    let exec = client.post(url(&kubefan, EXEC)).header("connection", "Upgrade").header("upgrade", "SPDY/3.1");
    let (code, status) = status(exec.send().await.unwrap()).await;
    assert_eq!(code, StatusCode::FORBIDDEN);
    assert!(status["message"].as_str().unwrap().contains("tuning.passthroughUpgrades"), "{status}");
}

async fn too_many_requests_are_refused_with_retry_after() {
    let scripted = Scripted::start().await;
    let kubefan = scripted.kubefan("", &["--resource=pods", "limits.passthroughMax=2"]).await;
    let request = "GET /api/v1/namespaces/a/pods/p/log HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut first = send(kubefan.grpc_addr, request).await;
    let (_, mut upstream) = scripted.next().await;
    let _second = send(kubefan.grpc_addr, request).await;
    let (_, held) = scripted.next().await;
    let client = Client::builder().no_proxy().build().unwrap();
    let response = client.get(url(&kubefan, "/version")).send().await.unwrap();
    assert_eq!(response.headers()["retry-after"], "1");
    let (code, text) = status(response).await;
    assert_eq!((code, &text["reason"]), (StatusCode::TOO_MANY_REQUESTS, &json!("TooManyRequests")));
    assert!(text["message"].as_str().unwrap().contains("limits.passthroughMax"), "{text}");
    // A finished response frees its slot.
    upstream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok").await.unwrap();
    drop(upstream);
    drop(held);
    assert!(read_head(&mut first).await.starts_with("HTTP/1.1 200 OK\r\n"));
    until_nothing_is_forwarded(&kubefan).await;
    for line in [
        r#"kubefan_passthrough_refused_total{reason="limit"}"#,
        r#"kubefan_passthrough_requests_total{code="200",verb="get"}"#,
        r#"kubefan_passthrough_requests_total{code="error",verb="get"}"#,
    ] {
        assert_eq!(kubefan.metric(line).await, Some(1.0), "{line}");
    }
}

async fn an_unreachable_apiserver_is_reported_without_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let (_closed, address) = closed_port();
    let server = format!("http://admin:very-secret@{address}");
    let kubefan = Kubefan::spawn(&kubeconfig(&dir, &server, "{ token: very-secret }"), &["--resource=pods"]).await;
    let client = Client::builder().no_proxy().build().unwrap();
    let path = "/api/v1/namespaces/a/configmaps";
    let response = client.post(url(&kubefan, path)).body("{}").bearer_auth("mine").send().await.unwrap();
    assert!(!response.headers().contains_key("retry-after"), "client-go would retry in silence for ten seconds");
    let (code, text) = status(response).await;
    assert_eq!((code, &text["reason"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("ServiceUnavailable")));
    let discovery = client.get(url(&kubefan, "/apis")).bearer_auth("mine").send().await.unwrap();
    for shown in [text["message"].as_str().unwrap(), discovery.headers()["warning"].to_str().unwrap()] {
        assert!(shown.contains("cannot reach the apiserver at http://127.0.0.1"), "{shown}");
        assert!(!shown.contains("very-secret") && !shown.contains("mine"), "{shown}");
    }
    // A request that the apiserver received may have been executed.
    let scripted = Scripted::start().await;
    let kubefan = scripted.kubefan("", &["--resource=pods"]).await;
    let request = client.post(url(&kubefan, path)).body("{}").send();
    let (response, ()) = tokio::join!(request, async { drop(scripted.next().await) });
    let response = response.unwrap();
    assert!(!response.headers().contains_key("retry-after"));
    assert_eq!(status(response).await.0, StatusCode::BAD_GATEWAY);
}

async fn with_passthrough_off_nothing_is_forwarded() {
    let simulated = Simulated::with(SimOptions::default()).await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--access=local-cache-only"]).await;
    let client = Client::builder().no_proxy().build().unwrap();
    for (method, path, code) in [
        (Method::GET, "/version", StatusCode::NOT_FOUND),
        (Method::POST, "/api/v1/namespaces/default/pods", StatusCode::METHOD_NOT_ALLOWED),
        (Method::DELETE, "/api/v1/namespaces/default/pods/a", StatusCode::METHOD_NOT_ALLOWED),
    ] {
        let response = client.request(method.clone(), url(&kubefan, path)).send().await.unwrap();
        let (got, status) = status(response).await;
        assert_eq!(got, code, "{method} {path}");
        assert!(status["message"].as_str().unwrap().contains("--access"), "{status}");
    }
}
