//! `kubefan bench`: flags, the choice between table and JSON, and the end. What is measured is in [`kubefan_bench`].

use std::{
    env,
    ffi::OsString,
    io::{Write, stdout},
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};

use clap::{Args, ValueEnum};

use super::{CliError, shutdown::shutdown};
use kubefan_bench::{
    self, BenchError, BenchOptions, Contender, ContenderKind, Projection, Protocol, Scenario, Windows, child, floor,
    report,
};
use kubefan_model::format::Encoding;
use kubefan_proxy::config;

/// Measure what a server costs per delivery, and what the machine allows
#[derive(Debug, Args)]
#[command(
    after_help = "The server under test is a process of its own, started anew for each run; a simulated apiserver and all subscribers are in \
    this one. The floor is as many bytes over raw TCP, one write per subscriber and wake, measured beside it in the same run: shares of \
    it can be compared between machines, microseconds cannot. Measure with an optimized build on a machine that does nothing else."
)]
pub(super) struct BenchArgs {
    /// What to do; all where none is named
    #[arg(value_name = "SCENARIO", value_enum)]
    scenarios: Vec<Scenario>,

    /// The same as a flag; may be repeated
    #[arg(long = "scenario", value_name = "SCENARIO", value_enum)]
    more_scenarios: Vec<Scenario>,

    /// Streams
    #[arg(long, value_name = "COUNT", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    subscribers: u32,

    /// Streams that share a connection
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    streams_per_connection: u32,

    /// fanout: changes per burst; the next burst comes once every subscriber has all of the last. A list is measured one by one
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,32", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: Vec<u32>,

    /// Pods [default: 1000; snapshot: 10000]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    objects: Option<u32>,

    /// Cut or pad each pod's JSON to about this size [default: as real pods are, 3 to 6 kB]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1_024..=1_000_000))]
    object_bytes: Option<u32>,

    /// paced, stalled: changes per second [default: 200]. snapshot: changes per second meanwhile [default: none]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rate: Option<u32>,

    /// How long one load is measured, such as 500ms or 5s
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_duration)]
    duration: config::Duration,

    /// How often everything is repeated; medians and ranges are shown
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,

    /// snapshot: clients at once
    #[arg(long, value_name = "COUNT", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    clients: u32,

    /// selectors: how many views by spec.nodeName; a list is measured one by one
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "100,1000", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    views: Vec<u32>,

    /// resume-storm: changes that every subscriber has missed
    #[arg(long, value_name = "COUNT", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    missed: u32,

    /// stalled: how many of the subscribers stop reading, for as long as is measured [default: a twentieth]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    stalled: Option<u32>,

    /// Serve and receive over TLS, with a certificate made for the occasion; the floor stays plain
    #[arg(long)]
    tls: bool,

    /// How subscribers speak to kubefan; over http objects come as JSON, whole
    #[arg(long, value_name = "PROTOCOL", value_enum, default_value_t)]
    protocol: Protocol,

    /// How objects are sent
    #[arg(long, value_name = "ENCODING", value_enum, default_value_t)]
    encoding: Encoding,

    /// What is sent of an object
    #[arg(long, value_name = "PROJECTION", value_enum, default_value_t)]
    projection: Projection,

    /// What subscribers let a server send at a time [default: as kubefan's own client; with --protocol http: as Go's]
    #[arg(long, value_name = "CLIENT", value_enum)]
    windows: Option<WindowsOf>,

    /// Threads that receive
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    receiver_threads: u32,

    /// Another program that takes the flags of kubefan serve, measured side by side, alternating; may be repeated
    #[arg(long, value_name = "PROGRAM")]
    against: Vec<PathBuf>,

    /// Make the pods in a namespace of this cluster instead of a simulated apiserver. They are bound to nodes that do not exist: take an
    /// apiserver that is there for this
    #[arg(long, value_name = "FILE", conflicts_with = "object_bytes")]
    kubeconfig: Option<PathBuf>,

    /// Measure that apiserver too, as a watch server: its process, on this machine
    #[arg(long, value_name = "PID", requires = "kubeconfig")]
    apiserver_pid: Option<u32>,

    /// Measure a kubefan that runs already, in front of the cluster of --kubeconfig, instead of starting one
    #[arg(long, value_name = "ADDRESS", requires_all = ["kubeconfig", "server_pid"], conflicts_with = "tls")]
    server: Option<SocketAddr>,

    /// Its process, on this machine
    #[arg(long, value_name = "PID", requires = "server")]
    server_pid: Option<u32>,

    /// The same seed makes the same pods and changes
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

/// Whose windows and frames the subscribers have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WindowsOf {
    /// Large windows, frames of 1 MiB
    Kubefan,
    /// Large windows, frames of 16 KiB, as client-go and grpc-go take them
    Go,
    /// HTTP/2's initial windows of 64 KiB
    Http2,
}

/// The process that is the floor; the measurement starts it.
#[derive(Debug, Args)]
pub(super) struct FloorArgs {}

/// What every process that the measurement starts is at first.
#[derive(Debug, Args)]
pub(super) struct ChildArgs {
    /// What it becomes
    program: OsString,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

fn parse_duration(text: &str) -> Result<config::Duration, String> {
    let (least, most) = (Duration::from_millis(50), Duration::from_secs(3600));
    match text.parse::<config::Duration>() {
        Ok(duration) if (least..=most).contains(&duration.0) => Ok(duration),
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
            scenarios = Scenario::ALL.to_vec();
        }
        let program = env::current_exe().map_err(|error| CliError::Plain(format!("where is this program: {error}")))?;
        let kind = match (self.server, self.server_pid) {
            (Some(address), Some(pid)) => ContenderKind::Running { address, pid },
            _ => ContenderKind::Program(program.clone()),
        };
        let mut contenders = vec![Contender { name: "kubefan".to_owned(), kind }];
        let apiserver = self.apiserver_pid.map(|pid| ContenderKind::Apiserver { pid });
        contenders.extend(apiserver.map(|kind| Contender { name: "kube-apiserver".to_owned(), kind }));
        for program in self.against {
            let file = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
            // A build's file may have the same name as this one.
            let taken = contenders.iter().any(|contender| contender.name == file);
            let name = if taken { program.display().to_string() } else { file };
            contenders.push(Contender { name, kind: ContenderKind::Program(program) });
        }
        let count = |number: u32| number as usize;
        let counts = |numbers: Vec<u32>| numbers.into_iter().map(count).collect();
        Ok(BenchOptions {
            scenarios,
            subscribers: count(self.subscribers),
            streams_per_connection: count(self.streams_per_connection),
            batches: counts(self.batch),
            objects: self.objects.map(count),
            object_bytes: self.object_bytes.map(count),
            rate: self.rate,
            duration: self.duration.0,
            runs: count(self.runs),
            clients: count(self.clients),
            views: counts(self.views),
            missed: count(self.missed),
            stalled: self.stalled.map(count),
            tls: self.tls,
            protocol: self.protocol,
            encoding: self.encoding,
            projection: self.projection,
            windows: match (self.windows, self.protocol) {
                (Some(WindowsOf::Kubefan), _) | (None, Protocol::Grpc) => Windows::KUBEFAN,
                (Some(WindowsOf::Go), _) | (None, Protocol::Http) => Windows::GO,
                (Some(WindowsOf::Http2), _) => Windows::HTTP2,
            },
            receiver_threads: count(self.receiver_threads),
            contenders,
            kubeconfig: self.kubeconfig,
            program,
            seed: self.seed,
        })
    }
}

pub(super) fn run(args: BenchArgs) -> Result<(), CliError> {
    let output = args.output;
    let options = args.options()?;
    if cfg!(debug_assertions) {
        eprintln!("this is a debug build: its figures say nothing; build with --release");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CliError::plain)?;
    let result = runtime.block_on(async {
        let stop = shutdown(|_| eprintln!("stopping; ctrl-C again to leave everything as it is"))?;
        kubefan_bench::run(&options, stop, |line| eprintln!("{line}")).await.map_err(|error| match error {
            BenchError::Stopped => CliError::Interrupted,
            error => CliError::plain(error),
        })
    });
    // Everything that was started has ended, or was told to.
    runtime.shutdown_timeout(Duration::from_secs(1));
    let reports = result?;
    let mut out = stdout().lock();
    match output {
        Format::Json => reports.iter().try_for_each(|report| writeln!(out, "{}", report.to_json(&options)))?,
        Format::Table => {
            for scenario in &options.scenarios {
                writeln!(out, "\n{}", report::table(*scenario, &reports).trim_end())?;
            }
        }
    }
    Ok(())
}

pub(super) fn run_floor(FloorArgs {}: FloorArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CliError::plain)?;
    runtime.block_on(floor::serve()).map_err(CliError::plain)
}

pub(super) fn run_child(args: &ChildArgs) -> Result<(), CliError> {
    Err(CliError::plain(child::launch(&args.program, &args.args)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn parse(words: &[&str]) -> Result<BenchOptions, String> {
        let only = Only::try_parse_from(["bench"].iter().chain(words)).map_err(|error| error.to_string())?;
        only.bench.options().map_err(|error| error.to_string())
    }

    #[test]
    fn no_flags_are_the_defaults() {
        let parsed = parse(&[]).unwrap();
        let program = parsed.program.clone();
        let kind = ContenderKind::Program(program.clone());
        let contenders = vec![Contender { name: "kubefan".to_owned(), kind }];
        let default = BenchOptions { program, contenders, ..BenchOptions::default() };
        assert_eq!(format!("{parsed:?}"), format!("{default:?}"));
    }

    #[test]
    fn scenarios_are_named_once_by_word_or_by_flag() {
        let scenarios = |words: &[&str]| parse(words).map(|options| options.scenarios);
        let expected = vec![Scenario::Idle, Scenario::ResumeStorm];
        assert_eq!(scenarios(&["idle", "idle", "--scenario", "resume-storm"]), Ok(expected));
        assert!(scenarios(&["speed"]).unwrap_err().contains("resume-storm"));
    }

    #[test]
    fn every_server_has_a_name_of_its_own() {
        let options = parse(&["--against", "/x/naive", "--against", "/y/naive"]).unwrap();
        let names: Vec<_> = options.contenders.iter().map(|contender| contender.name.as_str()).collect();
        assert_eq!(names, ["kubefan", "naive", "/y/naive"]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for words in [["--batch", "0"], ["--batch", "1,x"], ["--runs", "0"], ["--duration", "1ms"], ["--rate", "0"]] {
            let error = parse(&words).unwrap_err();
            assert!(error.contains(words[0]), "{error}");
        }
    }
}
