//! The reads of a decoder, and the reports of its program: one for each object, and one for the end
//! of a read.

use std::{
    collections::HashMap,
    fmt::Write,
    fs,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use ring::digest::SHA256;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ANY_VERSION, Objects};
use crate::harness::{process::Process, wait};

/// A list or a watch of ConfigMaps, as the programs take it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Read {
    #[serde(rename = "read")]
    pub(super) name: &'static str,
    pub(super) server: String,
    pub(super) namespace: String,
    /// The `resourceVersion`.
    pub(super) version: String,
    pub(super) is_list: bool,
    /// Time after which kubefan ends a watch; 0 for its default.
    pub(super) seconds: u32,
}

impl Read {
    pub(super) const LIST: &'static str = "the list";
    pub(super) const ONE_SECOND: &'static str = "the watch of one second";
    pub(super) const RELAYED: &'static str = "the watch through the link";
    pub(super) const DIRECT: &'static str = "the watch";

    pub(super) fn list(name: &'static str, server: &str, objects: &Objects) -> Read {
        Read {
            name,
            server: server.to_owned(),
            namespace: objects.namespace().to_owned(),
            version: ANY_VERSION.to_owned(),
            is_list: true,
            seconds: 0,
        }
    }

    pub(super) fn watch(name: &'static str, server: &str, objects: &Objects, version: &str) -> Read {
        Read { version: version.to_owned(), is_list: false, ..Read::list(name, server, objects) }
    }

    /// The whole request, for clients that know only HTTP.
    pub(super) fn url(&self) -> String {
        let Read { server, namespace, version, seconds, .. } = self;
        let watch = if self.is_list { "" } else { "&watch=1" };
        let timeout = if *seconds > 0 { format!("&timeoutSeconds={seconds}") } else { String::new() };
        format!("{server}/api/v1/namespaces/{namespace}/configmaps?resourceVersion={version}{watch}{timeout}")
    }
}

/// An object, as a decoder read it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Seen {
    pub(super) name: String,
    pub(super) version: String,
    /// SHA-256 of its payload.
    pub(super) digest: String,
}

/// The end of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum End {
    /// Like a read that kubefan ends.
    Clean,
    Error,
}

/// A line of a program.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Report {
    Object {
        read: String,
        #[serde(flatten)]
        seen: Seen,
    },
    End {
        read: String,
        end: End,
        #[serde(default)]
        error: String,
    },
}

impl Report {
    fn read(&self) -> &str {
        match self {
            Self::Object { read, .. } | Self::End { read, .. } => read,
        }
    }

    fn seen(&self) -> Option<&Seen> {
        match self {
            Self::Object { seen, .. } => Some(seen),
            Self::End { .. } => None,
        }
    }
}

/// The reports of reads in this process.
pub(super) type Shared = Arc<Mutex<Vec<Report>>>;

/// The running reads of a decoder.
pub(super) enum Source {
    /// A program that makes the reports itself.
    Program(Process),
    /// One curl for each read.
    Curl(HashMap<&'static str, Curl>),
    /// Tasks of this process.
    Tasks(Shared),
}

/// A curl that prints the body of one read.
pub(super) struct Curl {
    process: Process,
    dir: PathBuf,
    is_list: bool,
    /// The objects in the lines that are complete.
    seen: Vec<Seen>,
    /// Bytes of these lines.
    parsed: usize,
}

impl Source {
    /// Waits until a watch has reported an object.
    pub(super) async fn sees(&mut self, read: &str, object: &Seen) {
        self.until(&format!("{object:?} in {read}"), |reports| {
            reports.iter().any(|report| report.read() == read && report.seen() == Some(object)).then_some(())
        })
        .await;
    }

    /// The first objects of a read.
    pub(super) async fn first(&mut self, read: &str, count: usize) -> Vec<Seen> {
        self.until(&format!("the first {count} objects of {read}"), |reports| {
            let first: Vec<Seen> = seen_in(reports, read).take(count).cloned().collect();
            (first.len() == count).then_some(first)
        })
        .await
    }

    /// The objects of a read so far.
    pub(super) fn seen(&mut self, read: &str) -> Vec<Seen> {
        seen_in(&self.reports(), read).cloned().collect()
    }

    /// Waits until a read has ended.
    pub(super) async fn ended(&mut self, read: &str) -> (End, String) {
        let end = |report: &Report| match report {
            Report::End { end, error, .. } => Some((*end, error.clone())),
            Report::Object { .. } => None,
        };
        self.until(&format!("the end of {read}"), |reports| {
            reports.iter().filter(|report| report.read() == read).find_map(end)
        })
        .await
    }

    async fn until<T>(&mut self, what: &str, mut found: impl FnMut(&[Report]) -> Option<T>) -> T {
        let found = wait::try_until(wait::SOON, || {
            let found = found(&self.reports());
            async { found }
        })
        .await;
        found.unwrap_or_else(|| panic!("{what} is not reported; the reports are {:#?}{}", self.reports(), self.log()))
    }

    fn reports(&mut self) -> Vec<Report> {
        match self {
            Self::Program(process) => process.log().lines().filter_map(report).collect(),
            Self::Curl(curls) => curls.iter_mut().flat_map(|(read, curl)| curl.reports(read)).collect(),
            Self::Tasks(reports) => reports.lock().unwrap().clone(),
        }
    }

    /// The lines of a program that are no reports.
    fn log(&self) -> String {
        let Self::Program(process) = self else { return String::new() };
        let log = process.log();
        log.lines().filter(|line| report(line).is_none()).fold(String::new(), |log, line| log + "\n" + line)
    }
}

/// The objects of a read.
fn seen_in<'a>(reports: &'a [Report], read: &'a str) -> impl Iterator<Item = &'a Seen> {
    reports.iter().filter(move |report| report.read() == read).filter_map(Report::seen)
}

/// The report in a line. A browser prints it inside a line of its log.
fn report(line: &str) -> Option<Report> {
    let from = line.get(line.find(r#"{"decoder""#)?..)?;
    serde_json::Deserializer::from_str(from).into_iter().next()?.ok()
}

impl Curl {
    /// `dir` has the output of the process.
    pub(super) fn new(process: Process, dir: PathBuf, is_list: bool) -> Curl {
        Curl { process, dir, is_list, seen: Vec::new(), parsed: 0 }
    }

    fn reports(&mut self, read: &str) -> Vec<Report> {
        // Before its output, which is complete then.
        let exited = self.process.exited();
        let text = |name: &str| fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        let stdout = text("stdout");
        for line in stdout.get(self.parsed..).unwrap_or_default().split_inclusive('\n') {
            if !line.trim().is_empty() {
                // curl writes long lines in parts.
                let Ok(body) = serde_json::from_str(line) else { break };
                self.seen.extend(objects(&body, self.is_list));
            }
            self.parsed += line.len();
        }
        let report = |seen: &Seen| Report::Object { read: read.to_owned(), seen: seen.clone() };
        let mut reports: Vec<Report> = self.seen.iter().map(report).collect();
        if let Some(status) = exited {
            let end = if status.success() { End::Clean } else { End::Error };
            reports.push(Report::End { read: read.to_owned(), end, error: text("stderr").trim().to_owned() });
        }
        reports
    }
}

/// The objects of a list, or that of an event.
pub(super) fn objects(body: &Value, is_list: bool) -> impl Iterator<Item = Seen> {
    let objects =
        if is_list { body["items"].as_array().cloned().unwrap_or_default() } else { vec![body["object"].clone()] };
    objects.into_iter().map(|object| seen(&object))
}

/// The part of a ConfigMap that decoders report.
pub(super) fn seen(object: &Value) -> Seen {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    Seen {
        name: text("/metadata/name").to_owned(),
        version: text("/metadata/resourceVersion").to_owned(),
        digest: digest(text("/data/payload")),
    }
}

/// SHA-256, in hexadecimal digits.
pub(super) fn digest(text: &str) -> String {
    let digest = ring::digest::digest(&SHA256, text.as_bytes());
    digest.as_ref().iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
