//! Compares the answers that a page of another site may read with those of a kube-apiserver that
//! has `--cors-allowed-origins`.

use std::{collections::BTreeMap, fs};

use reqwest::{Certificate, Client, Method, RequestBuilder, Response, StatusCode, header::ORIGIN};

use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    servers::{bearer, is_cached},
    tests,
};

tests! {
    apiserver slow_programs: pages_read_from_kubefan_what_they_may_read_from_the_apiserver;
}

const ALLOWED: &str = "https://dash.example";
const LIST: &str = "/api/v1/configmaps?resourceVersion=0";
const WATCH: &str = "/api/v1/configmaps?watch=1&resourceVersion=0&timeoutSeconds=1";

/// The headers that are about origins.
fn cross_origin(response: &Response) -> BTreeMap<String, String> {
    let headers = response.headers().iter().filter(|(name, _)| name.as_str().starts_with("access-control-"));
    headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
}

async fn of_page(request: RequestBuilder, origin: Option<&str>) -> Response {
    let request = origin.into_iter().fold(request, |request, origin| request.header(ORIGIN, origin));
    request.send().await.unwrap()
}

async fn pages_read_from_kubefan_what_they_may_read_from_the_apiserver() {
    let api = ApiServer::start(Options::default().flag(r"--cors-allowed-origins=^https://dash\.example$")).await;
    let cached = ["--resource=configmaps"];
    let kubefan = Kubefan::spawn_over_tls(&api, &api.kubeconfig(), &cached).await;
    let alone =
        Kubefan::spawn_over_tls(&api, &api.kubeconfig(), &[&cached[..], &["--access=authorized-cache-only"]].concat())
            .await;
    kubefan.ready().await;
    alone.ready().await;
    let ca = Certificate::from_pem(&fs::read(api.ca_pem_path()).unwrap()).unwrap();
    let client =
        || Client::builder().no_proxy().tls_certs_only([ca.clone()]).default_headers(bearer(&api.admin_token()));
    for client in [client().http1_only().build().unwrap(), client().build().unwrap()] {
        for origin in [Some(ALLOWED), Some("https://evil.example"), Some("null"), None] {
            for (method, path, from_cache) in [
                (Method::GET, LIST, true),
                (Method::GET, WATCH, true),
                (Method::HEAD, LIST, false),
                (Method::GET, "/api/v1/namespaces/default", false),
                (Method::GET, "/api/v1/namespaces/gone", false),
                (Method::OPTIONS, LIST, false),
            ] {
                let what = format!("{method} {path} of {origin:?}");
                let to = |server: String| of_page(client.request(method.clone(), server + path), origin);
                let direct = to(api.url().to_owned()).await;
                let mine = to(format!("https://{}", kubefan.grpc_addr)).await;
                assert_eq!(is_cached(&mine), from_cache, "{what}");
                assert_eq!(mine.status(), direct.status(), "{what}");
                assert_eq!(cross_origin(&mine), cross_origin(&direct), "{what}");
                assert_eq!(cross_origin(&mine).is_empty(), origin != Some(ALLOWED), "{what}");
            }
            // Answers and refusals that no apiserver has seen.
            for (method, path, code) in [
                (Method::GET, LIST, StatusCode::OK),
                (Method::POST, LIST, StatusCode::METHOD_NOT_ALLOWED),
                (Method::GET, "/apis/example.com/v1/widgets", StatusCode::NOT_FOUND),
            ] {
                let answer =
                    of_page(client.request(method, format!("https://{}{path}", alone.grpc_addr)), origin).await;
                assert_eq!(answer.status(), code, "{path} of {origin:?}");
                assert_eq!(
                    cross_origin(&answer).len(),
                    if origin == Some(ALLOWED) { 5 } else { 0 },
                    "{path} of {origin:?}"
                );
            }
            let preflight = client.request(Method::OPTIONS, format!("https://{}{LIST}", alone.grpc_addr));
            let preflight = of_page(preflight, origin).await.status();
            assert_eq!(preflight == StatusCode::NO_CONTENT, origin == Some(ALLOWED), "{preflight} for {origin:?}");
        }
    }
    // A websocket, which browsers let any page open.
    let client_of_sockets = client().http1_only().build().unwrap();
    for (origin, code) in [(ALLOWED, StatusCode::SWITCHING_PROTOCOLS), ("https://evil.example", StatusCode::FORBIDDEN)]
    {
        let socket = client_of_sockets.get(format!("https://{}{WATCH}", kubefan.grpc_addr));
        let socket = socket.header("connection", "Upgrade").header("upgrade", "websocket");
        let socket =
            socket.header("sec-websocket-version", "13").header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==");
        assert_eq!(of_page(socket, Some(origin)).await.status(), code, "{origin}");
    }
    // While the apiserver is down, the pages that it has allowed read on.
    api.kill9();
    let client = client().build().unwrap();
    for method in [Method::OPTIONS, Method::GET] {
        let answer = client.request(method.clone(), format!("https://{}{LIST}", kubefan.grpc_addr));
        let answer = of_page(answer, Some(ALLOWED)).await;
        assert!(answer.status().is_success(), "{method}: {}", answer.status());
        assert_eq!(cross_origin(&answer).len(), 5, "{method}");
    }
}
