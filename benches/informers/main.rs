//! Informers side by side: this library over gRPC and HTTP, kube-rs' reflector, and client-go's
//! informer, each in a process of its own.
//!
//! One simulated apiserver and one kubefan serve them all. Each client first receives all pods,
//! then all changes. Its CPU time and memory are read from outside, after each step. The clients
//! take turns, several times, and the table has the medians.
//!
//! `cargo build-dist --bin kubefan --bench informers`, then run `target/dist/deps/informers-HASH`.

mod client;
mod kinds;
mod measured;
mod table;
mod types;

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    time::Duration,
};

use clap::{Parser, ValueEnum};
use kubefan_sim::{
    apiserver::{SimApiserver, SimOptions},
    workload::{Workload, WorkloadOptions},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
    time::{interval, sleep, timeout},
};

use self::{kinds::Kind, measured::Measured, table::Figures};

type Failure = Box<dyn Error + Send + Sync>;

/// Changes per batch, and the pause between two batches: 1,000 changes a second.
const BATCH: usize = 50;
const PAUSE: Duration = Duration::from_millis(50);
/// Work that a client still does in this time after a step belongs to the step.
const SETTLE: Duration = Duration::from_secs(1);
const START_MAX: Duration = Duration::from_secs(60);

/// Compares informers
#[derive(Debug, Parser)]
struct Cli {
    /// Pods in the cluster
    #[arg(long, default_value_t = 10_000)]
    objects: usize,
    /// Changes after the initial state
    #[arg(long, default_value_t = 5_000)]
    changes: usize,
    /// Rounds; the table has medians
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// The program with client-go: go build -C tests/clients -o FILE
    #[arg(long, value_name = "FILE")]
    client_go: Option<PathBuf>,
    /// Only these clients
    #[arg(long, value_delimiter = ',')]
    only: Vec<Kind>,
    /// Be this client, of the two servers given
    #[arg(long, hide = true, requires = "apiserver", requires = "kubefan")]
    client: Option<Kind>,
    #[arg(long, hide = true)]
    apiserver: Option<String>,
    #[arg(long, hide = true)]
    kubefan: Option<String>,
    /// Passed by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    // reqwest and kube-client choose no TLS provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = match (cli.client, &cli.apiserver, &cli.kubefan) {
        (Some(kind), Some(apiserver), Some(kubefan)) => client::run(kind, apiserver, kubefan).await,
        _ => compare(&cli).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The servers, and the writer of the changes.
struct Servers {
    sim: SimApiserver,
    workload: Workload,
    apiserver: String,
    kubefan: String,
    kubeconfig: PathBuf,
    _process: Child,
    _directory: tempfile::TempDir,
}

async fn compare(cli: &Cli) -> Result<(), Failure> {
    let kinds: Vec<_> = Kind::value_variants().iter().copied().filter(|kind| is_wanted(*kind, cli)).collect();
    let mut servers = Servers::start(cli.objects).await?;
    // The first client after the start finds cold servers. It is not counted.
    servers.measure(Kind::GrpcZstdRaw, cli).await?;
    let mut figures = vec![Vec::new(); kinds.len()];
    for run in 0..cli.runs {
        for (kind, figures) in kinds.iter().zip(&mut figures) {
            let found = servers.measure(*kind, cli).await.map_err(|error| format!("{}: {error}", kind.title()))?;
            eprintln!("run {}, {}: {found:?}", run + 1, kind.title());
            figures.push(found);
        }
    }
    let rows: Vec<_> = kinds.into_iter().zip(figures.iter().map(|figures| Figures::median(figures))).collect();
    println!("{}", table::render(&rows));
    Ok(())
}

fn is_wanted(kind: Kind, cli: &Cli) -> bool {
    let named = cli.only.is_empty() || cli.only.contains(&kind);
    named && (kind != Kind::GoTyped || cli.client_go.is_some())
}

impl Servers {
    async fn start(objects: usize) -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let apiserver = format!("http://{}", listener.local_addr()?);
        let sim = SimApiserver::new(SimOptions::default());
        tokio::spawn(sim.clone().serve(listener, std::future::pending()));
        let mut workload = Workload::new(1, WorkloadOptions { objects, ..WorkloadOptions::default() });
        workload.populate(&sim).map_err(|status| status.message)?;
        let directory = tempfile::tempdir()?;
        let kubeconfig = directory.path().join("kubeconfig");
        std::fs::write(
            &kubeconfig,
            format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: bench\n\
                 clusters: [{{ name: bench, cluster: {{ server: '{apiserver}' }} }}]\n\
                 contexts: [{{ name: bench, context: {{ cluster: bench, user: bench }} }}]\n\
                 users: [{{ name: bench, user: {{}} }}]\n"
            ),
        )?;
        let (process, kubefan) = start_kubefan(&kubeconfig).await?;
        Ok(Self { sim, workload, apiserver, kubefan, kubeconfig, _process: process, _directory: directory })
    }

    async fn measure(&mut self, kind: Kind, cli: &Cli) -> Result<Figures, Failure> {
        let mut client = self.start_client(kind, cli).await?;
        sleep(SETTLE).await;
        let cpu_before = client.cpu_nanos()?;
        let (base_bytes, _) = client.resident_bytes()?;
        let objects: u64 = client.order("start", "synced").await?.parse()?;
        if objects != self.workload.pod_count() as u64 {
            return Err(format!("it has {objects} pods of {}", self.workload.pod_count()).into());
        }
        sleep(SETTLE).await;
        let cpu_synced = client.cpu_nanos()?;
        let (synced_bytes, peak_bytes) = client.resident_bytes()?;
        self.change(cli.changes).await?;
        let version = self.sim.revision();
        let events: u64 = client.order(&format!("until {version}"), "current").await?.parse()?;
        sleep(SETTLE).await;
        let cpu_after = client.cpu_nanos()?;
        let (after_bytes, _) = client.resident_bytes()?;
        let collected_bytes = match kind {
            Kind::GoTyped => {
                client.order("collect", "collected").await?;
                Some(client.resident_bytes()?.0.saturating_sub(base_bytes))
            }
            _ => None,
        };
        client.end().await?;
        Ok(Figures {
            micros_per_object: (cpu_synced - cpu_before) as f64 / 1e3 / objects as f64,
            micros_per_event: (cpu_after - cpu_synced) as f64 / 1e3 / cli.changes as f64,
            events: events as f64,
            base_bytes: base_bytes as f64,
            synced_bytes: synced_bytes.saturating_sub(base_bytes) as f64,
            peak_bytes: peak_bytes.saturating_sub(base_bytes) as f64,
            after_bytes: after_bytes.saturating_sub(base_bytes) as f64,
            collected_bytes: collected_bytes.map(|bytes| bytes as f64),
        })
    }

    async fn start_client(&self, kind: Kind, cli: &Cli) -> Result<Measured, Failure> {
        if let (Kind::GoTyped, Some(program)) = (kind, &cli.client_go) {
            let kubeconfig = self.kubeconfig.to_str().ok_or("the temporary directory has no UTF-8 name")?;
            return Measured::start(program, &["-measure", "-kubeconfig", kubeconfig]).await;
        }
        let name = kind.to_possible_value().ok_or("a client without a name")?;
        let args = ["--client", name.get_name(), "--apiserver", &self.apiserver, "--kubefan", &self.kubefan];
        Measured::start(&std::env::current_exe()?, &args).await
    }

    async fn change(&mut self, changes: usize) -> Result<(), Failure> {
        let mut ticks = interval(PAUSE);
        for done in 0..changes {
            if done.is_multiple_of(BATCH) {
                ticks.tick().await;
            }
            self.workload.step(&self.sim).map_err(|status| status.message)?;
        }
        Ok(())
    }
}

/// Starts kubefan, and returns it with its address.
async fn start_kubefan(kubeconfig: &Path) -> Result<(Child, String), Failure> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command
        .arg("serve")
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .args(["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--resource=pods"])
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    let mut lines = BufReader::new(child.stderr.take().ok_or("kubefan has no stderr")?).lines();
    let address = timeout(START_MAX, async {
        while let Some(line) = lines.next_line().await? {
            if let Some((_, address)) = line.split_once("kubefan: serving gRPC ") {
                return Ok(address.trim_end().rsplit(' ').next().unwrap_or_default().to_owned());
            }
        }
        Err(Failure::from("kubefan ended before it served"))
    })
    .await
    .map_err(|_| "kubefan did not start in time")??;
    // If nothing read the pipe, it would fill up and block the process.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    Ok((child, format!("http://{address}")))
}
