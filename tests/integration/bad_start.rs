//! A start that cannot succeed, or not yet: flags, files, addresses and apiservers that are
//! unusable. Each gives one clear line that names the mistake and the remedy, the right exit code,
//! and no panic.

use base64::{Engine, engine::general_purpose::STANDARD};
use kubefan_sim::apiserver::SimOptions;
use tokio::{io::AsyncWriteExt, net::TcpListener};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    bad_input::{assert_a_subscriber_gets_events, assert_line},
    harness::{
        kubefan::{Kubefan, Ran, run, run_with},
        pki::{Authority, IssuedPem},
        process::closed_port,
        record::{Watch, connect},
        rig::target,
        secrets,
        simulated::{Simulated, kubeconfig},
        tests, wait,
    },
};

tests! {
    local: bad_settings_give_a_one_line_error, a_bad_configuration_file_gives_a_one_line_error,
        an_unusable_kubeconfig_is_named, an_address_in_use_is_named_with_its_flag,
        with_require_upstream_an_unusable_apiserver_ends_the_start,
        an_unreachable_apiserver_is_waited_for_and_reported, rejected_credentials_are_reported_without_the_secret,
        callers_tokens_are_not_passed_on_in_the_clear_without_a_flag, a_broken_private_key_is_never_quoted,
        a_broken_token_is_never_quoted;
}

/// Runs `kubefan serve`. Without flags it listens on free ports, and its apiserver is away.
async fn serve(args: &[&str]) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = kubeconfig(&dir, "http://127.0.0.1:1", "{}");
    run_with(&[&["serve"], args].concat(), |command| {
        command.env("KUBEFAN_LISTEN", "127.0.0.1:0").env("KUBEFAN_ADMIN_LISTEN", "127.0.0.1:0");
        command.env("KUBECONFIG", kubeconfig);
    })
    .await
}

async fn bad_settings_give_a_one_line_error() {
    let dir = tempfile::tempdir().unwrap();
    let nonsense = dir.path().join("nonsense.pem");
    std::fs::write(&nonsense, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    let nonsense = nonsense.to_str().unwrap();
    let missing = "/does/not/exist.pem";
    let traces = "--otlp-endpoint=http://c";
    let socket = format!("unix:{}", dir.path().join("both.sock").display());
    let cases: [(&[&str], &[&str]); 14] = [
        (
            &[&format!("--listen={socket}"), &format!("--admin-listen={socket}")],
            &["(--admin-listen)", "another port of this one"],
        ),
        (&["--listen", "0.0.0.0:0"], &["--listen 0.0.0.0:0", "--access=insecure", "127.0.0.1"]),
        (&["--on-demand=false"], &["--resource", "--on-demand"]),
        (&["--resource", "../secrets"], &["--resource", "\"../secrets\""]),
        (&["--resource", "pods\x1b[31m"], &["--resource", r"pods\u{1b}[31m"]),
        (&["--namespace", "a/../b"], &["--namespace", "\"a/../b\""]),
        (&["--resource", "pods", "--resource", "Pods"], &["--resource \"Pods\"", "twice"]),
        (&["--upstream-field-selector", "spec.nodeName"], &["--upstream-field-selector", "spec.nodeName=node-1"]),
        (&["--tls-cert-file", "x.pem"], &["--tls-cert-file needs --tls-private-key-file"]),
        (&["--tls-cert-file", nonsense, "--tls-private-key-file", nonsense], &["--tls-cert-file", nonsense]),
        (&["--tls-cert-file", missing, "--tls-private-key-file", missing], &["--tls-cert-file", missing]),
        (&["--otlp-endpoint=collector:4317"], &["--otlp-endpoint collector:4317"]),
        (&[traces, "tuning.otlpSamplingRatio=2"], &["must be from 0 to 1"]),
        (&[traces, "tuning.otlpHeadersFile=/nonexistent"], &["tuning.otlpHeadersFile /nonexistent"]),
    ];
    for (args, has) in cases {
        assert_line(&args.join(" "), &serve(args).await, 1, has);
    }
    // Errors of the command-line parser also show the usage.
    let cases: [(&[&str], &str); 5] = [
        (&["--page-size=5"], "error: --page-size is now tuning.pageSize in the configuration file (--config)\n"),
        (&["--drain-timeout=-5s"], "--drain-timeout"),
        (&["--listen", "nowhere"], "\"nowhere\" is not a listen address"),
        (&["--log-format", "xml"], "[possible values: text, json]"),
        (&["--no-such-flag"], "--no-such-flag"),
    ];
    for (args, has) in cases {
        let ran = serve(args).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(has), "{args:?}: {}", ran.stderr);
    }
    let by_variable = run_with(&["serve"], |command| _ = command.env("KUBEFAN_PAGE_SIZE", "5")).await;
    let has = ["KUBEFAN_PAGE_SIZE is now tuning.pageSize in the configuration file (--config)"];
    assert_line("a variable of an earlier version", &by_variable, 1, &has);
}

async fn a_bad_configuration_file_gives_a_one_line_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kubefan.yaml");
    let path = file.to_str().unwrap();
    let head = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n";
    let cases = [
        (format!("{head}resorces: [pods]\n"), [path, "line 3: unknown key \"resorces\"; did you mean \"resources\"?"]),
        (format!("{head}tuning: {{pageSize: 0}}\n"), ["", "tuning.pageSize"]),
        (format!("{head}pageSize: 5\n"), [path, "line 3: pageSize is now tuning.pageSize"]),
        (format!("{head}tuning:\n  watchList: sometimes\n"), [path, "line 4: tuning.watchList"]),
        (format!("{head}resources: [pods\n"), [path, "line "]),
        ("resources: [pods]\n".to_owned(), [path, "apiVersion is missing"]),
        ("\0\u{1}\u{2}".to_owned(), [path, ""]),
        (format!("{head}{}", "a: ".repeat(50_000)), [path, ""]),
        (format!("{head}{}", "[".repeat(50_000)), [path, ""]),
        (format!("{head}a: &a [x]\nb: *nope\n"), [path, ""]),
        ("x".repeat(2 << 20), [path, "longer than"]),
    ];
    for (text, has) in cases {
        std::fs::write(&file, &text).unwrap();
        let what: String = text.chars().take(120).collect();
        assert_line(&what, &serve(&["--config", path]).await, 1, &has);
    }
    let directory = dir.path().to_str().unwrap();
    assert_line("a directory", &serve(&["--config", directory]).await, 1, &["directory"]);
}

async fn an_unusable_kubeconfig_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config");
    let path = file.to_str().unwrap();
    let directory = dir.path().to_str().unwrap();
    let none = ["no kubeconfig found at /nonexistent/.kube/config", "--kubeconfig FILE", "KUBECONFIG"];
    assert_line("none", &run(&["serve", "--resource=pods"]).await, 1, &none);
    assert_line("a directory", &serve(&["--kubeconfig", directory]).await, 1, &[directory, "directory"]);
    let missing = run_with(&["serve"], |command| {
        command.env("KUBECONFIG", "/does/not/exist");
    })
    .await;
    assert_line("missing", &missing, 1, &["no kubeconfig found at /does/not/exist"]);

    let good = "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n\
                contexts: [{name: a, context: {cluster: c, user: u}}, {name: b, context: {cluster: gone, user: u}}]\n\
                users: [{name: u, user: {token: very-secret}}]\n";
    let files = "tokenFile: /no/such/token, client-certificate: /no/such.pem, client-key: /no/such.pem";
    let plugin =
        "exec: {apiVersion: client.authentication.k8s.io/v1, command: /no/such/plugin, interactiveMode: Never}";
    let cases: [(String, &[&str], &[&str]); 6] = [
        (good.replace("very-secret}", "very-secret"), &[], &["bad YAML"]),
        (String::new(), &[], &["no current-context", "--context"]),
        (good.to_owned(), &["--context", "b"], &["\"gone\""]),
        (good.replace("http://127.0.0.1:1", "not a url"), &[], &["cluster url"]),
        (good.replace("token: very-secret", files), &["tuning.requireUpstream"], &["/no/such"]),
        (good.replace("token: very-secret", plugin), &["tuning.requireUpstream"], &["plugin"]),
    ];
    for (text, args, has) in cases {
        std::fs::write(&file, &text).unwrap();
        let ran = serve(&[&["--kubeconfig", path], args].concat()).await;
        assert_line(&text, &ran, 1, has);
    }
}

async fn an_address_in_use_is_named_with_its_flag() {
    let simulated = Simulated::start().await;
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let socket = format!("unix:{}", simulated.dir.path().join("socket").display());
    let first = simulated.kubefan_at(&socket).await;
    let cases: [(&str, &str, &[&str]); 4] = [
        ("--listen", &address, &[&format!("cannot listen on {address} (--listen)"), "port 0"]),
        ("--admin-listen", &address, &[&format!("cannot listen on {address} (--admin-listen)")]),
        ("--listen", &socket, &[&socket, "another process listens there", "choose another path"]),
        ("--listen", "unix:/no/such/directory/socket", &["unix:/no/such/directory/socket"]),
    ];
    for (flag, address, has) in cases {
        let ran = serve(&[flag, address]).await;
        assert_line(&format!("{flag} {address}"), &ran, 1, has);
        assert!(!address.starts_with("unix:") || !ran.stderr.contains("port 0"), "{ran:?}");
    }
    drop(first);
    // The killed process left its socket file behind, and no process uses it.
    simulated.kubefan_at(&socket).await;
}

async fn with_require_upstream_an_unusable_apiserver_ends_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let (_socket, closed) = closed_port();
    let strict = Simulated::with(SimOptions { bearer_token: Some("right".into()), ..SimOptions::default() }).await;
    let nonsense = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mail = nonsense.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = nonsense.accept().await {
            let _ = stream.write_all(b"220 mail.example ESMTP\r\n").await;
        }
    });
    for (what, server, has) in [
        ("unreachable", closed, &[&*closed.to_string(), "refused"][..]),
        ("unauthorized", strict.addr, &["401"]),
        ("no apiserver", mail, &[]),
    ] {
        let config = kubeconfig(&dir, &format!("http://{server}"), "{ token: wrong-and-secret }");
        let ran = serve(&["tuning.requireUpstream", "--kubeconfig", config.to_str().unwrap()]).await;
        assert_line(what, &ran, 1, &[has, &["tuning.requireUpstream"]].concat());
    }
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
    // The harness searches these for the token.
    kubefan.admin("/metrics").await.unwrap();
    kubefan.admin("/").await.unwrap();
}

async fn callers_tokens_are_not_passed_on_in_the_clear_without_a_flag() {
    let dir = tempfile::tempdir().unwrap();
    // Reserved for documentation: nothing answers there, and nothing is asked at the start.
    let plain = kubeconfig(&dir, "http://192.0.2.1:8080", "{}");
    let unverified = dir.path().join("unverified");
    let cluster = "cluster: { server: 'https://192.0.2.1:8080', insecure-skip-tls-verify: true }";
    let text = std::fs::read_to_string(&plain).unwrap();
    std::fs::write(&unverified, text.replace("cluster: { server: 'http://192.0.2.1:8080' }", cluster)).unwrap();
    for (file, has) in [(&plain, "http://192.0.2.1:8080 over plain http"), (&unverified, "insecure-skip-tls-verify")] {
        let ran = serve(&["--resource=pods", "--kubeconfig", file.to_str().unwrap()]).await;
        assert_eq!(ran.code, Some(1), "{has}: {ran:?}");
        assert!(
            ran.stderr.contains(has) && ran.stderr.contains("tuning.passthroughInsecureUpstream"),
            "{has}: {ran:?}"
        );
    }
    Kubefan::spawn(&plain, &["--resource=pods", "tuning.passthroughInsecureUpstream"]).await;
    Kubefan::spawn(&plain, &["--resource=pods", "--access=local-self"]).await;
}

// The harness searches the output of every kubefan for the keys and tokens of the tests.

async fn a_broken_private_key_is_never_quoted() {
    let dir = tempfile::tempdir().unwrap();
    let IssuedPem { certificate: cert, key } = Authority::new().server();
    let broken = [
        ("on one line", key.replace('\n', " ")),
        ("with escaped line feeds", key.replace('\n', "\\n")),
        ("without its end", key.lines().take(2).collect::<Vec<_>>().join("\n")),
        ("not base64", key.replacen("MIG", "M!G", 1)),
        ("encoded twice", STANDARD.encode(&key)),
    ];
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let cert_file = write("cert.pem", &cert);
    for (what, broken) in broken {
        let key_file = write("key.pem", &broken);
        let user = format!(
            "{{ client-certificate-data: {}, client-key-data: {} }}",
            STANDARD.encode(&cert),
            STANDARD.encode(&broken)
        );
        let kubeconfig = kubeconfig(&dir, "https://127.0.0.1:1", &user);
        let cases: [(&[&str], &str); 3] = [
            (&["--tls-cert-file", &cert_file, "--tls-private-key-file", &key_file], "key.pem"),
            (
                &[
                    "--peer-listen=127.0.0.1:0",
                    "--peer-cert-file",
                    &cert_file,
                    "--peer-key-file",
                    &key_file,
                    "--peer-ca-file",
                    &cert_file,
                ],
                "key.pem",
            ),
            (&["--kubeconfig", kubeconfig.to_str().unwrap()], "kubeconfig"),
        ];
        for (args, named) in cases {
            let ran = serve(&[&["--resource=pods"], args].concat()).await;
            assert_eq!(ran.code, Some(1), "{what}, {args:?}: {ran:?}");
            assert!(ran.stderr.contains(named) && ran.stderr.lines().count() == 1, "{what}: {}", ran.stderr);
        }
    }
}

async fn a_broken_token_is_never_quoted() {
    const TOKEN: &str = "of-no-one-4815162342";
    secrets::remember_token(TOKEN);
    let dir = tempfile::tempdir().unwrap();
    let simulated = Simulated::with(SimOptions { bearer_token: Some("right".into()), ..SimOptions::default() }).await;
    let file = dir.path().join("token");
    std::fs::write(&file, format!("{TOKEN}\n{TOKEN}\n")).unwrap();
    let plugin = |script: &str| {
        let args = serde_json::json!(["-c", script]);
        format!(
            "{{ exec: {{ apiVersion: client.authentication.k8s.io/v1, command: sh, interactiveMode: Never, args: {args} }} }}"
        )
    };
    let users = [
        format!("{{ token: {TOKEN}"),
        format!("{{ token: [ {TOKEN} ] }}"),
        format!("{{ token: {{ a: {TOKEN} }} }}"),
        format!("{{ token: \"{TOKEN}\\n\" }}"),
        format!("{{ token: \"\\x01{TOKEN}\" }}"),
        format!("{{ token: \"ü{TOKEN}\" }}"),
        format!("{{ token: a, token: {TOKEN} }}"),
        format!("{{ tokenFile: {} }}", file.display()),
        format!("{{ client-certificate-data: {TOKEN}, client-key-data: {TOKEN} }}"),
        format!("{{ username: a, password: {TOKEN} }}"),
        format!("{{ username: [ {TOKEN} ], password: {{ a: {TOKEN} }} }}"),
        format!("{{ auth-provider: {{ name: gcp, config: {{ access-token: {TOKEN} }} }} }}"),
        plugin(&format!("echo {TOKEN}")),
        plugin(&format!("echo {TOKEN}; echo {TOKEN} >&2; exit 1")),
        plugin(&format!("echo '{{\"status\": {{\"token\": [\"{TOKEN}\"]}}}}'")),
    ];
    for user in users {
        let kubeconfig = kubeconfig(&dir, &format!("http://{}", simulated.addr), &user);
        let ran =
            serve(&["--resource=pods", "tuning.requireUpstream", "--kubeconfig", kubeconfig.to_str().unwrap()]).await;
        assert_eq!(
            (ran.code, ran.stderr.lines().filter(|line| line.starts_with("error: ")).count()),
            (Some(1), 1),
            "{user}: {ran:?}"
        );
        println!("{user}: {}", ran.stderr);
    }
}
