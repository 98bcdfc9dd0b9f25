//! The proxy that the environment names, as Go's programs use it, and the bytes that pass through
//! it.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, copy, split},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::harness::{
    apiserver::{ApiServer, Options},
    assets,
    kubefan::Kubefan,
    servers::is_cached,
    tests, wait,
};

tests! {
    apiserver: reads_and_forwarded_requests_use_the_proxy_of_the_environment,
        large_lists_of_another_machine_arrive_as_gzip,
        a_kubefan_reads_state_and_changes_of_another_one_as_gzip;
    apiserver large: the_initial_state_of_another_machine_arrives_as_gzip;
}

/// A server that only the proxy can resolve.
const SERVER: &str = "apiserver.test:6443";

/// An HTTP proxy whose tunnels all lead to one server. It ends when it is dropped.
struct Proxy {
    address: SocketAddr,
    traffic: Arc<Traffic>,
    _running: JoinSet<()>,
}

#[derive(Default)]
struct Traffic {
    /// The first line of each request.
    requests: Mutex<Vec<String>>,
    /// Bytes that the server has sent through all tunnels.
    bytes: AtomicUsize,
}

impl Proxy {
    async fn start(server: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let traffic = Arc::<Traffic>::default();
        let seen = traffic.clone();
        let mut running = JoinSet::new();
        running.spawn(async move {
            let mut tunnels = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tunnels.spawn(tunnel(client, server, seen.clone()));
            }
        });
        Proxy { address, traffic, _running: running }
    }

    /// The variables that lead to it.
    fn variables(&self) -> [(String, String); 2] {
        let variables = [("HTTPS_PROXY", format!("http://{}", self.address)), ("NO_PROXY", "example.test".to_owned())];
        variables.map(|(name, value)| (name.to_owned(), value))
    }
}

async fn tunnel(client: TcpStream, server: SocketAddr, seen: Arc<Traffic>) {
    let mut client = BufReader::new(client);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if client.read_line(&mut head).await.unwrap() == 0 {
            return;
        }
    }
    seen.requests.lock().unwrap().push(head.lines().next().unwrap_or_default().to_owned());
    let (mut from_server, mut to_server) = TcpStream::connect(server).await.unwrap().into_split();
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    let (mut from_client, mut to_client) = split(client);
    let answers = async {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
            seen.bytes.fetch_add(read, Relaxed);
            if to_client.write_all(&buffer[..read]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        _ = copy(&mut from_client, &mut to_server) => {}
        () = answers => {}
    }
}

async fn reads_and_forwarded_requests_use_the_proxy_of_the_environment() {
    let api = ApiServer::shared().await;
    let proxy = Proxy::start(api.addr()).await;
    let kubeconfig = api.kubeconfig_to(&format!("https://{SERVER}"));
    let kubefan = Kubefan::spawn_with_variables(&kubeconfig, &["--resource=pods"], &proxy.variables()).await;
    kubefan.ready().await;
    let client = Client::builder().no_proxy().build().unwrap();
    for (path, from_cache) in [("/api/v1/pods?resourceVersion=0", true), ("/version", false)] {
        let answer = client.get(format!("http://{}{path}", kubefan.grpc_addr)).bearer_auth(api.admin_token());
        let answer = answer.send().await.unwrap();
        assert_eq!((answer.status(), is_cached(&answer)), (StatusCode::OK, from_cache), "{path}");
    }
    let requests = proxy.traffic.requests.lock().unwrap();
    let expected = format!("CONNECT {SERVER} HTTP/1.1");
    assert!(requests.len() >= 2 && requests.iter().all(|request| *request == expected), "{requests:?}");
}

/// kube-apiserver compresses lists above 128 KiB.
async fn large_lists_of_another_machine_arrive_as_gzip() {
    arrives_as_gzip(&ApiServer::shared().await, "tuning.watchList=never").await;
}

/// Since 1.37, kube-apiserver also compresses watches that begin with the state.
async fn the_initial_state_of_another_machine_arrives_as_gzip() {
    let options = Options::default().program(assets::kube_apiserver_newest());
    arrives_as_gzip(&ApiServer::start(options).await, "tuning.watchList=auto").await;
}

/// Compares the bytes that kubefan receives with those without gzip, while it reads two MB.
async fn arrives_as_gzip(api: &ApiServer, watch_list: &str) {
    const OBJECTS: usize = 40;
    const DATA_BYTES: usize = 50_000;
    let namespace = api.namespace("gzip").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    for number in 0..OBJECTS {
        let metadata = json!({ "name": format!("large-{number}") });
        api.create(&path, &json!({ "metadata": metadata, "data": { "key": "x".repeat(DATA_BYTES) } })).await;
    }
    let asking = api.kubeconfig_to(&format!("https://{SERVER}"));
    let not_asking = api.kubeconfig_to(&format!("https://{SERVER}"));
    let text = std::fs::read_to_string(&not_asking).unwrap();
    std::fs::write(&not_asking, text.replace("cluster: { ", "cluster: { disable-compression: true, ")).unwrap();
    let received = async |kubeconfig| {
        let proxy = Proxy::start(api.addr()).await;
        let args = ["--resource=configmaps", watch_list];
        let kubefan = Kubefan::spawn_with_variables(kubeconfig, &args, &proxy.variables()).await;
        kubefan.ready().await;
        let url = format!("http://{}{path}?resourceVersion=0", kubefan.grpc_addr);
        let answer = Client::new().get(url).bearer_auth(api.admin_token()).send().await.unwrap();
        assert!(is_cached(&answer));
        let list: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        assert_eq!(list["items"], api.get_json(&path).await["items"]);
        proxy.traffic.bytes.load(Relaxed)
    };
    let plain = received(&not_asking).await;
    let gzip = received(&asking).await;
    assert!(plain > OBJECTS * DATA_BYTES && gzip < plain - OBJECTS * DATA_BYTES / 2, "{gzip} of {plain} bytes");
}

/// The kubefan behind another one, on another machine, has the same objects and events.
async fn a_kubefan_reads_state_and_changes_of_another_one_as_gzip() {
    const OBJECTS: usize = 40;
    const DATA_BYTES: usize = 50_000;
    let api = ApiServer::shared().await;
    let namespace = api.namespace("gzip-tier").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let create = async |number: usize| {
        let metadata = json!({ "name": format!("large-{number}") });
        api.create(&path, &json!({ "metadata": metadata, "data": { "key": "x".repeat(DATA_BYTES) } })).await;
    };
    for number in 0..OBJECTS {
        create(number).await;
    }
    let plain = api.get_json("/api/v1/configmaps").await.to_string().len();
    // It forwards nothing: kube-apiserver would answer with a plain initial state before 1.37.
    let args = ["--resource=configmaps", "--access=authorized-cache-only"];
    let upper = Kubefan::spawn_over_tls(&api, &api.kubeconfig(), &args).await;
    upper.ready().await;
    // The cluster moves on and the cache does not, so a comparison proves its state.
    api.namespace("gzip-elsewhere").await;
    let proxy = Proxy::start(upper.grpc_addr).await;
    let upstream = format!("--upstream={}", api.kubeconfig_to(&format!("https://{SERVER}")).display());
    let args = ["--resource=configmaps", &upstream];
    let lower = Kubefan::spawn_with_variables(&api.kubeconfig(), &args, &proxy.variables()).await;
    lower.ready().await;
    let received = proxy.traffic.bytes.load(Relaxed);
    assert!(received < plain / 2, "{received} of {plain} bytes");

    let client = Client::new();
    let is_equal = async || {
        let url = format!("http://{}{path}?resourceVersion=0", lower.grpc_addr);
        let answer = client.get(url).bearer_auth(api.admin_token()).send().await.unwrap();
        assert!(is_cached(&answer));
        let list: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        (list["items"] == api.get_json(&path).await["items"]).then_some(())
    };
    wait::until("the same state", wait::SOON, is_equal).await;
    for number in OBJECTS..OBJECTS + 5 {
        create(number).await;
        api.patch(&format!("{path}/large-{number}"), &json!({ "data": { "key": "changed" } })).await;
        api.delete(&format!("{path}/large-{}", number - OBJECTS)).await;
    }
    wait::until("the same state after changes", wait::SOON, is_equal).await;
}
