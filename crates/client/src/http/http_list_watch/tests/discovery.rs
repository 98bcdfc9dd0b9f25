use super::{server::Answer, *};

/// The path that a name resolves to, and the paths that were read for it.
async fn resolve(name: &str, answers: Vec<Answer>) -> (Result<String, ClientError>, Vec<String>) {
    let transport = Arc::new(Scripted::new(answers));
    let client = HttpClient::from_transport(transport.clone());
    let source = HttpListWatch::new(client, name, HttpListWatchOptions::default()).unwrap();
    let path = source.collection().await;
    if let Ok(path) = &path {
        assert_eq!(source.collection().await.unwrap(), *path, "without another request");
    }
    (path, transport.requests().into_iter().map(|(path, _)| path).collect())
}

fn aggregated_core() -> Answer {
    Answer::ok(
        r#"{"kind":"APIGroupDiscoveryList","items":[{"metadata":{"name":""},"versions":[{"version":"v1","resources":[
        {"resource":"pods","responseKind":{"group":"","version":"","kind":"Pod"},"scope":"Namespaced","singularResource":"pod","shortNames":["po"]},
        {"resource":"events","responseKind":{"kind":"Event"},"scope":"Namespaced","singularResource":"event","shortNames":["ev"]},
        {"resource":"nodes","responseKind":{"kind":"Node"},"scope":"Cluster","singularResource":"node","shortNames":["no"]}]}]}]}"#,
    )
}

fn aggregated_groups() -> Answer {
    Answer::ok(
        r#"{"kind":"APIGroupDiscoveryList","items":[
        {"metadata":{"name":"apps"},"versions":[{"version":"v1","resources":[
            {"resource":"deployments","responseKind":{"kind":"Deployment"},"scope":"Namespaced","singularResource":"deployment","shortNames":["deploy"]}]}]},
        {"metadata":{"name":"example.com"},"versions":[
            {"version":"v2","resources":[{"resource":"widgets","responseKind":{"kind":"Widget"},"scope":"Cluster"}]},
            {"version":"v1","resources":[{"resource":"widgets","responseKind":{"kind":"Widget"},"scope":"Cluster"},
                {"resource":"po","responseKind":{"kind":"Po"},"scope":"Cluster"}]}]}]}"#,
    )
}

#[tokio::test]
async fn only_the_documents_are_read_in_which_a_name_may_be() {
    let both = || vec![aggregated_core(), aggregated_groups()];
    for (name, answers, path) in [
        ("pods", vec![], "/api/v1/pods"),
        ("Pod", vec![aggregated_core()], "/api/v1/pods"),
        ("pods.v1", vec![aggregated_core()], "/api/v1/pods"),
        ("no", both(), "/api/v1/nodes"),
        // A plural name takes precedence over a short name.
        ("po", both(), "/apis/example.com/v1/po"),
        ("deployments.v1.apps", vec![aggregated_groups()], "/apis/apps/v1/deployments"),
        ("widgets.example", vec![aggregated_groups()], "/apis/example.com/v2/widgets"),
    ] {
        let requests = answers.len();
        let (resolved, requested) = resolve(name, answers).await;
        assert_eq!((resolved.unwrap().as_str(), requested.len()), (path, requests), "{name}");
    }
    for (name, answers) in
        [(".", both()), ("pods.v2", vec![aggregated_core()]), ("pods.apps", vec![aggregated_groups()])]
    {
        let error = resolve(name, answers).await.0.unwrap_err();
        assert_eq!(error.to_string(), format!("the server doesn't have a resource type {name:?}"));
        assert_eq!(error.reason(), "NotFound");
    }
}

#[tokio::test]
async fn a_server_without_aggregated_discovery_is_asked_for_each_group() {
    let core = r#"{"kind":"APIVersions","versions":["v1"]}"#;
    let v1 = r#"{"kind":"APIResourceList","groupVersion":"v1","resources":[
        {"name":"pods","singularName":"pod","namespaced":true,"kind":"Pod","shortNames":["po"]},
        {"name":"pods/log","singularName":"","namespaced":true,"kind":"Pod"}]}"#;
    let groups = r#"{"kind":"APIGroupList","groups":[
        {"name":"down.example","versions":[{"version":"v1"}],"preferredVersion":{"version":"v1"}},
        {"name":"apps","versions":[{"version":"v1beta1"},{"version":"v1"}],"preferredVersion":{"version":"v1"}}]}"#;
    let apps =
        r#"{"resources":[{"name":"deployments","singularName":"deployment","namespaced":true,"kind":"Deployment"}]}"#;
    let down = Answer::new(503, r#"{"kind":"Status","code":503,"reason":"ServiceUnavailable","message":"down"}"#);
    let script = || vec![Answer::ok(core), Answer::ok(v1), Answer::ok(groups), down.clone(), Answer::ok(apps)];
    let (path, requested) = resolve("deployments", script()).await;
    assert_eq!(path.unwrap(), "/apis/apps/v1/deployments");
    assert_eq!(requested, ["/api", "/api/v1", "/apis", "/apis/down.example/v1", "/apis/apps/v1"]);
    assert_eq!(resolve("po", [script(), vec![Answer::ok("{}")]].concat()).await.0.unwrap(), "/api/v1/pods");
    let error = resolve("gadgets", [script(), vec![Answer::ok("{}")]].concat()).await.0.unwrap_err();
    assert!(error.is_retryable() && error.reason() == "ServiceUnavailable", "it may be in the group that is down");
}

#[tokio::test]
async fn a_path_that_the_server_no_longer_knows_is_looked_up_again() {
    let gone = Answer::new(404, "404 page not found\n");
    let transport = Arc::new(Scripted::new(vec![aggregated_core(), gone, aggregated_core(), Answer::ok(PODS)]));
    let client = HttpClient::from_transport(transport.clone());
    let source = HttpListWatch::new(client, "Pod", HttpListWatchOptions::default()).unwrap();
    assert_eq!(source.list(ListOptions::default()).await.unwrap_err().reason(), "NotFound");
    source.list(ListOptions::default()).await.unwrap();
    let requested: Vec<_> = transport.requests().into_iter().map(|(path, _)| path).collect();
    assert_eq!(requested, ["/api", "/api/v1/pods", "/api", "/api/v1/pods"]);
}

#[tokio::test]
async fn a_namespace_for_a_resource_without_namespaces_is_refused() {
    let transport = Arc::new(Scripted::new(vec![aggregated_core()]));
    let options = HttpListWatchOptions { namespace: "x".to_owned(), ..HttpListWatchOptions::default() };
    let source = HttpListWatch::new(HttpClient::from_transport(transport), "nodes", options).unwrap();
    let error = source.list(ListOptions::default()).await.unwrap_err();
    assert_eq!(error.to_string(), "nodes are not in namespaces; leave the namespace empty");
}
