//! What a person with kubectl sees while the apiserver is down: how soon kubectl says so, and in
//! which words.

use std::{path::Path, time::Duration};

use super::{Table, directory, seconds, through, timed};
use crate::{
    clients::Both,
    harness::{
        apiserver::{ApiServer, Options},
        is_full_scale,
        objects::pod,
        tests,
    },
};

tests! {
    apiserver full: kubectl_fails_with_a_reason_while_the_apiserver_is_down;
}

/// `NEW` becomes an empty directory, so that kubectl does not know what the server serves.
const COMMANDS: [&[&str]; 5] = [
    &["get", "pods"],
    &["get", "pods", "--cache-dir", "NEW"],
    &["get", "configmaps", "-o", "json"],
    &["get", "pod", "web"],
    &["delete", "pod", "web"],
];
const FAILED_AT_MOST: Duration = Duration::from_secs(180);
/// Longest text shown in the table.
const WORDS_MAX: usize = 160;

async fn kubectl_fails_with_a_reason_while_the_apiserver_is_down() {
    let commands = if is_full_scale() { &COMMANDS[..] } else { &COMMANDS[..1] };
    let api = ApiServer::start(Options::default()).await;
    api.create("/api/v1/namespaces/default/pods", &pod("web")).await;
    let both = Both::start(api, &["--resource", "pods"]).await;
    for server in &both.servers {
        // Learns what the server serves.
        let (ok, _, error) = both.api.try_kubectl(&server.kubeconfig, &["get", "pods"]).await;
        assert!(ok, "{}: {error}", server.name);
    }
    both.api.kill9();
    let mut table =
        Table::new("kubectl while the apiserver is down", &["command", "through", "fails after s", "words"]);
    for command in commands {
        for server in &both.servers {
            let new = directory();
            let new = new.path().to_str().expect("the path is text");
            let arguments: Vec<&str> = command.iter().map(|word| if *word == "NEW" { new } else { word }).collect();
            let (failed, took) = timed(fails(&both, &server.kubeconfig, &arguments)).await;
            let words = failed.clone().unwrap_or_default();
            let last = words.trim().lines().last().unwrap_or_default().replace('|', "/");
            let shown: String = last.chars().take(WORDS_MAX).collect();
            let took = seconds(failed.is_some().then_some(took), FAILED_AT_MOST);
            table.row(&[&command.join(" "), &through(server), &took, &shown]);
            assert!(!last.is_empty(), "{} {command:?}: {failed:?}", server.name);
        }
    }
    println!("{table}");
}

/// Runs a command that must fail. Returns its words; `None` if it does not end.
async fn fails(both: &Both, kubeconfig: &Path, command: &[&str]) -> Option<String> {
    let ran = tokio::time::timeout(FAILED_AT_MOST, both.api.try_kubectl(kubeconfig, command)).await;
    let (ok, stdout, stderr) = ran.ok()?;
    assert!(!ok, "{command:?}: {stdout}");
    Some(stderr)
}
