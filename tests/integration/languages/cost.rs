//! The cost of a client process: memory and CPU time of an informer of all pods, over kubefan and
//! by the usual client of the language straight from the apiserver, in one table.
//!
//! Each reader is a process. It works when the test writes a line to its input, answers with a
//! line, and its figures are read from outside in between:
//!
//! | the test writes | the reader answers |
//! |---|---|
//! | | `ready`, after its start |
//! | `start` | `synced COUNT`, with the number of objects |
//! | `until VERSION` | `current COUNT`, once it has this version |
//! | `settle` | `settled`, after its runtime has collected garbage |
//!
//! Its arguments are the mode, the address, the file of the CA, a token, and the paths of a
//! projection. All connections use TLS.
//!
//! The readers of one language run at the same time, so that they receive the same changes.
//! The table has medians of three rounds, which start the readers in turns from both ends, and the
//! test fails if a goal is missed. `KUBEFAN_COST_LANGUAGES=go,rust` measures only these.

use std::{collections::BTreeMap, env, path::Path, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout},
    time::timeout,
};

use super::programs::{self, Measured};
use crate::{
    benchmarks::cpu_seconds,
    harness::{
        apiserver::{ADMIN, ApiServer, Options},
        kubefan::Kubefan,
        leave_out,
        objects::{pod, version_of},
        process::memory_of,
        tests,
        writes::Writes,
    },
};

tests! {
    apiserver large alone: a_client_over_kubefan_costs_no_more_than_one_straight;
}

const PATHS: [&str; 3] = ["metadata", "spec.nodeName", "status.phase"];
/// The official Python client decodes a few hundred pods a second.
const STEP_AT_MOST: Duration = Duration::from_secs(600);

const PODS: usize = 10_000;
const CHANGES: usize = 5_000;
const ROUNDS: usize = 3;

/// One row of a language: the work of its reader, and the limits of its cost.
struct Mode {
    name: &'static str,
    title: &'static str,
    /// The mode it is compared with, and the largest ratio.
    goal: Option<(&'static str, f64)>,
}

const fn mode(name: &'static str, title: &'static str, goal: Option<(&'static str, f64)>) -> Mode {
    Mode { name, title, goal }
}

const MODES: [Mode; 4] = [
    mode("straight-json", "straight, JSON", None),
    mode("kubefan-json", "kubefan, JSON", Some(("straight-json", 1.0))),
    mode("kubefan-fields", "kubefan, fields", Some(("straight-json", 0.25))),
    mode("kubefan-metadata", "kubefan, metadata", Some(("straight-json", 0.25))),
];
/// Only Go's clients read protobuf.
const GO_MODES: [Mode; 2] = [
    mode("straight-protobuf", "straight, protobuf", None),
    mode("kubefan-protobuf", "kubefan, protobuf", Some(("straight-protobuf", 1.0))),
];

fn modes(language: &str) -> impl Iterator<Item = &'static Mode> {
    let more: &[Mode] = if language == "go" { &GO_MODES } else { &[] };
    MODES.iter().chain(more)
}

/// Cost of a reader.
#[derive(Clone, Copy, Debug)]
struct Cost {
    cpu_seconds: f64,
    peak_mib: f64,
    settled_mib: f64,
}

/// A figure of a process, by name.
type Figure = (&'static str, fn(&Cost) -> f64);

impl Cost {
    const FIGURES: [Figure; 3] =
        [("CPU", |cost| cost.cpu_seconds), ("peak", |cost| cost.peak_mib), ("settled", |cost| cost.settled_mib)];

    fn median(of: &[Cost]) -> Cost {
        let median = |figure: fn(&Cost) -> f64| {
            let mut values: Vec<f64> = of.iter().map(figure).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let [cpu_seconds, peak_mib, settled_mib] = Cost::FIGURES.map(|(_, figure)| median(figure));
        Cost { cpu_seconds, peak_mib, settled_mib }
    }
}

async fn a_client_over_kubefan_costs_no_more_than_one_straight() {
    let wanted = env::var("KUBEFAN_COST_LANGUAGES").unwrap_or_default();
    let programs = tokio::task::spawn_blocking(programs::build_measured).await.unwrap();
    let api = ApiServer::start(Options::default()).await;
    let mut writes = Writes::populate(&api, PODS).await;
    let (certificate, key) = api.server_certificate();
    let [certificate, key] = [&certificate, &key].map(|path| path.to_str().expect("the path is text"));
    let args = ["--resource", "pods", "--tls-cert-file", certificate, "--tls-private-key-file", key];
    let kubefan = Kubefan::start(&api, &args).await;
    println!("the programs are built, and the pods are created");

    let mut costs: BTreeMap<(&str, &str), Vec<Cost>> = BTreeMap::new();
    for round in 0..ROUNDS {
        for (language, program) in &programs {
            let program = match program {
                Ok(program) if wanted.is_empty() || wanted.split(',').any(|it| it == *language) => program,
                Ok(_) => continue,
                Err(missing) => {
                    leave_out(format!("what {language} costs: {missing}"));
                    continue;
                }
            };
            let mut modes: Vec<&Mode> = modes(language).collect();
            if round % 2 == 1 {
                modes.reverse();
            }
            let mut readers = Vec::new();
            for mode in modes {
                readers.push((mode.name, Reader::start(program, mode.name, &api, &kubefan).await));
            }
            writes.more(CHANGES).await;
            writes.flush().await;
            let marker = pod(&format!("last-{language}-{round}"));
            let marker = api.create("/api/v1/namespaces/team-0/pods", &marker).await;
            let objects = api.get_json("/api/v1/pods").await["items"].as_array().map_or(0, Vec::len);
            for (mode, reader) in readers {
                let cost = reader.end(version_of(&marker), objects).await;
                println!("round {}, {language}, {mode}: {cost:?}", round + 1);
                costs.entry((language, mode)).or_default().push(cost);
            }
        }
    }
    let medians = costs.iter().map(|(row, costs)| (*row, Cost::median(costs))).collect();
    let missed = print(&medians);
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Prints the table. Returns the goals that were missed.
fn print(costs: &BTreeMap<(&str, &str), Cost>) -> Vec<String> {
    let mut missed = Vec::new();
    println!("\n| client | reads | CPU s | peak MiB | settled MiB | CPU | peak | settled |");
    println!("|---|---|---|---|---|---|---|---|");
    for language in ["rust", "go", "python", "typescript"] {
        for Mode { name, title, goal } in modes(language) {
            let Some(cost) = costs.get(&(language, name)) else { continue };
            let mut row = format!("| {language} | {title} |");
            for (_, figure) in Cost::FIGURES {
                row += &format!(" {:.1} |", figure(cost));
            }
            for (what, figure) in Cost::FIGURES {
                let Some((other, most)) = goal else {
                    row += " |";
                    continue;
                };
                let ratio = figure(cost) / figure(&costs[&(language, *other)]);
                row += &format!(" {ratio:.2} |");
                if ratio > *most {
                    missed.push(format!("{language}, {title}: {what} is {ratio:.2} of {other}, at most {most}"));
                }
            }
            println!("{row}");
        }
    }
    missed
}

/// A running reader.
struct Reader {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Reader {
    /// Starts a reader, and waits until it has all pods.
    async fn start(measured: &Measured, mode: &str, api: &ApiServer, kubefan: &Kubefan) -> Reader {
        let (program, address) = if mode.starts_with("straight") {
            (&measured.straight, api.url().to_owned())
        } else {
            (&measured.over_kubefan, format!("https://{}", kubefan.grpc_addr))
        };
        let mut command = tokio::process::Command::new(program.get_program());
        command.args(program.get_args());
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.arg(mode).arg(address).arg(api.ca_pem_path()).arg(format!("token-of-{ADMIN}")).args(PATHS);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let name = Path::new(program.get_program()).display().to_string();
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        let input = child.stdin.take().expect("its input is a pipe");
        let lines = BufReader::new(child.stdout.take().expect("its output is a pipe")).lines();
        let mut reader = Reader { child, input, lines };
        reader.answer("ready").await;
        reader.order("start", "synced").await;
        reader
    }

    /// Waits until it has the last change, and returns its cost.
    async fn end(mut self, version: u64, objects: usize) -> Cost {
        let count = self.order(&format!("until {version}"), "current").await;
        assert_eq!(count, objects.to_string(), "the reader has all objects and no others");
        let pid = self.child.id().expect("the reader runs");
        let mib = |figure: &str| memory_of(pid, figure) as f64 / f64::from(1 << 20);
        let cpu_seconds = cpu_seconds(pid);
        let peak_mib = mib("VmHWM");
        self.order("settle", "settled").await;
        let settled_mib = mib("VmRSS");
        drop(self.input);
        let _ = timeout(STEP_AT_MOST, self.child.wait()).await;
        Cost { cpu_seconds, peak_mib, settled_mib }
    }

    async fn order(&mut self, order: &str, answer: &str) -> String {
        self.input.write_all(format!("{order}\n").as_bytes()).await.expect("the reader reads");
        self.answer(answer).await
    }

    async fn answer(&mut self, answer: &str) -> String {
        let line = timeout(STEP_AT_MOST, self.lines.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("no {answer:?} in time")).expect("its output is read");
        let line = line.unwrap_or_else(|| panic!("the reader has ended before {answer:?}"));
        let rest = line.strip_prefix(answer).unwrap_or_else(|| panic!("expected {answer:?}, got {line:?}"));
        rest.trim().to_owned()
    }
}
