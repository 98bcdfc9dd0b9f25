//! Where the caches list and watch: at the apiserver, or at the next kubefan on the way to it.
//!
//! A kubefan near its subscribers may read from another one, so that the apiserver serves one watch
//! per resource however many kubefans there are. Its lists, its watches and the proofs of their
//! freshness then go to that kubefan. All else stays with the apiserver: reviews of callers,
//! discovery, passthrough, and the checks of a cache's content, because a cache cannot confirm what
//! it sent itself.
//!
//! Versions are comparable only within one cluster, and the two addresses are configured
//! separately. So the uid of the namespace kube-system must be readable at both, and be the same.

use std::time::Duration;

use crate::upstream::{Upstream, identity::IdentityError};

/// How long before it sends a bookmark a kubefan may have learned that nothing is missing: the
/// interval of its bookmarks.
const KUBEFAN_BOOKMARK_AGE_MAX: Duration = Duration::from_secs(60);

/// The server of lists and watches. A clone is cheap.
#[derive(Clone)]
pub struct Source {
    client: Upstream,
    /// The apiserver, if `client` leads to a kubefan.
    apiserver: Option<Upstream>,
}

impl Source {
    /// Lists and watches at the apiserver.
    pub fn apiserver(client: Upstream) -> Self {
        Self { client, apiserver: None }
    }

    /// Lists and watches at a kubefan in front of this apiserver.
    pub fn kubefan(client: Upstream, apiserver: Upstream) -> Self {
        Self { client, apiserver: Some(apiserver) }
    }

    /// The client of that server.
    pub fn client(&self) -> &Upstream {
        &self.client
    }

    /// Whether that server is a kubefan.
    pub fn is_kubefan(&self) -> bool {
        self.apiserver.is_some()
    }

    /// How old the proof in a bookmark may be when it arrives. The apiserver's bookmarks are as of
    /// when they are read.
    pub fn bookmark_age_max(&self) -> Duration {
        if self.is_kubefan() { KUBEFAN_BOOKMARK_AGE_MAX } else { Duration::ZERO }
    }

    /// Like [`Upstream::confirm`]. A kubefan must also serve the cluster of the apiserver.
    ///
    /// # Errors
    /// As [`Upstream::confirm`]; `Unidentified` if one of the two does not show which cluster it
    /// serves.
    pub async fn confirm(&self) -> Result<(), IdentityError> {
        self.client.confirm().await?;
        let Some(apiserver) = &self.apiserver else { return Ok(()) };
        if apiserver.cluster().is_none() {
            apiserver.confirm().await?;
        }
        let cluster = |server: &Upstream| {
            server.cluster().ok_or_else(|| IdentityError::Unidentified { server: server.server().to_owned() })
        };
        let (known, found) = (cluster(apiserver)?, cluster(&self.client)?);
        if known == found {
            return Ok(());
        }
        let shown = |uid| format!("kube-system uid {uid}");
        Err(IdentityError::OtherCluster {
            server: self.client.server().to_owned(),
            known: shown(known),
            found: shown(found),
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{Request, Response, StatusCode, Uri};
    use http_body_util::{BodyExt, Full};
    use tower::util::BoxCloneSyncService;

    use super::*;
    use crate::upstream::client::UpstreamOptions;

    /// A server of the cluster with this uid; `None` denies it.
    fn server(name: &str, uid: Option<&'static str>) -> Upstream {
        let service = tower::service_fn(move |_: Request<Bytes>| async move {
            let (status, body) = match uid {
                Some(uid) => (StatusCode::OK, format!(r#"{{"metadata":{{"uid":"{uid}"}}}}"#)),
                None => (StatusCode::FORBIDDEN, "{}".to_owned()),
            };
            let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
            let response = Response::builder().status(status).body(body).expect("a response");
            Ok(response)
        });
        let base: Uri = format!("https://{name}").parse().expect("an address");
        Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
    }

    #[tokio::test]
    async fn a_kubefan_is_a_source_only_if_it_shows_the_cluster_of_the_apiserver() {
        let apiserver = || server("apiserver", Some("a"));
        assert_eq!(Source::apiserver(apiserver()).confirm().await, Ok(()));
        assert_eq!(Source::kubefan(server("kubefan", Some("a")), apiserver()).confirm().await, Ok(()));
        let other = Source::kubefan(server("kubefan", Some("b")), apiserver()).confirm().await.unwrap_err();
        assert!(
            other.to_string().starts_with("another cluster answers at https://kubefan: kube-system uid b"),
            "{other}"
        );
        for (kubefan, apiserver, unidentified) in [(None, Some("a"), "kubefan"), (Some("a"), None, "apiserver")] {
            let source = Source::kubefan(server("kubefan", kubefan), server("apiserver", apiserver));
            let error = source.confirm().await.unwrap_err().to_string();
            assert!(error.contains(&format!("https://{unidentified} does not show")), "{error}");
        }
    }
}
