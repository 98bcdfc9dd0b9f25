//! `kubefan demo` as a script uses it: plain lines, the summary that compares both parts, and an
//! exit code.

use std::{net::TcpListener, path::Path, process::Command, time::Duration};

use crate::harness::{process::Process, tests, wait};

tests! {
    local slow_release: the_demo_ends_by_itself_with_the_summary, a_signal_ends_the_demo_with_the_summary,
        a_port_in_use_is_named_with_the_flag_that_changes_it;
}

/// Far more than the demo's own duration: it also fills the apiserver and connects all subscribers,
/// on a machine that runs other tests too.
const ENDED_AT_MOST: Duration = Duration::from_secs(120);

fn demo(dir: &Path, args: &[&str]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command.args(["demo", "--objects", "300", "--subscribers", "20", "--rate", "100"]).args(args);
    Process::spawn("kubefan demo", &mut command, &dir.join("log"))
}

const ANY_PORT: [&str; 4] = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];

/// The two columns of a row of the table.
fn row(printed: &str, label: &str) -> (String, String) {
    let line =
        printed.lines().find(|line| line.starts_with(label)).unwrap_or_else(|| panic!("no {label:?} in:\n{printed}"));
    let words: Vec<&str> = line[label.len()..].split_whitespace().collect();
    match words[..] {
        [direct, kubefan] => (direct.to_owned(), kubefan.to_owned()),
        _ => panic!("not two numbers: {line:?}"),
    }
}

async fn the_demo_ends_by_itself_with_the_summary() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = demo(dir.path(), &[&ANY_PORT[..], &["--duration", "3s"]].concat());
    let status = demo.ended(ENDED_AT_MOST).await;
    let printed = demo.log();
    assert!(status.success(), "{status}:\n{printed}");

    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines[0].starts_with("simulated apiserver on 127.0.0.1:"), "{printed}");
    let position = |start: &str| {
        lines.iter().position(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no {start:?} in:\n{printed}"))
    };
    let direct = position("direct: 20 subscribers watch the apiserver itself");
    let kubefan = position("through kubefan: the same 20 subscribers watch kubefan; try from another terminal:");
    assert!(direct < kubefan && lines[kubefan + 1].contains(" get pods -A"), "{printed}");
    assert!(!printed.contains('\u{1b}'), "{printed:?}");

    assert_eq!(row(&printed, "watches on pods, open at the apiserver"), ("20".to_owned(), "1".to_owned()));
    let (direct, kubefan) = row(&printed, "  events sent by the apiserver");
    let number = |text: String| text.parse::<f64>().unwrap();
    // One subscriber in twenty watches everything, the others a part. kubefan's single watch may
    // get a bookmark too.
    assert!(number(direct) > 1.1 && number(kubefan) < 1.1, "{printed}");
    assert!(lines.iter().any(|line| line.starts_with("all 20 subscribers are at version ")), "{printed}");
}

async fn a_signal_ends_the_demo_with_the_summary() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = demo(dir.path(), &[&ANY_PORT[..], &["--duration", "0"]].concat());
    let churning = || async { demo.log().contains("s through kubefan: watches 1, ").then_some(()) };
    wait::until("churn through kubefan", ENDED_AT_MOST, churning).await;
    demo.terminate();
    let status = demo.ended(ENDED_AT_MOST).await;
    let printed = demo.log();
    assert!(status.success(), "{status}:\n{printed}");
    // One line per second, without escape sequences.
    assert!(!printed.contains('\u{1b}'), "{printed:?}");
    assert!(printed.contains("\nall 20 subscribers are at version "), "{printed}");
}

async fn a_port_in_use_is_named_with_the_flag_that_changes_it() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (flag, other) in [("--listen", "--admin-listen"), ("--admin-listen", "--listen")] {
        let dir = tempfile::tempdir().unwrap();
        let mut demo = demo(dir.path(), &[flag, &address, other, "127.0.0.1:0"]);
        assert_eq!(demo.ended(ENDED_AT_MOST).await.code(), Some(1));
        let printed = demo.log();
        assert!(printed.starts_with(&format!("error: cannot listen on {address} ({flag}): ")), "{printed}");
        assert_eq!(printed.lines().count(), 1, "{printed}");
    }
}
