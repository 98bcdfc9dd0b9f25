//! The connections of kubefan's own requests: however many watches are open, the next request is
//! answered.

use futures::future::join_all;
use kubefan_model::Media;
use kubefan_upstream::{
    Upstream,
    client::{UpstreamOptions, Verb},
    settings::UpstreamSettings,
};

use crate::harness::{apiserver::ApiServer, tests};

tests! {
    apiserver: more_watches_than_one_connection_allows_are_answered;
}

async fn more_watches_than_one_connection_allows_are_answered() {
    // kube-apiserver allows 100 streams per connection; the next one would wait until one of them
    // ends.
    const WATCHES: usize = 250;
    let api = ApiServer::shared().await;
    let settings = UpstreamSettings { kubeconfig: Some(api.kubeconfig()), context: None };
    let upstream = Upstream::from_settings(settings, UpstreamOptions::default()).await.unwrap();
    let watch = || upstream.stream("/api/v1/configmaps?watch=1&fieldSelector=metadata.name=nobody", Media::Json);
    // Half of them one after the other, half at the same time.
    let mut watches = Vec::new();
    for _ in 0..WATCHES / 2 {
        watches.push(watch().await.unwrap());
    }
    watches.extend(join_all((0..WATCHES / 2).map(|_| watch())).await.into_iter().map(Result::unwrap));
    assert_eq!(watches.len(), WATCHES);
    upstream.get(Verb::Get, "/version").await.unwrap();
    // Watches that ended free their streams.
    for _ in 0..3 {
        watches.truncate(WATCHES / 2);
        watches.extend(join_all((0..WATCHES / 2).map(|_| watch())).await.into_iter().map(Result::unwrap));
    }
    upstream.get(Verb::Get, "/version").await.unwrap();
}
