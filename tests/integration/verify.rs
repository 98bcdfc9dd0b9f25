//! `kubefan verify`: the results equal, different and unknown, each with its output and exit code.

use kubefan_sim::apiserver::{Fault, FaultRule, SimOptions};
use serde_json::json;

use crate::{
    bad_input::assert_line,
    harness::{
        apiserver::ApiServer,
        kubefan::{Kubefan, Ran, run},
        rig::{pod, pods},
        simulated::{Simulated, json as parse, kubeconfig},
        tests, wait,
    },
};

tests! {
    apiserver: kubefan_equals_a_real_apiserver_under_writes;
    local: an_equal_cache_is_reported_with_its_version, differences_are_named,
        a_check_that_cannot_finish_reports_unknown,
        a_forbidden_resource_that_a_reader_asked_for_is_not_compared;
}

async fn verify(kubefan: &Kubefan, kubeconfig: &std::path::Path, args: &[&str]) -> Ran {
    let server = kubefan.grpc_addr.to_string();
    let way = ["--server", &server, "--kubeconfig", kubeconfig.to_str().unwrap()];
    run(&[&["verify"], args, &way].concat()).await
}

fn rows(ran: &Ran) -> Vec<Vec<&str>> {
    ran.stdout.lines().map(|line| line.split_whitespace().collect()).collect()
}

async fn an_equal_cache_is_reported_with_its_version() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods,nodes"]).await;
    let ran = verify(&kubefan, &simulated.kubeconfig(), &[]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let version = simulated.sim.revision().to_string();
    assert_eq!(
        rows(&ran),
        [
            vec!["RESOURCE", "NAMESPACE", "OBJECTS", "VERSION", "RESULT"],
            vec!["nodes", "<all>", "0", &version, "equal"],
            vec!["pods", "<all>", "3", &version, "equal"],
        ],
        "{ran:?}"
    );
    // A resource that is not cached yet is cached for the check. Results use the name of the
    // request.
    let ran = verify(&kubefan, &simulated.kubeconfig(), &["po,deploy", "-n", "default", "-o", "json"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let results = parse(&ran.stdout)["results"].take();
    let reported: Vec<_> = results.as_array().unwrap().iter().map(|one| (&one["resource"], &one["result"])).collect();
    assert_eq!(reported, [(&json!("po"), &json!("equal")), (&json!("deploy"), &json!("equal"))]);
    assert_eq!((&results[0]["objects"], &results[0]["resourceVersion"]), (&json!(3), &json!(version)));
}

async fn a_forbidden_resource_that_a_reader_asked_for_is_not_compared() {
    let simulated = Simulated::start().await;
    let configmaps = kubefan_model::GroupVersionResource::new("", "v1", "configmaps");
    let forbidden = FaultRule { fault: Fault::Forbidden, verb: None, resource: Some(configmaps), requests: usize::MAX };
    simulated.sim.set_fault(forbidden);
    let kubefan = simulated.kubefan(&["--resource=pods", "--namespace=default"]).await;
    let server = kubefan.grpc_addr.to_string();
    let got = run(&["get", "configmaps", "-n", "default", "--server", &server]).await;
    assert!(got.code == Some(1) && got.stderr.contains("denies kubefan configmaps"), "{got:?}");
    let (code, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    let line = ready.lines().find(|line| line.starts_with("[+]configmaps/default forbidden: "));
    let rights = "cannot watch resource \"configmaps\" in API group \"\" in the namespace \"default\"";
    assert!(code.is_success() && line.is_some_and(|line| line.contains(rights)), "{ready}");
    let ran = verify(&kubefan, &simulated.kubeconfig(), &[]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(rows(&ran)[1..].iter().map(|row| row[0]).collect::<Vec<_>>(), ["pods"], "{ran:?}");
    let ran = verify(&kubefan, &simulated.kubeconfig(), &["configmaps"]).await;
    assert_eq!((ran.code, &rows(&ran)[1][..2]), (Some(2), &["configmaps", "default"][..]), "{ran:?}");
}

async fn differences_are_named() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods,nodes"]).await;
    // Another apiserver at the same version, with another history.
    let other = Simulated::start().await;
    for (sim, name) in [(&simulated.sim, "x"), (&other.sim, "y")] {
        sim.create(&pods(), pod(name, "new")).unwrap();
    }
    simulated.stage("a", "one");
    other.stage("b", "two");
    let server = kubefan.grpc_addr.to_string();
    let reached = simulated.sim.revision().to_string();
    let seen = run(&["get", "pods", "--resource-version", &reached, "--server", &server]).await;
    assert_eq!(seen.code, Some(0), "{seen:?}");

    let ran = verify(&kubefan, &other.kubeconfig(), &["pods"]).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{ran:?}");
    assert_eq!(rows(&ran)[1], ["pods", "<all>", "4", &reached, "4", "different"]);
    let keys: Vec<_> = ran.stdout.lines().skip(2).collect();
    let a = 10;
    let b = 7;
    let x = 9;
    let y = 9;
    let versions = [simulated.sim.revision(), a];
    assert_eq!(versions[0], versions[1], "the versions expected below");
    let expected = [
        format!("pods default/a (cached at {a}, upstream at 6)"),
        format!("pods default/b (cached at {b}, upstream at {a})"),
        format!("pods default/x (cached at {x}, not upstream)"),
        format!("pods default/y (not cached, upstream at {y})"),
    ];
    assert_eq!(keys, expected);
    let ran = verify(&kubefan, &other.kubeconfig(), &["pods", "-o", "json"]).await;
    assert_eq!(ran.code, Some(1));
    let result = parse(&ran.stdout)["results"][0].take();
    assert_eq!(result["differences"].as_array().unwrap().len(), 4);
    assert_eq!(
        result["differences"][3],
        json!({ "namespace": "default", "name": "y", "held": null, "upstream": y.to_string() })
    );
}

async fn a_check_that_cannot_finish_reports_unknown() {
    let mut simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let own = simulated.kubeconfig();
    let other = Simulated::with(SimOptions { seed: 7, ..SimOptions::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let itself = kubeconfig(&dir, &format!("http://{}", kubefan.grpc_addr), "{}");
    let is_unknown = async |kubeconfig: &std::path::Path, args: &[&str], reason: &str| {
        let ran = verify(&kubefan, kubeconfig, args).await;
        assert_eq!(ran.code, Some(2), "{reason}: {ran:?}");
        assert!(ran.stdout.contains(reason), "{reason}: {ran:?}");
    };
    is_unknown(&own, &["gadgets"], "unknown: Error from server (NotFound)").await;
    is_unknown(&other.kubeconfig(), &[], "unknown: kubefan caches another cluster").await;
    let reason = format!("unknown: the server at http://{} is a kubefan", kubefan.grpc_addr);
    is_unknown(&itself, &[], &reason).await;
    simulated.sim.set_fault(FaultRule { fault: Fault::Unauthorized, verb: None, resource: None, requests: 100 });
    is_unknown(&own, &[], "does not accept the credentials of verify's own kubeconfig (401)").await;
    simulated.stop().await;
    is_unknown(&own, &[], "unknown: cannot reach the apiserver at").await;

    let no_file = verify(&kubefan, std::path::Path::new("/does/not/exist"), &[]).await;
    assert_line("no file", &no_file, 2, &["error: cannot use kubeconfig /does/not/exist"]);
    let no_kubefan = run(&["verify", "--server", "127.0.0.1:1", "--kubeconfig", own.to_str().unwrap()]).await;
    assert_line("no kubefan", &no_kubefan, 2, &["error: cannot reach kubefan at 127.0.0.1:1"]);
}

async fn kubefan_equals_a_real_apiserver_under_writes() {
    let api = ApiServer::shared().await;
    let kubefan = Kubefan::start(&api, &["--resource=configmaps,namespaces,deployments,clusterroles"]).await;
    kubefan.ready().await;
    let writing = async {
        for i in 0.. {
            let object = json!({ "metadata": { "name": format!("verify-{i}") } });
            api.create("/api/v1/namespaces/default/configmaps", &object).await;
        }
    };
    let verifying = async {
        for _ in 0..5 {
            // Without a verdict where the apiserver is too busy to list.
            let ran = wait::until("a verdict", 2 * wait::SOON, async || {
                let ran = verify(&kubefan, &api.kubeconfig(), &[]).await;
                (ran.code != Some(2) || !ran.stdout.contains("unknown: ")).then_some(ran)
            })
            .await;
            assert_eq!(ran.code, Some(0), "{ran:?}");
            assert_eq!(rows(&ran).iter().filter(|row| row.last() == Some(&"equal")).count(), 4, "{ran:?}");
        }
    };
    tokio::select! {
        () = writing => {}
        () = verifying => {}
    }
}
