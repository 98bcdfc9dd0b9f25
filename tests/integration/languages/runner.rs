//! A runner: the program of one language, as a child process. It reads commands as lines of JSON,
//! and writes answers and the reports of its watches and handlers.

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    path::{Path, PathBuf},
    process::{Command as Program, Stdio},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin},
    sync::mpsc,
    time::{Instant, timeout_at},
};

use super::programs;
use crate::harness::{leave_out, process::memory_of, wait};

/// Lines of a runner that wait to be read; more wait in its pipe.
const LINES_AHEAD_MAX: usize = 1_000;

/// Builds and starts the runners of all languages whose tools are installed.
pub(super) async fn start_all(dir: &Path) -> Vec<Runner> {
    let found = tokio::task::spawn_blocking(programs::build).await.expect("the build does not panic");
    let mut runners = Vec::new();
    println!("the runners are built");
    for (language, program) in found {
        match program {
            Ok(program) => {
                let started = Runner::start(language, program, dir.join(language)).await;
                runners.push(started.unwrap_or_else(|why| panic!("{language}: {why}")));
            }
            Err(missing) => leave_out(format!("the client for {language}: {missing}")),
        }
    }
    runners
}

/// A running runner.
pub(super) struct Runner {
    pub(super) language: &'static str,
    /// Features that this language does not offer here.
    pub(super) lacks: Vec<String>,
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<Value>,
    /// Reports that the test has not asked for yet, by source.
    reported: HashMap<String, VecDeque<Value>>,
    errors: PathBuf,
    last_id: u64,
}

impl Runner {
    /// Starts the program, and waits for its first line.
    pub(super) async fn start(language: &'static str, program: Program, errors: PathBuf) -> Result<Runner, String> {
        let mut command = tokio::process::Command::from(program);
        let file = File::create(&errors).map_err(|error| error.to_string())?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file).kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| format!("the runner does not start: {error}"))?;
        let input = child.stdin.take().expect("its input is a pipe");
        let output = child.stdout.take().expect("its output is a pipe");
        let (sender, lines) = mpsc::channel(LINES_AHEAD_MAX);
        tokio::spawn(async move {
            let mut output = BufReader::new(output).lines();
            while let Ok(Some(line)) = output.next_line().await {
                let value = serde_json::from_str(&line).unwrap_or_else(|_| json!({ "from": "", "text": line }));
                if sender.send(value).await.is_err() {
                    return;
                }
            }
        });
        let reported = HashMap::new();
        let mut runner = Runner { language, lacks: Vec::new(), child, input, lines, reported, errors, last_id: 0 };
        let hello = runner.line(Instant::now() + wait::SOON).await?;
        let lacks = hello["lacks"].as_array().ok_or(format!("the first line is {hello}"))?;
        runner.lacks = lacks.iter().filter_map(|it| it.as_str().map(str::to_owned)).collect();
        Ok(runner)
    }

    /// Resident memory of the runner now, in bytes.
    pub(super) fn resident(&self) -> usize {
        memory_of(self.child.id().expect("the runner is running"), "VmRSS")
    }

    /// Sends a command and waits for its answer: its result, or its error.
    pub(super) async fn run(&mut self, mut command: Value) -> Result<Result<Value, Value>, String> {
        self.last_id += 1;
        command["id"] = self.last_id.into();
        let line = format!("{command}\n");
        self.input.write_all(line.as_bytes()).await.map_err(|error| self.ended(&error.to_string()))?;
        // The waits of a runner end after a minute.
        let deadline = Instant::now() + wait::SOON * 3;
        loop {
            let line = self.line(deadline).await.map_err(|error| format!("{error}, in {command}"))?;
            if line["id"] == self.last_id {
                return Ok(if line["ok"].is_object() { Ok(line["ok"].clone()) } else { Err(line["error"].clone()) });
            }
            self.file(line);
        }
    }

    /// The next report of a source.
    pub(super) async fn next(&mut self, from: &str, deadline: Instant) -> Result<Value, String> {
        loop {
            if let Some(item) = self.reported.get_mut(from).and_then(VecDeque::pop_front) {
                return Ok(item);
            }
            let line = self.line(deadline).await?;
            self.file(line);
        }
    }

    /// Ends everything that runs, and forgets the reports.
    pub(super) async fn reset(&mut self) -> Result<(), String> {
        self.run(json!({ "op": "reset" })).await?.map_err(|error| error.to_string())?;
        self.reported.clear();
        Ok(())
    }

    fn file(&mut self, line: Value) {
        let from = line["from"].as_str().unwrap_or_default().to_owned();
        self.reported.entry(from).or_default().push_back(line);
    }

    async fn line(&mut self, deadline: Instant) -> Result<Value, String> {
        match timeout_at(deadline, self.lines.recv()).await {
            Ok(Some(line)) => Ok(line),
            Ok(None) => Err(self.ended("its output has ended")),
            Err(_) => Err("nothing more was reported in time".to_owned()),
        }
    }

    fn ended(&self, why: &str) -> String {
        let errors = std::fs::read_to_string(&self.errors).unwrap_or_default();
        format!("the runner has ended ({why}); it printed:\n{errors}")
    }
}
