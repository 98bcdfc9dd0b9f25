//! `kubefan get` and `kubefan watch` follow kubectl: names, output, selectors and exit codes. A
//! watch reconnects by itself and says so.

use std::{net::Ipv4Addr, process::Stdio};

use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    net::TcpListener,
    time::timeout,
};

use crate::{
    bad_input::assert_line,
    harness::{
        kubefan::{Kubefan, Ran, run},
        process::{free_port, send_signal},
        rig::{pod_in, pods},
        settings::Arguments,
        simulated::{Simulated, json as parse, kubeconfig},
        tests, wait,
    },
};

tests! {
    local: get_prints_as_kubectl_does, get_accepts_every_name_and_selector, get_follows_changes,
        exit_codes_distinguish_success_and_failure, a_timeout_ends_a_watch_and_names_its_version,
        a_watch_resumes_by_itself_or_starts_over_and_says_so, an_expired_version_is_an_error_unless_asked_otherwise,
        version_and_completion_need_no_server, sigterm_ends_every_command, sigterm_ends_what_waits;
}

async fn with_pods() -> (Simulated, Kubefan, String) {
    let simulated = Simulated::start().await;
    let mut other = pod_in("kube-system", "dns", "old");
    other["spec"]["nodeName"] = "n1".into();
    other["status"] = json!({ "phase": "Running" });
    simulated.sim.create(&pods(), other).unwrap();
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let server = kubefan.grpc_addr.to_string();
    (simulated, kubefan, server)
}

async fn get(server: &str, args: &[&str]) -> Ran {
    let ran = run(&[&["get"], args, &["--server", server]].concat()).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{args:?}: {ran:?}");
    ran
}

async fn get_prints_as_kubectl_does() {
    let (simulated, _kubefan, server) = with_pods().await;
    let table = get(&server, &["pods"]).await.stdout;
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 4, "{table}");
    assert_eq!(rows[0].first(), Some(&"NAME"), "{table}");
    assert_eq!(rows[0].iter().filter(|column| ["STATUS", "NODE", "AGE"].contains(*column)).count(), 3, "{table}");
    assert_eq!(rows[1..].iter().map(|row| row[0]).collect::<Vec<_>>(), ["a", "b", "c"], "{table}");
    let all = get(&server, &["pods", "-A"]).await.stdout;
    assert!(all.starts_with("NAMESPACE ") && all.contains("kube-system") && all.contains("Running"), "{all}");

    let one = parse(&get(&server, &["po", "a", "-o", "json"]).await.stdout);
    let url = format!("http://{}/api/v1/namespaces/default/pods/a", simulated.addr);
    let direct = parse(&reqwest::get(url).await.unwrap().text().await.unwrap());
    assert_eq!(one, direct);
    let list = parse(&get(&server, &["po", "-o", "json"]).await.stdout);
    assert_eq!((&list["kind"], &list["apiVersion"]), (&json!("List"), &json!("v1")));
    assert_eq!(list["items"].as_array().unwrap().len(), 3);
    assert_eq!(list["items"][0], direct);
    let yaml = get(&server, &["po", "a", "-o", "yaml"]).await.stdout;
    assert_eq!(serde_saphyr::from_str::<serde_json::Value>(&yaml).unwrap(), direct, "{yaml}");
    assert_eq!(get(&server, &["po", "-o", "name"]).await.stdout, "pod/a\npod/b\npod/c\n");
    let empty = run(&["get", "po", "-n", "kube-public", "--server", &server]).await;
    assert_eq!((empty.code, empty.stdout.as_str()), (Some(0), ""));
    assert_eq!(empty.stderr, "No resources found in kube-public namespace.\n");
}

async fn get_accepts_every_name_and_selector() {
    let (simulated, _kubefan, server) = with_pods().await;
    simulated.stage("b", "other");
    let deployment = json!({ "metadata": { "namespace": "default", "name": "web" }, "spec": {} });
    let deployments = kubefan_model::GroupVersionResource::new("apps", "v1", "deployments");
    simulated.sim.create(&deployments, deployment).unwrap();
    let cases: [(&[&str], &str); 14] = [
        (&["po"], "pod/a\npod/b\npod/c\n"),
        (&["pod", "a"], "pod/a\n"),
        (&["Pod/a", "pods/c"], "pod/a\npod/c\n"),
        (&["pods.v1.", "a"], "pod/a\n"),
        (&["deploy"], "deployment.apps/web\n"),
        (&["deployments.apps"], "deployment.apps/web\n"),
        (&["deploy/web", "po/a"], "deployment.apps/web\npod/a\n"),
        (&["ns", "default"], "namespace/default\n"),
        (&["po", "-n", "kube-system"], "pod/dns\n"),
        (&["po", "-A", "-l", "stage=old"], "pod/dns\n"),
        (&["po", "-l", "stage in (new)"], "pod/a\npod/c\n"),
        (&["po", "-l", "stage!=new"], "pod/b\n"),
        (&["po", "-A", "--field-selector", "spec.nodeName=n1,status.phase=Running"], "pod/dns\n"),
        (&["po", "--field-selector", "metadata.name!=a", "-l", "stage=new"], "pod/c\n"),
    ];
    for (args, expected) in cases {
        let ran = get(&server, &[args, &["-o", "name"]].concat()).await;
        assert_eq!(ran.stdout, expected, "{args:?}");
    }
}

/// A running command whose output is read line by line.
struct Running {
    child: tokio::process::Child,
    stdout: Lines<BufReader<tokio::process::ChildStdout>>,
    stderr: Lines<BufReader<tokio::process::ChildStderr>>,
    _arguments: Arguments,
}

impl Running {
    fn start(args: &[&str]) -> Running {
        let arguments = Arguments::new(args);
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_kubefan"));
        command.args(&arguments.args).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        Running { child, stdout, stderr, _arguments: arguments }
    }

    async fn line(&mut self) -> String {
        let line = tokio::time::timeout(wait::SOON, self.stdout.next_line());
        line.await.expect("no line arrived").unwrap().expect("the command has ended")
    }

    async fn lines(&mut self, count: usize) -> Vec<String> {
        let mut lines = Vec::new();
        for _ in 0..count {
            lines.push(self.line().await);
        }
        lines
    }

    /// The next line on stderr that contains `text`. Earlier lines are dropped.
    async fn stderr_line(&mut self, text: &str) -> String {
        let found = async {
            loop {
                let line = self.stderr.next_line().await.unwrap().expect("the command has ended");
                if line.contains(text) {
                    return line;
                }
            }
        };
        // A watch that reconnects backs off, for up to a minute.
        timeout(4 * wait::SOON, found).await.unwrap_or_else(|_| panic!("no line with {text:?} on stderr"))
    }
}

async fn get_follows_changes() {
    let (simulated, _kubefan, server) = with_pods().await;
    let mut names = Running::start(&["get", "po", "-w", "-o", "name", "-l", "stage=new", "--server", &server]);
    assert_eq!(names.lines(3).await, ["pod/a", "pod/b", "pod/c"]);
    let mut table = Running::start(&["get", "po", "-w", "--server", &server]);
    assert_eq!(table.lines(4).await.len(), 4);
    simulated.create("d");
    simulated.stage("b", "other");
    assert_eq!(names.lines(2).await, ["pod/d", "pod/b"], "an object that leaves the selector is shown once more");
    let rows = table.lines(2).await;
    assert!(rows[0].starts_with("d ") && rows[1].starts_with("b "), "{rows:?}");
}

async fn exit_codes_distinguish_success_and_failure() {
    let (simulated, _kubefan, server) = with_pods().await;
    let partly = run(&["get", "po", "a", "nope", "-o", "name", "--server", &server]).await;
    assert_eq!((partly.code, partly.stdout.as_str()), (Some(1), "pod/a\n"), "{partly:?}");
    assert!(partly.stderr.contains("\"nope\" not found"), "{partly:?}");
    // As in a pipe to `head`, the reader closes the pipe early.
    let mut running = Running::start(&["watch", "po", "-o", "name", "--server", &server]);
    running.lines(3).await;
    let Running { mut child, stdout, .. } = running;
    drop(stdout);
    simulated.create("d");
    let ended = wait::until("the command to end", wait::SOON, || {
        let ended = child.try_wait().unwrap();
        async move { ended }
    })
    .await;
    assert_eq!(ended.code(), Some(0));
}

/// Process 1 of a container is ended by no signal that it does not handle.
async fn sigterm_ends_every_command() {
    let (_simulated, _kubefan, server) = with_pods().await;
    for command in ["watch", "get"] {
        let args = [command, "pods", "-o", "name", "--server", &server];
        let mut running = Running::start(&[&args[..], if command == "get" { &["--watch"] } else { &[] }].concat());
        running.lines(3).await;
        send_signal(running.child.id().unwrap(), "TERM");
        if command == "watch" {
            running.stderr_line("to continue from here: --resource-version=").await;
        }
        assert_eq!(running.child.wait().await.unwrap().code(), Some(143), "{command}");
    }
}

async fn sigterm_ends_what_waits() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let kubeconfig = kubeconfig(&dir, &format!("http://{}", silent.local_addr().unwrap()), "{}");
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let listen = ["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];
    let mut start =
        Running::start(&[&["serve", &kubeconfig, "--resource=pods", "tuning.requireUpstream"], &listen[..]].concat());
    let _never_answered = silent.accept().await.unwrap();
    send_signal(start.child.id().unwrap(), "TERM");
    assert_eq!(start.child.wait().await.unwrap().code(), Some(0), "the start of serve");

    for args in [&["kubeconfig", "--server=https://localhost"][..], &["get", "pods"], &["watch", "pods"], &["top"]] {
        let command = &mut tokio::process::Command::new(env!("CARGO_BIN_EXE_kubefan"));
        command.args(args).arg("--token=-").env_clear().kill_on_drop(true);
        let mut waiting = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        // `wait` closes a stdin that the child still has, and the command would read an empty
        // token.
        let _stdin = waiting.stdin.take().unwrap();
        let pid = waiting.id().unwrap();
        wait::until("the signal is handled", wait::SOON, async || handles_sigterm(pid).then_some(())).await;
        send_signal(pid, "TERM");
        let end = timeout(wait::SOON, waiting.wait()).await.unwrap_or_else(|_| panic!("{args:?} waits on"));
        assert_eq!(end.unwrap().code(), Some(143), "{args:?}");
    }
}

/// Whether a process has a handler of SIGTERM: process 1 ignores it otherwise.
fn handles_sigterm(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> 14 & 1 == 1)
}

async fn a_timeout_ends_a_watch_and_names_its_version() {
    let (simulated, _kubefan, server) = with_pods().await;
    let args = ["watch", "pods", "-o", "name", "--server", &server, "--timeout=10s"];
    let watched = run(&args).await;
    assert_eq!((watched.code, &*watched.stdout), (Some(0), "pod/a\npod/b\npod/c\n"), "{watched:?}");
    assert!(watched.stderr.starts_with("to continue from here: --resource-version="), "{watched:?}");
    let version = watched.stderr.trim().rsplit('=').next().unwrap();
    simulated.create("later");
    let more = run(&[&args[..], &["--resource-version", version]].concat()).await;
    assert_eq!(more.stdout, "pod/later\n", "{more:?}");
}

/// The kubefan behind a watch is killed and started again at its address, twice.
async fn a_watch_resumes_by_itself_or_starts_over_and_says_so() {
    let simulated = Simulated::start().await;
    let address = format!("127.0.0.1:{}", free_port());
    let start = async || {
        let kubefan = Kubefan::spawn_at(&simulated.kubeconfig(), &address, &["--resource=pods"]).await;
        kubefan.ready().await;
        kubefan
    };
    let kubefan = start().await;
    let mut watch = Running::start(&["watch", "pods", "-o", "name", "--server", &address]);
    assert_eq!(watch.lines(3).await, ["pod/a", "pod/b", "pod/c"]);
    simulated.create("before");
    assert_eq!(watch.line().await, "pod/before");
    drop(kubefan);
    watch.stderr_line("connection lost").await;
    simulated.create("between");
    let kubefan = start().await;
    watch.stderr_line("reconnected; continuing from version ").await;
    assert_eq!(watch.line().await, "pod/between");
    simulated.create("after");
    assert_eq!(watch.line().await, "pod/after", "and nothing is printed twice");

    drop(kubefan);
    watch.stderr_line("connection lost").await;
    simulated.create("missed");
    simulated.sim.compact();
    let _kubefan = start().await;
    let said = watch.stderr_line("starting over with a snapshot").await;
    assert!(!said.contains("nothing was missed"), "{said}");
    let all = ["pod/a", "pod/after", "pod/b", "pod/before", "pod/between", "pod/c", "pod/missed"];
    assert_eq!(watch.lines(all.len()).await, all);
    simulated.create("later");
    assert_eq!(watch.line().await, "pod/later");
}

async fn an_expired_version_is_an_error_unless_asked_otherwise() {
    let simulated = Simulated::start().await;
    simulated.sim.compact();
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let server = kubefan.grpc_addr.to_string();
    let watch = ["watch", "pods", "-s", &server, "-o=name", "--timeout=10s"];
    let future = ["--resource-version", "99999999"];
    let get = ["get", "pods", "-s", &server];
    for (args, says) in [
        // A silent restart would skip the events that the user wants.
        (
            [&watch[..], &["--resource-version=1"]].concat(),
            "Error from server (Expired): too old resource version: 1 (",
        ),
        ([&watch[..], &["--resource-version=1"]].concat(), "--on-expired=restart"),
        // The connection is not lost, so the command does not retry.
        ([&watch[..], &future].concat(), "version 99999999 belongs to another history"),
        ([&get[..], &future].concat(), "too large resource version: 99999999"),
    ] {
        assert_line(&args.join(" "), &run(&args).await, 1, &[says]);
    }
    let over = run(&[&watch[..], &["--resource-version=1", "--on-expired=restart", "--on-lag=expire"]].concat()).await;
    assert_eq!((over.code, over.stdout.lines().count()), (Some(0), 3), "{over:?}");
    let admin = run(&["get", "pods", "-s", &kubefan.admin_addr.to_string()]).await;
    assert!(admin.stderr.contains("does not serve gRPC") && admin.stderr.contains("admin port"), "{admin:?}");
}

async fn version_and_completion_need_no_server() {
    let version = run(&["version"]).await;
    assert_eq!((version.code, version.stderr.as_str()), (Some(0), ""));
    assert!(version.stdout.contains(env!("CARGO_PKG_VERSION")), "{version:?}");
    for shell in ["bash", "zsh", "fish"] {
        let completion = run(&["completion", shell]).await;
        assert_eq!(completion.code, Some(0));
        assert!(completion.stdout.contains("kubefan") && completion.stdout.contains("serve"), "{shell}");
    }
    assert_eq!(run(&["completion", "tcsh2"]).await.code, Some(2));
    let help = run(&["serve", "--help"]).await;
    assert!(help.code == Some(0) && help.stdout.contains("--drain-timeout") && help.stdout.contains("[default: 10s]"));
}
