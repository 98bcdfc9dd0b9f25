//! Setup for authorization: rights of kubefan's own account, flags that do not contradict it, and
//! commands that send tokens.

use reqwest::{Client, StatusCode};

use super::{
    identities::Who::{Lister, Own, Stranger},
    world::World,
};
use crate::harness::{
    apiserver::{ADMIN, ApiServer, NOBODY},
    kubefan::{Kubefan, run, run_with},
    rbac::ServiceAccount,
    tests, wait,
};

tests! {
    apiserver slow_faults: a_review_needs_the_delegators_right, the_commands_read_with_a_token;
    apiserver: over_tls_callers_are_authorized_by_default_and_a_reload_changes_nothing;
    local: a_start_that_would_let_callers_act_as_kubefan_is_refused;
}

/// kubefan as a service account that may read the cached resources: without the right to create
/// reviews it serves no caller, and does not say as which account it failed.
async fn a_review_needs_the_delegators_right() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("kubefan").await;
    let account = ServiceAccount::create(&api, &namespace, "proxy").await;
    account.may_read_pods().await;
    let kubeconfig = account.kubeconfig().await;
    let (cert, key) = api.server_certificate();
    let args = [
        "--resource=pods",
        "--access=authorized-cache-only",
        "tuning.authenticationTokenWebhookCacheTtl=1s",
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
    ];
    let kubefan = Kubefan::spawn(&kubeconfig, &args).await;
    kubefan.ready().await;
    let url = format!("https://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr);
    let ask = || api.client_as(ADMIN).get(&url).send();
    let refused = ask().await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let text = refused.text().await.unwrap();
    assert!(!text.contains("serviceaccount") && !text.contains(&namespace), "{text}");
    assert!(kubefan.process.log().contains("TokenReview"), "the log says why");
    account.may_review().await;
    wait::until("the reviews to be allowed", wait::SOON, || async {
        (ask().await.unwrap().status() == StatusCode::OK).then_some(())
    })
    .await;
}

async fn the_commands_read_with_a_token() {
    let world = World::start(ApiServer::shared().await, &[]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = |who| {
        let path = dir.path().join(format!("{who:?}"));
        std::fs::write(&path, world.token(who).unwrap()).unwrap();
        format!("--token-file={}", path.display())
    };
    let server = format!("--server={}", world.url(""));
    let ca = format!("--ca-file={}", world.api.ca_pem_path().display());
    let kubeconfig = format!("--kubeconfig={}", world.api.kubeconfig().display());
    let by_file = file(Lister);
    let namespace = format!("--namespace={}", world.own);
    let reads = [
        vec!["get", "configmaps", "one", &*namespace],
        vec!["get", "configmaps", &*namespace],
        vec!["watch", "configmaps", "--timeout=1s", "-o=name", &*namespace],
        vec!["verify", "configmaps", &*namespace, &*kubeconfig],
    ];
    let run_as = |read: &[&str], more: &[&str]| {
        let args: Vec<String> = [read, &[&*server, &*ca], more].concat().iter().map(ToString::to_string).collect();
        async move { run(&args.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    for read in &reads[1..] {
        let ran = run_as(read, &[&by_file]).await;
        assert!(ran.code == Some(0) && !ran.stdout.is_empty(), "{ran:?}");
        // Without a token, with a bad one, and with one without rights.
        for (more, said) in [
            (vec![], "(Unauthorized): kubefan serves known callers only"),
            (vec!["--token=no-such-token"], "(Unauthorized): the apiserver does not accept this token"),
            (vec![&*file(Stranger)], "is forbidden: User \"nobody\" cannot"),
        ] {
            let ran = run_as(read, &more).await;
            let text = format!("{}{}", ran.stdout, ran.stderr);
            assert!(ran.code != Some(0) && text.contains(said), "{said}: {ran:?}");
            assert!(!said.contains("Unauthorized") || text.contains("--token-file"), "{ran:?}");
        }
    }
    let ran = run_as(&reads[0], &[&by_file]).await;
    assert!(ran.stderr.contains("(Forbidden)"), "it may list and not get: {ran:?}");
    let token = world.token(Own).unwrap();
    let ran = run_as(&reads[0], &["--token", token]).await;
    assert!(ran.code == Some(0) && ran.stdout.contains("one"), "{ran:?}");
    let by_variable = |name: &'static str, value: String| {
        let args: Vec<String> = [&reads[0][..], &[&*server, &*ca]].concat().iter().map(ToString::to_string).collect();
        async move {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            run_with(&args, |command| _ = command.env(name, value)).await
        }
    };
    let own = file(Own).trim_start_matches("--token-file=").to_owned();
    for ran in [by_variable("KUBEFAN_TOKEN", token.to_owned()).await, by_variable("KUBEFAN_TOKEN_FILE", own).await] {
        assert!(ran.code == Some(0) && ran.stdout.contains("one"), "{ran:?}");
    }
    // Not even to kubefan's own machine, because the port may be another program's.
    let plain = format!("--server={}", world.kubefan.grpc_addr);
    let ran = run(&["get", "configmaps", &plain, &by_file]).await;
    crate::bad_input::assert_line("plaintext", &ran, 1, &["over TLS or to a Unix socket", "use https://127.0.0.1:"]);
    let ran = run_as(&reads[1], &["--token-file=/does/not/exist"]).await;
    crate::bad_input::assert_line("no file", &ran, 1, &["token file /does/not/exist: No such file"]);
}

async fn over_tls_callers_are_authorized_by_default_and_a_reload_changes_nothing() {
    let api = ApiServer::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    let head = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\nresources: [pods]\n";
    std::fs::write(&config, head).unwrap();
    let (cert, key) = api.server_certificate();
    let tls = ["--tls-cert-file", cert.to_str().unwrap(), "--tls-private-key-file", key.to_str().unwrap()];
    let args = [&tls[..], &["--config", config.to_str().unwrap()]].concat();
    let kubefan = Kubefan::spawn_as_given(&api.kubeconfig(), &args).await;
    kubefan.ready().await;
    let url = format!("https://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr);
    let ask = |client: Client| {
        let request = client.get(&url);
        async move { request.send().await.unwrap().status() }
    };
    let verdicts = async || (ask(api.client()).await, ask(api.client_as(NOBODY)).await);
    assert_eq!(verdicts().await, (StatusCode::OK, StatusCode::FORBIDDEN));
    std::fs::write(&config, format!("{head}access: local\n")).unwrap();
    kubefan.process.hang_up();
    let read = || async { kubefan.process.log().contains("certificate of the data port was read again").then_some(()) };
    wait::until("the reload", wait::SOON, read).await;
    assert_eq!(verdicts().await, (StatusCode::OK, StatusCode::FORBIDDEN));
    let restarted = Kubefan::spawn_as_given(&api.kubeconfig(), &args).await;
    restarted.ready().await;
    let url = format!("https://{}/api/v1/pods?resourceVersion=0", restarted.grpc_addr);
    let open = api.client_as(NOBODY).get(&url).send().await.unwrap().status();
    assert_eq!(open, StatusCode::OK, "a restart takes the new file");
}

async fn a_start_that_would_let_callers_act_as_kubefan_is_refused() {
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let serve = ["serve", "--admin-listen=127.0.0.1:0", "--resource=pods"];
    let authorized = [&serve[..], &["--listen=127.0.0.1:0", "--access=authorized"]].concat();
    for (args, expected) in [
        (
            [&serve[..], &tls, &["--listen=0.0.0.0:0", "--access=local-self"]].concat(),
            "every client that can reach it would act as kubefan",
        ),
        (
            [&authorized[..], &tls, &["--api-audiences=kubefan"]].concat(),
            "--api-audiences names audiences of kubefan's own",
        ),
    ] {
        let ran = run(&args).await;
        crate::bad_input::assert_line(expected, &ran, 1, &[expected]);
    }
    let ran = run(&authorized).await;
    crate::bad_input::assert_line("no TLS", &ran, 1, &["--access=authorized", "--tls-cert-file", "unix:"]);
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("config");
    let cluster = "{ server: 'https://127.0.0.1:1', insecure-skip-tls-verify: true }";
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{ name: c, cluster: {cluster} }}]\n\
         contexts: [{{ name: c, context: {{ cluster: c, user: u }} }}]\nusers: [{{ name: u, user: {{ token: t }} }}]\n"
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let ran = run(&[&authorized[..], &tls, &[&*kubeconfig]].concat()).await;
    crate::bad_input::assert_line("reviewer", &ran, 1, &["insecure-skip-tls-verify", "--access=authorized"]);
}
