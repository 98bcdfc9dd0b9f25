//! A resource of a real apiserver that changes, goes and returns. `relists` and `schema_changes`
//! show what subscribers see of it, and `memory` a killed apiserver.

use serde_json::json;
use tonic::Code;

use crate::harness::{
    apiserver::ApiServer,
    kubefan::Kubefan,
    objects::version_of,
    record::{Query, Watch, connect},
    tests, wait,
};

tests! {
    apiserver slow: a_crd_that_changes_goes_and_returns_is_followed;
}

async fn a_crd_that_changes_goes_and_returns_is_followed() {
    let api = ApiServer::shared().await;
    let group = format!("{}.example.com", api.unique("followed"));
    let (plural, resource) = ("widgets", format!("widgets.{group}"));
    let path = format!("/apis/{group}/v1/namespaces/default/{plural}");
    let crd = format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{resource}");
    let kubefan = Kubefan::start(&api, &["--resource", &resource, "--schema-check-interval", "1s"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let target = || Query::default().target(&resource);
    let status = Watch::start(&mut client, target(), "").await.err().unwrap();
    assert_eq!(status.code(), Code::NotFound, "{status}");

    for round in ["first", "second"] {
        api.create_crd(&group, plural, "Widget").await;
        let widget = json!({ "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": round } });
        let created = version_of(&api.create(&path, &widget).await);
        let mut watch = wait::until("the resource to be served", wait::SOON, || async {
            Watch::start(&mut connect(kubefan.grpc_addr).await, target(), "").await.ok()
        })
        .await;
        watch.until(created).await;
        let key = format!("default/{round}");
        assert_eq!(watch.state.keys().collect::<Vec<_>>(), [&key]);

        // A schema default changes what reads return, without a write to the object.
        let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true,
            "properties": { "color": { "type": "string", "default": "blue" } } });
        let place = "/spec/versions/0/schema/openAPIV3Schema";
        api.json_patch(&crd, &json!([{ "op": "replace", "path": place, "value": schema }])).await;
        let defaulted = tokio::time::timeout(wait::SOON, async {
            while !watch.state[&key].contains(r#""color":"blue""#) {
                watch.step().await.unwrap();
            }
        });
        defaulted.await.expect("the new bytes did not arrive");
        assert!(!watch.gaps.is_empty(), "inside a marked gap");

        api.delete_crd(&group, plural).await;
        let status = tokio::time::timeout(wait::SOON, watch.end()).await.expect("the stream did not end");
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains(&resource), "{status}");
        assert!(watch.state.is_empty(), "the deletes of its objects come before the end");
    }
}
