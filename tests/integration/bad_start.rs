//! A start that cannot succeed, or not yet: flags, files, addresses and apiservers that are
//! unusable. Each gives one clear line that names the mistake and the remedy, the right exit code,
//! and no panic.

use kubefan_sim::apiserver::SimOptions;
use tokio::{io::AsyncWriteExt, net::TcpListener};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    bad_input::{assert_a_subscriber_gets_events, assert_line},
    harness::{
        kubefan::{Kubefan, run, run_with},
        process::closed_port,
        record::{Watch, connect},
        rig::target,
        simulated::{Simulated, kubeconfig},
        tests, wait,
    },
};

tests! {
    local: bad_flags_give_a_one_line_error, a_bad_configuration_file_gives_a_one_line_error,
        an_unusable_kubeconfig_is_named, an_address_in_use_is_named_with_its_flag,
        with_require_upstream_an_unusable_apiserver_ends_the_start,
        an_unreachable_apiserver_is_waited_for_and_reported, rejected_credentials_are_reported_without_the_secret,
        unusable_certificates_are_named, callers_tokens_are_not_passed_on_in_the_clear_without_a_flag;
}

async fn bad_flags_give_a_one_line_error() {
    let cases: [(&[&str], &[&str]); 10] = [
        (&["--tls-cert-file", "x.pem"], &["--tls-cert-file needs --tls-private-key-file"]),
        (&["--listen", "127.0.0.1:7444", "--resource=pods"], &["--listen and --admin-listen are both 127.0.0.1:7444"]),
        (&["--listen", "0.0.0.0:0", "--resource=pods"], &["--listen 0.0.0.0:0", "--insecure", "127.0.0.1"]),
        (&["--on-demand=false"], &["--resource", "--on-demand"]),
        (
            &["--on-demand=false", "--resource=pods", "--on-demand-bytes-max=1Gi"],
            &["--on-demand-bytes-max", "--on-demand"],
        ),
        (&["--resource", "../secrets"], &["--resource", "\"../secrets\""]),
        (&["--resource", "pods\x1b[31m"], &["--resource", r"pods\u{1b}[31m"]),
        (&["--namespace", "a/../b"], &["--namespace", "\"a/../b\""]),
        (&["--resource", "pods", "--resource", "Pods"], &["--resource \"Pods\"", "twice"]),
        (&["--upstream-field-selector", "spec.nodeName"], &["--upstream-field-selector", "spec.nodeName=node-1"]),
    ];
    for (args, has) in cases {
        let ran = run(&[&["serve"], args].concat()).await;
        assert_line(&args.join(" "), &ran, 1, has);
    }
    // Errors of the command-line parser also show the usage.
    let cases: [(&[&str], &str); 7] = [
        (&["--drain-timeout=-5s"], "--drain-timeout"),
        (&["--drain-timeout", "soon"], "soon"),
        (&["--ring-bytes-max", "64 elephants"], "64 elephants"),
        (&["--listen", "nowhere"], "\"nowhere\" is not a listen address"),
        (&["--page-size", "many"], "--page-size"),
        (&["--watch-list", "sometimes"], "[possible values: auto, never]"),
        (&["--no-such-flag"], "--no-such-flag"),
    ];
    for (args, has) in cases {
        let ran = run(&[&["serve"], args].concat()).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(has), "{args:?}: {}", ran.stderr);
    }
}

async fn a_bad_configuration_file_gives_a_one_line_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kubefan.yaml");
    let path = file.to_str().unwrap();
    let head = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n";
    let cases = [
        (format!("{head}resorces: [pods]\n"), "line 3: unknown key \"resorces\"; did you mean \"resources\"?"),
        (format!("{head}resources: pods\n"), "resources: \"pods\" is no list; write it like resources: [pods]"),
        (format!("{head}pageSize: 0\n"), "--page-size"),
        (format!("{head}pageSize: [1]\n"), "line 3"),
        (format!("{head}ringAgeMax: soon\n"), "ringAgeMax: \"soon\" is no duration; write it like 30s"),
        (format!("{head}resources: [pods\n"), "line "),
        ("resources: [pods]\n".to_owned(), "apiVersion is missing"),
        ("apiVersion: v1\nkind: Config\n".to_owned(), "kubefan.dev/v1alpha1"),
        ("\0\u{1}\u{2}".to_owned(), "kubefan.yaml"),
        (format!("{head}{}", "a: ".repeat(50_000)), "kubefan.yaml"),
        (format!("{head}{}", "[".repeat(50_000)), "kubefan.yaml"),
        (format!("{head}a: &a [x]\nb: *nope\n"), "kubefan.yaml"),
        ("x".repeat(2 << 20), "longer than"),
    ];
    for (text, has) in cases {
        std::fs::write(&file, &text).unwrap();
        let what: String = text.chars().take(120).collect();
        assert_line(
            &what,
            &run(&["serve", "--config", path]).await,
            1,
            &[path, has].map(|part| part)[usize::from(has.starts_with("--"))..],
        );
    }
    let missing = run(&["serve", "--config", "/does/not/exist.yaml"]).await;
    assert_line("missing", &missing, 1, &["/does/not/exist.yaml", "No such file"]);
    let directory = run(&["serve", "--config", dir.path().to_str().unwrap()]).await;
    assert_line("a directory", &directory, 1, &["directory"]);
}

async fn an_unusable_kubeconfig_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config");
    let path = file.to_str().unwrap();
    let ran = run(&["serve", "--resource=pods"]).await;
    assert_line(
        "none",
        &ran,
        1,
        &["no kubeconfig found at /nonexistent/.kube/config", "--kubeconfig FILE", "KUBECONFIG"],
    );
    let ran = run(&["serve", "--kubeconfig", "/does/not/exist"]).await;
    assert_line("missing", &ran, 1, &["/does/not/exist", "No such file"]);
    let ran = run_with(&["serve"], |command| {
        command.env("KUBECONFIG", "/does/not/exist/either");
    })
    .await;
    assert_line("missing by environment", &ran, 1, &["/does/not/exist/either"]);
    let ran = run(&["serve", "--kubeconfig", dir.path().to_str().unwrap()]).await;
    assert_line("a directory", &ran, 1, &[dir.path().to_str().unwrap(), "directory"]);

    let good = "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n\
                contexts: [{name: a, context: {cluster: c, user: u}}, {name: b, context: {cluster: gone, user: u}}]\n\
                users: [{name: u, user: {token: very-secret}}]\n";
    let cases: [(String, &[&str], &[&str]); 8] = [
        ("{".to_owned(), &[], &["bad YAML"]),
        (good.replace("very-secret}", "very-secret"), &[], &["bad YAML at line"]),
        (String::new(), &[], &["no current-context", "--context"]),
        (good.to_owned(), &["--context", "prod"], &["no context \"prod\"", "a, b"]),
        (good.to_owned(), &["--context", "b"], &["\"gone\""]),
        (good.replace("http://127.0.0.1:1", "not a url"), &[], &["cluster url"]),
        (
            good.replace("token: very-secret", "tokenFile: /no/such/token, client-certificate: /no/such.pem"),
            &["--require-upstream"],
            &["/no/such"],
        ),
        (
            good.replace(
                "token: very-secret",
                "exec: {apiVersion: client.authentication.k8s.io/v1, command: /no/such/plugin, interactiveMode: Never}",
            ),
            &["--require-upstream"],
            &["plugin"],
        ),
    ];
    for (text, args, has) in cases {
        std::fs::write(&file, &text).unwrap();
        let args =
            [&["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--kubeconfig", path], args].concat();
        let ran = run(&args).await;
        assert_line(&text, &ran, 1, has);
        assert!(!ran.stderr.contains("very-secret"), "{}", ran.stderr);
    }
}

async fn an_address_in_use_is_named_with_its_flag() {
    let simulated = Simulated::start().await;
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let kubeconfig = simulated.kubeconfig();
    let serve = ["serve", "--kubeconfig", kubeconfig.to_str().unwrap()];
    let ran = run(&[&serve[..], &["--listen", &address, "--admin-listen", "127.0.0.1:0"]].concat()).await;
    assert_line("the data port", &ran, 1, &[&format!("cannot listen on {address} (--listen)"), "port 0"]);
    let ran = run(&[&serve[..], &["--listen", "127.0.0.1:0", "--admin-listen", &address]].concat()).await;
    assert_line("the admin port", &ran, 1, &[&format!("cannot listen on {address} (--admin-listen)")]);

    let socket = format!("unix:{}", simulated.dir.path().join("socket").display());
    let first = simulated.kubefan_at(&socket).await;
    let ran = run(&[&serve[..], &["--listen", &socket, "--admin-listen", "127.0.0.1:0"]].concat()).await;
    assert_line("a socket", &ran, 1, &[&socket, "another process listens there", "choose another path"]);
    assert!(!ran.stderr.contains("port 0"), "{ran:?}");
    drop(first);
    // The killed process left its socket file behind, and no process uses it.
    simulated.kubefan_at(&socket).await;
    let ran =
        run(&[&serve[..], &["--listen", "unix:/no/such/directory/socket", "--admin-listen", "127.0.0.1:0"]].concat())
            .await;
    assert_line("no directory", &ran, 1, &["unix:/no/such/directory/socket"]);
}

async fn with_require_upstream_an_unusable_apiserver_ends_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let (_socket, closed) = closed_port();
    let away = kubeconfig(&dir, &format!("http://{closed}"), "{}");
    let serve = ["serve", "--require-upstream", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--kubeconfig"];
    let ran = run(&[&serve[..], &[away.to_str().unwrap()]].concat()).await;
    assert_line("unreachable", &ran, 1, &[&closed.to_string(), "refused", "--require-upstream"]);

    let strict = Simulated::with(SimOptions { bearer_token: Some("right".into()), ..SimOptions::default() }).await;
    let wrong = strict.kubeconfig_for("{ token: wrong-and-secret }");
    let ran = run(&[&serve[..], &[wrong.to_str().unwrap()]].concat()).await;
    assert_line("unauthorized", &ran, 1, &["401", "--require-upstream"]);
    assert!(!ran.stderr.contains("wrong-and-secret"));

    let nonsense = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = nonsense.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = nonsense.accept().await {
            let _ = stream.write_all(b"220 mail.example ESMTP\r\n").await;
        }
    });
    let mail = kubeconfig(&dir, &format!("http://{address}"), "{}");
    let ran = run(&[&serve[..], &[mail.to_str().unwrap()]].concat()).await;
    assert_line("no apiserver", &ran, 1, &["--require-upstream"]);
}

async fn an_unreachable_apiserver_is_waited_for_and_reported() {
    let mut simulated = Simulated::start().await;
    simulated.stop().await;
    let kubefan = Kubefan::spawn(&simulated.kubeconfig(), &["--resource=pods"]).await;
    let (code, text) = wait::until("the reason", wait::SOON, || async {
        kubefan.admin("/readyz?verbose").await.filter(|(_, text)| text.contains("cannot reach"))
    })
    .await;
    assert_eq!(code, 503);
    let line = text.lines().next().unwrap();
    assert!(line.starts_with("[-]pods syncing: ") && line.contains(&simulated.addr.to_string()), "{text}");
    assert!(kubefan.admin("/livez").await.unwrap().0.is_success(), "kubefan is alive without its apiserver");
    let status = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.get_details_retry_info().is_some() && status.message().contains("cannot reach"), "{status}");
    simulated.resume().await;
    kubefan.ready().await;
    assert_a_subscriber_gets_events(&simulated, &kubefan).await;
}

async fn rejected_credentials_are_reported_without_the_secret() {
    let strict = Simulated::with(SimOptions { bearer_token: Some("right".into()), ..SimOptions::default() }).await;
    let kubefan = Kubefan::spawn(&strict.kubeconfig_for("{ token: wrong-and-secret }"), &["--resource=pods"]).await;
    let (code, text) = wait::until("the reason", wait::SOON, || async {
        kubefan.admin("/readyz?verbose").await.filter(|(_, text)| text.contains("401"))
    })
    .await;
    assert_eq!(code, 503);
    assert!(text.contains("does not accept kubefan's credentials"), "{text}");
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    let (_, page) = kubefan.admin("/").await.unwrap();
    let said = [text, metrics, page, kubefan.process.log()].concat();
    assert!(!said.contains("wrong-and-secret"), "{said}");
}

async fn unusable_certificates_are_named() {
    let simulated = Simulated::start().await;
    let kubeconfig = simulated.kubeconfig();
    let nonsense = simulated.dir.path().join("nonsense.pem");
    std::fs::write(&nonsense, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    let nonsense = nonsense.to_str().unwrap();
    let serve =
        ["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--kubeconfig", kubeconfig.to_str().unwrap()];
    for file in [nonsense, "/does/not/exist.pem"] {
        let ran = run(&[&serve[..], &["--tls-cert-file", file, "--tls-private-key-file", file]].concat()).await;
        assert_line(file, &ran, 1, &["--tls-cert-file", file]);
    }
}

async fn callers_tokens_are_not_passed_on_in_the_clear_without_a_flag() {
    let dir = tempfile::tempdir().unwrap();
    // Reserved for documentation: nothing answers there, and nothing is asked at the start.
    let plain = kubeconfig(&dir, "http://192.0.2.1:8080", "{}");
    let serve = ["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--resource=pods", "--kubeconfig"];
    let ran = run(&[&serve[..], &[plain.to_str().unwrap()]].concat()).await;
    assert_line("plain http", &ran, 1, &["http://192.0.2.1:8080", "plain http", "--passthrough-insecure-upstream"]);
    Kubefan::spawn(&plain, &["--resource=pods", "--passthrough-insecure-upstream"]).await;
    Kubefan::spawn(&plain, &["--resource=pods", "--passthrough=self"]).await;

    let unverified = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
        clusters: [{name: c, cluster: {server: 'https://192.0.2.1:6443', insecure-skip-tls-verify: true}}]\n\
        contexts: [{name: a, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n";
    std::fs::write(&plain, unverified).unwrap();
    let ran = run(&[&serve[..], &[plain.to_str().unwrap()]].concat()).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("insecure-skip-tls-verify") && ran.stderr.contains("--passthrough-insecure-upstream"));
}
