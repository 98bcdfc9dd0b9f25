//! `kubefan bench` as a script uses it: one JSON object with every field per row, tables by
//! default, one line per error. The measured values are not checked, because they depend on the
//! machine.

use std::{path::Path, time::Duration};

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{apiserver::ApiServer, kubefan, process::Process, tests, wait};

tests! {
    apiserver slow_release: a_real_apiserver_is_measured_beside_kubefan, a_stopped_measurement_leaves_no_pods;
    local slow_release: every_scenario_reports_every_field_and_ends_in_the_right_state,
        two_servers_are_measured_side_by_side,
        streams_share_connections_over_tls, mistakes_are_one_error_with_the_remedy,
        attacks_are_measured_beside_honest_clients, agents_go_live_from_scratch_and_after_an_outage,
        a_killed_measurement_leaves_no_process;
}

const MINUTE: Duration = Duration::from_secs(60);

/// Small values, because the machine runs other tests too.
const SMALL: [&str; 11] = [
    "--objects=40",
    "--subscribers=6",
    "--duration=500ms",
    "--runs=1",
    "--clients=3",
    "--views=4",
    "--missed=5",
    "--stalled=2",
    "--rate=50",
    "--batch=1,4",
    "--seed=7",
];

async fn bench(args: &[&str]) -> kubefan::Ran {
    let flag = |arg: &str| arg.split('=').next().map(str::to_owned);
    let small = SMALL.into_iter().filter(|small| args.iter().all(|arg| flag(arg) != flag(small)));
    kubefan::run(&["bench"].into_iter().chain(small).chain(args.iter().copied()).collect::<Vec<_>>()).await
}

fn rows(ran: &kubefan::Ran) -> Vec<Value> {
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let row = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    ran.stdout.lines().map(row).collect()
}

/// Whether all of these fields are numbers.
fn are_set(row: &Value, fields: &[&str]) -> bool {
    fields.iter().all(|field| row[*field].as_f64().is_some())
}

fn of<'a>(rows: &'a [Value], scenario: &str, server: &str) -> Vec<&'a Value> {
    rows.iter().filter(|row| row["scenario"] == scenario && row["server"] == server).collect()
}

fn variants(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["variant"].as_str().unwrap()).collect()
}

async fn every_scenario_reports_every_field_and_ends_in_the_right_state() {
    // Long enough for deliveries within it on a busy machine: without any, a share is null. At this
    // rate a stalled subscriber falls behind.
    let ran = bench(&["--duration=2s", "--rate=200", "-o", "json"]).await;
    let rows = rows(&ran);
    for row in &rows {
        let fields = "scenario variant server subscribers batch runs cpu_us_per_delivery floor_cpu_us_per_delivery floor_share \
                      deliveries_per_second slowest_subscriber_share bytes_per_delivery rss_bytes_per_subscriber spread";
        for field in fields.split(' ') {
            assert!(row.as_object().unwrap().contains_key(field), "no {field} in {row}");
        }
        for part in ["p50", "p99", "max"] {
            assert!(row["latency_ms"].as_object().unwrap().contains_key(part), "{row}");
        }
        assert_eq!((&row["server"], &row["runs"]), (&"kubefan".into(), &1.into()), "{row}");
    }
    let of = |scenario| of(&rows, scenario, "kubefan");
    // One row per batch size, number of clients and kind of selector.
    let counts = ["fanout", "paced", "snapshot", "selectors", "idle", "resume-storm", "stalled"];
    assert_eq!(counts.map(|name| of(name).len()), [2, 1, 2, 2, 1, 1, 3]);
    for row in of("fanout").into_iter().chain(of("paced")) {
        let fields = ["cpu_us_per_delivery", "floor_share", "deliveries_per_second", "slowest_subscriber_share"];
        assert!(are_set(row, &fields) && are_set(&row["latency_ms"], &["p50", "p99", "max"]), "{row}");
        // The JSON of a pod and its envelope.
        assert!((3_000.0..8_000.0).contains(&row["bytes_per_delivery"].as_f64().unwrap()), "{row}");
    }
    for row in of("snapshot").into_iter().chain(of("resume-storm")) {
        assert!(are_set(row, &["cpu_us_per_delivery", "floor_share", "cpu_ms_per_client", "seconds"]), "{row}");
    }
    assert!(of("selectors").iter().all(|row| are_set(row, &["cpu_us_per_event"])), "{rows:?}");
    let idle = of("idle")[0];
    assert!(are_set(idle, &["rss_bytes_per_subscriber"]) && idle["floor_share"].is_null(), "{idle}");
    // The scenario itself compares the subscribers' state with the apiserver's list, and fails if
    // they differ.
    let stalled: Vec<Value> = of("stalled").into_iter().cloned().collect();
    assert_eq!(variants(&stalled), ["all read", "some stalled", "caught up"]);
    for row in &stalled[..2] {
        assert!(are_set(row, &["rss_bytes_max"]) && are_set(&row["latency_ms"], &["p50", "p99"]), "{row}");
    }
    assert!(are_set(&stalled[1], &["p99_ratio"]) && are_set(&stalled[2], &["seconds"]), "{stalled:?}");
    assert_eq!(stalled[2]["catch_ups"], 2.0, "both subscribers fell behind: {stalled:?}");
}

async fn a_real_apiserver_is_measured_beside_kubefan() {
    let api = ApiServer::shared().await;
    let kubeconfig = api.kubeconfig();
    let pid = api.pid().to_string();
    let cluster = ["--kubeconfig", kubeconfig.to_str().unwrap(), "--apiserver-pid", &pid, "-o", "json"];
    let ran = bench(&[&["fanout", "snapshot", "selectors", "resume-storm"], &cluster[..]].concat()).await;
    let rows = rows(&ran);
    for server in ["kubefan", "kube-apiserver"] {
        let of = |scenario| of(&rows, scenario, server);
        let counts = ["fanout", "snapshot", "selectors", "resume-storm"].map(|name| of(name).len());
        assert_eq!(counts, [2, 2, 2, 1], "{server}");
        for row in of("fanout").into_iter().chain(of("snapshot")) {
            assert!(are_set(row, &["cpu_us_per_delivery", "floor_cpu_us_per_delivery"]), "{row}");
            // Pods of a size that is usual in a cluster.
            assert!((3_000.0..9_000.0).contains(&row["bytes_per_delivery"].as_f64().unwrap()), "{row}");
        }
    }
    // The bench deletes the objects that it created.
    let namespace = ran.stderr.lines().find_map(|line| line.strip_prefix("  in the namespace ")).unwrap();
    let pods = api.get_json(&format!("/api/v1/namespaces/{namespace}/pods")).await;
    assert_eq!(pods["items"].as_array().map(Vec::len), Some(0), "{pods}");
}

/// A measurement that would take a minute.
fn long(dir: &TempDir, args: &[&str]) -> Process {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command.args(["bench", "idle", "--subscribers=2", "--objects=10", "--duration=60s"]).args(args);
    Process::spawn("kubefan bench", &mut command, &dir.path().join("log"))
}

async fn a_stopped_measurement_leaves_no_pods() {
    let api = ApiServer::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = api.kubeconfig();
    let pid = api.pid().to_string();
    let mut bench = long(&dir, &["--kubeconfig", kubeconfig.to_str().unwrap(), "--apiserver-pid", &pid]);
    let namespace = wait::until("the namespace", MINUTE, || async {
        bench.log().lines().find_map(|line| line.strip_prefix("  in the namespace ").map(str::to_owned))
    })
    .await;
    bench.terminate();
    bench.ended(MINUTE).await;
    let pods = api.get_json(&format!("/api/v1/namespaces/{namespace}/pods")).await;
    assert_eq!(pods["items"].as_array().map(Vec::len), Some(0), "{pods}");
    let status = api.get_json(&format!("/api/v1/namespaces/{namespace}")).await;
    assert_eq!(status["status"]["phase"], "Terminating", "{status}");
}

async fn two_servers_are_measured_side_by_side() {
    let kubefan = env!("CARGO_BIN_EXE_kubefan");
    let args = ["fanout", "--batch=2", "--runs=2", "--against", kubefan];
    let ran = bench(&[&args[..], &["-o", "json"]].concat()).await;
    let rows = rows(&ran);
    let servers = rows.iter().map(|row| (row["server"].as_str().unwrap(), row["runs"].as_i64().unwrap()));
    assert_eq!(servers.collect::<Vec<_>>(), [("kubefan", 2), (kubefan, 2)]);
    // The default output is a table.
    let ran = bench(&args).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let lines: Vec<&str> = ran.stdout.trim().lines().collect();
    assert_eq!(lines[0], "fanout: every subscriber receives every change, at full speed");
    assert!(lines[1].starts_with("SERVER") && lines[1].contains("share"), "{ran:?}");
    // Below each row is the range of its runs.
    assert!(lines[2].starts_with("kubefan") && lines[4].starts_with(kubefan) && lines.len() == 6, "{ran:?}");
    assert!(ran.stderr.contains("fanout 1/2: kubefan"), "{ran:?}");
}

async fn streams_share_connections_over_tls() {
    let ran =
        bench(&["paced", "fanout", "--tls", "--streams-per-connection=4", "--object-bytes=1536", "-o", "json"]).await;
    for row in rows(&ran) {
        assert_eq!((&row["streams_per_connection"], &row["tls"]), (&4.into(), &true.into()), "{row}");
        assert!((1_500.0..1_900.0).contains(&row["bytes_per_delivery"].as_f64().unwrap()), "{row}");
    }
}

async fn mistakes_are_one_error_with_the_remedy() {
    let limited = format!("ulimit -n 300; exec {} bench fanout --subscribers 1000", env!("CARGO_BIN_EXE_kubefan"));
    let mut command = tokio::process::Command::new("sh");
    let output = tokio::time::timeout(MINUTE, command.args(["-c", &limited]).kill_on_drop(true).output());
    let output = output.await.unwrap().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!((output.status.code(), errors.len()), (Some(1), 1), "{stderr}");
    assert!(errors[0].contains("ulimit -n 1128") && errors[0].contains("the limit is 300"), "{stderr}");
    for (args, code, text) in [
        (
            &["fanout", "--against", "/does/not/exist"][..],
            1,
            "error: fanout, exist: exist did not start: /does/not/exist: No such file",
        ),
        (&["fanout", "--batch=0"], 2, "--batch"),
        (&["hostile", "--attack", "shouting"], 2, "rapid-reset"),
    ] {
        let ran = bench(args).await;
        assert!(ran.code == Some(code) && ran.stderr.contains(text), "{args:?}: {ran:?}");
    }
}

async fn attacks_are_measured_beside_honest_clients() {
    let names = [
        "selector-lists",
        "half-open-calls",
        "unread-pipelines",
        "unread-pings",
        "rapid-reset",
        "half-tls-hellos",
        "server-names-slow-log",
        "unknown-tokens",
    ];
    let mut args = vec!["hostile", "--honest=4", "--duration=1s", "-o", "json"];
    args.extend(names.iter().flat_map(|name| ["--attack", name]));
    let ran = bench(&args).await;
    let rows = rows(&ran);
    assert_eq!(variants(&rows), names);
    for row in &rows {
        let fields = [
            "baseline_p99_ms",
            "p99_ratio",
            "livez_ms_max",
            "log_bytes_per_second",
            "rss_bytes_max",
            "memory_bytes_max",
        ];
        assert!(are_set(row, &fields), "{row}");
        assert_eq!(row["honest_requests_refused"], 0.0, "{row}");
        assert!(row["note"].as_str().is_some_and(|note| note.contains("kB read")), "{row}");
    }
}

async fn agents_go_live_from_scratch_and_after_an_outage() {
    let ran = bench(&["agents", "--nodes=4", "--objects=40,80", "-o", "json"]).await;
    let rows = rows(&ran);
    let mut expected = Vec::new();
    for objects in [40, 80] {
        for name in ["gRPC", "JSON", "protobuf"] {
            expected.extend([("from scratch", name, objects), ("after an outage", name, objects)]);
        }
    }
    assert_eq!(rows.len(), expected.len(), "{rows:?}");
    for (row, (start, name, objects)) in rows.iter().zip(expected) {
        assert_eq!((&row["variant"], &row["objects"]), (&format!("{name}, {start}").into(), &objects.into()), "{row}");
        assert!(are_set(row, &["cpu_ms_per_client", "seconds", "restarted"]), "{row}");
    }
}

async fn a_killed_measurement_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = long(&dir, &[]);
    let pid = bench.pid();
    let children = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let texts = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        texts.collect::<String>().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    // The child has become the server when its command line no longer has the bench's marker.
    let is_server = |child: &String| {
        std::fs::read_to_string(format!("/proc/{child}/cmdline")).is_ok_and(|line| !line.contains("bench-child"))
    };
    let started = || async { children().into_iter().find(is_server) };
    let server = wait::until("the server under test", MINUTE, started).await;
    bench.kill9();
    let is_gone = || async { (!Path::new("/proc").join(&server).exists()).then_some(()) };
    wait::until("the server to end", MINUTE, is_gone).await;
}
