//! A real apiserver and kubefan in front of it, and requests to both as the administrator.

use reqwest::{
    Client, Method, RequestBuilder, Response,
    header::{AUTHORIZATION, HeaderMap},
};

use super::{apiserver::ApiServer, kubefan::Kubefan};

/// An apiserver, and kubefan in front of it.
pub(crate) struct Servers {
    pub(crate) api: ApiServer,
    pub(crate) kubefan: Kubefan,
    client: Client,
}

impl Servers {
    /// Starts kubefan in front of `api`.
    pub(crate) async fn start(api: ApiServer, args: &[&str]) -> Servers {
        let kubefan = Kubefan::start(&api, args).await;
        let builder = Client::builder().no_proxy().default_headers(bearer(&api.admin_token()));
        Servers { api, kubefan, client: builder.build().expect("a client is built") }
    }

    /// A request to kubefan.
    pub(crate) fn through(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("http://{}{path}", self.kubefan.grpc_addr))
    }

    /// A read straight from the apiserver.
    pub(crate) fn straight(&self, path: &str) -> RequestBuilder {
        self.api.client().get(format!("{}{path}", self.api.url()))
    }
}

/// The headers of a caller with this token.
pub(crate) fn bearer(token: &str) -> HeaderMap {
    let value = format!("Bearer {token}").parse().expect("a token is ASCII");
    [(AUTHORIZATION, value)].into_iter().collect()
}

/// Whether these are headers of an answer that a cache of kubefan has decided. With the parameter
/// `fwd` kubefan has passed it on.
pub(crate) fn is_of_cache(headers: &HeaderMap) -> bool {
    headers.get_all("cache-status").into_iter().any(|value| value == "kubefan; hit")
}

/// Whether a cache has decided the answer.
pub(crate) fn is_cached(response: &Response) -> bool {
    is_of_cache(response.headers())
}
