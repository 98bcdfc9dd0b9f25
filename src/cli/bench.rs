//! `kubefan bench`: its flags, and the choice between table and JSON. The benchmark itself is in
//! [`kubefan_bench`].

use std::{
    env,
    ffi::OsString,
    io::{Write, stdout},
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};

use clap::{Args, ValueEnum};
use kubefan_app::config;
use kubefan_bench::{
    self, BenchError, BenchOptions, Encoding, Projection, Protocol, Scenario, ServerKind, ServerSpec, Windows, child,
    floor,
    hostile::{self, attack::Attack, attacker},
    report,
};

use super::{
    error::CliError,
    shutdown::{StopSignal, shutdown},
    visible::print_notice,
};

/// Measure the cost of a delivery for a server, compared with the limit of the machine
#[derive(Debug, Args)]
#[command(
    after_help = "The server under test is a separate process, started anew for each run. A simulated apiserver and all subscribers run in \
    this process. The floor sends as many bytes over raw TCP, or TLS with --tls, with one write per subscriber and wake-up, and is measured in the same run: \
    shares of the floor can be compared between machines, microseconds cannot. Use an optimized build on an otherwise idle machine."
)]
pub(super) struct BenchArgs {
    /// Scenarios to run [default: all but hostile and agents]
    #[arg(value_name = "SCENARIO", value_enum)]
    scenarios: Vec<Scenario>,

    /// The same as a flag; may be repeated
    #[arg(long = "scenario", value_name = "SCENARIO", value_enum)]
    more_scenarios: Vec<Scenario>,

    /// Number of subscribers (watch streams)
    #[arg(long, value_name = "COUNT", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    subscribers: u32,

    /// Streams per connection
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    streams_per_connection: u32,

    /// fanout: changes per burst; the next burst starts once every subscriber has received the
    /// last. Each value of a list is measured separately
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,32", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: Vec<u32>,

    /// Number of pods; each value of a list is measured separately [default: 1000; snapshot, list,
    /// agents: 10000]
    #[arg(long, value_name = "COUNT", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    objects: Vec<u32>,

    /// Trim or pad each pod's JSON to about this size [default: like real pods, 3 to 6 kB]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1_024..=1_000_000))]
    object_bytes: Option<u32>,

    /// paced, stalled: changes per second [default: 200]. hostile: the same [default: 50].
    /// snapshot: changes per second during the snapshots [default: none]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rate: Option<u32>,

    /// Time for which each load is measured, such as 500ms or 5s
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_duration)]
    duration: config::Duration,

    /// Number of repetitions; the output shows medians and ranges
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,

    /// snapshot, list: concurrent clients
    #[arg(long, value_name = "COUNT", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    clients: u32,

    /// selectors: number of views by spec.nodeName. Each value of a list is measured separately
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "100,1000", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    views: Vec<u32>,

    /// resume-storm: changes that every subscriber misses
    #[arg(long, value_name = "COUNT", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    missed: u32,

    /// stalled: number of subscribers that stop reading during the measured time [default: one in
    /// twenty]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    stalled: Option<u32>,

    /// agents: number of nodes, each with an agent that watches its pods
    #[arg(long, value_name = "COUNT", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,

    /// hostile: an attack to run; may be repeated [default: all]
    #[arg(long = "attack", value_name = "ATTACK", value_parser = parse_attack, hide_possible_values = true)]
    attacks: Vec<&'static Attack>,

    /// hostile: number of honest subscribers, half of them over gRPC and half over HTTP
    #[arg(long, value_name = "COUNT", default_value_t = 200, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    honest: u32,

    /// Use TLS between server and subscribers, and for the floor, with a temporary certificate
    #[arg(long)]
    tls: bool,

    /// Protocol between subscribers and kubefan; over http, objects are complete
    #[arg(long, value_name = "PROTOCOL", value_enum, default_value_t)]
    protocol: Protocol,

    /// Encoding of objects; over http also whether subscribers accept gzip, which the server uses
    /// where it wants to
    #[arg(long, value_name = "ENCODING", value_enum, default_value_t)]
    encoding: Encoding,

    /// Part of each object that is sent
    #[arg(long, value_name = "PROJECTION", value_enum, default_value_t)]
    projection: Projection,

    /// Flow-control windows of the subscribers [default: as in kubefan's own client; with
    /// --protocol http: as in Go's]
    #[arg(long, value_name = "CLIENT", value_enum)]
    windows: Option<WindowPreset>,

    /// Threads that run the subscribers
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    receiver_threads: u32,

    /// Another program that takes the flags of kubefan serve, measured alternately; may be repeated
    #[arg(long, value_name = "PROGRAM")]
    against: Vec<PathBuf>,

    /// Create the pods in a new namespace of this cluster instead of a simulated apiserver. The
    /// pods are bound to nodes that do not exist: use an apiserver dedicated to this
    #[arg(long, value_name = "FILE", conflicts_with = "object_bytes")]
    kubeconfig: Option<PathBuf>,

    /// Also measure that apiserver as a watch server: its process id on this machine
    #[arg(long, value_name = "PID", requires = "kubeconfig")]
    apiserver_pid: Option<u32>,

    /// Measure a running kubefan that serves the cluster of --kubeconfig, instead of starting one
    #[arg(long, value_name = "ADDRESS", requires_all = ["kubeconfig", "server_pid"], conflicts_with = "tls")]
    server: Option<SocketAddr>,

    /// The process id of that kubefan, on this machine
    #[arg(long, value_name = "PID", requires = "server")]
    server_pid: Option<u32>,

    /// Seed of the workload; the same seed produces the same pods and changes
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// A table per scenario, or one JSON object per line
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Table,
    Json,
}

/// The client whose flow-control windows and frame size the subscribers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WindowPreset {
    /// Large windows, frames of 1 MiB
    Kubefan,
    /// Large windows, frames of 16 KiB, as client-go and grpc-go take them
    Go,
    /// HTTP/2's initial windows of 64 KiB, frames of 16 KiB
    Http2,
}

/// Runs the floor; the benchmark starts this process.
#[derive(Debug, Args)]
pub(super) struct FloorArgs {
    #[arg(long, requires = "tls_private_key_file")]
    tls_cert_file: Option<PathBuf>,
    #[arg(long, requires = "tls_cert_file")]
    tls_private_key_file: Option<PathBuf>,
}

/// Runs the sink that attacks are compared with; the benchmark starts this process.
#[derive(Debug, Args)]
pub(super) struct SinkArgs {}

/// Runs an attack; the benchmark starts this process.
#[derive(Debug, Args)]
pub(super) struct AttackerArgs {
    #[arg(value_parser = parse_attack)]
    attack: &'static Attack,
    /// The data port
    target: SocketAddr,
    /// The admin port
    admin: SocketAddr,
    /// Duration of the attack
    milliseconds: u64,
    /// A version that the server can resume from
    version: u64,
    /// The certificate of the data port
    cert_file: Option<PathBuf>,
}

/// Runs a server under test; the benchmark starts every server through this process.
#[derive(Debug, Args)]
pub(super) struct ChildArgs {
    /// The program to execute
    program: OsString,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

fn parse_attack(name: &str) -> Result<&'static Attack, String> {
    let names = || hostile::all().map(|attack| attack.name).collect::<Vec<_>>().join(", ");
    hostile::find(name).ok_or_else(|| format!("no such attack; there are {}", names()))
}

fn parse_duration(text: &str) -> Result<config::Duration, String> {
    let min = Duration::from_millis(50);
    let max = Duration::from_secs(3600);
    match text.parse::<config::Duration>() {
        Ok(duration) if (min..=max).contains(&duration.0) => Ok(duration),
        _ => Err("write it like 500ms or 5s, from 50ms to 1h".to_owned()),
    }
}

impl BenchArgs {
    fn options(self) -> Result<BenchOptions, CliError> {
        let mut scenarios: Vec<Scenario> = Vec::new();
        for scenario in self.scenarios.into_iter().chain(self.more_scenarios) {
            if !scenarios.contains(&scenario) {
                scenarios.push(scenario);
            }
        }
        if scenarios.is_empty() {
            scenarios = Scenario::DEFAULT.to_vec();
        }
        let program = env::current_exe()
            .map_err(|error| CliError::Plain(format!("cannot find the path of this program: {error}")))?;
        let kind = match (self.server, self.server_pid) {
            (Some(address), Some(pid)) => ServerKind::Running { address, pid },
            _ => ServerKind::Program(program.clone()),
        };
        let mut servers = vec![ServerSpec { name: "kubefan".to_owned(), kind }];
        let apiserver = self.apiserver_pid.map(|pid| ServerKind::Apiserver { pid });
        servers.extend(apiserver.map(|kind| ServerSpec { name: "kube-apiserver".to_owned(), kind }));
        for program in self.against {
            let file = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
            // Two builds may have the same file name.
            let taken = servers.iter().any(|spec| spec.name == file);
            let name = if taken { program.display().to_string() } else { file };
            servers.push(ServerSpec { name, kind: ServerKind::Program(program) });
        }
        let count = |number: u32| number as usize;
        let counts = |numbers: Vec<u32>| numbers.into_iter().map(count).collect();
        let options = BenchOptions {
            scenarios,
            subscribers: count(self.subscribers),
            streams_per_connection: count(self.streams_per_connection),
            batches: counts(self.batch),
            objects: counts(self.objects),
            object_bytes: self.object_bytes.map(count),
            rate: self.rate,
            duration: self.duration.0,
            runs: count(self.runs),
            clients: count(self.clients),
            views: counts(self.views),
            missed: count(self.missed),
            stalled: self.stalled.map(count),
            nodes: count(self.nodes),
            attacks: self.attacks,
            honest: count(self.honest),
            tls: self.tls,
            protocol: self.protocol,
            encoding: self.encoding,
            projection: self.projection,
            windows: match (self.windows, self.protocol) {
                (Some(WindowPreset::Kubefan), _) | (None, Protocol::Grpc) => Windows::KUBEFAN,
                (Some(WindowPreset::Go), _) | (None, Protocol::Http) => Windows::GO,
                (Some(WindowPreset::Http2), _) => Windows::HTTP2,
            },
            receiver_threads: count(self.receiver_threads),
            servers,
            kubeconfig: self.kubeconfig,
            program,
            seed: self.seed,
        };
        options.check().map_err(CliError::plain)?;
        Ok(options)
    }
}

pub(super) fn run(args: BenchArgs) -> Result<(), CliError> {
    let output = args.output;
    let options = args.options()?;
    if cfg!(debug_assertions) {
        print_notice("this is a debug build, and its figures are meaningless; build with cargo build-dist");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CliError::plain)?;
    let result = runtime.block_on(async {
        let stop = shutdown(|_| print_notice("stopping; press Ctrl-C again to exit without cleaning up"))?;
        kubefan_bench::run(&options, stop, print_notice).await.map_err(|error| match error {
            BenchError::Stopped => CliError::Interrupted(StopSignal::Interrupt),
            error => CliError::plain(error),
        })
    });
    // All child processes have ended or were killed.
    runtime.shutdown_timeout(Duration::from_secs(1));
    let reports = result?;
    let mut out = stdout().lock();
    match output {
        Format::Json => {
            for report in &reports {
                writeln!(out, "{}", report.to_json(&options))?;
            }
        }
        Format::Table => {
            for scenario in &options.scenarios {
                writeln!(out, "\n{}", report::table(*scenario, &reports).trim_end())?;
            }
        }
    }
    Ok(())
}

pub(super) fn run_floor(args: &FloorArgs) -> Result<(), CliError> {
    let certificate = args.tls_cert_file.as_deref().zip(args.tls_private_key_file.as_deref());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CliError::plain)?;
    runtime.block_on(floor::serve(certificate)).map_err(CliError::plain)
}

pub(super) fn run_sink(SinkArgs {}: SinkArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CliError::plain)?;
    runtime.block_on(hostile::sink::serve()).map_err(CliError::plain)
}

pub(super) fn run_attacker(args: AttackerArgs) -> Result<(), CliError> {
    let AttackerArgs { attack, target, admin, milliseconds, version, cert_file } = args;
    let order = attacker::Order { target, admin, version, duration: Duration::from_millis(milliseconds), cert_file };
    // The limit of open files was raised by the benchmark.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CliError::plain)?;
    let received = runtime.block_on(attacker::run(attack, order));
    runtime.shutdown_timeout(Duration::ZERO);
    writeln!(stdout(), "{}", received.map_err(CliError::plain)?)?;
    Ok(())
}

pub(super) fn run_child(args: &ChildArgs) -> Result<(), CliError> {
    Err(CliError::plain(child::launch(&args.program, &args.args)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct TestCli {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn parse(args: &[&str]) -> Result<BenchOptions, String> {
        let cli = TestCli::try_parse_from(["bench"].iter().chain(args)).map_err(|error| error.to_string())?;
        cli.bench.options().map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_the_options_are_the_defaults() {
        let parsed = parse(&[]).unwrap();
        let program = parsed.program.clone();
        let kind = ServerKind::Program(program.clone());
        let servers = vec![ServerSpec { name: "kubefan".to_owned(), kind }];
        let default = BenchOptions { program, servers, ..BenchOptions::default() };
        assert_eq!(format!("{parsed:?}"), format!("{default:?}"));
    }

    #[test]
    fn repeated_scenarios_run_once_whether_given_as_arguments_or_flags() {
        let scenarios = |args: &[&str]| parse(args).map(|options| options.scenarios);
        let expected = vec![Scenario::Idle, Scenario::ResumeStorm];
        assert_eq!(scenarios(&["idle", "idle", "--scenario", "resume-storm"]), Ok(expected));
        assert!(scenarios(&["speed"]).unwrap_err().contains("resume-storm"));
    }

    #[test]
    fn every_server_has_a_unique_name() {
        let options = parse(&["--against", "/x/naive", "--against", "/y/naive"]).unwrap();
        let names: Vec<_> = options.servers.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(names, ["kubefan", "naive", "/y/naive"]);
    }

    #[test]
    fn gzip_needs_subscribers_over_http() {
        let encoding = |args: &[&str]| parse(args).map(|options| options.encoding);
        assert_eq!(encoding(&["--protocol", "http", "--encoding", "gzip"]), Ok(Encoding::Gzip));
        let error = encoding(&["--encoding", "gzip"]).unwrap_err();
        assert!(error.contains("--encoding gzip needs --protocol http"), "{error}");
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for args in [["--batch", "0"], ["--batch", "1,x"], ["--runs", "0"], ["--duration", "1ms"], ["--rate", "0"]] {
            let error = parse(&args).unwrap_err();
            assert!(error.contains(args[0]), "{error}");
        }
    }
}
