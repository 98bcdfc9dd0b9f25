//! Scripts, recordings, and their comparison.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::LocalBoxFuture;
use serde::Deserialize;
use tokio::{task::yield_now, time::sleep};

/// The files of scripts, in the order of the table.
const FILES: [&str; 8] =
    ["store", "undelta", "expiration", "delta_fifo", "real_fifo", "reflector", "informer", "factory"];

/// Turns of the runtime after which every task has done all that it can do without time passing.
const TURNS: usize = 300;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    /// The promise, and the name of the test.
    pub(crate) name: String,
    /// Name of the piece that the steps are applied to.
    pub(crate) piece: String,
    /// The file and function of client-go that keeps the promise.
    pub(crate) source: String,
    pub(crate) steps: Vec<String>,
    pub(crate) differs: Option<Differs>,
}

/// A difference from client-go that is intended.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Differs {
    pub(crate) reason: String,
    /// The lines of this library, by the number of the step.
    pub(crate) steps: BTreeMap<usize, Vec<String>>,
}

/// For each step the step itself, and its observations.
pub(crate) type Recording = Vec<Vec<String>>;

pub(crate) fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/contract")
}

pub(crate) fn scripts() -> Vec<Script> {
    let read = |file| {
        let path = directory().join(format!("scripts/{file}.json"));
        let text = std::fs::read(&path).unwrap();
        serde_json::from_slice::<Vec<Script>>(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    FILES.into_iter().flat_map(read).collect()
}

pub(crate) fn recordings() -> BTreeMap<String, Recording> {
    serde_json::from_slice(&std::fs::read(directory().join("recorded.json")).unwrap()).unwrap()
}

/// A piece of the library that a script is applied to.
pub(crate) trait Piece {
    /// Executes a step, and returns the lines that it answers.
    fn step<'a>(&'a mut self, command: &'a str, arguments: &'a [&'a str]) -> LocalBoxFuture<'a, Vec<String>>;
}

/// Collects the lines of one step. Each channel (the requests, each handler) has its own order.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<BTreeMap<String, Vec<String>>>>);

impl Log {
    pub(crate) fn add(&self, channel: &str, line: impl Into<String>) {
        self.0.lock().unwrap().entry(channel.to_owned()).or_default().push(line.into());
    }

    /// The lines since the last call. Calls whose order client-go leaves to the iteration over a
    /// map are sorted, as in its recording.
    fn take(&self, keep_order: bool) -> Vec<String> {
        let channels = std::mem::take(&mut *self.0.lock().unwrap());
        let lines = channels.into_iter().flat_map(|(channel, mut lines)| {
            if !keep_order {
                sort_runs(&mut lines);
            }
            lines.into_iter().map(move |line| format!("{channel}: {line}"))
        });
        lines.collect()
    }
}

/// Sorts consecutive deletions, and consecutive additions and updates.
fn sort_runs(lines: &mut [String]) {
    let class = |line: &String| match line.split(' ').next() {
        Some("add" | "update") => 1,
        Some("delete") => 2,
        _ => 0,
    };
    for run in lines.chunk_by_mut(|one, next| class(one) != 0 && class(one) == class(next)) {
        run.sort();
    }
}

/// Runs a script and returns the observations.
pub(crate) async fn run(script: &Script, piece: &mut dyn Piece, log: &Log) -> Recording {
    let mut recording = Recording::new();
    for step in &script.steps {
        let words: Vec<_> = step.split(' ').collect();
        let answer = match words[..] {
            ["advance", duration] => {
                sleep(parse_duration(duration)).await;
                Vec::new()
            }
            _ => piece.step(words[0], &words[1..]).await,
        };
        for _ in 0..TURNS {
            yield_now().await;
        }
        let lines = log.take(matches!(words[0], "event" | "unblock"));
        recording.push([step.clone()].into_iter().chain(lines).chain(answer).collect());
    }
    recording
}

/// Compares a recording with client-go's. Panics with all steps that differ without a reason.
pub(crate) fn compare(script: &Script, client_go: &Recording, recording: &Recording) {
    let mut problems = String::new();
    let mut used = HashSet::new();
    for (number, (theirs, ours)) in client_go.iter().zip(recording).enumerate() {
        let intended = script.differs.as_ref().and_then(|differs| differs.steps.get(&number));
        let wanted = match intended {
            Some(lines) => {
                used.insert(number);
                assert_ne!(lines[..], theirs[1..], "step {number} is listed as a difference, and is none");
                [theirs[0].clone()].into_iter().chain(lines.iter().cloned()).collect()
            }
            None => theirs.clone(),
        };
        if *ours != wanted {
            let step = &script.steps[number];
            problems += &format!("\nstep {number}, {step}:\n  wanted {:?}\n  got    {:?}", &wanted[1..], &ours[1..]);
        }
    }
    assert!(problems.is_empty(), "{}: {}{problems}", script.name, script.source);
    assert_eq!(client_go.len(), recording.len(), "{}: the recording is of another script", script.name);
    let listed = script.differs.as_ref().map_or(0, |differs| differs.steps.len());
    assert_eq!(listed, used.len(), "{}: a difference of a step that does not exist", script.name);
}

/// Reads a duration as Go writes it, with one unit.
pub(crate) fn parse_duration(text: &str) -> Duration {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let value: u64 = digits.parse().unwrap();
    match &text[digits.len()..] {
        "ms" => Duration::from_millis(value),
        "s" => Duration::from_secs(value),
        "m" => Duration::from_secs(60 * value),
        "h" => Duration::from_secs(3600 * value),
        unit => panic!("unknown unit {unit}"),
    }
}

/// The value of `name=value` among the arguments. Empty if there is only the name.
pub(crate) fn option<'a>(arguments: &[&'a str], name: &str) -> Option<&'a str> {
    arguments.iter().find_map(|argument| {
        let (key, value) = argument.split_once('=').unwrap_or((argument, ""));
        (key == name).then_some(value)
    })
}
