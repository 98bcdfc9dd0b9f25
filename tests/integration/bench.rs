//! `kubefan bench` as a script uses it: one JSON object with every field per row, tables by
//! default, one line per error. The measured values are not checked, because they depend on the
//! machine.

use std::{path::Path, time::Duration};

use serde_json::Value;

use crate::harness::{apiserver::ApiServer, kubefan, process::Process, tests, wait};

tests! {
    apiserver full: a_real_apiserver_is_measured_beside_kubefan, a_stopped_measurement_leaves_no_pods;
    local full: every_scenario_reports_every_field, a_stalled_subscriber_catches_up_to_the_right_state,
        the_default_output_is_a_table, streams_share_connections_over_tls,
        too_many_subscribers_are_refused_with_the_remedy, a_program_that_does_not_start_is_named,
        two_servers_are_measured_side_by_side, attacks_are_measured_beside_honest_clients,
        agents_go_live_from_scratch_and_after_an_outage, a_killed_measurement_leaves_no_process;
}

/// Small values, because the machine runs other tests too.
const SMALL: [&str; 11] = [
    "--objects=40",
    "--subscribers=6",
    "--duration=100ms",
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
    ran.stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

async fn every_scenario_reports_every_field() {
    // Long enough for deliveries within it on a busy machine: without any, a share is null.
    let ran = bench(&["--duration=1s", "-o", "json"]).await;
    let rows = rows(&ran);
    let of = |scenario: &str| rows.iter().filter(|row| row["scenario"] == scenario).collect::<Vec<_>>();
    for row in &rows {
        let fields = row.as_object().unwrap();
        for field in [
            "scenario",
            "variant",
            "server",
            "subscribers",
            "batch",
            "runs",
            "cpu_us_per_delivery",
            "floor_cpu_us_per_delivery",
            "floor_share",
            "deliveries_per_second",
            "slowest_subscriber_share",
            "bytes_per_delivery",
            "rss_bytes_per_subscriber",
            "spread",
        ] {
            assert!(fields.contains_key(field), "no {field} in {row}");
        }
        for part in ["p50", "p99", "max"] {
            assert!(row["latency_ms"].as_object().unwrap().contains_key(part), "{row}");
        }
        assert_eq!((&row["server"], &row["runs"]), (&"kubefan".into(), &1.into()), "{row}");
    }
    // One row per batch size, number of clients and kind of selector.
    let counts = ["fanout", "paced", "snapshot", "selectors", "idle", "resume-storm", "stalled"];
    assert_eq!(counts.map(|name| of(name).len()), [2, 1, 2, 2, 1, 1, 3]);

    let is_set = |row: &Value, fields: &[&str]| fields.iter().all(|field| row[*field].as_f64().is_some());
    for row in of("fanout").into_iter().chain(of("paced")) {
        let fields = ["cpu_us_per_delivery", "floor_share", "deliveries_per_second", "slowest_subscriber_share"];
        assert!(is_set(row, &fields) && is_set(&row["latency_ms"], &["p50", "p99", "max"]), "{row}");
        // The JSON of a pod and its envelope.
        assert!((3_000.0..8_000.0).contains(&row["bytes_per_delivery"].as_f64().unwrap()), "{row}");
    }
    for row in of("snapshot").into_iter().chain(of("resume-storm")) {
        assert!(is_set(row, &["cpu_us_per_delivery", "floor_share", "cpu_ms_per_client", "seconds"]), "{row}");
    }
    assert!(of("selectors").iter().all(|row| is_set(row, &["cpu_us_per_event"])), "{rows:?}");
    assert!(is_set(of("idle")[0], &["rss_bytes_per_subscriber"]) && of("idle")[0]["floor_share"].is_null(), "{rows:?}");
    for row in &of("stalled")[..2] {
        assert!(is_set(row, &["rss_bytes_max"]) && is_set(&row["latency_ms"], &["p50", "p99"]), "{row}");
    }
    assert!(
        is_set(of("stalled")[1], &["p99_ratio"]) && is_set(of("stalled")[2], &["catch_ups", "seconds"]),
        "{rows:?}"
    );
}

async fn a_stalled_subscriber_catches_up_to_the_right_state() {
    // The scenario itself compares the subscribers' state with the apiserver's list, and fails if
    // they differ.
    let ran = bench(&["stalled", "--duration=2s", "--rate=200", "-o", "json"]).await;
    let rows = rows(&ran);
    let names: Vec<_> = rows.iter().map(|row| row["variant"].as_str().unwrap()).collect();
    assert_eq!(names, ["all read", "some stalled", "caught up"]);
    assert_eq!(rows[2]["catch_ups"], 2.0, "both subscribers fell behind: {rows:?}");
}

async fn a_real_apiserver_is_measured_beside_kubefan() {
    let api = ApiServer::shared().await;
    let (kubeconfig, pid) = (api.kubeconfig(), api.pid().to_string());
    let cluster = ["--kubeconfig", kubeconfig.to_str().unwrap(), "--apiserver-pid", &pid, "-o", "json"];
    let ran = bench(&[&["fanout", "snapshot", "selectors", "resume-storm"], &cluster[..]].concat()).await;
    let rows = rows(&ran);
    for server in ["kubefan", "kube-apiserver"] {
        let of = |scenario: &str| {
            let is = |row: &&Value| row["scenario"] == scenario && row["server"] == server;
            rows.iter().filter(is).collect::<Vec<_>>()
        };
        let counts = ["fanout", "snapshot", "selectors", "resume-storm"].map(|name| of(name).len());
        assert_eq!(counts, [2, 2, 2, 1], "{server}");
        for row in of("fanout").into_iter().chain(of("snapshot")) {
            let figures = ["cpu_us_per_delivery", "floor_cpu_us_per_delivery", "bytes_per_delivery"];
            assert!(figures.iter().all(|figure| row[*figure].is_number()), "{row}");
            // Pods of a size that is usual in a cluster.
            assert!((3_000.0..9_000.0).contains(&row["bytes_per_delivery"].as_f64().unwrap()), "{row}");
        }
    }
    // The bench deletes what it created.
    let namespace = ran.stderr.lines().find_map(|line| line.strip_prefix("  in the namespace ")).unwrap();
    let pods = api.get_json(&format!("/api/v1/namespaces/{namespace}/pods")).await;
    assert_eq!(pods["items"].as_array().map(Vec::len), Some(0), "{pods}");
}

async fn a_stopped_measurement_leaves_no_pods() {
    let api = ApiServer::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command.args(["bench", "idle", "--subscribers=2", "--objects=10", "--duration=60s", "--kubeconfig"]);
    command.arg(api.kubeconfig()).args(["--apiserver-pid", &api.pid().to_string()]);
    let mut bench = Process::spawn("kubefan bench", &mut command, &dir.path().join("log"));
    let said = |process: &Process| {
        process.log().lines().find_map(|line| line.strip_prefix("  in the namespace ").map(str::to_owned))
    };
    let namespace = wait::until("the namespace", Duration::from_secs(60), || async { said(&bench) }).await;
    bench.terminate();
    bench.ended(Duration::from_secs(60)).await;
    let pods = api.get_json(&format!("/api/v1/namespaces/{namespace}/pods")).await;
    assert_eq!(pods["items"].as_array().map(Vec::len), Some(0), "{pods}");
    let status = api.get_json(&format!("/api/v1/namespaces/{namespace}")).await;
    assert_eq!(status["status"]["phase"], "Terminating", "{status}");
}

async fn the_default_output_is_a_table() {
    let ran = bench(&["fanout", "--batch=2"]).await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let lines: Vec<&str> = ran.stdout.trim().lines().collect();
    assert_eq!(lines[0], "fanout: every subscriber receives every change, at full speed");
    assert!(lines[1].starts_with("SERVER") && lines[1].contains("share"), "{ran:?}");
    assert!(lines[2].starts_with("kubefan") && lines.len() == 3, "{ran:?}");
    assert!(ran.stderr.contains("fanout 1/1: kubefan"), "{ran:?}");
}

async fn streams_share_connections_over_tls() {
    let ran =
        bench(&["paced", "fanout", "--tls", "--streams-per-connection=4", "--object-bytes=1536", "-o", "json"]).await;
    for row in rows(&ran) {
        assert_eq!((&row["streams_per_connection"], &row["tls"]), (&4.into(), &true.into()), "{row}");
        assert!((1_500.0..1_900.0).contains(&row["bytes_per_delivery"].as_f64().unwrap()), "{row}");
    }
}

async fn too_many_subscribers_are_refused_with_the_remedy() {
    let mut command = tokio::process::Command::new("sh");
    let kubefan = env!("CARGO_BIN_EXE_kubefan");
    command.args(["-c", &format!("ulimit -n 300; exec {kubefan} bench fanout --subscribers 1000")]).kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(60), command.output()).await.unwrap().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let error: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        error.len() == 1 && error[0].contains("ulimit -n 1128") && error[0].contains("the limit is 300"),
        "{stderr}"
    );
}

async fn a_program_that_does_not_start_is_named() {
    let ran = bench(&["fanout", "--against", "/does/not/exist"]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("error: fanout, exist: exist did not start: /does/not/exist: No such file"), "{ran:?}");
    let ran = bench(&["fanout", "--batch=0"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
}

async fn two_servers_are_measured_side_by_side() {
    let kubefan = env!("CARGO_BIN_EXE_kubefan");
    let ran = bench(&["fanout", "--batch=2", "--runs=2", "--against", kubefan, "-o", "json"]).await;
    let rows = rows(&ran);
    let servers: Vec<_> =
        rows.iter().map(|row| (row["server"].as_str().unwrap(), row["runs"].as_i64().unwrap())).collect();
    assert_eq!(servers, [("kubefan", 2), (kubefan, 2)]);
}

async fn attacks_are_measured_beside_honest_clients() {
    let names = ["selector-lists", "half-open-calls", "unread-pipelines", "rapid-reset", "half-tls-hellos"];
    let mut args = vec!["hostile", "--honest=4", "--duration=1s", "-o", "json"];
    args.extend(names.iter().flat_map(|name| ["--attack", name]));
    let ran = bench(&args).await;
    let rows = rows(&ran);
    assert_eq!(rows.iter().map(|row| row["variant"].as_str().unwrap()).collect::<Vec<_>>(), names);
    for row in &rows {
        let is_set = |field: &str| row[field].as_f64().is_some();
        let fields = ["baseline_p99_ms", "p99_ratio", "livez_ms_max", "rss_bytes_max", "memory_bytes_max"];
        assert!(fields.into_iter().all(is_set), "{row}");
        assert_eq!(row["honest_requests_refused"], 0.0, "{row}");
        assert!(row["note"].as_str().is_some_and(|note| note.contains("kB read")), "{row}");
    }
    let ran = bench(&["hostile", "--attack", "shouting"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("rapid-reset"), "{ran:?}");
}

async fn agents_go_live_from_scratch_and_after_an_outage() {
    let ran = bench(&["agents", "--nodes=4", "--objects=40,80", "-o", "json"]).await;
    let rows = rows(&ran);
    let names: Vec<_> = rows.iter().map(|row| row["variant"].as_str().unwrap()).collect();
    let each = ["gRPC", "JSON", "protobuf"]
        .into_iter()
        .flat_map(|name| [format!("{name}, from scratch"), format!("{name}, after an outage")]);
    let each: Vec<_> = each.collect();
    assert_eq!(names, [&each[..], &each].concat());
    for (row, objects) in rows.iter().zip([40; 6].into_iter().chain([80; 6])) {
        assert_eq!(row["objects"], objects, "{row}");
        let is_set = |field: &str| row[field].as_f64().is_some();
        assert!(["cpu_ms_per_client", "seconds", "restarted"].into_iter().all(is_set), "{row}");
    }
}

async fn a_killed_measurement_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command.args(["bench", "idle", "--subscribers=2", "--objects=10", "--duration=60s"]);
    let mut bench = Process::spawn("kubefan bench", &mut command, &dir.path().join("log"));
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
    let server = wait::until("the server under test", Duration::from_secs(60), started).await;
    bench.kill9();
    let is_gone = || async { (!Path::new("/proc").join(&server).exists()).then_some(()) };
    wait::until("the server to end", Duration::from_secs(60), is_gone).await;
}
