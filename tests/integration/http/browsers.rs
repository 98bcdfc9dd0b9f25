//! What a web page in a browser can make kubefan do. A page cannot choose the headers `Host`,
//! `Origin` and `Sec-Fetch-Site` of what it sends; the browser sets them.

use reqwest::{Client, StatusCode};

use crate::harness::{kubefan::Kubefan, simulated::Simulated, tests};

tests! {
    local: what_a_page_embeds_does_not_act_as_kubefan, without_tls_a_foreign_host_is_refused_on_every_address;
}

const LIST: &str = "/api/v1/pods?resourceVersion=0";

async fn code(kubefan: &Kubefan, path: &str, headers: &[(&str, &str)]) -> StatusCode {
    let client = Client::builder().no_proxy().build().unwrap();
    let request = client.get(format!("http://127.0.0.1:{}{path}", kubefan.grpc_addr.port()));
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.send().await.unwrap().status()
}

async fn what_a_page_embeds_does_not_act_as_kubefan() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--passthrough=self"]).await;
    for (site, expected) in [
        ("cross-site", StatusCode::FORBIDDEN),
        ("same-site", StatusCode::FORBIDDEN),
        ("same-origin", StatusCode::OK),
        ("none", StatusCode::OK),
    ] {
        let image = [("sec-fetch-site", site), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "image")];
        assert_eq!(code(&kubefan, "/version", &image).await, expected, "{site}");
    }
    let link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
    assert_eq!(code(&kubefan, "/version", &link).await, StatusCode::FORBIDDEN, "a link acts as kubefan too");
    assert_eq!(code(&kubefan, "/version", &[]).await, StatusCode::OK, "kubectl");

    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let image = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")];
    assert_eq!(code(&kubefan, LIST, &image).await, StatusCode::FORBIDDEN, "it would start caches");
    assert_eq!(code(&kubefan, LIST, &link).await, StatusCode::OK);
}

async fn without_tls_a_foreign_host_is_refused_on_every_address() {
    let simulated = Simulated::start().await;
    let args = ["--insecure", "--resource=pods", "--allowed-hosts=kubefan.example,*.corp.example"];
    let kubefan = Kubefan::spawn_at(&simulated.kubeconfig(), "0.0.0.0:0", &args).await;
    kubefan.ready().await;
    for (host, expected) in [
        ("evil.example", StatusCode::FORBIDDEN),
        ("kubefan.dev", StatusCode::FORBIDDEN),
        ("kubefan.example:7443", StatusCode::OK),
        ("a.corp.example", StatusCode::OK),
        ("kubefan", StatusCode::OK),
        ("kubefan.kubefan.svc", StatusCode::OK),
        ("kubefan.kubefan.svc.cluster.local:7443", StatusCode::OK),
        ("10.1.2.3:7443", StatusCode::OK),
    ] {
        assert_eq!(code(&kubefan, LIST, &[("host", host)]).await, expected, "{host}");
    }
    let page = [("host", "10.1.2.3:7443"), ("origin", "https://evil.example")];
    assert_eq!(code(&kubefan, LIST, &page).await, StatusCode::FORBIDDEN);
}
