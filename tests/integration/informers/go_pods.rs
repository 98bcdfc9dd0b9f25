//! client-go's informer of pods, in a program of its own.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

use super::{
    MARKER,
    calls::Call,
    watched::{Content, content_of},
};
use crate::harness::{process::Process, tools, wait};

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients");

/// The running program.
pub(super) struct GoPods {
    process: Process,
    _dir: TempDir,
}

#[derive(Deserialize)]
struct Report {
    calls: Vec<Call>,
    store: Vec<Value>,
}

impl GoPods {
    /// Builds the program.
    pub(super) fn build() -> PathBuf {
        tools::go_program("clients", Path::new(DIR))
    }

    /// Starts an informer and waits until it has synced.
    pub(super) async fn start(program: &Path, kubeconfig: &Path) -> GoPods {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(kubeconfig).args(["--pods", "--until", MARKER, "--seconds", "600"]);
        let mut go = GoPods { process: Process::spawn("client-go", &mut command, &dir.path().join("log")), _dir: dir };
        go.printed("synced_seconds").await;
        go
    }

    /// Waits until its handler has the marker.
    pub(super) async fn has_marker(&mut self) {
        self.printed("marker").await;
    }

    async fn printed(&mut self, what: &str) {
        wait::until(&format!("client-go's informer to print {what}"), wait::SOON * 4, || {
            let log = self.process.log();
            let ended = self.process.exited();
            assert!(ended.is_none(), "{ended:?}: {log}");
            async move { log.contains(&format!("{{\"{what}\":")).then_some(()) }
        })
        .await;
    }

    /// Waits for the end of the program, after the marker was deleted.
    pub(super) async fn report(mut self) -> (Vec<Call>, Content) {
        let ended = self.process.ended(wait::SOON * 4).await;
        let log = self.process.log();
        let report = log.lines().find_map(|line| serde_json::from_str::<Report>(line).ok());
        let Report { calls, store } = report.unwrap_or_else(|| panic!("client-go: {ended}: {log}"));
        (calls, content_of(store))
    }
}
