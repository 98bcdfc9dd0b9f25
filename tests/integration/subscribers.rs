//! The list of subscribers, and the end of one stream by an operator.

use bytes::Bytes;
use h2::RecvStream;
use http::{Request, StatusCode};
use kubefan_common::proto::v1alpha1::WatchRequest;
use reqwest::Method;
use serde_json::Value;
use tokio::net::TcpStream;
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    connections::large,
    harness::{
        kubefan::{Kubefan, Ran, run},
        record::connect,
        rig::{pods, target},
        simulated::{Simulated, json},
        skip, tests, wait,
    },
};

tests! {
    local: the_one_that_lags_is_listed_first_and_ended_alone,
        a_stream_is_ended_for_the_operator_and_not_for_web_pages, top_prints_one_table_if_stdout_is_no_terminal,
        a_browser_shows_the_status_and_takes_names_for_text, what_a_server_answers_cannot_control_the_terminal;
}

/// Text that a terminal or a page could interpret, as far as a header may contain it.
const HOSTILE: &str = "<script>alert(1)</script>\u{9b}2J";

/// Whether a text has more than lines for a terminal.
fn controls_the_terminal(text: &str) -> bool {
    text.contains(|c: char| c.is_control() && c != '\n' || ('\u{202a}'..='\u{202e}').contains(&c))
}

/// No kubefan: an error, or a status with text that controls a terminal.
async fn what_a_server_answers_cannot_control_the_terminal() {
    let hostile = "\u{1b}[2J\u{9b}31m\u{202e}";
    let status = serde_json::json!({ "version": hostile }).to_string();
    let routes = axum::Router::new().route("/status", axum::routing::get(status));
    let routes = routes.fallback((axum::http::StatusCode::INTERNAL_SERVER_ERROR, hostile));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let admin = format!("--admin={}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let failed = run(&["subscribers", &admin]).await;
    assert!(failed.stderr.contains("answers 500: ") && !controls_the_terminal(&failed.stderr), "{failed:?}");
    let top = run(&["top", "-o", "json", &admin]).await;
    assert!(!controls_the_terminal(&top.stdout), "{top:?}");
    assert_eq!(json(&top.stdout)["version"], hostile);

    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let server = kubefan.grpc_addr.to_string();
    for command in ["get", "watch"] {
        let ran = run(&[command, "po\u{9b}2J\u{202e}ds", "--server", &server]).await;
        assert!(ran.stderr.contains("ds") && !controls_the_terminal(&ran.stderr), "{ran:?}");
    }
}

async fn command(kubefan: &Kubefan, args: &[&str]) -> Ran {
    let admin = format!("--admin={}", kubefan.admin_addr);
    run(&[args, &[&*admin]].concat()).await
}

async fn listed(kubefan: &Kubefan) -> Vec<Value> {
    let ran = command(kubefan, &["subscribers", "-o", "json"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    json(&ran.stdout)["subscribers"].as_array().unwrap().clone()
}

/// A watch over HTTP/2 whose client gives no window beyond the first 16 KiB.
async fn unread_watch(kubefan: &Kubefan) -> RecvStream {
    let io = TcpStream::connect(kubefan.grpc_addr).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(16 << 10);
    let (requests, connection) = builder.handshake::<_, Bytes>(io).await.unwrap();
    tokio::spawn(connection);
    let url = format!("http://{}/api/v1/pods?watch=1&resourceVersion=0&labelSelector=stage", kubefan.grpc_addr);
    let request = Request::get(url).header("user-agent", HOSTILE.as_bytes()).body(()).unwrap();
    let (response, _) = requests.ready().await.unwrap().send_request(request, true).unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    response.into_body()
}

async fn the_one_that_lags_is_listed_first_and_ended_alone() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let request = WatchRequest { target: Some(target("pods")), ..WatchRequest::default() };
    let mut reading = client.watch(request).await.unwrap().into_inner();
    let mut unread = unread_watch(&kubefan).await;
    for number in 0..20 {
        simulated.sim.create(&pods(), large(&format!("p{number}"), 'x')).unwrap();
    }
    let read_up = async |reading: &mut tonic::Streaming<_>, name: &str| {
        while !format!("{:?}", reading.message().await.unwrap().unwrap()).contains(name) {}
    };
    tokio::time::timeout(wait::SOON, read_up(&mut reading, "\"p19\"")).await.expect("the reader gets every event");
    let first = wait::until("the other to lag", wait::SOON, || async {
        let listed = listed(&kubefan).await;
        (listed.len() == 2 && listed[0]["lagEvents"].as_u64() > Some(0) && listed[1]["lagEvents"] == 0)
            .then(|| listed[0].clone())
    })
    .await;
    assert_eq!((&first["protocol"], &first["labelSelector"]), (&"http".into(), &"stage".into()), "{first}");
    assert!(first["userAgent"].as_str().unwrap().starts_with("<script>"), "{first}");
    assert!(first["lagSeconds"].as_f64().is_some() && first["bytesSent"].as_u64() > Some(0), "{first}");
    let table = command(&kubefan, &["subscribers", "-o", "wide"]).await;
    assert!(table.stdout.starts_with("ID") && table.stdout.contains("http/json"), "{table:?}");
    assert!(!controls_the_terminal(&table.stdout), "{table:?}");
    let printed = command(&kubefan, &["subscribers", "-o", "json"]).await.stdout;
    assert!(!controls_the_terminal(&printed), "{printed:?}");
    assert!(json(&printed).to_string().contains('\u{9b}'), "it is the same JSON: {printed:?}");

    let id = first["id"].as_str().unwrap();
    let ended = command(&kubefan, &["disconnect", id]).await;
    assert_eq!((ended.code, &*ended.stdout), (Some(0), &*format!("subscriber/{id} disconnected\n")), "{ended:?}");
    let mut received = Vec::new();
    while let Some(data) = unread.data().await {
        let data = data.unwrap();
        unread.flow_control().release_capacity(data.len()).unwrap();
        received.extend_from_slice(&data);
    }
    let received = String::from_utf8(received).unwrap();
    let last = json(received.lines().last().unwrap());
    assert_eq!((&last["type"], &last["object"]["code"]), (&"ERROR".into(), &429.into()), "{last}");
    assert!(last["object"]["message"].as_str().unwrap().contains("kubefan disconnect"), "{last}");

    simulated.create("later");
    tokio::time::timeout(wait::SOON, read_up(&mut reading, "\"later\"")).await.expect("the other stream continues");
    assert_eq!(listed(&kubefan).await.len(), 1);
    let again = command(&kubefan, &["disconnect", id]).await;
    assert!(again.code == Some(1) && again.stderr.contains("there is no subscriber"), "{again:?}");
    kubefan.metric_becomes("kubefan_subscriptions_finished_total{group=\"\",media=\"json\",namespace=\"\",reason=\"disconnected\",resource=\"pods\"}", 1.0).await;
}

async fn a_stream_is_ended_for_the_operator_and_not_for_web_pages() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let request = WatchRequest { target: Some(target("pods")), ..WatchRequest::default() };
    let mut stream = client.watch(request).await.unwrap().into_inner();
    stream.message().await.unwrap();
    let id = listed(&kubefan).await[0]["id"].as_str().unwrap().to_owned();
    let ask = async |method: Method, path: &str, header: (&str, &str)| {
        let request = reqwest::Client::new().request(method, format!("http://{}{path}", kubefan.admin_addr));
        request.header(header.0, header.1).send().await.unwrap().status()
    };
    let path = format!("/subscribers/{id}");
    let own = format!("http://{}", kubefan.admin_addr);
    for header in [("origin", &*own), ("host", "evil.example"), ("sec-fetch-site", "cross-site")] {
        assert_eq!(ask(Method::DELETE, &path, header).await, StatusCode::FORBIDDEN, "{header:?}");
    }
    assert_eq!(ask(Method::GET, "/subscribers", ("host", "evil.example")).await, StatusCode::FORBIDDEN);
    assert_eq!(ask(Method::POST, &path, ("x-other", "")).await, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(listed(&kubefan).await.len(), 1, "it continues");

    assert_eq!(command(&kubefan, &["disconnect", &id.to_uppercase()]).await.code, Some(0));
    let status = loop {
        match tokio::time::timeout(wait::SOON, stream.message()).await.expect("the stream ends") {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended without a status"),
            Err(status) => break status,
        }
    };
    let reason = status.get_details_error_info().map(|info| info.reason);
    assert_eq!((status.code(), reason.as_deref()), (Code::Unavailable, Some("DISCONNECTED")), "{status}");
}

async fn top_prints_one_table_if_stdout_is_no_terminal() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods,nodes"]).await;
    let _unread = unread_watch(&kubefan).await;
    for args in [&["top", "--once"][..], &["top"]] {
        let ran = command(&kubefan, args).await;
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(ran.stdout.starts_with("kubefan ") && ran.stdout.contains("1 subscribers"), "{ran:?}");
        let row = ran.stdout.lines().find(|line| line.starts_with("pods ")).unwrap();
        let cells: Vec<_> = row.split_whitespace().collect();
        assert_eq!(cells[..8], ["pods", "<all>", "json", "synced", "3", "0.0", "1", "0"], "{ran:?}");
    }
    let state = json(&command(&kubefan, &["top", "-o", "json"]).await.stdout);
    assert_eq!((&state["isReady"], &state["caches"][1]["resource"]), (&true.into(), &"pods".into()), "{state}");
    let gone = run(&["top", "--once", "--admin=127.0.0.1:1"]).await;
    assert!(gone.code == Some(1) && gone.stderr.contains("cannot reach the admin port"), "{gone:?}");
}

async fn a_browser_shows_the_status_and_takes_names_for_text() {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found = names.into_iter().find(|name| std::process::Command::new(name).arg("--version").output().is_ok());
    let Some(browser) = found else {
        skip("no Chromium is installed");
    };
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let _unread = unread_watch(&kubefan).await;
    let page = reqwest::get(format!("http://{}/", kubefan.admin_addr)).await.unwrap();
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let profile = format!("--user-data-dir={}", simulated.dir.path().join("profile").display());
    let mut command = tokio::process::Command::new(browser);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        // It asks no other server.
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=15000",
        "--dump-dom",
        &profile,
    ]);
    command.arg(format!("http://{}/", kubefan.admin_addr)).kill_on_drop(true);
    let output = tokio::time::timeout(std::time::Duration::from_secs(60), command.output());
    let output = output.await.expect("the browser ends").unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    for expected in [
        "● Ready",
        "● synced",
        "● Every cache is in sync with the apiserver",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        r#"aria-label="Subscribers"#,
        r#"<th scope="row" class="long" title="pods">pods</th>"#,
    ] {
        assert!(shown.contains(expected), "no {expected} in {shown}");
    }
    assert!(!shown.contains("<script>alert") && !shown.contains("does not answer"), "{shown}");
}
