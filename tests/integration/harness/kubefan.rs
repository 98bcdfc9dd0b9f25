//! The real kubefan binary in front of an apiserver, on ports of its own choice, killed when the value is dropped.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use super::{apiserver::ApiServer, process::Process, wait};

/// A running `kubefan serve`.
pub(crate) struct Kubefan {
    /// To read its memory, send it a signal, or see what it printed.
    pub(crate) process: Process,
    /// Where gRPC is served.
    pub(crate) grpc_addr: SocketAddr,
    /// Where health and metrics are served.
    pub(crate) admin_addr: SocketAddr,
    log: PathBuf,
}

impl Kubefan {
    /// Starts kubefan as the administrator of `api` and waits until it is ready. `args` follow those that say where to listen.
    pub(crate) async fn start(api: &ApiServer, args: &[&str]) -> Kubefan {
        let kubefan = Kubefan::spawn(&api.kubeconfig(), args).await;
        kubefan.ready().await;
        kubefan
    }

    /// Starts kubefan with any kubeconfig and waits until it listens.
    pub(crate) async fn spawn(kubeconfig: &Path, args: &[&str]) -> Kubefan {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kubefan-{}-{number}.log", std::process::id()));
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--kubeconfig"])
            .arg(kubeconfig)
            .args(args);
        let mut process = Process::spawn("kubefan", &mut command, &log);
        let outcome = wait::try_until(wait::SOON, || {
            let printed = process.log();
            let address = |what| printed.lines().find_map(|line| line.strip_prefix(what)?.trim().parse().ok());
            let listening = address("kubefan: serving gRPC on ").zip(address("kubefan: serving admin on ")).map(Ok);
            let ended = process.exited().map(|status| Err(format!("ended with {status}")));
            async { listening.or(ended) }
        })
        .await
        .unwrap_or_else(|| Err("names no addresses".to_owned()));
        match outcome {
            Ok((grpc_addr, admin_addr)) => Kubefan { process, grpc_addr, admin_addr, log },
            Err(why) => panic!("kubefan serve {}: {why}; it printed:\n{}", args.join(" "), process.log()),
        }
    }

    /// Waits until /readyz says yes.
    pub(crate) async fn ready(&self) {
        let ready = wait::try_until(READY_AT_MOST, || async {
            let (status, _) = self.admin("/readyz").await?;
            status.is_success().then_some(())
        });
        if ready.await.is_none() {
            let verbose = self.admin("/readyz?verbose").await;
            panic!("kubefan is not ready: {verbose:?}; it printed:\n{}", self.process.log());
        }
    }

    /// What the admin port answers to a GET, or `None` when it does not answer.
    pub(crate) async fn admin(&self, path: &str) -> Option<(reqwest::StatusCode, String)> {
        let response = reqwest::get(format!("http://{}{path}", self.admin_addr)).await.ok()?;
        Some((response.status(), response.text().await.ok()?))
    }
}

const READY_AT_MOST: Duration = Duration::from_secs(60);

impl Drop for Kubefan {
    fn drop(&mut self) {
        self.process.kill9();
        if std::thread::panicking() {
            // Part of the failure's report.
            eprintln!("kubefan printed:\n{}", self.process.log());
        }
        let _ = std::fs::remove_file(&self.log);
    }
}
