//! The proxy that the environment names, as Go's programs use it.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use reqwest::{Client, StatusCode};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::harness::{apiserver::ApiServer, kubefan::Kubefan, servers::is_cached, tests};

tests! {
    apiserver: reads_and_forwarded_requests_use_the_proxy_of_the_environment;
}

/// A server that only the proxy can resolve.
const SERVER: &str = "apiserver.test:6443";

/// An HTTP proxy whose tunnels all lead to one server. It ends when it is dropped.
struct Proxy {
    address: SocketAddr,
    /// The first line of each request.
    requests: Arc<Mutex<Vec<String>>>,
    _running: JoinSet<()>,
}

impl Proxy {
    async fn start(server: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = requests.clone();
        let mut running = JoinSet::new();
        running.spawn(async move {
            let mut tunnels = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tunnels.spawn(tunnel(client, server, seen.clone()));
            }
        });
        Proxy { address, requests, _running: running }
    }
}

async fn tunnel(client: TcpStream, server: SocketAddr, seen: Arc<Mutex<Vec<String>>>) {
    let mut client = BufReader::new(client);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if client.read_line(&mut head).await.unwrap() == 0 {
            return;
        }
    }
    seen.lock().unwrap().push(head.lines().next().unwrap_or_default().to_owned());
    let mut server = TcpStream::connect(server).await.unwrap();
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    let _ended = copy_bidirectional(&mut client, &mut server).await;
}

async fn reads_and_forwarded_requests_use_the_proxy_of_the_environment() {
    let api = ApiServer::shared().await;
    let proxy = Proxy::start(api.addr()).await;
    let kubeconfig = api.kubeconfig_to(&format!("https://{SERVER}"));
    let variables = [("HTTPS_PROXY", format!("http://{}", proxy.address)), ("NO_PROXY", "example.test".to_owned())];
    let variables = variables.map(|(name, value)| (name.to_owned(), value));
    let kubefan = Kubefan::spawn_with_variables(&kubeconfig, &["--resource=pods"], &variables).await;
    kubefan.ready().await;
    let client = Client::builder().no_proxy().build().unwrap();
    for (path, from_cache) in [("/api/v1/pods?resourceVersion=0", true), ("/version", false)] {
        let answer = client.get(format!("http://{}{path}", kubefan.grpc_addr)).bearer_auth(api.admin_token());
        let answer = answer.send().await.unwrap();
        assert_eq!((answer.status(), is_cached(&answer)), (StatusCode::OK, from_cache), "{path}");
    }
    let requests = proxy.requests.lock().unwrap();
    let expected = format!("CONNECT {SERVER} HTTP/1.1");
    assert!(requests.len() >= 2 && requests.iter().all(|request| *request == expected), "{requests:?}");
}
