//! The lookup of the cluster's CAs, with an apiserver that answers only that.

use std::{convert::Infallible, sync::Mutex};

use bytes::Bytes;
use http::{Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use kubefan_testkit::certificates::{Content, Signer, now};
use kubefan_upstream::client::UpstreamOptions;
use serde_json::{Value, json};
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;
use crate::authentication::certificate::trusted_cas::Trusted;

/// Answer of the apiserver; `None`: no answer.
type Answer = Arc<Mutex<Option<(StatusCode, Value)>>>;

fn upstream(answer: &Answer) -> Upstream {
    let answer = answer.clone();
    let service = service_fn(move |request: http::Request<Bytes>| {
        assert_eq!(request.uri().path(), PATH);
        let answered = match &*answer.lock().unwrap() {
            Some((status, body)) => {
                let body = Full::new(Bytes::from(body.to_string()));
                let body = body.map_err(|never: Infallible| match never {}).boxed_unsync();
                Ok(Response::builder().status(*status).body(body).unwrap())
            }
            None => Err(BoxError::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused))),
        };
        async move { answered }
    });
    let base = Uri::from_static("https://sim.local:6443");
    Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
}

fn config_map(pem: &str) -> Option<(StatusCode, Value)> {
    Some((StatusCode::OK, json!({ "data": { "client-ca-file": pem, "requestheader-client-ca-file": "x" } })))
}

#[tokio::test(start_paused = true)]
async fn the_cas_are_read_at_once_and_again_every_minute() {
    let answer = Answer::default();
    let cas = TrustedCas::unread(now, Vec::new());
    let following = tokio::spawn(follow(upstream(&answer), cas.clone()));
    let trusted = async |wait: Duration| {
        sleep(wait + Duration::from_millis(1)).await;
        cas.newest()
    };
    assert!(matches!(trusted(Duration::ZERO).await, (Trusted::Unread, _)), "the apiserver is away");
    let ca = Signer::root(Content::ca("ca")).pem;
    *answer.lock().unwrap() = config_map(&ca);
    assert!(matches!(trusted(FIRST_INTERVAL).await, (Trusted::Bundle(_), 1)));
    let both = format!("{ca}{}", Signer::root(Content::ca("new")).pem);
    *answer.lock().unwrap() = config_map(&both);
    let (Trusted::Bundle(bundle), 2) = trusted(INTERVAL).await else { panic!("the new ones") };
    assert_eq!(bundle.len(), 2);
    let forbidden = json!({ "kind": "Status", "message": "no", "code": 403 });
    for failure in [config_map("broken"), config_map(""), Some((StatusCode::FORBIDDEN, forbidden)), None] {
        *answer.lock().unwrap() = failure;
        assert!(matches!(trusted(INTERVAL).await, (Trusted::Bundle(_), 2)), "the old ones stay");
    }
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn without_the_right_to_read_them_no_ca_is_trusted() {
    let status = |code: StatusCode| Some((code, json!({ "kind": "Status", "message": "no", "code": code.as_u16() })));
    for answer in [
        status(StatusCode::FORBIDDEN),
        status(StatusCode::NOT_FOUND),
        Some((StatusCode::OK, json!({ "data": null }))),
        config_map("broken"),
    ] {
        let cas = TrustedCas::unread(now, Vec::new());
        let failure = look_up(&upstream(&Arc::new(Mutex::new(answer))), &cas).await.unwrap_err();
        assert!(matches!(cas.newest(), (Trusted::None, _)), "{failure:?}");
        let Failure::NoCas(why) = &failure else { continue };
        assert!(why.contains("extension-apiserver-authentication"), "{why}");
    }
}
